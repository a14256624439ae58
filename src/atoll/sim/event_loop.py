"""The event loop: takes events in order of time and hands each to what it concerns."""

from __future__ import annotations

import math

from atoll.core.compiling import entry
from atoll.routing.decisions import BY_ARRIVAL
from atoll.sim.gpu_turns import end_turn, leave_turn
from atoll.sim.heap import (
    KINDS,
    append,
    hold,
    leave_way,
    owner,
    pop,
    prompt_list,
    push,
    put_first,
    queue_at,
    spare,
    stale,
    take,
    token_list,
)
from atoll.sim.lifetime import (
    begin_part,
    bin_of,
    decode_apart,
    end,
    end_llm,
    feed,
    land,
    moves_on,
    next_level,
    next_pass,
    note_tokens,
    prompt_done,
    release,
    start_over,
    wake_pool,
)
from atoll.sim.link_traffic import (
    flush,
    instance_open,
    partners,
    route,
    service_open,
    share_at,
    stranded,
)
from atoll.sim.reuse import forget_blocks
from atoll.sim.sim_arrays import (
    ANSWERS,
    ARRIVE,
    ARRIVED,
    BUSY_S,
    CACHED,
    CHANGED,
    CLEAN,
    DECODE,
    DELIVER,
    DONE,
    DRAIN,
    DROPPED,
    FAIL,
    FILLED,
    FLYING,
    KICKED,
    KV_HERE,
    LENGTH,
    LIFE,
    MOVING,
    OPEN,
    PREFILL,
    QUEUED,
    READY,
    REVIVE,
    SAMPLE,
    STEP,
    WAITED,
    WATERMARK,
    Longs,
    Sim,
)
from atoll.sim.sim_kernel import kernel, sim_at
from atoll.sim.solo import solo_end, solo_fail, solo_start
from atoll.sim.stage_units import stage_end, stage_start
from atoll.sim.stepping import whole_seconds

COMPILED_AS = "the simulator"
ASK_AGAIN_S = 0.25
"""When an instance that only decodes looks again whether there is room for a request that came."""


@kernel
def wake(z: Sim, u: int, now: float) -> None:
    """Start a step on an idle unit."""
    if z.unit[u].busy or not z.unit[u].alive:
        return
    if z.unit[u].solo:
        solo_start(z, u, now, now)
    else:
        stage_start(z, u, now)


@kernel
def alone_seconds(z: Sim, r: int, hop: int) -> float:
    """Return how long the prompt of a request takes on its units from a hop on, were it alone there."""
    c = z.request[r]
    begin = c.part * z.run[0].path
    # `whole_seconds` reads the prompts of a step from `z.step`: here there is one, with nothing in the cache.
    z.step[LENGTH, 0] = c.target
    z.step[CACHED, 0] = 0.0
    total = 0.0
    for k in range(hop, z.leg[r, c.part].hops):
        u = z.edge[z.way[r, begin + k]].reach
        total += whole_seconds(z, u, z.service[c.service].layers, 1, 0, 0.0)
    return total


@kernel
def wait_prompt(z: Sim, u: int, r: int) -> None:
    """Let a prompt wait at a unit; one that gave way and is computed again goes first in eager engines."""
    own, hop = owner(z, r), z.request[r].hop
    c, instance = z.request[own], z.instance[z.unit[u].instance]
    # Orders other than arrival rank prompts by how long they take (`urgency`).
    if instance.order != BY_ARRIVAL and c.charged <= hop:
        c.service_s = alone_seconds(z, own, hop)
    if hop == 0 and c.made > 0 and instance.eager:
        put_first(z, prompt_list(u), r)
        queue_at(z, u, 1.0)
    else:
        wait_at(z, u, prompt_list(u), r)


@kernel
def wait_at(z: Sim, u: int, at: int, r: int) -> None:
    """Let a request wait at a unit."""
    append(z, at, r)
    queue_at(z, u, 1.0)


@kernel
def token_out(z: Sim, r: int, now: float) -> None:
    """Take in what came out of a request's pipeline and send it round again, or end it."""
    c = z.request[r]
    if c.state == PREFILL:
        if moves_on(z, r):
            # Another instance decodes it: the first token counts when its KV cache is there (`cache_here`).
            decode_apart(z, r)
            return
        prompt_done(z, r, now, now)
        if c.made >= c.answer:
            end(z, r, now, DONE)
        else:
            c.state = DECODE
            z.unit[z.edge[z.way[r, 0]].reach].owned += 1
            next_pass(z, r, now)
        return
    gap = now - c.last_s
    c.gap_s = max(c.gap_s, gap)
    c.last_s = now
    c.made += 1
    z.instance[c.instance].tokens += 1
    note_tokens(z, c.service, now, 1, gap)
    if c.made >= c.answer:
        end(z, r, now, DONE)
    else:
        next_pass(z, r, now)


@kernel
def deliver(z: Sim, head: int, now: float) -> None:
    """Hand the requests of a message to where it went."""
    u = z.edge[z.request[head].over].reach
    r = head
    while r >= 0:
        c = z.request[r]
        # `after` links the requests of a message; handing one on may link it into another list.
        following = c.after
        c.after = -1
        if c.of >= 0 and (u < 0 or not z.unit[u].alive or stale(z, r)):
            # The record of a chunk is only given back: its prompt starts over when it is next seen.
            spare(z, r)
        elif c.marked or (u >= 0 and not z.unit[u].alive):
            start_over(z, r)
        elif u < 0:
            # Beyond the last unit: a token has come out of the pipeline.
            token_out(z, r, now)
        else:
            if c.hop == 0:
                land(z, r, u)
            if c.state == PREFILL:
                c.came_s = now
                wait_prompt(z, u, r)
            else:
                wait_at(z, u, token_list(u), r)
        r = following
    if u >= 0:
        wake(z, u, now)
    else:
        flush(z, now)


@kernel
def hold_everywhere(z: Sim, r: int, part: int) -> bool:
    """Put the KV cache of a prompt on all units that decode it; False, and nothing, where one is full."""
    begin = part * z.run[0].path
    hops = z.leg[r, part].hops
    size = z.request[r].target
    # First look at all units, then place: a request that fits only some of them must leave no trace.
    for place in (False, True):
        reached = 0
        for k in range(hops):
            u = z.edge[z.way[r, begin + k]].reach
            unit = z.unit[u]
            # Layers of units may overlap: each holds only those that the units before it have not run.
            share = share_at(z, u, reached)
            reached = unit.end
            if place:
                hold(z, u, size * share)
                unit.peak = max(unit.peak, unit.used)
            elif unit.used + size * share > unit.room:
                return False
    return True


@kernel
def cache_here(z: Sim, r: int, now: float) -> None:
    """Let a request decode where its KV cache has arrived; the prefill side is free of it.

    This is when its first token is streamed, by the side that goes on with it.
    """
    c = z.request[r]
    if c.marked:
        start_over(z, r)
        return
    part = 1 if z.leg[r, 1].hops > 0 else 0
    begin = part * z.run[0].path
    u = z.edge[z.way[r, begin]].reach
    last = z.unit[z.edge[z.way[r, begin + z.leg[r, part].hops - 1]].reach]
    if not z.unit[u].solo and not hold_everywhere(z, r, part):
        # Nobody has to compute its prompt again: its KV cache stays where it is until there is room.
        push(z, now + ASK_AGAIN_S, KV_HERE, r)
        return
    if part == 1:
        # Until here the prefill side has the only copy.
        release(z, r, 0)
    c.part = part
    c.hop = 0
    c.charged = 0
    # A solo unit books the room itself, between steps (`take_ready`).
    if z.unit[u].solo:
        prompt_done(z, r, now, now + last.back_s)
        c.context = 0
        c.came_s = now
        wait_at(z, u, token_list(u), r)
        wake(z, u, now)
        return
    prompt_done(z, r, now, now + last.back_s)
    c.state = DECODE
    c.context = c.target
    z.unit[u].owned += 1
    next_pass(z, r, now)
    flush(z, now)


@kernel
def lose(z: Sim, r: int) -> None:
    """Have a request start over whose unit died; the request of a chunk does when it is next seen."""
    if z.request[r].of >= 0:
        spare(z, r)
    else:
        start_over(z, r)


@kernel
def fail(z: Sim, u: int, now: float) -> None:
    """Kill a unit: requests with KV cache on it start over, those elsewhere when they are next seen."""
    unit = z.unit[u]
    if not unit.alive:
        return
    unit.alive = False
    z.vertex[unit.vertex].dead = True
    for r in range(z.run[0].next):
        state = z.request[r].state
        # Others hold no KV cache on any unit.
        if state != PREFILL and state != DECODE and state != MOVING:
            continue
        for part in range(2):
            for k in range(z.leg[r, part].hops):
                if z.edge[z.way[r, part * z.run[0].path + k]].reach == u:
                    z.request[r].marked = True
    if unit.solo:
        solo_fail(z, u)
    if unit.busy:
        leave_turn(z, u, now)
        # The step was counted in full when it began, or not yet: take back what it does not run.
        unit.busy_s -= unit.step_end - now
    unit.busy = False
    unit.joining = -1
    while unit.batch >= 0:
        r = unit.batch
        unit.batch = z.request[r].after
        lose(z, r)
    for at in (prompt_list(u), token_list(u)):
        while z.list[at].head >= 0:
            lose(z, take(z, at))
    forget_blocks(z, u)
    # The lists above were emptied without counting: now nobody waits here.
    queue_at(z, u, -z.vertex[unit.vertex].queue)


@kernel
def life(z: Sim, at: int, now: float) -> None:
    """Apply a life-cycle event and the routing weights that come with it."""
    event = z.life[at]
    # The weights change with the event: what is routed after it goes by the new ones.
    for i in range(event.change, z.life[at + 1].change):
        z.edge[z.change[i].edge].weight = z.change[i].weight
    if event.kind == FAIL:
        fail(z, event.target, now)
    elif event.kind == REVIVE:
        z.unit[event.target].alive = True
        z.vertex[z.unit[event.target].vertex].dead = False
    elif event.kind == READY:
        z.instance[event.target].ready = True
        z.instance[event.target].ready_s = now
    elif event.kind == DRAIN:
        z.instance[event.target].draining = True
    z.run[0].dirty = CHANGED


@kernel
def close_drained(z: Sim, now: float) -> None:
    """Give back instances that drain and hold nothing; start those that wait for their nodes."""
    for i in range(len(z.instance)):
        one = z.instance[i]
        if one.draining and one.holds == 0 and math.isnan(one.gone_s):
            one.gone_s = now
            one.ready = False
            if one.after >= 0:
                # What follows on the same nodes can only begin to start when they are free.
                push(z, now + z.run[0].startup_s, LIFE, one.after)


@kernel
def hopeless(z: Sim, r: int) -> bool:
    """Return whether a request that found no way never will: ways are there, and all are empty."""
    g = z.run[0].services + z.request[r].service
    if not service_open(z, g, 0.0, 0.0):
        return False
    some = False
    for v in range(z.graph[g].vertex + 1, z.graph[g + 1].vertex - 1):
        one = z.instance[z.vertex[v].item]
        if one.part != ANSWERS and not z.vertex[v].closed:
            if one.holds > 0:
                return False
            some = True
    return some


@kernel
def hopeless_move(z: Sim, r: int) -> bool:
    """Return whether a request never finds room to decode: those who could take it are empty."""
    some = False
    first, stop = partners(z, r)
    for e in range(first, stop):
        one = z.instance[z.edge[e].reach]
        if z.edge[e].weight <= 0.0 or not one.ready or one.draining:
            continue
        if instance_open(z, z.edge[e].reach, 0.0):
            if one.holds > 0:
                return False
            some = True
    return some


@kernel
def retry(z: Sim, at: int, now: float) -> None:
    """Route new requests of a service, in order, until one has to wait on."""
    while z.list[at].head >= 0:
        r = z.list[at].head
        if z.request[r].marked:
            start_over(z, leave_way(z, at))
        elif route(z, r, 0):
            leave_way(z, at)
            begin_part(z, r, 0, now)
        elif z.run[0].feed == WATERMARK:
            leave_way(z, at)
            z.request[r].state = DROPPED
            z.request[r].end_s = now
            z.run[0].rejected += 1
        elif hopeless(z, r):
            end(z, leave_way(z, at), now, DROPPED)
        else:
            return


@kernel
def retry_moves(z: Sim, at: int, now: float) -> None:
    """Route requests that wait at a prefill instance to decode, in order, until one has to wait on.

    Where nobody is left to decode them (all are dead or gone) they start over elsewhere.
    """
    while z.list[at].head >= 0:
        r = z.list[at].head
        if z.request[r].marked:
            start_over(z, leave_way(z, at))
        elif route(z, r, 1):
            leave_way(z, at)
            begin_part(z, r, 1, now)
        elif stranded(z, r):
            start_over(z, leave_way(z, at))
        elif hopeless_move(z, r):
            end(z, leave_way(z, at), now, DROPPED)
        else:
            return
        # Every branch that comes here took one request off the list.
        z.run[0].moving -= 1


@kernel
def settle(z: Sim, now: float) -> None:
    """After an event: wake units whose KV cache came free, go on with requests that ended, route others."""
    run = z.run[0]
    # Each step may free room or end requests for another: go on until nothing changes.
    while run.kicks > 0 or run.dirty > CLEAN:
        while run.kicks > 0:
            run.kicks -= 1
            wake(z, z.todo[KICKED, run.kicks], now)
        if run.dirty == CHANGED:
            # This looks at all instances, so only after the fleet has changed.
            close_drained(z, now)
        if run.dirty == CLEAN:
            return
        # Before the work, which may mark it again.
        run.dirty = CLEAN
        while z.list[run.endings].head >= 0:
            end_llm(z, take(z, run.endings))
        while run.feeds > 0:
            run.feeds -= 1
            feed(z, now)
        # Before new requests: those that wait to move hold KV cache where their prompt was computed.
        if run.moving > 0:
            for at in range(run.moves, run.endings):
                retry_moves(z, at, now)
        for at in range(run.waits, run.moves):
            retry(z, at, now)
        flush(z, now)


@kernel
def sample(z: Sim, at: int, now: float) -> None:
    """Note how busy, how full and how crowded every unit was in a bin that ends now."""
    bin_s = z.run[0].bin_s
    for u in range(len(z.unit)):
        unit = z.unit[u]
        # `busy_s` has all of the step in progress already, or nothing of it (`begin_turn`).
        ahead = unit.step_end - now if unit.busy else 0.0
        z.unit_bin[BUSY_S, at, u] = unit.busy_s - ahead
        # The moments give integrals over time (`hold`, `queue_at`).
        queued = z.vertex[unit.vertex].queue * now - unit.queue_moment
        filled = unit.used * now - unit.used_moment
        z.unit_bin[QUEUED, at, u] = (queued - unit.queue_mark) / bin_s
        z.unit_bin[FILLED, at, u] = (filled - unit.used_mark) / (bin_s * unit.room)
        unit.queue_mark = queued
        unit.used_mark = filled
    for s in range(len(z.service)):
        z.service_bin[WAITED, at, s] = z.service[s].waiting
    for i in range(len(z.instance)):
        z.service_bin[FLYING, at, 0] += z.instance[i].holds
    if at + 1 < z.run[0].bins:
        push(z, (at + 2) * bin_s, SAMPLE, at + 1)


@kernel
def pool_done(z: Sim, i: int, now: float) -> None:
    """End the work of a server; requests whose items are all done go on."""
    server = z.server[i]
    server.busy = False
    for k in range(server.items):
        r = z.task[server.entry + k]
        z.request[r].pending -= 1
        if z.request[r].pending == 0:
            next_level(z, r, now)
    flush(z, now)
    wake_pool(z, server.pool, now)


@kernel
def arrive(z: Sim, r: int, now: float) -> None:
    """Take in a new request."""
    z.service_bin[ARRIVED, bin_of(z, now), z.request[r].service] += 1
    z.run[0].next = max(z.run[0].next, r + 1)
    next_level(z, r, now)
    flush(z, now)


@kernel
def step_ended(z: Sim, u: int, now: float) -> None:
    """End the step of a unit, unless it died meanwhile."""
    unit = z.unit[u]
    # A unit that died and came back may run another step by now: only the end of that one counts.
    if not unit.busy or unit.step_end != now:
        return
    if unit.solo:
        solo_end(z, u, now)
    else:
        stage_end(z, u, now)


@kernel
def handle(z: Sim, kind: int, payload: int, now: float) -> None:
    """Apply one event."""
    if kind == STEP:
        step_ended(z, payload, now)
    elif kind == DELIVER:
        deliver(z, payload, now)
    elif kind == KV_HERE:
        cache_here(z, payload, now)
    elif kind == ARRIVE:
        arrive(z, payload, now)
    elif kind == LIFE:
        life(z, payload, now)
    elif kind == SAMPLE:
        sample(z, payload, now)
    else:
        pool_done(z, payload, now)


@kernel
def advance(z: Sim, max_events: int) -> bool:
    """Work through up to `max_events` events; say whether all is done."""
    run = z.run[0]
    total = run.requests
    for _ in range(max_events):
        # Arrivals of an open loop are sorted already and need no heap.
        arrival = math.inf
        if run.feed == OPEN and run.next < total:
            arrival = z.request[run.next].arrival_s
        event = z.heap[0].time if run.heaped > 0 else math.inf
        turn, turns = math.inf, -1
        for g in range(len(z.gpu)):
            if z.gpu[g].next_s < turn:
                turn, turns = z.gpu[g].next_s, g
        now = min(arrival, event, turn)
        if now > run.until_s or now == math.inf:
            return True
        if arrival <= min(event, turn):
            run.clock_s = now
            arrive(z, run.next, now)
        elif turn < event:
            run.clock_s = now
            end_turn(z, turns, now)
        else:
            value = pop(z)
            # A sample only looks: the clock stays where something last happened.
            if value % KINDS != SAMPLE:
                run.clock_s = now
            handle(z, value % KINDS, value // KINDS, now)
        settle(z, now)
    return False


@entry("(int64[::1], int64)")
def run(table: Longs, max_events: int) -> bool:
    """Work through up to `max_events` events of the run of a table; say whether all is done."""
    return advance(sim_at(table), max_events)
