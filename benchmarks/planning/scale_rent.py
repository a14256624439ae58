"""Renting for many models: 200 models, 30 regions and 40 node types, with plenty and starved.

Twenty language models of the catalog stand in ten services each, of rates of their own; services of one
model are asked the same, so templates are shared. Every region sells all of ten GPUs in machines of 1, 2, 4
and 8, at prices of its own, so many that the cheapest run out while all demand can be served. Starved, a pool
of a mix that nobody chose holds 60 % of the GPU memory that the plan for all demand uses. As in
`benchmarks.allocation` the gap of a starved plan is the larger of that in the common share served and that in
what it costs. Templates are stated, but not counted.

deadline_overrun_s is by how much a whole plan with cached templates exceeds deadlines of 10 and 30 s, the
worse of plenty and starved. The planner's clock is that of its process there, so a busy machine measures the
same as an idle one.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import numpy as np

from atoll.catalog import Catalog
from atoll.plan.problem import Offer, Problem
from atoll.solve import deadline, solve
from atoll.solve.plan_request import PlanRequest
from atoll.solve.templates import library as library_module
from atoll.solve.templates.library import libraries
from atoll.solve.templates.template_cache import TemplateCache
from benchmarks.planning.allocation import gpu_memory
from benchmarks.planning.allocation import run as measure
from benchmarks.planning.coral import extended, many_regions

AVAILABLE = 64
"""Machines of each type in each region where there are plenty."""
STARVED = 0.6
"""GPU memory of the starved pool, as a share of what the plan for all demand uses."""
GAP = 0.02
"""Gap that is asked for: what is measured is the time to it."""
DEADLINES_S = (10.0, 30.0)

MODELS = (
    "phi-4-14b",
    "gpt-oss-20b",
    "gpt-oss-120b",
    "qwen3-32b",
    "qwen3-235b-a22b",
    "llama-3-70b",
    "llama-3.1-8b",
    "llama-3.2-3b",
    "llama-2-13b",
    "codellama-34b",
    "qwen3-4b",
    "qwen3-8b",
    "qwen3-14b",
    "qwen3-30b-a3b",
    "qwen3-next-80b-a3b",
    "gemma-3-12b",
    "gemma-3-27b",
    "mistral-small-24b",
    "mistral-large-123b",
    "glm-4.5-air",
)
USD = {
    "B200": 6.5,
    "H200": 4.4,
    "H100": 3.6,
    "A100-80": 2.2,
    "A100-40": 1.6,
    "RTXPRO6000": 1.9,
    "L40S": 1.2,
    "A6000": 0.8,
    "A10G": 0.7,
    "L4": 0.5,
}
"""USD per hour and GPU, about what clouds ask; regions differ by up to a half (`many_regions`)."""
RATE = 200.0
"""Requests/s that a service gets on average."""
SIZES = (1, 2, 4, 8)
"""GPUs of a machine."""
POOL = {
    "B200": 0.05,
    "H200": 0.08,
    "H100": 0.12,
    "A100-80": 0.15,
    "A100-40": 0.10,
    "RTXPRO6000": 0.10,
    "L40S": 0.15,
    "A6000": 0.10,
    "A10G": 0.08,
    "L4": 0.07,
}
"""Shares of a starved pool's GPU memory: not what a cheapest plan would choose."""
POOL_SIZES = {1: 0.4, 2: 0.25, 4: 0.2, 8: 0.15}
"""Shares of it by GPUs of a machine."""


def many(copies: int, regions: int, kinds: int, available: int) -> Problem:
    """Return a problem of 20 models `copies` times each, on the first `kinds` of 40 node types."""
    base = extended()
    by_model = {service.model: service for service in base.services}
    rng = np.random.default_rng(200)
    services = []
    for place, model in enumerate(MODELS):
        like = by_model.get(model, base.services[place % len(base.services)])
        for copy in range(copies):
            update = {
                "name": f"{model}-{copy}",
                "model": model,
                "rate_per_s": round(RATE * float(rng.uniform(0.3, 1.7)), 3),
            }
            services.append(like.model_copy(update=update))
    offers = tuple(
        Offer(
            region="r/00",
            node_type=f"{gpu}:{size}",
            usd_per_hour=round(usd * size, 4),
            available=available,
            whole=True,
        )
        for gpu, usd in USD.items()
        for size in SIZES
    )[:kinds]
    problem = base.replace(name=f"{len(services)}-models", services=tuple(services), offers=offers)
    return many_regions(problem, regions, available)


def starve(problem: Problem, memory_bytes: float) -> Problem:
    """Return a problem whose machines hold so much GPU memory in all, of a mix that nobody chose for it."""
    catalog = Catalog.default()
    regions = sorted({offer.region for offer in problem.offers})
    available: dict[tuple[str, str], int] = {}
    for place, (gpu, size) in enumerate(itertools.product(POOL, SIZES)):
        kind = f"{gpu}:{size}"
        share = memory_bytes * POOL[gpu] * POOL_SIZES[size]
        nodes = round(share / catalog.node(kind).memory_bytes)
        for index in range(len(regions)):
            # Each type begins in another region, or the first ones would have most of all.
            at = regions[(index + 7 * place) % len(regions)]
            available[at, kind] = (nodes + len(regions) - 1 - index) // len(regions)
    offers = tuple(
        o.model_copy(update={"available": available[o.region, o.node_type]}) for o in problem.offers
    )
    return problem.replace(name=f"{problem.name}-starved", offers=offers)


def overrun(problem: Problem, catalog: Catalog, deadlines_s: Sequence[float]) -> float:
    """Return by how many seconds of the process deadlines are exceeded at most, templates read from disk."""
    latest = 0.0
    before = deadline._now
    # CPU seconds: what the clock would say on an idle machine, for all is done in one thread.
    deadline._now = time.process_time
    try:
        for seconds in deadlines_s:
            # Read from disk by each: what the last one used stays in memory.
            library_module._KEPT.clear()
            began = time.process_time()
            plan = solve(problem, PlanRequest(catalog=catalog, deadline_s=seconds))
            took = time.process_time() - began
            served = min(plan.served_fraction.values(), default=0.0)
            print(
                f"  deadline {seconds:g} s: {took:.1f} CPU-s, serves {served:.1%},"
                f" ${plan.usd_per_hour:.2f}/h, {'cut short' if plan.cut_short else 'ended by itself'}",
                flush=True,
            )
            latest = max(latest, took - seconds)
    finally:
        deadline._now = before
    return max(0.0, latest)


def run(quick: bool) -> dict[str, float | None]:
    """Plan with plenty, starved and against deadlines; return the figures by key."""
    copies, regions, kinds = (5, 12, 30) if quick else (10, 30, 40)
    problem, catalog = many(copies, regions, kinds, AVAILABLE), Catalog.default()
    cpu = time.process_time()
    library = libraries(problem, catalog, cache=TemplateCache())
    print(
        f"  {len(problem.services)} models x {regions} regions x {kinds} node types:"
        f" templates {time.process_time() - cpu:.1f} CPU-s",
        flush=True,
    )
    plenty = measure("plenty", problem, catalog, library, GAP)
    starved = starve(problem, STARVED * gpu_memory(plenty.plan, catalog))
    short = measure("starved", starved, catalog, library, GAP)
    return {
        "rent200_gap": plenty.gap,
        "rent200_cpu_s": plenty.cpu_s,
        "rent200_starved_gap": short.gap,
        "rent200_starved_cpu_s": short.cpu_s,
        "rent200_deadline_overrun_s": max(
            overrun(one, catalog, DEADLINES_S[:1] if quick else DEADLINES_S)
            for one in (problem, starved)
        ),
    }
