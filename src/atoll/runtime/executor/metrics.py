"""The figures of an executor as a page for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import HistogramMetricFamily, Metric

from atoll.runtime.executor.figures import BATCH_BOUNDS
from atoll.runtime.executor.store import ArrayStore
from atoll.runtime.executor.workers import ComponentWorker
from atoll.telemetry.metrics import make_counter, make_gauge, render_page

_LABELS = ("executor", "component")


def render_metrics(
    name: str, workers: Mapping[str, ComponentWorker], store: ArrayStore, connections: int
) -> bytes:
    """Return the page that Prometheus reads."""
    return render_page(_read(name, workers, store, connections))


def _read(
    name: str, workers: Mapping[str, ComponentWorker], store: ArrayStore, connections: int
) -> Iterator[Metric]:
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
