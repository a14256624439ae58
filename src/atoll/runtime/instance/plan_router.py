"""The pipeline of each request inside an endpoint: the plan's ways and flows, as the engine asks for routes.

A way is one instance, or one that computes the prompt and one that goes on from its KV cache. Ways and
pipelines are chosen by interleaved weighted round robin over shares and flows (pipelines by another policy,
if asked for), with masks for nodes whose KV cache is spoken for, and other ways when nodes die. The engine
asks again for a request it has to start anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from atoll.engine.engine_messages import Hop, NodeStats, PipelineRoute
from atoll.engine.pipeline_routes import NodeSpec, RouteQuery
from atoll.routing.instances import InstanceRouter, route_tables
from atoll.routing.pipeline_router import Pipeline, PipelineRouter
from atoll.routing.route_tables import RouteTables
from atoll.runtime.instance.instance_config import InstanceConfig, InstancePart


class PlanRouter:
    """A `Router` of the engine that follows the plan.

    The caller says with `expect` how many tokens a request may generate, with `grow` how many it has,
    and with `finish` that it is over.
    """

    def __init__(self, config: InstanceConfig) -> None:
        self._parts: dict[str, _PartRouter] = {}
        self._expected: dict[str, float] = {}
        self._held: dict[str, list[tuple[_PartRouter, Pipeline]]] = {}
        self._alone = config.parts[0].instance.id if config.helpers is not None else None
        self.follow(config)

    def follow(self, config: InstanceConfig) -> None:
        """Take other parts and ways; what is held of parts that stay is still held."""
        region = {part.instance.id: part.instance.region for part in config.parts}
        self._chooser = InstanceRouter(route_tables(config.ways, region), seed=config.seed)
        used = self._chooser.planned.names[1:-1]
        before = self._parts
        self._parts = {}
        for part in config.parts:
            name = part.instance.id
            if name not in used:
                continue
            known = before.get(name)
            if known is None or known.part != part:
                known = _PartRouter(part, config.policy, config.seed)
            self._parts[name] = known
        self._lost: frozenset[str] = frozenset()

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
        self._note_lost()
        full: list[str] = []
        expected = self._expected.get(query.request_id, 0.0)
        while True:
            chosen = self._chooser.route(busy=full)
            if chosen is None and not full and self._is_left_alone():
                assert self._alone is not None
                chosen = (self._alone,)
            if chosen is None:
                return None
            hops = self._hops(query, [self._parts[name] for name in chosen], alive, expected)
            if isinstance(hops, str):
                full.append(hops)
                continue
            return PipelineRoute(prefill=hops[0], decode=hops[1] if len(hops) > 1 else None)

    def _is_left_alone(self) -> bool:
        """Whether a part that is helped lives and none of its helpers does: it then runs both phases."""
        if self._alone is None:
            return False
        return [name for name, part in self._parts.items() if part.open] == [self._alone]

    def _note_lost(self) -> None:
        """Have the ways over parts that no pipeline is left of lead over others, and back again."""
        lost = frozenset(name for name, part in self._parts.items() if not part.open)
        if lost != self._lost:
            self._chooser.back(self._lost - lost)
            self._chooser.lost(lost)
            self._lost = lost

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
