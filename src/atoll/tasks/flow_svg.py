"""The flow of a task as a picture: columns from request to answer, arrows for what flows."""

from __future__ import annotations

from html import escape

from atoll.tasks.flow import TaskFlow
from atoll.tasks.flow_text import depths, describe_step

_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _MARGIN = 190, 52, 70, 26, 24
_STYLE = (
    "text{font:13px sans-serif;fill:#123}.small{font-size:11px;fill:#456}"
    "rect{fill:#eef6f6;stroke:#177;rx:6}.ends{fill:#fff}"
    "path{fill:none;stroke:#177;stroke-width:1.4;marker-end:url(#tip)}"
    ".look{stroke-dasharray:4 4;stroke:#888}.pieces{stroke-width:3}"
)


def draw_svg(flow: TaskFlow) -> str:
    """Return an SVG: thick arrows carry pieces of streams, dashed ones say that the code looked."""
    depth = depths(flow)
    columns: list[list[int]] = [[] for _ in range(max(depth, default=-1) + 1)]
    for number, column in enumerate(depth):
        columns[column].append(number)
    tallest = max([1, len(flow.answer), *map(len, columns)])
    height = 2 * _MARGIN + tallest * (_HEIGHT + _GAP_Y)
    width = 2 * _MARGIN + (len(columns) + 2) * (_WIDTH + _GAP_X) - _GAP_X

    def place(column: int, row: int, rows: int) -> tuple[float, float]:
        free = height - 2 * _MARGIN - rows * (_HEIGHT + _GAP_Y)
        x = _MARGIN + column * (_WIDTH + _GAP_X)
        return x, _MARGIN + free / 2 + row * (_HEIGHT + _GAP_Y)

    places = {
        number: place(column + 1, row, len(numbers))
        for column, numbers in enumerate(columns)
        for row, number in enumerate(numbers)
    }
    request = place(0, 0, 1)
    boxes = [_box(request, flow.request, "request", "ends")]
    arrows: list[str] = []
    for step in flow.steps:
        at = places[step.number]
        boxes.append(_box(at, step.component, " ".join([step.unit, describe_step(step)]).strip()))
        if not (step.takes or step.cuts):
            arrows.append(_arrow(request, at, ""))
        for kind, sources in (("", step.takes), ("pieces", step.cuts), ("look", step.after)):
            arrows += [_arrow(places[source], at, kind) for source in sources]
    for row, (name, sources) in enumerate(flow.answer.items()):
        at = place(len(columns) + 1, row, len(flow.answer))
        boxes.append(_box(at, name, flow.reply, "ends"))
        for source in sources:
            kind = "pieces" if flow.steps[source].streams else ""
            arrows.append(_arrow(places[source], at, kind))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}">'
        f"<title>{escape(flow.task)}</title><style>{_STYLE}</style>"
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" '
        'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0L8 4L0 8z" '
        'style="fill:#177;stroke:none;marker-end:none"/></marker></defs>'
        + "".join([*arrows, *boxes])
        + "</svg>\n"
    )


def _box(at: tuple[float, float], title: str, below: str, kind: str = "") -> str:
    x, y = at
    shape = f' class="{kind}"' if kind else ""
    return (
        f'<rect{shape} x="{x:g}" y="{y:g}" width="{_WIDTH}" height="{_HEIGHT}"/>'
        f'<text x="{x + 10:g}" y="{y + 22:g}">{escape(title)}</text>'
        f'<text class="small" x="{x + 10:g}" y="{y + 40:g}">{escape(below)}</text>'
    )


def _arrow(source: tuple[float, float], to: tuple[float, float], kind: str) -> str:
    x1, y1 = source[0] + _WIDTH, source[1] + _HEIGHT / 2
    x2, y2 = to[0], to[1] + _HEIGHT / 2
    bend = max(30.0, (x2 - x1) / 2)
    shape = f' class="{kind}"' if kind else ""
    return (
        f'<path{shape} d="M{x1:g} {y1:g}C{x1 + bend:g} {y1:g} {x2 - bend:g} {y2:g} {x2:g} {y2:g}"/>'
    )
