"""Allocation of templates: how long to a proven gap, with plenty and with scarce nodes.

Core and extended are Coral's set-ups (see `benchmarks.coral`). A pool of GPUs in a given mix of types, sizes
and regions is enlarged until it can just meet demand: the estimated demand. "edge" is that pool itself;
"scarce" is 25 % (core) or 75 % (extended) above it, as in the paper's section 6.1. Template generation is not
counted here. For the core set-up the answer is checked against the full integer programme over all templates,
solved by HiGHS.
"""

from __future__ import annotations

import time

import numpy as np

from atoll.catalog import Catalog
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.plan.validate.check import check
from atoll.solve.lp import LinearProgram, Sparse
from atoll.solve.rent import optimal
from atoll.solve.templates.cache import TemplateCache
from atoll.solve.templates.library import Libraries, libraries
from benchmarks.coral import core, extended, scarce
from benchmarks.report import Figure, finish, options


def gpu_memory(plan: Plan, catalog: Catalog) -> float:
    """Return the GPU memory of all nodes of a plan, in bytes."""
    return float(
        sum(catalog.node(node.node_type).memory_bytes for i in plan.instances for node in i.nodes)
    )


def run(
    name: str, problem: Problem, catalog: Catalog, library: Libraries, gap: float, deadline_s: float
) -> tuple[Plan, float]:
    """Solve, check with the validator, print a line; returns the plan and CPU seconds."""
    start = time.process_time()
    solved = optimal.solve(problem, catalog, library, gap=gap, deadline_s=deadline_s)
    cpu = time.process_time() - start
    check(solved.plan, problem, catalog)
    plan, work = solved.plan, solved.allocation.statistics
    share = min(plan.served_fraction.values(), default=1.0)
    print(
        f"  {name:16s} {plan.status:9s} ${plan.usd_per_hour:9.2f}/h  gap {100 * (plan.gap or 0):6.3f} %"
        f"  {cpu:7.2f} CPU-s  serves {share:6.1%}  {work.pairs:8,d} pairs, {work.columns:6,d} columns",
        flush=True,
    )
    return plan, cpu


def edge_margin(problem: Problem, plan: Plan, catalog: Catalog, library: Libraries) -> float:
    """Return the smallest pool, in tenths of the cheapest plan's GPU memory, that serves all demand.

    A larger pool never serves less, so the margin is doubled until all is served and then bisected.
    """
    needed = gpu_memory(plan, catalog)

    def serves_all(tenths: int) -> bool:
        tight = scarce(problem, needed, tenths / 10)
        # Only whether all demand can be met is asked: no time goes into what else could be served.
        tight = tight.replace(settings=tight.settings.model_copy(update={"on_shortage": "fail"}))
        found = optimal.solve(tight, catalog, library, gap=0.5, deadline_s=12.0)
        return min(found.plan.served_fraction.values(), default=0.0) >= 1.0

    low, high = 9, 10
    while not serves_all(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if serves_all(middle) else (middle, high)
    return high / 10


def full_programme(problem: Problem, library: Libraries, seconds: float) -> tuple[float, float]:
    """Solve the whole integer programme over all templates and regions; (cost, bound) when time is up."""
    demands = optimal.role_demands(problem, library)
    lp = LinearProgram()
    prices = {(o.region, o.node_type): o for o in problem.offers}
    pairs = sorted(prices)
    rows = len(demands) + len(pairs)
    lower = np.concatenate([[d.demand for d in demands], np.full(len(pairs), -np.inf)])
    upper = np.concatenate(
        [np.full(len(demands), np.inf), [float(prices[pair].available) for pair in pairs]]
    )
    empty = np.zeros(0, np.int64)
    lp.add_rows(lower, upper, Sparse.of(empty, empty, np.zeros(0), rows))
    owner: list[int] = []
    index: list[int] = []
    value: list[float] = []
    cost: list[float] = []
    for r, demand in enumerate(demands):
        for region in problem.regions:
            for counts, rate in zip(demand.counts, demand.throughput, strict=True):
                used = [(library.node_types[c], int(counts[c])) for c in np.flatnonzero(counts)]
                if any((region, kind) not in prices for kind, _ in used):
                    continue
                column = len(cost)
                entries = [(r, float(rate))]
                entries += [(len(demands) + pairs.index((region, k)), float(n)) for k, n in used]
                for row, amount in entries:
                    owner.append(column)
                    index.append(row)
                    value.append(amount)
                cost.append(sum(prices[region, kind].usd_per_hour * n for kind, n in used))
    number = len(cost)
    matrix = Sparse.of(
        np.array(owner, np.int64), np.array(index, np.int64), np.array(value), number
    )
    lp.add_columns(np.array(cost), np.zeros(number), np.full(number, np.inf), matrix)
    lp.set_integer(np.arange(number, dtype=np.int64))
    found = lp.solve_mip(time_limit_s=seconds, gap=1e-6)
    print(
        f"  full programme of {number:,d} columns by HiGHS: ${found.objective:.2f}/h, bound {found.bound:.2f}"
    )
    return found.objective, found.bound


def main() -> None:
    """Solve all set-ups."""
    arguments = options(__doc__ or "")
    catalog, cache = Catalog.default(), TemplateCache()
    figures: list[Figure] = []
    for name, problem, margin, bar in (
        ("core", core(), 1.25, 0.5),
        ("extended", extended(), 1.75, 3.0),
    ):
        library = libraries(problem, catalog, cache=cache)
        # The first solve in a process loads and warms the engine; that is not what is measured.
        optimal.solve(problem, catalog, library, deadline_s=0.5)
        plan, cpu = run(name, problem, catalog, library, 1e-3, 30.0)
        figures += [
            Figure(f"{name}_cpu_s", cpu, bar),
            Figure(f"{name}_gap", 100 * (plan.gap or 0.0), 0.1),
            Figure(f"{name}_usd_per_hour", plan.usd_per_hour),
        ]
        edge = edge_margin(problem, plan, catalog, library)
        needed = gpu_memory(plan, catalog)
        print(f"  {name}: the edge is at {edge:.1f} times the GPU memory of the cheapest plan")
        prefix = "" if name == "extended" else "core_"
        for kind, factor, limits in (("scarce", margin, (60.0, 0.5)), ("edge", 1.0, (None, None))):
            tight = scarce(problem, needed, edge * factor)
            short, cpu_short = run(f"{name}-{kind}", tight, catalog, library, 5e-3, 55.0)
            figures += [
                Figure(f"{prefix}{kind}_cpu_s", cpu_short, limits[0]),
                Figure(f"{prefix}{kind}_gap", 100 * (short.gap or 0.0), limits[1]),
                Figure(f"{prefix}{kind}_usd_per_hour", short.usd_per_hour),
            ]
        if name == "core":
            cost, bound = full_programme(problem, library, 20.0 if arguments.quick else 120.0)
            figures += [
                Figure("core_full_usd_per_hour", cost),
                Figure(
                    "core_full_bound", bound, note="HiGHS on the whole programme, same time limit"
                ),
            ]
    finish(figures)


if __name__ == "__main__":
    main()
