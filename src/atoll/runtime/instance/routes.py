"""The pipeline of each request inside an instance: the plan's flows, as the engine asks for routes.

Interleaved weighted round robin over the flows (or another policy), masks for nodes whose KV cache is
spoken for, and other ways when nodes die. The engine asks again for a request it has to start anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from atoll.core.ids import Phase
from atoll.engine.messages import Hop, NodeStats, PipelineRoute
from atoll.engine.routes import NodeSpec, RouteQuery
from atoll.plan.plan import SINK, SOURCE
from atoll.routing.instances import InstanceRouter, pair_weights
from atoll.routing.pipelines import Pipeline, PipelineRouter
from atoll.routing.tables import Edge, RouteTables
from atoll.runtime.instance.config import InstanceConfig, InstancePart


class PlanRouter:
    """A `Router` of the engine that follows the plan.

    The caller says with `expect` how many tokens a request may generate, with `grow` how many it has,
    and with `finish` that it is over.
    """

    def __init__(self, config: InstanceConfig) -> None:
        phases = (Phase.BOTH,) if config.of_phase(Phase.BOTH) else (Phase.PREFILL, Phase.DECODE)
        self._sides = [
            [_PartRouter(part, config.policy, config.seed) for part in config.of_phase(phase)]
            for phase in phases
        ]
        self._parts = {part.name: part for side in self._sides for part in side}
        self._chooser = _chooser(self._sides, config)
        self._expected: dict[str, float] = {}
        self._held: dict[str, list[tuple[_PartRouter, Pipeline]]] = {}

    def expect(self, request_id: str, tokens: float) -> None:
        """Note how many tokens a request is expected to generate."""
        self._expected[request_id] = tokens

    def grow(self, request_id: str, generated: int) -> None:
        """Note how many tokens a request has generated."""
        for part, pipeline in self._held.get(request_id, ()):
            part.router.grow(pipeline, generated)

    def finish(self, request_id: str) -> None:
        """Forget a request, and give back what it held."""
        self._expected.pop(request_id, None)
        self._release(request_id)

    def __call__(self, query: RouteQuery) -> PipelineRoute | None:
        """Return the route of a request, or None: everything is full or dead, wait."""
        alive = {node.name: node for node in query.nodes}
        for part in self._parts.values():
            part.update(alive, query.stats)
        self._release(query.request_id)
        closed = [name for name, part in self._parts.items() if not part.open]
        expected = self._expected.get(query.request_id, 0.0)
        while True:
            chosen = self._chooser.route(busy=closed)
            if chosen is None:
                return None
            hops = self._hops(query, [self._parts[name] for name in chosen], alive, expected)
            if isinstance(hops, str):
                closed.append(hops)
                continue
            return PipelineRoute(prefill=hops[0], decode=hops[1] if len(hops) > 1 else None)

    def _hops(
        self,
        query: RouteQuery,
        parts: Sequence[_PartRouter],
        alive: dict[str, NodeSpec],
        expected: float,
    ) -> list[tuple[Hop, ...]] | str:
        """Return the hops of each phase, or the name of a part that has no room."""
        held: list[tuple[_PartRouter, Pipeline]] = []
        for part in parts:
            pipeline = part.route(query.prompt_length, expected)
            if pipeline is None:
                for other, taken in held:
                    other.router.finish(taken)
                return part.name
            held.append((part, pipeline))
        self._held[query.request_id] = held
        return [part.hops(pipeline, alive) for part, pipeline in held]

    def _release(self, request_id: str) -> None:
        for part, pipeline in self._held.pop(request_id, ()):
            part.router.finish(pipeline)


class _PartRouter:
    """The pipelines of one instance of the plan."""

    def __init__(self, part: InstancePart, policy: str, seed: int) -> None:
        self.part = part
        self.name = part.instance.id
        tables = RouteTables.from_instance(part.instance, spare=True)
        self.router = PipelineRouter(tables, policy=policy, seed=seed)
        self._names = {node.id: part.node_name(node.id) for node in part.instance.nodes}
        self._dead: frozenset[str] = frozenset()

    @property
    def open(self) -> bool:
        """Whether any pipeline is left."""
        tables = self.router.tables
        return bool(tables.weight[: int(tables.first[1])].any())

    def update(self, alive: dict[str, NodeSpec], stats: Mapping[str, NodeStats]) -> None:
        """Take note of who lives and how much KV cache each has."""
        dead = frozenset(node for node, name in self._names.items() if name not in alive)
        if dead != self._dead:
            self.router.back(self._dead - dead)
            self.router.lost(dead)
            self._dead = dead
        for vertex, node in enumerate(self.router.planned.names):
            node_stats = stats.get(self._names.get(node, ""))
            if node_stats is not None:
                self.router.capacity[vertex] = float(node_stats.blocks * node_stats.block_size)

    def route(self, prompt: int, expected: float) -> Pipeline | None:
        """Return a pipeline; one too long ever to be counted with is tried all the same."""
        if not self.router.possible(prompt, expected):
            return self.router.route()
        return self.router.route(prompt, expected)

    def hops(self, pipeline: Pipeline, alive: dict[str, NodeSpec]) -> tuple[Hop, ...]:
        """Return the pipeline as the engine wants it."""
        return tuple(
            alive[self._names[hop.node]].hop(start=hop.start, end=hop.end) for hop in pipeline.hops
        )


def _chooser(sides: Sequence[Sequence[_PartRouter]], config: InstanceConfig) -> InstanceRouter:
    """Return what chooses a part of each phase, by their weights."""
    names = [SOURCE, *(part.name for side in sides for part in side), SINK]
    held = [(0, 0), *((k, k + 1) for k, side in enumerate(sides) for _ in side)]
    weights = [np.array([max(part.part.weight, 1e-9) for part in side]) for side in sides]
    last = len(names) - 1
    edges: list[Edge] = [(0, 1 + i, float(w)) for i, w in enumerate(weights[0])]
    if len(sides) == 1:
        edges += [(1 + i, last, float(w)) for i, w in enumerate(weights[0])]
    else:
        near = np.array(
            [[a.part.instance.region == b.part.instance.region for b in sides[1]] for a in sides[0]]
        )
        pairs = pair_weights(weights[0], weights[1], near)
        begin = 1 + len(sides[0])
        edges += [
            (1 + i, begin + j, float(w)) for i, row in enumerate(pairs) for j, w in enumerate(row)
        ]
        edges += [(begin + j, last, float(w)) for j, w in enumerate(pairs.sum(axis=0))]
    tables = RouteTables.of_edges(names, [*held, (len(sides), len(sides))], edges)
    return InstanceRouter(tables, seed=config.seed)
