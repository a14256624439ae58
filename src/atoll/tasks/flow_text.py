"""The flow of a task as lines of text and as plain data."""

from __future__ import annotations

from html import escape
from typing import Any

from atoll.tasks.flow import FlowStep, TaskFlow


def flow_data(flow: TaskFlow) -> dict[str, Any]:
    """Return a flow as JSON has it: steps by number, and who takes what of whom."""
    return {
        "task": flow.task,
        "request": flow.request,
        "reply": flow.reply,
        "ways": flow.ways,
        "steps": [
            {
                "number": step.number + 1,
                "unit": step.unit,
                "component": step.component,
                "streams": step.streams,
                "always": step.always,
                "repeats": step.repeats,
                "takes": [number + 1 for number in step.takes],
                "cuts": [number + 1 for number in step.cuts],
                "after": [number + 1 for number in step.after],
            }
            for step in flow.steps
        ],
        "answer": {name: [number + 1 for number in of] for name, of in flow.answer.items()},
        "notes": flow.notes,
    }


def depths(flow: TaskFlow) -> list[int]:
    """Return how many steps lie before each step at most, circles left out."""
    found = [-1] * len(flow.steps)

    def depth(number: int, above: frozenset[int]) -> int:
        if number in above:
            return -1
        if found[number] < 0:
            before = [
                *flow.steps[number].takes,
                *flow.steps[number].cuts,
                *flow.steps[number].after,
            ]
            found[number] = 1 + max(
                [depth(other, above | {number}) for other in before], default=-1
            )
        return found[number]

    return [depth(step.number, frozenset()) for step in flow.steps]


def describe_step(step: FlowStep) -> str:
    """Return what is to be said of a step besides its name."""
    said = []
    if not step.always:
        said.append("at times")
    if step.repeats:
        said.append("repeated")
    if step.cuts:
        said.append("for each piece")
    if step.streams:
        said.append("streams")
    return ", ".join(said)


def draw_flow(flow: TaskFlow) -> str:
    """Return a flow as a tree: every step under the last one it waits for, with what else it takes."""
    depth = depths(flow)
    below: dict[int, list[int]] = {}
    for step in flow.steps:
        before = [
            number
            for number in (*step.takes, *step.cuts, *step.after)
            if depth[number] < depth[step.number]
        ]
        parent = max(before, key=lambda number: (depth[number], -number), default=-1)
        below.setdefault(parent, []).append(step.number)
    lines = [f"{flow.task}: {flow.request} -> {flow.reply}", flow.request]
    for at, number in enumerate(below.get(-1, [])):
        _draw_step(flow, below, number, "", at == len(below[-1]) - 1, lines)
    if not flow.steps:
        lines.append("`- (no component)")
    lines.append(flow.reply)
    width = max(map(len, flow.answer), default=0)
    for name, of in flow.answer.items():
        source = ", ".join(_label(flow.steps[number]) for number in of) or "known at once"
        lines.append(f"   {name:<{width}}  <- {source}")
    return "\n".join([*lines, *(f"note: {note}" for note in flow.notes)])


def _label(step: FlowStep) -> str:
    return f"{step.number + 1} {step.component}"


def _draw_step(
    flow: TaskFlow,
    below: dict[int, list[int]],
    number: int,
    indent: str,
    is_last: bool,
    lines: list[str],
) -> None:
    step = flow.steps[number]
    facts = [f"({step.unit})"] if step.unit != step.component else []
    if said := describe_step(step):
        facts.append(said)
    links = [
        ("takes", step.takes),
        ("cuts", step.cuts),
        ("after looking at", step.after),
    ]
    facts += [f"{word} {', '.join(str(n + 1) for n in of)}" for word, of in links if of]
    head = [facts[0]] if facts and facts[0].startswith("(") else []
    tail = "; ".join(facts[len(head) :])
    text = " ".join([_label(step), *head]) + (f": {tail}" if tail else "")
    lines.append(f"{indent}{'`' if is_last else '|'}- {text}")
    children = below.get(number, [])
    for at, child in enumerate(children):
        deeper = indent + ("   " if is_last else "|  ")
        _draw_step(flow, below, child, deeper, at == len(children) - 1, lines)


_WIDTH = 190
_HEIGHT = 52
"""Pixels of the box of a component; gaps lie between boxes, the margin around all."""
_GAP_X = 70
_GAP_Y = 26
_MARGIN = 24
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
