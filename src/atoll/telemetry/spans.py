"""Spans of OpenTelemetry, for those who ask for them: one a request, with one below it for each attempt.

Spans are made from the record of a request after it ended, by a thread of their own: a request costs one
append to a queue. Ids are those of the W3C header that went upstream, so an engine that traces hangs its
spans below the request's, and the request hangs below the client's. Needs the extra `otel`, which is
imported only when `Spans.to` is called.

    spans = Spans.to("http://collector:4318")
    spans.request(record, trace, parent)  # when a request ended
    spans.close()
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, NamedTuple, Protocol

from atoll.core.errors import UsageError
from atoll.telemetry.background import Background
from atoll.telemetry.usage_record import Attempt, UsageRecord

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from opentelemetry.sdk.trace import ReadableSpan


_HEADER = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_SAMPLED = 1
_TRACES_PATH = "/v1/traces"
# The low 56 bits of a trace's id decide.
_SCALE = 2**56


class Exporter(Protocol):
    """Where spans go: one of OpenTelemetry's exporters."""

    def export(self, spans: Sequence[ReadableSpan]) -> object:
        """Hand spans over for sending."""
        ...

    def shutdown(self) -> None:
        """Send what waits and end the exporter's threads."""
        ...


class _Ended(NamedTuple):
    record: UsageRecord
    trace: str
    parent: str | None


class Spans:
    """Makes spans of requests and sends them.

    `share` is the part of traces, from 0 to 1, that is sent where the client does not say; a client's own
    decision is kept.
    """

    def __init__(
        self, exporter: Exporter, *, service: str = "atoll-gateway", share: float = 1.0
    ) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._exporter = exporter
        self._share = share
        self._sent = self._failed = 0
        self._resource = Resource.create({"service.name": service})
        self._scope = InstrumentationScope("atoll")
        self._thread: Background[_Ended] = Background("atoll-spans", self._export, pause_s=1.0)

    @classmethod
    def to(
        cls,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        service: str = "atoll-gateway",
        share: float = 1.0,
    ) -> Spans:
        """Return spans that go to a collector that speaks OTLP over HTTP, such as http://host:4318."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError as error:
            raise UsageError(
                "spans need OpenTelemetry, which is not installed",
                hint="pip install 'atoll[otel]'",
            ) from error
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"{url!r} is not the address of a collector", hint="http://host:4318")
        bare = url.rstrip("/")
        endpoint = bare if bare.endswith(_TRACES_PATH) else bare + _TRACES_PATH
        exporter = OTLPSpanExporter(endpoint, headers=headers, timeout=5.0)
        return cls(exporter, service=service, share=share)

    def mark_sampled(self, trace: str) -> str:
        """Return the header of a trace begun here, with its flag set if its spans will be sent.

        Upstream then knows as well.
        """
        return trace[:-2] + "01" if self._chooses(trace) else trace

    def request(self, record: UsageRecord, trace: str, parent: str | None = None) -> None:
        """Make spans of a request that ended.

        `trace` is the header sent upstream on its behalf, `parent` the one that the client sent, if any.
        """
        if self._wants(trace, parent):
            self._thread.offer(_Ended(record, trace, parent))

    def stats(self) -> dict[str, int]:
        """Return how many spans were sent, and how many requests were lost on the way."""
        return {"sent": self._sent, "lost": self._thread.lost + self._failed}

    def close(self) -> None:
        """Send what waits and stop."""
        self._thread.close()
        self._exporter.shutdown()

    def _wants(self, trace: str, parent: str | None) -> bool:
        # The header goes on from the client's where that one was valid: then the trace is the same.
        if parent is not None and parent[3:35] == trace[3:35]:
            return bool(int(trace[-2:], 16) & _SAMPLED)
        return self._chooses(trace)

    def _chooses(self, trace: str) -> bool:
        # As OpenTelemetry chooses by ratio: everybody who looks at the same trace decides alike.
        return self._share >= 1.0 or int(trace[21:35], 16) < self._share * _SCALE

    def _export(self, batch: list[_Ended]) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        spans = [span for ended in batch for span in self._spans(ended)]
        if self._exporter.export(spans) is SpanExportResult.SUCCESS:
            self._sent += len(spans)
        else:
            self._failed += len(batch)

    def _spans(self, ended: _Ended) -> list[ReadableSpan]:
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

        record = ended.record
        match = _HEADER.fullmatch(ended.trace)
        if match is None:
            return []
        trace_id = int(match[1], 16)
        flags = TraceFlags(_SAMPLED)
        context = SpanContext(trace_id, int(match[2], 16), False, flags)
        parent = None
        if ended.parent is not None and ended.parent[3:35] == match[1]:
            parent = SpanContext(trace_id, int(ended.parent[36:52], 16), True, flags)
        # A client that goes away is no error of the server.
        good = record.outcome in ("ok", "cancelled")
        events: tuple[Event, ...] = ()
        if record.first_token_s is not None:
            first = Event("first token", timestamp=_ns(record.started_s + record.first_token_s))
            events = (first,)
        whole = ReadableSpan(
            f"{_operation(record.endpoint)} {record.model}",
            context,
            parent,
            self._resource,
            _request_attributes(record),
            events,
            kind=SpanKind.SERVER,
            status=Status(StatusCode.UNSET if good else StatusCode.ERROR, _why(record, good)),
            start_time=_ns(record.started_s),
            end_time=_ns(record.started_s + record.seconds),
            instrumentation_scope=self._scope,
        )
        return [
            whole,
            *(
                ReadableSpan(
                    f"attempt {attempt.node or attempt.backend}",
                    # An id of 0 is none.
                    SpanContext(trace_id, int.from_bytes(os.urandom(8)) or 1, False, flags),
                    context,
                    self._resource,
                    _attempt_attributes(attempt, number),
                    kind=SpanKind.CLIENT,
                    status=Status(
                        StatusCode.ERROR
                        if attempt.outcome in ("failed", "error")
                        else StatusCode.UNSET
                    ),
                    start_time=_ns(start_s),
                    end_time=_ns(start_s + attempt.seconds),
                    instrumentation_scope=self._scope,
                )
                for number, (start_s, attempt) in enumerate(_begin_times(record), 1)
            ),
        ]


def _begin_times(record: UsageRecord) -> list[tuple[float, Attempt]]:
    """Return when each attempt began, in Unix time.

    Records hold how long attempts took. They follow each other, the first begins with the request and
    the last ends with it; a pause between others is taken to lie before the last.
    """
    times: list[tuple[float, Attempt]] = []
    at_s = record.started_s
    for number, attempt in enumerate(record.attempts, 1):
        if number == len(record.attempts) > 1:
            at_s = max(at_s, record.started_s + record.seconds - attempt.seconds)
        times.append((at_s, attempt))
        at_s += attempt.seconds
    return times


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _operation(endpoint: str) -> str:
    """Return what OpenTelemetry's conventions for generative AI call it."""
    return {
        "/v1/chat/completions": "chat",
        "/v1/completions": "text_completion",
        "/v1/embeddings": "embeddings",
        "/v1/audio/transcriptions": "transcription",
        "/v1/audio/speech": "speech",
        "/v1/images/generations": "image_generation",
        "/tokenize": "tokenize",
        "/detokenize": "detokenize",
    }.get(endpoint, endpoint)


def _why(record: UsageRecord, good: bool) -> str | None:
    return None if good else record.outcome


def _request_attributes(record: UsageRecord) -> dict[str, str | int | float | bool]:
    attributes: dict[str, str | int | float | bool] = {
        "http.request.method": "POST",
        "http.response.status_code": record.status,
        "url.path": record.endpoint,
        "gen_ai.operation.name": _operation(record.endpoint),
        "gen_ai.request.model": record.model,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.completion_tokens,
        "atoll.request.id": record.request_id,
        "atoll.stream": record.stream,
        "atoll.outcome": record.outcome,
        "atoll.attempts": len(record.backends),
    }
    if record.key_id is not None:
        attributes["atoll.key.id"] = record.key_id
    return attributes


def _attempt_attributes(attempt: Attempt, number: int) -> dict[str, str | int]:
    attributes: dict[str, str | int] = {
        "atoll.attempt": number,
        "atoll.backend": attempt.backend,
        "atoll.outcome": attempt.outcome,
        "gen_ai.usage.output_tokens": attempt.tokens,
    }
    if attempt.node is not None:
        attributes["atoll.node"] = attempt.node
    if attempt.provider is not None:
        attributes["atoll.provider"] = attempt.provider
    return attributes


_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_POOLED = 64
_pool: list[str] = []


def new_trace() -> str:
    """Return the header of a new, unsampled trace."""
    if not _pool:
        # One draw for many.
        drawn = os.urandom(24 * _POOLED).hex()
        _pool.extend(
            f"00-{drawn[at : at + 32]}-{drawn[at + 32 : at + 48]}-00"
            for at in range(0, len(drawn), 48)
        )
    return _pool.pop()


def child_of(traceparent: str) -> str:
    """Return the header for a call made on behalf of a request that came with `traceparent`.

    The trace id and its flags stay, the span is new. Where the header is not valid a new trace begins.
    """
    new = new_trace()
    match = _TRACEPARENT.fullmatch(traceparent)
    if match is not None and _valid(*match.groups()):
        return f"00-{match[2]}-{new[36:52]}-{match[4]}"
    return new


def _valid(version: str, trace: str, span: str, flags: str, more: str | None) -> bool:
    del flags
    # There is no version ff; 00 has four fields, later ones may have more.
    if version == "ff" or (version == "00" and more is not None):
        return False
    return trace.strip("0") != "" and span.strip("0") != ""
