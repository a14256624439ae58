"""Named random streams: each is fixed by (seed, names) alone, whoever asks first."""

from __future__ import annotations

import hashlib

import numpy as np

from atoll.core.errors import UsageError


def stream(seed: int, *names: str) -> np.random.Generator:
    """Return the generator of the stream called `names` under `seed`.

    The same arguments give the same numbers in every run, on every platform and in any order of
    calls; different names give independent streams. Adding a stream never disturbs another.
    """
    if seed < 0:
        raise UsageError(f"a seed must not be negative, got {seed}")
    # Length-prefixed, so that ("ab", "c") and ("a", "bc") are different streams.
    message = b"".join(
        len(part).to_bytes(8, "little") + part
        for part in (str(seed).encode(), *(name.encode() for name in names))
    )
    digest = hashlib.sha256(message).digest()
    words = [int.from_bytes(digest[i : i + 4], "little") for i in range(0, len(digest), 4)]
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(words)))
