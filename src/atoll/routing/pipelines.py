"""Every request its own pipeline over the nodes of an instance: what the gateway holds.

router = PipelineRouter(RouteTables.from_instance(instance), kv_tokens={"n0": 80_000, ...})
pipeline = router.route(prompt=700, estimate=200)   # None: every way is full or dead, wait
router.grow(pipeline, generated=201)                # it outgrew its estimate
router.finish(pipeline)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from atoll.core.errors import UnknownNameError, UsageError
from atoll.core.rng import stream
from atoll.perf.engines import BOOKED_SHARE
from atoll.routing import decisions
from atoll.routing.decisions import Flags, Ints
from atoll.routing.policies import policy_code
from atoll.routing.reweight import Solve, reweight
from atoll.routing.tables import RouteTables

SMOOTHING = 0.1
"""Weight of the newest delay in the mean that `swarm` goes by."""


class Hop(NamedTuple):
    """A node and the layers [start, end) it runs for one request."""

    node: str
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class Pipeline:
    """The way of one request: hops in order of layers, and its prompt and expected answer in tokens."""

    hops: tuple[Hop, ...]
    vertices: tuple[int, ...]
    prompt: float
    estimate: float


def random_state(seed: int, *names: str) -> Ints:
    """Return the state of `decisions.draw` for a seed and a name."""
    return stream(seed, "routing", *names).integers(1, 2147483398, size=2, dtype=np.int64)


class PipelineRouter:
    """Chooses pipelines by a policy, keeps count of KV cache, and goes on when nodes die.

    `kv_tokens` gives the tokens whose KV cache fits each node (nodes left out are never full);
    `high_water` is the share of it that may be counted with. `solve` computes the flows on what
    survives; without it they are scaled down (see `reweight`). `queue` and `load`, one number per vertex
    of `tables`, are the caller's to keep up to date for the policies that look at them.
    """

    def __init__(
        self,
        tables: RouteTables,
        *,
        policy: str = "iwrr",
        kv_tokens: Mapping[str, float] | None = None,
        high_water: float = BOOKED_SHARE,
        seed: int = 0,
        solve: Solve | None = None,
    ) -> None:
        if not 0.0 < high_water <= 1.0:
            raise UsageError(f"high_water must be in (0, 1], got {high_water}")
        size = tables.vertices
        self.planned = tables
        self.tables = tables
        self.policy = policy_code(policy)
        self.high_water = high_water
        self.solve = solve
        self.queue = np.zeros(size)
        self.load = np.zeros(size)
        self.capacity = np.full(size, np.inf)
        for name, tokens in (kv_tokens or {}).items():
            self.capacity[self._vertex(name)] = tokens
        self.booked = np.zeros(size)
        self.dead: Flags = np.zeros(size, dtype=np.bool_)
        self._credit = np.zeros(tables.edges)
        self._delay = np.ones(tables.edges)
        self._random = random_state(seed, "pipelines")
        self._full: Flags = np.zeros(size, dtype=np.bool_)
        self._closed: Flags = np.zeros(size, dtype=np.bool_)
        self._path = np.zeros(size, dtype=np.int64)
        self._counted: dict[Pipeline, float] = {}

    def route(self, prompt: float = 0.0, estimate: float = 0.0) -> Pipeline | None:
        """Return a pipeline for a request, or None where it has to wait for one to finish.

        `prompt` and `estimate` are its tokens and the tokens it is expected to generate. A request that
        has to wait changes nothing: asking again later is as good as asking for the first time.
        """
        t = self.tables
        need = decisions.reservation(prompt, 0.0, estimate) if prompt or estimate else 0.0
        decisions.mask_full(self.booked, self.capacity, self.high_water, need, self._full)
        masked = self._full | self.dead
        if not decisions.close(t.first, t.target, t.weight, t.sweep, masked, self._closed):
            return None
        hops = decisions.walk(
            self.policy,
            t.first,
            t.target,
            t.weight,
            t.order,
            self._credit,
            self._delay,
            self.queue,
            self.load,
            self._random,
            self._closed,
            self._path,
        )
        pipeline = self._pipeline([int(v) for v in self._path[:hops]], prompt, estimate)
        self._count(pipeline, need)
        return pipeline

    def possible(self, prompt: float, estimate: float) -> bool:
        """Say whether a request could ever be routed with nothing in flight and every node alive.

        One that could not would wait for ever: refuse it with a reason instead.
        """
        t = self.planned
        full = np.zeros_like(self._full)
        need = decisions.reservation(prompt, 0.0, estimate)
        decisions.mask_full(np.zeros(t.vertices), self.capacity, self.high_water, need, full)
        closed = np.zeros_like(full)
        return decisions.close(t.first, t.target, t.weight, t.sweep, full, closed)

    def grow(self, pipeline: Pipeline, generated: float) -> None:
        """Note how many tokens a request has generated: beyond its estimate it counts for more."""
        self._require_known(pipeline)
        now = decisions.reservation(pipeline.prompt, generated, pipeline.estimate)
        if now > self._counted[pipeline]:
            self._count(pipeline, now)

    def finish(self, pipeline: Pipeline) -> None:
        """Give back what a request held; finished, failed or cancelled alike."""
        self._require_known(pipeline)
        self._count(pipeline, 0.0)
        del self._counted[pipeline]
        if not self._counted:
            # Rounding must not pile up: with nothing in flight nothing is held.
            self.booked[:] = 0.0

    def observe(self, pipeline: Pipeline, hop: int, seconds: float) -> None:
        """Note how long hop number `hop` of a pipeline took, from sending to done (for `swarm`)."""
        t = self.tables
        a = pipeline.vertices[hop - 1] if hop else 0
        for e in range(int(t.first[a]), int(t.first[a + 1])):
            if t.target[e] == pipeline.vertices[hop]:
                decisions.observe(self._delay, e, seconds, SMOOTHING)

    def lost(self, nodes: Iterable[str]) -> None:
        """Take nodes out: no pipeline uses them from now on, and their flow is shared out anew."""
        self._set_dead(nodes, dead=True)

    def back(self, nodes: Iterable[str]) -> None:
        """Take nodes in again, with the flow the plan gave them."""
        self._set_dead(nodes, dead=False)

    def _set_dead(self, nodes: Iterable[str], *, dead: bool) -> None:
        for name in nodes:
            self.dead[self._vertex(name)] = dead
        self.tables = reweight(self.planned, self.dead, self.solve)

    def _require_known(self, pipeline: Pipeline) -> None:
        if pipeline not in self._counted:
            raise UsageError("the pipeline has been finished, or is another router's")

    def _vertex(self, name: str) -> int:
        inner = self.planned.names[1:-1]
        if name not in inner:
            raise UnknownNameError("node", name, inner)
        return inner.index(name) + 1

    def _pipeline(self, vertices: list[int], prompt: float, estimate: float) -> Pipeline:
        """Give each node the layers that the ones before it have not done."""
        hops: list[Hop] = []
        reached = 0
        for v in vertices:
            end = int(self.tables.end[v])
            hops.append(Hop(self.tables.names[v], reached, end))
            reached = end
        return Pipeline(tuple(hops), tuple(vertices), prompt, estimate)

    def _count(self, pipeline: Pipeline, tokens: float) -> None:
        """Count a pipeline with so many tokens, by the share of its layers that each node runs."""
        more = tokens - self._counted.get(pipeline, 0.0)
        for v, hop in zip(pipeline.vertices, pipeline.hops, strict=True):
            start, end = int(self.tables.start[v]), int(self.tables.end[v])
            self.booked[v] += more * decisions.share_run(start, end, hop.start)
        self._counted[pipeline] = tokens
