"""The default solver: exact templates, then the cheapest allocation of them with a proven bound."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from atoll.catalog.catalog import Catalog
from atoll.core.ids import parse_node_type
from atoll.plan.plan import Instance, Plan
from atoll.plan.problem import Problem
from atoll.solve.assembly import NewInstance, infeasible, keep, plan_from_layouts
from atoll.solve.rent import types
from atoll.solve.rent.allocation import allocate
from atoll.solve.rent.markets import Markets
from atoll.solve.templates.library import Libraries

SOLVER = "optimal"
DEADLINE_S = 30.0
GAP = 1e-3
_TIE = 1e-4

Log = Callable[[float, float, float], None]


@dataclass(frozen=True)
class Solved:
    """A plan with the allocation behind it, whose duals and statistics explain it."""

    plan: Plan
    allocation: types.Allocation


def solve(
    problem: Problem,
    catalog: Catalog,
    libraries: Libraries,
    *,
    deadline_s: float = DEADLINE_S,
    gap: float = GAP,
    log: Log | None = None,
) -> Solved:
    """Return the cheapest plan, proven to `gap` or as far as `deadline_s` seconds allow."""
    allocation = _allocate(problem, catalog, libraries, deadline_s, gap, log)
    return Solved(_plan(problem, catalog, libraries, allocation), allocation)


def _allocate(
    problem: Problem,
    catalog: Catalog,
    libraries: Libraries,
    deadline_s: float,
    gap: float,
    log: Log | None,
) -> types.Allocation:
    roles = [str(role) for role in problem.roles]
    running = running_columns(problem, catalog, roles, libraries.node_types)
    allocation = allocate(
        role_demands(problem, libraries),
        supply_of(problem, libraries.node_types),
        limits_of(problem),
        # A hair above nothing, so that of equal plans the one that starts less is taken.
        init_penalty=max(problem.settings.init_penalty, _TIE if running else 0.0),
        running=[column for column, _ in running],
        deadline_s=deadline_s,
        gap=gap,
        on_shortage=problem.settings.on_shortage,
        seed=problem.settings.seed,
        log=log,
    )
    if running and problem.settings.init_penalty < _TIE:
        # The hair is in the bound, too: no plan can have paid more of it than all its cost.
        allocation = replace(allocation, bound=allocation.bound / (1.0 + _TIE))
    return allocation


def role_demands(problem: Problem, libraries: Libraries) -> list[types.RoleDemand]:
    """Return what each role needs and the templates it may use."""
    demands = []
    for role in problem.roles:
        library = libraries.roles[str(role)]
        service = problem.service_of(role)
        allowed = np.array([service.allows(node_type) for node_type in libraries.node_types])
        demands.append(
            types.RoleDemand(
                name=str(role),
                counts=library.counts,
                throughput=library.throughput,
                demand=problem.demand(role),
                allowed=allowed,
                weight=service.priority,
            )
        )
    return demands


def supply_of(problem: Problem, node_types: tuple[str, ...]) -> types.Supply:
    """Return the offers of a problem as arrays, in the problem's order."""
    offers = problem.offers
    regions = problem.regions
    return types.Supply(
        regions=regions,
        node_types=node_types,
        gpus=np.array([parse_node_type(n).gpu_count for n in node_types], np.int64),
        region=np.array([regions.index(o.region) for o in offers], np.int64),
        type=np.array([node_types.index(o.node_type) for o in offers], np.int64),
        market=tuple(o.market for o in offers),
        usd=np.array([o.usd_per_hour for o in offers]),
        available=np.array([o.available for o in offers], np.int64),
    )


def limits_of(problem: Problem) -> types.AllocationLimits:
    """Return the limits of a problem."""
    limits = problem.limits
    return types.AllocationLimits(
        budget=limits.budget_usd_per_hour,
        spot_share=limits.spot_share,
        max_nodes=limits.max_nodes,
        spread=limits.spread,
    )


def running_columns(
    problem: Problem, catalog: Catalog, roles: list[str], node_types: tuple[str, ...]
) -> list[tuple[types.RunningColumn, list[Instance]]]:
    """Return what runs now, equal instances together, with their throughput under today's promise."""
    groups: dict[tuple[int, int, tuple[int, ...]], list[Instance]] = defaultdict(list)
    for instance in problem.running:
        counts = Counter(node.node_type for node in instance.nodes)
        if instance.role not in roles or not set(counts) <= set(node_types):
            continue
        vector = tuple(counts[node_type] for node_type in node_types)
        where = problem.regions.index(instance.region) if instance.region in problem.regions else -1
        if where >= 0 and _still_offered(problem, instance):
            groups[roles.index(instance.role), where, vector].append(instance)
    columns = []
    for (role, region, vector), group in sorted(groups.items()):
        rates = [keep(problem, catalog, instance).throughput_per_s for instance in group]
        column = types.RunningColumn(
            role, region, np.array(vector, np.int8), len(group), throughput=min(rates)
        )
        columns.append((column, group))
    return columns


def _still_offered(problem: Problem, instance: Instance) -> bool:
    return all(
        problem.offer(instance.region, node.node_type, node.market) is not None
        for node in instance.nodes
    )


def _plan(
    problem: Problem, catalog: Catalog, libraries: Libraries, allocation: types.Allocation
) -> Plan:
    times = {"seconds": allocation.seconds, "cpu_seconds": allocation.cpu_seconds}
    if allocation.status == "infeasible":
        return infeasible(problem, solver=SOLVER, reasons=allocation.binding, **times)
    roles = [str(role) for role in problem.roles]
    markets = Markets(problem.offers, allocation.offers_used)
    kept: list[Instance] = []
    waiting = {
        (column.role, column.region, column.counts.tobytes()): list(group)
        for column, group in running_columns(problem, catalog, roles, libraries.node_types)
    }
    for chosen in allocation.instances:
        group = waiting.get((chosen.role, chosen.region, chosen.counts.tobytes()), [])
        for _ in range(chosen.kept):
            kept.append(group.pop(0))
            markets.take_nodes(kept[-1])
    started: list[NewInstance] = []
    for chosen in allocation.instances:
        region = problem.regions[chosen.region]
        for _ in range(chosen.number - chosen.kept):
            library = libraries.roles[roles[chosen.role]]
            layout = library.layout_of(chosen.counts)
            nodes = Counter(kind for stage in layout.stages for kind in stage.nodes)
            started.append(
                NewInstance(roles[chosen.role], region, layout, markets.take(region, nodes))
            )
    return plan_from_layouts(
        problem,
        catalog,
        started,
        status=allocation.status,
        solver=SOLVER,
        kept=kept,
        bound=allocation.bound,
        reasons=allocation.binding,
        **times,
    )
