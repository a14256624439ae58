"""Edges as arrays: what the decisions of `decisions` read.

Vertex 0 is the source, 1 .. n are nodes (or instances), n + 1 is the sink.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from atoll.core.errors import InputError
from atoll.plan.plan import SINK, SOURCE
from atoll.routing.decisions import Floats, Ints

if TYPE_CHECKING:
    from atoll.plan.plan import Instance

Edge = tuple[int, int, float]
"""From vertex, to vertex, weight."""


@dataclass(frozen=True)
class RouteTables:
    """A graph with weights; see `decisions` for how it is read.

    `start[v]`, `end[v]` are the layers vertex v holds: [0, 0) for the source, [L, L) for the sink.
    `weight` is the plan's flow (0: possible, not used); `order` breaks ties; `sweep` lists the vertices
    from the sink to the source so that every edge leads to an earlier one.
    """

    names: tuple[str, ...]
    start: Ints
    end: Ints
    first: Ints
    target: Ints
    weight: Floats
    order: Ints
    sweep: Ints

    @property
    def vertices(self) -> int:
        """Number of vertices, source and sink included."""
        return len(self.names)

    @property
    def edges(self) -> int:
        """Number of edges."""
        return len(self.target)

    @property
    def source_of(self) -> Ints:
        """The vertex each edge leaves."""
        return np.repeat(np.arange(self.vertices), np.diff(self.first))

    def vertex(self, name: str) -> int:
        """Return the number of a vertex by its name."""
        return self.names.index(name)

    def with_weight(self, weight: Floats) -> RouteTables:
        """Return the same graph with other weights."""
        return replace(self, weight=np.ascontiguousarray(weight, dtype=np.float64))

    @classmethod
    def of_edges(
        cls,
        names: Sequence[str],
        ranges: Sequence[tuple[int, int]],
        edges: Iterable[Edge],
    ) -> RouteTables:
        """Build the tables of the vertices (source first, sink last), their layers and the edges.

        Every edge must lead to a vertex that ends at a later layer, or to the sink.
        """
        size = len(names)
        start = np.array([held[0] for held in ranges], dtype=np.int64)
        end = np.array([held[1] for held in ranges], dtype=np.int64)
        # By the vertex they leave: edges of one vertex stand together.
        listed = sorted(edges)
        for a, b, _ in listed:
            # Every edge gains layers, so no request goes round in a circle.
            if b != size - 1 and end[b] <= end[a]:
                raise InputError(
                    f"{names[a]} -> {names[b]} leads back to layers already done", field="flows"
                )
        tail = np.array([a for a, _, _ in listed], dtype=np.int64)
        first = np.zeros(size + 1, dtype=np.int64)
        np.cumsum(np.bincount(tail, minlength=size), out=first[1:])
        target = np.array([b for _, b, _ in listed], dtype=np.int64)
        # The sink first; then by where vertices end, latest first.
        inner = sorted(range(size - 1), key=lambda v: (-int(end[v]), -v))
        return cls(
            names=tuple(names),
            start=start,
            end=end,
            first=first,
            target=target,
            weight=np.array([w for _, _, w in listed], dtype=np.float64),
            order=_stagger(first, target),
            sweep=np.array([size - 1, *inner], dtype=np.int64),
        )

    @classmethod
    def from_instance(cls, instance: Instance, *, spare: bool = False) -> RouteTables:
        """Build the tables of an instance of a plan: its nodes and the flows between them.

        With `spare`, edges that its layer ranges allow but its flows do not use are there too, with
        weight 0: `reweight` falls back on them when a node dies.
        """
        names = [SOURCE, *(node.id for node in instance.nodes), SINK]
        number = {name: v for v, name in enumerate(names)}
        last = max(node.end for node in instance.nodes)
        held = [(0, 0), *((node.start, node.end) for node in instance.nodes), (last, last)]
        weights: dict[tuple[int, int], float] = {}
        for flow in instance.flows:
            for name in (flow.src, flow.dst):
                if name not in number:
                    raise InputError(
                        f"flow to or from {name!r}, which is no node of {instance.id}",
                        field="flows",
                    )
            pair = (number[flow.src], number[flow.dst])
            # Several flows between two nodes are one edge.
            if flow.per_s > 0:
                weights[pair] = weights.get(pair, 0.0) + flow.per_s
        if spare:
            for pair in _possible(held, partial=instance.partial):
                weights.setdefault(pair, 0.0)
        return cls.of_edges(names, held, ((a, b, w) for (a, b), w in weights.items()))


def _possible(held: Sequence[tuple[int, int]], *, partial: bool) -> list[tuple[int, int]]:
    """List the pairs of vertices whose layers follow each other."""
    size = len(held)
    last = held[-1][1]
    pairs: list[tuple[int, int]] = []
    for a in range(size - 1):
        reached = held[a][1]
        if reached == last:
            pairs.append((a, size - 1))
            continue
        for b in range(1, size - 1):
            start, end = held[b]
            # With overlaps a request may come in at the middle of a node's layers, but not where it starts.
            if start == reached or (partial and a > 0 and start <= reached < end):
                pairs.append((a, b))
    return pairs


def _stagger(first: Ints, target: Ints) -> Ints:
    """Return the order in which each vertex's edges win ties: siblings begin at different next hops.

    Siblings get requests in turn. The i-th of k siblings with d next hops begins at hop i (k >= d) or
    i d / k (k < d): with equal weights their requests then reach the next hops in turn as well.
    """
    order = np.zeros(len(target), dtype=np.int64)
    families: dict[tuple[int, ...], list[int]] = {}
    for v in range(len(first) - 1):
        hops = tuple(int(t) for t in target[first[v] : first[v + 1]])
        if hops:
            families.setdefault(hops, []).append(v)
    for hops, members in families.items():
        count, siblings = len(hops), len(members)
        for i, v in enumerate(members):
            begin = i if siblings >= count else i * count // siblings
            order[first[v] : first[v + 1]] = (np.arange(count) - begin) % count
    return order
