"""The cheapest routes of one type of the joint problem, tolls included (numba).

With limits on delay and error an extreme routing of a type uses one candidate, two, or three (with both
limits tight). Being placed at a candidate costs `fixed` (weights, toll), routing all there `part`. Candidates
are looked at in the order of `fixed`, and no further than a lower bound on the parts allows: prices on both
limits (`lift`) give one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from atoll.core.compiling import lean_part
from atoll.solve.joint.joint_problem import Floats, Ints

POOL = 16
"""Routes over three candidates that are remembered for each type."""
_FIT = 1e-9
_GOLDEN, _CUTS, _SWEEPS, _REFRESH = 0.618, 22, 3, 25
"""Golden section: its ratio, cuts, times that both prices are looked for; passes from one to the next."""

# Slots of `TollTable.limits`, of `TollWork.counts`, and of its `result`.
STOCK, BUDGET, STORAGE = 0, 1, 2
PASSES, LOOKS = 0, 1
BOUND = 0


class TollTable(NamedTuple):
    """Candidates of a node, those that are open first, by type i and candidate f."""

    rent: Floats
    keep: Floats
    """keep[f], GB of weights."""
    load: Floats
    """load[i, f]: what all of a type takes of the FLOP/s."""
    cache: Floats
    """cache[i, f]: what all of a type takes of the memory beside weights."""
    usd: Floats
    """usd[i, f]: delay of all of a type."""
    late: Floats
    """late[i, f]: delay over the type's limit, less one."""
    wrong: Floats
    """wrong[i, f]: error over the type's limit, less one."""
    unmet: Floats
    """unmet[i], USD."""
    data: Floats
    """data[i], GB."""
    limits: Floats
    """USD of a GB over the horizon; budget, USD; storage, GB."""


class Tolls(NamedTuple):
    """Prices, USD: their sum over types and both resources is the rent."""

    placed: Floats
    """placed[i, f]: for a type to be placed there."""
    load: Floats
    """load[f]: for all its FLOP/s."""
    cache: Floats
    """cache[f]: for all its memory."""
    totals: Floats
    """For the whole budget and all storage."""


class TollWork(NamedTuple):
    """What passes work in, and what they leave behind."""

    order: Ints
    """order[i]: candidates by what being placed there costs."""
    picks: Ints
    """picks[i]: candidates of the cheapest routes, -1 for none."""
    parts: Floats
    """parts[i]: their shares."""
    pool: Ints
    pool_parts: Floats
    pooled: Ints
    lifts: Floats
    """lifts[i]: prices of the delay and error limits, with which `low` is `part`."""
    fixed: Floats
    """fixed[f]: cost of placing the type at hand there."""
    part: Floats
    """part[f]: cost of routing all of it there."""
    low: Floats
    use_load: Floats
    use_cache: Floats
    way: Floats
    """way[i, f]: the direction of `Tolls.placed`."""
    way_load: Floats
    way_cache: Floats
    way_totals: Floats
    split: Floats
    sorted: Floats
    often: Floats
    """often[i, f]: passes in which a type used a candidate."""
    spare: Floats
    counts: Ints
    result: Floats


_F1, _F2, _F3 = "float64[::1]", "float64[:, ::1]", "float64[:, :, ::1]"
_I1, _I2, _I3 = "int64[::1]", "int64[:, ::1]", "int64[:, :, ::1]"
TABLE_TYPE = f"Tuple(({_F1}, {_F1}, {_F2}, {_F2}, {_F2}, {_F2}, {_F2}, {_F1}, {_F1}, {_F1}))"
TOLLS_TYPE = f"Tuple(({_F2}, {_F1}, {_F1}, {_F1}))"
WORK_TYPE = (
    f"Tuple(({_I2}, {_I2}, {_F2}, {_I3}, {_F3}, {_I1}, {_F2}, {_F1}, {_F1}, {_F1}, {_F1}, {_F1},"
    f" {_F2}, {_F1}, {_F1}, {_F1}, {_F1}, {_F1}, {_F2}, {_F1}, {_I1}, {_F1}))"
)


def work_of(table: TollTable, tolls: Tolls) -> TollWork:
    """Return memory for passes over a table."""
    types, number = table.load.shape
    one = [np.zeros(number) for _ in range(9)]
    fixed = tolls.placed + table.limits[STOCK] * table.keep
    return TollWork(
        np.ascontiguousarray(np.argsort(fixed, axis=1, kind="stable")),
        np.full((types, 3), -1, np.int64), np.zeros((types, 3)),
        np.zeros((types, POOL, 3), np.int64), np.zeros((types, POOL, 3)),
        np.zeros(types, np.int64), np.zeros((types, 2)),
        one[0], one[1], one[2], one[3], one[4],
        np.zeros((types, number)), one[5], one[6], np.zeros(2),
        np.zeros(types + 2), np.zeros(types + 2),
        np.zeros((types, number)), one[7], np.zeros(2, np.int64), np.zeros(1),
    )  # fmt: skip


@lean_part
def sort_by(order: Ints, key: Floats) -> None:
    """Sort what is nearly sorted."""
    for a in range(1, order.shape[0]):
        f = order[a]
        b = a
        while b > 0 and key[order[b - 1]] > key[f]:
            order[b] = order[b - 1]
            b -= 1
        order[b] = f


@lean_part
def height(table: TollTable, part: Floats, i: int, delay: float, error: float) -> float:
    """Return what routing all of a type costs at least, by prices of its two limits."""
    value = float(table.unmet[i]) - delay - error
    for f in range(part.shape[0]):
        value = min(value, part[f] + delay * table.late[i, f] + error * table.wrong[i, f])
    return value


@lean_part
def side_height(
    table: TollTable, part: Floats, i: int, side: int, price: float, other: float
) -> float:
    """Return `height` with one price, of the side, and the other one."""
    if side == 0:
        return height(table, part, i, price, other)
    return height(table, part, i, other, price)


@lean_part
def lift(table: TollTable, part: Floats, i: int, prices: Floats) -> None:
    """Find prices of a type's limits for which `height` is large, by golden section, one after the other."""
    for sweep in range(2 * _SWEEPS):
        side = sweep % 2
        other = prices[1 - side]
        low, high = 0.0, table.unmet[i]
        a, b = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        at_a = side_height(table, part, i, side, a, other)
        at_b = side_height(table, part, i, side, b, other)
        for _ in range(_CUTS):
            if at_a < at_b:
                low, a, at_a = a, b, at_b
                b = low + _GOLDEN * (high - low)
                at_b = side_height(table, part, i, side, b, other)
            else:
                high, b, at_b = b, a, at_a
                a = high - _GOLDEN * (high - low)
                at_a = side_height(table, part, i, side, a, other)
        prices[side] = 0.5 * (low + high)


@lean_part
def price(table: TollTable, tolls: Tolls, work: TollWork, i: int, opened: int) -> None:
    """Write what a type pays, tolls included."""
    more = 1.0 + tolls.totals[0] / table.limits[BUDGET]
    gb_usd = table.limits[STOCK] * more + tolls.totals[1] / table.limits[STORAGE]
    for f in range(table.rent.shape[0]):
        work.fixed[f] = table.keep[f] * gb_usd + tolls.placed[i, f] * more
        room = tolls.load[f] * table.load[i, f] + tolls.cache[f] * table.cache[i, f]
        # The tolls of what is not open are of a rent that counts against the budget.
        if f >= opened:
            room *= more
        work.part[f] = table.data[i] * gb_usd + room + table.usd[i, f]


@lean_part
def lower(table: TollTable, work: TollWork, i: int) -> float:
    """Write `low`; return the least that routing all of a type costs, weights and tolls of placing aside."""
    delay, error = work.lifts[i, 0], work.lifts[i, 1]
    least = float(table.unmet[i]) - delay - error
    for f in range(table.rent.shape[0]):
        work.low[f] = work.part[f] + delay * table.late[i, f] + error * table.wrong[i, f]
        least = min(least, work.low[f])
    return float(least)


@lean_part
def pick(work: TollWork, i: int, f: int, g: int, h: int, a: float, b: float, c: float) -> None:
    """Write a type's routes."""
    work.picks[i, 0] = f
    work.picks[i, 1] = g
    work.picks[i, 2] = h
    work.parts[i, 0] = a
    work.parts[i, 1] = b
    work.parts[i, 2] = c


@lean_part
def known(table: TollTable, work: TollWork, i: int) -> float:
    """Return what a type pays on the best routes met before, and pick them."""
    usd, rest = 0.0, 1.0
    for side in range(3):
        f = work.picks[i, side]
        if f >= 0:
            usd += work.fixed[f] + work.part[f] * work.parts[i, side]
            rest -= work.parts[i, side]
    usd += max(0.0, rest) * table.unmet[i]
    for a in range(min(POOL, work.pooled[i])):
        one = 0.0
        for side in range(3):
            f = work.pool[i, a, side]
            one += work.fixed[f] + work.part[f] * work.pool_parts[i, a, side]
        if one < usd:
            usd = one
            for side in range(3):
                work.picks[i, side] = work.pool[i, a, side]
                work.parts[i, side] = work.pool_parts[i, a, side]
    if table.unmet[i] < usd:
        usd = table.unmet[i]
        pick(work, i, -1, -1, -1, 0.0, 0.0, 0.0)
    return usd


@lean_part
def alone(table: TollTable, work: TollWork, i: int, f: int) -> tuple[float, float]:
    """Return what a type pays that one candidate serves as far as it can, and that share."""
    share = 1.0 / (1.0 + max(0.0, table.late[i, f], table.wrong[i, f]))
    return work.fixed[f] + share * work.part[f] + (1.0 - share) * table.unmet[i], share


@lean_part
def mixed(table: TollTable, work: TollWork, i: int, f: int, g: int) -> tuple[float, float, float]:
    """Return what a type pays on two candidates with a limit or both tight, and their shares; inf: none."""
    usd, first, second = np.inf, 0.0, 0.0
    late_f, late_g = table.late[i, f], table.late[i, g]
    wrong_f, wrong_g = table.wrong[i, f], table.wrong[i, g]
    both = work.fixed[f] + work.fixed[g]
    if late_f * late_g < 0.0:
        share = late_g / (late_g - late_f)
        if share * wrong_f + (1.0 - share) * wrong_g <= _FIT:
            usd = both + share * work.part[f] + (1.0 - share) * work.part[g]
            first, second = share, 1.0 - share
    if wrong_f * wrong_g < 0.0:
        share = wrong_g / (wrong_g - wrong_f)
        if share * late_f + (1.0 - share) * late_g <= _FIT:
            one = both + share * work.part[f] + (1.0 - share) * work.part[g]
            if one < usd:
                usd, first, second = one, share, 1.0 - share
    whole = (late_f + 1.0) * (wrong_g + 1.0) - (late_g + 1.0) * (wrong_f + 1.0)
    if abs(whole) > 1e-12:
        a, b = (wrong_g - late_g) / whole, (late_f - wrong_f) / whole
        if a > 0.0 and b > 0.0 and a + b < 1.0:
            one = both + a * work.part[f] + b * work.part[g] + (1.0 - a - b) * table.unmet[i]
            if one < usd:
                usd, first, second = one, a, b
    return usd, first, second


@lean_part
def third(
    table: TollTable, work: TollWork, i: int, one: int, two: int, usd: float, least: float
) -> float:
    """Return what a type pays on two candidates and one before them in its order, if that is less."""
    order = work.order[i]
    f, g = order[one], order[two]
    late_f, late_g = table.late[i, f], table.late[i, g]
    wrong_f, wrong_g = table.wrong[i, f], table.wrong[i, g]
    both, low = work.fixed[f] + work.fixed[g], min(work.low[f], work.low[g])
    c = late_f * wrong_g - late_g * wrong_f
    for place in range(two):
        h = order[place]
        all_three = both + work.fixed[h]
        if all_three + least >= usd:
            break
        work.counts[LOOKS] += 1
        if all_three + min(low, work.low[h]) >= usd:
            continue
        # Both limits are tight where they lie within the triangle of the three.
        a = late_g * table.wrong[i, h] - table.late[i, h] * wrong_g
        b = table.late[i, h] * wrong_f - late_f * table.wrong[i, h]
        if (a > 0.0 and b > 0.0 and c > 0.0) or (a < 0.0 and b < 0.0 and c < 0.0):
            whole = a + b + c
            value = all_three + (a * work.part[f] + b * work.part[g] + c * work.part[h]) / whole
            if value < usd:
                usd = value
                pick(work, i, f, g, h, a / whole, b / whole, c / whole)
    return usd


@lean_part
def cheapest(
    table: TollTable, work: TollWork, i: int, usd: float, least: float, full: bool
) -> float:
    """Return what a type pays on its cheapest routes and pick them; `usd` is that of those known."""
    order = work.order[i]
    sort_by(order, work.fixed)
    for one in range(order.shape[0]):
        f = order[one]
        if work.fixed[f] + least >= usd:
            break
        value, share = alone(table, work, i, f)
        if value < usd:
            usd = value
            pick(work, i, f, -1, -1, share, 0.0, 0.0)
    for one in range(1, order.shape[0]):
        f = order[one]
        if work.fixed[f] + work.fixed[order[0]] + least >= usd:
            break
        for two in range(one):
            g = order[two]
            if work.fixed[f] + work.fixed[g] + least >= usd:
                break
            work.counts[LOOKS] += 1
            value, a, b = mixed(table, work, i, f, g)
            if value < usd:
                usd = value
                pick(work, i, f, g, -1, a, b, 0.0)
            if full:
                usd = third(table, work, i, one, two, usd, least)
    return usd


@lean_part
def with_one(table: TollTable, work: TollWork, i: int, f: int, usd: float, least: float) -> float:
    """Return what a type pays at least on routes with one candidate, `usd` at most."""
    order = work.order[i]
    value, _ = alone(table, work, i, f)
    usd = min(usd, value)
    others, count = work.fixed[f], 0
    for place in range(order.shape[0]):
        g = order[place]
        if g == f:
            continue
        if count < 2:
            others += work.fixed[g]
            count += 1
        if work.fixed[f] + work.fixed[g] + least >= usd:
            break
        value, _, _ = mixed(table, work, i, f, g)
        usd = min(usd, value)
    # Any three cost at least as much as with the two that are cheapest to be placed at. Where the loop
    # ended before it met two, two of them alone are too dear.
    return min(usd, others + least) if count == 2 else usd


@lean_part
def serve(table: TollTable, tolls: Tolls, work: TollWork, i: int, opened: int, full: bool) -> float:
    """Find a type's cheapest routes; return what it pays. A `full` look remembers routes over three."""
    price(table, tolls, work, i, opened)
    if full or work.counts[PASSES] % _REFRESH == 0:
        lift(table, work.part, i, work.lifts[i])
    least = lower(table, work, i)
    before = known(table, work, i)
    usd = cheapest(table, work, i, before, least, full)
    if full and usd < before and work.picks[i, 2] >= 0:
        place = work.pooled[i] % POOL
        work.pooled[i] += 1
        for side in range(3):
            work.pool[i, place, side] = work.picks[i, side]
            work.pool_parts[i, place, side] = work.parts[i, side]
    return usd


@lean_part
def spare_of(
    table: TollTable, tolls: Tolls, work: TollWork, i: int, opened: int, usd: float
) -> None:
    """Add what tolls of a type could be lowered by; right after `serve`."""
    more = 1.0 + tolls.totals[0] / table.limits[BUDGET]
    least = lower(table, work, i)
    for f in range(opened, table.rent.shape[0]):
        toll = tolls.placed[i, f] * more
        if toll > 0.0:
            value = with_one(table, work, i, f, usd + toll, least)
            work.spare[f] += max(0.0, min(toll, value - usd))
