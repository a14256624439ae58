"""How much each slot may say: what is beyond that is not even looked at."""

from __future__ import annotations

_ONE_BYTES = 2048


class Quota:
    """So many messages a second of every slot, and so many at once. `now_s` may be any clock."""

    def __init__(self, per_s: float, at_once: float) -> None:
        self._per_s = per_s
        self._at_once = at_once
        self._left: dict[str, tuple[float, float]] = {}

    def take(self, slot: str, now_s: float, size: int = 0) -> bool:
        """Whether the slot may say one thing more now, of so many bytes; large ones count for several."""
        cost = 1 + size // _ONE_BYTES
        left, at_s = self._left.get(slot, (self._at_once, now_s))
        left = min(self._at_once, left + max(0.0, now_s - at_s) * self._per_s)
        allowed = left >= cost
        self._left[slot] = (left - cost if allowed else left, now_s)
        return allowed
