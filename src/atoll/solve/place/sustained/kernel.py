"""Sustained throughput of a placement: which flow to send, and how much of it lasts (numba).

Given a flow, `sustain` finds the largest multiple of it that lasts: by Little's law the requests that
pass node i at r requests/s and stay W_i = (O + 1) * round trip seconds count r W_i held tokens on it, which
must fit. W grows with the rate, so bisection finds the multiple.

Which flow? `place_value` sends a flow of least cost (seconds) among the largest ones, found by
successive shortest paths, first under the nodes' token rates, then under what each node could carry if
its KV cache were full at the round trips just found; the better one counts.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from atoll.solve.place.sustained.residence import (
    NEVER,
    Arcs,
    Floats,
    Ints,
    Site,
    round_trips,
    step_of,
)

TINY = 1e-7
BUSY = 0.95
"""Share of its time that a node may be planned to work on prompts."""


@njit(cache=True, nogil=True)
def arcs_of(site: Site, start: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Return (tail, head) of the arcs that a placement allows, those into a node before those out of it."""
    size = len(start)
    order = np.argsort(end, kind="mergesort")
    tail = np.empty(size * (size + 2), np.int64)
    head = np.empty(size * (size + 2), np.int64)
    count = 0
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
    return tail[:count].copy(), head[:count].copy()


@njit(cache=True, nogil=True)
def cheapest_flow(  # noqa: C901 - one search; split up it would pass a dozen arrays around
    site: Site,
    tail: Ints,
    head: Ints,
    capacity: Floats,
    hop_s: Floats,
    dearest: float,
    flow: Floats,
) -> float:
    """Fill `flow` with a largest flow of least seconds under node capacities; return its value, tokens/s.

    Successive shortest paths on the residual graph (Bellman-Ford; vertices: source, node in, node out,
    sink). Stops before a path that takes more than `dearest` times the seconds of the first.
    """
    size = len(capacity)
    count = len(tail)
    sink = 2 * size
    # Edge e < count is arc e, edge count + i is node i; vertex 2 i is where node i is entered.
    through = np.zeros(size)
    flow[:] = 0.0
    room = np.empty(count)
    cost = np.empty(count)
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
    distance = np.empty(2 * size + 2)
    via = np.empty(2 * size + 2, np.int64)
    source = 2 * size + 1
    value = 0.0
    limit = np.inf
    while True:
        distance[:] = np.inf
        via[:] = -1
        distance[source] = 0.0
        changed = True
        rounds = 0
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
        if value == 0.0:
            limit = dearest * distance[sink]
        push = np.inf
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


@njit(cache=True, nogil=True)
def sustain(  # noqa: C901 - one bisection over arrays it shares
    site: Site, start: Ints, end: Ints, arcs: Arcs, use: Floats, trip: Floats, hop_s: Floats
) -> float:
    """Return the largest multiple of a flow that lasts; fill each node's KV use (1: full) and times there."""
    size = len(start)
    count = len(arcs.tail)
    through = np.zeros(size)
    run = np.zeros(size)
    for a in range(count):
        i, k = arcs.tail[a], arcs.head[a]
        if k >= 0:
            through[k] += arcs.flow[a]
            reached = max(end[i], start[k]) if i >= 0 else start[k]
            run[k] += arcs.flow[a] * (end[k] - reached)
    per_request = site.prompt + site.answer
    high = np.inf
    for i in range(size):
        if through[i] > 0.0:
            run[i] /= through[i]
            high = min(high, per_request / (through[i] * run[i] * site.prompt_s[i]))
    if high == np.inf:
        return 0.0
    arc_s = np.empty(count)
    behind = np.empty(size)
    low = 0.0
    for turn in range(26):
        last = turn == 25 or high - low < 1e-4 * high
        middle = low if last else (low + high) / 2.0
        top = 0.0
        lasts = round_trips(site, arcs, middle, run, through, arc_s, hop_s, behind, trip) < NEVER
        if lasts:
            for i in range(size):
                use[i] = 0.0
                if through[i] > 0.0:
                    tokens = middle * through[i] / per_request * (site.answer + 1.0) * trip[i]
                    tokens *= site.held * run[i] / (end[i] - start[i])
                    use[i] = tokens / site.kv[i, end[i] - start[i]]
                    top = max(top, use[i])
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


@njit(cache=True, nogil=True)
def place_value(
    site: Site, start: Ints, end: Ints, rounds: int, dearest: float, flow: Floats
) -> tuple[float, int]:
    """Return the sustained tokens/s of a placement and how many arcs it has; fill their flow.

    The arcs are those of `arcs_of`, in order; `flow` must have room for n (n + 2) of them. The value is
    that of the flow as filled, which is already scaled to what lasts.
    """
    size = len(start)
    tail, head = arcs_of(site, start, end)
    count = len(tail)
    capacity = np.zeros(size)
    hop_s = np.zeros(size)
    for i in range(size):
        held = end[i] - start[i]
        if held > 0:
            capacity[i] = site.rate[i, held]
            hop_s[i], _ = step_of(site, i, float(held), 0.0)
            hop_s[i] += held * site.prompt_s[i]
    trial = np.zeros(count)
    use = np.zeros(size)
    trip = np.zeros(size)
    best = 0.0
    per_request = site.prompt + site.answer
    for turn in range(rounds):
        value = cheapest_flow(site, tail, head, capacity, hop_s, dearest, trial)
        if value <= TINY:
            break
        kept = trial > TINY
        arcs = Arcs(tail[kept], head[kept], trial[kept])
        scale = sustain(site, start, end, arcs, use, trip, hop_s)
        if scale * value > best:
            best = scale * value
            flow[:count] = trial * scale
        if turn + 1 < rounds:
            mean = 0.0
            top = 0.0
            for i in range(size):
                if use[i] > 0.0:
                    top = max(top, trip[i])
            for i in range(size):
                held = end[i] - start[i]
                if held > 0:
                    mean = trip[i] if use[i] > 0.0 else top
                    if mean > 0.0:
                        full = site.kv[i, held] / (site.held * (site.answer + 1.0) * mean)
                        works = BUSY / (held * site.prompt_s[i])
                        capacity[i] = min(full, works) * per_request
    return best, count
