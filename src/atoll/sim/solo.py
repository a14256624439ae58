"""Units that hold the whole model: continuous batching without an event for every token.

All running sequences are in every step, so each step adds one token to all of them (or several, `guessing`):
counters and sums tell the batch, a heap of endings who leaves. Work is done per step and per request, never
per token.
"""

from __future__ import annotations

from atoll.routing.compiled import urgency
from atoll.routing.decisions import BY_ARRIVAL
from atoll.sim.gpu_turns import begin_turn
from atoll.sim.guessing import draw_steps, guessing_seconds
from atoll.sim.heap import (
    end_push,
    end_remove,
    gap_push,
    gap_since,
    hold,
    owner,
    prompt_list,
    push,
    put_first,
    queue_at,
    take,
    token_list,
    unlink,
)
from atoll.sim.lifetime import decode_apart, end, moves_on, note_tokens, prompt_done, start_over
from atoll.sim.reuse import blocks_found, leave_blocks, make_way, use_blocks
from atoll.sim.sim_arrays import CACHED, DECODE, DONE, DROPPED, LENGTH, PREFILL, STEP, Sim
from atoll.sim.sim_kernel import kernel
from atoll.sim.stepping import whole_seconds

WINDOW = 256
"""Prompts among which the next is chosen."""


@kernel
def next_waiting(z: Sim, at: int, u: int) -> int:
    """Take the first request off a list of a unit."""
    queue_at(z, u, -1.0)
    return take(z, at)


@kernel
def begin_step(z: Sim, u: int, now: float, took: float, sequences: int, prompts: int) -> None:
    """Start a step that takes so long; on a share of a GPU, that long with all shares busy."""
    unit = z.unit[u]
    make_way(z, u)
    unit.peak = max(unit.peak, unit.used)
    unit.busy = True
    unit.begun_s = now
    unit.step_count += 1
    unit.batch_sum += sequences
    if unit.gpu >= 0:
        begin_turn(z, u, now, took, prompts, sequences + prompts)
        return
    if unit.ranks > 1:
        # They meet in every layer with experts: none ends before those that it met.
        for v in range(unit.first_rank, unit.first_rank + unit.ranks):
            if v != u and z.unit[v].busy:
                took = max(took, z.unit[v].step_end - now)
    unit.step_end = now + took
    unit.busy_s += took
    push(z, now + took, STEP, u)


@kernel
def join(z: Sim, u: int, r: int) -> None:
    """Let a request whose prompt is in the cache decode from the next step on."""
    unit, c = z.unit[u], z.request[r]
    c.state = DECODE
    # Steps are counted per unit: a sequence has made `gain` times `steps - join` tokens since.
    c.join = unit.steps
    steps = draw_steps(z, u, c.answer - c.made)
    c.gain = (c.answer - c.made) / steps
    end_push(z, u, unit.running, unit.steps + steps, r)
    unit.owned += 1
    unit.running += 1
    unit.gain += c.gain
    # It attends to its prompt and its first token.
    unit.context += c.target + 1
    # The gap before its next token counts from its own first one: `tokens_made` looks at it apart.
    c.after = unit.joining
    unit.joining = r


@kernel
def leave(z: Sim, u: int, at: int) -> int:
    """Take entry `at` off the running sequences of a unit between steps and return its request."""
    unit = z.unit[u]
    r = end_remove(z, u, unit.running, at)
    unit.running -= 1
    c = z.request[r]
    # What it would attend to next is in `context` already.
    unit.context -= c.target + (unit.steps - c.join) * c.gain + 1.0
    unit.gain -= c.gain
    if unit.running == 0:
        # Nothing is left of rounding.
        unit.context, unit.gain = 0.0, 0.0
    # One that has had no step yet is still linked among those that join.
    previous = -1
    one = unit.joining
    while one >= 0:
        if one == r:
            if previous < 0:
                unit.joining = z.request[r].after
            else:
                z.request[previous].after = z.request[r].after
            break
        previous = one
        one = z.request[one].after
    return r


@kernel
def cut_short(z: Sim, u: int, r: int) -> None:
    """Note how far a sequence came that leaves before its end."""
    unit, c = z.unit[u], z.request[r]
    c.made += int((unit.steps - c.join) * c.gain + 1e-6)
    if unit.steps > c.join:
        c.last_s = unit.last_end + unit.back_s
        # The gap before step join + 1 was its own (`tokens_made`); those it shares begin one step later.
        c.gap_s = max(c.gap_s, gap_since(z, u, c.join + 2))


@kernel
def put_back(z: Sim, u: int, r: int) -> None:
    """Put a sequence that gives way first in the queue of its unit: its KV cache is computed again there."""
    unit, c = z.unit[u], z.request[r]
    leave_blocks(z, u, r)
    hold(z, u, -(c.target + (unit.steps - c.join) * c.gain))
    unit.owned -= 1
    c.join = -1
    c.retries += 1
    z.run[0].retries += 1
    # The tokens it has made are computed again with its prompt.
    c.target = c.prompt + c.made
    c.state = PREFILL
    c.context = 0
    c.computed = 0
    put_first(z, prompt_list(u), r)
    queue_at(z, u, 1.0)


@kernel
def make_room(z: Sim, u: int, now: float) -> None:
    """Send sequences back, the youngest first, until each of the others can grow by a token."""
    unit = z.unit[u]
    # Running sequences grow by their tokens of the next step.
    while unit.running > 0 and unit.used + unit.gain > unit.room:
        youngest = 0
        for i in range(1, unit.running):
            # Requests are numbered in order of arrival.
            if z.ending[u, i].request > z.ending[u, youngest].request:
                youngest = i
        r = leave(z, u, youngest)
        first = z.list[prompt_list(u)].head
        # A prompt that has begun holds room that comes free later.
        begun = first >= 0 and z.request[first].context > 0
        cut_short(z, u, r)
        if unit.running == 0 and not begun:
            # Alone, and still too long.
            end(z, r, now, DROPPED)
        elif z.instance[unit.instance].eager:
            put_back(z, u, r)
        else:
            start_over(z, r)


@kernel
def fits(z: Sim, u: int, tokens: int) -> bool:
    """Return whether the KV cache of a prompt and its first token fits beside what runs."""
    unit = z.unit[u]
    # What runs grows in this step, and the prompt's first token needs room, too.
    return unit.used + unit.gain + tokens + 1 <= unit.room


@kernel
def prefer(z: Sim, u: int, now: float, until_s: float) -> None:
    """Put the prompt that goes next first in the queue of a unit, unless one has begun (`routing.decisions`).

    Chunks of one prompt stay in their order. Only the `WINDOW` that have been there longest are looked at,
    and of these what came until `until_s`.
    """
    at, order = prompt_list(u), z.instance[z.unit[u].instance].order
    r = z.list[at].head
    if order == BY_ARRIVAL or r < 0 or z.request[r].after < 0:
        return
    # One that has begun holds KV cache: it goes on before others begin.
    if z.request[r].hop == 0 and z.request[r].context > 0:
        return
    best, before, previous = -1, -1, -1
    min_key = 0.0
    for _ in range(WINDOW):
        c = z.request[owner(z, r)]
        # One that has had its first token holds up the others of its answer.
        promise_s = 0.0 if c.made > 0 else z.service[c.service].promise_s
        key = urgency(order, now, c.arrival_s, promise_s, c.service_s)
        if c.came_s <= until_s and (best < 0 or key < min_key):
            best, before, min_key = r, previous, key
        previous = r
        r = z.request[r].after
        if r < 0:
            break
    if before >= 0:
        unlink(z, at, before, best)
        z.request[best].after = z.list[at].head
        z.list[at].head = best


@kernel
def admit(z: Sim, u: int, r: int, now: float) -> None:
    """Give a prompt its KV cache on the unit where it starts; what that still holds need not be computed."""
    c = z.request[r]
    found, _ = blocks_found(z, u, r)
    c.computed = found * z.run[0].block_tokens
    c.context = c.target
    z.service[c.service].asked += c.target
    z.service[c.service].reused += c.computed
    use_blocks(z, u, r)
    # NaN: it never started. One that is computed again keeps its first start.
    if c.start_s != c.start_s:
        c.start_s = now


@kernel
def take_ready(z: Sim, u: int, now: float, until_s: float) -> None:
    """Take in requests whose KV cache came from elsewhere until then."""
    unit = z.unit[u]
    at = token_list(u)
    while z.list[at].head >= 0 and unit.running < unit.max_sequences:
        r = z.list[at].head
        c = z.request[r]
        if c.marked:
            start_over(z, next_waiting(z, at, u))
        elif c.came_s > until_s:
            # Those behind it came later still.
            return
        elif fits(z, u, c.target):
            next_waiting(z, at, u)
            hold(z, u, c.target)
            c.context = c.target
            join(z, u, r)
        elif unit.used > 0.0:
            # Room comes free when something ends here.
            return
        else:
            end(z, next_waiting(z, at, u), now, DROPPED)


@kernel
def take_prompts(z: Sim, u: int, now: float, until_s: float) -> int:
    """Take prompts that came until then, or the next piece of one, into the step; return how many are in it.

    Requests whose prompt ends with this step go to the unit's batch list.
    """
    unit = z.unit[u]
    at = prompt_list(u)
    # Every running sequence takes its tokens of the step, unless they wait for prompts.
    budget = unit.budget if unit.prompts_first else unit.budget - unit.running * unit.rows
    n = 0
    while z.list[at].head >= 0 and budget > 0 and n < unit.max_prompts:
        prefer(z, u, now, until_s)
        r = z.list[at].head
        c = z.request[r]
        if c.marked:
            start_over(z, next_waiting(z, at, u))
            continue
        # Prompts of this step are sequences after it.
        if unit.running + n >= unit.max_sequences:
            break
        if c.context == 0:
            # `prefer` found none that came before, and in order of arrival those behind it came later still.
            if c.came_s > until_s:
                break
            if c.target + 1 > unit.room:
                end(z, next_waiting(z, at, u), now, DROPPED)
                continue
            found, shared = blocks_found(z, u, r)
            rest = c.target - found * z.run[0].block_tokens
            # A prompt that is not cut must fit into the step, except the first: else it would never run.
            if not unit.chunked and n > 0 and rest > budget:
                break
            if not fits(z, u, c.target - shared * z.run[0].block_tokens):
                break
            hold(z, u, c.target)
            admit(z, u, r, now)
        piece = c.target - c.computed
        if unit.chunked:
            piece = min(piece, budget)
        z.step[LENGTH, n] = piece
        z.step[CACHED, n] = c.computed
        n += 1
        budget -= piece
        unit.prompt_tokens += piece
        c.computed += piece
        # One that is not done stays first in the queue, for its next piece.
        if c.computed == c.target:
            next_waiting(z, at, u)
            c.after = unit.batch
            unit.batch = r
    return n


@kernel
def skips_prompts(z: Sim, u: int) -> bool:
    """Return whether the next step of a unit goes by new prompts, which it looks at every `interval` steps.

    One that `collects` prompts counts from when one waits and stops when they fill a step; others count all
    steps of decoding, and look at once after a step with prompts.
    """
    unit = z.unit[u]
    r = z.list[prompt_list(u)].head
    begun = r >= 0 and z.request[r].context > 0
    if unit.interval <= 1 or unit.running == 0 or begun:
        unit.skipped = 0
        return False
    longest = unit.interval - 1
    if unit.collects:
        longest = unit.interval
        waiting = 0
        while r >= 0 and waiting < unit.budget:
            waiting += z.request[r].target
            r = z.request[r].after
        if waiting == 0:
            return True
        look = waiting >= unit.budget
    else:
        look = unit.held
    unit.skipped += 1
    if not look and unit.skipped <= longest:
        return True
    unit.skipped = 0
    return False


@kernel
def solo_start(z: Sim, u: int, now: float, until_s: float) -> None:
    """Begin the next step of a unit with what came until then, or let it rest."""
    unit = z.unit[u]
    # The order is who goes first: what runs, then what was computed elsewhere, then new prompts.
    make_room(z, u, now)
    take_ready(z, u, now, until_s)
    n = 0 if skips_prompts(z, u) else take_prompts(z, u, now, until_s)
    if n == 0 and unit.running == 0 and until_s < now:
        # Nothing was prepared: it takes what there is now.
        take_ready(z, u, now, now)
        n = take_prompts(z, u, now, now)
    running = unit.running
    if n == 0 and running == 0:
        unit.busy = False
        return
    unit.held = unit.prompts_first and n > 0
    if unit.held:
        running = 0
    context = unit.context if running > 0 else 0.0
    if unit.guess < 0:
        took = whole_seconds(z, u, unit.end, n, running, context)
    else:
        took = guessing_seconds(z, u, n, running, context)
    # Every sequence in this step writes what it makes to the cache.
    if running > 0:
        hold(z, u, unit.gain)
    begin_step(z, u, now, took, running, n)


@kernel
def tokens_made(z: Sim, u: int, now: float) -> None:
    """Give every running sequence its tokens; those that have all of theirs end."""
    unit = z.unit[u]
    unit.left_over += unit.gain
    n = int(unit.left_over + 1e-6)
    unit.left_over -= n
    each = unit.gain / unit.running
    unit.steps += 1
    service = z.request[z.ending[u, 0].request].service
    fresh = 0
    r = unit.joining
    while r >= 0:
        c = z.request[r]
        gap = now + unit.back_s - c.last_s
        c.gap_s = max(c.gap_s, gap)
        note_tokens(z, service, now, 1, gap / each)
        fresh += 1
        following = c.after
        c.after = -1
        r = following
    unit.joining = -1
    # All that had a token in the step before share one gap.
    if n > fresh:
        gap = now - unit.last_end
        gap_push(z, u, unit.steps, gap)
        note_tokens(z, service, now, n - fresh, gap / each)
    unit.decode_tokens += n
    z.instance[unit.instance].tokens += n
    # From here on `context` is what the next step attends to, as `leave` expects.
    unit.context += unit.gain
    # The top of the heap is who ends first.
    while unit.running > 0 and z.ending[u, 0].step <= unit.steps:
        r = leave(z, u, 0)
        c = z.request[r]
        c.gap_s = max(c.gap_s, gap_since(z, u, c.join + 2))
        c.made = c.answer
        end(z, r, now + unit.back_s, DONE)


@kernel
def solo_end(z: Sim, u: int, now: float) -> None:
    """End a step: a token for every running sequence, and the first one of prompts that are done."""
    unit = z.unit[u]
    if unit.running > 0 and not unit.held:
        tokens_made(z, u, now)
    # Only now: `tokens_made` counts gaps from the end of the step before, which sequences wait since
    # if they were held.
    if unit.running == 0 or not unit.held:
        unit.last_end = now
    # Prompts join after the tokens of this step were counted: their next token comes with the next step.
    r = unit.batch
    unit.batch = -1
    while r >= 0:
        following = z.request[r].after
        z.request[r].after = -1
        prompt_ended(z, u, r, now)
        r = following
    # The step that begins now was prepared when the one before it began.
    solo_start(z, u, now, unit.begun_s if unit.ahead else now)


@kernel
def prompt_ended(z: Sim, u: int, r: int, now: float) -> None:
    """Go on with a request whose prompt has been computed on a solo unit."""
    c = z.request[r]
    if c.marked:
        start_over(z, r)
        return
    if moves_on(z, r):
        decode_apart(z, r)
        return
    seen = now + z.unit[u].back_s
    prompt_done(z, r, now, seen)
    if c.made >= c.answer:
        end(z, r, seen, DONE)
    else:
        join(z, u, r)


@kernel
def solo_fail(z: Sim, u: int) -> None:
    """Send back every sequence of a unit that died."""
    unit = z.unit[u]
    if unit.busy and not unit.held:
        # The step that is broken off had booked a token for each (`solo_start`).
        hold(z, u, -unit.gain)
    while unit.running > 0:
        # From the end of the heap nothing has to move.
        r = leave(z, u, unit.running - 1)
        cut_short(z, u, r)
        start_over(z, r)
