"""Figures of a graph server, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import Metric

from atoll.telemetry.metrics import (
    CounterFamily,
    HistogramFamily,
    make_gauge,
    render_page,
)


class GraphServerMetrics:
    """Metrics of a graph server. Labels come from its configuration, never from requests."""

    def __init__(self) -> None:
        self.requests = CounterFamily(
            "atoll_graph_requests_total",
            "Requests that ended, by endpoint, model and status.",
            ("endpoint", "model", "status"),
        )
        self.classes = CounterFamily(
            "atoll_graph_class_requests_total",
            "Requests that were given a path, by model and class of the plan.",
            ("model", "class"),
        )
        self.seconds = HistogramFamily(
            "atoll_graph_request_seconds", "From request to the end of its answer.", ("endpoint",)
        )
        self.first = HistogramFamily(
            "atoll_graph_first_seconds",
            "From request to the first part of its answer.",
            ("endpoint",),
        )
        self.attempts = CounterFamily(
            "atoll_graph_invocations_total",
            "Attempts at invocations, by what came of them.",
            ("component", "executor", "outcome"),
        )
        self.invocation = HistogramFamily(
            "atoll_graph_invocation_seconds",
            "Time of attempts that succeeded, as the graph server sees it.",
            ("component",),
        )
        self.used = CounterFamily(
            "atoll_graph_usage_total",
            "Tokens read and written, seconds heard and spoken, pixels seen and drawn.",
            ("model", "kind"),
        )

    def observe(self, component: str, executor: str, outcome: str, seconds: float) -> None:
        """Count an attempt at an invocation."""
        self.attempts.child(component, executor, outcome).add()
        if outcome == "ok":
            self.invocation.child(component).observe(seconds)

    def page(
        self, gauges: Sequence[tuple[str, str, float]], executors: Sequence[tuple[str, bool]]
    ) -> bytes:
        """Return the page that Prometheus reads; gauges are (name, help text, number)."""
        return render_page(self._read(gauges, executors))

    def _read(
        self, gauges: Sequence[tuple[str, str, float]], executors: Sequence[tuple[str, bool]]
    ) -> Iterator[Metric]:
        counters = (self.requests, self.classes, self.attempts, self.used)
        for counter in counters:
            yield counter.read()
        for histogram in (self.seconds, self.first, self.invocation):
            yield histogram.read()
        for name, help_text, number in gauges:
            yield make_gauge(name, help_text, (), [((), number)])
        yield make_gauge(
            "atoll_graph_executor_up",
            "1 for an executor that is connected.",
            ("executor",),
            [((name,), float(is_up)) for name, is_up in executors],
        )
