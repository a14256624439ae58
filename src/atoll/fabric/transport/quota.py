"""How much each slot may say: what is beyond that is not even looked at."""

from __future__ import annotations

from atoll.core.bucket import TokenBucket

_ONE_BYTES = 2048


class Quota:
    """So many messages a second of every slot, and so many at once. `now_s` may be any clock."""

    def __init__(self, per_s: float, at_once: float) -> None:
        self._per_s = per_s
        self._at_once = at_once
        self._buckets: dict[str, TokenBucket] = {}

    def take(self, slot: str, now_s: float, size: int = 0) -> bool:
        """Whether the slot may say one thing more now, of so many bytes; large ones count for several."""
        bucket = self._buckets.get(slot)
        if bucket is None:
            bucket = self._buckets[slot] = TokenBucket(self._at_once, self._per_s, now_s)
        return bucket.take(now_s, 1 + size // _ONE_BYTES)
