"""Every request its own pipeline over the nodes of an instance: what the gateway holds.

router = PipelineRouter(RouteTables.from_instance(instance), kv_tokens={"n0": 80_000, ...})
pipeline = router.route(prompt=700, estimate=200)   # None: every way is full or dead, wait
router.grow(pipeline, generated=201)                # it outgrew its estimate
router.finish(pipeline)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from atoll.core.errors import UsageError
from atoll.engines.limits import BOOKED_SHARE
from atoll.routing import decisions
from atoll.routing.decisions import Flags
from atoll.routing.graph_router import GraphRouter
from atoll.routing.reweight import Solve
from atoll.routing.route_tables import RouteTables

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


class PipelineRouter(GraphRouter):
    """Chooses pipelines by a policy, keeps count of KV cache, and goes on when nodes die.

    `kv_tokens` gives the tokens whose KV cache fits each node (nodes left out are never full);
    `high_water` is the share of it that may be counted with.
    """

    member = "node"
    random_stream = "pipelines"

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
        super().__init__(tables, policy, seed, solve)
        size = tables.vertices
        self.high_water = high_water
        self.capacity = np.full(size, np.inf)
        for name, tokens in (kv_tokens or {}).items():
            self.capacity[self._vertex(name)] = tokens
        self.booked = np.zeros(size)
        self._full: Flags = np.zeros(size, dtype=np.bool_)
        self._counted: dict[Pipeline, float] = {}

    def route(self, prompt: float = 0.0, estimate: float = 0.0) -> Pipeline | None:
        """Return a pipeline for a request, or None where it has to wait for one to finish.

        `prompt` and `estimate` are its tokens and the tokens it is expected to generate. A request that
        has to wait changes nothing: asking again later is as good as asking for the first time.
        """
        # Without sizes it counts with nothing, where `reservation` has one token at least.
        need = decisions.reservation(prompt, 0.0, estimate) if prompt or estimate else 0.0
        decisions.mask_full(self.booked, self.capacity, self.high_water, need, self._full)
        vertices = self._walk(self._full | self.dead)
        if vertices is None:
            return None
        pipeline = self._pipeline(vertices, prompt, estimate)
        self._count(pipeline, need)
        return pipeline

    def possible(self, prompt: float, estimate: float) -> bool:
        """Say whether a request could ever be routed with nothing in flight and every node alive.

        One that could not would wait for ever: refuse it with a reason instead.
        """
        t = self.planned
        # By the planned edges: nodes that are dead now may come back.
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

    def _require_known(self, pipeline: Pipeline) -> None:
        if pipeline not in self._counted:
            raise UsageError("the pipeline has been finished, or is another router's")

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
