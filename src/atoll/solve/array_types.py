"""Names for the arrays that solvers work on, by the type of their elements."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Small = NDArray[np.int32]
"""Indices and counts of arrays with millions of entries, at half the memory."""
Bools = NDArray[np.bool_]
