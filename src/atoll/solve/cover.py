"""Covering the demand of one role with whole instances, cheaply (numba).

Notation. A role has demand D and templates t of throughput T_t. On a grid of step delta a template
weighs w_t = ceil(T_t / delta) and the demand G = ceil(D / delta), so every integer cover of D is one of
G: what is found on the grid is never dearer than the truth. With a price per template and region,

    K[d] = min over covers n >= 0 of sum_t c_t n_t   subject to   sum_t w_t n_t >= d

is non-decreasing and subadditive, which makes it two things at once: K[G] is the role's part of a
Lagrangian bound, and sum_t K[w_t] n_t >= K[G] holds for every cover (at whatever prices K was made).
Only the cheapest item of a weight matters to K, so one pass over the templates suffices.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atoll.core.compiling import entry, part

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Weights = NDArray[np.int32]

COMPILED_AS = "the allocator"

# What is written to is made here and handed to compiled code: allocating is slow to compile.


def cheapest_by_weight(
    cost: Floats, weight: Weights, region: Weights, regions: int, width: int
) -> Floats:
    """Return the cheapest pair of each weight below `width`, per region (`regions` = 1: over all)."""
    best = np.full((regions, width), np.inf)
    _cheapest_by_weight(cost, weight, region, best)
    return best


@entry("(float64[::1], int32[::1], int32[::1], float64[:, ::1])")
def _cheapest_by_weight(cost: Floats, weight: Weights, region: Weights, best: Floats) -> None:
    several = len(best) > 1
    for i in range(len(cost)):
        row = region[i] if several else 0
        if cost[i] < best[row, weight[i]]:
            best[row, weight[i]] = cost[i]


def closure(best: Floats, tolerance: float = 0.0) -> tuple[Floats, Ints, Floats]:
    """Return K over items `best[w]` used any number of times, and the items K is made of.

    Items that save less than a share `tolerance` of a cost are used once at most.
    """
    width = len(best)
    value, items_w, items_c = np.zeros(width), np.empty(width, np.int64), np.empty(width)
    known = _close(best, tolerance, np.empty(width), value, items_w, items_c)
    return value, items_w[:known].copy(), items_c[:known].copy()


@part
def _closure(
    best: Floats, tolerance: float, tail: Floats, value: Floats, items_w: Ints, items_c: Floats
) -> int:
    """Write K over items `best` to `value`, the items it is made of to the last two; return their number.

    `tail[d]` becomes the cheapest single item that covers d.
    """
    width = len(best)
    low = np.inf
    for d in range(width - 1, 0, -1):
        low = min(low, best[d])
        tail[d] = low
    value[0] = 0.0
    known = 0
    for d in range(1, width):
        min_cost = np.inf
        for i in range(known):
            candidate = items_c[i] + value[d - items_w[i]]
            if candidate < min_cost:
                min_cost = candidate
        # An item that smaller ones match, or a larger one undercuts, need never be tried.
        if best[d] < min_cost * (1.0 - tolerance) and best[d] <= tail[d]:
            items_w[known] = d
            items_c[known] = best[d]
            known += 1
        value[d] = min(min_cost, tail[d])
    return known


_close = entry("(float64[::1], float64, float64[::1], float64[::1], int64[::1], float64[::1])")(
    _closure
)


def cheapest_cover(cost: Floats, weight: Weights, width: int) -> tuple[float, Ints]:
    """Return K of the whole demand (`width` - 1 steps) and the items, repeated, that it is made of."""
    value, picks = np.zeros(width), np.empty(width, np.int64)
    number = _cheapest_cover(
        cost, weight, np.full(width, np.inf), np.full(width, -1, np.int64), np.empty(width), value,
        np.empty(width, np.int64), np.empty(width), picks,
    )  # fmt: skip
    return float(value[width - 1]), picks[:number].copy()


@entry(
    "(float64[::1], int32[::1], float64[::1], int64[::1], float64[::1], float64[::1],"
    " int64[::1], float64[::1], int64[::1])"
)
def _cheapest_cover(
    cost: Floats,
    weight: Weights,
    least: Floats,
    which: Ints,
    tail: Floats,
    value: Floats,
    item_w: Ints,
    item_c: Floats,
    picks: Ints,
) -> int:
    width = len(least)
    for i in range(len(cost)):
        if cost[i] < least[weight[i]]:
            least[weight[i]] = cost[i]
            which[weight[i]] = i
    known = _closure(least, 0.0, tail, value, item_w, item_c)
    number, d = 0, width - 1
    while d > 0:
        # Either one item covers all that is left, or one of the items K is made of leads to the rest.
        take = -1
        for w in range(d, width):
            if least[w] <= value[d]:
                take = w
                break
        if take < 0:
            for i in range(known):
                if item_w[i] <= d and item_c[i] + value[d - item_w[i]] <= value[d]:
                    take = item_w[i]
                    break
        if take < 0:
            break
        picks[number] = which[take]
        number += 1
        d = max(0, d - take)
    return number


@part
def _use_up_to(own: Floats, before: Floats, weight: int, cost: float, number: int) -> None:
    """Allow up to `number` uses of one item on top of `before` or `own`, in place."""
    width = len(own)
    for _ in range(number):
        # By falling d, so that one pass adds one use at most.
        for d in range(width - 1, -1, -1):
            rest = max(0, d - weight)
            value = cost + min(before[rest], own[rest])
            if value < own[d]:
                own[d] = value


@part
def _use_any(
    own: Floats, before: Floats, tail: Floats, item_w: Ints, item_c: Floats, items: int
) -> None:
    """Allow any number of uses of items on top of `before` or `own`, in place; one item costs `tail`."""
    # By rising d, so that what this reads may hold uses of these items already.
    for d in range(len(own)):
        value = min(own[d], tail[d] + before[0])
        for i in range(items):
            rest = d - item_w[i]
            if rest < 0:
                break
            candidate = item_c[i] + min(before[rest], own[rest])
            if candidate < value:
                value = candidate
        own[d] = value


@part
def _fall(values: Floats) -> None:
    """Make each value the least of itself and all after it: what covers more covers less."""
    for d in range(len(values) - 2, -1, -1):
        values[d] = min(values[d], values[d + 1])


@part
def _copy(source: Floats, to: Floats) -> None:
    """Copy all values."""
    for d in range(len(to)):
        to[d] = source[d]


@part
def _lower(values: Floats, other: Floats) -> None:
    """Make each value the least of itself and the other's."""
    for d in range(len(values)):
        values[d] = min(values[d], other[d])


def cover(
    best: Floats, spread: int, group: Ints, weight: Weights, cost: Floats, number: Ints
) -> Floats:
    """Return K[j, d]: the cheapest cover of d that stands in at least j regions, for j = 0..spread.

    `best[g, w]` is the cheapest item of weight w in region g, to be used any number of times; items of
    `group, weight, cost` can be used `number` times.
    """
    width = best.shape[1]
    table = np.full((spread + 1, width), np.inf)
    table[0, 0] = 0.0
    _cover(
        best, group, weight, cost, number, np.empty((5, width)), np.empty(width, np.int64),
        np.empty_like(table), table,
    )  # fmt: skip
    return table


@entry(
    "(float64[:, ::1], int64[::1], int32[::1], float64[::1], int64[::1], float64[:, ::1],"
    " int64[::1], float64[:, ::1], float64[:, ::1])"
)
def _cover(
    best: Floats,
    group: Ints,
    weight: Weights,
    cost: Floats,
    number: Ints,
    scratch: Floats,
    item_w: Ints,
    fresh: Floats,
    table: Floats,
) -> None:
    regions, width = best.shape
    spread = len(table) - 1
    tail, value, item_c, before, own = scratch[0], scratch[1], scratch[2], scratch[3], scratch[4]
    for g in range(regions):
        items = _closure(best[g], 0.0, tail, value, item_w, item_c)
        _copy(best[g], tail)
        _fall(tail)
        for j in range(1, spread + 1):
            # This region is one more than before; at the last count it may also be any further one.
            _copy(table[j - 1], before)
            if j == spread:
                _lower(before, table[j])
            for d in range(width):
                own[d] = np.inf
            for i in range(len(group)):
                if group[i] == g:
                    _use_up_to(own, before, weight[i], cost[i], number[i])
            _use_any(own, before, tail, item_w, item_c, items)
            # Kept apart until all counts are done: a region counts once.
            _copy(own, fresh[j])
        for j in range(1, spread + 1):
            _lower(table[j], fresh[j])
    # Standing in more regions than asked is allowed too.
    for j in range(spread, -1, -1):
        if j < spread:
            _lower(table[j], table[j + 1])
        _fall(table[j])
