"""Cost of certainty: lines and a table in a terminal, a curve in a page or an SVG file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.core.units import format_price, format_share, format_usd
from atoll.report.promises import PromiseVerdict
from atoll.report.render import AxisTick, Grid, render_svg

if TYPE_CHECKING:
    from rich.console import RenderableType

    from atoll.plan.plan import Plan
    from atoll.plan.robustness import CertaintyLevel, Robustness

_WIDTH = 640.0
_HEIGHT = 300.0
"""Pixels of the whole drawing; the next four are its margins."""
_LEFT = 64.0
_RIGHT = 24.0
_TOP = 26.0
_BOTTOM = 44.0
_TICKS = 4
_MIN_SPAN = 1e-9
"""Least span of an axis, so that a curve of one point divides by something."""


def judge_robustness(plan: Plan) -> list[PromiseVerdict]:
    """Return in a line how often a plan holds when things turn out otherwise; nothing where nobody asked."""
    found = plan.robustness
    if found is None:
        return []
    level, first = found.level, found.nominal
    if level.asked is None:
        text = f"holds in {_percent(level.holds)} of scenarios"
    else:
        missing = f", {100 * level.shortfall:.1f} points less" if level.shortfall > 0 else ""
        text = f"holds in {_percent(level.holds)} of scenarios ({_percent(level.asked)} asked for{missing})"
    text += (
        f": {_percent(level.low)} to {_percent(level.high)} with 95% confidence, judged with "
        f"{found.judged} fresh scenarios of which {found.simulated} were simulated"
    )
    if level.asked is not None:
        more = level.expected_usd_per_hour - first.expected_usd_per_hour
        text += (
            f"; the plan that knows of no risk holds in {_percent(first.holds)} and costs "
            f"{format_price(max(0.0, more))} less"
        )
    if found.capped:
        text += ". Nothing that was found holds as often as asked for"
    return [PromiseVerdict(f"{plan.problem_name} {text}", level.shortfall <= 0.0)]


def list_levels(found: Robustness) -> Grid:
    """Return a row for each level of the curve, the plan that knows of no risk first."""
    priced = found.unserved_usd_per_1000 is not None
    spot = any(level.spot_nodes for level in found.levels)
    columns = ["asked", "holds in", "95% confidence", "requests kept", "nodes"]
    columns += ["spot"] * spot + ["$/h expected", "more"] + ["broken $/h", "total $/h"] * priced
    columns.append("")
    rows = []
    for at, level in enumerate(found.levels):
        nominal = found.nominal.expected_usd_per_hour
        more = level.expected_usd_per_hour / nominal - 1.0 if nominal else 0.0
        row: list[object] = [
            "no risk" if level.asked is None else _percent(level.asked),
            _percent(level.holds),
            f"{_percent(level.low)} to {_percent(level.high)}",
            _percent(level.requests_kept),
            level.nodes,
        ]
        row += [level.spot_nodes] * spot
        row += [format_usd(level.expected_usd_per_hour), f"{100 * more:+.0f}%" if at else None]
        if priced:
            row += [format_usd(level.unserved_usd or 0.0), format_usd(level.expected_total_usd)]
        notes = ["this plan"] * (at == found.chosen) + ["least total"] * (at == found.best)
        row.append(", ".join(notes))
        rows.append(row)
    return Grid(columns, rows, [name for name in columns if name])


def describe_risk(found: Robustness) -> str:
    """Say in a line what may turn out otherwise, and by how much."""
    risk = found.risk
    parts = [f"demand ±{format_share(risk.demand_sd)}"]
    parts += [f"of {name} ±{format_share(sd)}" for name, sd in risk.demand_sd_of.items()]
    if any(level.spot_nodes for level in found.levels):
        parts.append(f"spot prices ±{format_share(risk.spot_price_sd)}")
        lost = format_share(risk.spot_loss or 0.0)
        parts.append(f"spot machines of a type in a region lost in an hour: {lost}")
    if risk.performance:
        parts.append("times as far off as the performance model's constants may be")
    text = f"Scenarios: {', '.join(parts)}."
    if found.unserved_usd_per_1000 is not None:
        price = format_usd(found.unserved_usd_per_1000)
        text += f" Broken: requests that do not keep their promises, at {price} per 1,000."
    return text


def draw_robustness(plan: Plan) -> list[RenderableType]:
    """Return what certainty costs, for a terminal; nothing where nobody asked."""
    from atoll.report.terminal import tighten

    found = plan.robustness
    if found is None:
        return []
    caption = f"{describe_risk(found)} A plan holds where every service keeps its promises."
    return [tighten(list_levels(found).draw("What certainty costs", caption))]


@dataclass(frozen=True)
class CurvePoint:
    """A level of the curve where it is drawn, in pixels, and what is written there."""

    x: float
    y: float
    low: float
    high: float
    label: str
    title: str
    chosen: bool
    anchor: str


@dataclass(frozen=True)
class CertaintyCurve:
    """Expected USD/h (up) by the share of fresh scenarios in which plans hold (right), placed in pixels."""

    width: float
    height: float
    left: float
    right: float
    bottom: float
    points: Sequence[CurvePoint]
    across: Sequence[AxisTick]
    up: Sequence[AxisTick]
    title: str

    @property
    def path(self) -> str:
        """The line through the points, as an SVG path."""
        return " ".join(
            f"{'M' if not at else 'L'}{p.x:.1f} {p.y:.1f}" for at, p in enumerate(self.points)
        )


def draw_curve(found: Robustness) -> CertaintyCurve:
    """Return the curve of what certainty costs."""
    distinct: dict[tuple[float, float], list[int]] = {}
    for at, level in enumerate(found.levels):
        distinct.setdefault((level.holds, level.expected_usd_per_hour), []).append(at)
    left = max(0.0, min(level.low for level in found.levels) - 0.02)
    usd = [level.expected_usd_per_hour for level in found.levels]
    floor, top = 0.9 * min(usd), 1.05 * max(usd)

    def x(share: float) -> float:
        return _LEFT + (share - left) / max(1.0 - left, _MIN_SPAN) * (_WIDTH - _LEFT - _RIGHT)

    def y(cost: float) -> float:
        return (
            _HEIGHT
            - _BOTTOM
            - (cost - floor) / max(top - floor, _MIN_SPAN) * (_HEIGHT - _TOP - _BOTTOM)
        )

    points = []
    for (share, cost), places in distinct.items():
        levels = [found.levels[at] for at in places]
        far = x(share) > 0.7 * _WIDTH
        points.append(
            CurvePoint(
                x(share),
                y(cost),
                x(levels[0].low),
                x(levels[0].high),
                ", ".join(_name(level) for level in levels),
                f"{format_price(cost)}, holds in {_percent(share)} of scenarios",
                found.chosen in places,
                "end" if far else "start",
            )
        )
    across = [left + (1.0 - left) * at / _TICKS for at in range(_TICKS + 1)]
    up = [floor + (top - floor) * at / _TICKS for at in range(_TICKS + 1)]
    return CertaintyCurve(
        _WIDTH,
        _HEIGHT,
        _LEFT,
        _WIDTH - _RIGHT,
        _HEIGHT - _BOTTOM,
        sorted(points, key=lambda point: (point.x, -point.y)),
        [AxisTick(x(share), f"{100 * share:.0f}%") for share in across],
        [AxisTick(y(cost), format_usd(cost)) for cost in up],
        "What certainty costs: USD/h by the share of scenarios in which all promises are kept",
    )


def render_curve_svg(found: Robustness) -> str:
    """Return the curve as the text of an SVG file."""
    return render_svg("certainty.svg.j2", {"drawing": draw_curve(found), "standalone": True})


def _name(level: CertaintyLevel) -> str:
    return "no risk" if level.asked is None else _percent(level.asked)


def _percent(share: float) -> str:
    """A share as people say it: "95%", "98.4%"; never 100 % for what is not all."""
    shown = f"{100 * share:.1f}"
    if shown == "100.0" and share < 1.0:
        shown = "99.9"
    return f"{shown.removesuffix('.0')}%"
