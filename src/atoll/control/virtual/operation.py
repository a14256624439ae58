"""Operating a fleet in virtual time: what it would have cost, and kept, beside other ways to do so."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from atoll.core.errors import InfeasibleError, UsageError
from atoll.core.listener import Listener
from atoll.core.units import parse_rate, parse_share

if TYPE_CHECKING:
    from atoll.control.virtual.market import MarketSeries
    from atoll.control.virtual.virtual_demand import DemandSeries, TrafficStatistics
    from atoll.control.virtual.virtual_run import OperationResult
    from atoll.control.virtual.world import WorldSettings
    from atoll.plan.problem import Problem

GENERATED = "generated"
"""Word for traffic or prices that are drawn."""
_DAYS = 7.0
_HISTORY_DAYS = 14.0
_MAX_DAYS = 400.0
_MAX_MIX = 1.0


def simulate_operation(
    problem: Problem,
    trace: str = GENERATED,
    *,
    days: float | None = None,
    prices: str | None = None,
    failures: str | float | None = None,
    mix: str | float | None = None,
    seed: int = 0,
    listener: Listener | None = None,
) -> list[OperationResult]:
    """Operate a fleet under a trace in virtual time, beside other ways to do so; the first is Atoll's.

    `trace` is a file, a workload in words or "generated"; `days` of it, all unless given. `prices` are a CSV
    file, "generated", or None for prices that stay; `failures` of a node as "0.001/h". `mix` is how far the
    shares of classes of any-to-any services move, a standard deviation as "30%".
    """
    from atoll.control.virtual.fluid_calibration import calibrate_fleet
    from atoll.control.virtual.operator_comparison import compare_operators
    from atoll.control.virtual.virtual_run import VirtualSetting
    from atoll.solve.registry import require_packages

    if days is not None and not 0.0 < days <= _MAX_DAYS:
        raise UsageError(f"{days:g} days", hint=f"up to {_MAX_DAYS:g}", field="days")
    require_packages()
    for name in problem.variants:
        raise UsageError(
            f"{name} has a choice of models, which virtual time does not know",
            hint="give it one model for this, or operate the fleet itself",
        )
    if problem.cluster is not None:
        raise InfeasibleError(
            f"{problem.name} stands on machines of its own",
            hint="virtual time is for fleets that rent: there is nothing to save otherwise",
        )
    _refuse_limits(problem)
    machines = read_failures(failures)
    demand = read_demand(problem, trace, days, seed, read_mix(problem, mix))
    market = read_prices(problem, prices, demand.minutes / 1440.0, seed)
    listener = listener or Listener()
    with listener.working("sizing templates") as say:
        fleet = calibrate_fleet(problem, problem.catalog(), seed=seed, say=say)
    setting = VirtualSetting(problem, demand, market, fleet.curves, machines=machines, seed=seed)
    with listener.working("operating") as say:

        def tell(name: str, share: float) -> None:
            say(f"operating, {name}: {share:.0%}")

        return list(compare_operators(setting, fleet, tell=tell))


def _refuse_limits(problem: Problem) -> None:
    """Refuse limits on the whole fleet beside any-to-any services, which are planned one after the other."""
    limits = problem.limits
    asked = {
        "budget": limits.budget_usd_per_hour is not None,
        "spot_share": limits.spot_share is not None,
        "max_nodes": limits.max_nodes is not None,
        "survive": bool(limits.survival.lost),
        "spot_loss": limits.spot_loss_per_h > 0.0,
        "spread": limits.spread > 1,
    }
    for name, is_set in asked.items():
        if is_set and problem.graph_services:
            raise UsageError(
                "virtual time plans any-to-any services one after the other, within no limit on all",
                field=f"limits.{name}",
                hint="leave it out for this, or operate the fleet itself",
            )


def read_mix(problem: Problem, mix: str | float | None) -> TrafficStatistics:
    """Return traffic whose classes move so far, as "30%" or a share."""
    from atoll.control.virtual.virtual_demand import TrafficStatistics

    if mix is None:
        return TrafficStatistics()
    if not problem.graph_services:
        raise UsageError("no service has classes that could move", hint="leave it out", field="mix")
    share = parse_share(mix, field="mix") if isinstance(mix, str) else mix
    if not 0.0 <= share <= _MAX_MIX:
        raise UsageError(f"{share:g} of a share", hint=f"0% to {_MAX_MIX:.0%}", field="mix")
    return TrafficStatistics(mix_deviation=share)


def read_demand(
    problem: Problem,
    trace: str,
    days: float | None,
    seed: int,
    statistics: TrafficStatistics | None = None,
) -> DemandSeries:
    """Return what a trace asks, or drawn traffic with two weeks before that were seen already."""
    from atoll.control.virtual.virtual_demand import count_requests, draw_demand
    from atoll.workload.spec import workload_of

    if trace == GENERATED:
        return draw_demand(
            problem, days or _DAYS, seed, history_days=_HISTORY_DAYS, statistics=statistics
        )
    return count_requests(workload_of(trace), problem, days, seed, statistics)


def read_prices(problem: Problem, prices: str | None, days: float, seed: int) -> MarketSeries:
    """Return the market of a file, a drawn one, or one that never moves."""
    from atoll.control.virtual.market import draw_market, hold_market, read_market

    if prices is None:
        return hold_market(problem.offers)
    if prices == GENERATED:
        return draw_market(problem.offers, days, seed)
    return read_market(Path(prices), problem.offers)


def read_failures(failures: str | float | None) -> WorldSettings:
    """Return machines that fail so often, as "0.001/h" or a number per hour."""
    from atoll.control.virtual.world import WorldSettings

    if failures is None:
        return WorldSettings()
    try:
        per_h = float(failures)
    except ValueError:
        per_h = 3600.0 * parse_rate(failures, field="failures")
    if not 0.0 <= per_h <= 60.0:
        raise UsageError(f"{per_h:g} failures an hour", hint="0/h to 60/h", field="failures")
    return WorldSettings(failures_per_h=per_h)
