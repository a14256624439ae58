"""One request on its way whose answer is sound, pictures or a transcript.

Sound, and events that are not those of chat, pass to the client piece by piece and unread. As long as it has
nothing another backend is tried, as for any request. After that nothing can go on elsewhere: sound that
breaks off is cut (the connection closes without the end of the body), so that no client takes a part for
the whole; a stream of events ends with the error `stream_interrupted`.
"""

from __future__ import annotations

from atoll.runtime.gateway import faults
from atoll.runtime.gateway.attempt import Attempts
from atoll.runtime.gateway.events import payload, split_events
from atoll.runtime.gateway.form import TranscriptionForm
from atoll.runtime.gateway.relay import Relay, RelayContext
from atoll.runtime.gateway.settings import Deadlines
from atoll.runtime.http.http_server import Connection, Request
from atoll.runtime.http.upstream import RequestTemplate
from atoll.runtime.openai import (
    IMAGES,
    SPEECH,
    TRANSCRIPTIONS,
    ApiError,
    ImageRequest,
    SpeechRequest,
    TranscriptionRequest,
    Usage,
    header_usage,
    loose_usage,
)
from atoll.runtime.pool.member import Member

_EVENTS = b"text/event-stream"
# Types of answers that pass to the client as they come; all others are kept until they are whole.
_PIECEWISE = (_EVENTS, b"audio/", b"video/", b"image/", b"application/octet-stream")
_RAW = (b"audio/wav", b"audio/x-wav", b"audio/wave", b"audio/pcm", b"audio/l16")
"""Sound whose length is known from its bytes: 16 bits, one channel."""
# Bytes before the sound in a WAV file of the plain form.
_WAV_HEADER = 44
_RATE_HZ = 24_000
_TAIL_BYTES = 64 * 2**10
"""Of a stream of events, in which its usage is looked for."""

MediaRequest = SpeechRequest | ImageRequest | TranscriptionRequest
MEDIA_ENDPOINTS = frozenset({SPEECH, IMAGES, TRANSCRIPTIONS})


class MediaRelay(Relay):
    """A request for speech, a picture or a transcript, and what has become of it so far."""

    _piecewise = False
    """Whether the answer passes to the client as it comes."""
    _kind = b""
    """Type of such an answer."""
    client: Connection
    _passed = 0
    """Bytes of it that the client has."""
    _tail = b""

    def __init__(
        self,
        context: RelayContext,
        client: Connection,
        sent: Request,
        request: MediaRequest,
        headers: bytes,
        form: TranscriptionForm | None = None,
    ) -> None:
        super().__init__(context, client, sent, request, headers)
        self.stream = bool(request.stream)
        self._form = form
        if form is not None:
            template = RequestTemplate(content_type=form.content_type)
            self.attempts = Attempts(context, sent.path, headers, template)

    def _rename(self, model: str) -> bytes:
        if self._form is None:
            return super()._rename(model)
        # Where the name stands is known of the body as it came.
        return self._form.with_model(self.sent.body, model)

    def choose(self, now_s: float) -> Member | None:
        """Return the backend to try next; what the one before said is void."""
        self._piecewise = False
        return super().choose(now_s)

    # What the backend says

    def on_head(self, status: int, content_type: bytes, retry_after: bytes) -> None:
        """Note what kind of answer comes, and whether it can pass as it does."""
        super().on_head(status, content_type, retry_after)
        kind = content_type.lower()
        self._piecewise = status == 200 and kind.startswith(_PIECEWISE)
        self._kind = kind

    def _takes_events(self) -> bool:
        # They are asked for in several ways.
        return True

    def on_body(self, data: bytes) -> None:
        """Pass a piece of the answer on."""
        if not self._piecewise:
            super().on_body(data)
            return
        self._last_s = self._context.loop.time()
        if not data:
            return
        if not self.begun:
            self._begin_pieces()
        self._passed += len(data)
        if self._kind.startswith(_EVENTS):
            self._tail = (self._tail + data)[-_TAIL_BYTES:]
        if self.slot is not None and self._kind.startswith(_RAW):
            self._context.record_media(self.slot, Usage(speech_seconds=self._heard_s()))
        self.client.send(data)

    def _begin_pieces(self) -> None:
        self.begun = True
        self.first_s = self._context.loop.time()
        kind = self._answer.note or b"application/octet-stream"
        # Proxies that would collect an answer before they pass it on are asked not to.
        extra = b"cache-control: no-cache\r\nx-accel-buffering: no\r\n" + self._headers()
        self.client.begin(200, kind, extra)

    def on_end(self) -> None:
        """Finish with a complete answer, or find that it is none."""
        if not self._piecewise:
            super().on_end()
            return
        self.attempts.upstream = None
        if not self.begun:
            # Nothing was sent to the client: another backend may do better.
            self._fail_over("the answer is empty")
            return
        self._answer.usage = usage = self._measure(whole=True)
        self._note_success()
        if self.slot is not None:
            self._context.record_delivery(self.slot, usage.completion_tokens)
            self._context.record_media(self.slot, usage)
        self.client.end_stream(b"")
        self._finish(200, "ok")

    # What was used

    def _find_usage(self, body: bytes) -> Usage | None:
        noted = self._answer.note_of(b"x-atoll-usage")
        return loose_usage(body) or (None if noted is None else header_usage(noted))

    def _measure(self, *, whole: bool) -> Usage:
        """Return what an answer in pieces has used, as far as the client has it."""
        noted = self._answer.note_of(b"x-atoll-usage")
        usage = (header_usage(noted) if noted is not None else None) or Usage()
        if self._kind.startswith(_EVENTS):
            return self._usage_in_events() or usage
        if self._kind.startswith(_RAW):
            heard_s = self._heard_s()
            # The backend says how long all of it is; of sound that broke off the client has less.
            if not usage.speech_seconds or (not whole and heard_s < usage.speech_seconds):
                usage.speech_seconds = heard_s
        return usage

    def _heard_s(self) -> float:
        """Return how many seconds of sound the client has, by its bytes."""
        noted = self._answer.note_of(b"x-atoll-rate-hz") or b""
        # Bounded by its digits: no rate has seven.
        rate_hz = int(noted) if noted.isdigit() and len(noted) < 7 else 0
        header = 0 if self._kind.startswith((b"audio/pcm", b"audio/l16")) else _WAV_HEADER
        return max(0, self._passed - header) / 2 / (rate_hz or _RATE_HZ)

    def _usage_in_events(self) -> Usage | None:
        """Return the usage in the last event that has one."""
        for event in reversed(split_events(self._tail)[0]):
            data_field = payload(event)
            usage = None if data_field is None else loose_usage(data_field)
            if usage is not None:
                return usage
        return None

    # When a backend fails

    def can_move(self, now_s: float) -> bool:
        """Whether another backend could take it now: not once the client has a part of the answer."""
        return not self.begun and super().can_move(now_s)

    def _search(self, now_s: float) -> None:
        if self.begun:
            self._fail(self._error or faults.unreachable(self.model))
        else:
            super()._search(now_s)

    def _fail(self, error: ApiError) -> None:
        if self.begun and error.code != "timeout":
            error = faults.stream_interrupted("what was begun cannot go on elsewhere")
        if not self.begun or self._kind.startswith(_EVENTS):
            super()._fail(error)
            return
        # Without the end of the body, so that no client takes a part for the whole.
        self.attempts.drop()
        self._finish(error.status, "truncated")
        self.client.abort()

    def _finish(self, status: int, outcome: str) -> None:
        if self.begun and not self._done and self._answer.usage is None:
            self._answer.usage = self._measure(whole=False)
            self.estimated = True
        super()._finish(status, outcome)

    def _check_silence(self, now_s: float, deadlines: Deadlines) -> None:
        if not self._piecewise:
            super()._check_silence(now_s, deadlines)
            return
        # Events may hold comments that say "still here"; sound is silent as long as a graph server waits for
        # an executor that is starting again, and cannot go on elsewhere.
        heard_of = self.begun and self._kind.startswith(_EVENTS)
        max_s = deadlines.between_tokens_s if heard_of else deadlines.first_token_s
        if now_s - max(self._last_s, self.attempts.began_s) > max_s:
            self._fail_over(f"nothing for {max_s:g} s", late=True)
