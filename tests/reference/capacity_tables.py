"""Capacities in whole: of one node with so many layers, and of all roles on all node types at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from atoll.catalog.link_table import Link
from atoll.catalog.nodes import NodeType
from atoll.core.errors import UsageError
from atoll.engines.table import EngineChoice
from atoll.perf.capacity import (
    Capacity,
    CapacityModel,
    CapacityTable,
    RoleLoad,
    copy_node,
    table_of,
)
from atoll.perf.constants import ConstantTable
from atoll.perf.layers import tp_sizes
from atoll.perf.step import Position, StepModel, analytic


def capacity(
    role: RoleLoad,
    model: StepModel,
    layers: int,
    *,
    stages: int = 1,
    budget_s: float | None = None,
    position: Position | None = None,
    link: Link | None = None,
) -> Capacity:
    """Return what a node carries with `layers` layers of a role in a pipeline of `stages` stages.

    `budget_s` is SLO / stages unless given; `link` is the hand-over to the next stage. The position
    defaults to WHOLE for one stage and MIDDLE otherwise.
    """
    if not 1 <= layers <= role.spec.layers:
        raise UsageError(f"{layers} layers of a model with {role.spec.layers}", field="layers")
    if stages < 1:
        raise UsageError(f"a pipeline of {stages} stages", field="stages")
    budget = role.slo_s / stages if budget_s is None else budget_s
    where = position or (Position.WHOLE if stages == 1 else Position.MIDDLE)
    return CapacityModel(role, model, link=link).detail(layers, stages, budget, where)


def capacity_table(
    roles: Sequence[RoleLoad],
    node_types: Iterable[NodeType],
    stages: int,
    *,
    engine: str | EngineChoice = "vllm",
    link: Link | None = None,
    constants: ConstantTable | None = None,
) -> Mapping[tuple[str, str], CapacityTable]:
    """Return all T[j, S] at once: every role on every node type, S = 1..stages with budget SLO / S.

    Keys are (role name, node type id); every entry is that of the best tensor-parallel size. `link` joins
    the stages; transfers count into the budget.
    """
    if stages < 1:
        raise UsageError(f"a pipeline of {stages} stages", field="stages")
    nodes = tuple(node_types)
    for what, names in (("role", [r.name for r in roles]), ("node type", [n.id for n in nodes])):
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise UsageError(f"{what} {twice[0]} is given twice", field=what)
    copies: dict[tuple[object, ...], CapacityTable] = {}

    def table(role: RoleLoad, node: NodeType, tp: int) -> CapacityTable:
        # Nodes of one GPU type share what a copy carries.
        one = copy_node(node, tp)
        share = link and link.share(tp, node.count)
        key = (role.name, one, share)
        if key not in copies:
            model = analytic(role.spec, one, tp=tp, engine=engine, constants=constants)
            copies[key] = table_of(role, model, stages, link=share)
        found = copies[key]
        rates = found.throughput * (node.count // tp)
        return CapacityTable(role, node, found.tp, rates, found.provenance)

    return {
        (role.name, node.id): best_table(
            [table(role, node, tp) for tp in tp_sizes(role.spec, node.count)]
        )
        for role in roles
        for node in nodes
    }


def best_table(tables: Sequence[CapacityTable]) -> CapacityTable:
    """Return the best entry of several tensor-parallel sizes everywhere; of equals the last one's.

    With sizes in ascending order the larger one wins where both carry the same: it answers sooner.
    """
    best, tp = tables[0].throughput, tables[0].tp
    for table in tables[1:]:
        tp = np.where(table.throughput >= best, table.tp, tp)
        best = np.maximum(best, table.throughput)
    first = tables[0]
    return CapacityTable(first.role, first.node, tp, best, first.provenance)
