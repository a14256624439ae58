"""From part to part: who runs a job, how its data gets there, and when it may begin."""

from __future__ import annotations

from atoll.routing.compiled import by_weight, draw, round_robin
from atoll.sim.tasks.task_arrays import (
    AUDIO,
    CHUNK,
    CLOSED,
    DECODE,
    DRAWN,
    DYNAMIC,
    FED,
    GONE,
    IMAGE,
    PREFILL,
    READY,
    TEXT,
    TOKENS,
    TaskSim,
)
from atoll.sim.tasks.task_kernel import kernel, push


@kernel
def kick(z: TaskSim, e: int) -> None:
    """Let an executor look for work once all that happens now has happened."""
    if not z.executor[e].kicked:
        z.executor[e].kicked = True
        z.todo[z.run[0].kicks] = e
        z.run[0].kicks += 1


@kernel
def count_waiting(z: TaskSim, u: int, jobs: int) -> None:
    """Count jobs that begin to wait at a unit, or no longer do."""
    unit = z.unit[u]
    unit.waiting += jobs
    unit.queue_moment += jobs * z.run[0].clock_s


@kernel
def enqueue(z: TaskSim, j: int) -> None:
    """Put a job at the end of the queue of its unit, unless it is in it."""
    job = z.job[j]
    unit = z.unit[job.unit]
    if not job.queued:
        job.queued = True
        job.after = -1
        if unit.head < 0:
            unit.head = j
        else:
            z.job[unit.tail].after = j
        unit.tail = j
        count_waiting(z, job.unit, 1)
    kick(z, unit.executor)


@kernel
def dequeue(z: TaskSim, u: int) -> int:
    """Take the first job off the queue of a unit."""
    unit = z.unit[u]
    j = unit.head
    unit.head = z.job[j].after
    z.job[j].queued = False
    count_waiting(z, u, -1)
    return j


@kernel
def assign(z: TaskSim, j: int, u: int) -> None:
    """Give a job to a unit, and note the work that is."""
    job, unit = z.job[j], z.unit[u]
    job.unit = u
    if unit.type == TOKENS:
        job.work_s = 0.0
        if unit.phase != DECODE:
            job.work_s += job.prompt * unit.work_prompt_s
        if unit.phase != PREFILL:
            job.work_s += job.answer * unit.work_answer_s
    else:
        item_s = z.item_s[u, z.request[job.request].klass] + unit.work_item_s
        job.work_s = job.items * job.steps * item_s
    z.executor[unit.executor].work_s += job.work_s


@kernel
def choose(z: TaskSim, j: int, now: float) -> None:
    """Give a job to whoever has the least work, as far as the control plane knows when it is asked."""
    run, job = z.run[0], z.job[j]
    one = z.part[z.klass[z.request[job.request].klass].part + job.part]
    best = -1
    for i in range(one.option, one.option + one.options):
        u = z.option[i]
        if best < 0 or (
            z.executor[z.unit[u].executor].work_s < z.executor[z.unit[best].executor].work_s
        ):
            best = u
    assign(z, j, best)
    run.queries += one.options
    # The control plane answers one question after the other.
    run.control_s = max(run.control_s, now) + run.query_s * one.options
    job.known_s = run.control_s


@kernel
def take_edge(z: TaskSim, vertex: int) -> int:
    """Return what an edge of a vertex leads to, by the routing of the run."""
    last = len(z.choice)
    vertices = len(z.first)
    if z.run[0].routing == DRAWN:
        at = by_weight(
            z.first[0:vertices],
            z.choice["target"][0:last],
            z.choice["weight"][0:last],
            vertex,
            z.vertex["closed"][0 : len(z.vertex)],
            draw(z.random[0:2]),
        )
    else:
        at = round_robin(
            z.first[0:vertices],
            z.choice["target"][0:last],
            z.choice["weight"][0:last],
            z.choice["order"][0:last],
            z.choice["credit"][0:last],
            vertex,
            z.vertex["closed"][0 : len(z.vertex)],
        )
    return z.choice[at].target


@kernel
def arrive(z: TaskSim, r: int, now: float) -> None:
    """Give a request its path, and begin the parts that nothing feeds."""
    run, request = z.run[0], z.request[r]
    klass = z.klass[request.klass]
    request.path = take_edge(z, klass.vertex)
    path = z.path[request.path]
    vertex = -1
    e = -1
    for m in range(path.member, path.member + path.members):
        member = z.member[m]
        j = request.job + member.part
        z.job[j].active = True
        request.left += 1
        if run.routing != DYNAMIC:
            # Members at one vertex follow each other, and share its choice.
            if member.vertex != vertex:
                vertex = member.vertex
                e = take_edge(z, vertex)
            assign(z, j, z.unit_of[e, z.part[klass.part + member.part].name])
    for i in range(klass.edge, klass.edge + klass.edges):
        link = z.link[i]
        j = request.job + link.dst
        # Only what joins two parts that this request uses.
        if z.job[request.job + link.src].active and z.job[j].active:
            z.job[j].feeders += 1
            z.job[j].starts += 1
            if link.streamed:
                z.job[request.job + link.src].chunk = link.chunk
                z.job[j].chunked = z.part[klass.part + link.dst].type != TOKENS
    for m in range(path.member, path.member + path.members):
        j = request.job + z.member[m].part
        if z.job[j].feeders == 0:
            if run.routing == DYNAMIC:
                choose(z, j, now)
                push(z, z.job[j].known_s, READY, j)
            else:
                push(z, now, READY, j)


@kernel
def carry(z: TaskSim, source: int, target: int, size: float, now: float) -> float:
    """Send bytes from an executor to another and return when all are there."""
    if source == target:
        return now
    out, into = z.box[z.executor[source].box], z.box[z.executor[target].box]
    if z.executor[source].box == z.executor[target].box:
        if z.executor[source].group == z.executor[target].group:
            return now
        return now + size / out.inner_bytes_per_s + out.inner_latency_s
    asked_s = z.run[0].asked_s
    began = max(out.out_s, now)
    out.out_s = began + size / out.bytes_per_s
    out.out_busy_s += size / out.bytes_per_s
    out.out_asked_s += max(0.0, min(out.out_s, asked_s) - began)
    began = max(into.in_s, now)
    into.in_s = began + size / into.bytes_per_s
    into.in_busy_s += size / into.bytes_per_s
    into.in_asked_s += max(0.0, min(into.in_s, asked_s) - began)
    there = max(out.out_s, into.in_s) + max(out.latency_s, into.latency_s)
    if len(z.pair):
        pair = z.pair[z.executor[source].box, z.executor[target].box]
        if pair.bytes_per_s > 0.0:
            pair.free_s = max(pair.free_s, now) + size / pair.bytes_per_s
            there = max(there, pair.free_s + pair.latency_s)
    return there


@kernel
def send(z: TaskSim, j: int, to: int, kind: int, size: float, now: float) -> float:
    """Send something from a job to one that it feeds and return when it is there.

    Where nobody runs that one yet, somebody is chosen.
    """
    if z.job[to].unit < 0:
        choose(z, to, now)
    # Nothing leaves before the control plane has said where to.
    leaves = max(now, z.job[to].known_s)
    source, target = z.unit[z.job[j].unit].executor, z.unit[z.job[to].unit].executor
    there = carry(z, source, target, size, leaves)
    push(z, there, kind, to)
    return there


@kernel
def stream(z: TaskSim, j: int, now: float) -> None:
    """Send a chunk of what a job makes to the part that is fed as it comes."""
    job = z.job[j]
    request = z.request[job.request]
    klass = z.klass[request.klass]
    one = z.part[klass.part + job.part]
    for i in range(one.edge, one.edge + one.edges):
        link = z.link[klass.edge + i]
        to = request.job + link.dst
        if link.streamed and z.job[to].active:
            share = min(1.0, link.chunk / job.answer)
            if z.part[klass.part + link.dst].type == TOKENS:
                # It begins with the first chunk; the others are there when it wants them.
                job.chunk = 0
            else:
                share = 1.0 / z.job[to].items
            send(z, j, to, CHUNK, share * z.size[request.edge + i], now)


@kernel
def complete(z: TaskSim, j: int, now: float) -> None:
    """Note that the work of a job is done; with all that feeds it done, too, it is finished."""
    job = z.job[j]
    job.worked = True
    # Noted when it was given out (`assign`).
    z.executor[z.unit[job.unit].executor].work_s -= job.work_s
    if job.chunk > 0:
        stream(z, j, now)
    if job.feeders == 0:
        finish(z, j, now)


@kernel
def finish(z: TaskSim, j: int, now: float) -> None:
    """Hand what a job made to those that it feeds."""
    job = z.job[j]
    request = z.request[job.request]
    klass = z.klass[request.klass]
    job.finished = True
    job.finish_s = now
    emits = z.unit[job.unit].emits
    if emits == TEXT:
        request.last_text_s = now
        request.tokens = max(request.tokens, job.answer)
    elif emits == AUDIO:
        request.last_audio_s = now
    elif emits == IMAGE:
        request.image_s = now
    request.left -= 1
    if request.left == 0:
        request.end_s = now
        z.run[0].finished += 1
    one = z.part[klass.part + job.part]
    gone = now
    for i in range(one.edge, one.edge + one.edges):
        link = z.link[klass.edge + i]
        to = request.job + link.dst
        if not z.job[to].active:
            continue
        size = z.size[request.edge + i]
        if not link.streamed:
            gone = max(gone, send(z, j, to, FED, size, now))
        elif z.part[klass.part + link.dst].type == TOKENS:
            # The first chunk went before (`stream`): this is the rest.
            sent = min(1.0, link.chunk / job.answer)
            send(z, j, to, CLOSED, (1.0 - sent) * size, now)
        else:
            # All of it went before: this only says so.
            send(z, j, to, CLOSED, 0.0, now)
    if job.held > 0.0:
        # The KV cache is kept until it has been fetched.
        push(z, gone, GONE, j)


@kernel
def begin(z: TaskSim, j: int, now: float) -> None:
    """Let a job begin: what it needs first is there."""
    job = z.job[j]
    job.begin_s = now
    unit = z.unit[job.unit]
    if unit.type == TOKENS:
        job.target = job.prompt
        if unit.phase == DECODE:
            # Prompt and first token come from elsewhere.
            job.made = 1
            job.computed = job.prompt
            if job.answer <= 1:
                complete(z, j, now)
                return
        enqueue(z, j)
        return
    if not job.chunked:
        job.ready = job.items
    if job.items == 0:
        complete(z, j, now)
    elif job.ready > 0:
        enqueue(z, j)


@kernel
def receive(z: TaskSim, kind: int, j: int, now: float) -> None:
    """Take in what has arrived for a job."""
    job = z.job[j]
    if kind == READY:
        begin(z, j, now)
        return
    # As it was before, to see if this is what the job has waited for.
    starts = job.starts
    if kind == CHUNK and job.chunked:
        job.ready += 1
    if kind == FED:
        job.starts -= 1
    elif not job.begun:
        # Of what is streamed the first chunk is enough to begin with.
        job.begun = True
        job.starts -= 1
    if kind != CHUNK:
        # A chunk is not the end of what its feeder sends.
        job.feeders -= 1
    if job.starts == 0:
        if starts > 0:
            begin(z, j, now)
        elif kind == CHUNK and job.chunked:
            enqueue(z, j)
    if job.worked and not job.finished and job.feeders == 0:
        finish(z, j, now)
