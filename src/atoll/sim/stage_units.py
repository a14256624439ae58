"""Units that hold some layers: prompts and tokens come in, pass the layers in a step, and go on.

Whatever waits joins the next step, within the unit's limits. Long prompts are cut into chunks that follow
each other through the stages. Where a pipeline starts, tokens are taken a `stages`-th of those in flight at
a time, so that all stages have work; without that, requests that once met in a step would travel together
for good.
"""

from __future__ import annotations

from atoll.routing.compiled import free_slot
from atoll.routing.decisions import BY_ARRIVAL
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
from atoll.sim.lifetime import end, start_over
from atoll.sim.link_traffic import flush, post, share_at
from atoll.sim.reuse import blocks_found
from atoll.sim.sim_arrays import CACHED, CONTEXT, DROPPED, ENTRY, LENGTH, PREFILL, SEQUENCES, Sim
from atoll.sim.sim_kernel import kernel
from atoll.sim.solo import admit, begin_step, next_waiting, prefer
from atoll.sim.stepping import fixed_seconds, layers_seconds, whole_seconds

SMALLEST_CHUNK = 8
"""A chunk has at least one so-many-th of the tokens that a step takes."""
NO_LIMIT = 1 << 40


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
    max_sequences = unit.max_sequences
    slot = -1
    if unit.paced > 0:
        # After the end of the table its last entry holds.
        limit = z.pace[unit.paced, min(unit.owned, z.pace.shape[1] - 1)]
        # At least as many batches as it takes to have all sequences under way.
        limit = max(limit, (unit.owned + max_sequences - 1) // max_sequences)
        slot = free_slot(z.flight[u], limit)
        if slot < 0:
            return 0, 0, True
        # All sequences in batches of one size, rounded up.
        max_sequences = min(max_sequences, (unit.owned + limit - 1) // limit)
    elif unit.stages > 1 and unit.owned > 0:
        max_sequences = min(max_sequences, (unit.owned + unit.stages - 1) // unit.stages)
    sequences, context, whole = 0, 0, True
    while z.list[at].head >= 0 and sequences < max_sequences:
        r = next_waiting(z, at, u)
        c = z.request[r]
        reached = reached_before(z, r, c.hop)
        share = share_at(z, u, reached)
        if c.marked:
            start_over(z, r)
            continue
        # Shares of tokens are fractions: the tolerance is for their rounding.
        if unit.used + share > unit.room + 1e-6:
            if unit.used - c.before * share < 1.0:
                # Nothing but its own KV cache is here: no room will come free.
                end(z, r, now, DROPPED)
            else:
                start_over(z, r)
            continue
        hold(z, u, share)
        # How far it has the token of this pass, should it have to go (`held_tokens`).
        c.charged = c.hop + 1
        whole = whole and share == 1.0
        entry = max(0, reached - unit.start)
        z.step[SEQUENCES, entry] += 1.0
        z.step[CONTEXT, entry] += c.context
        sequences += 1
        context += c.context
        if slot >= 0:
            c.slot = slot
        # Put in front: `stage_end` turns the list round.
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
def dequeue(z: Sim, u: int, previous: int, r: int) -> None:
    """Take a prompt or chunk, which comes after `previous`, off the queue of a unit."""
    unlink(z, prompt_list(u), previous, r)
    queue_at(z, u, -1.0)


@kernel
def is_gone(z: Sim, u: int, previous: int, r: int, now: float) -> bool:
    """Take a prompt or chunk off the queue that starts over or can never have room; say if it was one."""
    own = owner(z, r)
    c = z.request[own]
    again = c.marked or stale(z, r)
    # One that has KV cache had room for all of it.
    if not again and (c.charged > 0 or ever_fits(z, r)):
        return False
    dequeue(z, u, previous, r)
    if r != own:
        spare(z, r)
    elif again:
        start_over(z, r)
    else:
        end(z, r, now, DROPPED)
    return True


@kernel
def tokens_left(z: Sim, u: int, r: int) -> int:
    """Return how many tokens of a prompt, or of the chunk that came, a unit has still to run."""
    c = z.request[r]
    if c.hop > 0:
        return c.piece
    if c.charged > 0:
        return c.target - c.computed
    found, _ = blocks_found(z, u, r)
    return c.target - found * z.run[0].block_tokens


@kernel
def reserve(z: Sim, u: int, r: int, share: float, blocked: bool, now: float) -> bool:
    """Give a prompt its KV cache on a unit with its first chunk; False where there is no room.

    With `blocked` there is none for any: another waits for it.
    """
    unit, hop = z.unit[u], z.request[r].hop
    c = z.request[owner(z, r)]
    if c.charged > hop:
        # The first chunk has booked the whole prompt.
        return True
    shared = 0
    # Blocks are kept where prompts start only.
    if hop == 0:
        _, shared = blocks_found(z, u, r)
    need = (c.target - shared * z.run[0].block_tokens) * share
    if blocked or unit.used + need > unit.room + 1e-6:
        return False
    hold(z, u, c.target * share)
    if hop == 0:
        admit(z, u, r, now)
    c.charged = hop + 1
    return True


@kernel
def take_piece(z: Sim, u: int, previous: int, r: int, max_tokens: int) -> int:
    """Take up to `max_tokens` that are left of a prompt, or a chunk, and return what stands for them."""
    c = z.request[r]
    if c.hop == 0:
        rest = c.target - c.computed
        chunk = cut(z, r, max_tokens) if max_tokens < rest else -1
        if chunk >= 0:
            c.computed += max_tokens
            return chunk
        # With no record left for a chunk the rest goes as one piece.
        c.piece = rest
    dequeue(z, u, previous, r)
    return r


@kernel
def take_prompts(z: Sim, u: int, now: float, taken: int) -> tuple[int, bool]:
    """Take prompts into a step beside `taken` tokens: how many, and if all run all layers.

    Where they start they are cut to the budget, if need be; later chunks come as they were cut. While one has
    to wait for KV cache, those go on that have theirs, so that all chunks of a prompt come through.
    """
    unit = z.unit[u]
    left = unit.budget - taken
    min_tokens = max(1, unit.budget // SMALLEST_CHUNK)
    n, whole, blocked = 0, True, False
    prefer(z, u, now, now)
    previous, r = -1, z.list[prompt_list(u)].head
    while r >= 0 and n < unit.max_prompts:
        following, hop = z.request[r].after, z.request[r].hop
        if is_gone(z, u, previous, r, now):
            r = following
            continue
        cuts = hop == 0 and unit.chunked
        # The first prompt runs in any case; others must fit, or leave enough for a chunk that is not tiny.
        if n > 0 and tokens_left(z, u, r) > left and not (cuts and left >= min_tokens):
            break
        reached = reached_before(z, owner(z, r), hop)
        share = share_at(z, u, reached)
        if not reserve(z, u, r, share, blocked, now):
            if hop == 0:
                # Where prompts start none overtakes the one that waits for room.
                break
            blocked = True
            previous, r = r, following
            continue
        one = take_piece(z, u, previous, r, max(left, min_tokens) if cuts else NO_LIMIT)
        piece = z.request[one].piece
        z.step[LENGTH, n] = piece
        z.step[CACHED, n] = z.request[one].computed
        z.step[ENTRY, n] = max(0, reached - unit.start)
        whole = whole and share == 1.0
        n += 1
        left -= piece
        unit.prompt_tokens += piece
        z.request[one].after = unit.batch
        unit.batch = one
        if one != r:
            # It was cut, so the step is full.
            break
        if hop > 0 and z.instance[unit.instance].order == BY_ARRIVAL:
            r = following
        else:
            prefer(z, u, now, now)
            previous, r = -1, z.list[prompt_list(u)].head
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
    # `layers_seconds` takes the first `present` prompts.
    sort_prompts(z, n)
    rows = float(sequences)
    for i in range(n):
        rows += x[LENGTH, i]
    total = fixed_seconds(z, u, layers, rows, float(sequences + n))
    held = unit.end - unit.start
    present, decoding, context = 0, 0.0, 0.0
    low = 0
    # From one entry to the next: in between the same requests are in every layer.
    while low < held:
        while present < n and x[ENTRY, present] <= low:
            present += 1
        decoding += x[SEQUENCES, low]
        context += x[CONTEXT, low]
        # Clean for the next step.
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
    # Tokens first: prompts have what these leave of the step.
    sequences, context, tokens_whole = take_tokens(z, u, now)
    n, prompts_whole = take_prompts(z, u, now, sequences)
    if unit.batch < 0:
        unit.busy = False
        return
    layers = z.service[z.request[unit.batch].service].layers
    if tokens_whole and prompts_whole:
        # Written by `take_tokens` for `partial_seconds`, which is not needed: clean for the next step.
        z.step[SEQUENCES, 0] = 0.0
        z.step[CONTEXT, 0] = 0.0
        took = whole_seconds(z, u, layers, n, sequences, float(context))
    else:
        took = partial_seconds(z, u, layers, n, sequences)
    unit.decode_tokens += sequences
    begin_step(z, u, now, took, sequences, n)


@kernel
def stage_end(z: Sim, u: int, now: float) -> None:
    """End a step: its requests go on to their next hop, in the order they came."""
    r = z.unit[u].batch
    z.unit[u].batch = -1
    # The list was made by putting in front: turn it round, so that requests go on in the order they came.
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
            # The mean delay that the policy by throughput looks at.
            z.edge[came].delay += z.run[0].smoothing * (now - c.sent_s - z.edge[came].delay)
            c.hop += 1
            post(z, now, z.way[r, at + 1], r, c.piece if c.state == PREFILL else 1)
        r = following
    flush(z, now)
    stage_start(z, u, now)
