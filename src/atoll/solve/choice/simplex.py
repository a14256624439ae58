"""A small dense linear programme, maximise c x with A x <= b, x >= 0 and b >= 0, by pivots (numba).

Nothing served is feasible, so no first phase is needed, and whenever it stops the point is feasible. The
table holds what is basic in terms of what is not, one row per constraint.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from atoll.core.compiling import lean_part
from atoll.solve.choice.problem import Floats, Ints

_ZERO = 1e-9
_MOST = 6
"""Pivots per row and column together."""


class Pivots(NamedTuple):
    """The table and who is basic; as large as needed, used from its upper left corner."""

    table: Floats
    """table[r, c]."""
    value: Floats
    """value[r]: of the variable that is basic in row r."""
    profit: Floats
    """profit[c]: of the variable of column c, given what is basic."""
    basic: Ints
    """basic[r]: columns as first numbered, or -1 - r for the slack of a row."""
    outside: Ints
    """outside[c], likewise."""
    kept: Floats
    """Room for the shares of a routing, by type and member."""


PIVOTS_TYPE = (
    "Tuple((float64[:, ::1], float64[::1], float64[::1], int64[::1], int64[::1], float64[:, ::1]))"
)


def pivots_of(rows: int, types: int, members: int) -> Pivots:
    """Return memory for programmes of up to that size, with a column for each type and member."""
    columns = types * members
    return Pivots(
        np.empty((rows, columns)), np.empty(rows), np.empty(columns), np.empty(rows, np.int64),
        np.empty(columns, np.int64), np.empty((types, members)),
    )  # fmt: skip


@lean_part
def maximise(pivots: Pivots, rows: int, columns: int) -> int:
    """Pivot until no profit is left; return the number of pivots. `basic` and `outside` are set here."""
    table, value, profit = pivots.table, pivots.value, pivots.profit
    for r in range(rows):
        pivots.basic[r] = -1 - r
    for c in range(columns):
        pivots.outside[c] = c
    for count in range(_MOST * (rows + columns)):
        enter = -1
        most = _ZERO
        for c in range(columns):
            if profit[c] > most:
                enter, most = c, profit[c]
        if enter < 0:
            return count
        leave = -1
        least = np.inf
        for r in range(rows):
            if table[r, enter] > _ZERO:
                limit = value[r] / table[r, enter]
                if limit < least or (limit == least and table[r, enter] > table[leave, enter]):
                    leave, least = r, limit
        if leave < 0:
            return count
        pivot(pivots, rows, columns, leave, enter)
    return _MOST * (rows + columns)


@lean_part
def pivot(pivots: Pivots, rows: int, columns: int, leave: int, enter: int) -> None:
    """Let a column's variable become basic in a row, for the one that is."""
    table, value, profit = pivots.table, pivots.value, pivots.profit
    by = 1.0 / table[leave, enter]
    for c in range(columns):
        table[leave, c] *= by
    table[leave, enter] = by
    value[leave] = max(0.0, value[leave] * by)
    for r in range(rows):
        factor = table[r, enter]
        if r == leave or factor == 0.0:
            continue
        table[r, enter] = 0.0
        for c in range(columns):
            table[r, c] -= factor * table[leave, c]
        value[r] = max(0.0, value[r] - factor * value[leave])
    factor = profit[enter]
    profit[enter] = 0.0
    for c in range(columns):
        profit[c] -= factor * table[leave, c]
    pivots.basic[leave], pivots.outside[enter] = pivots.outside[enter], pivots.basic[leave]
