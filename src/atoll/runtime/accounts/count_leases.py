"""Limits on counts that several gateways share: requests at the same time, and quotas of strict keys.

Nothing of them comes back with time, as limits a minute do: a request that ends gives its place back, and
what is spent of a quota is in the counters of the ledger. Gateways that work for a key hold parts of what is
left (leases) and settle about once a second. A lease covers what the gateway has in use, which the database
cannot know yet, and what it may add to it, so that

    counted in the database + what all gateways have in use <= limit

as long as each keeps to its lease. Of a strict key nothing is let in without one. Of any other key, whose
requests at the same time alone are shared, a gateway without a lease goes by an equal part of the limit.
Nothing here does I/O; time is a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from atoll.runtime.accounts.rate_leases import LeaseGrant, OtherLease, share_of

COUNT_LEASE_S = 15.0
"""How long others heed a lease that is not settled: its holder may be cut off, and what it runs goes on."""
_NEVER = float("-inf")


class CountAsk(NamedTuple):
    """Report of a gateway on a count when it settles."""

    key_id: str
    what: str
    """`running`, or a counter and its span: `tokens_day`."""
    limit: float
    in_use: float
    """Beyond what the database has counted; the lease is at least as much."""
    wants: bool
    """Whether it needs more than that."""
    served_s: float
    need: float
    """Of the largest request that it could not let in."""
    span: str
    """`day`, `month` or `total`; "" for what the ledger does not count."""


def lend(ask: CountAsk, counted: float, others: Sequence[OtherLease], now_s: float) -> LeaseGrant:
    """Return the part of a count that a gateway may have in use; what it has in use stays its own."""
    lent_out = sum(other.lent for other in others)
    left = ask.limit - counted - lent_out
    lent = 0.0
    if ask.wants:
        unit = max(1.0, ask.need)
        lent = share_of(left, lent_out, ask.served_s, others, unit=unit)
        # Requests are whole: the rest of a division goes to who asks first.
        lent = min(left, math.ceil(lent))
        served_s = now_s if lent >= max(unit, ask.in_use + 1.0) else ask.served_s
    else:
        served_s = ask.served_s
    return LeaseGrant(max(lent, ask.in_use), left - lent, len(others) + 1, served_s)


class SharedCount:
    """Part of a count that this gateway may have in use.

    `read` returns what was added here since the start, all told, and `reserved` what running requests may
    still add; for requests at the same time the first is how many run.
    """

    __slots__ = (
        "_base",
        "_read",
        "_unleased",
        "held",
        "leased",
        "limit",
        "need",
        "served_s",
        "strict",
    )

    def __init__(self, limit: float, read: Callable[[], float], *, strict: bool) -> None:
        self.limit = limit
        self.strict = strict
        self.leased = False
        self.held = 0.0
        self.served_s = _NEVER
        self.need = 0.0
        """Of the largest request since the last settlement for which there was no room."""
        self._read = read
        self._base = 0.0
        """Of what was added here, what the database has counted."""
        self._unleased = limit

    @property
    def in_use(self) -> float:
        """What was added here and is not counted in the database, as far as is known."""
        return self._read() - self._base

    def has_room(self, amount: float) -> bool:
        """Whether so much more may be in use; what there is no room for is asked of the database."""
        allowed = self.held if self.leased else 0.0 if self.strict else self._unleased
        if self.in_use + amount <= allowed:
            return True
        # Less than a request may need in tokens is of no use; places are worth having one by one.
        if amount > 1.0:
            self.need = max(self.need, self.in_use + amount)
        return False

    def settles(self, *, wants: bool) -> bool:
        """Whether there is anything to tell the database."""
        return wants or self.leased or self.in_use > 0

    def ask(
        self, key_id: str, what: str, *, wants: bool, span: str = "", counted: float = 0.0
    ) -> CountAsk:
        """Return what to tell the database; `granted` follows. `counted`: what it has of our own use."""
        self._base = counted
        need, self.need = self.need, 0.0
        return CountAsk(key_id, what, self.limit, self.in_use, wants, self.served_s, need, span)

    def granted(self, grant: LeaseGrant, gateways: int, *, wants: bool) -> None:
        """Go by what the database lent."""
        self.leased = wants or grant.lent > 0
        self.held, self.served_s = grant.lent, grant.served_s
        self.share(gateways)

    def share(self, gateways: int) -> None:
        """Go by an equal part of the limit where no lease is held."""
        among = max(1, gateways)
        self._unleased = max(1, math.ceil(self.limit / among))

    def fall_back(self, gateways: int) -> None:
        """Hold no lease any more: the database is away."""
        self.leased = False
        self._unleased = max(1, self.limit // max(1, gateways))
