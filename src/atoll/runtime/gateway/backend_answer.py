"""The answer of one backend to one request, as far as it has come.

The last chunk with its reason, the usage and the end mark are held back until all three are there: a
client that sees the end of an answer sees all of it, and a backend that dies before costs nothing.

`fault_of_client` says whose fault an error is. Engines answer some mistakes of clients with 500, or with an
error as the first event of a stream: a grammar that cannot be read, a schema that cannot be compiled. Another
backend would say the same, so the client is told what the first one said. Only what an engine says in so many
words counts; any other 500 is tried elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import msgspec

from atoll.runtime.gateway.events import (
    UnfinishedEvent,
    event_of,
    finishes,
    payload,
    read_chunk,
    split_events,
)
from atoll.runtime.gateway.resume import Rewriter
from atoll.runtime.gateway.token_counts import EventCounts, counts_reasoning
from atoll.runtime.openai import ApiError, Usage, usage_of

_TYPES = frozenset(
    {"BadRequestError", "invalid_request_error", "ValidationError", "RequestValidationError"}
)
_PHRASES = re.compile(
    r"(failed|unable|error|cannot|could not)\b.{0,20}\bpars(e|ing)\b.{0,20}\b(grammar|schema|regex)"
    r"|(invalid|unsupported|malformed|bad)\b.{0,20}\b(schema|grammar|regex|regular expression)"
    r"|(grammar|schema|regex)\b.{0,40}\b(is invalid|not supported|unsupported|conversion failed)"
    r"|\bBadRequestError\b",
    re.IGNORECASE,
)
_REASON_CHARS = 2000
"""Of an error, as far as it is looked at and told."""
_REPEATED = frozenset({408, 409, 425, 429})
"""Errors of clients that are worth another attempt."""


_NOTE = re.compile(rb"[!-~ ]{1,1024}")
_SHOWN_BYTES = 200
"""Of an event that says that the answer failed, for the log."""
_EVENT_BYTES = 32 * 2**20
"""Of one event; sound comes in large ones."""


class BrokenStreamError(Exception):
    """A stream of a backend says that it failed, or ends before its end; `fault`: for what the client did."""

    def __init__(self, message: str, fault: ApiError | None = None) -> None:
        super().__init__(message)
        self.fault = fault


class Answer:
    """Answer of a backend; a request that is tried again gets another. Nothing here does I/O."""

    # Most answers never leave these as they are: defaults of the class cost a request nothing.
    status = 0
    note = b""
    """Content type of an answer, Retry-After of an error."""
    streaming = False
    plain = False
    """Whether events may pass unread."""
    unfinished: UnfinishedEvent | None = None
    """The beginning of an event whose end has not come."""
    finished = False
    """Whether the chunk with the reason is there."""
    ended = False
    """Whether the end mark is there."""
    held: tuple[bytes, ...] = ()
    """Events that end the answer, or one of several, as far as they are there."""
    usage_event = b""
    """The last event, for those who asked for the usage."""
    usage: Usage | None = None
    counts: EventCounts | None = None
    """How the backend says how many tokens its events bring, if it does."""
    recounts = False
    """Whether it tells reasoning from the rest in them."""
    rewriter: Rewriter | None = None
    """Of a stream that was moved here."""
    size = 0
    notes: Mapping[bytes, bytes] | None = None
    """Headers of the backend beside it (`http.upstream.Upstream.notes`)."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        """Of an answer that is no stream."""

    def note_of(self, name: bytes) -> bytes | None:
        """Return what the backend says beside its answer under a name."""
        return None if self.notes is None else self.notes.get(name)

    def note_headers(self) -> bytes:
        """Return headers of the backend for the client: by which executors it answers, what it left out."""
        lines = b""
        for name in (b"x-atoll-path", b"x-atoll-ignored"):
            note = self.note_of(name)
            if note is not None and _NOTE.fullmatch(note) is not None:
                lines += b"%b: %b\r\n" % (name, note)
        return lines

    def begin(self, status: int, content_type: bytes, retry_after: bytes) -> None:
        """Take the status and the headers."""
        self.status = status
        self.note = content_type if status < 400 else retry_after
        if status == 200 and content_type.startswith(b"text/event-stream"):
            self.streaming = True
            self.plain = self.rewriter is None and not (self.counts and self.counts.translated)

    def show(self, events: bytes) -> bytes:
        """Return events as the client should see them, but for the one with the usage of all."""
        return events if self.counts is None else self.counts.strip(events)

    def show_end(self) -> bytes:
        """Return the end of the answer as the client should see it."""
        return self.show(b"".join(self.held)) + self.usage_event

    def read(self, data: bytes, *, wants_usage: bool) -> Iterator[bytes]:
        """Take events apart, at the end of a stream and in one that was moved; yield those to send now.

        An error in the stream is a BrokenStreamError, a replay that says something else a DivergedError.
        `wants_usage`: the client asked for the chunk with the usage.
        """
        for event in self._events(data):
            data_field = payload(event)
            if data_field is None:
                # Comments pass only as long as the stream is where it began.
                if self.rewriter is None:
                    yield event
            elif data_field != b"[DONE]":
                yield from self._take(event, data_field, wants_usage)
            elif self.finished or self.rewriter is None:
                # Who answers from the start may leave the reason out; who goes on with a stream may not.
                self.ended = True
                return
            else:
                raise BrokenStreamError("the stream ended early")

    def _events(self, data: bytes) -> list[bytes]:
        """Return the events that end with what came, and keep the beginning of the next."""
        whole: bytes | None = data
        events: list[bytes] = []
        if self.unfinished is not None:
            whole = self.unfinished.add(data)
        if whole is not None:
            events, rest = split_events(whole)
            self.unfinished = UnfinishedEvent(rest) if rest else None
        # Looked at on the unfinished event only: whole ones are passed on and not kept.
        if self.unfinished is not None and len(self.unfinished) > _EVENT_BYTES:
            raise BrokenStreamError(f"an event has more than {_EVENT_BYTES} bytes")
        return events

    def _take(self, event: bytes, data_field: bytes, wants_usage: bool) -> Iterator[bytes]:
        """Yield what one chunk brings, or hold it."""
        chunk = read_chunk(data_field)
        if chunk is None or chunk.get("error") is not None:
            shown = data_field[:_SHOWN_BYTES].decode(errors="replace")
            fault = None if chunk is None else fault_in(chunk["error"])
            raise BrokenStreamError(f"error in the stream: {shown}", fault)
        # What it says of the tokens of one answer so far is not yet what the request used.
        said = None if self.counts is None else self.counts.take(chunk)
        if said is not None and counts_reasoning(said):
            self.recounts = True
        # The stream was moved here: the client sees only what is news, under the names of its first chunk.
        if self.rewriter is not None:
            chunk = self.rewriter.chunk(chunk)
            if chunk is None:
                return
            if said is not None:
                self.rewriter.count(said)
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self.usage = usage_of(usage)
        if self.rewriter is not None or (self.counts is not None and self.counts.translated):
            event = event_of(chunk if said is None else chunk | {"usage": said})
        # A chunk with nothing but the usage is for those who asked for it; here it is counted in any case.
        if isinstance(usage, dict) and not chunk.get("choices"):
            if wants_usage:
                self.usage_event = event
        elif finishes(chunk):
            self.finished = True
            # From here on every event is read: the end has to be held back.
            self.plain = False
            self.held += (event,)
        else:
            if self.held:
                # Another of several answers goes on.
                yield b"".join(self.held)
                self.held = ()
            yield event


def fault_of_client(status: int, body: bytes) -> ApiError | None:
    """Return the error with which a client is answered, if an error of status 500 is its own fault."""
    if status != 500:
        return None
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        data = body[:_REASON_CHARS].decode(errors="replace")
    error = data.get("error", data) if isinstance(data, dict) else data
    return fault_in(error)


def fault_in(error: object) -> ApiError | None:
    """Return the error with which a client is answered, if what an engine says of it is its own fault."""
    # Engines say what is wrong as text, under `message`, or under `detail`.
    if isinstance(error, str):
        error = {"message": error}
    if not isinstance(error, dict):
        return None
    message = error.get("message") or error.get("detail") or ""
    if not isinstance(message, str):
        return None
    message = message[:_REASON_CHARS]
    code = error.get("code")
    named = isinstance(code, int) and 400 <= code < 500 and code not in _REPEATED
    kind = error.get("type")
    typed = isinstance(kind, str) and kind in _TYPES
    if not named and not typed and _PHRASES.search(message) is None:
        return None
    param = error.get("param")
    return ApiError(
        code if named and isinstance(code, int) else 400,
        message or "the engine cannot serve this request",
        param=param if isinstance(param, str) else None,
        code="engine_refused",
    )


def reason_of(body: bytes) -> str:
    """Return what an error of a backend says, as one line."""
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return ""
    error = data.get("error", data) if isinstance(data, dict) else None
    said = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    return " ".join(said[:500].split()) if isinstance(said, str) else ""
