"""Cornserve's cells as a baseline: every service on equal GPUs, in cells of a power of two of them.

For each GPU type a cell of 2^i GPUs is planned to carry the most (the budget problem, solved exactly here),
cells that are no better than smaller ones together are dropped (Algorithm 1), and the rest are mixed greedily
until demand is met (Algorithm 2). A service takes the GPU type that is cheapest for it, on its own machines.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from atoll.catalog.catalog import Catalog
from atoll.core.ids import parse_node_type
from atoll.plan.plan import OfferKey, Plan
from atoll.plan.problem import Problem
from atoll.solve.deadline import Deadline
from atoll.solve.effort import Effort
from atoll.solve.graph.cell_mixes import efficient_cells, greedy_mix
from atoll.solve.graph.executor_program import solve_program
from atoll.solve.graph.graph_build import BuiltProgram, build_program
from atoll.solve.graph.graph_to_plan import plan_of
from atoll.solve.graph.graph_types import (
    GraphAnswer,
    GraphProgram,
    Machines,
    PartFlow,
    PlacedExecutors,
)
from atoll.solve.templates.library import Libraries

LARGEST = 64
"""GPUs of the largest cell, as in the paper."""
_REGION = "cell"


@dataclass(frozen=True)
class _Mix:
    """Cells that carry a service: how many of each, on GPUs of one type, and what machines that takes."""

    service: str
    cells: tuple[tuple[GraphAnswer, int], ...]
    carried: float
    machines: Machines
    count: int

    @property
    def usd_per_hour(self) -> float:
        return self.machines.usd_per_hour * self.count


def plan_cells(
    problem: Problem,
    catalog: Catalog,
    effort: Effort,
    libraries: Libraries | None,
    deadline: Deadline,
    *,
    solver: str,
) -> Plan:
    """Return the plan of cells; "infeasible" where no GPU type carries a service, or there are too few."""
    built = build_program(problem, catalog, effort, libraries, anywhere=True, share=False)
    left = {machines.key: machines.available for machines in built.program.machines}
    chosen: list[_Mix] = []
    for service in problem.services:
        if service.demand_per_s <= 0.0:
            continue
        mixes = [
            mix
            for gpu in sorted({machines.gpu for machines in built.program.machines})
            for mix in _mix_on(built.program, service.name, gpu, effort, deadline, left)
        ]
        if not mixes:
            why = f"{service.name}: no type of GPU carries it in cells, or there are too few"
            nothing = GraphAnswer("infeasible", (), {}, (), {}, {}, 0.0, 0.0, 0.0, 0.0)
            return plan_of(
                problem, catalog, built, nothing, libraries, effort, solver=solver, reasons=(why,)
            )
        best = min(mixes, key=lambda mix: (mix.usd_per_hour, mix.machines.key))
        left[best.machines.key] -= best.count
        chosen.append(best)
    answer = _join(built, chosen)
    return plan_of(problem, catalog, built, answer, libraries, effort, solver=solver, proven=False)


def _mix_on(
    program: GraphProgram,
    service: str,
    gpu: str,
    effort: Effort,
    deadline: Deadline,
    left: Mapping[OfferKey, int],
) -> Sequence[_Mix]:
    """Return the mix of a service on one type of GPU, for each offer that has enough; none where it fails."""
    offers = [m for m in program.machines if m.gpu == gpu and left[m.key] > 0]
    if not offers:
        return ()
    kinds = {f"{gpu}:{size}" for offer in offers for size in offer.sizes}
    max_gpus = max(left[m.key] * m.gpus for m in offers)
    sizes = [1 << i for i in range(LARGEST.bit_length()) if 1 << i <= min(LARGEST, max_gpus)]
    found = {
        size: _fill_cell(program, service, gpu, size, kinds, effort, deadline) for size in sizes
    }
    rates = {size: answer.objective for size, answer in found.items() if answer is not None}
    cells = efficient_cells(lambda gpus: rates.get(gpus, 0.0), sizes[-1])
    if not cells:
        return ()
    mix = greedy_mix(cells, 1.0)
    parts = tuple(
        (answer, number)
        for gpus, number in sorted(mix.cells.items())
        if (answer := found[gpus]) is not None
    )
    carried = sum(answer.objective * number for answer, number in parts)
    mixes = []
    for offer in offers:
        slices = [
            parse_node_type(kind).gpu_count * n * number
            for answer, number in parts
            for placed in answer.placed
            for _, kind, n in placed.slices
        ]
        count = -(-sum(slices) // offer.gpus)
        fits = all(
            parse_node_type(kind).gpu_count in offer.sizes
            for answer, _ in parts
            for placed in answer.placed
            for _, kind, _ in placed.slices
        )
        if fits and count <= left[offer.key]:
            mixes.append(_Mix(service, parts, carried, offer, count))
    return mixes


def _fill_cell(
    program: GraphProgram,
    service: str,
    gpu: str,
    gpus: int,
    kinds: set[str],
    effort: Effort,
    deadline: Deadline,
) -> GraphAnswer | None:
    """Return the most that a cell of equal GPUs carries of a service, None where it carries nothing."""
    sizes = tuple(sorted(n for kind in kinds if gpus % (n := parse_node_type(kind).gpu_count) == 0))
    if not sizes:
        return None
    cell = Machines((_REGION, f"{gpu}:{gpus}", "owned"), gpu, gpus, 1, 1.0, sizes)
    asked = replace(
        program,
        machines=(cell,),
        classes=tuple(c for c in program.classes if c.service == service),
        standing=(),
        goal="most",
        budget_usd_per_hour=None,
        spot_share=None,
        max_machines=None,
    )
    answer = solve_program(asked, gap=effort.gap, work=effort.work, deadline_s=deadline.share(0.5))
    return None if answer.status == "infeasible" or answer.objective <= 0.0 else answer


def _join(built: BuiltProgram, mixes: Sequence[_Mix]) -> GraphAnswer:
    """Return cells of all services as one answer: executors on machines, and flows scaled to demand."""
    placed: list[PlacedExecutors] = []
    flows: defaultdict[tuple[str, str, str, int, str], float] = defaultdict(float)
    routes: defaultdict[tuple[str, str, int, str], float] = defaultdict(float)
    split: defaultdict[tuple[str, str, int, str, int, str], float] = defaultdict(float)
    for mix in mixes:
        key, region = mix.machines.key, mix.machines.region
        counts: Counter[int] = Counter()
        slices: defaultdict[int, Counter[str]] = defaultdict(Counter)
        for answer, number in mix.cells:
            # Every cell gets what it carries of the whole; all together carry at least the demand.
            share = number / mix.carried
            for one in answer.placed:
                counts[one.executor] += one.count * number
                for _, kind, n in one.slices:
                    slices[one.executor][kind] += n * number
            for flow in answer.flows:
                at = (flow.service, flow.klass, flow.part, flow.executor, region)
                flows[at] += flow.rate_per_s * share
            for (service, klass, route, _), rate in answer.routes.items():
                routes[service, klass, route, region] += rate * share
            for (service, klass, route, part, executor, _), rate in answer.split.items():
                split[service, klass, route, part, executor, region] += rate * share
        placed += [
            PlacedExecutors(
                executor,
                region,
                count,
                0,
                tuple((key, kind, n) for kind, n in sorted(slices[executor].items())),
            )
            for executor, count in sorted(counts.items())
        ]
    usd = sum(mix.usd_per_hour for mix in mixes)
    machines: Counter[OfferKey] = Counter()
    for mix in mixes:
        machines[mix.machines.key] += mix.count
    return GraphAnswer(
        status="feasible",
        placed=tuple(placed),
        machines=dict(machines),
        flows=tuple(PartFlow(*at, rate) for at, rate in sorted(flows.items())),
        routes=dict(routes),
        split=dict(split),
        served={demand.key: 1.0 for demand in built.program.classes},
        usd_per_hour=usd,
        init_usd=0.0,
        objective=usd,
        bound=0.0,
    )
