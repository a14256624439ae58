"""Latencies of plans by simulation: what fills the tables of solvers that go by latency."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from atoll.prove.simulation_deadline import SimulationCutShortError, keep_deadline

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.plan.plan import Plan
    from atoll.plan.problem import Problem
    from atoll.solve.deadline import Deadline
    from atoll.solve.effort import Answered
    from atoll.workload.requests import Requests

_SEED = 7
"""Added to the problem's seed: arrivals that no promise is looked at with."""


@dataclass
class SimulatedLatency:
    """How soon plans answer: arrivals of a problem for some seconds, simulated until all have ended.

    The same services at the same rates see the same arrivals, whatever the plan. With more arrivals than can
    be carried the mean grows with the seconds: it is that of a burst of so long. A simulation that the
    deadline ends says that it takes for ever. `say` is told of progress.
    """

    catalog: Catalog
    say: Callable[[str], None] | None = None
    deadline: Deadline | None = None
    runs: int = field(default=0, init=False)
    _kept: dict[tuple[tuple[str, float], ...], Requests] = field(default_factory=dict, init=False)

    def __call__(self, plan: Plan, problem: Problem, seconds: float) -> Answered:
        """Return the latency of what a problem asks for so many seconds, on a plan of its services."""
        from atoll.sim.api import simulate
        from atoll.sim.sim_options import SimOptions
        from atoll.solve.effort import Answered

        seed = problem.settings.seed + _SEED
        try:
            found = simulate(
                plan,
                problem,
                self.catalog,
                self._arrivals(problem, seconds, seed),
                SimOptions(seed=seed),
                progress=keep_deadline(self.deadline),
            )
        except SimulationCutShortError:
            return Answered(math.inf, math.inf, math.inf)
        self.runs += 1
        if self.say is not None and self.runs % 10 == 0:
            self.say(f"simulated {self.runs} placements of replicas")
        late = found.requests.e2e_s
        # What never ended, on a plan that serves it, waits for good.
        late = np.where(np.isfinite(late), late, math.inf)
        if not len(late):
            return Answered(math.inf, math.inf, math.inf)
        middle, high = (float(np.quantile(late, q, method="lower")) for q in (0.5, 0.95))
        return Answered(float(late.mean()), middle, high)

    def _arrivals(self, problem: Problem, seconds: float, seed: int) -> Requests:
        from atoll.sim.problem_demand import demand_of
        from atoll.workload.requests import collect

        key = (*((s.name, s.rate_per_s) for s in problem.services), ("", seconds))
        if key not in self._kept:
            if len(self._kept) > 64:
                self._kept.clear()
            self._kept[key] = collect(demand_of(problem, seconds), seed)
        return self._kept[key]
