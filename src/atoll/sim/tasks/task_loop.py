"""The event loop of tasks: takes events in order of time and hands each to what it concerns."""

from __future__ import annotations

import math

from atoll.core.compiling import entry
from atoll.sim.heap import KINDS
from atoll.sim.sim_arrays import Longs
from atoll.sim.tasks.task_arrays import GONE, STEP, TaskSim
from atoll.sim.tasks.task_handover import arrive, kick, receive
from atoll.sim.tasks.task_kernel import kernel, pop, push, task_sim_at
from atoll.sim.tasks.task_steps import drop, end, start

COMPILED_AS = "the simulator of tasks"


@kernel
def start_next(z: TaskSim, e: int, now: float) -> None:
    """Start a step of the next part of an idle executor that has work, in turn."""
    executor = z.executor[e]
    for i in range(1, executor.count + 1):
        turn = (executor.turn + i) % executor.count
        u = executor.first + turn
        took = start(z, u)
        if took < 0.0:
            continue
        took *= executor.slowed
        unit = z.unit[u]
        unit.step_count += 1
        unit.busy_s += took
        unit.busy_asked_s += max(0.0, min(now + took, z.run[0].asked_s) - now)
        executor.busy_s += took
        executor.busy = True
        executor.turn = turn
        executor.at = u
        executor.step_end_s = now + took
        push(z, now + took, STEP, e)
        break


@kernel
def settle(z: TaskSim, now: float) -> None:
    """Let executors that got or ended something go on."""
    run = z.run[0]
    for i in range(run.kicks):
        executor = z.executor[z.todo[i]]
        executor.kicked = False
        if not executor.busy:
            start_next(z, z.todo[i], now)
    run.kicks = 0


@kernel
def advance(z: TaskSim, max_events: int) -> bool:
    """Work through up to `max_events` events; say whether all is done."""
    run = z.run[0]
    for _ in range(max_events):
        arrival = math.inf
        if run.next < run.requests:
            arrival = z.request[run.next].arrival_s
        event = z.heap[0].time if run.heaped > 0 else math.inf
        now = min(arrival, event)
        if now > run.clock_s:
            # All that happens at one time has happened before anybody starts a step.
            if run.kicks > 0:
                settle(z, run.clock_s)
                continue
            if now > run.until_s or now == math.inf:
                return True
            run.clock_s = now
        if arrival <= event:
            arrive(z, run.next, now)
            run.next += 1
            continue
        value = pop(z)
        if value % KINDS == STEP:
            e = value // KINDS
            z.executor[e].busy = False
            end(z, z.executor[e].at, now)
            kick(z, e)
        elif value % KINDS == GONE:
            drop(z, value // KINDS)
            kick(z, z.unit[z.job[value // KINDS].unit].executor)
        else:
            receive(z, value % KINDS, value // KINDS, now)
    return False


@entry("(int64[::1], int64)")
def run(table: Longs, max_events: int) -> bool:
    """Work through up to `max_events` events of the run of a table; say whether all is done."""
    return advance(task_sim_at(table), max_events)
