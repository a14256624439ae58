"""Points of a sweep: plans with what they cost and what that buys, and which of them no other one beats."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from pydantic import Field

from atoll.core.frozen import Frozen
from atoll.plan.footprint import Drawn

Axis = Literal["latency", "error", Drawn]
"""Axes that dollars are swept against: promises, wrong answers, and what machines draw in an hour."""
AXES: tuple[Axis, ...] = get_args(Axis)
ON_THE_WAY = "on the way"
"""Label of a plan that was found while another one was asked for."""
_VALUE_TOLERANCE = 1e-9
"""Relative difference of costs and values that counts as rounding."""
_ALL_SERVED = 1.0 - 1e-9
"""Share of demand from which on it counts as met."""


class ParetoPoint(Frozen):
    """A plan on a sweep: what was asked, what it costs, and its value on the axis that is swept.

    `value` is a multiple of today's promises, a share of wrong answers, watts, or kg CO2 per hour, by the
    axis. `served` is the least share of its demand that a service gets: below 1 the point is no fair one, and
    not on the curve. `kept` says whether all promises were kept in simulation, None where only capacity was
    planned. `dominated` says that another point is no worse in both, and better in one.
    """

    asked: str
    usd_per_hour: float = Field(ge=0)
    value: float = Field(ge=0)
    watts: float | None = None
    kg_per_hour: float | None = None
    error: float | None = None
    nodes: int = 0
    gpus: int = 0
    served: float = 1.0
    kept: bool | None = None
    dominated: bool = False
    today: bool = False
    plan_hash: str = ""

    @property
    def fair(self) -> bool:
        """Whether it serves all demand and keeps what it was asked to keep."""
        return self.served >= _ALL_SERVED and self.kept is not False


class ParetoFront(Frozen):
    """Points of one sweep, by value; the curve is those that are fair and not dominated."""

    against: Axis
    points: tuple[ParetoPoint, ...]

    @property
    def curve(self) -> tuple[ParetoPoint, ...]:
        """The points that no other one beats."""
        return tuple(point for point in self.points if point.fair and not point.dominated)

    @property
    def left_out(self) -> int:
        """How many points are not on the curve."""
        return len(self.points) - len(self.curve)


class ParetoReport(Frozen):
    """All sweeps of a fleet; `plans` is how many plans were made for them."""

    fleet: str
    fronts: tuple[ParetoFront, ...]
    plans: int


def mark(points: Iterable[ParetoPoint]) -> tuple[ParetoPoint, ...]:
    """Return points by value, those dominated marked; of equals one is kept, today's before others."""
    best: dict[tuple[str, str], ParetoPoint] = {}
    for point in points:
        key = (f"{point.usd_per_hour:.9g}", f"{point.value:.9g}")
        if key not in best or _weight(point) > _weight(best[key]):
            best[key] = point
    ordered = sorted(best.values(), key=lambda p: (p.value, p.usd_per_hour, not p.today, p.asked))
    fair = [point for point in ordered if point.fair]
    return tuple(
        point.model_copy(
            update={"dominated": point.fair and any(_beats(other, point) for other in fair)}
        )
        for point in ordered
    )


def _weight(point: ParetoPoint) -> tuple[bool, bool, bool]:
    return (point.fair, point.today, point.asked != ON_THE_WAY)


def _beats(one: ParetoPoint, other: ParetoPoint) -> bool:
    dear, much = other.usd_per_hour, other.value
    no_worse = one.usd_per_hour <= dear * (1.0 + _VALUE_TOLERANCE) and one.value <= much * (
        1.0 + _VALUE_TOLERANCE
    )
    better = one.usd_per_hour < dear * (1.0 - _VALUE_TOLERANCE) or one.value < much * (
        1.0 - _VALUE_TOLERANCE
    )
    return no_worse and better
