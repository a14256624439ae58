"""Random numbers in compiled code (numba), from a state of one word that its caller keeps."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atoll.core.compiling import lean_part

Words = NDArray[np.uint64]


@lean_part
def word(random: Words) -> np.uint64:
    """Step the generator (xorshift64*) and return 64 bits."""
    x = random[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    random[0] = x
    mixed: np.uint64 = x * np.uint64(2685821657736338717)
    return mixed


@lean_part
def below(random: Words, limit: int) -> int:
    """Return a whole number in [0, limit)."""
    scaled = (word(random) >> np.uint64(32)) * np.uint64(limit)
    # `int` would leave it unsigned.
    number: int = np.int64(scaled >> np.uint64(32))  # type: ignore[assignment]
    return number


@lean_part
def unit(random: Words) -> float:
    """Return a number in (0, 1]."""
    return (np.float64(word(random) >> np.uint64(11)) + 1.0) / 9007199254740992.0
