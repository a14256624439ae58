"""Fixed clusters by latency: OpenFabric's scheduler (`cp`), its baseline (`memp`), and our own search.

`cp` decides how many GPUs of each type every model has and over how many each layer is split, by CP-SAT over
simulated latencies. Our own search for the objective "latency" answers the same question over more: replicas
may be pipelines, and it starts from the best without.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from atoll.catalog.catalog import Catalog
from atoll.core.errors import UsageError
from atoll.core.ids import parse_node_type
from atoll.core.units import format_share
from atoll.plan.cluster import ClusterNode
from atoll.plan.cluster_profiles import cluster_of
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem, Service
from atoll.solve.assembly import infeasible
from atoll.solve.deadline import Deadline
from atoll.solve.effort import Answered
from atoll.solve.place.cp.cp_masters import CpMaster, merge_fronts
from atoll.solve.place.cp.latency_table import SimulatedTable
from atoll.solve.place.cp.lazy import LazySolution, solve_lazily
from atoll.solve.place.cp.replica_shapes import (
    Replicas,
    ReplicaShape,
    describe_replicas,
    plan_of_replicas,
    shapes_of,
)
from atoll.solve.place.machine_cuts import SiteType
from atoll.solve.place.place_service import CP, MEMP, FlowEffort

_LOOKS = 600
"""Simulations that fill the table, with the usual effort."""
_STAGES = 4
"""Slices that a replica of our own search may be cut over."""
_TABLE_TOLERANCE = 0.01
"""Tables are samples: what is nearer than this share counts as equal."""

Handed = dict[str, Counter[SiteType]]
"""Machines of each type at each site, by service."""


def solve_cp(problem: Problem, catalog: Catalog, effort: FlowEffort, deadline: Deadline) -> Plan:
    """Return the plan with the least simulated latency of all numbers of replicas, by CP-SAT."""
    with CpMaster(problem.settings.seed, work=effort.work) as master:
        table = _table(CP, problem, catalog, effort, max_stages=1)
        if isinstance(table, Plan):
            return table
        found = solve_lazily(
            table,
            table.stock,
            master,
            scout=merge_fronts,
            max_looks=_looks(effort),
            gap=max(effort.gap, _TABLE_TOLERANCE),
            is_over=deadline.is_over,
            tell=_teller(effort),
        )
    return _plan(CP, problem, catalog, table, found, effort)


def solve_memp(problem: Problem, catalog: Catalog, effort: FlowEffort) -> Plan:
    """Return the plan of OpenFabric's baseline: GPUs in proportion to arrival rate times model size."""
    chosen = memory_share(problem, catalog, promise=effort.promise)
    empty = [name for name, replicas in chosen.items() if not replicas]
    if empty:
        why = f"{empty[0]}: the machines that are its share hold no replica that keeps its promises"
        return infeasible(problem, solver=MEMP, reasons=(why,))
    return plan_of_replicas(
        problem,
        catalog,
        chosen,
        solver=MEMP,
        goal="fair" if len(problem.services) > 1 else "sustained",
    )


def search_latency(
    name: str, problem: Problem, catalog: Catalog, effort: FlowEffort, deadline: Deadline
) -> Plan:
    """Return the plan with the least simulated latency found, of replicas that may be pipelines.

    Replicas without stages come first, so that what is found is never worse than the best of those.
    """
    table = _table(name, problem, catalog, effort, max_stages=_STAGES)
    if isinstance(table, Plan):
        return table
    found: LazySolution | None = None
    # The looks of the first round stay in the table, so the second starts from what is known.
    for most in (1, _STAGES):
        # Without stages there may be no replica of a model; then only all of them count.
        solved = solve_lazily(
            table,
            table.stock,
            merge_fronts,
            max_looks=_looks(effort),
            gap=max(effort.gap, _TABLE_TOLERANCE),
            allowed=table.with_stages(most),
            is_over=deadline.is_over,
            tell=_teller(effort),
        )
        found = solved or found
    return _plan(name, problem, catalog, table, found, effort)


def _table(
    name: str, problem: Problem, catalog: Catalog, effort: FlowEffort, *, max_stages: int
) -> SimulatedTable | Plan:
    """The table of a problem, or the plan that says why there is none."""
    if effort.latency is None:
        raise UsageError(
            f"{name} goes by simulated latency",
            hint="plan with `atoll plan` or `atoll.prove.planning.plan`, or give the effort a `latency`",
            field="solver",
        )
    table = SimulatedTable(problem, catalog, effort.latency, max_stages, effort.promise)
    lacking = tuple(
        f"{service.name}: no replica on GPUs of one machine keeps its promises"
        for service, own in zip(problem.services, table.entries, strict=True)
        if not own
    )
    return infeasible(problem, solver=name, reasons=lacking) if lacking else table


def _looks(effort: FlowEffort) -> int:
    return max(1, round(_LOOKS * effort.work))


def _teller(effort: FlowEffort) -> Callable[[float, float, int], None]:
    def tell(cost: float, bound: float, looks: int) -> None:
        close = format_share(max(0.0, 1.0 - bound / cost)) if cost > 0 else "0 %"
        effort.say(f"mean latency {cost:.2f} s after {looks} looks at the table, gap {close}")

    return tell


def _plan(
    name: str,
    problem: Problem,
    catalog: Catalog,
    table: SimulatedTable,
    found: LazySolution | None,
    effort: FlowEffort,
) -> Plan:
    filled = len(table.answered)
    effort.done.update({"simulated entries": filled, "simulated shapes": table.alone})
    if found is None:
        why = f"no replicas of all {len(problem.services)} models fit the cluster together"
        return infeasible(problem, solver=name, reasons=(why,))
    chosen = {
        service.name: table.replicas(s, found.chosen[s])
        for s, service in enumerate(problem.services)
    }
    seen = {
        service.name: table.answered[s, found.chosen[s]]
        for s, service in enumerate(problem.services)
    }
    told = (
        f"mean latency {found.cost:.2f} s over {table.horizon_s:.0f} s of arrivals, at most "
        f"{format_share(found.gap)} above the least of {table.size:,} entries: {filled:,} simulated, and "
        f"{table.alone:,} loads of single shapes"
    )
    return plan_of_replicas(
        problem, catalog, chosen, solver=name, notes=(told, *_notes(chosen, seen))
    )


def _notes(chosen: Mapping[str, Replicas], seen: Mapping[str, Answered]) -> tuple[str, ...]:
    """Return the replicas of every service, and how soon it answers, in words."""
    return tuple(
        f"{name}: {describe_replicas(replicas)}; mean {seen[name].mean_s:.2f} s, "
        f"p50 {seen[name].p50_s:.2f} s, p95 {seen[name].p95_s:.2f} s"
        for name, replicas in chosen.items()
    )


def hand_out(problem: Problem, catalog: Catalog) -> Handed:
    """Return how many machines every service gets; one at least, as long as there are any."""
    # The fastest machines are handed out first, to the service with the largest demand.
    left = sorted(cluster_of(problem).nodes, key=lambda machine: _slowness(catalog, machine))
    total = sum(_gpus(machine) for machine in left)
    demand = {s.name: _demand(catalog, s) for s in problem.services}
    whole = sum(demand.values()) or 1.0
    handed: Handed = {}
    order = sorted(problem.services, key=lambda s: (-demand[s.name], s.name))
    for place, service in enumerate(order):
        own: Counter[SiteType] = Counter()
        target, held = total * demand[service.name] / whole, 0
        after = len(order) - place - 1
        while left:
            more = held + _gpus(left[0])
            nearer = abs(more - target) < abs(held - target)
            # Every later service keeps a machine; the last one takes all that is left.
            if own and after and (not nearer or len(left) <= after):
                break
            machine = left.pop(0)
            own[machine.region, machine.node_type] += 1
            held = more
        handed[service.name] = own
    return {service.name: handed[service.name] for service in problem.services}


def memory_share(problem: Problem, catalog: Catalog, *, promise: bool) -> dict[str, Replicas]:
    """Return GPUs in proportion to arrival rate times model size: OpenFabric's memP, which it compares with.

    Machines are handed out whole (`hand_out`). On its machines of a type a model runs the replicas that carry
    most per GPU; the paper does not say so, and it can only help the rule.
    """
    handed = hand_out(problem, catalog)
    chosen: dict[str, Replicas] = {}
    for service in problem.services:
        shapes = shapes_of(problem, catalog, service, promise=promise)
        replicas: list[tuple[ReplicaShape, int]] = []
        for site, machines in sorted(handed[service.name].items()):
            fitting = [shape for shape in shapes if shape.site == site]
            if fitting:
                # Of equal throughput per GPU the larger replica: there are fewer of them to run.
                best = max(fitting, key=lambda shape: (shape.per_s / shape.gpus, shape.gpus))
                count = machines * (parse_node_type(site[1]).gpu_count // best.gpus)
                replicas.append((best, count))
        chosen[service.name] = tuple(replicas)
    return chosen


def _demand(catalog: Catalog, service: Service) -> float:
    return service.rate_per_s * catalog.model(service.model).llm.weight_bytes


def _gpus(machine: ClusterNode) -> int:
    return parse_node_type(machine.node_type).gpu_count


def _slowness(catalog: Catalog, machine: ClusterNode) -> tuple[float, float, str, str]:
    gpu = catalog.node(machine.node_type).gpu
    return (-gpu.fp16_tflops, -gpu.bandwidth_bytes_per_s, machine.region, machine.name)
