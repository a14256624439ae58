"""GPUs that several units have a share of: whose steps run now, and how far each is.

Processes on one GPU take turns. So a step of a unit runs at full speed while its neighbours rest, and at one
k-th of it, less what switching takes, while k of them compute (processor sharing). Times of a unit are those
with all shares busy, as plans reckon: what its host does is its own, the rest divided by how much slower that
is (`catalog.gpus.slowdown`) is what it computes with the GPU to itself. A step with prompts takes no less
than launching its kernels does, whoever else computes; then it leaves the GPU to others before it ends.

Ends of what is computed are not in the heap of events: they move whenever a neighbour begins or ends.
"""

from __future__ import annotations

import math

from atoll.sim.heap import push
from atoll.sim.sim_arrays import LENGTH, STEP, Sim
from atoll.sim.sim_kernel import kernel
from atoll.sim.stepping import host_seconds, launch_seconds


@kernel
def turn_seconds(z: Sim, g: int) -> float:
    """Return the seconds in which each unit that computes on a GPU now gets one second's work done."""
    gpu = z.gpu[g]
    return gpu.busy / (1.0 - gpu.loss) if gpu.busy > 1 else 1.0


@kernel
def catch_up(z: Sim, g: int, now: float) -> None:
    """Note what the units of a GPU have computed until now."""
    gpu = z.gpu[g]
    if gpu.busy > 0:
        each = (now - gpu.clock_s) / turn_seconds(z, g)
        u = gpu.first
        while u >= 0:
            unit = z.unit[u]
            if unit.computing:
                unit.left_s = max(0.0, unit.left_s - each)
            u = unit.beside
    gpu.clock_s = now


@kernel
def look_ahead(z: Sim, g: int) -> None:
    """Find the unit of a GPU that is done first, and when, if nobody else begins."""
    gpu = z.gpu[g]
    gpu.next_s = math.inf
    u = gpu.first
    while u >= 0:
        unit = z.unit[u]
        if unit.computing:
            done_s = gpu.clock_s + unit.left_s * turn_seconds(z, g)
            if done_s < gpu.next_s:
                gpu.next_s = done_s
                gpu.next = u
        u = unit.beside


@kernel
def begin_turn(z: Sim, u: int, now: float, took: float, prompts: int, outputs: int) -> None:
    """Begin a step of a unit that takes so long with all shares of its GPU busy."""
    unit = z.unit[u]
    # What neighbours have computed until now was computed without it.
    catch_up(z, unit.gpu, now)
    unit.host_s = min(took, host_seconds(z, u, float(outputs)))
    unit.launch_s = 0.0
    if prompts > 0:
        tokens = float(outputs - prompts)
        for i in range(prompts):
            tokens += z.step[LENGTH, i]
        unit.launch_s = min(took - unit.host_s, launch_seconds(z, u, tokens))
    unit.left_s = (took - unit.host_s) / unit.slowdown
    unit.computing = True
    # Nobody knows yet when it ends: what is busy of it is counted from here, when it is known.
    unit.step_end = now
    z.gpu[unit.gpu].busy += 1
    look_ahead(z, unit.gpu)


@kernel
def leave_turn(z: Sim, u: int, now: float) -> None:
    """Leave the GPU to the neighbours of a unit, if it computes there."""
    unit = z.unit[u]
    if not unit.computing:
        return
    catch_up(z, unit.gpu, now)
    unit.computing = False
    z.gpu[unit.gpu].busy -= 1
    look_ahead(z, unit.gpu)


@kernel
def end_turn(z: Sim, g: int, now: float) -> None:
    """End what the unit computes that is done first on a GPU; its step ends when its host is done, too."""
    u = z.gpu[g].next
    unit = z.unit[u]
    leave_turn(z, u, now)
    unit.step_end = max(now, unit.begun_s + unit.launch_s) + unit.host_s
    unit.busy_s += unit.step_end - unit.begun_s
    push(z, unit.step_end, STEP, u)
