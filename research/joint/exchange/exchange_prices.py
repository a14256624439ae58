"""Prices of what types share, and a mixture of ways for each type, by the dual simplex method (numba).

    minimise sum cost_w m_w   with  sum_w m_w = 1 for each type,  sum_w use_wr m_w <= limit_r for each row

Types are many and rows few, so every type has a *key* way, whose share is what its others leave, and only as
many variables as there are rows are basic beside the keys (generalised upper bounds, Dantzig and Van Slyke):
the matrix that is inverted has a few rows only. It begins with what is cheapest for each type, no row
binding. Each pivot raises the bound on the cost, so a bound that is too high already ends it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from atoll.core.compiling import lean_part
from atoll.solve.joint.joint_problem import Floats, Ints
from research.joint.exchange.ways import COUNT, ROWS, TypeWays

# Values below this are rounding, not a row that is exceeded.
_ZERO = 1e-9
_MAX = 30
"""Pivots for each row and type."""


class SharePrices(NamedTuple):
    """A basis and what it says."""

    key: Ints
    """key[i], a way."""
    basic: Ints
    """basic[r]: a way, or -1 - q for the slack of row q."""
    owner: Ints
    """owner[r]: the type of the way that is basic in r, -1 for a slack."""
    value: Floats
    """value[r] of what is basic."""
    inverse: Floats
    """Of the columns that are basic, less those of their types' keys."""
    limit: Floats
    """limit[r]."""
    usd: Floats
    """usd[r]: what the whole of a row is worth."""
    column: Floats
    """Scratch."""
    level: Floats
    """level[i]: what the way that is key has of the row that leaves. Scratch."""
    type_usd: Floats
    """type_usd[i]: what a type costs at these prices."""
    spent: Ints
    """Ways looked at, a measure of work."""


PRICES_TYPE = (
    "Tuple((int64[::1], int64[::1], int64[::1], float64[::1], float64[:, ::1], float64[::1],"
    " float64[::1], float64[::1], float64[::1], float64[::1], int64[::1]))"
)


def prices_of(types: int) -> SharePrices:
    """Return memory for so many types."""
    return SharePrices(
        np.zeros(types, np.int64), np.zeros(ROWS, np.int64), np.zeros(ROWS, np.int64),
        np.zeros(ROWS), np.zeros((ROWS, ROWS)), np.zeros(ROWS), np.zeros(ROWS), np.zeros(ROWS),
        np.zeros(types), np.zeros(types), np.zeros(1, np.int64),
    )  # fmt: skip


@lean_part
def solve_prices(ways: TypeWays, prices: SharePrices, most: float) -> float:
    """Find prices and mixtures within `limit`; return the cost without rent, or a bound over `most`."""
    types, rows = prices.key.shape[0], ways.size[COUNT]
    begin(ways, prices, types, rows)
    usd = 0.0
    for i in range(types):
        usd += prices.type_usd[i]
    # Each pivot raises the bound, but ties may not: the limit ends a loop that makes no progress.
    for _ in range(_MAX * (rows + types)):
        # The bound only rises, so there is no need to know by how much it is too high.
        if usd >= most:
            return usd
        leave = find_leaving(prices, rows)
        if leave < 0:
            return usd
        prices.spent[0] += ways.first[types]
        below = prices.value[leave]
        rise = pivot(ways, prices, types, rows, leave)
        if rise < 0.0:
            return usd
        # What is too much of a row, times what a unit of it has become dearer.
        usd -= below * rise
    return np.inf


@lean_part
def begin(ways: TypeWays, prices: SharePrices, types: int, rows: int) -> None:
    """Give each type what is cheapest; all rows have slack."""
    for i in range(types):
        best = ways.first[i]
        for w in range(ways.first[i] + 1, ways.first[i + 1]):
            if ways.cost[w] < ways.cost[best]:
                best = w
        prices.key[i] = best
        prices.type_usd[i] = ways.cost[best]
    for r in range(rows):
        prices.basic[r] = -1 - r
        prices.owner[r] = -1
        prices.usd[r] = 0.0
        left = prices.limit[r]
        for i in range(types):
            left -= ways.use[prices.key[i], r]
        prices.value[r] = left
        for q in range(rows):
            prices.inverse[r, q] = 1.0 if q == r else 0.0


@lean_part
def find_leaving(prices: SharePrices, rows: int) -> int:
    """Return where what is basic is most below 0, -1 if nowhere. A key below 0 is replaced first."""
    leave, least = -1, -_ZERO
    for r in range(rows):
        if prices.value[r] < least:
            leave, least = r, prices.value[r]
    # Keys are not rows of the matrix, so their shares are what is left of 1 and are checked apart.
    worst = -1
    for r in range(rows):
        i = prices.owner[r]
        if i < 0:
            continue
        key = 1.0
        for q in range(rows):
            if prices.owner[q] == i:
                key -= prices.value[q]
        if key < least:
            worst, least = r, key
    if worst < 0:
        return leave
    # A key cannot leave by itself: first it changes places with a way that is basic, and then leaves there.
    change_key(prices, rows, worst)
    prices.value[worst] = least
    return worst


@lean_part
def change_key(prices: SharePrices, rows: int, r: int) -> None:
    """Make the way that is basic in a row the key of its type, and its key basic there."""
    i = prices.owner[r]
    for q in range(rows):
        total = prices.inverse[r, q]
        for s in range(rows):
            if s != r and prices.owner[s] == i:
                total += prices.inverse[s, q]
        prices.inverse[r, q] = -total
    prices.key[i], prices.basic[r] = prices.basic[r], prices.key[i]


@lean_part
def pivot(  # noqa: C901  (who enters, then the exchange)
    ways: TypeWays, prices: SharePrices, types: int, rows: int, leave: int
) -> float:
    """Let the cheapest way or slack become basic in a row; return the rise in price, below 0 if none can."""
    inverse, usd, use, cost = prices.inverse, prices.usd, ways.use, ways.cost
    enter, owner, least, steep = -1 - rows, -1, np.inf, 0.0
    for r in range(rows):
        alpha = inverse[leave, r]
        if alpha < -_ZERO:
            # Rounding may leave a price a little below 0; a negative ratio would lower the bound.
            ratio = max(0.0, usd[r]) / -alpha
            # Of equal ratios the steeper pivot: dividing by small numbers loses digits.
            if ratio < least or (ratio == least and alpha < steep):
                enter, owner, least, steep = -1 - r, -1, ratio, alpha
    for i in range(types):
        key = prices.key[i]
        base = prices.type_usd[i]
        level = 0.0
        for r in range(rows):
            level += inverse[leave, r] * use[key, r]
        prices.level[i] = level
        for w in range(ways.first[i], ways.first[i + 1]):
            alpha, rise = -level, cost[w] - base
            for r in range(rows):
                alpha += inverse[leave, r] * use[w, r]
                rise += usd[r] * use[w, r]
            if alpha < -_ZERO:
                ratio = max(0.0, rise) / -alpha
                if ratio < least or (ratio == least and alpha < steep):
                    enter, owner, least, steep = w, i, ratio, alpha
    if least == np.inf:
        return -1.0
    # Prices move along the row that leaves, and types pay what their keys use of it.
    for r in range(rows):
        usd[r] += least * inverse[leave, r]
    for i in range(types):
        prices.type_usd[i] += least * prices.level[i]
    # The column that enters, as the basis sees it; ways count less the key of their type.
    for r in range(rows):
        total = 0.0
        if owner < 0:
            total = inverse[r, -1 - enter]
        else:
            key = prices.key[owner]
            for q in range(rows):
                total += inverse[r, q] * (use[enter, q] - use[key, q])
        prices.column[r] = total
    by = 1.0 / prices.column[leave]
    step = prices.value[leave] * by
    for q in range(rows):
        inverse[leave, q] *= by
    for r in range(rows):
        factor = prices.column[r]
        if r == leave:
            prices.value[r] = step
        elif factor != 0.0:
            prices.value[r] -= factor * step
            for q in range(rows):
                inverse[r, q] -= factor * inverse[leave, q]
    prices.basic[leave] = enter
    prices.owner[leave] = owner
    return least
