"""Counters and histograms for hot paths, and the page that Prometheus reads.

Made for one thread: a child is looked up once and then costs an addition, without the locks of
`prometheus_client`, which writes the page. Labels that come from outside (a model's name in a request,
say) are bounded: past the limit of a family every new combination is counted under "other", so that no
client can fill the memory. Needs the extra `serve`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

CONTENT_TYPE = choose_encoder("")[1]
"""Of the page, for whoever asks for no other."""
SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Bounds for times of requests, in seconds."""
Rows = Iterable[tuple[tuple[str, ...], float]]
"""Label values, and the number of each."""


class Count:
    """A number that grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, amount: float = 1.0) -> None:
        """Count one more, or `amount` more."""
        self.value += amount


class Histogram:
    """How often a value fell below each of some bounds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds = tuple(map(float, bounds))
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value into the first bucket whose bound it does not exceed."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Return how many values were at most each bound, as Prometheus has it."""
        pairs: list[tuple[str, float]] = []
        below = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            below += count
            pairs.append((bound, below))
        return pairs


_Child = TypeVar("_Child", Count, Histogram)


class LabelledFamily(ABC, Generic[_Child]):
    """A metric with labels: one child for each combination of their values."""

    def __init__(
        self, name: str, help_text: str, labels: Sequence[str] = (), *, limit: int = 1000
    ) -> None:
        self.name = name
        self.help_text = help_text
        self.labels = tuple(labels)
        self.children: dict[tuple[str, ...], _Child] = {}
        self._limit = limit
        # Without labels there is one child, which is shown as 0 from the start.
        if not labels:
            self.child()

    def child(self, *values: str) -> _Child:
        """Return the child for these label values, or the one for "other" past the limit."""
        child = self.children.get(values)
        if child is not None:
            return child
        if len(self.children) >= self._limit:
            values = ("other",) * len(self.labels)
        return self.children.setdefault(values, self._make())

    @abstractmethod
    def _make(self) -> _Child:
        """Return a child that has counted nothing."""

    @abstractmethod
    def read(self) -> Metric:
        """Return what was counted so far."""


class CounterFamily(LabelledFamily[Count]):
    """Counters, one for each combination of label values."""

    def _make(self) -> Count:
        return Count()

    def read(self) -> Metric:
        """Return what was counted so far."""
        rows = ((values, child.value) for values, child in self.children.items())
        return make_counter(self.name, self.help_text, self.labels, rows)


class HistogramFamily(LabelledFamily[Histogram]):
    """Histograms, one for each combination of label values."""

    def __init__(
        self,
        name: str,
        help_text: str,
        labels: Sequence[str] = (),
        *,
        bounds: Sequence[float] = SECONDS,
        limit: int = 1000,
    ) -> None:
        self._bounds = tuple(bounds)
        super().__init__(name, help_text, labels, limit=limit)

    def _make(self) -> Histogram:
        return Histogram(self._bounds)

    def read(self) -> Metric:
        """Return what was counted so far."""
        family = HistogramMetricFamily(self.name, self.help_text, labels=self.labels)
        for values, child in self.children.items():
            family.add_metric(values, child.buckets(), child.total)
        return family


def make_counter(name: str, help_text: str, labels: Sequence[str], rows: Rows) -> Metric:
    """Return numbers that grow and are kept elsewhere, as they are now."""
    family = CounterMetricFamily(name, help_text, labels=labels)
    for values, number in rows:
        family.add_metric(values, number)
    return family


def make_gauge(name: str, help_text: str, labels: Sequence[str], rows: Rows) -> Metric:
    """Return numbers that come and go, as they are now."""
    family = GaugeMetricFamily(name, help_text, labels=labels)
    for values, number in rows:
        family.add_metric(values, number)
    return family


class _Snapshot(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def render_page(metrics: Iterable[Metric]) -> bytes:
    """Return the page that Prometheus reads."""
    return generate_latest(_Snapshot(metrics))
