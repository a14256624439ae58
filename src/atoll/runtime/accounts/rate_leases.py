"""Limits a minute that several gateways share: who may let in how much before asking again.

The database holds one bucket for each limit of a key. Gateways that work for the key take parts of it ahead
(leases) and settle about once a second: each gives back what it was lent less what it spent, and takes its
share of all there is. So nothing is asked on the way of a request, and

    level in the database + what is lent = limit + rate x time - what was spent,

at most the limit. Two things go beyond, and are charged when they are settled: a gateway to which a key is
new lets in a slice, `SLICE_S` seconds of the rate, before it has a lease; and between two settlements the
rate is counted here as well. So over any time T all gateways together let in no more than

    limit + rate x T + (gateways + 1) x slice

and what was too much is missing later. Where there is less than one request for each gateway, whole ones
go to who has waited longest. If the database is away each gateway goes on with an equal share of limit and
rate.

Of a strict key nothing goes beyond: a gateway lets in only what it was lent, and counts no rate by itself,
so that all together let in no more than limit + rate x T. Nothing here does I/O; time is a parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

SLICE_S = 2.0
"""Seconds of the rate that a gateway lets in before it has a lease."""
LEASE_S = 5.0
"""How long others heed a lease that is not settled."""
IDLE_S = 3.0
"""A key that asked for nothing for so long needs no lease."""
_MINUTE_S = 60.0
_NEVER = float("-inf")


class SharedBucket(NamedTuple):
    """Rest of a limit that is not lent, as the database has it."""

    level: float
    """Below 0: in debt."""
    at_s: float


class OtherLease(NamedTuple):
    """Lease of another gateway."""

    lent: float
    served_s: float
    """When it was last lent a whole request or token."""


class LeaseAsk(NamedTuple):
    """Report of a gateway on a limit when it settles."""

    key_id: str
    what: str
    """`requests` or `tokens`."""
    limit: float
    """A minute."""
    held: float
    """Amount that it was lent the last time."""
    spent: float
    """Since then."""
    wants: bool
    """Whether it needs more, or gives back what it has."""
    served_s: float
    strict: bool = False
    need: float = 1.0
    """Of the largest request that it could not let in; less than that is of no use to it."""
    keep: float = 0.0
    """Of what it was lent, what running requests may still use."""


class LeaseGrant(NamedTuple):
    """Amount that a gateway gets for it."""

    lent: float
    left: float
    """Not lent to anybody; below 0: debt of all together."""
    holders: int
    """Gateways that work for the key, the one that asked among them."""
    served_s: float


def slice_of(limit: float) -> float:
    """Return what a gateway lets in of a limit a minute before it has asked."""
    return max(1.0, limit / _MINUTE_S * SLICE_S)


def settle(
    bucket: SharedBucket,
    ask: LeaseAsk,
    others: Sequence[OtherLease],
    now_s: float,
    *,
    careful: bool = False,
) -> tuple[SharedBucket, LeaseGrant]:
    """Take back what a gateway holds, and lend it its share of what there is.

    A gateway of which the others may not know yet must be `careful`: it lives on its first slice and the
    rate, as one of them may still take all the rest for its own.
    """
    lent_out = sum(other.lent for other in others)
    # The time of this settlement may lie before that of the last: nothing shrinks by it.
    grown = max(0.0, now_s - bucket.at_s) * ask.limit / _MINUTE_S
    # Never more than the limit together with what others hold.
    level = min(ask.limit - lent_out, bucket.level + grown + ask.held - ask.spent)
    holders = len(others) + 1
    # Of a strict key nobody takes what was not lent: there is nothing to be careful of.
    lends = ask.wants and (ask.strict or not careful)
    lent = share_of(level, lent_out, ask.served_s, others, unit=ask.need) if lends else 0.0
    lent = max(lent, min(level, ask.keep))
    served_s = now_s if lent >= ask.need else ask.served_s
    at_s = max(bucket.at_s, now_s)
    grant = LeaseGrant(lent, level - lent, holders, served_s)
    return SharedBucket(level - lent, at_s), grant


def share_of(
    level: float,
    lent_out: float,
    served_s: float,
    others: Sequence[OtherLease],
    *,
    unit: float = 1.0,
) -> float:
    """Return the part of `level`, which nobody holds, that one gets beside others who hold `lent_out`.

    Where an equal part is less than `unit`, nobody could use it: whole units, to one after the other.
    """
    share = (level + lent_out) / (len(others) + 1)
    if share >= unit or not others:
        return max(0.0, min(level, share))
    first = all(served_s <= other.served_s for other in others)
    return unit if level >= unit and first else 0.0


class SharedLimit:
    """Requests of a limit that this gateway may let in per minute; a bucket with a minute's worth.

    What an answer costs is known only as it grows, so it may be charged more than it holds, and is then in
    debt. Times are of one monotonic clock, in seconds.
    """

    __slots__ = (
        "_asked",
        "_at_s",
        "_holds",
        "_level",
        "_per_s",
        "_rate",
        "held",
        "leased",
        "limit",
        "need",
        "served_s",
        "spent",
        "strict",
    )

    def __init__(self, limit: float, now_s: float, *, strict: bool = False) -> None:
        self.limit = limit
        self.strict = strict
        self._rate = limit / _MINUTE_S
        self._per_s = 0.0 if strict else self._rate
        self._holds = float(limit)
        self._level = 0.0 if strict else float(limit)
        self.need = 1.0
        """Of the largest request since the last settlement for which there was no room."""
        self._at_s = now_s
        self.held = 0.0
        self.spent = 0.0
        """Since the last settlement."""
        self._asked = 0.0
        """Of it, what is being settled."""
        self.leased = False
        self.served_s = _NEVER

    # On the way of a request

    def level(self, now_s: float) -> float:
        """Return how much may be let in now; below 0 it is in debt."""
        if now_s > self._at_s:
            grown = self._level + (now_s - self._at_s) * self._per_s
            # What was lent beyond the usual is not taken away.
            self._level = min(grown, max(self._holds, self._level))
            self._at_s = now_s
        return self._level

    def charge(self, now_s: float, amount: float) -> None:
        """Take out what was used, into debt if need be."""
        self._level = self.level(now_s) - amount
        self.spent += amount

    def wait_s(self, now_s: float, amount: float = 1.0) -> float:
        """Return how long until so much more may be let in, if nobody else is; 0 if it is now."""
        missing = amount - self.level(now_s)
        if missing <= 0.0:
            return 0.0
        self.need = max(self.need, amount)
        return missing / self._rate

    def full_s(self, now_s: float) -> float:
        """Return how long until it is full again."""
        return max(0.0, self.limit - self.level(now_s)) / self._rate

    def resize(self, limit: float, now_s: float) -> None:
        """Take another limit; what was used stays used."""
        if limit == self.limit:
            return
        used = self.limit - self.level(now_s)
        if self.strict:
            # What it holds was lent of the old limit, and stays lent.
            self.limit, self._rate = limit, limit / _MINUTE_S
            return
        # Its part of the rate stays the same part.
        share = self._per_s / self._rate
        self.limit = limit
        self._rate = limit / _MINUTE_S
        self._per_s = self._rate * share
        self._holds = max(1.0, limit * share)
        self._level = limit - used

    # Beside it

    def settles(self, *, wants: bool) -> bool:
        """Return whether there is anything to tell the database."""
        return wants or self.leased or self.spent != 0.0 or self.held != 0.0

    def ask(self, key_id: str, what: str, *, wants: bool, keep: float = 0.0) -> LeaseAsk:
        """Return what to tell the database; `granted` follows, unless the answer is lost."""
        self._asked = self.spent
        held, self.held = self.held, 0.0
        # Once it is said it is given up: whether an answer that is lost was heeded nobody knows.
        need, self.need = self.need, 1.0
        told = (held, self._asked, wants, self.served_s, self.strict, need, keep)
        return LeaseAsk(key_id, what, self.limit, *told)

    def granted(self, grant: LeaseGrant, gateways: int, now_s: float, *, wants: bool) -> None:
        """Go by what the database lent."""
        # What was spent while the question was under way is told the next time.
        self.spent -= self._asked
        self._asked = 0.0
        self.leased, self.held, self.served_s = wants, grant.lent, grant.served_s
        if self.strict:
            self.leased = wants or grant.lent > 0.0
            self._set(grant.lent - self.spent, grant.lent, 1, now_s)
            return
        # A debt of all together comes off what was lent.
        level = grant.lent + min(0.0, grant.left) if wants else grant.left
        among = grant.holders if wants else max(1, gateways)
        max_level = self.limit / among
        if not wants and gateways > 1:
            # What is known of the rest grows old: no more than a slice of it is believed.
            max_level = slice_of(self.limit)
            level = min(level, max_level)
        self._set(level - self.spent, max_level, among, now_s)

    def fall_back(self, gateways: int, now_s: float) -> None:
        """Go by an equal share, or if strict by what is left of the lease: the database is away."""
        self.leased = False
        if self.strict:
            return
        among = max(1, gateways)
        max_level = max(1.0, self.limit / among)
        self._set(min(self.level(now_s), max_level), max_level, among, now_s)

    def begin(self, left: float, gateways: int, now_s: float) -> None:
        """Go by what the database knew before this gateway let anything in."""
        # Once it has let something in, what it knows itself is newer.
        if not self.leased and not self.spent:
            self.granted(LeaseGrant(0.0, left, 1, self.served_s), gateways, now_s, wants=False)

    def _set(self, level: float, max_level: float, among: int, now_s: float) -> None:
        self._level, self._at_s = level, now_s
        self._per_s = 0.0 if self.strict else self._rate / among
        # Room for one whole request at least: else it could never let one in.
        self._holds = max(1.0, max_level)
