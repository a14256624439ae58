"""Lower bound on the cost of any mix of models at given prices of rows, for each group of choices.

T_w(d) is what serving d steps of way w costs at least (`oracle`). What a group costs at least is the least
sum of T_w over levels that its conditions allow, which is not convex. The best of three bounds counts:

convex   T_w replaced by its convex envelope: one small linear program; its duals say what a level of each
         way is worth, and how much an item would raise the bound.
cover    one choice alone: levels add up to 1 and stay in the ranges that the conditions leave them. Exact
         for two ways, for then these ranges are all that the conditions say.
priced   one choice alone, its error at a price: what ways carry is filled up in order of their errors, so
         that the sum over ways is a shortest path over how much is filled.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll.solve.lp import LinearProgram, Sparse
from atoll.solve.rent.choosing.level_rows import LevelGroup, LevelRows
from atoll.solve.rent.choosing.masters import hull_points
from atoll.solve.rent.service_oracle import Legs, ServiceOracle
from atoll.solve.rent.step_functions import EMPTY, GRID, StepFunction, combine, min_with, steps_of

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_VALUE_TOLERANCE = 1e-7
"""Share of a linear program's value that rounding may have added."""
_PRICED_POINTS = 3000
"""Points of all ways of a choice up to which the priced bound is taken."""


@dataclass(frozen=True)
class Certificate:
    """Why a group costs `value` at least: with way w at level d it costs T_w(d) + `rest`[w](d) at least.

    Unless it is `absolute`, a constant is left out of `rest`, that which makes the least of it `value`.
    """

    value: float
    rest: dict[int, Floats]
    absolute: bool = False


@dataclass(frozen=True)
class GroupBound:
    """The least that a group of choices costs, why, at which levels, and what errors are worth there."""

    value: float
    certificates: tuple[Certificate, ...]
    levels: dict[int, float]
    worth: dict[int, float]
    error_usd: dict[int, float]

    @property
    def convex(self) -> float:
        """Bound that convex envelopes alone prove."""
        return self.certificates[0].value if self.certificates else self.value


def bound_group(rows: LevelRows, group: LevelGroup, legs: dict[int, Legs]) -> GroupBound:
    """Return the bound of a group at some prices, given the functions of its ways there."""
    dense = {way: legs[way].total.dense() for way in group.ways}
    convex = _convex(rows, group, dense, rows.ranges)
    if convex is None:
        return GroupBound(np.inf, (), {}, {}, {})
    certificates, value, levels = list(convex.certificates), convex.value, convex.levels
    if len(group.members) == 1:
        cover, covered = _cover(rows, group, dense)
        certificates.append(cover)
        if cover.value >= value:
            value, levels = cover.value, covered or levels
        mu = convex.error_usd.get(group.members[0], 0.0)
        if mu > 0.0 and len(group.ways) > 2:
            value = max(value, _priced(rows, group, dense, mu))
    return GroupBound(value, tuple(certificates), levels, convex.worth, convex.error_usd)


def slacks_of(
    oracle: ServiceOracle, legs: Legs, way: int, bound: GroupBound, limits: tuple[float, float]
) -> Floats:
    """Return by how much each item of a way, once used, raises the bound of its group at least.

    Taking the item away leaves at least what is served less what it carries, and what of it is lent.
    """
    items = np.arange(len(oracle.items))
    weight, back = np.unique(oracle.steps_up(items), return_inverse=True)
    dense = legs.total.dense()
    outside = _outside(limits)
    out = np.full(len(items), -np.inf)
    for why in bound.certificates:
        rest = np.where(outside, np.inf, why.rest[way])
        min_slack = float((dense + rest).min())
        if not np.isfinite(min_slack):
            continue
        with_it = min_with(dense, np.ascontiguousarray(rest), weight.astype(np.int64))
        constant = 0.0 if why.absolute else why.value - min_slack
        raised = constant + legs.cost[items] + with_it[back]
        out = np.maximum(out, raised - legs.lent - bound.value)
    return np.asarray(np.maximum(0.0, out))


def _outside(limits: tuple[float, float]) -> NDArray[np.bool_]:
    """Levels in steps that a way is never at."""
    first, last = int(np.floor(limits[0] * GRID + 1e-9)), int(np.ceil(limits[1] * GRID - 1e-9))
    steps = np.arange(GRID + 1)
    return (steps < first) | (steps > last)


def error_prices(rows: LevelRows, group: LevelGroup, legs: dict[int, Legs]) -> dict[int, float]:
    """Return by choice what one more unit of mean error saves at some prices, USD per hour.

    Ranges of levels would hide it: where they say all that the error allows, it has no price of its own.
    """
    dense = {way: legs[way].total.dense() for way in group.ways}
    wide = {way: (0.0, 0.0 if way in rows.closed else 1.0) for way in group.ways}
    found = _convex(rows, group, dense, wide)
    return {} if found is None else found.error_usd


def _convex(
    rows: LevelRows,
    group: LevelGroup,
    dense: dict[int, Floats],
    ranges: dict[int, tuple[float, float]],
) -> GroupBound | None:
    """The bound of convex envelopes: points of each, and levels not above what they carry."""
    lp = LinearProgram()
    nothing = np.zeros(0, np.int64)
    ways = group.ways
    level_row = lp.add_rows(
        np.zeros(len(ways)),
        np.full(len(ways), np.inf),
        Sparse.of(nothing, nothing, np.zeros(0), len(ways)),
    )
    one_row = lp.add_rows(
        np.ones(len(ways)), np.ones(len(ways)), Sparse.of(nothing, nothing, np.zeros(0), len(ways))
    )
    place = {way: i for i, way in enumerate(ways)}
    each = np.arange(len(ways))
    low = np.array([ranges[way][0] for way in ways])
    high = np.array([0.0 if way in rows.closed else ranges[way][1] for way in ways])
    lp.add_columns(
        np.zeros(len(ways)),
        low,
        np.maximum(low, high),
        Sparse.of(each, level_row + each, -np.ones(len(ways)), len(ways)),
    )
    error_row: dict[int, int] = {}
    for c in group.members:
        for lower, upper, terms in rows.list_rows([c]):
            at = np.array([place[way] for way, _ in terms], np.int64)
            entries = Sparse.of(np.zeros(len(at), np.int64), at, np.array([v for _, v in terms]), 1)
            row = lp.add_rows(np.array([lower]), np.array([upper]), entries)
            if lower == -np.inf:
                error_row[c] = row
    for i, way in enumerate(ways):
        x, y = hull_points(dense[way], *ranges[way])
        number = len(x)
        owner = np.repeat(np.arange(number), 2)
        at = np.tile(np.array([level_row + i, one_row + i]), number)
        value = np.column_stack([x, np.ones(number)]).ravel()
        lp.add_columns(
            y, np.zeros(number), np.full(number, np.inf), Sparse.of(owner, at, value, number)
        )
    found = lp.solve()
    if found.status != "optimal":
        return None
    worth = {way: max(0.0, float(found.duals[level_row + i])) for i, way in enumerate(ways)}
    steps = np.arange(GRID + 1) / GRID
    proven = float(found.objective - _VALUE_TOLERANCE * abs(found.objective))
    return GroupBound(
        proven,
        (Certificate(proven, {way: -worth[way] * steps for way in ways}),),
        {way: float(found.values[i]) for i, way in enumerate(ways)},
        worth,
        {c: max(0.0, -float(found.duals[row])) for c, row in error_row.items()},
    )


def _within(rows: LevelRows, way: int, dense: Floats) -> StepFunction:
    """The points of a way's function in its range; below it, what its least level costs."""
    low, high = rows.ranges[way]
    first, last = int(np.floor(low * GRID + 1e-9)), int(np.ceil(high * GRID - 1e-9))
    inside = dense.copy()
    inside[:first] = dense[first]
    inside[last + 1 :] = np.inf
    return steps_of(inside, lower=True)


def _cover(
    rows: LevelRows, group: LevelGroup, dense: dict[int, Floats]
) -> tuple[Certificate, dict[int, float]]:
    """The bound of levels that add up to 1 in their ranges, and the levels where it is reached."""
    ways = group.ways
    functions = [_within(rows, way, dense[way]) for way in ways]
    before: list[StepFunction] = [EMPTY]
    for function in functions[:-1]:
        before.append(combine(before[-1], function, lower=True))
    after: list[StepFunction] = [EMPTY]
    for function in functions[:0:-1]:
        after.append(combine(after[-1], function, lower=True))
    after.reverse()
    rest = {}
    for i, way in enumerate(ways):
        others = combine(before[i], after[i], lower=True)
        rest[way] = np.ascontiguousarray(others.dense()[::-1])
    total = combine(before[-1], functions[-1], lower=True)
    value = total.at(GRID)
    if not np.isfinite(value):
        return Certificate(np.inf, rest, absolute=True), {}
    last = len(ways) - 1
    levels: dict[int, float] = {}
    point = int(np.searchsorted(total.level, GRID))
    for i in range(last, -1, -1):
        whole = total if i == last else before[i + 1]
        levels[ways[i]] = float(functions[i].level[whole.second[point]]) / GRID
        point = int(whole.first[point])
    return Certificate(value, rest, absolute=True), levels


def _priced(rows: LevelRows, group: LevelGroup, dense: dict[int, Floats], mu: float) -> float:
    """The bound of one choice with its error at a price per unit."""
    choice = rows.by_choice[group.members[0]]
    assert choice.max_error is not None
    order = sorted(zip(choice.errors, choice.ways, strict=True))
    functions = [_within(rows, way, dense[way]) for _, way in order]
    if sum(len(function.level) for function in functions) > _PRICED_POINTS:
        return -np.inf
    # best[t]: the least cost where t steps are filled, the ways with the fewest errors first.
    best = np.full(GRID + 1, np.inf)
    best[0] = 0.0
    left = (GRID - np.arange(GRID + 1)) / GRID
    for (error, _), function in zip(order, functions, strict=True):
        after = np.full(GRID + 1, np.inf)
        for level, value in zip(function.level.tolist(), function.value.tolist(), strict=True):
            paid = value + mu * error * level / GRID
            if level < GRID:
                np.minimum(after[level:GRID], best[: GRID - level] + paid, out=after[level:GRID])
            full = best[GRID - level :] + value + mu * error * left[GRID - level :]
            after[GRID] = min(after[GRID], float(full.min()))
        best = after
    return float(best[GRID]) - mu * choice.max_error
