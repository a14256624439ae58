"""Value plans of a fixed cluster by simulating them: how much each generates when asked for more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.plan.plan import Plan
    from atoll.plan.problem import Problem, Service
    from atoll.workload.requests import Requests

_WARM_S = 60.0
_WINDOW_S = 300.0
_HIGH_WATER = 0.85
"""Share of a node's KV cache that may be booked, as in Helix's offline runs."""
_COPY_S_PER_BYTE = 1 / 4e9 + 1 / 5e9
"""Activations are gathered on the host and copied to the GPU, so fast."""
_PLENTY = 8.0
"""Requests that wait, as a multiple of what a plan is said to serve in the time simulated."""
_LEAST = 2_000
_USUAL = "azure-conv"
"""Where requests are said to have one length, theirs vary as in this workload."""


@dataclass
class Simulated:
    """Generated tokens/s of a plan under more demand than it can serve, as Helix measures offline.

    Requests come from the problem's own lengths and are let in as KV caches allow. `say` is told of
    progress.
    """

    problem: Problem
    catalog: Catalog
    say: Callable[[str], None] | None = None
    _runs: int = field(default=0, init=False)
    _best: float = field(default=0.0, init=False)

    def __call__(self, plan: Plan) -> float:
        """Return the tokens/s that a plan generates when there is always another request."""
        from atoll.sim.api import simulate
        from atoll.sim.options import SimOptions

        end = _WARM_S + _WINDOW_S
        options = SimOptions(
            seed=self.problem.settings.seed,
            feed="watermark",
            high_water=_HIGH_WATER,
            until_s=end,
            from_s=_WARM_S,
        )
        if self.problem.cluster is not None and self.problem.cluster.profiles:
            options = replace(options, **self._measured())
        most = max(instance.throughput_per_s for instance in plan.instances)
        count = _LEAST + int(_PLENTY * most * end)
        found = simulate(plan, self.problem, self.catalog, self.requests(count), options)
        self._runs += 1
        self._best = max(self._best, found.tokens_per_s)
        if self.say is not None:
            self.say(f"simulated {self._runs} plans: best {self._best:,.1f} generated tokens/s")
        return found.tokens_per_s

    def _measured(self) -> dict[str, Any]:
        """Measured curves are of Helix's engine: it takes all that waits and sends tokens one by one."""
        from atoll.plan.cluster_profiles import activation_bytes

        per_token = activation_bytes(self.catalog, self.problem.services[0])
        return {
            "batching": "best-effort",
            "single_messages": True,
            "first_token": False,
            "handover_s": per_token * _COPY_S_PER_BYTE,
        }

    def requests(self, count: int) -> Requests:
        """Return requests that all wait from the start; the first ones are the same for any count."""
        from atoll.workload.requests import Requests

        (service,) = self.problem.services
        prompts, answers = _lengths(service, count, self.problem.settings.seed)
        return Requests.of([0.0] * count, prompts, answers)


def _lengths(service: Service, count: int, seed: int) -> tuple[list[int], list[int]]:
    from atoll.core.rng import stream
    from atoll.workload.builtin import built_in, lengths_like

    own = service.lengths
    varied = own.input_mean_square > own.input_mean**2 * (1 + 1e-9)
    drawn = lengths_like(own.mix()) if varied else built_in(_USUAL).lengths
    mix = drawn.mix()
    scale = (own.input_mean / mix.input_mean, own.output_mean / mix.output_mean)
    random = stream(seed, "ranking")
    found: tuple[list[int], list[int]] = ([], [])
    while len(found[0]) < count:
        for column, lengths, by in zip(found, drawn.draw(random, _LEAST), scale, strict=True):
            column += [max(1, round(float(tokens) * by)) for tokens in lengths]
    return found[0][:count], found[1][:count]
