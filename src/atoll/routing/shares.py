"""Which of several models gets the next request: shares that are kept from the first request on.

Requests are dealt by Tijdeman's rule. Of those that are behind by enough, next is the one that would be a
whole request behind soonest. After any number of requests each of n has its share of them, but for less than
1 - 1 / (2 n - 2) of a request; no rule does better. Nothing is random, and no clock is read.

Conversations that must stay with one model are dealt by a hash of theirs instead, a number in [0, 1): the
models have intervals of it, as long as their shares. The hash is the same in every process.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate

from atoll.core.errors import InputError

_HASH_BYTES = 8


class ShareDealer:
    """Deals names by their shares, which may be in any unit."""

    def __init__(self, shares: Mapping[str, float]) -> None:
        total = sum(shares.values())
        if not 0.0 < total < float("inf") or min(shares.values()) < 0.0:
            raise InputError("shares are numbers of 0 and more, and one of them is more")
        self.shares = {name: share / total for name, share in sorted(shares.items()) if share > 0.0}
        """The share of each, in order; those that get nothing are left out."""
        self._names = tuple(self.shares)
        self._dealt = dict.fromkeys(self._names, 0)
        self._count = 0
        ends = list(accumulate(self.shares.values()))
        self._ends = ends[:-1]  # whatever rounding leaves belongs to the last

    @property
    def dealt(self) -> Mapping[str, int]:
        """How often each was taken."""
        return self._dealt

    def peek(self) -> str:
        """Return whose turn it is."""
        names = self._names
        if len(names) == 1:
            return names[0]
        slack = 1.0 / (2 * len(names) - 2)
        turn, soonest, behind = "", float("inf"), float("-inf")
        furthest = names[0]
        for name, share in self.shares.items():
            owed = share * (self._count + 1) - self._dealt[name]
            if owed > behind:
                furthest, behind = name, owed
            deadline = (1.0 - slack - owed) / share
            if owed >= slack and deadline < soonest:
                turn, soonest = name, deadline
        return turn or furthest  # nobody is behind by enough only where rounding says so

    def take(self, name: str) -> None:
        """Count that a name was dealt."""
        self._count += 1
        self._dealt[name] += 1

    def deal(self) -> str:
        """Return whose turn it is, and count it."""
        name = self.peek()
        self.take(name)
        return name

    def place(self, key: bytes) -> str:
        """Return whom a conversation stays with; `key` is what it is known by."""
        number = int.from_bytes(hashlib.blake2b(key, digest_size=_HASH_BYTES).digest(), "big")
        return self._names[bisect_right(self._ends, number / 2.0 ** (8 * _HASH_BYTES))]
