"""Ways in which a type can be answered by a few chosen offers: corners of what its promises allow (numba).

A way sends shares of a type to one offer or to two, and leaves the rest unserved, such that delay and error
keep their limits. Its cost holds the weights it has to store, whole. Any routing of a type is a mixture of
ways, but for mixtures of three offers at both limits at once, which are not listed. What ways use of what
types share is kept in *rows*: FLOP/s and memory of each offer, and storage, each as a share of its limit;
a row that cannot bind is left out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from atoll.core.compiling import lean_part
from atoll.solve.joint.joint_problem import Floats, Ints
from atoll.solve.joint.joint_tables import STORAGE, JointTables
from research.joint.exchange.exchange_offers import MAX, Offers

MIN = 1e-7
"""A smaller share of a type is not placed."""
ROWS = 2 * MAX + 1
_OVER = 1e-9
_FORBIDDEN = 1e7
"""USD for all of a type unserved beyond what may be."""
# Slots of `TypeWays.size`: members, rows, ways.
MEMBERS, COUNT, NUMBER = 0, 1, 2
# Slots of `TypeWays.money`: rent of the members, GB that may be stored, USD of a GB.
RENT, GB, GB_USD = 0, 1, 2


class TypeWays(NamedTuple):
    """The ways of all types to chosen offers."""

    size: Ints
    money: Floats
    members: Ints
    """members[a], an offer."""
    row: Ints
    """row[0 and 1, a]: of FLOP/s and memory of a member, -1 where there is none; row[0, MAX] of storage."""
    first: Ints
    """first[i] to first[i + 1]: the ways of a type. The first serves nothing of it."""
    cost: Floats
    """cost[w], USD."""
    place: Ints
    """place[w, 0 and 1]: members, -1 for none."""
    share: Floats
    """share[w, 0 and 1] of the type that goes to them."""
    use: Floats
    """use[w, r], as a share of the limit."""


WAYS_TYPE = (
    "Tuple((int64[::1], float64[::1], int64[::1], int64[:, ::1], int64[::1], float64[::1],"
    " int64[:, ::1], float64[:, ::1], float64[:, ::1]))"
)


def ways_of(types: int) -> TypeWays:
    """Return memory for the ways of so many types."""
    most = types * (1 + MAX * MAX)
    return TypeWays(
        np.zeros(3, np.int64), np.zeros(3), np.zeros(MAX, np.int64),
        np.zeros((2, MAX + 1), np.int64), np.zeros(types + 1, np.int64), np.empty(most),
        np.empty((most, 2), np.int64), np.empty((most, 2)), np.empty((most, ROWS)),
    )  # fmt: skip


@lean_part
def unserved(tables: JointTables, i: int, share: float) -> float:
    """Return what an unserved share of a type costs; beyond what may be unserved, more than anything."""
    usd = tables.unmet_usd[i] * share
    if share > tables.max_unmet[i] + _OVER:
        usd += _FORBIDDEN * (share - tables.max_unmet[i])
    return float(usd)


@lean_part
def span(one: float, other: float, low: float, high: float) -> tuple[float, float]:
    """Narrow the shares s for which s `one` + (1 - s) `other` is at most 1."""
    if one > 1.0:
        if other > 1.0:
            return 1.0, 0.0
        return low, min(high, (1.0 - other) / (one - other))
    if other > 1.0:
        return max(low, (other - 1.0) / (other - one)), high
    return low, high


@lean_part
def list_ways(tables: JointTables, offers: Offers, ways: TypeWays) -> None:
    """Write rows and ways for the members; `money` has been set."""
    list_rows(tables, offers, ways)
    count = 0
    members = ways.size[MEMBERS]
    for i in range(offers.floor.shape[0]):
        ways.first[i] = count
        # Unserved is a way like the others, so the program always has an answer.
        count = write_way(tables, offers, ways, count, i, -1, -1, 0.0, 0.0)
        whole = False
        for a in range(members):
            f = ways.members[a]
            share = 1.0 / max(1.0, offers.slow[f, i], offers.wrong[f, i])
            if share > MIN:
                count = write_way(tables, offers, ways, count, i, a, -1, share, 0.0)
            whole = whole or share >= 1.0
        # Mixtures of two are listed at the ends of what limits allow: all others lie between them.
        for a in range(members):
            f = ways.members[a]
            for b in range(a):
                g = ways.members[b]
                low, high = span(offers.slow[f, i], offers.slow[g, i], 0.0, 1.0)
                low, high = span(offers.wrong[f, i], offers.wrong[g, i], low, high)
                if low > high:
                    continue
                if low > MIN and low < 1.0 - MIN:
                    whole = True
                    count = write_way(tables, offers, ways, count, i, a, b, low, 1.0 - low)
                if high > MIN and high < 1.0 - MIN and high > low:
                    whole = True
                    count = write_way(tables, offers, ways, count, i, a, b, high, 1.0 - high)
        if not whole:
            for a in range(members):
                for b in range(a):
                    count = write_parts(tables, offers, ways, count, i, a, b)
    ways.first[offers.floor.shape[0]] = count
    ways.size[NUMBER] = count


@lean_part
def list_rows(tables: JointTables, offers: Offers, ways: TypeWays) -> None:
    """Number the rows that can bind."""
    rows = 0
    types = offers.floor.shape[0]
    stored = 0.0
    for a in range(ways.size[MEMBERS]):
        f = ways.members[a]
        load, cache = 0.0, 0.0
        for i in range(types):
            load += offers.load[f, i]
            cache += offers.cache[f, i]
        ways.row[0, a] = -1
        ways.row[1, a] = -1
        # A row that cannot be exceeded even by all types together is left out: fewer rows are quicker to
        # invert.
        if load > 1.0:
            ways.row[0, a] = rows
            rows += 1
        if cache > 1.0:
            ways.row[1, a] = rows
            rows += 1
        stored += tables.keep_gb[offers.pair[f]] * types
    for i in range(types):
        stored += tables.data_gb[i]
    ways.row[0, MAX] = -1
    if stored > ways.money[GB]:
        ways.row[0, MAX] = rows
        rows += 1
    ways.size[COUNT] = rows


@lean_part
def write_way(
    tables: JointTables,
    offers: Offers,
    ways: TypeWays,
    at: int,
    i: int,
    a: int,
    b: int,
    one: float,
    two: float,
) -> int:
    """Write the way that sends shares to two members (-1: none); return the number of ways."""
    for r in range(ways.size[COUNT]):
        ways.use[at, r] = 0.0
    ways.place[at, 0] = a
    ways.place[at, 1] = b
    ways.share[at, 0] = one
    ways.share[at, 1] = two
    cost = unserved(tables, i, max(0.0, 1.0 - one - two))
    gb = (one + two) * tables.data_gb[i]
    for side in range(2):
        member = a if side == 0 else b
        if member >= 0:
            share = one if side == 0 else two
            f = ways.members[member]
            cost += offers.keep[f] + share * offers.usd[f, i]
            gb += tables.keep_gb[offers.pair[f]]
            if ways.row[0, member] >= 0:
                ways.use[at, ways.row[0, member]] = share * offers.load[f, i]
            if ways.row[1, member] >= 0:
                ways.use[at, ways.row[1, member]] = share * offers.cache[f, i]
    if ways.row[0, MAX] >= 0:
        ways.use[at, ways.row[0, MAX]] = gb / ways.money[GB]
    ways.cost[at] = cost
    return at + 1


@lean_part
def write_parts(
    tables: JointTables, offers: Offers, ways: TypeWays, at: int, i: int, a: int, b: int
) -> int:
    """Write mixtures of two members that leave some of a type unserved; return the number of ways."""
    f, g = ways.members[a], ways.members[b]
    slow_a, slow_b, wrong_a, wrong_b = (
        offers.slow[f, i], offers.slow[g, i], offers.wrong[f, i], offers.wrong[g, i],
    )  # fmt: skip
    # Delay and error both at their limits: the one corner that neither has alone.
    size = slow_a * wrong_b - slow_b * wrong_a
    # Limits of the two are proportional: there is no corner.
    if abs(size) < 1e-12:
        return at
    one = (wrong_b - slow_b) / size
    two = (slow_a - wrong_a) / size
    if one < MIN or two < MIN or one + two > 1.0:
        return at
    return write_way(tables, offers, ways, at, i, a, b, one, two)


@lean_part
def gb_limit(tables: JointTables, rent: float, gb_usd: float, budget: float) -> float:
    """Return the GB that storage and what rent leaves of the budget allow, below 0 if it leaves nothing."""
    if rent > budget:
        return -1.0
    gb = tables.limits[STORAGE]
    if gb_usd > 0.0:
        gb = min(gb, (budget - rent) / gb_usd)
    return float(gb)
