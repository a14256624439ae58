"""Spans made of usage records, read back from OpenTelemetry's own in-memory exporter."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from atoll.core.errors import UsageError
from atoll.telemetry.spans import Spans, child_of, new_trace
from atoll.telemetry.usage_record import Attempt, UsageRecord

pytest.importorskip("opentelemetry.sdk", reason="needs the extra 'otel'")

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import (
    InMemorySpanExporter,
)

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
MOVED = UsageRecord(
    "req-1", "m", "/v1/chat/completions", True, 200, 10, 30, False, ("a", "b"), 1000.0, 5.0, 0.5,
    "ok", "key-7",
    (Attempt("a", "node-a", "eth", 12, 2.0, "failed"), Attempt("b", None, None, 18, 2.5, "ok")),
)  # fmt: skip


def spans_of(fill: Callable[[Spans], None], share: float = 1.0) -> list[ReadableSpan]:
    exporter = InMemorySpanExporter()
    spans = Spans(exporter, share=share)
    fill(spans)
    spans.close()
    found = list(exporter.get_finished_spans())
    assert spans.stats() == {"sent": len(found), "lost": 0}
    return found


def test_a_request_with_its_attempts_below_it() -> None:
    trace = child_of(CLIENT)
    whole, first, second = spans_of(lambda s: s.request(MOVED, trace, CLIENT))
    assert whole.name == "chat m"
    assert whole.context is not None
    assert f"{whole.context.trace_id:032x}" == CLIENT[3:35]
    assert f"{whole.context.span_id:016x}" == trace[36:52]
    assert whole.parent is not None
    assert f"{whole.parent.span_id:016x}" == CLIENT[36:52]
    assert whole.parent.is_remote
    assert (whole.start_time, whole.end_time) == (1000 * 10**9, 1005 * 10**9)
    assert [(e.name, e.timestamp) for e in whole.events] == [("first token", 1000_500_000_000)]
    assert whole.attributes is not None
    assert whole.attributes["gen_ai.usage.output_tokens"] == 30
    assert whole.attributes["atoll.key.id"] == "key-7"
    assert whole.status.is_unset
    assert whole.resource.attributes["service.name"] == "atoll-gateway"
    for span in (first, second):
        assert span.context is not None
        assert span.parent == whole.context
        assert span.context.trace_id == whole.context.trace_id
        assert span.context.span_id not in (0, whole.context.span_id)
    assert (first.start_time, first.end_time) == (1000 * 10**9, 1002 * 10**9)
    assert (second.start_time, second.end_time) == (1002_500_000_000, 1005 * 10**9)
    assert not first.status.is_ok
    assert not first.status.is_unset
    assert second.status.is_unset
    assert first.attributes is not None
    assert second.attributes is not None
    assert first.attributes["atoll.provider"] == "eth"
    assert "atoll.provider" not in second.attributes


def test_a_request_that_failed_says_so() -> None:
    failed = MOVED._replace(outcome="truncated", first_token_s=None, attempts=(), key_id=None)
    (whole,) = spans_of(lambda s: s.request(failed, new_trace()))
    assert whole.status.description == "truncated"
    assert whole.parent is None
    assert whole.events == ()
    assert "atoll.key.id" not in (whole.attributes or {})


def test_the_client_decides_for_its_own_traces() -> None:
    off = CLIENT[:-2] + "00"
    assert spans_of(lambda s: s.request(MOVED, child_of(off), off)) == []
    assert len(spans_of(lambda s: s.request(MOVED, child_of(CLIENT), CLIENT), share=0.0)) == 3
    # A header that is none: the trace is ours.
    assert len(spans_of(lambda s: s.request(MOVED, child_of("junk"), "junk"))) == 3


def test_a_share_of_the_traces_begun_here() -> None:
    traces = [new_trace() for _ in range(400)]
    bare = MOVED._replace(attempts=())
    spans = Spans(InMemorySpanExporter(), share=0.25)
    marked = {t[3:35] for t in traces if spans.mark_sampled(t).endswith("-01")}
    spans.close()

    def ask(spans: Spans) -> None:
        for trace in traces:
            spans.request(bare, trace)

    found = {f"{s.context.trace_id:032x}" for s in spans_of(ask, share=0.25) if s.context}
    # Upstream is told what is done here.
    assert found == marked
    assert 50 < len(found) < 150
    assert spans_of(ask, share=0.0) == []


class Away(InMemorySpanExporter):
    def export(self, spans: object) -> SpanExportResult:
        return SpanExportResult.FAILURE


def test_a_collector_that_is_away_costs_spans_only() -> None:
    spans = Spans(Away())
    spans.request(MOVED, new_trace())
    spans.close()
    assert spans.stats() == {"sent": 0, "lost": 1}


def test_where_spans_go() -> None:
    for url in ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces/"):
        spans = Spans.to(url)
        assert vars(spans._exporter)["_endpoint"] == "http://127.0.0.1:4318/v1/traces"
        spans.close()
    with pytest.raises(UsageError, match="not the address of a collector"):
        Spans.to("collector:4318")


def test_nothing_is_imported_until_asked_for() -> None:
    code = (
        "import sys, atoll.telemetry.spans; print([n for n in sys.modules if 'opentelemetry' in n])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
