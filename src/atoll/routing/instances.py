"""Which instance, or which pair of instances, a request of a service goes to.

The ways of a plan are a graph: (instance,) is source -> instance -> sink, (prefill, decode) is source ->
prefill -> decode -> sink, and a service may have both. It is a route table like that of an instance's
nodes, so the same decisions choose. Edges have the plan's shares. Pairs that the plan does not use are spare
where both stand in one region: when all partners of a prefill instance are lost, it sends its KV caches to
others there, never over a link between regions that nobody planned for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from atoll.core.errors import InputError, UnknownNameError
from atoll.plan.plan import SINK, SOURCE
from atoll.routing.graph_router import GraphRouter
from atoll.routing.route_tables import RouteTables

if TYPE_CHECKING:
    from atoll.plan.plan import Plan, Route

# The part of a request that an instance runs, written like layers: prompt, answer, or both.
_PREFILL = (0, 1)
_DECODE = (1, 2)
_BOTH = (0, 2)


def service_tables(plan: Plan, service: str) -> RouteTables:
    """Return the graph of the instances of a service, weighted by the routes of the plan."""
    routes = [route for route in plan.routes if route.service == service]
    if not routes:
        raise UnknownNameError("service", service, (r.service for r in plan.routes))
    return route_tables(routes, {instance.id: instance.region for instance in plan.instances})


def route_tables(routes: Iterable[Route], region: Mapping[str, str]) -> RouteTables:
    """Return the graph of some routes; `region` says where instances stand, by id.

    Vertices are the instances of routes with a share: first those that take prompts, then those that only
    decode, each in the order of the routes. Shares need not add up to 1.
    """
    shares: dict[tuple[str, ...], float] = {}
    for route in routes:
        if route.share > 0:
            shares[route.instances] = shares.get(route.instances, 0.0) + route.share
    if not shares:
        raise InputError(
            "no route has a share", field="routes", hint="plan again: requests need a way"
        )
    held: dict[str, tuple[int, int]] = {}
    for way in shares:
        for name, part in zip(way, (_BOTH,) if len(way) == 1 else (_PREFILL, _DECODE), strict=True):
            if held.setdefault(name, part) != part:
                raise InputError(
                    f"{name} has different parts in different routes",
                    field="routes",
                    hint="an instance runs prefill, or decode, or both",
                )
    names = sorted(held, key=lambda name: held[name] == _DECODE)
    number = {name: v for v, name in enumerate(names, 1)}
    last = len(names) + 1
    edges: dict[tuple[int, int], float] = {}
    for way, share in shares.items():
        path = [0, *(number[name] for name in way), last]
        for pair in pairwise(path):
            edges[pair] = edges.get(pair, 0.0) + share
    for a in names:
        for b in names:
            near = region.get(a) is not None and region.get(a) == region.get(b)
            if near and held[a] == _PREFILL and held[b] == _DECODE:
                edges.setdefault((number[a], number[b]), 0.0)
    return RouteTables.of_edges(
        [SOURCE, *names, SINK],
        [(0, 0), *(held[name] for name in names), (2, 2)],
        [(a, b, share) for (a, b), share in edges.items()],
    )


class InstanceRouter(GraphRouter):
    """Chooses the instances of requests of one service by a policy."""

    member = "instance"
    random_stream = "instances"

    def __init__(self, tables: RouteTables, *, policy: str = "iwrr", seed: int = 0) -> None:
        super().__init__(tables, policy, seed)

    def route(self, busy: Iterable[str] = ()) -> tuple[str, ...] | None:
        """Return the instances of a request's way, or None: all are dead or `busy`, wait."""
        masked = self.dead.copy()
        for name in busy:
            masked[self._vertex(name)] = True
        vertices = self._walk(masked)
        return None if vertices is None else tuple(self.tables.names[v] for v in vertices)
