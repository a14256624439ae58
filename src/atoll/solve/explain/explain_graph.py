"""What an explanation says of any-to-any models, beside what every explanation says.

What the best plan costs under each way to deploy that has a name, how busy each part keeps its executors, and
which parts cannot run on which kinds of nodes, and why.

A plan that keeps its promises leaves its executors some time, which simulation found that they need. Planning
again leaves the same: executors of a kind that the plan has as much as there, others of the service as much
as its executors on average, or more, until planning again finds nothing cheaper. The search that made the
plan simulated what came near it, and what it found of the others is not part of a plan. So nothing looks
cheaper only because it was not simulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from atoll.catalog.catalog import Catalog
from atoll.core.errors import AtollError
from atoll.core.ids import parse_node_type
from atoll.core.units import format_bytes, format_duration
from atoll.perf.components.class_loads import class_parts, component_of
from atoll.perf.components.component_shapes import component_weight_bytes
from atoll.perf.components.executor import ExecutorWork
from atoll.plan.executor_use import executor_use
from atoll.plan.executors import work_of
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem, Service
from atoll.solve.comparison import Compared, compare_solvers
from atoll.solve.effort import Effort
from atoll.solve.explain.plan_explanation import (
    FITS,
    DeployedWay,
    PartFit,
)
from atoll.solve.explain.planning_again import Planner, gains
from atoll.solve.explain.solvers import PlanSolver
from atoll.solve.family import baselines
from atoll.solve.graph.room import Slowdown, slow_others, slowdown_of
from atoll.solve.plan_request import PlanRequest

_WAYS = 0.4
"""Share of the time that the ways to deploy with a name may take, all together."""
_SIZING = 0.1
"""Share of the time that finding that out may take each time."""


def leave_room(
    effort: Effort, plan: Plan, problem: Problem, asked: Problem, solver: PlanSolver, seconds: float
) -> Effort:
    """Return the effort with executors as slow as a plan that keeps its promises leaves them.

    `asked` is the problem that is planned again, within `seconds` each time.
    """

    def is_beaten(slow: Slowdown) -> bool:
        again = solver(asked, replace(effort, slowdown=slow), seconds * _SIZING).plan
        return gains(plan, again, asked)

    known = slowdown_of(plan, problem, solver.catalog)
    return replace(effort, slowdown=slow_others(known, is_beaten))


def ask_ways(planner: Planner, base: Plan, left_out: list[str]) -> tuple[DeployedWay, ...]:
    """Return what the best plan costs under each way to deploy that has a name."""
    ways: tuple[DeployedWay, ...] = ()
    seconds = _WAYS * planner.seconds_left
    if seconds > 0:
        if planner.progress is not None:
            planner.progress(planner.plans, "ways to deploy")
        request = PlanRequest(effort=planner.effort, deadline_s=seconds, catalog=planner.catalog)
        compared = compare_solvers(base, planner.problem, request)
        ways = tuple(_way(one, estimated=bool(base.promises)) for one in compared)
    names = [name for name in baselines(planner.problem) if name != base.solver]
    missing = [name for name in names if name not in {way.name for way in ways}]
    if missing:
        left_out.append(f"what {', '.join(missing)} would cost")
    return ways


def _way(compared: Compared, *, estimated: bool) -> DeployedWay:
    return DeployedWay(
        name=compared.solver,
        status=compared.status,
        usd_per_hour=compared.usd_per_hour,
        nodes=compared.nodes,
        served=compared.served,
        ratio=compared.ratio,
        broken=compared.broken,
        estimated=estimated,
    )


def executor_facts(
    plan: Plan, problem: Problem, catalog: Catalog, node_types: Sequence[str] | None
) -> dict[str, object]:
    """Return the parts of an explanation that any-to-any models have: how busy parts are, and what fits.

    Where `node_types` are asked about, only what fits on those.
    """
    fits = part_fits(problem, catalog)
    if node_types is None:
        return {"parts": executor_use(plan, problem, catalog).parts(), "fits": tuple(fits)}
    kinds = {kind for o in problem.offers if o.node_type in node_types for kind in o.kinds}
    return {"fits": tuple(fit for fit in fits if fit.kind in kinds)}


# What fits where


def part_fits(problem: Problem, catalog: Catalog) -> Iterator[PartFit]:
    """Yield whether each part of each any-to-any service runs alone on each kind of node, and if not, why."""
    machines: dict[str, str] = {}
    for offer in problem.offers:
        for kind in offer.kinds:
            machines.setdefault(kind, offer.node_type)
    for service in problem.graph_services:
        model = catalog.model(service.model)
        needed = {klass.name: class_parts(model, klass) for klass in service.classes}
        for part in model.graph.parts():
            classes = [name for name, parts in needed.items() if part in parts]
            for kind, machine in sorted(machines.items()) if classes else ():
                yield _fit(problem, catalog, service, part, kind, machine, classes)


def _fit(
    problem: Problem,
    catalog: Catalog,
    service: Service,
    part: str,
    kind: str,
    machine: str,
    classes: Sequence[str],
) -> PartFit:
    """Say whether a part runs on a kind of node, for some classes at least, and if not, why."""

    def found(reason: str, detail: str = "", *, carries: bool = False) -> PartFit:
        return PartFit(
            service=service.name,
            part=part,
            kind=kind,
            carries=carries,
            reason=reason,
            detail=detail,
        )

    if not service.allows(kind):
        return found("may not stand there (`only`, `avoid`)")
    gpus = parse_node_type(kind).gpu_count
    try:
        work = work_of(problem, catalog, service, (part,), kind, machine=machine, tp=gpus)
    except AtollError as error:
        return found("does not split over so many GPUs", error.message)
    if work is None:
        weights = component_weight_bytes(catalog.model(service.model), component_of(part))
        memory = catalog.node(kind).gpu.memory_bytes
        each = f"{_size(weights / gpus)} of weights on a GPU of {_size(memory)}"
        return found(f"memory: {_size(weights)} of weights", each)
    late = [name for name in classes if (name, part) not in work.seconds]
    if not late:
        return found(FITS, carries=True)
    some = len(late) < len(classes)
    named = ", ".join(f"'{name}'" for name in late)
    return found(f"promise of {named}", _lateness(work, part, late[0]), carries=some)


def _lateness(work: ExecutorWork, part: str, klass: str) -> str:
    alone = format_duration(float(f"{work.latency_s.get((klass, part), 0.0):.3g}"))
    return f"{work.limits.get((klass, part), 'too slow')} ({alone} alone)"


def _size(size_bytes: float) -> str:
    return format_bytes(float(f"{size_bytes:.3g}"))
