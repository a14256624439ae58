"""Queues of the event loop: the heap of events, lists of requests, heaps of endings."""

from __future__ import annotations

from atoll.sim.sim_arrays import Sim
from atoll.sim.sim_kernel import kernel

# Payload and kind of an event share one integer: kinds are below this number.
KINDS = 8


@kernel
def push(z: Sim, time: float, kind: int, payload: int) -> None:
    """Add an event; of two at one time the one added first comes first."""
    h = z.heap
    order = z.run[0].sequence
    z.run[0].sequence = order + 1
    i = z.run[0].heaped
    z.run[0].heaped = i + 1
    while i > 0:
        up = (i - 1) >> 1
        # The new event has the largest `order` so far, so at equal times it stays below.
        if h[up].time <= time:
            break
        h[i] = h[up]
        i = up
    h[i].time = time
    h[i].order = order
    h[i].value = payload * KINDS + kind


@kernel
def pop(z: Sim) -> int:
    """Remove the first event and return kind and payload; its time must be read before."""
    h = z.heap
    value = h[0].value
    last = z.run[0].heaped - 1
    z.run[0].heaped = last
    # The last event fills the hole at the top, and sinks to its place.
    time, order, moved = h[last].time, h[last].order, h[last].value
    i = 0
    while True:
        down = 2 * i + 1
        if down >= last:
            break
        right = down + 1
        if right < last and (
            h[right].time < h[down].time
            or (h[right].time == h[down].time and h[right].order < h[down].order)
        ):
            down = right
        if time < h[down].time or (time == h[down].time and order < h[down].order):
            break
        h[i] = h[down]
        i = down
    h[i].time = time
    h[i].order = order
    h[i].value = moved
    return value


@kernel
def prompt_list(u: int) -> int:
    """Return the list of prompts that wait at unit u."""
    return 2 * u


@kernel
def token_list(u: int) -> int:
    """Return the list of decoding requests that wait at unit u."""
    return 2 * u + 1


@kernel
def append(z: Sim, at: int, r: int) -> None:
    """Put request r at the end of list `at`."""
    z.request[r].after = -1
    if z.list[at].head < 0:
        z.list[at].head = r
    else:
        z.request[z.list[at].tail].after = r
    z.list[at].tail = r


@kernel
def take(z: Sim, at: int) -> int:
    """Remove the first request of list `at` and return it."""
    r = z.list[at].head
    z.list[at].head = z.request[r].after
    # The tail of a list that is now empty is left as it is: `append` reads it only where there is a head.
    z.request[r].after = -1
    return r


@kernel
def unlink(z: Sim, at: int, previous: int, r: int) -> None:
    """Take request r off list `at`, where it comes after `previous` (-1: it is the first)."""
    following = z.request[r].after
    if previous < 0:
        z.list[at].head = following
    else:
        z.request[previous].after = following
    if following < 0:
        z.list[at].tail = previous
    z.request[r].after = -1


@kernel
def put_first(z: Sim, at: int, r: int) -> None:
    """Put a prompt first in list `at`; one that has begun stays ahead of it."""
    head = z.list[at].head
    if head < 0:
        append(z, at, r)
    elif z.request[head].context > 0:
        z.request[r].after = z.request[head].after
        z.request[head].after = r
        if z.list[at].tail == head:
            z.list[at].tail = r
    else:
        z.request[r].after = head
        z.list[at].head = r


@kernel
def owner(z: Sim, r: int) -> int:
    """Return the request that a record stands for: itself, or whose chunk it is."""
    of = z.request[r].of
    return of if of >= 0 else r


@kernel
def stale(z: Sim, r: int) -> bool:
    """Return whether a record is the chunk of a prompt that starts over, or soon will."""
    c = z.request[r]
    # `retries` tells chunks of an earlier attempt from those of the present one.
    return c.of >= 0 and (z.request[c.of].marked or z.request[c.of].retries != c.retries)


@kernel
def spare(z: Sim, r: int) -> None:
    """Give the record of a chunk back."""
    # Records that are free form a stack, linked by `after`.
    z.request[r].after = z.run[0].spare
    z.run[0].spare = r


@kernel
def hold(z: Sim, u: int, tokens: float) -> None:
    """Put so many tokens of KV cache on a unit, or take them off."""
    unit = z.unit[u]
    unit.used += tokens
    # The integral until T is used * T - used_moment, so nothing has to be summed at every event.
    unit.used_moment += tokens * z.run[0].clock_s


@kernel
def queue_at(z: Sim, u: int, requests: float) -> None:
    """Count requests that begin to wait at a unit, or no longer do."""
    unit = z.unit[u]
    z.vertex[unit.vertex].queue += requests
    unit.queue_moment += requests * z.run[0].clock_s


@kernel
def wait_way(z: Sim, at: int, r: int) -> None:
    """Put a request at the end of a list of those that wait for a way."""
    service = z.service[z.request[r].service]
    service.waiting += 1
    service.waiting_moment += z.run[0].clock_s
    append(z, at, r)


@kernel
def leave_way(z: Sim, at: int) -> int:
    """Take the first request off a list of those that wait for a way."""
    r = take(z, at)
    service = z.service[z.request[r].service]
    service.waiting -= 1
    service.waiting_moment -= z.run[0].clock_s
    return r


@kernel
def end_push(z: Sim, u: int, n: int, step: int, r: int) -> None:
    """Add a sequence that ends at decode step `step` to a unit that runs n."""
    i = n
    while i > 0:
        up = (i - 1) >> 1
        if z.ending[u, up].step <= step:
            break
        z.ending[u, i] = z.ending[u, up]
        i = up
    z.ending[u, i].step = step
    z.ending[u, i].request = r


@kernel
def end_remove(z: Sim, u: int, n: int, at: int) -> int:
    """Remove entry `at` of the n sequences of a unit and return its request."""
    e = z.ending
    r = e[u, at].request
    last = n - 1
    step, name = e[u, last].step, e[u, last].request
    i = at
    if at < last:
        # The entry that moves comes from another branch: it may belong above `at` as well as below.
        while i > 0 and e[u, (i - 1) >> 1].step > step:
            e[u, i] = e[u, (i - 1) >> 1]
            i = (i - 1) >> 1
        while True:
            down = 2 * i + 1
            if down >= last:
                break
            if down + 1 < last and e[u, down + 1].step < e[u, down].step:
                down += 1
            if step <= e[u, down].step:
                break
            e[u, i] = e[u, down]
            i = down
        e[u, i].step = step
        e[u, i].request = name
    return r


@kernel
def gap_push(z: Sim, u: int, step: int, gap: float) -> None:
    """Note the gap before the tokens of a step; entries it makes irrelevant go."""
    n = z.unit[u].gaps
    g = z.gap
    # A gap that is no larger than a later one is never the largest since any step.
    while n > 0 and g[u, n - 1].gap_s <= gap:
        n -= 1
    if n == g.shape[1]:
        # The oldest two become one that is no smaller: a bound, for sequences that old.
        g[u, 1].gap_s = max(g[u, 0].gap_s, g[u, 1].gap_s)
        for i in range(1, n):
            g[u, i - 1] = g[u, i]
        n -= 1
    g[u, n].gap_s = gap
    g[u, n].step = step
    z.unit[u].gaps = n + 1


@kernel
def gap_since(z: Sim, u: int, step: int) -> float:
    """Return the largest gap of a step numbered `step` or later, 0 if there is none."""
    low, high = 0, z.unit[u].gaps
    # Steps rise and gaps fall along the list: the first entry that is late enough has the largest gap.
    while low < high:
        middle = (low + high) >> 1
        if z.gap[u, middle].step < step:
            low = middle + 1
        else:
            high = middle
    return z.gap[u, low].gap_s if low < z.unit[u].gaps else 0.0
