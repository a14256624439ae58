"""Choices that a request makes once, from its seed."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from hashlib import blake2b
from itertools import accumulate
from math import isfinite

from atoll.core.errors import InputError


def shares_of(n: int, weights: tuple[float, ...] | None) -> list[float]:
    """Return where the shares of n outcomes end, added up; raises InputError for what is no choice."""
    if n < 1:
        raise InputError(f"cannot choose one of {n}", field="n")
    if weights is None:
        return [float(i) for i in range(1, n + 1)]
    if len(weights) != n:
        raise InputError(f"{len(weights)} weights for {n} outcomes", field="weights")
    if not all(isfinite(weight) and weight >= 0 for weight in weights) or sum(weights) <= 0:
        raise InputError("weights are numbers from 0, not all of them 0", field="weights")
    return list(accumulate(map(float, weights)))


def draw(seed: int, number: int, ends: list[float]) -> int:
    """Return the outcome of choice `number` of a request: the same for the same seed, everywhere."""
    digest = blake2b(f"{seed}/{number}".encode(), digest_size=8, person=b"atoll-choose").digest()
    uniform = (int.from_bytes(digest, "big") >> 11) / 2**53
    # The smallest outcome whose share ends after the point: one of weight 0 is never drawn.
    return min(bisect_right(ends, uniform * ends[-1]), bisect_left(ends, ends[-1]))
