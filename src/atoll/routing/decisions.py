"""Routing decisions as plain functions over arrays, written so that numba can compile them unchanged.

Vertices are numbered: 0 is the source, the last is the sink. The edges of vertex v are
`first[v] .. first[v + 1]`, edge e leads to `target[e]` and carries `weight[e]` of the plan's flow
(any unit; 0: not used). `closed[v]` says that nothing may be sent to v now. A decision returns the
index of an edge, or -1 where every next hop is closed: the request waits, it is never dropped.

Interleaved weighted round robin. Let s_e = weight_e / (sum over open edges of v). Every request at v
adds s_e to the credit of each open edge and takes 1 from that of the edge it is sent over, so the
credit of e is what e should have had less what it got. Of the d open edges those with credit >= c,
c = 1 / (2 d - 2), may be taken; the one that must be taken soonest, i.e. with the least
(1 - c - credit_e) / s_e, is. This is Tijdeman's solution of the chairman assignment problem: after any
number of requests every edge is within 1 - c < 1 of its share. (Taking the largest credit instead, the
usual smooth round robin, has no such bound.) The credit of a closed edge stands still: what it missed
is not sent to it in a burst when it opens again.

Ties fall to the least `order[e]`. Siblings (vertices that feed the same next hops) have their orders
rotated against each other: with equal weights each alone would be smooth, but all of them in step
would send their requests to the same next hop at the same time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

ROUND_ROBIN = 0
THROUGHPUT = 1
RANDOM = 2
SHORTEST_QUEUE = 3
LEAST_LOAD = 4
TWO_CHOICES = 5

EVEN = 1e-9
"""Numbers nearer than this are a tie."""

BY_ARRIVAL, BY_SLACK, BY_LENGTH = range(3)
"""Orders in which prompts wait: see `urgency`."""
PROMPT_ORDER = BY_LENGTH
"""That of the stage engine, and of its simulation."""
PATIENCE = 10.0
"""How many times its promise a prompt waits before it goes ahead of all others."""
AGES = 1e9
"""Seconds by which ranks of prompts lie apart; longer than anything runs."""


def round_robin(
    first: Ints,
    target: Ints,
    weight: Floats,
    order: Ints,
    credit: Floats,
    vertex: int,
    closed: Flags,
) -> int:
    """Return the next edge of a vertex by interleaved weighted round robin (-1: wait); moves `credit`."""
    # First, what there is to share: the open edges and their sum.
    total = 0.0
    count = 0
    best = -1
    for e in range(first[vertex], first[vertex + 1]):
        if weight[e] > 0.0 and not closed[target[e]]:
            total += weight[e]
            count += 1
            best = e
    if count <= 1:
        # With one way there is nothing to share, and its credit stands still.
        return best
    min_step = 1.0 / (2 * count - 2)
    # Then, who is due: `best` by Tijdeman's rule, `richest` in case nobody has enough credit.
    best = -1
    best_due = 0.0
    richest = -1
    for e in range(first[vertex], first[vertex + 1]):
        if weight[e] <= 0.0 or closed[target[e]]:
            continue
        share = weight[e] / total
        credit[e] += share
        if (
            richest < 0
            or credit[e] > credit[richest] + EVEN
            or (credit[e] > credit[richest] - EVEN and order[e] < order[richest])
        ):
            richest = e
        if credit[e] >= min_step - EVEN:
            due = (1.0 - min_step - credit[e]) / share
            if (
                best < 0
                or due < best_due - EVEN
                or (due < best_due + EVEN and order[e] < order[best])
            ):
                best = e
                best_due = due
    if best < 0:
        # Closed edges may hold all the credit there is.
        best = richest
    credit[best] -= 1.0
    return best


def draw(random: Ints) -> float:
    """Return a number in [0, 1) and move the two-word state on (L'Ecuyer 1988, period 2.3e18).

    The same arithmetic fits Python's integers and 64-bit ones: one seed, one sequence, compiled or not.
    """
    # Both products stay below 2**47.
    random[0] = 40014 * random[0] % 2147483563
    random[1] = 40692 * random[1] % 2147483399
    return float((random[0] - random[1]) % 2147483562) / 2147483562.0


def by_weight(
    first: Ints, target: Ints, weight: Floats, vertex: int, closed: Flags, chance: float
) -> int:
    """Return an open edge with probability in proportion to `weight`; `chance` is in [0, 1)."""
    total = 0.0
    for e in range(first[vertex], first[vertex + 1]):
        if not closed[target[e]]:
            total += weight[e]
    left = chance * total
    found = -1
    for e in range(first[vertex], first[vertex + 1]):
        if weight[e] > 0.0 and not closed[target[e]]:
            # Set before the test: where rounding leaves a rest, the last open edge takes it.
            found = e
            left -= weight[e]
            if left < 0.0:
                break
    return found


def least_loaded(
    first: Ints,
    target: Ints,
    weight: Floats,
    order: Ints,
    load: Floats,
    vertex: int,
    closed: Flags,
) -> int:
    """Return the open edge whose target has the least `load`; ties fall to the least `order`."""
    best = -1
    for e in range(first[vertex], first[vertex + 1]):
        if weight[e] <= 0.0 or closed[target[e]]:
            continue
        if best < 0:
            best = e
            continue
        here, min_load = load[target[e]], load[target[best]]
        if here < min_load or (here == min_load and order[e] < order[best]):
            best = e
    return best


def min_charged(
    first: Ints,
    target: Ints,
    weight: Floats,
    charge: Floats,
    vertex: int,
    closed: Flags,
    tokens: float,
) -> int:
    """Return the open edge that with `tokens` more has the least charged for its flow; the first of equals.

    Plain interleaved weighted round robin, as Helix's runtime has it: `charge[e]` is the tokens sent over e
    so far, prompts and answers, over its weight. The caller charges; nothing moves here, and nothing is
    known of what lies beyond the next hop.
    """
    best = -1
    min_charge = 0.0
    for e in range(first[vertex], first[vertex + 1]):
        if weight[e] <= 0.0 or closed[target[e]]:
            continue
        after = charge[e] + tokens / weight[e]
        if best < 0 or after < min_charge:
            best = e
            min_charge = after
    return best


def by_throughput(
    first: Ints,
    target: Ints,
    weight: Floats,
    order: Ints,
    credit: Floats,
    delay: Floats,
    vertex: int,
    closed: Flags,
) -> int:
    """Return an open edge by the speed lately seen over it, as Swarm does; moves `credit`.

    `delay[e]` is the mean seconds requests sent over e took lately (see `observe`). Each edge gets the
    next request once the time of those it got before is the least; over time requests are shared in
    proportion to 1 / delay. The plan's flow plays no part but in saying which edges exist. Closed edges
    keep up with the others, so that none is flooded when it opens again.
    """
    best = -1
    for e in range(first[vertex], first[vertex + 1]):
        if weight[e] <= 0.0 or closed[target[e]]:
            continue
        if (
            best < 0
            or credit[e] < credit[best]
            or (credit[e] == credit[best] and order[e] < order[best])
        ):
            best = e
    if best < 0:
        return -1
    # Let closed edges catch up, or they would get every request once they open.
    for e in range(first[vertex], first[vertex + 1]):
        if closed[target[e]] and credit[e] < credit[best]:
            credit[e] = credit[best]
    credit[best] += delay[best]
    return best


def observe(delay: Floats, edge: int, seconds: float, smoothing: float) -> None:
    """Take into the mean delay of an edge that a request took so many seconds (`smoothing` in (0, 1])."""
    delay[edge] += smoothing * (seconds - delay[edge])


def next_hop(
    policy: int,
    first: Ints,
    target: Ints,
    weight: Floats,
    order: Ints,
    credit: Floats,
    delay: Floats,
    queue: Floats,
    load: Floats,
    random: Ints,
    vertex: int,
    closed: Flags,
) -> int:
    """Return the edge a policy takes from a vertex (-1: all next hops are closed, wait).

    Per vertex, `queue` is what waits there and `load` what it has to do over what it can do; per edge,
    `delay` is the seconds requests took over it lately. Only `credit` and `random` move.
    """
    if policy == ROUND_ROBIN:
        return round_robin(first, target, weight, order, credit, vertex, closed)
    if policy == SHORTEST_QUEUE:
        return least_loaded(first, target, weight, order, queue, vertex, closed)
    if policy == LEAST_LOAD:
        return least_loaded(first, target, weight, order, load, vertex, closed)
    if policy == THROUGHPUT:
        return by_throughput(first, target, weight, order, credit, delay, vertex, closed)
    one = by_weight(first, target, weight, vertex, closed, draw(random))
    if policy == RANDOM or one < 0:
        return one
    # Two choices: both by weight, the less loaded is taken and of equals the first.
    two = by_weight(first, target, weight, vertex, closed, draw(random))
    return two if load[target[two]] < load[target[one]] else one


def close(
    first: Ints, target: Ints, weight: Floats, sweep: Ints, masked: Flags, closed: Flags
) -> bool:
    """Fill `closed` from `masked` so that no request is sent into a dead end; say if any can start.

    A vertex is closed if it is masked or if every vertex it could send to is closed. `sweep` lists all
    vertices such that every edge leads to an earlier one (the sink first).
    """
    for i in range(len(sweep)):
        v = sweep[i]
        shut = True
        if not masked[v]:
            shut = first[v] < first[v + 1]
            for e in range(first[v], first[v + 1]):
                if weight[e] > 0.0 and not closed[target[e]]:
                    shut = False
                    break
        # A vertex without edges is the sink, or a node that no flow leaves.
        closed[v] = shut or (first[v] == first[v + 1] and v != len(first) - 2)
    return not closed[0]


def walk(
    policy: int,
    first: Ints,
    target: Ints,
    weight: Floats,
    order: Ints,
    credit: Floats,
    delay: Floats,
    queue: Floats,
    load: Floats,
    random: Ints,
    closed: Flags,
    path: Ints,
) -> int:
    """Write the nodes of one request's pipeline into `path` and return how many (0: wait).

    `closed` must come from `close`: then a request that starts can always finish its walk, and one that
    cannot start leaves the state of the policy as it was.
    """
    sink = len(first) - 2
    if closed[0]:
        return 0
    vertex = 0
    hops = 0
    while True:
        edge = next_hop(
            policy, first, target, weight, order, credit, delay, queue, load, random, vertex, closed
        )
        vertex = target[edge]
        if vertex == sink:
            return hops
        path[hops] = vertex
        hops += 1


def reservation(prompt: float, generated: float, estimate: float) -> float:
    """Return the tokens of KV cache a request is counted with: its prompt and the answer expected.

    `estimate` is how many tokens it is expected to generate in all; one that has outgrown it counts
    with what it has and the next one.
    """
    return prompt + max(estimate, generated + 1.0)


def mask_full(booked: Floats, capacity: Floats, high_water: float, need: float, full: Flags) -> int:
    """Fill `full[v]` where `need` more tokens would pass the high-water mark; return how many are.

    `booked[v]` tokens are reserved on v (see `reservation`) of `capacity[v]`, of which the share
    `high_water` may be used. A node that holds nothing takes any request that fits it at all.
    """
    count = 0
    for v in range(len(booked)):
        # Else a request larger than the mark would wait for ever.
        limit = capacity[v] * high_water if booked[v] > 0.0 else capacity[v]
        full[v] = booked[v] + need > limit
        if full[v]:
            count += 1
    return count


def share_run(start: int, end: int, reached: int) -> float:
    """Return the share of its layers [start, end) a node runs for a request that has done `reached`."""
    return (end - max(start, reached)) / (end - start)


def free_slot(flying: Ints, limit: int) -> int:
    """Return where to count the next batch of those under way, -1 if `limit` of them are.

    `flying[i]` is how many tokens of a batch are still out; a batch is back when all of them are.
    """
    free = -1
    taken = 0
    for i in range(len(flying)):
        if flying[i] > 0:
            taken += 1
        elif free < 0:
            free = i
    return free if taken < limit else -1


def urgency(
    order: int, now_s: float, arrival_s: float, promise_s: float, service_s: float
) -> float:
    """Return where a prompt stands among those that wait: the least goes first, ties by arrival.

    It is to have its first token `promise_s` after its arrival, and alone would take `service_s`. First come
    those that have waited for more than `PATIENCE` times their promise, so that none waits for good; then
    those that can still make it, by slack (the latest time to begin) or by length (the shortest first); last
    those that no longer can, which would only make others late. In the first and the last rank the oldest
    goes first.
    """
    if order == BY_ARRIVAL:
        return arrival_s
    # Before the slack is looked at: one this old can no longer make it, and would go last.
    if now_s - arrival_s > PATIENCE * promise_s:
        return arrival_s - AGES
    latest_s = arrival_s + promise_s - service_s
    if latest_s < now_s:
        return arrival_s + AGES
    return latest_s if order == BY_SLACK else service_s
