"""Quotas of a key: tokens, sound and pixels a day, a month or ever; limits a minute are in `rate_leases`.

Nothing here knows a clock or does I/O.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache

TOTAL = "total"


@dataclass(frozen=True, slots=True)
class Periods:
    """The names of the day and month (UTC) of a moment, as the ledger counts by them."""

    day: str
    month: str
    day_ends_s: float
    month_ends_s: float

    def named(self, span: str) -> str:
        """Return the name of the current `day`, `month` or `total`."""
        return self.day if span == "day" else self.month if span == "month" else TOTAL


def periods(unix_s: float) -> Periods:
    """Return the day and month in which a moment lies, and when they end."""
    now = datetime.fromtimestamp(unix_s, UTC)
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    # 32 days after the first of a month lie in the next one, whichever month it is.
    next_month = (midnight.replace(day=1) + timedelta(days=32)).replace(day=1)
    return Periods(
        f"{now:%Y-%m-%d}",
        f"{now:%Y-%m}",
        (midnight + timedelta(days=1)).timestamp(),
        next_month.timestamp(),
    )


def day_of(unix_s: float) -> str:
    """Return the day (UTC) of a moment, `2026-11-15`."""
    return _day(int(unix_s // 86_400))


@lru_cache(maxsize=64)
def _day(number: int) -> str:
    return f"{datetime.fromtimestamp(number * 86_400, UTC):%Y-%m-%d}"


def periods_of(day: str) -> Iterator[str]:
    """Yield the periods in which what was used on a day counts: the day, its month, and all time."""
    yield day
    yield day[:7]
    yield TOTAL


@dataclass(frozen=True, slots=True)
class Counted:
    """Usage that counts against the quotas of a key."""

    tokens: int = 0
    audio_ms: int = 0
    """Milliseconds of sound heard and speech made."""
    pixels: int = 0
    """Seen or drawn."""

    def __add__(self, other: Counted) -> Counted:
        """Return both together."""
        return Counted(
            self.tokens + other.tokens,
            self.audio_ms + other.audio_ms,
            self.pixels + other.pixels,
        )

    def __sub__(self, other: Counted) -> Counted:
        """Return what is left without the other."""
        return Counted(
            self.tokens - other.tokens,
            self.audio_ms - other.audio_ms,
            self.pixels - other.pixels,
        )


NOTHING = Counted()


@dataclass(slots=True)
class KeyUsage:
    """Usage of a key: as the database last had it, and what it cannot know yet."""

    counted: dict[str, Counted] = field(default_factory=dict)
    """By period, as read from the database: all gateways together."""
    pending: dict[str, Counted] = field(default_factory=dict)
    """By day: finished here and not yet in `counted`."""
    sent: dict[str, Counted] = field(default_factory=dict)
    """By day: on the way into the database."""
    running: Counted = NOTHING
    """Delivered by requests that still run here."""
    spent: Counted = NOTHING
    """All that was used here since the start."""

    def count(self, period: str) -> Counted:
        """Return the use of a period (a day, a month or TOTAL), with that of running requests."""
        return self.counted.get(period, NOTHING) + self.uncounted(period)

    def uncounted(self, period: str) -> Counted:
        """Return what was used here in a period and is not in the database yet."""
        # The name of a day begins with that of its month: a prefix finds both.
        prefix = "" if period == TOTAL else period
        total = self.running
        for held in (self.pending, self.sent):
            for day, used in held.items():
                if day.startswith(prefix):
                    total += used
        return total

    def add(self, day: str, used: Counted) -> None:
        """Count a request that ended."""
        self.pending[day] = self.pending.get(day, NOTHING) + used

    def send(self) -> None:
        """All that is pending goes into the database now."""
        for day, used in self.pending.items():
            self.sent[day] = self.sent.get(day, NOTHING) + used
        self.pending.clear()

    def arrived(self, counted: dict[str, Counted]) -> None:
        """All that was sent is in the database, which now says this."""
        self.sent.clear()
        self.counted = counted


def whole_seconds(seconds: float) -> int:
    """Return seconds for a Retry-After header: whole, rounded up, at least 1."""
    return max(1, math.ceil(seconds))
