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

from collections.abc import Callable
from typing import TypeVar, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

F = TypeVar("F", bound=Callable[..., object])
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Weights = NDArray[np.int32]


def compile_typed(function: F) -> F:
    """Compile with numba, keeping the types."""
    return cast(F, njit(cache=True)(function))


@compile_typed
def cheapest_by_weight(
    cost: Floats, weight: Weights, region: Weights, regions: int, width: int
) -> Floats:
    """Return the cheapest pair of each weight below `width`, per region (`regions` = 1: over all)."""
    best = np.full((regions, width), np.inf)
    for i in range(len(cost)):
        row = region[i] if regions > 1 else 0
        if cost[i] < best[row, weight[i]]:
            best[row, weight[i]] = cost[i]
    return best


@compile_typed
def closure(best: Floats) -> tuple[Floats, Ints, Floats]:
    """Return K over items `best[w]` used any number of times, and the items K is made of."""
    width = len(best)
    value = np.zeros(width)
    tail = np.empty(width)
    low = np.inf
    for d in range(width - 1, 0, -1):
        low = min(low, best[d])
        tail[d] = low
    items_w = np.empty(width, np.int64)
    items_c = np.empty(width)
    known = 0
    for d in range(1, width):
        least = np.inf
        for i in range(known):
            candidate = items_c[i] + value[d - items_w[i]]
            if candidate < least:
                least = candidate
        # An item that smaller ones match, or a larger one undercuts, need never be tried.
        if best[d] < least and best[d] <= tail[d]:
            items_w[known] = d
            items_c[known] = best[d]
            known += 1
        value[d] = min(least, tail[d])
    return value, items_w[:known].copy(), items_c[:known].copy()


@compile_typed
def cheapest_cover(cost: Floats, weight: Weights, width: int) -> tuple[float, Ints]:
    """Return K of the whole demand (`width` - 1 steps) and the items, repeated, that it is made of."""
    least = np.full(width, np.inf)
    which = np.full(width, -1, np.int64)
    for i in range(len(cost)):
        if cost[i] < least[weight[i]]:
            least[weight[i]] = cost[i]
            which[weight[i]] = i
    value, item_w, item_c = closure(least)
    picks = np.empty(width, np.int64)
    number, d = 0, width - 1
    while d > 0:
        # Either one item covers all that is left, or one of the items K is made of leads to the rest.
        take = -1
        for w in range(d, width):
            if least[w] <= value[d]:
                take = w
                break
        if take < 0:
            for i in range(len(item_w)):
                if item_w[i] <= d and item_c[i] + value[d - item_w[i]] <= value[d]:
                    take = item_w[i]
                    break
        if take < 0:
            break
        picks[number] = which[take]
        number += 1
        d = max(0, d - take)
    return value[width - 1], picks[:number].copy()


@compile_typed
def _use_up_to(own: Floats, before: Floats, weight: int, cost: float, number: int) -> None:
    """Allow up to `number` uses of one item on top of `before` or `own`, in place."""
    width = len(own)
    for _ in range(number):
        for d in range(width - 1, -1, -1):
            rest = max(0, d - weight)
            value = cost + min(before[rest], own[rest])
            if value < own[d]:
                own[d] = value


@compile_typed
def _use_any(own: Floats, before: Floats, tail: Floats, item_w: Ints, item_c: Floats) -> None:
    """Allow any number of uses of items on top of `before` or `own`, in place; one item costs `tail`."""
    for d in range(len(own)):
        value = min(own[d], tail[d] + before[0])
        for i in range(len(item_w)):
            rest = d - item_w[i]
            if rest < 0:
                break
            candidate = item_c[i] + min(before[rest], own[rest])
            if candidate < value:
                value = candidate
        own[d] = value


@compile_typed
def _fall(values: Floats) -> Floats:
    """The least of each value and all after it: what covers more covers less."""
    out = values.copy()
    for d in range(len(out) - 2, -1, -1):
        out[d] = min(out[d], out[d + 1])
    return out


@compile_typed
def cover(
    best: Floats, spread: int, group: Ints, weight: Weights, cost: Floats, number: Ints
) -> Floats:
    """Return K[j, d]: the cheapest cover of d that stands in at least j regions, for j = 0..spread.

    `best[g, w]` is the cheapest item of weight w in region g, to be used any number of times; items of
    `group, weight, cost` can be used `number` times.
    """
    regions, width = best.shape
    table = np.full((spread + 1, width), np.inf)
    table[0, 0] = 0.0
    for g in range(regions):
        _, item_w, item_c = closure(best[g])
        tail = _fall(best[g])
        fresh = table.copy()
        for j in range(1, spread + 1):
            before = np.minimum(table[j - 1], table[j]) if j == spread else table[j - 1]
            own = np.full(width, np.inf)
            for i in range(len(group)):
                if group[i] == g:
                    _use_up_to(own, before, weight[i], cost[i], number[i])
            _use_any(own, before, tail, item_w, item_c)
            fresh[j] = np.minimum(fresh[j], own)
        table = fresh
    # Standing in more regions than asked is allowed too.
    for j in range(spread, -1, -1):
        if j < spread:
            table[j] = np.minimum(table[j], table[j + 1])
        table[j] = _fall(table[j])
    return table
