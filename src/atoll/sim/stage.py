"""Units that hold some layers: prompts and tokens come in, pass the layers in a step, and go on.

Whatever waits joins the next step, within the unit's limits. Where a pipeline starts, tokens are taken a
`stages`-th of those in flight at a time, so that all stages have work; without that, requests that once
met in a step would travel together for good.
"""

from __future__ import annotations

from atoll.routing.compiled import free_slot
from atoll.sim.arrays import CACHED, CONTEXT, DROPPED, ENTRY, LENGTH, PREFILL, SEQUENCES, Sim
from atoll.sim.heap import hold, prompt_list, token_list
from atoll.sim.kernel import kernel
from atoll.sim.lifetime import end, start_over
from atoll.sim.solo import begin_step, next_waiting
from atoll.sim.stepping import fixed_seconds, layers_seconds, whole_seconds
from atoll.sim.traffic import flush, post, share_at


@kernel
def reached_before(z: Sim, r: int) -> int:
    """Return the layer a request has reached when it comes to its current hop."""
    c = z.request[r]
    if c.hop == 0:
        return 0
    return z.unit[z.edge[z.way[r, c.part * z.run[0].path + c.hop - 1]].reach].end


@kernel
def take_tokens(z: Sim, u: int, now: float) -> tuple[int, int, bool]:
    """Take decoding requests into the step: how many, what they attend to, and if all run all layers."""
    unit = z.unit[u]
    at = token_list(u)
    most = unit.most_sequences
    slot = -1
    if unit.paced > 0:
        limit = z.pace[unit.paced, min(unit.owned, z.pace.shape[1] - 1)]
        limit = max(limit, (unit.owned + most - 1) // most)
        slot = free_slot(z.flight[u], limit)
        if slot < 0:
            return 0, 0, True
        most = min(most, (unit.owned + limit - 1) // limit)
    elif unit.stages > 1 and unit.owned > 0:
        most = min(most, (unit.owned + unit.stages - 1) // unit.stages)
    sequences, context, whole = 0, 0, True
    while z.list[at].head >= 0 and sequences < most:
        r = next_waiting(z, at, u)
        c = z.request[r]
        reached = reached_before(z, r)
        share = share_at(z, u, reached)
        if c.marked:
            start_over(z, r)
            continue
        if unit.used + share > unit.room + 1e-6:
            if unit.used - c.before * share < 1.0:
                end(z, r, now, DROPPED)
            else:
                start_over(z, r)
            continue
        hold(z, u, share)
        c.charged = c.hop + 1
        whole = whole and share == 1.0
        entry = max(0, reached - unit.start)
        z.step[SEQUENCES, entry] += 1.0
        z.step[CONTEXT, entry] += c.context
        sequences += 1
        context += c.context
        if slot >= 0:
            c.slot = slot
        c.after = unit.batch
        unit.batch = r
    if slot >= 0 and sequences > 0:
        z.flight[u, slot] = sequences
    return sequences, context, whole


@kernel
def take_prompts(z: Sim, u: int, now: float, taken: int) -> tuple[int, bool]:
    """Take whole prompts into a step beside `taken` tokens: how many, and if all run all layers."""
    unit = z.unit[u]
    at = prompt_list(u)
    left = unit.budget - taken
    n, whole = 0, True
    while z.list[at].head >= 0 and n < unit.most_prompts:
        r = z.list[at].head
        c = z.request[r]
        if c.marked:
            start_over(z, next_waiting(z, at, u))
            continue
        if n > 0 and c.target > left:
            break
        reached = reached_before(z, r)
        share = share_at(z, u, reached)
        if unit.used + c.target * share > unit.room + 1e-6:
            if unit.used > 0.0:
                break
            end(z, next_waiting(z, at, u), now, DROPPED)
            continue
        next_waiting(z, at, u)
        if c.start_s != c.start_s:
            c.start_s = now
        hold(z, u, c.target * share)
        c.context = c.target
        c.charged = c.hop + 1
        whole = whole and share == 1.0
        z.step[LENGTH, n] = c.target
        z.step[CACHED, n] = 0.0
        z.step[ENTRY, n] = max(0, reached - unit.start)
        n += 1
        left -= c.target
        unit.prompt_tokens += c.target
        c.after = unit.batch
        unit.batch = r
    return n, whole


@kernel
def sort_prompts(z: Sim, n: int) -> None:
    """Put the prompts of a step in order of the layer they come in at."""
    x = z.step
    for i in range(1, n):
        length, entry = x[LENGTH, i], x[ENTRY, i]
        j = i
        while j > 0 and x[ENTRY, j - 1] > entry:
            x[LENGTH, j] = x[LENGTH, j - 1]
            x[ENTRY, j] = x[ENTRY, j - 1]
            j -= 1
        x[LENGTH, j] = length
        x[ENTRY, j] = entry


@kernel
def partial_seconds(z: Sim, u: int, layers: int, n: int, sequences: int) -> float:
    """Return the seconds of a step in which requests come in at different layers of the unit."""
    x = z.step
    unit = z.unit[u]
    sort_prompts(z, n)
    rows = float(sequences)
    for i in range(n):
        rows += x[LENGTH, i]
    total = fixed_seconds(z, u, layers, rows, float(sequences + n))
    held = unit.end - unit.start
    present, decoding, context = 0, 0.0, 0.0
    low = 0
    while low < held:
        while present < n and x[ENTRY, present] <= low:
            present += 1
        decoding += x[SEQUENCES, low]
        context += x[CONTEXT, low]
        x[SEQUENCES, low] = 0.0
        x[CONTEXT, low] = 0.0
        high = low + 1
        while high < held and x[SEQUENCES, high] == 0.0:
            if present < n and x[ENTRY, present] <= high:
                break
            high += 1
        if present > 0 or decoding > 0.0:
            start = unit.start
            total += layers_seconds(z, u, start + low, start + high, present, decoding, context)
        low = high
    return total


@kernel
def stage_start(z: Sim, u: int, now: float) -> None:
    """Begin the next step of a unit with what waits, or let it rest."""
    unit = z.unit[u]
    sequences, context, tokens_whole = take_tokens(z, u, now)
    n, prompts_whole = take_prompts(z, u, now, sequences)
    if unit.batch < 0:
        unit.busy = False
        return
    layers = z.service[z.request[unit.batch].service].layers
    if tokens_whole and prompts_whole:
        z.step[SEQUENCES, 0] = 0.0
        z.step[CONTEXT, 0] = 0.0
        took = whole_seconds(z, u, layers, n, sequences, float(context))
    else:
        took = partial_seconds(z, u, layers, n, sequences)
    unit.decode_tokens += sequences
    begin_step(z, u, now, took, sequences)


@kernel
def stage_end(z: Sim, u: int, now: float) -> None:
    """End a step: its requests go on to their next hop, in the order they came."""
    r = z.unit[u].batch
    z.unit[u].batch = -1
    previous = -1
    while r >= 0:
        following = z.request[r].after
        z.request[r].after = previous
        previous = r
        r = following
    r = previous
    while r >= 0:
        c = z.request[r]
        following = c.after
        c.after = -1
        if c.marked:
            start_over(z, r)
        else:
            at = c.part * z.run[0].path + c.hop
            came = z.way[r, at]
            z.edge[came].delay += z.run[0].smoothing * (now - c.sent_s - z.edge[came].delay)
            c.hop += 1
            post(z, now, z.way[r, at + 1], r, c.target if c.state == PREFILL else 1)
        r = following
    flush(z, now)
    stage_start(z, u, now)
