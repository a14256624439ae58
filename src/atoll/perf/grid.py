"""Rising values on a grid: where they cross zero, and what they are between its points."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atoll.perf.operators import Array


def last_below(rows: Array) -> Array:
    """Return along the last axis, where values rise, the fractional index at which they reach zero.

    0 where the first entry is above zero already, the last index where none is.
    """
    last = rows.shape[-1] - 1
    below = np.count_nonzero(rows <= 0.0, axis=-1)
    left = np.minimum(np.maximum(below - 1, 0), max(0, last - 1))
    low = np.take_along_axis(rows, left[..., None], axis=-1)[..., 0]
    high = np.take_along_axis(rows, np.minimum(left + 1, last)[..., None], axis=-1)[..., 0]
    with np.errstate(divide="ignore", invalid="ignore"):
        inside = left + np.where(high > low, -low / (high - low), 0.0)
    return np.where(below == 0, 0.0, np.where(below > last, float(last), inside))


def value_at(rows: Array, index: NDArray[np.int64], share: Array) -> Array:
    """Return values at the fractional index `index + share` along the last axis."""
    if rows.shape[-1] == 1:
        return np.broadcast_to(rows[..., 0], index.shape).copy()
    if rows.ndim == 1:
        return np.asarray(rows[index] * (1.0 - share) + rows[index + 1] * share)
    low = np.take_along_axis(rows, index[..., None], axis=-1)[..., 0]
    high = np.take_along_axis(rows, index[..., None] + 1, axis=-1)[..., 0]
    return np.asarray(low * (1.0 - share) + high * share)
