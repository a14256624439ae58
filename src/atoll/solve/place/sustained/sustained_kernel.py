"""Sustained throughput of a placement: which flow to send, and how much of it lasts (numba).

Given a flow, `sustain` finds the largest multiple of it that lasts: by Little's law r requests/s that stay
W = (O + 1) * round trip seconds are r W requests in flight, which must be no more than the KV caches admit
(`_max_in_flight`). W grows with the rate, so bisection finds the multiple.

Which flow? `place_value` sends a flow of least cost (seconds) among the largest ones, found by
successive shortest paths, first under the nodes' token rates, then under what each node could carry if
its KV cache were full at the round trips just found; the better one counts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from atoll.core.compiling import entry, lean_part
from atoll.solve.array_types import Floats, Ints
from atoll.solve.place.sustained.residence import (
    NEVER,
    SITE_TYPE,
    Arcs,
    Site,
    fill,
    round_trips,
    step_of,
)

COMPILED_AS = "the search for placements that last"
# Tokens/s that count as none: rounding leaves such rests on arcs.
TINY = 1e-7
BUSY = 0.95
"""Share of its time that a node may be planned to work on prompts."""


class KernelScratch(NamedTuple):
    """Memory that a call works in, made outside: allocating is slow to compile.

    Rows by node, by vertex (see `_cheapest_flow`), and by arc; nothing in it is kept.
    """

    nodes: Floats
    distance: Floats
    via: Ints
    arcs: Floats
    ends: Ints

    @classmethod
    def of(cls, nodes: int, arcs: int) -> KernelScratch:
        """Return memory for so many nodes and arcs."""
        return cls(
            np.empty((_CAPACITY + 1, nodes)),
            np.empty(2 * nodes + 2),
            np.empty(2 * nodes + 2, np.int64),
            np.empty((_KEPT_FLOW + 1, arcs)),
            np.empty((2, arcs), np.int64),
        )


SCRATCH_TYPE = "Tuple((float64[:, ::1], float64[::1], int64[::1], float64[:, ::1], int64[:, ::1]))"
# Rows of `KernelScratch.nodes` and `KernelScratch.arcs`.
_THROUGH, _RUN, _BEHIND, _STEP, _ON, _LEAD, _CAPACITY = range(7)
_ROOM, _COST, _ARC_S, _TRIAL, _SENT, _KEPT_FLOW = range(6)


@lean_part
def _list_arcs(site: Site, start: Ints, end: Ints, order: Ints, tail: Ints, head: Ints) -> int:
    """Do what `arcs_of` says; `order` sorts nodes by their end. Fill `tail` and `head`, return how many."""
    count = 0
    # By ends: arcs into a node then stand before arcs out of it, which the evaluators rely on.
    for k in order:
        if end[k] > start[k]:
            if start[k] == 0 and site.enter[k] > 0.0:
                tail[count], head[count] = -1, k
                count += 1
            for i in order:
                meets = end[i] == start[k] or (site.partial and start[k] < end[i] < end[k])
                if meets and end[i] > start[i] and site.link[i, k] > 0.0:
                    tail[count], head[count] = i, k
                    count += 1
    for i in order:
        if end[i] > start[i] and end[i] == site.layers and site.leave[i] > 0.0:
            tail[count], head[count] = i, -2
            count += 1
    return count


@lean_part
def _cheapest_flow(  # noqa: C901 - one search; split up it would pass a dozen arrays around
    site: Site,
    tail: Ints,
    head: Ints,
    capacity: Floats,
    hop_s: Floats,
    dearest: float,
    flow: Floats,
    scratch: KernelScratch,
) -> float:
    """Fill `flow` with a largest flow of least seconds under node capacities; return its value, tokens/s.

    Successive shortest paths on the residual graph (Bellman-Ford; vertices: source, node in, node out,
    sink). Stops before a path that takes more than `dearest` times the seconds of the first.
    """
    size = len(capacity)
    count = len(tail)
    sink = 2 * size
    # Edge e < count is arc e, edge count + i is node i; vertex 2 i is where node i is entered.
    through = scratch.nodes[_THROUGH]
    room, cost = scratch.arcs[_ROOM], scratch.arcs[_COST]
    distance, via = scratch.distance, scratch.via
    fill(through, 0.0)
    fill(flow, 0.0)
    for a in range(count):
        i, k = tail[a], head[a]
        if i < 0:
            room[a], cost[a] = site.enter[k], site.enter_s[k]
        elif k < 0:
            room[a], cost[a] = site.leave[i], site.leave_s[i]
        else:
            room[a] = site.link[i, k]
            # A prompt on its way holds up what comes after it.
            cost[a] = site.latency[i, k] + site.prompt / site.link[i, k]
    source = 2 * size + 1
    value = 0.0
    limit = np.inf
    while True:
        for v in range(2 * size + 2):
            distance[v] = np.inf
            via[v] = -1
        distance[source] = 0.0
        changed = True
        rounds = 0
        # Bellman-Ford needs at most one round per vertex; the limit guards against rounding that goes in
        # circles.
        while changed and rounds < 4 * size + 4:
            changed = False
            rounds += 1
            for e in range(count + size):
                if e < count:
                    a_from = source if tail[e] < 0 else 2 * tail[e] + 1
                    a_to = sink if head[e] < 0 else 2 * head[e]
                    free, used, price = room[e] - flow[e], flow[e], cost[e]
                else:
                    i = e - count
                    a_from, a_to = 2 * i, 2 * i + 1
                    free, used, price = capacity[i] - through[i], through[i], hop_s[i]
                if a_from == sink:
                    continue
                # A difference of rounding is no shorter path, and taking it could loop.
                if free > TINY and distance[a_from] + price < distance[a_to] - 1e-12:
                    distance[a_to] = distance[a_from] + price
                    via[a_to] = e
                    changed = True
                if used > TINY and distance[a_to] - price < distance[a_from] - 1e-12:
                    distance[a_from] = distance[a_to] - price
                    via[a_from] = e + count + size
                    changed = True
        if distance[sink] == np.inf or distance[sink] > limit:
            return value
        # The first path is the quickest there is: it sets how slow a later one may be.
        if value == 0.0:
            limit = dearest * distance[sink]
        push = np.inf
        # The path is walked twice: first to see how much fits, then to send it.
        for pushing in range(2):
            v = sink
            while v != source:
                e = via[v]
                back = e >= count + size
                e = e - count - size if back else e
                if e < count:
                    a_from = source if tail[e] < 0 else 2 * tail[e] + 1
                    a_to = sink if head[e] < 0 else 2 * head[e]
                    free = flow[e] if back else room[e] - flow[e]
                    if pushing:
                        flow[e] += -push if back else push
                else:
                    i = e - count
                    a_from, a_to = 2 * i, 2 * i + 1
                    free = through[i] if back else capacity[i] - through[i]
                    if pushing:
                        through[i] += -push if back else push
                if not pushing:
                    push = min(push, free)
                v = a_to if back else a_from
        value += push


@lean_part
def _max_in_flight(  # noqa: C901 - one search; split up it would pass a dozen arrays around
    site: Site,
    start: Ints,
    end: Ints,
    arcs: Arcs,
    run: Floats,
    through: Floats,
    room: Floats,
    scratch: KernelScratch,
) -> float:
    """Return how many requests the KV caches admit at a time.

    A request is let in while the fullest layer, over all nodes that hold it, has room below the mark; on its
    way it is sent around nodes that are full to `site.spare` times the mark. So no more are in flight than
    any layer holds, nor than the ways of the flow lead to caches: a largest flow of requests, found by
    shortest augmenting paths.
    """
    size, count = len(start), len(arcs.tail)
    max_total = np.inf
    for i in range(size):
        room[i] = 0.0
        if through[i] > 0.0:
            held = end[i] - start[i]
            room[i] = site.kv[i, held] * held / (site.held * run[i])
    # A request counts at every layer, so the layer with the least room admits no more than that.
    for layer in range(site.layers):
        total = 0.0
        for i in range(size):
            if start[i] <= layer < end[i]:
                total += room[i]
        max_total = min(max_total, total)
    # Edge e < count is arc e, edge count + i is node i, as in `_cheapest_flow`; arcs have no limit.
    sent, inside = scratch.arcs[_SENT], scratch.nodes[_ON]
    distance, via = scratch.distance, scratch.via
    source, sink = 2 * size + 1, 2 * size
    for a in range(count):
        sent[a] = 0.0
    fill(inside, 0.0)
    value = 0.0
    while value < max_total:
        for v in range(2 * size + 2):
            via[v] = -1
            distance[v] = np.inf
        distance[source] = 0.0
        changed = True
        # Only reachability counts here, so the search ends as soon as the sink is seen.
        while changed and distance[sink] == np.inf:
            changed = False
            for e in range(count + size):
                if e < count:
                    a_from = source if arcs.tail[e] < 0 else 2 * arcs.tail[e] + 1
                    a_to = sink if arcs.head[e] < 0 else 2 * arcs.head[e]
                    free, used = np.inf, sent[e]
                else:
                    i = e - count
                    a_from, a_to = 2 * i, 2 * i + 1
                    free, used = site.spare * room[i] - inside[i], inside[i]
                if distance[a_from] < np.inf and distance[a_to] == np.inf and free > TINY:
                    distance[a_to] = 0.0
                    via[a_to] = e
                    changed = True
                elif distance[a_to] < np.inf and distance[a_from] == np.inf and used > TINY:
                    distance[a_from] = 0.0
                    via[a_from] = e + count + size
                    changed = True
        if distance[sink] == np.inf:
            break
        # Beyond what the fullest layer admits nothing is gained.
        push = max_total - value
        for pushing in range(2):
            v = sink
            while v != source:
                e = via[v]
                back = e >= count + size
                e = e - count - size if back else e
                if e < count:
                    a_from = source if arcs.tail[e] < 0 else 2 * arcs.tail[e] + 1
                    a_to = sink if arcs.head[e] < 0 else 2 * arcs.head[e]
                    free = sent[e] if back else np.inf
                    if pushing:
                        sent[e] += -push if back else push
                else:
                    i = e - count
                    a_from, a_to = 2 * i, 2 * i + 1
                    free = inside[i] if back else site.spare * room[i] - inside[i]
                    if pushing:
                        inside[i] += -push if back else push
                if not pushing:
                    push = min(push, free)
                v = a_to if back else a_from
        value += push
    return min(value, max_total)


@lean_part
def _sustain(  # noqa: C901 - one bisection over arrays it shares
    site: Site,
    start: Ints,
    end: Ints,
    arcs: Arcs,
    use: Floats,
    trip: Floats,
    hop_s: Floats,
    scratch: KernelScratch,
) -> float:
    """Do what `sustain` says."""
    size = len(start)
    count = len(arcs.tail)
    through, run, behind = scratch.nodes[_THROUGH], scratch.nodes[_RUN], scratch.nodes[_BEHIND]
    step, on, lead = scratch.nodes[_STEP], scratch.nodes[_ON], scratch.nodes[_LEAD]
    arc_s = scratch.arcs[_ARC_S]
    fill(through, 0.0)
    fill(run, 0.0)
    for a in range(count):
        i, k = arcs.tail[a], arcs.head[a]
        if k >= 0:
            through[k] += arcs.flow[a]
            # With partial inference a node runs only the layers that were not run before it.
            reached = max(end[i], start[k]) if i >= 0 else start[k]
            run[k] += arcs.flow[a] * (end[k] - reached)
    per_request = site.prompt + site.answer
    high = np.inf
    for i in range(size):
        if through[i] > 0.0:
            run[i] /= through[i]
            # Prompts alone must fit a node's time: above this multiple it cannot keep up.
            high = min(high, per_request / (through[i] * run[i] * site.prompt_s[i]))
    if high == np.inf:
        return 0.0
    total = 0.0
    for a in range(count):
        if arcs.tail[a] < 0:
            total += arcs.flow[a]
    limit = _max_in_flight(site, start, end, arcs, run, through, behind, scratch)
    low = 0.0
    # Every turn halves the interval at least, so 26 turns are more than a share of 1e-4 needs.
    for turn in range(26):
        last = turn == 25 or high - low < 1e-4 * high
        # The last turn is at the lower end, so that what is filled in belongs to the multiple that is
        # returned.
        middle = low if last else (low + high) / 2.0
        top = 0.0
        mean_s = round_trips(
            site, arcs, middle, run, through, arc_s, hop_s, behind, trip, step, on, lead
        )
        lasts = mean_s < NEVER
        if lasts:
            # Requests in flight, of those that fit: where nodes fill unevenly, some are sent around them.
            top = middle * total / per_request * (site.answer + 1.0) * mean_s / limit
            for i in range(size):
                use[i] = 0.0
                if through[i] > 0.0:
                    tokens = middle * through[i] / per_request * (site.answer + 1.0) * trip[i]
                    tokens *= site.held * run[i] / (end[i] - start[i])
                    # What would be more is sent around the node.
                    use[i] = min(site.spare, tokens / site.kv[i, end[i] - start[i]])
        if last:
            break
        # Trips grow with the rate, so KV use grows faster than it: full below middle / top, or above it.
        if not lasts:
            high = middle
        elif top > 1.0:
            high, low = middle, max(low, middle / top)
        else:
            low, high = middle, min(high, middle / max(top, 1e-12))
    return low


@lean_part
def _cap_by_cache(
    site: Site, start: Ints, end: Ints, use: Floats, trip: Floats, capacity: Floats
) -> None:
    """Set the capacity of each node to what it carries with its KV cache full at the round trips found."""
    per_request = site.prompt + site.answer
    top = 0.0
    for i in range(len(start)):
        if use[i] > 0.0:
            top = max(top, trip[i])
    for i in range(len(start)):
        held = end[i] - start[i]
        if held > 0:
            # A node without flow has no trip of its own: the longest trip of the others stands in, on the
            # safe side.
            mean = trip[i] if use[i] > 0.0 else top
            if mean > 0.0:
                full = site.kv[i, held] / (site.held * (site.answer + 1.0) * mean)
                works = BUSY / (held * site.prompt_s[i])
                capacity[i] = min(full, works) * per_request


@lean_part
def _place_value(
    site: Site,
    start: Ints,
    end: Ints,
    order: Ints,
    rounds: int,
    dearest: float,
    tail: Ints,
    head: Ints,
    flow: Floats,
    use: Floats,
    trip: Floats,
    hop_s: Floats,
    scratch: KernelScratch,
) -> tuple[float, int]:
    """Do what `place_value` says; `tail` and `head` have room for the arcs, `use` to `hop_s` are by node."""
    size = len(start)
    count = _list_arcs(site, start, end, order, tail, head)
    tail, head = tail[:count], head[:count]
    kept_tail, kept_head = scratch.ends[0], scratch.ends[1]
    kept_flow = scratch.arcs[_KEPT_FLOW]
    trial = scratch.arcs[_TRIAL][:count]
    capacity = scratch.nodes[_CAPACITY]
    for i in range(size):
        capacity[i] = hop_s[i] = use[i] = trip[i] = 0.0
        held = end[i] - start[i]
        if held > 0:
            # The first turn goes by token rates; later ones by what the caches allow at the trips then known.
            capacity[i] = site.rate[i, held]
            hop_s[i], _ = step_of(site, i, float(held), 0.0)
            hop_s[i] += held * site.prompt_s[i]
    best = 0.0
    for turn in range(rounds):
        value = _cheapest_flow(site, tail, head, capacity, hop_s, dearest, trial, scratch)
        if value <= TINY:
            break
        kept = 0
        for a in range(count):
            # Arcs without flow would only be walked through again in every step of the bisection.
            if trial[a] > TINY:
                kept_tail[kept], kept_head[kept], kept_flow[kept] = tail[a], head[a], trial[a]
                kept += 1
        arcs = Arcs(kept_tail[:kept], kept_head[:kept], kept_flow[:kept])
        scale = _sustain(site, start, end, arcs, use, trip, hop_s, scratch)
        # A later turn may be worse: the best of all turns counts.
        if scale * value > best:
            best = scale * value
            for a in range(count):
                flow[a] = trial[a] * scale
        if turn + 1 < rounds:
            _cap_by_cache(site, start, end, use, trip, capacity)
    return best, count


@entry(
    f"({SITE_TYPE}, int64[::1], int64[::1], int64[::1], int64, float64, int64[::1], int64[::1],"
    f" float64[::1], float64[::1], float64[::1], float64[::1], {SCRATCH_TYPE})"
)
def _sustain_or_place(
    site: tuple[Any, ...],
    start: Ints,
    end: Ints,
    order: Ints,
    rounds: int,
    dearest: float,
    tail: Ints,
    head: Ints,
    flow: Floats,
    use: Floats,
    trip: Floats,
    hop_s: Floats,
    scratch: tuple[Any, ...],
) -> tuple[float, int]:
    """`place_value`; with 0 `rounds` `sustain`. One entry for both: the one is made of the other."""
    if rounds == 0:
        arcs = Arcs(tail, head, flow)
        return _sustain(
            Site(*site), start, end, arcs, use, trip, hop_s, KernelScratch(*scratch)
        ), len(tail)
    return _place_value(
        Site(*site), start, end, order, rounds, dearest, tail, head, flow, use, trip, hop_s,
        KernelScratch(*scratch),
    )  # fmt: skip


@entry(f"({SITE_TYPE}, int64[::1], int64[::1], int64[::1], int64[::1], int64[::1])")
def _fill_arcs(
    site: tuple[Any, ...], start: Ints, end: Ints, order: Ints, tail: Ints, head: Ints
) -> int:
    return _list_arcs(Site(*site), start, end, order, tail, head)


def arcs_of(site: Site, start: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Return (tail, head) of the arcs that a placement allows, those into a node before those out of it."""
    tail, head = np.empty((2, _max_arcs(site)), np.int64)
    count = _fill_arcs(tuple(site), *_ranges(start, end), tail, head)
    return tail[:count].copy(), head[:count].copy()


def sustain(
    site: Site, start: Ints, end: Ints, arcs: Arcs, use: Floats, trip: Floats, hop_s: Floats
) -> float:
    """Return the largest multiple of a flow that lasts; fill each node's KV use (1: full) and times there."""
    scale, _ = _sustain_or_place(
        tuple(site), *_ranges(start, end), 0, 0.0, arcs.tail, arcs.head, arcs.flow, use, trip, hop_s,
        tuple(KernelScratch.of(len(start), len(arcs.tail))),
    )  # fmt: skip
    return scale


def place_value(
    site: Site, start: Ints, end: Ints, rounds: int, dearest: float, flow: Floats
) -> tuple[float, int]:
    """Return the sustained tokens/s of a placement and how many arcs it has; fill their flow.

    The arcs are those of `arcs_of`, in order; `flow` must have room for n (n + 2) of them. The value is
    that of the flow as filled, which is already scaled to what lasts. `rounds` is 1 or more.
    """
    max_arcs = _max_arcs(site)
    tail, head = np.empty((2, max_arcs), np.int64)
    use, trip, hop_s = np.empty((3, len(start)))
    return _sustain_or_place(
        tuple(site), *_ranges(start, end), rounds, dearest, tail, head, flow, use, trip, hop_s,
        tuple(KernelScratch.of(len(start), max_arcs)),
    )  # fmt: skip


def _max_arcs(site: Site) -> int:
    return len(site.enter) * (len(site.enter) + 2)


def _ranges(start: Ints, end: Ints) -> tuple[Ints, Ints, Ints]:
    """Return a placement as compiled code takes it, and its nodes by their ends."""
    start, end = np.ascontiguousarray(start, np.int64), np.ascontiguousarray(end, np.int64)
    return start, end, np.argsort(end, kind="stable")
