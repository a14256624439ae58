"""Records of a request when it ends: counters, a line of the log, the ledger, traces."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, get_type_hints

import msgspec

from atoll.runtime.gateway.attempt import Attempts, spoken_seconds
from atoll.runtime.gateway.gateway_metrics import GatewayMetrics
from atoll.runtime.gateway.relay import Relay
from atoll.runtime.gateway.request_log import LoggedRequest, RequestLog, TriedBackend
from atoll.runtime.gateway.series import Series
from atoll.runtime.gateway.traffic_tally import EndedRequest
from atoll.runtime.openai import FORMS, REQUESTS, Usage
from atoll.telemetry.logs import JsonLog, Log
from atoll.telemetry.usage_record import OnUsage, UsageRecord

if TYPE_CHECKING:
    from atoll.runtime.accounts.accounts import Accounts, Grant
    from atoll.telemetry.spans import Spans
    from atoll.telemetry.traffic_recording import Recorder

ENDPOINTS = {path.encode(): path for path in (*REQUESTS, *FORMS)}
"""By their bytes in a request."""
_NO_MEDIA = (0.0, 0.0, 0)


class UsageWriter:
    """Writes down requests that ended, for whoever wants to know.

    `wanted` says whether more than counters and the log is kept of every request.
    """

    def __init__(
        self,
        metrics: GatewayMetrics,
        series: Series,
        log: Log,
        requests: RequestLog,
        *,
        on_usage: OnUsage | None,
        accounts: Accounts | None,
        recorder: Recorder | None,
        spans: Spans | None,
    ) -> None:
        self._metrics = metrics
        self._series = series
        self._log = log
        self._requests = requests
        self._on_usage = on_usage
        self._accounts = accounts
        self._recorder = recorder
        self._spans = spans
        self.access_log: JsonLog | None = None
        self.wanted = False

    def write(
        self, relay: Relay, status: int, outcome: str, usage: Usage | None, seconds: float
    ) -> None:
        """Write down a request; without a usage, as much as the client has of the answer."""
        first_s = None if relay.first_s is None else relay.first_s - relay.started_s
        estimated = relay.estimated or (usage is None and outcome != "error")
        # The backend never said what it used: what the client has is counted instead.
        if usage is None:
            delivered = relay.journal.read()
            tokens, spoken_s = delivered.tokens, spoken_seconds(delivered.audio_chars)
            usage = Usage(0, tokens, tokens, speech_seconds=spoken_s)
        if relay.got_tokens is not None:
            # What lay in buffers when the client went away is not billed.
            usage = Usage(
                usage.prompt_tokens,
                min(usage.completion_tokens, relay.got_tokens),
                speech_seconds=usage.speech_seconds,
                audio_seconds=usage.audio_seconds,
                image_pixels=usage.image_pixels,
            )
        endpoint = relay.endpoint or ENDPOINTS[relay.sent.path]
        turn = None if relay.requirements is None else relay.requirements.turn
        # A choice between models is written down as what was asked for; backends say who answered.
        model = relay.model if turn is None else turn.choice.name
        # Of a stream that another gateway began, what that one did not write down.
        before = relay.billed
        prompt = max(0, usage.prompt_tokens - before[0])
        completion = max(0, usage.completion_tokens - before[1])
        tally = self._metrics.tally(model, endpoint, status)
        tally.add(seconds, first_s, prompt, completion)
        media = _NO_MEDIA
        if usage.audio_seconds or usage.speech_seconds or usage.image_pixels:
            media = (usage.audio_seconds, usage.speech_seconds, usage.image_pixels)
            self._metrics.add_media(model, *media)
        now_s = time.time()
        fields = (
            relay.sent.id.decode(),
            model,
            endpoint,
            relay.stream,
            status,
            prompt,
            completion,
            estimated,
            tuple(relay.attempts.backends),
            now_s - seconds,
            seconds,
            first_s,
            outcome,
        )
        grant = None if relay.requirements is None else relay.requirements.grant
        key = None if grant is None else grant.key_id
        # Of a key that is not tracked no trace is kept.
        if grant is None or grant.track:
            self._requests.add(log_request(relay, fields, key))
        if self.access_log is not None:
            answered = "" if turn is None else turn.choice.model_of(relay.model)
            line = _AccessLine(now_s, relay.sent.trace[3:35], *fields, *media, answered)
            self.access_log.line(_encode(line) + b"\n")
        if relay.kept is not None:
            relay.kept.stream.bill(prompt, completion)
        # The record is made only where somebody keeps it.
        if self._on_usage is not None or self.wanted:
            self._hand_out(relay, UsageRecord(*fields, key, relay.shares, *media), grant)
        if relay.kept is not None:
            relay.kept.stream.let_go()

    def _hand_out(self, relay: Relay, record: UsageRecord, grant: Grant | None) -> None:
        """Give the record of a request to whoever keeps it."""
        for share in record.attempts:
            self._series.tokens(share.provider, share.tokens)
        # Exactly once for each slot: it is free again after this.
        if self._accounts is not None and relay.slot is not None and grant is not None:
            self._accounts.closed(relay.slot, grant, record)
        if self._on_usage is not None:
            try:
                self._on_usage(record)
            except Exception as error:  # noqa: BLE001 - another's code must not break the request
                self._log.event("usage.lost", id=record.request_id, error=repr(error))
        if grant is None or grant.track:
            self._trace(relay, record)

    def _trace(self, relay: Relay, record: UsageRecord) -> None:
        if self._recorder is not None:
            self._recorder.record(
                record.started_s,
                record.model,
                relay.sent.body,
                record.prompt_tokens,
                record.completion_tokens,
            )
        if self._spans is not None:
            traceparent = relay.sent.headers.get(b"traceparent")
            trace = None if traceparent is None else traceparent.decode("latin-1")
            self._spans.request(record, relay.sent.trace, trace)


def log_request(relay: Relay, fields: tuple[Any, ...], key_id: str | None) -> LoggedRequest:
    """Return what is kept of a request that ended; `fields` are those of its record, up to the outcome."""
    name, model, endpoint, stream, status, prompt, completion, _, _, at_s, seconds, first_s, how = (
        fields
    )
    ended_s = relay.started_s + seconds
    return LoggedRequest(
        name,
        relay.sent.trace[3:35],
        model,
        endpoint,
        stream,
        status,
        how,
        prompt,
        completion,
        at_s,
        seconds,
        first_s,
        key_id,
        tuple(
            each
            for leg in relay.attempts.prefills
            for each in _tried(leg, leg.ended_s or ended_s, relay.started_s)
        ),
        tuple(_tried(relay.attempts, ended_s, relay.started_s)),
    )


def _tried(attempts: Attempts, ended_s: float, started_s: float) -> Iterator[TriedBackend]:
    """Yield the backends of attempts: each ends where the next one begins."""
    # Of a request that no backend got there is none.
    ends = (*attempts.begins[1:], ended_s) if attempts.begins else ()
    for backend, begin_s, end_s in zip(attempts.backends, attempts.begins, ends, strict=True):
        yield TriedBackend(backend, begin_s - started_s, end_s - started_s)


def _access_line() -> Any:
    """Return the type of a line of the log: a request that ended, its trace, the fields of its record."""
    names = UsageRecord._fields[: UsageRecord._fields.index("outcome") + 1]
    hints = get_type_hints(UsageRecord)
    fields: list[Any] = [("time", float), ("trace", str), ("id", str)]
    fields += [(name, hints[name]) for name in names[1:]]
    # Sound and pictures only where there are any.
    media = ("audio_seconds", "speech_seconds", "image_pixels")
    fields += [(n, hints[n], zero) for n, zero in zip(media, _NO_MEDIA, strict=True)]
    # The model that answered, where several may.
    fields.append(("answered", str, ""))
    return msgspec.defstruct(
        "AccessLine", fields, tag_field="event", tag="request", gc=False, omit_defaults=True
    )


_AccessLine = _access_line()
_encode = msgspec.json.Encoder().encode


def ended_request(
    relay: Relay, status: int, outcome: str, usage: Usage | None, seconds: float
) -> EndedRequest:
    """Return what a controller is told of a request; without a usage, of what the client has."""
    first_s = None if relay.first_s is None else relay.first_s - relay.started_s
    tokens = 0 if usage is None else usage.completion_tokens
    if usage is None and outcome == "cancelled":
        tokens = relay.journal.read().tokens
    read = None if usage is None else usage.prompt_tokens
    return EndedRequest(status, outcome, relay.stream, seconds, first_s, tokens, read)
