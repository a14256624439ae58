"""Statistics of a workload: rates, burstiness, lengths; computed in one pass over its chunks.

`iat_cv` is standard deviation over mean of the gaps between arrivals; the Fano factor of a window is
variance over mean of the counts in windows of that many seconds (1 for Poisson arrivals); the
peak-to-mean of a window is the fullest window over the mean one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from atoll.core.errors import InputError
from atoll.workload.lengths import LengthMix
from atoll.workload.requests import Floats, Ints, Longs, Requests

WINDOWS_S = (1, 10, 60)
QUANTILES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999)
_MAX_BINS = 12_000_000


@dataclass(frozen=True, slots=True)
class LengthStats:
    """One length over all requests, in tokens; `quantiles` are at `QUANTILES`."""

    mean: float
    mean_square: float
    least: int
    most: int
    quantiles: tuple[float, ...]

    def at(self, share: float) -> float:
        """Return one of the quantiles in `QUANTILES`."""
        return self.quantiles[QUANTILES.index(share)]


@dataclass(frozen=True, slots=True)
class WindowStats:
    """Counts in windows of `window_s` seconds; None where the workload is too short for any."""

    window_s: int
    fano: float | None
    peak_to_mean: float | None


@dataclass(frozen=True, slots=True)
class TraceStats:
    """A workload in numbers. `span_s` is from the first to the last arrival, in seconds."""

    requests: int
    span_s: float
    rate_per_s: float
    iat_cv: float | None
    windows: tuple[WindowStats, ...]
    input: LengthStats
    output: LengthStats
    correlation: float | None
    models: dict[str, int]
    classes: dict[str, int]
    items_mean: float
    shared_blocks: float | None

    def mix(self) -> LengthMix:
        """Return the moments of the lengths, as planning wants them."""
        return LengthMix(
            max(1.0, self.input.mean),
            max(1.0, self.output.mean),
            max(1.0, self.input.mean_square),
            max(1.0, self.output.mean_square),
        )


class _Histogram:
    """Counts of whole numbers, exact."""

    def __init__(self) -> None:
        self.counts: Longs = np.zeros(256, np.int64)

    def add(self, values: Ints) -> None:
        max_value = int(values.max())
        if max_value >= len(self.counts):
            # Twice as much as is needed, so that it seldom has to grow.
            self.counts = np.pad(self.counts, (0, 2 * max_value + 1 - len(self.counts)))
        counts = np.bincount(values)
        self.counts[: len(counts)] += counts

    def cumulate(self) -> tuple[Longs, Longs]:
        """Return the values that occur, and how many are at or below each."""
        values = np.flatnonzero(self.counts)
        return values, np.cumsum(self.counts[values])

    def stats(self) -> LengthStats:
        values, below = self.cumulate()
        counts = self.counts[values].astype(np.float64)
        total = int(below[-1])
        mean = float(values @ counts) / total
        square = float((values.astype(np.float64) ** 2) @ counts) / total
        return LengthStats(
            mean, square, int(values[0]), int(values[-1]),
            tuple(_quantile(values, below, share) for share in QUANTILES),
        )  # fmt: skip


def _quantile(values: Longs, below: Longs, share: float) -> float:
    """The quantile with linear interpolation between order statistics, as numpy's default is."""
    place = share * (int(below[-1]) - 1)
    low = int(place)
    first = values[np.searchsorted(below, low, side="right")]
    second = values[np.searchsorted(below, min(low + 1, int(below[-1]) - 1), side="right")]
    return float(first + (second - first) * (place - low))


class Summary:
    """Adds up chunks; `stats` and the curves may be asked for at any time."""

    def __init__(self) -> None:
        self.requests = 0
        self.first_s = self.last_s = 0.0
        self.input, self.output = _Histogram(), _Histogram()
        self.width_s = 1.0
        self._bins: Longs = np.zeros(1024, np.int64)
        self._gap_square = 0.0
        self._products = 0.0
        self._models: dict[str, int] = {}
        self._classes: dict[str, int] = {}
        self._items = 0
        self._blocks: tuple[int, set[int]] | None = None

    def add(self, chunk: Requests) -> None:
        """Count the requests of one chunk."""
        if not len(chunk):
            return
        times = chunk.arrival_s
        if not self.requests:
            self.first_s = self.last_s = float(times[0])
        gaps = np.diff(times, prepend=self.last_s)
        if float(gaps.min()) < 0.0:
            raise InputError("requests do not come in order of arrival")
        self._gap_square += float(gaps @ gaps)
        self.last_s = float(times[-1])
        self.requests += len(chunk)
        self.input.add(chunk.input)
        self.output.add(chunk.output)
        self._products += float(chunk.input.astype(np.float64) @ chunk.output)
        self._count(times - self.first_s)
        for names, index, counts in (
            (chunk.models, chunk.model, self._models),
            (chunk.classes, chunk.klass, self._classes),
        ):
            for name, number in zip(names, np.bincount(index, minlength=len(names)), strict=True):
                counts[name] = counts.get(name, 0) + int(number)
        self._items += 0 if chunk.items is None else int(chunk.items.sum())
        if chunk.prefix is not None:
            total, distinct = self._blocks or (0, set())
            distinct.update(chunk.prefix.ids.tolist())
            self._blocks = (total + len(chunk.prefix.ids), distinct)

    def _count(self, since_s: Floats) -> None:
        # Wider bins instead of more of them, so that memory stays bounded.
        while since_s[-1] / self.width_s >= _MAX_BINS:
            # An odd last bin has an empty partner: nothing that was counted is lost.
            even = np.pad(self._bins, (0, len(self._bins) % 2))
            self._bins = even.reshape(-1, 2).sum(axis=1)
            self.width_s *= 2
        place = np.floor(since_s / self.width_s).astype(np.int64)
        need = int(place[-1]) + 1
        if need > len(self._bins):
            size = min(_MAX_BINS, max(need, 2 * len(self._bins)))
            self._bins = np.pad(self._bins, (0, size - len(self._bins)))
        first = int(place[0])
        counts = np.bincount(place - first)
        self._bins[first : first + len(counts)] += counts

    @property
    def span_s(self) -> float:
        """Seconds from the first to the last arrival."""
        return self.last_s - self.first_s

    def counts(self, window_s: float) -> Longs:
        """Return how many requests came in each whole window since the first arrival."""
        step = max(1, round(window_s / self.width_s))
        whole = int(self.span_s // (step * self.width_s))
        counts: Longs = self._bins[: whole * step].reshape(whole, step).sum(axis=1)
        return counts

    def stats(self) -> TraceStats:
        """Return the numbers so far."""
        if not self.requests:
            raise InputError("there are no requests to describe")
        gaps = self.requests - 1
        mean_gap = self.span_s / gaps if gaps else 0.0
        iat_cv = None
        if mean_gap > 0.0:
            # Rounding must not make it negative.
            variance = max(0.0, self._gap_square / gaps - mean_gap * mean_gap)
            iat_cv = float(np.sqrt(variance)) / mean_gap
        prompts, answers = self.input.stats(), self.output.stats()
        shared = None
        if self._blocks is not None and self._blocks[0]:
            shared = 1.0 - len(self._blocks[1]) / self._blocks[0]
        return TraceStats(
            self.requests,
            self.span_s,
            self.requests / self.span_s if self.span_s else 0.0,
            iat_cv,
            tuple(self._window(window) for window in WINDOWS_S),
            prompts,
            answers,
            self._correlation(prompts, answers),
            {name: count for name, count in self._models.items() if count},
            {name: count for name, count in self._classes.items() if count},
            self._items / self.requests,
            shared,
        )

    def _window(self, window_s: int) -> WindowStats:
        counts = self.counts(window_s) if window_s >= self.width_s else np.zeros(0)
        if len(counts) < 2 or not counts.any():
            return WindowStats(window_s, None, None)
        mean = float(counts.mean())
        return WindowStats(window_s, float(counts.var()) / mean, float(counts.max()) / mean)

    def _correlation(self, prompts: LengthStats, answers: LengthStats) -> float | None:
        variances = (
            prompts.mean_square - prompts.mean**2,
            answers.mean_square - answers.mean**2,
        )
        if min(variances) <= 0.0:
            return None
        covariance = self._products / self.requests - prompts.mean * answers.mean
        return covariance / float(np.sqrt(variances[0] * variances[1]))


def summarise(chunks: Iterable[Requests]) -> Summary:
    """Return the summary of all these chunks."""
    summary = Summary()
    for chunk in chunks:
        summary.add(chunk)
    return summary
