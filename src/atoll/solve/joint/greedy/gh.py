"""GH: a cover of all types first, then one type after the other to the pair that is cheapest for it."""

from __future__ import annotations

from typing import Any

import numpy as np

from atoll.core.compiling import entry, lean_part
from atoll.solve.joint.greedy.greedy_steps import (
    FILL,
    RANK,
    SELECT,
    UPGRADE,
    allocate,
    cover,
    find_first,
)
from atoll.solve.joint.joint_problem import Floats, Ints, JointAnswer, JointProblem
from atoll.solve.joint.joint_tables import (
    LEDGER_TYPE,
    TABLES_TYPE,
    JointTables,
    Ledger,
    answer_of,
    clear,
    ledger_of,
    tables_of,
)

COMPILED_AS = "the choice of models"


def gh(
    problem: JointProblem,
    *,
    select: bool = True,
    rank: bool = True,
    upgrade: bool = True,
    fill: bool = False,
) -> JointAnswer:
    """Return GH's answer; M1, M2 and M3 can be switched off, and pairs be filled (see `greedy`)."""
    tables = tables_of(problem)
    types, pairs, _ = tables.delay.shape
    ledger = ledger_of(tables)
    _gh(
        tuple(tables),
        tuple(ledger),
        switches_of(select, rank, upgrade, fill),
        np.argsort(-problem.rate, kind="stable").astype(np.int64),
        np.empty((types, pairs), np.int64),
        np.empty((2, pairs)),
        np.empty(max(types, pairs), np.int64),
    )
    return answer_of(problem, ledger.config, ledger.share)


def switches_of(select: bool, rank: bool, upgrade: bool, fill: bool) -> int:
    """Return M1, M2, M3 and the filling of pairs as bits."""
    return SELECT * select + RANK * rank + UPGRADE * upgrade + FILL * fill


@lean_part
def construct(
    tables: JointTables,
    ledger: Ledger,
    switches: int,
    order: Ints,
    first: Ints,
    rank: Floats,
    heap: Ints,
) -> None:
    """Route types in this order, to what the first phase has activated and to more."""
    for place in range(order.shape[0]):
        allocate(tables, ledger, switches, first, order[place], rank, heap)


@entry(
    f"({TABLES_TYPE}, {LEDGER_TYPE}, int64, int64[::1], int64[:, ::1], float64[:, ::1], int64[::1])"
)
def _gh(
    tables: tuple[Any, ...],
    ledger: tuple[Any, ...],
    switches: int,
    order: Ints,
    first: Ints,
    rank: Floats,
    scratch: Ints,
) -> None:
    start(JointTables(*tables), Ledger(*ledger), switches, first, scratch)
    construct(JointTables(*tables), Ledger(*ledger), switches, order, first, rank, scratch)


@lean_part
def start(tables: JointTables, ledger: Ledger, switches: int, first: Ints, scratch: Ints) -> None:
    """Do what is the same for all orders: M1, and the first phase."""
    find_first(tables, switches, first)
    clear(ledger)
    cover(tables, ledger, first, scratch)
