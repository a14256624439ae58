"""Which nodes a request goes through. The real policies live elsewhere; this is the plain one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from atoll.core.frozen import Frozen
from atoll.engine.engine_messages import Hop, NodeStats, PipelineRoute


class NodeSpec(Frozen):
    """A node the scheduler may use: its inbox and the layers [start, end) it holds."""

    name: str
    endpoint: str
    start: int
    end: int

    def hop(self, start: int | None = None, end: int | None = None) -> Hop:
        """Return a hop over this node's layers, or over a part of them."""
        return Hop(
            node=self.name,
            endpoint=self.endpoint,
            start=self.start if start is None else start,
            end=self.end if end is None else end,
        )


@dataclass(frozen=True, slots=True)
class RouteQuery:
    """Inputs of a router: the request, the nodes alive, and how full they are.

    `load` is how many KV positions the scheduler's own requests hold on each node; `stats` is what
    the nodes last said of themselves. `attempt` counts restarts of this request.
    """

    request_id: str
    prompt_length: int
    nodes: tuple[NodeSpec, ...]
    stats: Mapping[str, NodeStats]
    load: Mapping[str, int]
    attempt: int = 0


Router = Callable[[RouteQuery], PipelineRoute | None]
"""Returns the route of a request, or None if there is none now and it should wait."""


class LayerRouter:
    """Goes through the layers and takes at each point the least loaded node that holds the next one.

    A node may hold layers before the point where it is entered and then runs only the rest of its
    range. Among equally loaded nodes the one that reaches furthest is taken, then by name.
    `only` names the nodes that may be used.
    """

    def __init__(self, layers: int, only: Sequence[str] | None = None) -> None:
        self.layers = layers
        self._only = None if only is None else frozenset(only)

    def __call__(self, query: RouteQuery) -> PipelineRoute | None:
        """Return a route of one hop per node taken, or None if a layer is on no node."""
        hops = self.hops(query)
        return None if hops is None else PipelineRoute(prefill=hops)

    def hops(self, query: RouteQuery) -> tuple[Hop, ...] | None:
        """Return the hops alone."""
        nodes = [n for n in query.nodes if self._only is None or n.name in self._only]
        reach = self._reachable(nodes)
        hops: list[Hop] = []
        at = 0
        while at < self.layers:
            fitting = [n for n in nodes if n.start <= at < n.end and reach[n.end]]
            if not fitting:
                return None
            best = min(fitting, key=lambda n: (query.load.get(n.name, 0), -n.end, n.name))
            hops.append(best.hop(start=at))
            at = best.end
        return tuple(hops)

    def _reachable(self, nodes: Sequence[NodeSpec]) -> list[bool]:
        """Return, per layer boundary, whether the end can be reached from it."""
        reach = [False] * (self.layers + 1)
        reach[self.layers] = True
        for at in range(self.layers - 1, -1, -1):
            reach[at] = any(n.start <= at < n.end <= self.layers and reach[n.end] for n in nodes)
        return reach
