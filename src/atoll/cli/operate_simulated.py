"""`atoll operate --simulate`: what operating a fleet would have cost, and kept, in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from atoll.cli.progress import bar, live_line
from atoll.core.errors import InfeasibleError, UsageError
from atoll.core.files import atomic_write, check_target
from atoll.core.units import parse_rate
from atoll.report.terminal import emit, note

if TYPE_CHECKING:
    from atoll.control.virtual.demand import DemandSeries
    from atoll.control.virtual.market import MarketSeries
    from atoll.control.virtual.world import WorldSettings
    from atoll.plan.problem import Problem

GENERATED = "generated"
"""What to say for traffic or prices that are drawn."""
_DAYS = 7.0
_HISTORY_DAYS = 14.0
_MOST_DAYS = 400.0


class SimulatedOptions(Protocol):
    """What is asked of a simulated operation; see `atoll operate --help`."""

    @property
    def fleet(self) -> str | Path:
        """The fleet file."""
        ...

    @property
    def simulate(self) -> str | None:
        """A trace: a file, a workload in words, or "generated"."""
        ...

    @property
    def days(self) -> float | None:
        """How many days of it; as long as it is, unless given."""
        ...

    @property
    def prices(self) -> str | None:
        """A CSV file, "generated", or nothing for prices that stay."""
        ...

    @property
    def failures(self) -> str | float | None:
        """How often a node fails: "0.001/h"."""
        ...

    @property
    def seed(self) -> int:
        """The seed of all chance."""
        ...

    @property
    def as_json(self) -> bool:
        """Whether to print JSON."""
        ...

    @property
    def output(self) -> Path | None:
        """Where the HTML report goes."""
        ...


def simulate_operation(options: SimulatedOptions) -> None:
    """Operate a fleet under a trace in virtual time, beside other ways to do so, and show what each cost."""
    from atoll.api.fleet import Fleet
    from atoll.plan.unserved import refuse_unserved
    from atoll.solve.registry import require_packages

    if options.output is not None:
        check_target(options.output, (".html",))
    days = options.days
    if days is not None and not 0.0 < days <= _MOST_DAYS:
        raise UsageError(f"{days:g} days", hint=f"up to {_MOST_DAYS:g}", field="--days")
    require_packages()
    problem = Fleet.load(options.fleet).problem
    refuse_unserved(problem)
    if problem.choices:
        raise UsageError(
            f"{problem.choices[0].name} has a choice of models, which virtual time does not know",
            hint="give it one model for this, or operate the fleet itself",
        )
    if problem.cluster is not None:
        raise InfeasibleError(
            f"{problem.name} stands on machines of its own",
            hint="virtual time is for fleets that rent: there is nothing to save otherwise",
        )
    machines = read_failures(options.failures)
    demand = read_demand(problem, options.simulate or GENERATED, days, options.seed)
    market = read_prices(problem, options.prices, demand.minutes / 1440.0, options.seed)
    _operate(options, problem, demand, market, machines)


def _operate(
    options: SimulatedOptions,
    problem: Problem,
    demand: DemandSeries,
    market: MarketSeries,
    machines: WorldSettings,
) -> None:
    from atoll.control.virtual.calibrate import calibrate_fleet
    from atoll.control.virtual.compare import (
        CONTENDERS,
        compare_operators,
        summarize_operations,
    )
    from atoll.control.virtual.page import draw_contenders, render_operation_page
    from atoll.control.virtual.run import VirtualSetting

    with live_line("sizing templates") as say:
        fleet = calibrate_fleet(problem, problem.catalog(), seed=options.seed, say=say)
    setting = VirtualSetting(
        problem, demand, market, fleet.curves, machines=machines, seed=options.seed
    )
    done: dict[str, float] = {}
    with bar("operating", float(len(CONTENDERS))) as step:

        def tell(name: str, share: float) -> None:
            done[name] = share
            step(len(done) - 1 + share, name)

        results = list(compare_operators(setting, fleet, tell=tell))
    if options.output is not None:
        atomic_write(options.output, render_operation_page(results, problem.name))
    emit(summarize_operations(results), options.as_json, lambda: draw_contenders(results))
    if options.output is not None:
        note(f"wrote {options.output}")


def read_demand(problem: Problem, trace: str, days: float | None, seed: int) -> DemandSeries:
    """Return what a trace asks, or drawn traffic with two weeks before that were seen already."""
    from atoll.control.virtual.demand import count_requests, draw_demand
    from atoll.workload.spec import workload_of

    if trace == GENERATED:
        return draw_demand(problem, days or _DAYS, seed, history_days=_HISTORY_DAYS)
    return count_requests(workload_of(trace), problem, days, seed)


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
        per_h = 3600.0 * parse_rate(failures, field="--failures")
    if not 0.0 <= per_h <= 60.0:
        raise UsageError(f"{per_h:g} failures an hour", hint="0/h to 60/h", field="--failures")
    return WorldSettings(failures_per_h=per_h)
