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

import numpy as np

from atoll.core.errors import InputError, UnknownNameError
from atoll.plan.plan import SINK, SOURCE
from atoll.routing import decisions
from atoll.routing.decisions import Flags
from atoll.routing.pipelines import random_state
from atoll.routing.policies import policy_code
from atoll.routing.reweight import reweight
from atoll.routing.tables import RouteTables

if TYPE_CHECKING:
    from atoll.plan.plan import Plan, Route

_PREFILL, _DECODE, _BOTH = (0, 1), (1, 2), (0, 2)
"""What an instance does of a request, written like layers: its prompt, its answer, or both."""


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


class InstanceRouter:
    """Chooses the instances of requests of one service by a policy.

    `load` and `queue`, by vertex of `tables`, are the caller's to keep up to date for policies that look
    at them.
    """

    def __init__(self, tables: RouteTables, *, policy: str = "iwrr", seed: int = 0) -> None:
        size = tables.vertices
        self.planned = tables
        self.tables = tables
        self.policy = policy_code(policy)
        self.queue = np.zeros(size)
        self.load = np.zeros(size)
        self.dead: Flags = np.zeros(size, dtype=np.bool_)
        self._credit = np.zeros(tables.edges)
        self._delay = np.ones(tables.edges)
        self._random = random_state(seed, "instances")
        self._closed: Flags = np.zeros(size, dtype=np.bool_)
        self._path = np.zeros(size, dtype=np.int64)

    def route(self, busy: Iterable[str] = ()) -> tuple[str, ...] | None:
        """Return the instances of a request's way, or None: all are dead or `busy`, wait."""
        t = self.tables
        masked = self.dead.copy()
        for name in busy:
            masked[self._vertex(name)] = True
        if not decisions.close(t.first, t.target, t.weight, t.sweep, masked, self._closed):
            return None
        count = decisions.walk(
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
        return tuple(t.names[int(v)] for v in self._path[:count])

    def lost(self, instances: Iterable[str]) -> None:
        """Send nothing to these instances; the others share their requests."""
        for name in instances:
            self.dead[self._vertex(name)] = True
        self.tables = reweight(self.planned, self.dead)

    def back(self, instances: Iterable[str]) -> None:
        """Use these instances again as planned."""
        for name in instances:
            self.dead[self._vertex(name)] = False
        self.tables = reweight(self.planned, self.dead)

    def _vertex(self, name: str) -> int:
        inner = self.planned.names[1:-1]
        if name not in inner:
            raise UnknownNameError("instance", name, inner)
        return inner.index(name) + 1
