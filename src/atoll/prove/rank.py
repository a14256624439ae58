"""Value plans of a fixed cluster by simulating them: what each generates when asked for more, and how soon.

Under full load it is queues that make requests wait, and they hide which pipelines are long. So tokens/s are
those of full load, and latencies those of a calm one, which is the same for all plans.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from atoll.prove.simulation_deadline import SimulationCutShortError, keep_deadline

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.plan.plan import Plan
    from atoll.plan.problem import Problem, Router, Service
    from atoll.sim.sim_result import SimReport
    from atoll.solve.deadline import Deadline
    from atoll.solve.effort import Measured
    from atoll.workload.requests import Ints, Requests

_WARM_S = 60.0
_WINDOW_S = 600.0
"""As long as Helix measures. Until the first requests end few prompts come in, and all plans look better, but
not alike: on slow links, where a mean answer takes 250 s, 420 s put plans in another order than hours do."""
_CALM = 0.6
"""Requests/s of the calm load, as a share of what the first plan serves under full load."""
_CALM_S = 300.0
_NEARLY = 0.93
"""Share of the most tokens/s so far below which nobody looks at latencies: `refine` takes no such plan."""
_HIGH_WATER = 0.85
"""Share of a node's KV cache that may be booked, as in Helix's offline runs."""
_COPY_S_PER_BYTE = 1 / 4e9 + 1 / 5e9
"""Activations are gathered on the host and copied to the GPU, so fast."""
_BACKLOG_FACTOR = 4.0
"""Requests that wait, as a multiple of what a plan is said to serve in the time simulated."""
_MIN_REQUESTS = 2_000
_USUAL = "azure-conv"
_LONGEST = (2047, 1000)
"""Where requests are said to have one length, theirs vary as in this workload without its longest prompts and
answers, which is what Helix runs."""


@dataclass
class Simulated:
    """Generated tokens/s of a plan under more demand than it can serve, and latencies under a calm load.

    Simulated is every router that the runtime may have (`settings.routers`), and the worse one counts.
    Requests come from the problem's own lengths and are let in as KV caches allow, as Helix measures
    offline; then they arrive at random, `_CALM` of what the first plan serves. Plans that generate far less
    than the best are not simulated again: their latencies are infinite. `say` is told of progress. A
    simulation that the deadline ends values its plan at nothing, so that one that was simulated to its end is
    taken.
    """

    problem: Problem
    catalog: Catalog
    say: Callable[[str], None] | None = None
    deadline: Deadline | None = None
    _runs: int = field(default=0, init=False)
    _best: float = field(default=0.0, init=False)
    _calm_per_s: float = field(default=0.0, init=False)
    _most: dict[tuple[Router, int], float] = field(default_factory=dict, init=False)

    def __call__(self, plan: Plan, draw: int = 0) -> Measured:
        """Return what a plan generates under full load, and how soon it answers under a calm one."""
        routers = self.problem.settings.routers
        worst = min(
            (self._look_at(plan, router, draw) for router in routers), key=lambda one: one.score
        )
        self._runs += 1
        self._best = max(self._best, worst.tokens_per_s)
        if self.say is not None:
            self.say(f"simulated {self._runs} plans: best {self._best:,.1f} generated tokens/s")
        return worst

    def _look_at(self, plan: Plan, router: Router, draw: int) -> Measured:
        from atoll.solve.effort import Measured

        most = self._most.get((router, draw), 0.0)
        end = _WARM_S + _WINDOW_S
        max_per_s = max(instance.throughput_per_s for instance in plan.instances)
        count = _MIN_REQUESTS + int(_BACKLOG_FACTOR * max_per_s * end)
        try:
            full = self._run(plan, router, self.requests(count, draw), end, feed="watermark")
            tokens_per_s = full.tokens_per_s
            self._most[router, draw] = max(most, tokens_per_s)
            if tokens_per_s < _NEARLY * most or tokens_per_s <= 0.0:
                return Measured(tokens_per_s, math.inf, math.inf)
            if not self._calm_per_s:
                answer = self.problem.services[0].lengths.output_mean
                self._calm_per_s = _CALM * tokens_per_s / answer
            end = _WARM_S + _CALM_S
            calm = self._run(plan, router, self._arrivals(end, draw), end).services[0]
        except SimulationCutShortError:
            return Measured(0.0, math.inf, math.inf)
        return Measured(tokens_per_s, calm.ttft_s.p50 or math.inf, calm.token_gap_s.p50 or math.inf)

    def _run(
        self, plan: Plan, router: Router, requests: Requests, end_s: float, **feed: Any
    ) -> SimReport:
        from atoll.sim.api import simulate
        from atoll.sim.sim_options import SimOptions

        options = SimOptions(
            seed=self.problem.settings.seed,
            router=router,
            high_water=_HIGH_WATER,
            until_s=end_s,
            from_s=_WARM_S,
            **feed,
        )
        if self.problem.cluster is not None and self.problem.cluster.profiles:
            options = replace(options, **self._imitate_helix())
        progress = keep_deadline(self.deadline)
        return simulate(plan, self.problem, self.catalog, requests, options, progress=progress)

    def _arrivals(self, end_s: float, draw: int) -> Requests:
        """Return requests of the calm load, at random times until the end."""
        from atoll.core.rng import stream
        from atoll.workload.requests import Requests

        random = stream(self.problem.settings.seed, "calm arrivals", str(draw))
        count = int(random.poisson(self._calm_per_s * end_s))
        own = self.requests(count, draw)
        return Requests.of(np.sort(random.random(count) * end_s), own.input, own.output)

    def _imitate_helix(self) -> dict[str, Any]:
        """Return the options under which measured curves hold, those of Helix's engine.

        It takes all that waits and sends tokens one by one.
        """
        from atoll.plan.cluster_profiles import activation_bytes

        per_token = activation_bytes(self.catalog, self.problem.services[0])
        return {
            "batching": "best-effort",
            "single_messages": True,
            "first_token": False,
            "handover_s": per_token * _COPY_S_PER_BYTE,
        }

    def requests(self, count: int, draw: int = 0) -> Requests:
        """Return requests that all wait from the start; the first ones are the same for any count."""
        from atoll.workload.requests import Requests

        (service,) = self.problem.services
        prompts, answers = _lengths(service, count, self.problem.settings.seed, draw)
        return Requests.of(np.zeros(count), prompts, answers)


def _lengths(service: Service, count: int, seed: int, draw: int) -> tuple[Ints, Ints]:
    """Return prompt and answer tokens of requests, drawn in blocks so that more of them begin alike."""
    from atoll.core.rng import stream
    from atoll.workload.builtin import get_builtin, lengths_like

    own = service.lengths
    varied = own.input_mean_square > own.input_mean**2 * (1 + 1e-9)
    drawn = lengths_like(own.mix()) if varied else get_builtin(_USUAL).lengths
    random = stream(seed, "ranking", *([str(draw)] if draw else []))
    blocks: list[tuple[Ints, Ints]] = []
    while sum(len(prompts) for prompts, _ in blocks) < count:
        prompts, answers = drawn.draw(random, _MIN_REQUESTS)
        kept = varied | ((prompts <= _LONGEST[0]) & (answers <= _LONGEST[1]))
        blocks.append((prompts[kept], answers[kept]))
    columns = [np.concatenate(column)[:count] for column in zip(*blocks, strict=True)]
    if varied:
        return columns[0], columns[1]
    means = (own.input_mean, own.output_mean)
    scaled = [
        np.maximum(1, np.rint(column * (mean / first.mean()))).astype(np.int32)
        for column, first, mean in zip(columns, blocks[0], means, strict=True)
    ]
    return scaled[0], scaled[1]
