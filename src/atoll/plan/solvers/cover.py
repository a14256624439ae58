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
from numba import njit
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Weights = NDArray[np.int32]


@njit(cache=True)
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


@njit(cache=True)
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


@njit(cache=True)
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
        _, items_w, items_c = closure(best[g])
        largest = np.inf
        tail = np.empty(width)
        for d in range(width - 1, -1, -1):
            largest = min(largest, best[g, d])
            tail[d] = largest
        fresh = table.copy()
        for j in range(1, spread + 1):
            before = np.minimum(table[j - 1], table[j]) if j == spread else table[j - 1]
            own = np.full(width, np.inf)
            for i in range(len(group)):
                if group[i] == g:
                    _use_up_to(own, before, weight[i], cost[i], number[i])
            for d in range(width):
                value = min(own[d], tail[d] + before[0])
                for i in range(len(items_w)):
                    rest = d - items_w[i]
                    if rest < 0:
                        break
                    candidate = items_c[i] + min(before[rest], own[rest])
                    if candidate < value:
                        value = candidate
                own[d] = value
            fresh[j] = np.minimum(fresh[j], own)
        table = fresh
    # Standing in more regions than asked is allowed, and so is covering more than d.
    for j in range(spread - 1, -1, -1):
        table[j] = np.minimum(table[j], table[j + 1])
    for j in range(spread + 1):
        for d in range(width - 2, -1, -1):
            table[j, d] = min(table[j, d], table[j, d + 1])
    return table


@njit(cache=True)
def _use_up_to(own: Floats, before: Floats, weight: int, cost: float, number: int) -> None:
    """Allow up to `number` uses of one item on top of `before` or `own`, in place."""
    width = len(own)
    for _ in range(number):
        for d in range(width - 1, -1, -1):
            rest = max(0, d - weight)
            value = cost + min(before[rest], own[rest])
            if value < own[d]:
                own[d] = value
