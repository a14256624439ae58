"""Choose among plans of a fixed cluster by simulating them: which generates the most when asked for more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.plan.plan import Plan
    from atoll.plan.problem import Problem
    from atoll.workload.requests import Requests

_WARM_S = 60.0
_WINDOW_S = 180.0
_PER_PLAN = 3.0
"""Requests in the trace, as a multiple of what the best plan is said to serve in the time simulated."""


@dataclass(frozen=True)
class Simulated:
    """Ranks plans by generated tokens/s under more demand than they can serve.

    Requests come from the problem's own lengths and are let in as KV caches allow. `say` is told of
    progress.
    """

    problem: Problem
    catalog: Catalog
    say: Callable[[str], None] | None = None

    def __call__(self, plans: Sequence[Plan]) -> tuple[int, str]:
        """Return which plan generates the most, the first of equals, and a line that says so."""
        rates = []
        for number, plan in enumerate(plans, start=1):
            if self.say is not None:
                self.say(f"simulating plan {number} of {len(plans)}")
            rates.append(self.tokens_per_s(plan))
        best = max(range(len(plans)), key=lambda i: (rates[i], -i))
        first = "" if best == 0 else f" (the best by its analytic value: {rates[0]:,.1f})"
        return best, f"generates {rates[best]:,.1f} tokens/s under full load{first}"

    def tokens_per_s(self, plan: Plan) -> float:
        """Return the tokens/s that a plan generates when there is always another request."""
        from atoll.sim.api import simulate
        from atoll.sim.options import SimOptions

        end = _WARM_S + _WINDOW_S
        options = SimOptions(
            seed=self.problem.settings.seed,
            batching="best-effort",
            feed="watermark",
            until_s=end,
            from_s=_WARM_S,
        )
        result = simulate(plan, self.problem, self.catalog, self._requests(plan, end), options)
        return result.tokens_per_s

    def _requests(self, plan: Plan, seconds: float) -> Requests:
        from atoll.sim.demand import demand_of
        from atoll.workload.requests import collect

        most = max(instance.throughput_per_s for instance in plan.instances)
        services = tuple(
            service.model_copy(update={"rate_per_s": _PER_PLAN * most})
            for service in self.problem.services
        )
        return collect(
            demand_of(self.problem.changed(services=services), seconds), self.problem.settings.seed
        )
