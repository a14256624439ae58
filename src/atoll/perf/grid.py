"""Rising values on a grid: where they cross zero, and what they are between its points."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from atoll.perf.operators import Array

Indices = NDArray[np.int64]
OnGrid = Callable[[Indices], Array]
"""Values of many functions on a grid of points, each at an index of its own."""


def last_below(values: OnGrid, shape: tuple[int, ...], size: int) -> Array:
    """Return the fractional index at which values that rise along a grid of `size` points reach zero.

    0 where they are above zero at the first point already, the last index where they never are. Values are
    looked up by bisection: at few points of the grid.
    """
    last = size - 1
    below = np.full(shape, -1, dtype=np.int64)
    above = np.full(shape, size, dtype=np.int64)
    for _ in range(size.bit_length()):
        middle = (below + above) >> 1
        # Where the two have met, middle is `below` and stays so.
        low = (values(np.maximum(middle, 0)) <= 0.0) & (middle >= 0)
        below = np.where(low, middle, below)
        above = np.where(low | (middle == below), above, middle)
    left = np.minimum(np.maximum(below, 0), max(0, last - 1))
    first, second = values(left), values(np.minimum(left + 1, last))
    with np.errstate(divide="ignore", invalid="ignore"):
        inside = left + np.where(second > first, -first / (second - first), 0.0)
    return np.where(below < 0, 0.0, np.where(below >= last, float(last), inside))


def value_at(values: OnGrid, index: Indices, share: Array, size: int) -> Array:
    """Return values at the fractional index `index + share`, linear between the points of the grid."""
    if size == 1:
        return values(index)
    return np.asarray(values(index) * (1.0 - share) + values(index + 1) * share)
