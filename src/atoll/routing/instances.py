"""Which instance of each phase a request of a service goes to.

A service whose phases run together has instances between source and sink; one whose phases run apart has
pairs: source -> prefill instance -> decode instance -> sink. Both are route tables, so the same
decisions choose. Pairs are planned so that as much as possible stays in its region, where moving the KV
cache is cheap; what is left over crosses in proportion to what each side has left.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from atoll.core.errors import InputError, UnknownNameError
from atoll.core.ids import Phase
from atoll.plan.plan import SINK, SOURCE
from atoll.routing import decisions
from atoll.routing.decisions import Flags, Floats
from atoll.routing.pipelines import random_state
from atoll.routing.policies import policy_code
from atoll.routing.reweight import reweight
from atoll.routing.tables import Edge, RouteTables

if TYPE_CHECKING:
    from atoll.plan.plan import Plan


def service_tables(plan: Plan, service: str) -> RouteTables:
    """Return the graph of the instances of a service, weighted by the routes of the plan."""
    weights = {r.phase: r.weights for r in plan.routes if r.service == service}
    if not weights:
        raise UnknownNameError("service", service, (r.service for r in plan.routes))
    region = {instance.id: instance.region for instance in plan.instances}
    whole = {Phase.BOTH} <= weights.keys()
    phases = (Phase.BOTH,) if whole else (Phase.PREFILL, Phase.DECODE)
    lists: list[list[tuple[str, float]]] = []
    for phase in phases:
        named = [(name, w) for name, w in weights.get(phase, {}).items() if w > 0]
        if not named:
            raise InputError(
                f"{service} has no route for {phase.value}",
                field="routes",
                hint="plan again: every phase of a service needs an instance",
            )
        lists.append(named)
    names = [SOURCE, *(name for listed in lists for name, _ in listed), SINK]
    held = [(0, 0), *((k, k + 1) for k, listed in enumerate(lists) for _ in listed)]
    last = len(names) - 1
    edges: list[Edge] = [(0, 1 + i, w) for i, (_, w) in enumerate(lists[0])]
    if whole:
        edges += [(1 + i, last, w) for i, (_, w) in enumerate(lists[0])]
    else:
        prefill, decode = (np.array([w for _, w in listed]) for listed in lists)
        near = np.array(
            [[region.get(a) == region.get(b) for b, _ in lists[1]] for a, _ in lists[0]]
        )
        pairs = pair_weights(prefill, decode, near)
        begin = 1 + len(lists[0])
        # Pairs the plan does not use are spare: `reweight` falls back on them.
        edges += [
            (1 + i, begin + j, float(w)) for i, row in enumerate(pairs) for j, w in enumerate(row)
        ]
        edges += [(begin + j, last, float(w)) for j, w in enumerate(pairs.sum(axis=0))]
    return RouteTables.of_edges(names, [*held, (len(lists), len(lists))], edges)


def pair_weights(prefill: Floats, decode: Floats, near: Flags) -> Floats:
    """Return the share of requests of each (prefill, decode) pair.

    Row and column sums are the shares of the instances. First pairs that are `near` are filled, each
    region as far as it goes, then the rest crosses.
    """
    left, right = prefill / prefill.sum(), decode / decode.sum()
    pairs = np.zeros((len(left), len(right)))
    # Rows with the same near columns are one region.
    for group in {tuple(row) for row in near.tolist()}:
        rows = np.array([tuple(row) == group for row in near.tolist()])
        columns = np.array(group)
        supply, demand = left[rows].sum(), right[columns].sum()
        if supply > 0.0 and demand > 0.0:
            moved = min(supply, demand) / (supply * demand)
            pairs[np.ix_(rows, columns)] = np.outer(left[rows], right[columns]) * moved
    rest_left = np.maximum(left - pairs.sum(axis=1), 0.0)
    rest_right = np.maximum(right - pairs.sum(axis=0), 0.0)
    total = rest_left.sum()
    if total > 1e-12:
        pairs += np.outer(rest_left, rest_right) / total
    return pairs


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
        """Return the instances for a request, one of each phase, or None: all are dead or `busy`, wait."""
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
