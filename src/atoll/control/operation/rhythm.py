"""Usual demand of services by day and week: rates seen so far, in a small file beside the history.

A rate is kept for every ten minutes of the last three weeks, so the file has a bound: about 25 kB a service.
A controller that starts again, here or wherever the file is, knows the rhythm at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from pydantic import Field

from atoll.control.decision.control_view import DAY_S
from atoll.control.decision.forecast import build_profile
from atoll.core.errors import AtollError, InputError
from atoll.core.files import atomic_write, read_text_limited
from atoll.core.frozen import Frozen

STEP_S = 600.0
MAX_STEPS = 21 * 144
_MAX_BYTES = 8 * 2**20
RATE_DIGITS = 5


class ServiceRates(Frozen):
    """Requests/s of a service in steps in a row, the first of them step `first`; None where nobody looked."""

    first: int
    rates: tuple[float | None, ...] = Field(max_length=MAX_STEPS)


class RhythmFile(Frozen):
    """Rates of every service, in steps of `step_s` seconds that are counted from Unix time 0."""

    step_s: float = STEP_S
    services: dict[str, ServiceRates] = Field(default_factory=dict)


class RateHistory:
    """The rates of services over the last weeks; without a path it lives as long as its controller.

    A file that cannot be read or written costs the rhythm, nothing else: `problem` says what is wrong. With
    `keep` off it is only read.
    """

    def __init__(self, path: Path | None = None, *, keep: bool = True) -> None:
        self._path = path if keep else None
        self._rates: dict[str, dict[int, float]] = {}
        self._step: int | None = None
        self._seen: dict[str, list[float]] = {}
        self._profiles: dict[str, tuple[tuple[float, ...], float]] = {}
        self.problem: str | None = None
        if path is not None and path.exists():
            self._load(path)

    def _load(self, path: Path) -> None:
        try:
            file = RhythmFile.from_json(read_text_limited(path, _MAX_BYTES), path=path)
        except InputError as error:
            self.problem = f"the rhythm of the past is lost: {error}"
            return
        if file.step_s != STEP_S:
            return
        for name, series in file.services.items():
            steps = enumerate(series.rates, series.first)
            self._rates[name] = {at: rate for at, rate in steps if rate is not None}

    def note(self, now_s: float, rates: Mapping[str, float]) -> None:
        """Take in the rates of now; of a step that is over their mean is kept.

        Written down is what is first seen in a step: a controller may be started for one look at a time.
        """
        step, before = int(now_s // STEP_S), self._step
        if before is not None and step != before:
            self._close(before)
        self._step = step
        for name, rate in rates.items():
            self._seen.setdefault(name, []).append(rate)
        if step != before:
            self._save(step)

    def _close(self, step: int) -> None:
        self._rates = self._with_step(step)
        self._seen.clear()
        self._profiles.clear()

    def _with_step(self, step: int) -> dict[str, dict[int, float]]:
        """Return the rates with those of a step, without what is too old or, by a wrong clock, later."""
        rates: dict[str, dict[int, float]] = {}
        for name in self._rates.keys() | self._seen.keys():
            kept = self._rates.get(name, {})
            recent = {at: rate for at, rate in kept.items() if step - MAX_STEPS < at <= step}
            seen = self._seen.get(name)
            if seen:
                recent[step] = sum(seen) / len(seen)
            if recent:
                rates[name] = recent
        return rates

    def _save(self, step: int) -> None:
        if self._path is None:
            return
        services = {}
        for name, kept in sorted(self._with_step(step).items()):
            first, last = min(kept), max(kept)
            rates = (kept.get(at) for at in range(first, last + 1))
            rounded = tuple(None if rate is None else _round(rate) for rate in rates)
            services[name] = ServiceRates(first=first, rates=rounded)
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            atomic_write(self._path, RhythmFile(services=services).to_json() + "\n")
            self.problem = None
        except (AtollError, OSError) as error:
            self.problem = f"the rhythm of the traffic is not kept: {error}"

    def knows(self, service: str, now_s: float) -> bool:
        """Whether the traffic of a service was seen within the last day."""
        step = int(now_s // STEP_S)
        latest = max(self._rates.get(service, (-1,)))
        return service in self._seen or (step - latest) * STEP_S <= DAY_S

    def profile(self, service: str) -> tuple[tuple[float, ...], float]:
        """Return the usual rates of a service over a day or week and that period; empty while unknown."""
        if service not in self._profiles:
            self._profiles[service] = self._build(self._rates.get(service, {}))
        return self._profiles[service]

    def _build(self, kept: Mapping[int, float]) -> tuple[tuple[float, ...], float]:
        if not kept:
            return (), DAY_S
        first, last = min(kept), max(kept)
        day = round(DAY_S / STEP_S)
        # Half a day that was seen in all is no rhythm, however long ago it began.
        if len(kept) < day:
            return (), DAY_S
        rates = np.array([kept.get(at, np.nan) for at in range(first, last + 1)])
        missing = np.flatnonzero(np.isnan(rates))
        if len(missing):
            # When nobody looked, it was as usual at that time of day.
            usual = _usual(kept.items(), day)
            mean = sum(kept.values()) / len(kept)
            rates[missing] = [usual.get((first + int(at)) % day, mean) for at in missing]
        return build_profile(rates, STEP_S, first * STEP_S)


def _usual(rates: Iterable[tuple[int, float]], day: int) -> dict[int, float]:
    by_time: dict[int, list[float]] = {}
    for at, rate in rates:
        by_time.setdefault(at % day, []).append(rate)
    return {time: sum(seen) / len(seen) for time, seen in by_time.items()}


def _round(rate: float) -> float:
    return float(f"{rate:.{RATE_DIGITS}g}")
