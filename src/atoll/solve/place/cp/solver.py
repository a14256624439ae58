"""Fixed clusters by latency: OpenFabric's scheduler (`cp`), its baseline (`memp`), and our own search.

`cp` decides how many GPUs of each type every model has and over how many each layer is split, by CP-SAT over
simulated latencies. Our own search for the objective "latency" answers the same question over more: replicas
may be pipelines, and it starts from the best without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from atoll.catalog.catalog import Catalog
from atoll.core.errors import UsageError
from atoll.core.units import format_share
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.solve.assembly import infeasible
from atoll.solve.effort import Answered
from atoll.solve.place.cp.build import Replicas, describe_replicas, plan_of_replicas
from atoll.solve.place.cp.lazy import LazySolution, solve_lazily
from atoll.solve.place.cp.masters import CpMaster, merge_fronts
from atoll.solve.place.cp.memory_share import memory_share
from atoll.solve.place.cp.table import SimulatedTable
from atoll.solve.place.deadline import Deadline
from atoll.solve.place.service import CP, MEMP, FlowEffort

_LOOKS = 600
"""Simulations that fill the table, with the usual effort."""
_STAGES = 4
"""Slices that a replica of our own search may be cut over."""
_CLOSE = 0.01
"""Tables are samples: what is nearer than this share counts as equal."""


def solve_cp(problem: Problem, catalog: Catalog, effort: FlowEffort, deadline: Deadline) -> Plan:
    """Return the plan with the least simulated latency of all numbers of replicas, by CP-SAT."""
    with CpMaster(problem.settings.seed, work=effort.work) as master:
        table = _table(CP, problem, catalog, effort, most_stages=1)
        if isinstance(table, Plan):
            return table
        found = solve_lazily(
            table,
            table.stock,
            master,
            scout=merge_fronts,
            most_looks=_looks(effort),
            gap=max(effort.gap, _CLOSE),
            is_over=deadline.is_over,
            tell=_teller(effort),
        )
    return _plan(CP, problem, catalog, table, found)


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
    table = _table(name, problem, catalog, effort, most_stages=_STAGES)
    if isinstance(table, Plan):
        return table
    found: LazySolution | None = None
    for most in (1, _STAGES):
        # Without stages there may be no replica of a model; then only all of them count.
        solved = solve_lazily(
            table,
            table.stock,
            merge_fronts,
            most_looks=_looks(effort),
            gap=max(effort.gap, _CLOSE),
            allowed=table.with_stages(most),
            is_over=deadline.is_over,
            tell=_teller(effort),
        )
        found = solved or found
    return _plan(name, problem, catalog, table, found)


def _table(
    name: str, problem: Problem, catalog: Catalog, effort: FlowEffort, *, most_stages: int
) -> SimulatedTable | Plan:
    """The table of a problem, or the plan that says why there is none."""
    if effort.latency is None:
        raise UsageError(
            f"{name} goes by simulated latency",
            hint="plan with `atoll plan` or `atoll.prove.plan.plan`, or give the effort a `latency`",
            field="solver",
        )
    table = SimulatedTable(problem, catalog, effort.latency, most_stages, effort.promise)
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
) -> Plan:
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
    filled = len(table.answered)
    told = (
        f"mean latency {found.cost:.2f} s over {table.horizon_s:.0f} s of arrivals, at most "
        f"{format_share(found.gap)} above the least of {table.size:,} entries: {filled:,} simulated, and "
        f"{table.alone:,} loads of single shapes"
    )
    return plan_of_replicas(
        problem, catalog, chosen, solver=name, notes=(told, *_notes(chosen, seen))
    )


def _notes(chosen: Mapping[str, Replicas], seen: Mapping[str, Answered]) -> tuple[str, ...]:
    """What every service has, and how soon it answers."""
    return tuple(
        f"{name}: {describe_replicas(replicas)}; mean {seen[name].mean_s:.2f} s, "
        f"p50 {seen[name].p50_s:.2f} s, p95 {seen[name].p95_s:.2f} s"
        for name, replicas in chosen.items()
    )
