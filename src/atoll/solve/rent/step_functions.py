"""Cost as a function of how much is served: step functions, added and split between two ways (numba).

A function is a list of points (level, value), both rising: to serve d costs the value of the first point
whose level is at least d. Levels are whole numbers of steps of 1/`grid` of a demand, of 1/GRID where nothing
else is said.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from atoll.core.compiling import entry
from atoll.solve.array_types import Floats, Ints, Small

COMPILED_AS = "the allocator"
GRID = 32768
MAX = 2000
"""Points of a function beyond which neighbours are joined; the error is 1/MAX of its largest value."""

_STEP_TOLERANCE = 1e-9
"""Steps of the grid that rounding may add to or take from a share."""


@dataclass(frozen=True)
class StepFunction:
    """Points of a function; `first` and `second` say which points of two others each was combined from."""

    level: Ints
    value: Floats
    first: Ints
    second: Ints

    def at(self, level: int) -> float:
        """Return what serving `level` costs, inf if it cannot be."""
        place = int(np.searchsorted(self.level, level))
        return float(self.value[place]) if place < len(self.level) else np.inf

    def dense(self, grid: int = GRID) -> Floats:
        """Return the values at all levels."""
        out = np.full(grid + 1, np.inf)
        place = np.searchsorted(self.level, np.arange(grid + 1))
        known = place < len(self.level)
        out[known] = self.value[place[known]]
        return out


_NOTHING = np.zeros(1, np.int64)
EMPTY = StepFunction(np.zeros(1, np.int64), np.zeros(1), _NOTHING, _NOTHING)
"""Serves nothing, for nothing."""


def round_shares(share: Floats, grid: int = GRID) -> tuple[Small, Small]:
    """Return shares of a demand in steps, rounded up (all of it at most) and rounded down."""
    up, down = np.empty(len(share), np.int32), np.empty(len(share), np.int32)
    _round_shares(share, grid, up, down)
    return up, down


@entry("(float64[::1], int64, int32[::1], int32[::1])")
def _round_shares(share: Floats, grid: int, up: Small, down: Small) -> None:
    for i in range(len(share)):
        steps = share[i] * grid
        up[i] = min(np.ceil(steps - _STEP_TOLERANCE), grid)
        down[i] = np.floor(steps + _STEP_TOLERANCE)


@entry("(float64[::1], int32[::1], int32[::1], float64[::1], float64[::1])")
def cheapest_rate(
    cost: Floats, pattern: Small, weight: Small, share: Floats, best: Floats
) -> float:
    """Write the cheapest item of each weight to `best`; return the best price for all of the demand.

    Weights and shares are those of patterns.
    """
    rate = np.inf
    for i in range(len(cost)):
        p = pattern[i]
        if cost[i] < best[weight[p]]:
            best[weight[p]] = cost[i]
        rate = min(rate, cost[i] / share[p])
    return rate


def steps_of(dense: Floats, *, lower: bool) -> StepFunction:
    """Return the points of a function given at all levels; joined ones are rounded down if `lower`."""
    level, value = np.empty(len(dense), np.int64), np.empty(len(dense))
    number = _points(dense, level, value)
    level, value = level[:number], value[:number]
    # About `MAX` points stay at most: those joined differ by that part of the largest value at most.
    if number > MAX:
        kept = _join(level, value, float(value[-1]) / MAX, lower)
        level, value = level[:kept], value[:kept]
    nothing = np.zeros(len(level), np.int64)
    return StepFunction(level.copy(), value.copy(), nothing, nothing)


@entry("(float64[::1], int64[::1], float64[::1])")
def _points(dense: Floats, level: Ints, value: Floats) -> int:
    number, last = 0, len(dense) - 1
    for d in range(last + 1):
        if dense[d] == np.inf:
            break
        # Only the last level of a plateau: less costs the same.
        if d == last or dense[d + 1] > dense[d]:
            level[number] = d
            value[number] = dense[d]
            number += 1
    return number


@entry("(int64[::1], float64[::1], float64, boolean)")
def _join(level: Ints, value: Floats, tolerance: float, lower: bool) -> int:
    """Join neighbours within `tolerance` of each other, in place; the first and last levels stay."""
    kept, i = 1, 1
    while i < len(level):
        j = i
        while j + 1 < len(level) and value[j + 1] - value[i] <= tolerance:
            j += 1
        level[kept] = level[j]
        # Down keeps a bound a bound, up keeps what covers true.
        value[kept] = value[i] if lower else value[j]
        kept += 1
        i = j + 1
    return kept


def combine(a: StepFunction, b: StepFunction, *, lower: bool, grid: int = GRID) -> StepFunction:
    """Return the least cost of serving d by the two together, each any part of it."""
    best = np.full(grid + 1, np.inf)
    first, second = np.zeros(grid + 1, np.int64), np.zeros(grid + 1, np.int64)
    level, value = np.empty(grid + 1, np.int64), np.empty(grid + 1)
    number = _combine(a.level, a.value, b.level, b.value, best, first, second, level, value)
    level, value = level[:number].copy(), value[:number].copy()
    if number > MAX:
        kept = _join(level, value, float(value[-1]) / MAX, lower)
        level, value = level[:kept], value[:kept]
    return StepFunction(level, value, first[level], second[level])


@entry(
    "(int64[::1], float64[::1], int64[::1], float64[::1], float64[::1], int64[::1], int64[::1],"
    " int64[::1], float64[::1])"
)
def _combine(
    level_a: Ints,
    value_a: Floats,
    level_b: Ints,
    value_b: Floats,
    best: Floats,
    first: Ints,
    second: Ints,
    level: Ints,
    value: Floats,
) -> int:
    last = len(best) - 1
    for i in range(len(level_a)):
        for j in range(len(level_b)):
            d = level_a[i] + level_b[j]
            if d > last:
                d = last
            v = value_a[i] + value_b[j]
            if v < best[d]:
                best[d] = v
                first[d] = i
                second[d] = j
            if d == last:
                break
    # A point that a higher one undercuts is none.
    low = np.inf
    for d in range(last, -1, -1):
        if best[d] < low:
            low = best[d]
        else:
            best[d] = np.inf
    number = 0
    for d in range(last + 1):
        if best[d] < np.inf:
            level[number] = d
            value[number] = best[d]
            number += 1
    return number


def min_with(table: Floats, rest: Floats, weight: Ints) -> Floats:
    """Return per weight w the least of table[a - w] + rest[a] over all levels a, or a little less."""
    out = np.empty(len(weight))
    width = 16
    blocks = -(-len(rest) // width)
    padded = np.full(blocks * width, np.inf)
    padded[: len(rest)] = rest
    _min_with(table, padded.reshape(blocks, width).min(axis=1), width, weight, out)
    return out


@entry("(float64[::1], float64[::1], int64, int64[::1], float64[::1])")
def _min_with(table: Floats, rest: Floats, width: int, weight: Ints, out: Floats) -> None:
    for i in range(len(weight)):
        min_value = np.inf
        for block in range(len(rest)):
            a = block * width - weight[i]
            value = rest[block] + (table[a] if a > 0 else 0.0)
            if value < min_value:
                min_value = value
        out[i] = min_value
