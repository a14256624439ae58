"""Allocation of templates: how long to a proven gap, with plenty and with scarce nodes.

Core and extended are Coral's set-ups (see `benchmarks.coral`). A pool of GPUs in a given mix of types, sizes
and regions is enlarged until it can just meet demand: the estimated demand. "edge" is that pool itself;
"scarce" is 25 % (core) or 75 % (extended) above it, as in the paper's section 6.1; "scarce_edge" are pools of
90-99 % of it, which cannot serve everything: their gap is the larger of that in the common share served and
that in what it costs. models48 is the extended set-up with every model eight times, regions30 has thirty
regions, models24_scarce four of each model in ten. Template generation is not counted, except in
deadline_overrun_s: the clock's seconds beyond 1.1 times a deadline that is far too short, templates and all.
For the core set-up the answer is checked against the full integer program over all templates by HiGHS.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

import numpy as np

from atoll.catalog import Catalog
from atoll.core.ids import Phase, RoleId
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.plan.validate.check import check
from atoll.plan.validate.violation import InvalidPlanError
from atoll.solve import solve
from atoll.solve.effort import Effort
from atoll.solve.plan_request import PlanRequest
from atoll.solve.rent import optimal
from atoll.solve.templates.library import Libraries, libraries
from atoll.solve.templates.template_cache import TemplateCache
from benchmarks.planning.coral import core, extended, many_models, many_regions, scarce
from benchmarks.report import Figure, finish, options

BASELINES = ("homogeneous", "homogeneous-node", "cauchy", "cauchy-node")
STARVED_S = (2.0, 5.0)
EDGES = {"core": 2.6, "extended": 3.8}
"""Where full runs find the edge, which takes minutes: quick ones begin from there."""
EDGE_WORK = 0.15
"""Share of the usual effort in which a plan for all demand must be found: else the pool is too small."""
DEADLINE_S = 600.0
"""A safety net on a busy machine: effort is counted, and CPU seconds are what is measured."""


@dataclass(frozen=True)
class Timed:
    """A plan, the CPU seconds it took, and its gaps in cost and in the share served, in per cent."""

    plan: Plan
    cpu_s: float
    cost_gap: float
    share_gap: float

    @property
    def gap(self) -> float:
        """The larger of the two gaps, in per cent."""
        return max(self.cost_gap, self.share_gap)


def gpu_memory(plan: Plan, catalog: Catalog) -> float:
    """Return the GPU memory of all nodes of a plan, in bytes."""
    return float(
        sum(catalog.node(node.kind).memory_bytes for i in plan.instances for node in i.nodes)
    )


def run(
    name: str, problem: Problem, catalog: Catalog, library: Libraries, gap: float = 1e-3
) -> Timed:
    """Solve, check with the validator, print a line."""
    start = time.process_time()
    solved = optimal.solve(problem, catalog, library, gap=gap, deadline_s=DEADLINE_S)
    cpu = time.process_time() - start
    plan = solved.plan
    check(plan, problem, catalog)
    share = min(plan.served_fraction.values(), default=1.0)
    most = max(share, solved.allocation.fraction_bound)
    timed = Timed(
        plan,
        cpu,
        100.0 * (plan.gap or 0.0),
        100.0 * (1.0 - share / most) if most > 0.0 and share < 1.0 else 0.0,
    )
    print(
        f"  {name:18s} {plan.status:9s} ${plan.usd_per_hour:9.2f}/h  gap {timed.cost_gap:6.3f} %"
        f"  {cpu:7.2f} CPU-s  serves {share:7.2%} (gap {timed.share_gap:.3f} %)",
        flush=True,
    )
    return timed


def edge_margin(problem: Problem, plan: Plan, catalog: Catalog, library: Libraries) -> float:
    """Return the smallest pool, in tenths of the cheapest plan's GPU memory, that serves all demand.

    A larger pool never serves less, so the margin is doubled until all is served and then bisected.
    """
    needed = gpu_memory(plan, catalog)

    def serves_all(tenths: int) -> bool:
        tight = scarce(problem, needed, tenths / 10)
        # Only whether all demand can be met is asked: no time goes into what else could be served.
        tight = tight.replace(settings=tight.settings.model_copy(update={"on_shortage": "fail"}))
        found = optimal.solve(
            tight, catalog, library, gap=0.5, deadline_s=DEADLINE_S, work=EDGE_WORK
        )
        return min(found.plan.served_fraction.values(), default=0.0) >= 1.0

    low, high = 9, 10
    while not serves_all(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if serves_all(middle) else (middle, high)
    return high / 10


def full_program(
    problem: Problem, library: Libraries, seconds: float
) -> tuple[float | None, float | None]:
    """Solve the whole integer program over all templates and regions; (cost, bound) when time is up.

    For machines that are rented whole, on one market, and phases apart in regions that hand nothing over.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    prices = {(o.region, o.node_type): o for o in problem.offers}
    cells = {pair: index for index, pair in enumerate(sorted(prices))}
    low: list[float] = [-np.inf] * len(cells)
    high: list[float] = [float(prices[pair].available) for pair in cells]
    row: list[int] = []
    column: list[int] = []
    value: list[float] = []
    cost: list[float] = []
    ways = 0

    def put(at: int, amount: float) -> None:
        row.append(at)
        column.append(len(cost))
        value.append(amount)

    for service in problem.services:
        whole_share = len(low)
        low.append(1.0)
        high.append(np.inf)
        for region in problem.regions:
            cover = {phase: len(low) + i for i, phase in enumerate((Phase.PREFILL, Phase.DECODE))}
            low += [0.0, 0.0]
            high += [np.inf, np.inf]
            for phase, at in cover.items():
                role = RoleId(service.name, "llm", phase)
                templates = library.roles[str(role)]
                rates = templates.throughput / problem.demand(role)
                for counts, rate in zip(templates.counts, rates, strict=True):
                    used = [(library.kinds[c], int(counts[c])) for c in np.flatnonzero(counts)]
                    if any((region, kind) not in prices for kind, _ in used):
                        continue
                    put(at, min(1.0, float(rate)))
                    for kind, number in used:
                        put(cells[region, kind], float(number))
                    cost.append(sum(prices[region, k].usd_per_hour * n for k, n in used))
            put(whole_share, 1.0)
            for at in cover.values():
                put(at, -1.0)
            cost.append(-1.0)  # marks a share, set to nothing below
            ways += 1
    price = np.array(cost)
    share = price < 0.0
    price[share] = 0.0
    matrix = coo_array((value, (row, column)), shape=(len(low), len(cost))).tocsr()
    found = milp(
        price,
        constraints=LinearConstraint(matrix, np.array(low), np.array(high)),
        integrality=np.where(share, 0, 1),
        bounds=Bounds(np.zeros(len(cost)), np.where(share, 1.0, np.inf)),
        options={"time_limit": seconds, "mip_rel_gap": 1e-6},
    )
    print(
        f"  full program of {len(cost) - ways:,d} columns by HiGHS: ${found.fun}/h,"
        f" bound {found.mip_dual_bound}"
    )
    return found.fun, found.mip_dual_bound


def overrun(problem: Problem, catalog: Catalog) -> tuple[float, float]:
    """Return by how many seconds starved deadlines are overrun, and how much less than baselines is served.

    Nothing is read from caches; the clock counts templates, search, assembly and validation.
    """
    best = 0.0
    for name in BASELINES:
        try:
            plan = solve(problem, PlanRequest(solver=name, catalog=catalog, deadline_s=DEADLINE_S))
        except InvalidPlanError:
            continue
        best = max(best, min(plan.served_fraction.values(), default=0.0))
    late, short = 0.0, 0.0
    for index, (deadline_s, alike) in enumerate(itertools.product(STARVED_S, (True, False)), 1):
        # Promises that differ by a hair: templates of before are of no use, nor, where they are not alike,
        # those of other services with the same model.
        services = tuple(
            s.model_copy(
                update={
                    "ttft_s": s.ttft_s * (1.0 + 1e-6 * index + (0.0 if alike else 1e-4 * place))
                }
            )
            for place, s in enumerate(problem.services)
        )
        fresh = problem.replace(services=services)
        start, cpu = time.perf_counter(), time.process_time()
        plan = solve(
            fresh, PlanRequest(catalog=catalog, deadline_s=deadline_s, effort=Effort(cached=False))
        )
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        served = min(plan.served_fraction.values(), default=0.0)
        print(
            f"  deadline {deadline_s:g} s, {'equal' if alike else 'different'} promises: {seconds:.1f} s"
            f" ({cpu:.1f} CPU-s), serves {served:.1%}, ${plan.usd_per_hour:.2f}/h,"
            f" {'cut short' if plan.cut_short else 'ended by itself'}; the best baseline {best:.1%}",
            flush=True,
        )
        late = max(late, seconds - 1.1 * deadline_s)
        short = max(short, best - served)
    return max(0.0, late), short


def measure_setup(
    name: str, problem: Problem, catalog: Catalog, library: Libraries, *, quick: bool
) -> tuple[list[Figure], float, Timed]:
    """Plan a set-up with plenty, at the edge and with 25 or 75 % more; also returns the edge."""
    margin, bar = (1.25, 0.5) if name == "core" else (1.75, 3.0)
    # The first solve in a process loads and warms the engine; that is not what is measured.
    optimal.solve(problem, catalog, library, deadline_s=DEADLINE_S)
    plenty = run(name, problem, catalog, library)
    figures = [
        Figure(f"{name}_cpu_s", plenty.cpu_s, bar),
        Figure(f"{name}_gap", plenty.gap, 0.1),
        Figure(f"{name}_usd_per_hour", plenty.plan.usd_per_hour),
    ]
    edge = EDGES[name] if quick else edge_margin(problem, plenty.plan, catalog, library)
    needed = gpu_memory(plenty.plan, catalog)
    print(f"  {name}: the edge is at {edge:.1f} times the GPU memory of the cheapest plan")
    prefix = "" if name == "extended" else "core_"
    for kind, factor, limits in (("scarce", margin, (60.0, 0.5)), ("edge", 1.0, (None, None))):
        tight = scarce(problem, needed, edge * factor)
        short = run(f"{name}-{kind}", tight, catalog, library, 5e-3)
        figures += [
            Figure(f"{prefix}{kind}_cpu_s", short.cpu_s, limits[0]),
            Figure(f"{prefix}{kind}_gap", short.gap, limits[1]),
            Figure(f"{prefix}{kind}_usd_per_hour", short.plan.usd_per_hour),
        ]
    return figures, edge, plenty


def measure_below_edge(
    problem: Problem, needed: float, edge: float, catalog: Catalog, library: Libraries, quick: bool
) -> list[Figure]:
    """Plan with pools that cannot serve everything."""
    found = [
        run(f"edge x {part:.2f}", scarce(problem, needed, edge * part), catalog, library, 1e-2)
        for part in ((0.98,) if quick else (0.90, 0.95, 0.99))
    ]
    return [
        Figure("scarce_edge_gap", max(timed.gap for timed in found), 1.0),
        Figure("scarce_edge_cpu_s", max(timed.cpu_s for timed in found), 60.0),
    ]


def measure_large(edge: float, catalog: Catalog, cache: TemplateCache) -> list[Figure]:
    """Plan many models, many regions, and many of both with scarce nodes."""
    figures: list[Figure] = []
    regions30 = many_regions(extended(), 30)
    library = libraries(regions30, catalog, cache=cache)
    wide = run("6 x 30", regions30, catalog, library)
    figures += [Figure("regions30_cpu_s", wide.cpu_s, 2.0), Figure("regions30_gap", wide.gap, 0.1)]
    models24 = many_regions(many_models(extended(), 4), 10, available=512)
    library = libraries(models24, catalog, cache=cache)
    plenty = run("24 x 10", models24, catalog, library)
    tight = scarce(models24, gpu_memory(plenty.plan, catalog), edge * 1.75)
    short = run("24 x 10 scarce", tight, catalog, library, 5e-3)
    figures += [
        Figure("models24_scarce_cpu_s", short.cpu_s, 60.0),
        Figure("models24_scarce_gap", short.gap, 0.5),
    ]
    models48 = many_models(extended(), 8)
    library = libraries(models48, catalog, cache=cache)
    deep = run("48 x 3", models48, catalog, library)
    figures += [Figure("models48_cpu_s", deep.cpu_s, 8.0), Figure("models48_gap", deep.gap, 0.1)]
    late, less = overrun(models48, catalog)
    figures += [
        Figure("deadline_overrun_s", late, 2.0, note="beyond 1.1 x 2 s and 1.1 x 5 s"),
        Figure("deadline_serves_less", 100.0 * less, 0.0, note="points below the best baseline"),
    ]
    return figures


def main() -> None:
    """Solve all set-ups."""
    arguments = options(__doc__ or "")
    catalog, cache = Catalog.default(), TemplateCache()
    figures: list[Figure] = []
    edge = 2.0
    for name, problem in (("core", core()), ("extended", extended())):
        library = libraries(problem, catalog, cache=cache)
        found, edge, plenty = measure_setup(name, problem, catalog, library, quick=arguments.quick)
        figures += found
        if name == "core" and not arguments.quick:
            cost, bound = full_program(problem, library, 120.0)
            figures += [
                Figure("core_full_usd_per_hour", cost),
                Figure(
                    "core_full_bound", bound, note="HiGHS on the whole program, same time limit"
                ),
            ]
        if name == "extended":
            needed = gpu_memory(plenty.plan, catalog)
            figures += measure_below_edge(problem, needed, edge, catalog, library, arguments.quick)
    figures += measure_large(edge, catalog, cache)
    finish(figures)


if __name__ == "__main__":
    main()
