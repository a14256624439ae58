"""One request on its way: what its backend says, and what the client hears of it.

How it finds a backend, and another if that one fails, is in `attempts`.

The last chunk with its reason, the usage and the end mark are held back until all three are there: a
client that sees the end of an answer sees all of it, and a backend that dies before costs nothing.
"""

from __future__ import annotations

from atoll.runtime.gateway import faults
from atoll.runtime.gateway.attempt import Attempts
from atoll.runtime.gateway.events import (
    DONE,
    StreamJournal,
    event_of,
    finishes,
    payload,
    read_chunk,
    split_events,
    tokens_in,
)
from atoll.runtime.gateway.resume import DivergedError
from atoll.runtime.openai import (
    ApiError,
    answer_usage,
    asks_for_usage,
    upstream_error,
    usage_of,
)

_RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
_ERROR_BYTES = 2**20
_PROMPT_WORK = 1 / 64
"""What reading a token takes, against writing one."""


def work_of(prompt_tokens: float, completion_tokens: float) -> float:
    """Return what a request costs a backend, in tokens written."""
    return 1.0 + completion_tokens + _PROMPT_WORK * prompt_tokens


class Relay(Attempts):
    """A request and what has become of it so far."""

    # Of the answer being read:
    _status = 0
    _streaming = False
    _plain = False
    """Whether events may pass unread."""
    _carry = b""
    _held: tuple[bytes, ...] = ()
    """The end of the answer, as far as it is there."""
    _finished = False
    _sent = 0
    """Tokens that were written down."""
    _size = 0
    _note = b""
    """Content type of an answer, Retry-After of an error."""

    def _clear(self) -> None:
        self._status = self._size = 0
        self._streaming = self._plain = self._finished = False
        self._carry = self._note = b""
        self._usage = None
        self._held = ()
        self._gather = []

    # What the backend says

    def on_head(self, status: int, content_type: bytes, retry_after: bytes) -> None:
        """Begin to read an answer."""
        self._status = status
        self._note = content_type if status < 400 else retry_after
        if status == 200 and content_type.startswith(b"text/event-stream"):
            self._streaming = True
            self._plain = self._rewriter is None

    def on_body(self, data: bytes) -> None:
        """Pass a piece of the answer on."""
        if not self._streaming:
            self._gather.append(data)
            self._size += len(data)
            if self._size > _ERROR_BYTES:
                self._check_size()
            return
        self._last_s = self._app.loop.time()
        # The usual case: whole events, none of which says that the answer ends or went wrong. (Inside of
        # text the quotes would be escaped.)
        if (
            self._plain
            and not self._carry
            and data.endswith(b"\n\n")
            and b'"finish_reason":"' not in data
            and b'"finish_reason": "' not in data
            and b'"error"' not in data
            and not data.endswith(DONE)
        ):
            if not self.begun:
                self._begin()
            self.journal.append(data)
            if self.slot is not None:
                self._count(data)
            self.client.send(data)
            return
        self._read(data)

    def on_end(self) -> None:
        """Finish with a complete answer, or find that it is none."""
        self._way = None
        if self._streaming:
            if self._finished:
                self._end_stream()
            else:
                self._failed("the stream ended early")
            return
        body = b"".join(self._gather)
        if self._status == 200 and not self.begun:
            self._usage = answer_usage(body)
            self._succeeded()
            self.first_s = self._app.loop.time()
            said = b""
            if self.wish is not None:
                said = self._said()
                if self.slot is not None and self._usage is not None:
                    self._app.delivered(self.slot, self._usage.completion_tokens)
            self.client.respond(200, body, self._note or b"application/json", said)
            self._finish(200, "ok")
        elif self._status in _RETRIED:
            self._refused()
        elif self.begun:
            self._failed(f"status {self._status} instead of a stream")
        elif self._status >= 400:
            self._succeeded()
            self.client.respond(self._status, upstream_error(self._status, body))
            self._finish(self._status, "error")
        else:
            self._failed(f"unexpected status {self._status}")

    def on_lost(self, reason: str, *, unused: bool) -> None:
        """Go on elsewhere; a kept connection that was closed already is nobody's failure."""
        self._way = None
        member = self._member
        if unused and member is not None and not member.node:
            self._app.links(member).drop_idle()
            self._tries -= 1
            self._release()
            self.attempt()
        elif self._finished and self._usage is not None:
            # All but the end mark is there.
            self._end_stream()
        elif member is not None and member.node:
            # A node that never answered was not tried; one that is gone is not to blame.
            gone = not self._app.is_there(member)
            self._failed(reason, tried=self._status != 0, died=gone, blame=not gone)
        else:
            self._failed(reason)

    def _check_size(self) -> None:
        most = self._app.limits.answer_bytes if self._status < 400 else _ERROR_BYTES
        if self._size > most:
            self._failed("the answer is too large")

    def _refused(self) -> None:
        status = self._status
        full = status == 429 or (status == 503 and self._note != b"")
        error = faults.backend_refused(status, self._note)
        self._failed(f"status {status}", blame=not full, error=error)

    # Streams

    def _begin(self) -> None:
        self.begun = True
        self.journal = StreamJournal()
        self.first_s = self._app.loop.time()
        self.client.begin_stream(self._said())

    def _said(self) -> bytes:
        """Return headers that say who answers."""
        if self.wish is None or self._member is None:
            return b""
        return self._app.chooser.heads(self.wish, self._member, self.model)

    def _count(self, events: bytes) -> None:
        """Write down what the client is about to have."""
        new = tokens_in(events)
        if new and self.slot is not None:
            self._sent += new
            self._app.delivered(self.slot, self._sent)

    def _deliver(self, event: bytes) -> None:
        if not self.begun:
            self._begin()
        self._missed = 0
        self.journal.append(event)
        if self.slot is not None:
            self._count(event)
        self.client.send(event)

    def _read(self, data: bytes) -> None:
        """Take events apart: at the end of a stream, and in one that was moved."""
        events, self._carry = split_events(self._carry + data)
        for event in events:
            said = payload(event)
            if said is None:
                if self._rewriter is None:
                    self._deliver(event)
                continue
            if said == b"[DONE]":
                way, self._way = self._way, None
                if self._finished or self._rewriter is None:
                    if way is not None:
                        way.leave()
                    self._end_stream()
                else:
                    self._way = way
                    self._failed("the stream ended early")
                return
            if not self._take(event, said):
                return

    def _take(self, event: bytes, said: bytes) -> bool:
        """Pass one chunk on, hold it, or fail; return whether to read on."""
        chunk = read_chunk(said)
        if chunk is None or chunk.get("error") is not None:
            self._failed(f"error in the stream: {said[:200].decode(errors='replace')}")
            return False
        if self._rewriter is not None:
            try:
                chunk = self._rewriter.chunk(chunk)
            except DivergedError as error:
                self._fail(faults.stream_interrupted(str(error)))
                return False
            if chunk is None:
                return True
            event = event_of(chunk)
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self._usage = usage_of(usage)
            if not chunk.get("choices"):
                if asks_for_usage(self.request):
                    self._held += (event,)
                return True
        if finishes(chunk):
            self._finished = True
            self._plain = False
            self._held += (event,)
            return True
        if self._held:
            # Another of several answers goes on.
            self._deliver(b"".join(self._held))
            self._held = ()
        self._deliver(event)
        return True

    def _end_stream(self) -> None:
        if not self.begun:
            self._begin()
        last = b"".join(self._held)
        self.journal.append(last)
        self._succeeded()
        if self.slot is not None:
            self._count(last)
        self.client.end_stream(last + DONE)
        self._finish(200, "ok")

    # The end

    def _succeeded(self) -> None:
        member, app = self._member, self._app
        if member is None:
            return
        pool = app.pool
        now_s = app.loop.time()
        seconds = now_s - self._attempt_s
        pool.succeeded(member, seconds)
        if not pool.learns:
            return
        usage = self._usage
        if usage is not None and len(self.backends) == 1 and seconds > 0:
            beside = (member.clocked(now_s) - self._area) / seconds - 1.0 + member.elsewhere
            work = work_of(usage.prompt_tokens, usage.completion_tokens)
            pool.learn(member, self.model, work, seconds, beside, now_s)

    def _fail(self, error: ApiError) -> None:
        """Tell the client that it did not work."""
        self._drop()
        if not self.begun:
            self.client.respond_error(error)
            self._finish(error.status, "error")
            return
        self.client.end_stream(b"data: " + error.body() + b"\n\n")
        self._finish(error.status, "truncated")

    def _finish(self, status: int, outcome: str) -> None:
        if self._done:
            return
        self._done = True
        app = self._app
        if self.wish is not None:
            app.waiting.pop(self, None)
            if app.detailed and self._member is not None:
                usage = self._usage
                tokens = usage.completion_tokens if usage else self.journal.delivered().tokens
                ended = outcome if outcome in ("ok", "cancelled") else "error"
                self._over(self._member, ended, tokens, app.loop.time())
        self._release()
        app.finished(self, status, outcome, self._usage)

    # What the client and the clock say

    def cancel(self) -> None:
        """Stop: the client is gone."""
        self._drop()
        self._finish(499, "cancelled")

    def pause(self) -> None:
        """Take nothing from the backend until the client keeps up."""
        self._paused_s = self._app.loop.time()
        if self._way is not None:
            self._way.pause()

    def resume(self) -> None:
        """Go on."""
        self._paused_s = None
        self._last_s = self._app.loop.time()
        if self._way is not None:
            self._way.resume()

    def tick(self, now_s: float) -> None:
        """Give up what is overdue."""
        deadlines = self._app.deadlines
        if now_s - self.started_s > deadlines.request_s:
            self._fail(faults.too_long())
        elif self._wake_s is not None:
            if now_s >= self._wake_s:
                self.attempt()
        elif self._paused_s is not None:
            if now_s - self._paused_s > deadlines.client_s:
                self.client.abort()
        elif self._streaming:
            # Some engines greet before they prefill: the second event is the first token.
            early = self.journal.short and self._rewriter is None
            most_s = deadlines.first_token_s if early else deadlines.between_tokens_s
            if self._rewriter is not None and self._last_s <= self._attempt_s:
                most_s = deadlines.first_token_s
            if now_s - self._last_s > most_s:
                self._failed(f"no token for {most_s:g} s", late=True)
        elif self._deadline_s is not None and now_s > self._deadline_s:
            connecting = self._connecting is not None
            what = "connection" if connecting else "answer"
            self._failed(f"no {what} in time", tried=not connecting, late=True)
