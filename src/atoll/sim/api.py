"""Run a simulation: the one function that planners, benchmarks and the command line call."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from atoll.sim.sim_options import SimOptions

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.plan.plan import Plan
    from atoll.plan.problem import Problem
    from atoll.sim.sim_result import SimReport
    from atoll.workload.requests import Requests

Progress = Callable[[int, int, float], None]
"""Called first and now and then with requests finished, requests in all, and the clock in seconds."""
_SLICE = 50_000
"""Events between two calls of it: about a tenth of a CPU-second where batches are large."""


def simulate(
    plan: Plan,
    problem: Problem,
    catalog: Catalog,
    requests: Requests,
    options: SimOptions | None = None,
    *,
    progress: Progress | None = None,
) -> SimReport:
    """Run a plan under a workload and return what happened.

    The same arguments give the same bits. Requests of a service that the plan does not serve wait for good.
    The first run on a machine compiles the event loop, which takes a while; later ones find it compiled.
    """
    from atoll.sim.event_loop import run
    from atoll.sim.sim_build import build
    from atoll.sim.sim_kernel import table_of
    from atoll.sim.sim_result import SimReport

    chosen = options or SimOptions()
    begun = time.process_time()
    if progress is not None:
        # Whoever would end it for the time that has passed can do so before anything is built.
        progress(0, len(requests), 0.0)
    built = build(plan, problem, catalog, requests, chosen)
    table = table_of(built.sim)
    while not run(table, _SLICE):
        if progress is not None:
            state = built.sim.run[0]
            progress(int(state["finished"]), len(requests), float(state["clock_s"]))
    return SimReport.of(built, problem, chosen, time.process_time() - begun)
