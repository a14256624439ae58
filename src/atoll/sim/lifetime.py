"""Life of a request: it starts, its tokens come out, it ends, or it starts over."""

from __future__ import annotations

import math

from atoll.sim.heap import append, hold, prompt_list, push, token_list, wait_way
from atoll.sim.link_traffic import charge, front_seconds, move_cache, post, share_at, unbook
from atoll.sim.reuse import leave_blocks
from atoll.sim.sim_arrays import (
    ANSWERS,
    ARRIVE,
    CHANGED,
    COMPONENT,
    DECODE,
    DONE,
    DROPPED,
    ENDED,
    FREED,
    KICKED,
    KV_HERE,
    MOVING,
    OPEN,
    POOL,
    PREFILL,
    PROMPTS,
    TOKENS,
    WAITING,
    WATERMARK,
    Sim,
)
from atoll.sim.sim_kernel import kernel

GAP_BINS = 400
GAP_MIN_S = 1e-5
GAP_PER_DECADE = 50.0


@kernel
def bin_of(z: Sim, now: float) -> int:
    """Return the bin of the time series that a time falls into."""
    return min(int(now / z.run[0].bin_s), z.run[0].bins - 1)


@kernel
def gap_bin(gap: float) -> int:
    """Return the bin of a gap between tokens."""
    if gap <= GAP_MIN_S:
        return 0
    return min(int(math.log10(gap / GAP_MIN_S) * GAP_PER_DECADE) + 1, GAP_BINS - 1)


@kernel
def note_tokens(z: Sim, service: int, now: float, count: int, gap: float) -> None:
    """Count generated tokens that came `gap` seconds after the ones before (negative: first tokens)."""
    z.service_bin[TOKENS, bin_of(z, now), service] += count
    if now < z.run[0].from_s:
        return
    z.service[service].tokens += count
    if gap >= 0.0:
        z.gap_count[service, gap_bin(gap)] += count
        z.service[service].gap_sum += gap * count


@kernel
def kick(z: Sim, u: int) -> None:
    """Have an idle unit look at its queue after this event: KV cache came free."""
    unit = z.unit[u]
    # A busy unit looks at its queue when its step ends.
    if not unit.alive or unit.busy or z.run[0].kicks >= z.todo.shape[1]:
        return
    if z.list[prompt_list(u)].head >= 0 or z.list[token_list(u)].head >= 0:
        z.todo[KICKED, z.run[0].kicks] = u
        z.run[0].kicks += 1


@kernel
def held_tokens(z: Sim, r: int, part: int, k: int, u: int) -> float:
    """Return the KV tokens that a request holds on hop k (unit u) of a part."""
    c = z.request[r]
    if part != c.part:
        # Computed in full and waiting to be fetched, or on its way here.
        return float(c.target) if part == 0 else 0.0
    if z.unit[u].solo:
        if c.join >= 0:
            return c.target + (z.unit[u].steps - c.join) * c.gain
        return float(c.context)
    # Units up to `charged` have the token of this pass, those behind them do not yet.
    return float(c.context if k < c.charged else c.before)


@kernel
def land(z: Sim, r: int, u: int) -> None:
    """Note that a request is back from the batch it left its first unit with, or will never be."""
    slot = z.request[r].slot
    if slot < 0:
        return
    z.request[r].slot = -1
    z.flight[u, slot] -= 1
    if z.flight[u, slot] == 0:
        kick(z, u)


@kernel
def release(z: Sim, r: int, part: int) -> None:
    """Free the KV cache and the booking of a request on the units of a part."""
    hops = z.leg[r, part].hops
    if hops == 0:
        return
    begin = part * z.run[0].path
    reached = 0
    for k in range(hops):
        u = z.edge[z.way[r, begin + k]].reach
        unit = z.unit[u]
        if k == 0:
            # Blocks are kept where prompts start only.
            leave_blocks(z, u, r)
        hold(z, u, -held_tokens(z, r, part, k, u) * share_at(z, u, reached))
        # Shares are fractions: their rounding must not leave a rest.
        if unit.used < 1e-6:
            unit.used = 0.0
        reached = unit.end
        kick(z, u)
    start = z.unit[z.edge[z.way[r, begin]].reach]
    if z.request[r].state == DECODE and part == z.request[r].part:
        start.owned -= 1
        land(z, r, z.edge[z.way[r, begin]].reach)
    unbook(z, r, part)
    z.leg[r, part].hops = 0
    one = z.instance[start.instance]
    done = one.draining and one.holds == 0
    z.run[0].dirty = max(z.run[0].dirty, CHANGED if done else FREED)


@kernel
def fullest_layer(z: Sim) -> float:
    """Return the share of KV cache booked of the layer that has most of it booked."""
    max_share = 0.0
    for layer in range(z.service[0].layers):
        booked, room = 0.0, 0.0
        for u in range(len(z.unit)):
            unit = z.unit[u]
            if unit.start <= layer < unit.end:
                booked += z.vertex[unit.vertex].booked
                room += unit.room
        if room > 0.0:
            max_share = max(max_share, booked / room)
    return max_share


@kernel
def feed(z: Sim, now: float) -> None:
    """Let the next request of a closed loop in, if its rule allows."""
    run = z.run[0]
    if run.fed >= run.requests:
        return
    if run.feed == WATERMARK and fullest_layer(z) > run.feed_mark:
        return
    r = run.fed
    run.fed += 1
    z.request[r].arrival_s = now + run.feed_delay_s
    push(z, z.request[r].arrival_s, ARRIVE, r)


@kernel
def end(z: Sim, r: int, now: float, state: int) -> None:
    """End the llm's work on a request: done, or dropped where nothing can ever take it.

    Its KV cache is free at once; what follows comes after the event (`end_llm`).
    """
    release(z, r, 0)
    release(z, r, 1)
    c = z.request[r]
    c.join = -1
    c.state = state
    c.last_s = now
    append(z, z.run[0].endings, r)
    z.run[0].dirty = max(z.run[0].dirty, FREED)


@kernel
def end_llm(z: Sim, r: int) -> None:
    """Go on with a request that the llm is done with."""
    c = z.request[r]
    now = c.last_s
    if c.state == DROPPED:
        c.end_s = now
        z.run[0].lost += 1
    else:
        next_level(z, r, now)
    if z.run[0].feed != OPEN:
        feed(z, now)


@kernel
def complete(z: Sim, r: int, now: float) -> None:
    """Note that all components of a request are done."""
    z.request[r].state = DONE
    z.request[r].end_s = now
    z.run[0].finished += 1
    z.service_bin[ENDED, bin_of(z, now), z.request[r].service] += 1


@kernel
def wait_route(z: Sim, r: int) -> None:
    """Let a request wait for instance and pipeline; they are found after the event."""
    wait_way(z, z.run[0].waits + z.request[r].service, r)
    z.run[0].dirty = max(z.run[0].dirty, FREED)


@kernel
def start_over(z: Sim, r: int) -> None:
    """Send a request back to the coordinator: its KV cache is gone and must be computed again."""
    release(z, r, 0)
    release(z, r, 1)
    c = z.request[r]
    c.join = -1
    c.marked = False
    c.retries += 1
    # Tokens it has made are computed again with the prompt.
    c.target = c.prompt + c.made
    c.state = WAITING
    z.run[0].retries += 1
    wait_route(z, r)


@kernel
def begin_part(z: Sim, r: int, part: int, now: float) -> None:
    """Set a routed request on its way: to prefill, or its KV cache to where it decodes."""
    c = z.request[r]
    if part == 1:
        move_cache(z, r, now)
        return
    c.part = 0
    c.state = PREFILL
    c.hop = 0
    c.charged = 0
    c.before = 0
    c.context = 0
    c.computed = 0
    c.join = -1
    if z.instance[c.instance].part == ANSWERS:
        # It only decodes: whoever asks has computed the prompt.
        c.state = MOVING
        push(z, now + front_seconds(z, z.edge[z.way[r, 0]].reach), KV_HERE, r)
        return
    post(z, now, z.way[r, 0], r, c.target)


@kernel
def next_pass(z: Sim, r: int, now: float) -> None:
    """Send a decoding request through its pipeline once more."""
    c = z.request[r]
    c.before = c.context
    c.context += 1
    c.charged = 0
    c.hop = 0
    if z.run[0].plain:
        charge(z, r, c.part, 1.0)
    post(z, now, z.way[r, c.part * z.run[0].path], r, 1)


@kernel
def prompt_done(z: Sim, r: int, now: float, seen: float) -> None:
    """Note the end of a prompt pass at `now`; its token is seen at `seen` by whoever asked."""
    c = z.request[r]
    yields = z.run[0].after_prompt == 1
    if math.isnan(c.first_s):
        c.first_s = seen
        if now >= z.run[0].from_s:
            z.service[c.service].prompts += 1
    elif yields:
        c.gap_s = max(c.gap_s, seen - c.last_s)
    if yields:
        c.made += 1
        note_tokens(z, c.service, now, 1, -1.0)
    c.last_s = seen
    if z.run[0].feed == WATERMARK:
        z.run[0].feeds += 1
        z.run[0].dirty = max(z.run[0].dirty, FREED)


@kernel
def decode_apart(z: Sim, r: int) -> None:
    """Have a request whose prompt is done decode elsewhere; its first token comes from there."""
    z.request[r].state = MOVING
    wait_way(z, z.run[0].moves + z.request[r].instance, r)
    # Counted so that `settle` need not look at the lists of all instances.
    z.run[0].moving += 1
    z.run[0].dirty = max(z.run[0].dirty, FREED)


@kernel
def moves_on(z: Sim, r: int) -> bool:
    """Return whether a request whose prompt is done decodes elsewhere: there, and not with one token only."""
    c = z.request[r]
    return z.instance[c.instance].part == PROMPTS and c.made + z.run[0].after_prompt < c.answer


@kernel
def next_level(z: Sim, r: int, now: float) -> None:
    """Start what comes next for a request: components side by side, the llm, or nothing more."""
    c = z.request[r]
    stop = z.klass[c.klass + 1]
    at = z.klass[c.klass] + c.level
    pending = 0
    # Components without an item of this request are done at once: go on with what follows.
    while pending == 0 and at < stop:
        if z.level[at].pool < 0:
            c.level += 1
            c.state = WAITING
            wait_route(z, r)
            return
        step = z.level[at].step
        c.state = COMPONENT
        while at < stop and z.level[at].step == step:
            pending += c.items
            c.pending = pending
            submit(z, z.level[at].pool, r, c.items, now)
            at += 1
            c.level += 1
    if pending == 0:
        complete(z, r, now)


@kernel
def submit(z: Sim, p: int, r: int, items: int, now: float) -> None:
    """Put the items of a request into the queue of a pool, each by itself."""
    pool = z.pool[p]
    for _ in range(items):
        z.task[pool.tail] = r
        pool.tail += 1
    wake_pool(z, p, now)


@kernel
def wake_pool(z: Sim, p: int, now: float) -> None:
    """Give waiting items to idle servers of a pool, in order, up to a batch each."""
    pool = z.pool[p]
    for i in range(pool.server, z.pool[p + 1].server):
        server = z.server[i]
        count = min(pool.tail - pool.head, pool.batch)
        if count == 0:
            return
        if server.busy:
            continue
        server.entry = pool.head
        server.items = count
        server.busy = True
        pool.head += count
        took = pool.fixed_s + pool.item_s * count
        server.busy_s += took
        push(z, now + took, POOL, i)
