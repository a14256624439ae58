"""How fast the simulator is: 4 replicas of Llama-3-8B on A100-80 with the lengths of azure-conv.

Compiling is timed apart, in a process of its own with an empty cache. Growth is the slope of log CPU time
over log requests (and over log nodes at a fixed load per node), by least squares.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import numpy as np

from atoll.catalog import Catalog
from atoll.plan.plan import Plan
from atoll.plan.problem import Lengths, Offer, Problem, Service
from atoll.sim.api import simulate
from atoll.solve.assembly import NewInstance, PlainLayout, PlainStage, plan_from_layouts
from atoll.workload.lengths import length_mix
from atoll.workload.requests import collect
from atoll.workload.spec import workload_of
from benchmarks.report import Figure, finish, options

NODE, MODEL, REPLICAS = "A100-80:1", "llama-3.1-8b", 4
LOAD = 0.8
"""Share of the replicas' capacity that arrives."""
PEER = 230.0
"""Requests per CPU-second of Vidur in this scenario, as measured for the issue."""


def scenario(replicas: int) -> tuple[Problem, Plan, Catalog, float]:
    """Return the problem, the plan, the catalog, and requests/s that load the replicas to `LOAD`."""
    catalog = Catalog.default()
    service = Service(
        name="chat",
        model=MODEL,
        ttft_s=2.0,
        tpot_s=0.1,
        rate_per_s=1.0,
        lengths=Lengths.of(length_mix("azure-conv")),
        phases="together",
    )
    offer = Offer(region="here", node_type=NODE, available=replicas, usd_per_hour=2.0)
    problem = Problem(name="speed", services=(service,), offers=(offer,))
    layers = catalog.model(MODEL).llm.layers
    layout = PlainLayout((PlainStage(0, layers, (NODE,)),))
    chosen = [
        NewInstance(role="chat/llm/both", region="here", layout=layout) for _ in range(replicas)
    ]
    plan = plan_from_layouts(problem, catalog, chosen, status="feasible", solver="hand")
    rate = LOAD * sum(instance.throughput_per_s for instance in plan.instances)
    return problem, plan, catalog, rate


def timed(count: int, replicas: int = REPLICAS) -> float:
    """Return the CPU seconds of a run, workload not counted; every request must finish."""
    problem, plan, catalog, rate = scenario(replicas)
    work = collect(workload_of(f"azure-conv@{rate}/s n={count} curve=none"), 0)
    began = time.process_time()
    found = simulate(plan, problem, catalog, work)
    spent = time.process_time() - began
    if found.finished != count:
        raise RuntimeError(f"{found.finished} of {count} requests finished")
    return spent


def slope(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the exponent with which the time grows."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def child(what: str, cache: str | None = None) -> dict[str, float]:
    """Run a part of the benchmark in a process of its own and return what it printed."""
    environment = dict(os.environ)
    if cache is not None:
        environment["NUMBA_CACHE_DIR"] = cache
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.sim_speed", "--part", what],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def part(what: str) -> None:
    """Do one part and print its figure as JSON."""
    if what == "compile":
        first = timed(10)
        print(json.dumps({"seconds": first - timed(10)}))
    else:
        timed(1_000)
        spent = timed(1_000_000)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"seconds": spent, "rss_mb": memory}))


def main() -> None:
    """Time all of it."""
    if "--part" in sys.argv:
        part(sys.argv[-1])
        return
    arguments = options(__doc__ or "")
    with tempfile.TemporaryDirectory() as empty:
        compiled = child("compile", empty)["seconds"]
    print(f"compiling the loop: {compiled:.1f} CPU-s")
    timed(1_000)
    count = 100_000
    best = min(timed(count) for _ in range(3))
    print(f"{count:,} requests on {REPLICAS} replicas: {best:.2f} CPU-s, {count / best:,.0f}/CPU-s")
    sizes = tuple(25_000 * 2**k for k in range(4 if arguments.quick else 6))
    seconds = [min(timed(size) for _ in range(2)) for size in sizes]
    nodes = (4, 16, 64) if arguments.quick else (4, 16, 64, 256)
    per_node = 5_000
    spread = [timed(per_node * n, n) for n in nodes]
    for size, spent in zip(sizes, seconds, strict=True):
        print(f"  {size:>9,} requests, {REPLICAS} replicas: {spent:6.2f} CPU-s")
    for n, spent in zip(nodes, spread, strict=True):
        print(f"  {per_node * n:>9,} requests, {n:3d} replicas: {spent:6.2f} CPU-s")
    million = child("million")
    rate = count / best
    finish(
        [
            Figure(
                "requests_per_cpu_s", rate, note=f"bar: at least 25,000; {rate / PEER:.0f}x Vidur"
            ),
            Figure("compile_s", compiled, note="once per machine, then cached"),
            Figure("rss_mb_1m", million["rss_mb"], 1000),
            Figure("million_cpu_s", million["seconds"]),
            Figure("growth_exponent_requests", slope(sizes, seconds), 1.1),
            Figure("growth_exponent_nodes", slope(nodes, spread), note="requests grow with nodes"),
        ]
    )


if __name__ == "__main__":
    main()
