"""GH/AGH's table 4: demand as a geometric random walk, one plan for a day against a new one every window.

As there: 288 windows of five minutes, lambda(t + 1) = lambda(t) exp(N(0, sigma)) for every service, plans
that count at once, adopted where they cost less for the window at hand. A window costs its rent, what
starting takes (the rent of its new instances for `STARTUP_S`) and a penalty for requests that nobody
carries. The fleet, its prices and the penalty are ours, so that only how the columns compare can be set
beside the paper's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from atoll.control.decision.decide import MakePlan
from atoll.control.decision.lane_capacity import CarriedLoad
from atoll.core.rng import stream
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem

SIGMAS = (0.01, 0.02, 0.03, 0.04, 0.05)
WINDOWS, WINDOW_S = 288, 300.0
STARTUP_S = 240.0
UNMET = 10.0
"""What a request that is not served costs, as a multiple of what serving one costs at the start."""


@dataclass(frozen=True, slots=True)
class WalkRow:
    """Dollars of a day, mean and standard deviation over trials: one plan, and one every window."""

    sigma: float
    static_usd: float
    static_deviation: float
    rolling_usd: float
    rolling_deviation: float

    @property
    def rolling_vs_static(self) -> float:
        """What planning anew costs over planning once."""
        return self.rolling_usd / self.static_usd


def compare_walk(
    problem: Problem, planner: MakePlan, sigma: float, *, trials: int = 30, seed: int = 0
) -> WalkRow:
    """Return a column of the table."""
    static, rolling = [], []
    first = planner(problem.replace(running=()))
    for trial in range(trials):
        luck = stream(seed, "walk", f"{sigma:g}", str(trial))
        steps = luck.normal(0.0, sigma, (WINDOWS, len(problem.services)))
        steps[0] = 0.0
        factors = np.exp(np.cumsum(steps, axis=0))
        static.append(_pay(problem, planner, first, factors, rolling=False))
        rolling.append(_pay(problem, planner, first, factors, rolling=True))
    return WalkRow(
        sigma,
        float(np.mean(static)),
        float(np.std(static)),
        float(np.mean(rolling)),
        float(np.std(rolling)),
    )


def _pay(
    problem: Problem,
    planner: MakePlan,
    plan: Plan,
    factors: np.ndarray,
    *,
    rolling: bool,
) -> float:
    """Return what a day costs."""
    rates = np.array([service.rate_per_s for service in problem.services])
    per_request = plan.usd_per_hour / (3600.0 * rates.sum())
    names = frozenset(service.name for service in problem.services)
    total = 0.0
    for factor in factors:
        asked = rates * factor
        started = 0.0
        if rolling:
            services = tuple(
                service.model_copy(update={"rate_per_s": float(rate)})
                for service, rate in zip(problem.services, asked, strict=True)
            )
            running = tuple(
                one.model_copy(update={"id": f"r{at}"}) for at, one in enumerate(plan.instances)
            )
            new = planner(problem.model_copy(update={"services": services, "running": running}))
            started = sum(one.usd_per_hour for one in new.instances if not one.kept)
            started *= STARTUP_S / 3600.0
            worse = _window(problem, new, asked, names, per_request) + started
            if worse <= _window(problem, plan, asked, names, per_request):
                plan = new
            else:
                started = 0.0
        total += _window(problem, plan, asked, names, per_request) + started
    return total


def _window(
    problem: Problem, plan: Plan, asked: np.ndarray, names: frozenset[str], per_request: float
) -> float:
    """Return what a window costs with a plan: its rent, and what is not served."""
    carried = CarriedLoad(problem, names, plan.instances).lanes()
    unmet = sum(
        max(0.0, float(rate) - carried[service.name])
        for service, rate in zip(problem.services, asked, strict=True)
    )
    rent = plan.usd_per_hour * WINDOW_S / 3600.0
    return rent + UNMET * per_request * unmet * WINDOW_S
