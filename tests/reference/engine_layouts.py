"""What every small set of nodes carries of a role on engines, by trying everything that their rules allow.

Written from the problem and the engines' own files: it knows `plan.capacities` and no solver.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from atoll.catalog.catalog import Catalog
from atoll.core.ids import Phase, RoleId, parse_node_type
from atoll.engines.table import find_engine
from atoll.perf.layers import tp_sizes
from atoll.plan.handover import handover_engine
from atoll.plan.problem import Problem
from tests.reference.rent_layouts import (
    Cut,
    Floats,
    Kinds,
    best_cut,
    cut_layers,
    rates_by_kind,
)

PREFERENCE = 0.01
"""Share of what the best engine carries that is given up for one that comes before it."""


def engine_cuts(problem: Problem, catalog: Catalog, role: RoleId) -> dict[Kinds, Cut]:
    """Return what the engine that is preferred for a set of nodes carries on it."""
    by_engine = [engine_rates(problem, catalog, e, role) for e in problem.settings.engines]
    found: dict[Kinds, Cut] = {}
    for some in sorted(set().union(*by_engine)):
        rates = [own.get(some, 0.0) for own in by_engine]
        rate = next(rate for rate in rates if rate * (1.0 + PREFERENCE) >= max(rates))
        found[some] = Cut((), (), rate)
    return found


def engine_rates(
    problem: Problem, catalog: Catalog, engine: str, role: RoleId
) -> dict[Kinds, float]:
    """Return the most that every set of nodes carries on one engine."""
    rules, kinds = find_engine(engine), usable_kinds(problem, catalog, engine, role)
    chosen = handover_engine(problem, catalog, problem.service_of(role)).name
    if role.phase is not Phase.BOTH and rules.connector != find_engine(chosen).connector:
        return {}
    pipelines = rules.pipelines_in(role.phase)
    spec = catalog.model(problem.service_of(role).model).llm
    run = problem.run_by(engine)
    free = rates_by_kind(run, catalog, role)
    if rules.max_node_copies == 1:
        counts = {kind: parse_node_type(kind).gpu_count for kind in kinds}
        whole = {gpus: rates_by_kind(run, catalog, role, tp=gpus) for gpus in {*counts.values()}}
        free = {kind: whole[gpus][kind] for kind, gpus in counts.items()}
    # An engine with one copy on a node splits layers over all of its GPUs, however well that goes.
    split = {
        gpus: rates_by_kind(run, catalog, role, tp=gpus)
        for gpus in {parse_node_type(kind).gpu_count for kind in kinds}
        if rules.max_copies == 1 or (pipelines == "rows" and gpus in tp_sizes(spec, gpus))
    }
    found: dict[Kinds, float] = {}
    for size in range(1, problem.settings.max_nodes_per_instance + 1):
        for some in itertools.combinations_with_replacement(sorted(kinds), size):
            gpus, *unlike = sorted({parse_node_type(kind).gpu_count for kind in some})
            if size == 1:
                tables = split[gpus] if rules.max_copies == 1 else free
                found[some] = float(tables[some[0]][3, 0, -1])
            elif pipelines == "free":
                found[some] = best_cut(free, some).throughput
            elif pipelines == "rows" and not unlike and gpus in split:
                found[some] = _best_row(split[gpus], some)
    limit = problem.settings.memory_ratio * spec.weight_bytes
    return {
        some: rate
        for some, rate in found.items()
        if rate > 0.0
        and (len(some) == 1 or sum(catalog.node(k).memory_bytes for k in some) <= limit)
    }


def usable_kinds(problem: Problem, catalog: Catalog, engine: str, role: RoleId) -> list[str]:
    """Return the kinds that an engine runs the model on, as its file says it."""
    service, rules = problem.service_of(role), find_engine(engine)
    spec = catalog.model(service.model).llm
    return [
        kind
        for kind in problem.kinds_for(service.name)
        if rules.refuses(spec, catalog.node(kind).gpu) is None
    ]


def _best_row(tables: Mapping[str, Floats], some: Kinds) -> float:
    """The most that nodes in a row carry, one a stage, in any order and with any layers."""
    best = 0.0
    for order in set(itertools.permutations(some)):
        last = len(order) - 1
        places = [0 if at == 0 else 2 if at == last else 1 for at in range(len(order))]
        stages = [tables[kind][place, last] for kind, place in zip(order, places, strict=True)]
        found = cut_layers(stages, len(stages[0]) - 1)
        best = max(best, 0.0 if found is None else found[1])
    return best
