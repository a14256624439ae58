"""Flows balanced between ways that lead to the same end, for as much as possible to last.

A cheapest flow is a corner: of two equal nodes side by side one has all it can take and the other the rest,
so one KV cache fills first and tokens wait longer there. Each way that is not in a spanning tree of the ways
with most flow closes one circle with it. Around every circle in turn flow is moved while more lasts
(`sustain`), by ever smaller steps.
"""

from __future__ import annotations

import numpy as np

from atoll.solve.array_types import Floats, Ints
from atoll.solve.place.flow_instance import Placement
from atoll.solve.place.sustained.residence import Arcs, Site
from atoll.solve.place.sustained.sustained_kernel import sustain

_STEPS = (0.16, 0.08, 0.04)
"""Shares of all flow that are moved at a time."""
_TRICKLE = 1e-9
"""Share of all flow below which a way has none."""
_BETTER = 1e-5
"""Share by which more must last for a step to count."""


def balance(site: Site, placement: Placement, tail: Ints, head: Ints, flow: Floats) -> Floats:
    """Return the flow over the same nodes of which the most lasts, as far as single circles show it.

    `flow` is that of each arc, more than nothing in all; what is returned carries all of it otherwise.
    """
    total = float(flow[tail < 0].sum())
    flow = flow / total
    size = len(placement.start)
    unused = np.zeros((3, size))

    def lasting(flow: Floats) -> float:
        kept = flow > _TRICKLE
        arcs = Arcs(tail[kept], head[kept], flow[kept])
        return float(sustain(site, placement.start, placement.end, arcs, *unused))

    best = lasting(flow)
    circles = _circles(tail, head, flow, size)
    for step in _STEPS:
        for circle in (way * turn for way in circles for turn in (1.0, -1.0)):
            while (most := min(step, float(flow[circle < 0.0].min()))) > _TRICKLE:
                tried = flow + most * circle
                tried[tried < _TRICKLE] = 0.0
                value = lasting(tried)
                if value <= best * (1.0 + _BETTER):
                    break
                best, flow = value, tried
    return flow * total


def _circles(tail: Ints, head: Ints, flow: Floats, size: int) -> list[Floats]:
    """For every way between used nodes outside of a spanning tree what it adds to each way's flow."""
    source, sink = size, size + 1
    ends = np.array([np.where(tail < 0, source, tail), np.where(head < 0, sink, head)]).T
    used = np.bincount(ends[:, 1], weights=flow, minlength=size + 2) > _TRICKLE
    used[source] = True
    ways = [int(a) for a in np.argsort(-flow, kind="stable") if used[ends[a]].all()]
    # By Kruskal's rule: a way that joins two parts is in the tree, any other closes a circle.
    part = list(range(size + 2))
    beside: dict[int, list[tuple[int, int, float]]] = {}
    closing = []
    for a in ways:
        i, k = (int(v) for v in ends[a])
        if part[i] == part[k]:
            closing.append(a)
            continue
        part = [part[i] if p == part[k] else p for p in part]
        beside.setdefault(i, []).append((k, a, 1.0))
        beside.setdefault(k, []).append((i, a, -1.0))
    circles = []
    for a in closing:
        circle = np.zeros(len(tail))
        circle[a] = 1.0
        for way, turn in _path(beside, int(ends[a, 1]), int(ends[a, 0])):
            circle[way] += turn
        circles.append(circle)
    return circles


def _path(
    beside: dict[int, list[tuple[int, int, float]]], start: int, end: int
) -> list[tuple[int, float]]:
    """The ways in a tree from one node to another, each with 1 along or -1 against it."""
    reached: list[tuple[int, int, list[tuple[int, float]]]] = [(start, -1, [])]
    while reached:
        here, came, path = reached.pop()
        if here == end:
            return path
        reached += [(k, a, [*path, (a, turn)]) for k, a, turn in beside[here] if a != came]
    raise AssertionError("the tree is not one")
