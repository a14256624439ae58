"""A lower bound on the joint problem from tolls: what each type pays of the rent of what it uses (numba).

The rent of a candidate (a pair in a configuration) is split into tolls: one for each type that is placed
there, one for its FLOP/s and one for its memory. With budget and storage priced too, types are independent:
each takes the routes that are cheapest with tolls (`toll_routes`), and the sum of what they pay is at most
the cost of any answer, whatever is open. Routes over three candidates are many, so passes look only at those
met before, and only the last pass, the one that counts, looks at all.

The best tolls are looked for by projected subgradient steps: where types use a candidate together, those
that use it pay more and the others less, such that its tolls remain its rent. What is open already costs
its rent and no toll. Afterwards `spare[f]` is what opening f adds to the bound at least: tolls that could be
lowered without any type changing its mind.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from atoll.core.compiling import entry, lean_part
from atoll.solve.joint.joint_problem import Floats
from research.joint.exact.toll_routes import (
    BOUND,
    BUDGET,
    PASSES,
    STOCK,
    STORAGE,
    TABLE_TYPE,
    TOLLS_TYPE,
    WORK_TYPE,
    Tolls,
    TollTable,
    TollWork,
    serve,
    spare_of,
    work_of,
)

COMPILED_AS = "the bound on the choice of models"
_KEEP, _TAKE = 0.6, 0.4
"""A direction is so much of the last one and so much of the new one."""
_PATIENCE, _SLOWER, _SLOWEST = 8, 0.6, 0.02
"""After so many passes without gain steps shrink by this factor, down to this one."""
_GAIN = 3e-4
"""What counts as gain, as a share of the bound."""
_ROUNDS, _LONGER = 4, 60
"""Rounds that end in a look at all routes over three, and passes that these may add."""


@lean_part
def count_use(
    table: TollTable, tolls: Tolls, work: TollWork, i: int, opened: int
) -> tuple[float, float]:
    """Enter a type's routes; return the GB that it stores and the rent that it pays in tolls."""
    stored, paid = 0.0, 0.0
    for side in range(3):
        f, share = work.picks[i, side], work.parts[i, side]
        if f < 0:
            continue
        load, cache = table.load[i, f] * share, table.cache[i, f] * share
        work.use_load[f] += load
        work.use_cache[f] += cache
        stored += table.keep[f] + table.data[i] * share
        if f >= opened:
            work.often[i, f] += 1.0
            work.way[i, f] += _TAKE
            paid += tolls.placed[i, f] + tolls.load[f] * load + tolls.cache[f] * cache
    return stored, paid


@lean_part
def weigh(
    table: TollTable, tolls: Tolls, work: TollWork, opened: int, full: bool, last: bool
) -> float:
    """Return the bound at these tolls (if `full`), and write the direction in which it grows."""
    types, number = table.load.shape
    rent = 0.0
    for f in range(number):
        work.use_load[f] = -1.0 if f < opened else 0.0
        work.use_cache[f] = -1.0 if f < opened else 0.0
        work.spare[f] = 0.0
        if f < opened:
            rent += table.rent[f]
        for i in range(types):
            work.way[i, f] *= _KEEP
    more = 1.0 + tolls.totals[0] / table.limits[BUDGET]
    bound = rent * more - tolls.totals[0] - tolls.totals[1]
    stored, paid = 0.0, rent
    for i in range(types):
        usd = serve(table, tolls, work, i, opened, full)
        bound += usd
        if last:
            spare_of(table, tolls, work, i, opened, usd)
        gb, toll = count_use(table, tolls, work, i, opened)
        stored += gb
        paid += toll
    for f in range(opened):
        bound -= tolls.load[f] + tolls.cache[f]
    paid += table.limits[STOCK] * stored
    for f in range(number):
        work.way_load[f] = _KEEP * work.way_load[f] + _TAKE * work.use_load[f]
        work.way_cache[f] = _KEEP * work.way_cache[f] + _TAKE * work.use_cache[f]
    over, full_up = paid / table.limits[BUDGET] - 1.0, stored / table.limits[STORAGE] - 1.0
    work.way_totals[0] = _KEEP * work.way_totals[0] + _TAKE * over
    work.way_totals[1] = _KEEP * work.way_totals[1] + _TAKE * full_up
    work.counts[PASSES] += 1
    return float(bound)


@lean_part
def inward(value: float, way: float) -> float:
    """Return a direction, 0 where it would lead below 0."""
    return 0.0 if value <= 0.0 and way < 0.0 else way


@lean_part
def length_of(tolls: Tolls, work: TollWork, opened: int) -> float:
    """Return the square of the direction's length, along the tolls' sums; drop what leads below 0."""
    types, number = work.way.shape
    square = 0.0
    for f in range(opened):
        work.way_load[f] = inward(tolls.load[f], work.way_load[f])
        work.way_cache[f] = inward(tolls.cache[f], work.way_cache[f])
        square += work.way_load[f] ** 2 + work.way_cache[f] ** 2
    for f in range(opened, number):
        total = work.way_load[f] + work.way_cache[f]
        square += work.way_load[f] ** 2 + work.way_cache[f] ** 2
        count = 2
        for i in range(types):
            if work.way[i, f] < 1e-4:
                work.way[i, f] = 0.0
            if tolls.placed[i, f] > 0.0 or work.way[i, f] > 0.0:
                count += 1
            total += work.way[i, f]
            square += work.way[i, f] ** 2
        square -= total * total / count
    for side in range(2):
        work.way_totals[side] = inward(tolls.totals[side], work.way_totals[side])
        square += work.way_totals[side] ** 2
    return square


@lean_part
def project(split: Floats, scratch: Floats, total: float) -> None:
    """Write the nearest numbers that are not negative and have this sum."""
    for a in range(split.shape[0]):
        b = a
        while b > 0 and scratch[b - 1] < split[a]:
            scratch[b] = scratch[b - 1]
            b -= 1
        scratch[b] = split[a]
    so_far, less = 0.0, 0.0
    for a in range(split.shape[0]):
        so_far += scratch[a]
        cut = (so_far - total) / (a + 1)
        if scratch[a] <= cut:
            break
        less = cut
    for a in range(split.shape[0]):
        split[a] = max(0.0, split[a] - less)


@lean_part
def move_tolls(table: TollTable, tolls: Tolls, work: TollWork, opened: int, step: float) -> None:
    """Take one step."""
    types, number = work.way.shape
    for f in range(opened):
        tolls.load[f] = max(0.0, tolls.load[f] + step * work.way_load[f])
        tolls.cache[f] = max(0.0, tolls.cache[f] + step * work.way_cache[f])
    for f in range(opened, number):
        total = work.way_load[f] + work.way_cache[f]
        for i in range(types):
            total += work.way[i, f]
        if total <= 1e-4:
            continue
        for i in range(types):
            work.split[i] = tolls.placed[i, f] + step * work.way[i, f]
        work.split[types] = tolls.load[f] + step * work.way_load[f]
        work.split[types + 1] = tolls.cache[f] + step * work.way_cache[f]
        project(work.split, work.sorted, table.rent[f])
        for i in range(types):
            tolls.placed[i, f] = work.split[i]
        tolls.load[f] = work.split[types]
        tolls.cache[f] = work.split[types + 1]
    for side in range(2):
        tolls.totals[side] = max(0.0, tolls.totals[side] + step * work.way_totals[side])


@lean_part
def copy_tolls(source: Tolls, target: Tolls) -> None:
    """Write some tolls over others."""
    types, number = source.placed.shape
    for f in range(number):
        target.load[f] = source.load[f]
        target.cache[f] = source.cache[f]
        for i in range(types):
            target.placed[i, f] = source.placed[i, f]
    for side in range(2):
        target.totals[side] = source.totals[side]


@lean_part
def stand_still(work: TollWork) -> None:
    """Forget the direction."""
    types, number = work.way.shape
    for f in range(number):
        work.way_load[f] = 0.0
        work.way_cache[f] = 0.0
        for i in range(types):
            work.way[i, f] = 0.0
    work.way_totals[0] = 0.0
    work.way_totals[1] = 0.0


@lean_part
def climb(
    table: TollTable,
    tolls: Tolls,
    best: Tolls,
    work: TollWork,
    opened: int,
    cut: float,
    target: float,
    end: int,
    rate: float,
) -> float:
    """Make passes until `end` of them, or none gains, or the bound is `cut`; return the bound, loosely.

    The bound leaves out routes over three that were not met. The tolls are the best of these passes.
    """
    most, idle = -np.inf, 0
    while work.counts[PASSES] < end and rate >= _SLOWEST:
        value = weigh(table, tolls, work, opened, False, False)
        idle = 0 if value > most + _GAIN * abs(most) or most == -np.inf else idle + 1
        if value > most:
            most = value
            copy_tolls(tolls, best)
        if most >= cut:
            break
        if idle >= _PATIENCE:
            rate *= _SLOWER
            idle = 0
            copy_tolls(best, tolls)
            stand_still(work)
            continue
        square = length_of(tolls, work, opened)
        if square < 1e-12:
            break
        move_tolls(table, tolls, work, opened, rate * (target - value) / square)
    copy_tolls(best, tolls)
    return most


@lean_part
def rise(
    table: TollTable,
    tolls: Tolls,
    best: Tolls,
    work: TollWork,
    opened: int,
    cut: float,
    target: float,
    passes: int,
    rate: float,
) -> float:
    """Return the best bound found, with its tolls and what they have to spare."""
    copy_tolls(tolls, best)
    end = passes
    for attempt in range(_ROUNDS):
        loose = climb(table, tolls, best, work, opened, cut, target, end, rate)
        true = weigh(table, tolls, work, opened, True, False)
        if true >= cut or true >= loose - 1e-4 * abs(loose):
            break
        # Routes over three that were not known: once more, with them.
        stand_still(work)
        end = min(max(end, work.counts[PASSES] + _LONGER // _ROUNDS), passes + _LONGER)
        rate = min(rate, 0.2) if attempt else 0.5 * rate
    return weigh(table, tolls, work, opened, True, True)


@entry(
    f"({TABLE_TYPE}, {TOLLS_TYPE}, {TOLLS_TYPE}, {WORK_TYPE}, int64, float64, float64, int64, float64)"
)
def _raise_tolls(
    table: tuple[Any, ...],
    tolls: tuple[Any, ...],
    best: tuple[Any, ...],
    work: tuple[Any, ...],
    opened: int,
    cut: float,
    target: float,
    passes: int,
    rate: float,
) -> None:
    memory = TollWork(*work)
    memory.result[BOUND] = rise(
        TollTable(*table), Tolls(*tolls), Tolls(*best), memory, opened, cut, target, passes, rate
    )


def raise_tolls(
    table: TollTable,
    tolls: Tolls,
    *,
    opened: int,
    cut: float,
    target: float,
    passes: int,
    rate: float,
) -> tuple[float, TollWork]:
    """Improve tolls in place; return the bound that they prove, USD, and what else was found.

    The first `opened` candidates are open. Stops at a bound of `cut`; steps aim at `target`, finite and
    above any bound; `passes` is how many are made, about, and `rate` the first step's length (1 at most).
    """
    work = work_of(table, tolls)
    best = Tolls(*(each.copy() for each in tolls))
    _raise_tolls(
        tuple(table), tuple(tolls), tuple(best), tuple(work), opened, cut, target, passes, rate
    )
    return float(work.result[BOUND]), work
