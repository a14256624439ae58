"""Walks over a route table by a policy, around vertices that are dead: base of the routers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import numpy as np

from atoll.core.errors import UnknownNameError
from atoll.core.rng import stream
from atoll.routing import decisions
from atoll.routing.decisions import Flags, Ints
from atoll.routing.policies import policy_code
from atoll.routing.reweight import Solve, reweight
from atoll.routing.route_tables import RouteTables


def random_state(seed: int, *names: str) -> Ints:
    """Return the state of `decisions.draw` for a seed and a name."""
    return stream(seed, "routing", *names).integers(1, 2147483398, size=2, dtype=np.int64)


class GraphRouter:
    """Chooses ways through a graph; `member` is what its vertices are called.

    `queue` and `load`, one number per vertex of `tables`, are the caller's to keep up to date for the
    policies that look at them. `solve` computes the flows on what survives; without it they are scaled down
    (see `reweight`).
    """

    member: ClassVar[str]
    random_stream: ClassVar[str]
    """Name of the stream of random numbers: routers beside each other draw from different ones."""

    def __init__(
        self, tables: RouteTables, policy: str, seed: int, solve: Solve | None = None
    ) -> None:
        size = tables.vertices
        self.planned = tables
        self.tables = tables
        self.policy = policy_code(policy)
        self.solve = solve
        self.queue = np.zeros(size)
        self.load = np.zeros(size)
        self.dead: Flags = np.zeros(size, dtype=np.bool_)
        self._credit = np.zeros(tables.edges)
        self._delay = np.ones(tables.edges)
        self._random = random_state(seed, self.random_stream)
        self._closed: Flags = np.zeros(size, dtype=np.bool_)
        self._path = np.zeros(size, dtype=np.int64)

    def take_credit(self, before: GraphRouter) -> None:
        """Go on with what edges of another router had to their credit, so that shares stay smooth."""
        old, new = before.planned, self.planned
        ends = zip(old.source_of, old.target, before._credit, strict=True)
        known = {(old.names[a], old.names[b]): float(credit) for a, b, credit in ends}
        for e, (a, b) in enumerate(zip(new.source_of, new.target, strict=True)):
            self._credit[e] = known.get((new.names[a], new.names[b]), 0.0)

    def lost(self, names: Iterable[str]) -> None:
        """Send nothing to these from now on; the others share their flow."""
        self._set_dead(names, dead=True)

    def back(self, names: Iterable[str]) -> None:
        """Use these again, with the flow the plan gave them."""
        self._set_dead(names, dead=False)

    def _set_dead(self, names: Iterable[str], *, dead: bool) -> None:
        for name in names:
            self.dead[self._vertex(name)] = dead
        self.tables = reweight(self.planned, self.dead, self.solve)

    def _walk(self, masked: Flags) -> list[int] | None:
        """Return the vertices of a way around those masked; None where there is none."""
        t = self.tables
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
        return [int(v) for v in self._path[:count]]

    def _vertex(self, name: str) -> int:
        inner = self.planned.names[1:-1]
        if name not in inner:
            raise UnknownNameError(self.member, name, inner)
        return inner.index(name) + 1
