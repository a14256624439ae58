"""The simplest placement that serves all demand: no machine, hop or slice more than is worth it.

Machines of a cluster are paid for, so nothing but their operator's time says how many to use. Replicas of
exact templates (`replicas`) serve service s at z_s times its demand. A queue for c servers at load 1 / z
makes requests take about f(z) = 1 + z^(2 - sqrt(2 c + 2)) / (c (z - 1)) times as long as without any
(Sakasegawa's approximation); c = 4 stands for engines that work on several requests at a time. An integer
program finds the replicas of least

    sum_s f(z_s) + simplicity * (machines in use + hops between nodes + slices of machines that are cut)

with z_s >= 1 for every service, f being its tangents at a few loads. A machine, hop or slice more is used
only where requests take less by the share `simplicity` of their time alone: few machines where there is
little to do, and slack spread over more where they would be full.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from atoll.catalog.catalog import Catalog
from atoll.core.ids import parse_node_type
from atoll.core.units import format_share, pluralize
from atoll.plan.cluster_profiles import cluster_of
from atoll.plan.plan import Goal, Plan
from atoll.plan.problem import Problem
from atoll.solve.array_types import Floats
from atoll.solve.deadline import Deadline
from atoll.solve.place.machine_cuts import cut_for
from atoll.solve.place.place_service import SEARCH, reasons
from atoll.solve.place.place_to_plan import plan_of
from atoll.solve.place.replicas import (
    Chosen,
    ReplicaProgram,
    ReplicaTemplate,
    Taken,
    TemplateShelf,
    list_columns,
    list_shelves,
    maximise,
    set_up,
)
from atoll.solve.simplicity import slowdown, tangents


def place_simply(
    problem: Problem,
    catalog: Catalog,
    deadline: Deadline,
    *,
    partial: bool,
    share: float = 1.0,
    done: Counter[str] | None = None,
) -> Plan | None:
    """Return the simplest placement that serves a share of the demand in time, None where there is none.

    `done` counts integer programs and their nodes.
    """
    asked = problem.scale_demand(share)
    demands = [service.demand_per_s for service in asked.services]
    if problem.settings.simplicity <= 0.0 or min(demands) <= 0.0:
        return None
    shelves = list_shelves(asked, catalog)
    columns = list_columns(shelves)
    solved = choose_simple(asked, shelves, columns, deadline, done)
    if solved is None:
        return None
    chosen, taken = solved
    placed = set_up(
        problem, catalog, cut_for(problem, taken), shelves, chosen, taken, partial=partial
    )
    goal: Goal = "fair" if len(problem.services) > 1 else "sustained"
    plan = plan_of(problem, catalog, placed, goal=goal, bound=None, solver=SEARCH)
    if min(plan.served_fraction.values(), default=0.0) < share * (1.0 - 1e-9):
        # Links that slices share carry less than the program knows.
        return None
    return plan.model_copy(
        update={
            "reasons": tuple(reasons(plan, problem, catalog)),
            "notes": (_describe(plan, problem),),
        }
    )


def _describe(plan: Plan, problem: Problem) -> str:
    used = len({node.host for instance in plan.instances for node in instance.nodes})
    machines = pluralize(len(cluster_of(problem).nodes), "machine")
    share = format_share(problem.settings.simplicity)
    return (
        f"{used} of {machines} keep all promises; one more, a hop or a slice would shorten requests by less "
        f"than {share} of their time (settings.simplicity; --objective sustained uses what carries the most)"
    )


def choose_simple(
    problem: Problem,
    shelves: Sequence[TemplateShelf],
    columns: Sequence[ReplicaTemplate],
    deadline: Deadline,
    done: Counter[str] | None = None,
) -> tuple[Chosen, Taken] | None:
    """Return the replicas of the least penalised time, None where they cannot serve all demand."""
    if {column.service for column in columns} != set(range(len(problem.services))):
        return None
    program = ReplicaProgram(problem, shelves, columns)
    rows, simplicity = list(program.rows), problem.settings.simplicity
    keys = sorted({(m.region, m.node_type) for m in cluster_of(problem).nodes})
    n, services = len(columns), len(problem.services)
    # After the program's own: machines in use by site and type, then z and its slowdown by service.
    machines = program.width
    served = machines + len(keys)
    slow = served + services
    cost = np.zeros(slow + services)
    for i, column in enumerate(columns):
        cost[i] = simplicity * (sum(column.counts) - 1)
    for at, own in enumerate(keys):
        gpus = parse_node_type(own[1]).gpu_count
        cost[machines + at] = simplicity
        row = {machines + at: -float(gpus)}
        for k, (key, size, _) in enumerate(program.slices):
            if key == own:
                row[n + k] = float(size)
                cost[n + k] = simplicity if size < gpus else 0.0
        rows.append((row, -np.inf, 0.0))
    for s, asked in enumerate(program.demand):
        row = {i: c.tokens_per_s / asked for i, c in enumerate(columns) if c.service == s}
        rows.append((row | {served + s: -1.0}, 0.0, np.inf))
        rows += [({slow + s: 1.0, served + s: -slope}, base, np.inf) for base, slope in tangents()]
        cost[slow + s] = 1.0
    least, whole = np.zeros(len(cost)), np.ones(len(cost))
    # The share of its demand that every service gets.
    least[program.width - 1] = 1.0
    whole[program.width - 1] = 0.0
    whole[served:] = 0.0
    found = maximise(-cost, rows, least, whole, deadline, done)
    return None if found is None else program.read(found)


def penalised_time(
    problem: Problem, shelves: Sequence[TemplateShelf], chosen: Chosen, taken: Taken
) -> float:
    """Return what `choose_simple` makes least, of some replicas on some slices."""
    carried: Floats = np.zeros(len(problem.services))
    pieces = 0
    for column, count in chosen:
        carried[column.service] += count * column.tokens_per_s
        pieces += count * (sum(column.counts) - 1)
    for (_, machine), sizes in taken.items():
        gpus = parse_node_type(machine).gpu_count
        pieces += -(-sum(Counter(sizes).elements()) // gpus)
        pieces += sum(count for size, count in sizes.items() if size < gpus)
    demand = ReplicaProgram(problem, shelves, []).demand
    time = sum(slowdown(float(c) / d) for c, d in zip(carried, demand, strict=True))
    return time + problem.settings.simplicity * pieces
