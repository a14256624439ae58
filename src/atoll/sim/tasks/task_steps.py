"""Steps of units: batches of items, steps of denoising, and continuous batching of tokens.

All sequences (or images) that run advance together, so a step costs work for those that begin, end or are
due a chunk, not for every token: counters hold the batch, a heap of endings says who is next.
"""

from __future__ import annotations

from atoll.sim.sim_arrays import CACHED, LENGTH
from atoll.sim.tasks.task_arrays import AUDIO, BATCHES, DENOISES, JOBS, PREFILL, TEXT, TaskSim
from atoll.sim.tasks.task_handover import complete, count_waiting, dequeue, stream
from atoll.sim.tasks.task_kernel import end_push, end_remove, kernel, whole_seconds

NO_WORK = -1.0


@kernel
def item_seconds(z: TaskSim, u: int, j: int) -> float:
    """Return the seconds of an item of a job."""
    return z.item_s[u, z.request[z.job[j].request].klass]


@kernel
def note_item(z: TaskSim, u: int, j: int, now: float) -> None:
    """Note the time of the first sound that a request gets."""
    request = z.request[z.job[j].request]
    if z.unit[u].emits == AUDIO and request.first_audio_s != request.first_audio_s:
        request.first_audio_s = now


@kernel
def batch_start(z: TaskSim, u: int) -> float:
    """Take items off the queue, as many as fit in a batch, and return its seconds."""
    unit = z.unit[u]
    room = unit.most
    total = unit.fixed_s
    last = -1
    while room > 0 and unit.head >= 0:
        j = unit.head
        job = z.job[j]
        job.taken = min(room, job.ready)
        job.ready -= job.taken
        room -= job.taken
        total += job.taken * item_seconds(z, u, j)
        job.beside = -1
        if last < 0:
            unit.batch = j
        else:
            z.job[last].beside = j
        last = j
        if job.ready == 0:
            dequeue(z, u)
    if last < 0:
        return NO_WORK
    unit.batch_sum += unit.most - room
    return total


@kernel
def batch_end(z: TaskSim, u: int, now: float) -> None:
    """Note the items of the batch as done."""
    unit = z.unit[u]
    j = unit.batch
    unit.batch = -1
    while j >= 0:
        job = z.job[j]
        job.done += job.taken
        job.taken = 0
        note_item(z, u, j, now)
        if job.done == job.items:
            complete(z, j, now)
        j = job.beside


@kernel
def denoise_start(z: TaskSim, u: int) -> float:
    """Let images join and return the seconds of a step of denoising."""
    unit = z.unit[u]
    while unit.running < unit.most and unit.head >= 0:
        j = unit.head
        job = z.job[j]
        # The number of the job settles the order of those that end with the same step.
        end_push(z, u, unit.running, (unit.steps + job.steps) * JOBS + j, j)
        unit.running += 1
        unit.running_s += item_seconds(z, u, j)
        job.ready -= 1
        if job.ready == 0:
            dequeue(z, u)
    if unit.running == 0:
        return NO_WORK
    unit.batch_sum += unit.running
    return unit.fixed_s + unit.running_s


@kernel
def denoise_end(z: TaskSim, u: int, now: float) -> None:
    """Let images leave that have had their steps."""
    unit = z.unit[u]
    unit.steps += 1
    while unit.running > 0 and z.ending[u, 0].step // JOBS == unit.steps:
        j = end_remove(z, u, unit.running, 0)
        unit.running -= 1
        unit.running_s -= item_seconds(z, u, j)
        if unit.running == 0:
            # Rounding must not pile up.
            unit.running_s = 0.0
        z.job[j].done += 1
        note_item(z, u, j, now)
        if z.job[j].done == z.job[j].items:
            complete(z, j, now)


@kernel
def hold(z: TaskSim, u: int, tokens: float) -> None:
    """Put so many tokens of KV cache on a unit, or take them off."""
    unit = z.unit[u]
    unit.used += tokens
    unit.used_moment += tokens * z.run[0].clock_s
    unit.peak = max(unit.peak, unit.used)


@kernel
def drop(z: TaskSim, j: int) -> None:
    """Free the KV cache of a job."""
    hold(z, z.job[j].unit, -z.job[j].held)
    z.job[j].held = 0.0


@kernel
def join(z: TaskSim, u: int, j: int) -> None:
    """Let a job whose prompt is in the cache make a token in every step from the next on."""
    unit, job = z.unit[u], z.job[j]
    job.join = unit.steps
    # It leaves the heap at its end, or where its next chunk goes out.
    job.mark = job.answer
    if job.chunk > 0:
        job.mark = min(job.answer, (job.made // job.chunk + 1) * job.chunk)
    end_push(z, u, unit.running, (unit.steps + job.mark - job.made) * JOBS + j, j)
    unit.running += 1
    unit.context += job.target + 1


@kernel
def leave(z: TaskSim, u: int, at: int) -> int:
    """Take entry `at` off the running sequences of a unit and return its job; its KV cache stays."""
    unit = z.unit[u]
    j = end_remove(z, u, unit.running, at)
    job = z.job[j]
    unit.running -= 1
    # `context` has the token that it would make next already.
    unit.context -= job.target + unit.steps - job.join + 1
    job.made += unit.steps - job.join
    # What it has of KV cache now: as if its prompt had been that long.
    job.target += unit.steps - job.join
    if unit.eager:
        job.held += unit.steps - job.join
    return j


@kernel
def make_room(z: TaskSim, u: int) -> None:
    """Send sequences back, the youngest first, until each of the others can grow by a token."""
    unit = z.unit[u]
    while unit.running > 0 and unit.used + unit.running > unit.room:
        youngest = 0
        for i in range(1, unit.running):
            if z.ending[u, i].request > z.ending[u, youngest].request:
                youngest = i
        j = leave(z, u, youngest)
        job = z.job[j]
        drop(z, j)
        job.computed = 0
        job.target = job.prompt + job.made
        z.request[job.request].retries += 1
        z.run[0].gave_way += 1
        # First in the queue: it goes on before others begin.
        job.queued = True
        job.after = unit.head
        if unit.head < 0:
            unit.tail = j
        unit.head = j
        count_waiting(z, u, 1)


@kernel
def fits(z: TaskSim, u: int, j: int) -> bool:
    """Return whether a job may be let in beside what runs."""
    unit, job = z.unit[u], z.job[j]
    if unit.running + unit.prompting >= unit.most:
        return False
    # Eager engines book what there is, and send back what no longer fits; others book the whole answer.
    if unit.eager:
        return unit.used + unit.running + job.target + 1 <= unit.room
    return unit.used + need(z, u, j) <= unit.room


@kernel
def need(z: TaskSim, u: int, j: int) -> int:
    """Return the KV cache, in tokens, that is booked for a job."""
    job = z.job[j]
    return job.prompt if z.unit[u].phase == PREFILL else job.prompt + job.answer


@kernel
def admit(z: TaskSim, u: int) -> int:
    """Let the first job of the queue in and return it."""
    unit = z.unit[u]
    j = dequeue(z, u)
    job = z.job[j]
    job.held = float(job.target if unit.eager else need(z, u, j))
    hold(z, u, job.held)
    if job.computed == job.target:
        # Its prompt was computed elsewhere.
        join(z, u, j)
        return j
    job.after = -1
    if unit.prompt_head < 0:
        unit.prompt_head = j
    else:
        z.job[unit.prompt_tail].after = j
    unit.prompt_tail = j
    unit.prompting += 1
    return j


@kernel
def add_piece(z: TaskSim, u: int, j: int, budget: int) -> int:
    """Put as much of a prompt as fits into the step and return how much that is."""
    unit, job = z.unit[u], z.job[j]
    job.piece = min(budget, job.target - job.computed)
    z.step[LENGTH, unit.pieces] = job.piece
    z.step[CACHED, unit.pieces] = job.computed
    unit.pieces += 1
    unit.prompt_tokens += job.piece
    return job.piece


@kernel
def token_start(z: TaskSim, u: int) -> float:
    """Put a step together and return its seconds."""
    unit = z.unit[u]
    if unit.eager:
        make_room(z, u)
    # Prompts that were let in go on before others are.
    unit.pieces = 0
    budget = unit.budget - unit.running
    max_rows = z.step.shape[1]
    j = unit.prompt_head
    while j >= 0 and budget > 0 and unit.pieces < max_rows:
        budget -= add_piece(z, u, j, budget)
        j = z.job[j].after
    while unit.head >= 0 and fits(z, u, unit.head):
        waits = z.job[unit.head].computed < z.job[unit.head].target
        if waits and (budget <= 0 or unit.pieces >= max_rows):
            break
        j = admit(z, u)
        budget -= add_piece(z, u, j, budget) if waits else 1
    if unit.running == 0 and unit.pieces == 0:
        return NO_WORK
    unit.batch_sum += unit.running + unit.pieces
    unit.decode_tokens += unit.running
    if unit.eager:
        hold(z, u, float(unit.running))
    return whole_seconds(z, u, unit.end, unit.pieces, unit.running, float(unit.context))


@kernel
def release(z: TaskSim, u: int, j: int, now: float) -> None:
    """Free the KV cache of a job that has all its tokens, unless others want it."""
    if z.unit[u].phase != PREFILL:
        drop(z, j)
    complete(z, j, now)


@kernel
def token_end(z: TaskSim, u: int, now: float) -> None:
    """Give every sequence its token, and prompts that are done their first."""
    unit = z.unit[u]
    if unit.running > 0:
        unit.steps += 1
        # Before any leave: `leave` expects what the next step would attend to.
        unit.context += unit.running
        while unit.running > 0 and z.ending[u, 0].step // JOBS == unit.steps:
            j = leave(z, u, 0)
            job = z.job[j]
            if job.made == job.answer:
                release(z, u, j, now)
            else:
                stream(z, j, now)
                join(z, u, j)
    for _ in range(unit.pieces):
        j = unit.prompt_head
        job = z.job[j]
        job.computed += job.piece
        if job.computed < job.target:
            # Only the last prompt of a step may be cut.
            break
        unit.prompt_head = job.after
        unit.prompting -= 1
        prompt_done(z, u, j, now)
    unit.pieces = 0


@kernel
def prompt_done(z: TaskSim, u: int, j: int, now: float) -> None:
    """Give a job the token that comes with its prompt."""
    unit, job = z.unit[u], z.job[j]
    request = z.request[job.request]
    job.made += 1
    # NaN: there was no text yet.
    if unit.emits == TEXT and request.first_text_s != request.first_text_s:
        request.first_text_s = now
    if unit.phase == PREFILL or job.made >= job.answer:
        release(z, u, j, now)
        return
    if job.chunk > 0 and job.made % job.chunk == 0:
        stream(z, j, now)
    join(z, u, j)


@kernel
def start(z: TaskSim, u: int) -> float:
    """Start a step of a unit and return its seconds, below 0 where there is nothing to do."""
    if z.unit[u].type == BATCHES:
        return batch_start(z, u)
    if z.unit[u].type == DENOISES:
        return denoise_start(z, u)
    return token_start(z, u)


@kernel
def end(z: TaskSim, u: int, now: float) -> None:
    """End the step of a unit."""
    if z.unit[u].type == BATCHES:
        batch_end(z, u, now)
    elif z.unit[u].type == DENOISES:
        denoise_end(z, u, now)
    else:
        token_end(z, u, now)
