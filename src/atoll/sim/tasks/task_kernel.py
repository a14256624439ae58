"""How compiled code sees the arrays of this simulator: as `sim.sim_kernel`, with other arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from atoll.core.compiling import part
from atoll.sim import heap, stepping
from atoll.sim.sim_kernel import SimType, opener_of
from atoll.sim.tasks.task_arrays import LAYOUT

kernel = part
# Compiled for whatever has the arrays that they name.
push = cast(Callable[..., None], heap.push)
pop = cast(Callable[..., int], heap.pop)
end_push = cast(Callable[..., None], heap.end_push)
end_remove = cast(Callable[..., int], heap.end_remove)
whole_seconds = cast(Callable[..., float], stepping.whole_seconds)
task_sim_at = opener_of(SimType("TaskSim", LAYOUT, prefix="tasks."))
