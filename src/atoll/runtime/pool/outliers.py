"""Outlier ejection: a backend that keeps failing is left alone for a while, as Envoy does it.

Names and defaults are Envoy's. A backend is ejected after `consecutive_5xx` failures in a row, or when at
the end of an interval its success rate lies more than `success_rate_stdev_factor` standard deviations
below the mean of its peers. The n-th ejection lasts n times `base_ejection_s`, at most
`max_ejection_s`; every interval without ejection takes one off n. No more than `max_ejection_percent` of
the backends are out at a time, but one always may be. Time is a parameter.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from pydantic import Field

from atoll.core.frozen import Frozen


class OutlierSettings(Frozen):
    """When a backend is ejected and for how long."""

    consecutive_5xx: int = Field(5, ge=1)
    interval_s: float = Field(10.0, gt=0)
    base_ejection_s: float = Field(30.0, ge=0)
    max_ejection_s: float = Field(300.0, ge=0)
    max_ejection_percent: float = Field(10.0, ge=0, le=100)
    success_rate_minimum_hosts: int = Field(5, ge=2)
    success_rate_request_volume: int = Field(100, ge=1)
    success_rate_stdev_factor: float = Field(1.9, ge=0)


class FailureRecord:
    """Record of one backend's failures. A success sets `row` to 0 and counts as `good`."""

    __slots__ = ("bad", "ejected_until_s", "good", "multiplier", "row")

    def __init__(self) -> None:
        self.row = 0
        """Failures since the last success."""
        self.good = 0
        self.bad = 0
        self.multiplier = 0
        self.ejected_until_s: float | None = None


class Outliers:
    """Keeps the records of a group of backends and decides who is out."""

    def __init__(self, settings: OutlierSettings | None = None) -> None:
        self.settings = settings or OutlierSettings()
        self.records: dict[str, FailureRecord] = {}
        self._interval_end_s: float | None = None

    def add(self, name: str) -> FailureRecord:
        """Begin a record, or return the one that is there."""
        return self.records.setdefault(name, FailureRecord())

    def remove(self, name: str) -> None:
        """Forget a backend."""
        self.records.pop(name, None)

    def note_failure(self, record: FailureRecord, now_s: float) -> bool:
        """Note that a backend failed (5xx, refused, broken, late); return whether that ejects it."""
        record.row += 1
        record.bad += 1
        # Requests that were under way still fail after an ejection: they do not make it longer.
        if record.row < self.settings.consecutive_5xx or record.ejected_until_s is not None:
            return False
        return self._eject(record, now_s)

    def tick(self, now_s: float) -> tuple[list[str], list[str]]:
        """Let time pass; return who came back and who was ejected for its success rate."""
        back = [name for name, r in self.records.items() if self._over(r, now_s)]
        for name in back:
            self.restore(self.records[name])
        # The first interval begins with the first tick.
        if self._interval_end_s is None:
            self._interval_end_s = now_s + self.settings.interval_s
        if now_s < self._interval_end_s:
            return back, []
        self._interval_end_s = now_s + self.settings.interval_s
        # Judged by the interval that ends here, before its counts are cleared.
        out = [n for n in self._below(self.records) if self._eject(self.records[n], now_s)]
        for record in self.records.values():
            record.good = record.bad = 0
            if record.ejected_until_s is None and record.multiplier > 0:
                record.multiplier -= 1
        return back, out

    def restore(self, record: FailureRecord) -> None:
        """End an ejection."""
        record.ejected_until_s = None
        record.row = 0

    def _over(self, record: FailureRecord, now_s: float) -> bool:
        return record.ejected_until_s is not None and record.ejected_until_s <= now_s

    def _eject(self, record: FailureRecord, now_s: float) -> bool:
        # One may always be out, also where the percentage allows none.
        out = sum(r.ejected_until_s is not None for r in self.records.values())
        if out and out * 100.0 >= self.settings.max_ejection_percent * len(self.records):
            return False
        record.multiplier += 1
        seconds = self.settings.base_ejection_s * record.multiplier
        record.ejected_until_s = now_s + min(seconds, self.settings.max_ejection_s)
        return True

    def _below(self, names: Iterable[str]) -> list[str]:
        s = self.settings
        # With few requests, or few backends to compare with, chance would decide.
        rates = {
            name: r.good / (r.good + r.bad)
            for name in names
            if (r := self.records[name]).ejected_until_s is None
            and r.good + r.bad >= s.success_rate_request_volume
        }
        if len(rates) < s.success_rate_minimum_hosts:
            return []
        spread = statistics.pstdev(rates.values())
        min_rate = statistics.fmean(rates.values()) - s.success_rate_stdev_factor * spread
        return [name for name, rate in rates.items() if rate < min_rate]
