"""What certainty costs, out of sample: robust plans simulated in scenarios that nobody has planned with.

The quickstart fleet, and the same with spot machines of two regions, are planned without risk and for 95 % of
scenarios. Both plans are then simulated, service by service, in scenarios of a third set, neither the one
plans are chosen with nor the one they are judged with: the share in which all promises are kept is counted,
without telling anything by load. `told_off` is by how much the plan's own figure was off.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from atoll.api.fleet import Fleet
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.plan.robustness import Robustness
from atoll.prove.planning import plan as plan_nominal
from atoll.prove.robust.robust_plan import plan_robust
from atoll.prove.robust.scenarios import draw_scenarios, resolve_risk
from atoll.prove.robust.trial import ScenarioLab
from atoll.solve.plan_request import PlanRequest
from benchmarks.report import Figure, finish, options

ASKED = 0.95
FLEET = "examples/quickstart.yaml"
DEADLINE_S = 3600.0
"""A safety net on a busy machine: effort is counted, and CPU seconds are what is measured."""


@dataclass(frozen=True)
class HeldCount:
    """In how many scenarios a plan holds, of how many simulated."""

    held: int
    of: int

    @property
    def percent(self) -> float:
        """The share, in per cent."""
        return 100.0 * self.held / self.of


def with_spot(problem: Problem) -> Problem:
    """Return the fleet with spot machines at 40 % of the price, in two regions."""
    offers = [
        offer.model_copy(
            update={
                "market": market,
                "region": region,
                "usd_per_hour": offer.usd_per_hour * (0.4 if market == "spot" else 1.0),
            }
        )
        for offer in problem.offers
        for region in (offer.region, "aws/us-west-2")
        for market in ("on-demand", "spot")
    ]
    return problem.replace(offers=tuple(offers), name=f"{problem.name}-spot")


def count(plan: Plan, problem: Problem, number: int) -> HeldCount:
    """Simulate a plan in so many scenarios that it was neither chosen nor judged with."""
    catalog = problem.catalog()
    fresh = draw_scenarios(problem, catalog, resolve_risk(problem), number, name="benchmark")
    lab = ScenarioLab(problem, catalog)
    held = 0
    for at in range(number):
        trials = [lab.trial(plan, service.name) for service in problem.services]
        held += all(lab.simulate(trial, fresh, at) >= trial.target for trial in trials)
    return HeldCount(held, number)


def measure(problem: Problem, number: int) -> list[Figure]:
    """Plan with and without risk, count, print a line for each level."""
    began, cpu = time.perf_counter(), time.process_time()
    sure = plan_robust(problem, PlanRequest(deadline_s=DEADLINE_S), asked=ASKED)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    found = sure.robustness
    assert found is not None
    _show(problem, found)
    first = plan_nominal(problem, PlanRequest(error_bars=False, deadline_s=DEADLINE_S))
    robust, nominal = count(sure, problem, number), count(first, problem, number)
    name = problem.name.replace("-", "_")
    more = sure.usd_per_hour / first.usd_per_hour - 1.0
    return [
        Figure(f"{name}_nominal_kept_pct", nominal.percent, note="scenarios kept without risk, %"),
        Figure(
            f"{name}_robust95_kept_pct", robust.percent, note="scenarios kept, planned for 95 %, %"
        ),
        Figure(
            f"{name}_robust95_more_pct", 100.0 * more, note="cost over the plan without risk, %"
        ),
        Figure(
            f"{name}_told_off_pts",
            robust.percent - 100.0 * found.level.holds,
            note="told wrong, points",
        ),
        Figure(
            f"{name}_cpu_s", cpu, note=f"CPU seconds of the robust plan ({seconds:.0f} s passed)"
        ),
    ]


def _show(problem: Problem, found: Robustness) -> None:
    print(f"{problem.name}: asked, kept (told), requests kept, nodes, USD/h expected")
    for level in found.levels:
        asked = "no risk" if level.asked is None else f"{level.asked:.0%}"
        print(
            f"  {asked:>8} {level.holds:7.1%} {level.requests_kept:7.1%} {level.nodes:4d} "
            f"{level.expected_usd_per_hour:8.2f}"
        )


def main() -> None:
    """Print the figures."""
    quick = options(__doc__ or "").quick
    problem = Fleet.load(FLEET).problem
    fleets = [problem] if quick else [problem, with_spot(problem)]
    figures = [figure for one in fleets for figure in measure(one, 24 if quick else 120)]
    finish(figures)


if __name__ == "__main__":
    main()
