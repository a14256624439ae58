"""A token bucket: so much at once, so much a second after that.

    level(t) = min(capacity, level(t0) + (t - t0) * per_s)

Time is a parameter, of any clock in seconds; one that goes back gives nothing. What something costs may be
known only once it is done, so a bucket may be charged more than it holds: it is then in debt, and nothing
is let in until that is paid off. Over any time T no more than `capacity + T * per_s` is let in, and over a
long time no more is charged than the rate.
"""

from __future__ import annotations


class TokenBucket:
    """Holds `capacity` tokens, all of them at first, and regains `per_s` each second."""

    __slots__ = ("_at_s", "_level", "capacity", "per_s")

    def __init__(self, capacity: float, per_s: float, now_s: float) -> None:
        self.capacity = capacity
        self.per_s = per_s
        self._level = float(capacity)
        self._at_s = now_s

    def level(self, now_s: float) -> float:
        """Return how much is in it now; below 0 it is in debt."""
        if now_s > self._at_s:
            grown = self._level + (now_s - self._at_s) * self.per_s
            self._level = min(float(self.capacity), grown)
            self._at_s = now_s
        return self._level

    def charge(self, now_s: float, amount: float) -> None:
        """Take out what was used, into debt if need be."""
        self._level = self.level(now_s) - amount

    def take(self, now_s: float, amount: float = 1.0) -> bool:
        """Take out so much if it is there; return whether it was."""
        if self.level(now_s) < amount:
            return False
        self._level -= amount
        return True

    def wait_s(self, now_s: float, amount: float = 1.0) -> float:
        """Return how long until so much (at most the capacity) is in it; 0 if it is."""
        missing = amount - self.level(now_s)
        return 0.0 if missing <= 0.0 else missing / self.per_s

    def full_s(self, now_s: float) -> float:
        """Return how long until it is full again."""
        return (self.capacity - self.level(now_s)) / self.per_s
