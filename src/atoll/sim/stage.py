"""Units that hold some layers: prompts and tokens come in, pass the layers in a step, and go on.

Whatever waits joins the next step, within the unit's limits. Long prompts are cut into chunks that follow each
other through the stages. Where a pipeline starts, tokens are taken a
`stages`-th of those in flight at a time, so that all stages have work; without that, requests that once
met in a step would travel together for good.
"""

from __future__ import annotations

from atoll.routing.compiled import free_slot
from atoll.sim.arrays import CACHED, CONTEXT, DROPPED, ENTRY, LENGTH, PREFILL, SEQUENCES, Sim
from atoll.sim.heap import (
    hold,
    owner,
    prompt_list,
    queue_at,
    spare,
    stale,
    token_list,
    unlink,
)
from atoll.sim.kernel import kernel
from atoll.sim.lifetime import end, start_over
from atoll.sim.reuse import blocks_found
from atoll.sim.solo import admit, begin_step, next_waiting, prefer
from atoll.sim.stepping import fixed_seconds, layers_seconds, whole_seconds
from atoll.sim.traffic import flush, post, share_at

SMALLEST_CHUNK = 8
"""A chunk has at least one so-many-th of the tokens that a step takes."""


@kernel
def reached_before(z: Sim, r: int, hop: int) -> int:
    """Return the layer a request has reached when it comes to a hop."""
    if hop == 0:
        return 0
    return z.unit[z.edge[z.way[r, z.request[r].part * z.run[0].path + hop - 1]].reach].end


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
        reached = reached_before(z, r, c.hop)
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
def ever_fits(z: Sim, r: int) -> bool:
    """Return whether the prompt of a request has room on each of its units, were it alone there."""
    c = z.request[r]
    begin = c.part * z.run[0].path
    reached = 0
    for k in range(z.leg[r, c.part].hops):
        u = z.edge[z.way[r, begin + k]].reach
        if c.target * share_at(z, u, reached) > z.unit[u].room + 1e-6:
            return False
        reached = z.unit[u].end
    return True


@kernel
def cut(z: Sim, r: int, piece: int) -> int:
    """Return a record that stands for the next so many tokens of a prompt, -1 if there is none left."""
    chunk = z.run[0].spare
    if chunk < 0:
        return -1
    c, one = z.request[r], z.request[chunk]
    z.run[0].spare = one.after
    one.of = r
    one.retries = c.retries
    one.service = c.service
    one.state = PREFILL
    one.part = c.part
    one.hop = 0
    one.slot = -1
    one.computed = c.computed
    one.piece = piece
    return chunk


@kernel
def take_prompts(z: Sim, u: int, now: float, taken: int) -> tuple[int, bool]:
    """Take prompts into a step beside `taken` tokens: how many, and if all run all layers.

    Where they start they are cut to the budget, if need be; later the chunks come as they were cut. A prompt
    gets all its KV cache with the first of them: while one has to wait for that, those go on that have theirs.
    """
    unit = z.unit[u]
    at = prompt_list(u)
    left = unit.budget - taken
    least = max(1, unit.budget // SMALLEST_CHUNK)
    n, whole = 0, True
    blocked = False
    previous = -1
    prefer(z, u, now)
    r = z.list[at].head
    while r >= 0 and n < unit.most_prompts:
        one = z.request[r]
        following = one.after
        own = owner(z, r)
        c = z.request[own]
        if c.marked or stale(z, r):
            unlink(z, at, previous, r)
            queue_at(z, u, -1.0)
            if r == own:
                start_over(z, r)
            else:
                spare(z, r)
            r = following
            continue
        hop = one.hop
        if blocked and c.charged <= hop:
            previous = r
            r = following
            continue
        reached = reached_before(z, own, hop)
        share = share_at(z, u, reached)
        starts = hop == 0
        rest = one.piece
        offset = one.computed
        shared = 0
        if starts:
            if c.charged == 0:
                if not ever_fits(z, r):
                    unlink(z, at, previous, r)
                    queue_at(z, u, -1.0)
                    end(z, r, now, DROPPED)
                    r = following
                    continue
                found, shared = blocks_found(z, u, r)
                offset = found * z.run[0].block_tokens
            rest = c.target - offset
        if n > 0 and rest > left and not (starts and unit.chunked and left >= least):
            break
        if c.charged <= hop:
            need = (c.target - shared * z.run[0].block_tokens) * share
            if unit.used + need > unit.room + 1e-6:
                if starts:
                    break
                blocked = True
                previous = r
                r = following
                continue
            hold(z, u, c.target * share)
            if starts:
                admit(z, u, r, now)
            c.charged = hop + 1
        piece = rest
        chunk = -1
        if starts and unit.chunked and rest > left:
            piece = min(rest, max(left, least))
            if piece < rest:
                chunk = cut(z, r, piece)
        if chunk < 0:
            unlink(z, at, previous, r)
            queue_at(z, u, -1.0)
            if starts:
                piece = rest
                c.piece = piece
            chunk = r
        if starts:
            c.computed = offset + piece if chunk != r else offset
        whole = whole and share == 1.0
        z.step[LENGTH, n] = piece
        z.step[CACHED, n] = offset
        z.step[ENTRY, n] = max(0, reached - unit.start)
        n += 1
        left -= piece
        unit.prompt_tokens += piece
        z.request[chunk].after = unit.batch
        unit.batch = chunk
        if chunk != r:
            break
        if starts:
            prefer(z, u, now)
            previous = -1
            r = z.list[at].head
        else:
            r = following
    return n, whole


@kernel
def sort_prompts(z: Sim, n: int) -> None:
    """Put the prompts of a step in order of the layer they come in at."""
    x = z.step
    for i in range(1, n):
        length, cached, entry = x[LENGTH, i], x[CACHED, i], x[ENTRY, i]
        j = i
        while j > 0 and x[ENTRY, j - 1] > entry:
            x[LENGTH, j] = x[LENGTH, j - 1]
            x[CACHED, j] = x[CACHED, j - 1]
            x[ENTRY, j] = x[ENTRY, j - 1]
            j -= 1
        x[LENGTH, j] = length
        x[CACHED, j] = cached
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
        if c.of >= 0:
            if stale(z, r):
                spare(z, r)
            else:
                c.hop += 1
                post(z, now, z.way[c.of, c.part * z.run[0].path + c.hop], r, c.piece)
        elif c.marked:
            start_over(z, r)
        else:
            at = c.part * z.run[0].path + c.hop
            came = z.way[r, at]
            z.edge[came].delay += z.run[0].smoothing * (now - c.sent_s - z.edge[came].delay)
            c.hop += 1
            post(z, now, z.way[r, at + 1], r, c.piece if c.state == PREFILL else 1)
        r = following
    flush(z, now)
    stage_start(z, u, now)
