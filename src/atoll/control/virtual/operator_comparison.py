"""All contenders in one world, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from atoll.control.decision.control_view import ControlPolicy
from atoll.control.virtual.contenders import (
    AtollOperator,
    ReactiveOperator,
    RollingOperator,
    StaticOperator,
    find_oracle,
    plan_static,
)
from atoll.control.virtual.fluid_calibration import CalibratedFleet
from atoll.control.virtual.virtual_run import (
    FleetOperator,
    OperationResult,
    VirtualSetting,
    operate,
)

CONTENDERS = ("atoll", "static-peak", "static-mean", "reactive", "rolling", "oracle")
Tell = Callable[[str, float], None]
"""Told whose turn it is, and which share of it is done."""


@dataclass(frozen=True, slots=True)
class OperationSummary:
    """A contender in a row: dollars, the share of requests that kept their promises, points above the target
    of the worst service or class, seconds short and what of them could have been prevented, starts, and
    dollars that Atoll saves against it.
    """

    name: str
    usd: float
    usd_per_day: float
    kept_share: float | None
    points_above_target: float | None
    short_s: float | None
    below_demand_s: float | None
    starts: int | None
    atoll_saves_usd: float | None


def compare_operators(
    setting: VirtualSetting,
    fleet: CalibratedFleet,
    names: Sequence[str] = CONTENDERS,
    *,
    policy: ControlPolicy | None = None,
    tell: Tell = lambda _name, _share: None,
) -> Iterator[OperationResult]:
    """Yield what each contender paid and kept; each has a planner of its own, so that none warms others'."""
    for name in names:
        tell(name, 0.0)
        if name == "oracle":
            yield find_oracle(setting, fleet.planner.renewed())
            continue
        operator = make_operator(name, setting, fleet, policy)
        yield operate(setting, operator, on_progress=lambda share, name=name: tell(name, share))  # type: ignore[misc]


def make_operator(
    name: str,
    setting: VirtualSetting,
    fleet: CalibratedFleet,
    policy: ControlPolicy | None = None,
) -> FleetOperator:
    """Return a contender by name."""
    planner = fleet.planner.renewed()
    if name == "atoll":
        return AtollOperator(setting.problem, planner, policy)
    if name == "static-peak":
        return StaticOperator(name, plan_static(setting, planner, lambda r: float(r.max())))
    if name == "static-mean":
        return StaticOperator(name, plan_static(setting, planner, lambda r: float(r.mean())))
    if name == "reactive":
        base = planner(setting.problem) if setting.problem.graph_services else None
        return ReactiveOperator(setting.problem, planner.templates, base=base)
    return RollingOperator(setting.problem, planner)


def summarize_operations(results: Sequence[OperationResult]) -> list[OperationSummary]:
    """Return all contenders in rows; of the oracle only the cost is meant."""
    atoll = next((one.usd for one in results if one.name == "atoll"), None)
    rows = []
    for one in results:
        real = one.name != "oracle"
        rows.append(
            OperationSummary(
                name=one.name,
                usd=one.usd,
                usd_per_day=one.usd / one.days,
                kept_share=one.kept_share if real else None,
                points_above_target=one.points_above_target if real else None,
                short_s=one.short_s if real else None,
                below_demand_s=one.below_demand_s if real else None,
                starts=one.events.get("starts") if real else None,
                atoll_saves_usd=None if atoll is None else one.usd - atoll,
            )
        )
    return rows
