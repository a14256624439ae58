"""Pareto fronts of cost: a table for each sweep in a terminal, and one page with a curve for each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from atoll.core.units import format_share, pluralize
from atoll.plan.footprint import DRAWN, Drawn
from atoll.prove.front import Axis, ParetoFront, ParetoPoint, ParetoReport
from atoll.report.render import AxisTick, Grid, render_fragment, render_page

if TYPE_CHECKING:
    from rich.console import RenderableType

_NAMES: dict[Axis, str] = {
    "latency": "what faster answers cost",
    "error": "what fewer wrong answers cost",
    "energy": "what less energy costs",
    "carbon": "what less carbon costs",
}
_VALUES: dict[Axis, str] = {
    "latency": "promise, times today's",
    "error": "wrong answers",
    **{name: drawn.column for name, drawn in DRAWN.items()},
}
_SAYS: dict[Axis, str] = {
    "latency": "how slow answers may be (1: as promised today)",
    "error": "answers that are wrong",
    "energy": "power that its machines draw, kW",
    "carbon": "carbon dioxide, kg an hour",
}
"""What is swept, for people who never saw such a drawing."""
_LETTER = 6.6
_LINE = 14.0
"""Pixels of a letter and of a line of a label."""
_WIDTH = 720
_HEIGHT = 380
"""Pixels of the whole drawing; the next four are where its axes end."""
_LEFT = 64
_RIGHT = 696
_TOP = 28
_BOTTOM = 320
_TICKS = 5
_RIGHT_COLUMNS = ("$/h", *_VALUES.values(), "machines", "GPUs", "served")


@dataclass(frozen=True)
class CurveDot:
    """A plan in a drawing, in pixels; faint where it is not on the curve.

    `label` is all that is known of it; `says` stands beside it, ending at it where it has no room to begin.
    """

    x: float
    y: float
    label: str
    today: bool
    faint: bool
    says: str = ""
    ends: bool = False


@dataclass(frozen=True)
class CurveDrawing:
    """One sweep as a drawing: grid, dots, and the steps that join those on the curve."""

    title: str
    x_name: str
    x_ticks: tuple[AxisTick, ...]
    y_ticks: tuple[AxisTick, ...]
    dots: tuple[CurveDot, ...]
    steps: str
    width: int = _WIDTH
    height: int = _HEIGHT
    left: int = _LEFT
    right: int = _RIGHT
    top: int = _TOP
    bottom: int = _BOTTOM


def draw_pareto(report: ParetoReport) -> RenderableType:
    """Return all sweeps for a terminal."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    for front in report.fronts:
        parts.append(list_points(front).draw(_name_front(front)))
        note = _note(front)
        if note:
            parts.append(Text(note))
    parts.append(Text(_headline(report)))
    return Group(*parts)


def render_pareto_page(report: ParetoReport) -> str:
    """Return all sweeps as one self-contained HTML page, a curve for each."""
    return render_page("pareto.html.j2", _page_data(report))


def render_pareto_fragment(report: ParetoReport) -> str:
    """Return all sweeps as a piece of HTML for a notebook."""
    return render_fragment("pareto.html.j2", _page_data(report))


def _page_data(report: ParetoReport) -> dict[str, object]:
    return {
        "title": f"What a dollar buys: {report.fleet}",
        "headline": _headline(report),
        "fronts": [
            {
                "name": _name_front(front),
                "drawing": draw_curve(front),
                "points": list_points(front, every=True),
                "note": _note(front),
            }
            for front in report.fronts
        ],
    }


def _name_front(front: ParetoFront) -> str:
    name = _NAMES[front.against]
    return f"{name[0].upper()}{name[1:]}"


def list_points(front: ParetoFront, *, every: bool = False) -> Grid:
    """Return the points of the curve, and today's, as a table; `every` one with why it is not there."""
    shown = [p for p in front.points if every or p.today or (p.fair and not p.dominated)]
    beside: list[Drawn] = [
        axis
        for axis in DRAWN
        if axis != front.against and any(_drawn(point, axis) is not None for point in shown)
    ]
    names = [_VALUES[axis] for axis in beside]
    rows = [
        (
            f"{point.usd_per_hour:.2f}",
            format_value(front.against, point.value),
            *(
                None if (value := _drawn(point, axis)) is None else format_value(axis, value)
                for axis in beside
            ),
            point.nodes,
            point.gpus,
            point.asked,
            _say(point),
        )
        for point in shown
    ]
    columns = ("$/h", _VALUES[front.against], *names, "machines", "GPUs", "asked", "")
    return Grid(columns, rows, _RIGHT_COLUMNS)


def _drawn(point: ParetoPoint, axis: Drawn) -> float | None:
    """Figure of what a plan draws; points have those of energy and carbon whatever is swept."""
    found: float | None = getattr(point, DRAWN[axis].figure, None)
    return found


def format_value(axis: Axis, value: float) -> str:
    """Write what a point is worth on an axis."""
    if axis == "latency":
        return f"{value:.2f}"
    if axis == "error":
        return format_share(value)
    return DRAWN[axis].column_form.format(value / DRAWN[axis].column_scale)


def draw_curve(front: ParetoFront) -> CurveDrawing:
    """Return a sweep as a drawing: dollars upwards, what is swept to the right."""
    scales = {name: drawn.column_scale for name, drawn in DRAWN.items() if name == front.against}
    unit = 1.0 / next(iter(scales.values()), 1.0)
    served = [point for point in front.points if point.served > 0.0]
    xs = _Scale([point.value * unit for point in served], _LEFT, _RIGHT)
    ys = _Scale([point.usd_per_hour for point in served], _BOTTOM, _TOP)
    dots = tuple(
        CurveDot(
            xs.at(point.value * unit),
            ys.at(point.usd_per_hour),
            f"{point.asked}: ${point.usd_per_hour:.2f}/h, "
            f"{format_value(front.against, point.value)}",
            point.today,
            point.dominated or not point.fair,
        )
        for point in served
    )
    return CurveDrawing(
        title="Each dot is a plan. Along the line nothing does as well for less; hollow dots cost more than"
        " they need to, or serve too little.",
        x_name=_SAYS[front.against],
        x_ticks=xs.ticks(percent=front.against == "error"),
        y_ticks=ys.ticks(),
        dots=_label_dots(served, dots),
        steps=_steps(front.curve, xs, ys, unit),
    )


def _label_dots(points: Sequence[ParetoPoint], dots: Sequence[CurveDot]) -> tuple[CurveDot, ...]:
    """Return the dots with prices beside those on the curve, today's first, as far as there is room."""
    order = sorted(
        (at for at, dot in enumerate(dots) if dot.today or not dot.faint),
        key=lambda at: (not dots[at].today, dots[at].x),
    )
    taken: list[tuple[float, float, float]] = []
    labelled = list(dots)
    for at in order:
        dot, price = dots[at], f"${points[at].usd_per_hour:.2f}/h"
        says = f"today: {price}" if dot.today else price
        wide = _LETTER * len(says) + 10.0
        ends = dot.x + wide > _WIDTH
        left, y = dot.x - wide if ends else dot.x, dot.y - 8.0
        if any(
            left < right and begins < left + wide and abs(y - other) < _LINE
            for begins, right, other in taken
        ):
            continue
        taken.append((left, left + wide, y))
        labelled[at] = replace(dot, says=says, ends=ends)
    return tuple(labelled)


def _steps(curve: tuple[ParetoPoint, ...], xs: _Scale, ys: _Scale, unit: float) -> str:
    """The edge of what can be had: a plan also stands for all that allows more and costs as much."""
    corners: list[tuple[float, float]] = []
    for point in curve:
        x, y = xs.at(point.value * unit), ys.at(point.usd_per_hour)
        if corners:
            corners.append((x, corners[-1][1]))
        corners.append((x, y))
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)


class _Scale:
    """Values along a line of pixels, with a little room at both ends."""

    def __init__(self, values: list[float], start: float, end: float) -> None:
        low, high = (min(values), max(values)) if values else (0.0, 1.0)
        room = 0.06 * (high - low) or max(0.1 * abs(high), 0.5)
        self.low, self.high = max(0.0, low - room), high + room
        self.start, self.end = start, end

    def at(self, value: float) -> float:
        """Return where a value is, in pixels."""
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, *, percent: bool = False) -> tuple[AxisTick, ...]:
        """Return round numbers along the line."""
        width = self.high - self.low
        step = 10.0 ** math.floor(math.log10(width / _TICKS))
        step *= next(m for m in (1, 2, 5, 10) if width / (step * m) <= _TICKS)
        first = math.ceil(self.low / step)
        last = math.floor(self.high / step)
        digits = max(0, -math.floor(math.log10(step) + 1e-9))
        return tuple(
            AxisTick(
                self.at(i * step),
                f"{100 * i * step:.{max(0, digits - 2)}f}%"
                if percent
                else f"{i * step:.{digits}f}",
            )
            for i in range(first, last + 1)
        )


def _say(point: ParetoPoint) -> str:
    said = []
    if point.today:
        said.append("today")
    if point.served < 1.0 - 1e-9:
        said.append(f"serves {format_share(point.served)}")
    if point.kept is False:
        said.append("promises not kept")
    if point.dominated:
        said.append("dominated")
    return ", ".join(said)


def _note(front: ParetoFront) -> str:
    if not front.points:
        return "There is no plan, whatever is asked."
    if not front.left_out:
        return ""
    return f"{pluralize(front.left_out, 'plan')} beaten by others, or serving too little, left out."


def _headline(report: ParetoReport) -> str:
    return f"{report.fleet}: {pluralize(report.plans, 'plan')} made."
