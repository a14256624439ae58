"""Run a simulation of tasks: the one function that others call."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Literal

from atoll.core.errors import InputError, UnknownNameError

if TYPE_CHECKING:
    from atoll.sim.api import Progress
    from atoll.sim.tasks.task_demand import Arrivals, Demand
    from atoll.sim.tasks.task_fleet import TaskFleet
    from atoll.sim.tasks.task_result import TaskResult

Routing = Literal["static", "dealt", "dynamic"]
_SLICE = 200_000


def simulate_tasks(
    fleet: TaskFleet,
    *,
    requests: int | None = None,
    duration_s: float | None = None,
    seed: int = 0,
    routing: Routing = "dealt",
    query_s: float = 0.0,
    warmup: float = 0.1,
    arrivals: Arrivals | None = None,
    demand: Demand | None = None,
    progress: Progress | None = None,
    part_times: bool = True,
) -> TaskResult:
    """Run a fleet and return what happened.

    With `requests`, so many come and all are waited for; with `duration_s`, the run stops then, whatever is
    in flight. Or give `demand`, requests that were drawn before (all are waited for, or until `duration_s`).

    `routing` "static" draws path and executors of a request by their weights when it comes, "dealt" deals
    them in turn (as close to the weights as whole requests can be), "dynamic" deals the path and at every
    hand-over takes the executor with the least work, of all that can run the part. For that the control
    plane asks every such executor, one after the other, `query_s` seconds each, and does so for one
    hand-over at a time.

    `warmup` is the share of the time in which requests come that is not judged (those that come first), and
    left out at both ends where throughput is steady. The same arguments give the same bits. `progress` is
    told now and then of requests that have come, how many will, and the clock in seconds; an error that it
    raises ends the run. Without `part_times` it is not found how long requests are at each part, which takes
    a good part of the time of a short run.
    """
    from atoll.sim.sim_kernel import table_of
    from atoll.sim.tasks.task_arrays import LAYOUT
    from atoll.sim.tasks.task_build import ROUTINGS, build
    from atoll.sim.tasks.task_demand import Arrivals, check_demand, draw_demand
    from atoll.sim.tasks.task_loop import run
    from atoll.sim.tasks.task_result import TaskResult

    if routing not in ROUTINGS:
        raise UnknownNameError("routing", routing, ROUTINGS)
    if not 0.0 <= query_s < math.inf:
        raise InputError(f"{query_s!r} is not a time in seconds", field="query_s")
    if not 0.0 <= warmup < 0.5:
        raise InputError(f"{warmup!r} is not a share of 0 to 0.5", field="warmup")
    if demand is not None and requests is not None:
        raise InputError("requests are drawn or given", field="requests", hint="leave it out")
    begun = time.process_time()
    if demand is None:
        demand = draw_demand(
            fleet, arrivals or Arrivals(), requests=requests, duration_s=duration_s, seed=seed
        )
    check_demand(fleet, demand, math.inf if duration_s is None else duration_s)
    built = build(fleet, demand, routing=ROUTINGS[routing], query_s=query_s, seed=seed)
    if duration_s is not None:
        built.sim.run["until_s"] = duration_s
    # Where all come at once nothing is asked later: the whole run counts.
    last_s = float(demand.arrival_s[-1])
    built.sim.run["asked_s"] = min(last_s, duration_s or math.inf) if last_s > 0.0 else math.inf
    table = table_of(built.sim, LAYOUT)
    while not run(table, _SLICE):
        if progress is not None:
            (now,) = built.sim.run
            progress(int(now["next"]), int(now["requests"]), float(now["clock_s"]))
    if duration_s is not None:
        built.sim.run["clock_s"] = duration_s
    spent_s = time.process_time() - begun
    return TaskResult.of(built, warmup=warmup, cpu_s=spent_s, part_times=part_times)
