"""Figures of an executor, for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from atoll.runtime.executor.store import ArrayStore
    from atoll.runtime.executor.workers import ComponentWorker

BATCH_BOUNDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
"""Upper bounds of the buckets that batch sizes are counted in."""
_LABELS = ("executor", "component")


class ComponentFigures:
    """What is counted of one component."""

    def __init__(self) -> None:
        self.ended: Counter[str] = Counter()
        """Invocations by how they ended: "ok", "cancelled", or the code of an error."""
        self.batches: Counter[float] = Counter()
        """Batches by the bound of their bucket; inf past the last."""
        self.batched = 0
        self.waited_s = 0.0
        self.ran_s = 0.0

    def count(self, outcome: str, waited_s: float) -> None:
        """Count an invocation that ended."""
        self.ended[outcome] += 1
        self.waited_s += waited_s

    def count_batch(self, size: int, ran_s: float) -> None:
        """Count a batch that ran."""
        bound = next((bound for bound in BATCH_BOUNDS if size <= bound), float("inf"))
        self.batches[bound] += 1
        self.batched += size
        self.ran_s += ran_s


def render_metrics(
    name: str, workers: Mapping[str, ComponentWorker], store: ArrayStore, connections: int
) -> bytes:
    """Return the page that Prometheus reads."""
    from atoll.telemetry.metrics import render_page

    return render_page(_read(name, workers, store, connections))


def _read(
    name: str, workers: Mapping[str, ComponentWorker], store: ArrayStore, connections: int
) -> Iterator[Metric]:
    from prometheus_client.core import HistogramMetricFamily

    from atoll.telemetry.metrics import make_counter, make_gauge

    known = sorted(workers.items())
    yield make_counter(
        "atoll:executor_invocations_total",
        "Invocations ended, by how.",
        (*_LABELS, "outcome"),
        [
            ((name, component, outcome), float(count))
            for component, worker in known
            for outcome, count in sorted(worker.figures.ended.items())
        ],
    )
    for metric, help_text, seconds in (
        ("waiting", "Time that invocations waited for a batch.", "waited_s"),
        ("running", "Time that batches and streams ran.", "ran_s"),
    ):
        yield make_counter(
            f"atoll:executor_{metric}_seconds_total",
            help_text,
            _LABELS,
            [((name, key), round(getattr(worker.figures, seconds), 6)) for key, worker in known],
        )
    for metric, help_text in (("waiting", "Invocations waiting."), ("running", "Running ones.")):
        yield make_gauge(
            f"atoll:executor_{metric}",
            help_text,
            _LABELS,
            [((name, key), float(getattr(worker, metric))) for key, worker in known],
        )
    sizes = HistogramMetricFamily(
        "atoll:executor_batch_size", "Invocations run together.", labels=_LABELS
    )
    for key, worker in known:
        below, buckets = 0, []
        for bound in (*BATCH_BOUNDS, float("inf")):
            below += worker.figures.batches[bound]
            buckets.append(("+Inf" if bound == float("inf") else str(bound), float(below)))
        sizes.add_metric((name, key), buckets, float(worker.figures.batched))
    yield sizes
    for metric, help_text, number in (
        ("store_bytes", "Bytes of arrays kept.", store.used_bytes),
        ("store_handles", "Arrays kept.", len(store)),
        ("connections", "Callers connected.", connections),
    ):
        rows = [((name,), float(number))]
        yield make_gauge(f"atoll:executor_{metric}", help_text, ("executor",), rows)
