"""One request on its way: to a backend, to another if that one fails, and its answer back.

Before the client has seen anything, a failed attempt is simply made again elsewhere. Once a stream has
begun, it is moved (`resume`). A request is sent to at most `attempts` backends without a token in
between; a connection that is refused costs no attempt, but the search for a backend has a deadline.

The last chunk with its reason, the usage and the end mark are held back until all three are there: a
client that sees the end of an answer sees all of it, and a backend that dies before costs nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from atoll.runtime.backends import Member
from atoll.runtime.gateway import faults
from atoll.runtime.gateway.events import (
    DONE,
    Journal,
    event_of,
    finishes,
    payload,
    read_chunk,
    split,
)
from atoll.runtime.gateway.http import Connection, Request
from atoll.runtime.gateway.resume import DivergedError, Rewriter, resume
from atoll.runtime.gateway.upstream import Link, Links
from atoll.runtime.openai import (
    AnyRequest,
    ApiError,
    Generation,
    Usage,
    answer_usage,
    asks_for_usage,
    upstream_error,
    usage_of,
    with_usage,
)

if TYPE_CHECKING:
    from atoll.runtime.gateway.app import Gateway

_RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
_BACKOFF_S = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8)
_ERROR_BYTES = 2**20


class Relay:
    """A request and what has become of it so far."""

    # Most requests never leave these as they are: defaults of the class cost a request nothing.
    stream = False
    first_s: float | None = None
    """When the answer began."""
    journal = Journal()
    """What the client has received; one of its own from the first event on."""
    _begun = False
    """Whether the client has a part of the answer."""
    _avoid: frozenset[str] = frozenset()
    _connecting: asyncio.Task[Link] | None = None
    _link: Link | None = None
    _member: Member | None = None
    _rewriter: Rewriter | None = None
    _wake_s: float | None = None
    _search_until_s: float | None = None
    _paused_s: float | None = None
    _deadline_s: float | None = None
    _tries = 0
    _missed = 0
    _error: ApiError | None = None
    _usage: Usage | None = None
    _done = False
    # Of the answer being read:
    _status = 0
    _streaming = False
    _plain = False
    """Whether events may pass unread."""
    _carry = b""
    _held: tuple[bytes, ...] = ()
    """The end of the answer, as far as it is there."""
    _finished = False
    _size = 0
    _note = b""
    """Content type of an answer, Retry-After of an error."""

    def __init__(
        self, app: Gateway, client: Connection, sent: Request, request: AnyRequest, extra: bytes
    ) -> None:
        self._app = app
        self.client = client
        self.sent = sent
        self.request = request
        self.model = request.model
        self.endpoint = sent.path
        self._body = sent.body
        if isinstance(request, Generation) and request.stream:
            self.stream = True
            self._body = with_usage(request, sent.body)
        self._extra = extra
        self.backends: list[str] = []
        self.started_s = self._attempt_s = self._last_s = app.loop.time()
        self._gather: list[bytes] = []

    def _clear(self) -> None:
        """Forget an answer that came to nothing."""
        self._status = self._size = 0
        self._streaming = self._plain = self._finished = False
        self._carry = self._note = b""
        self._usage = None
        self._held = ()
        self._gather = []

    # Attempts

    def attempt(self) -> None:
        """Send the request to the next backend, or find out that there is none."""
        app = self._app
        now_s = app.loop.time()
        again = bool(self.backends)
        if again:
            self._wake_s = self._rewriter = None
            self._clear()
        member = app.pool.pick(self.model, self._avoid, squeeze=again)
        if member is None:
            self._none_left(now_s)
            return
        body = self._body
        if self._begun and isinstance(self.request, Generation):
            resumption = resume(self.request, body, self.journal.delivered(), member.backend.kind)
            if resumption is None:
                self._cannot_resume(member)
                return
            body, self._rewriter = resumption.body, resumption.rewriter
        self._member = member
        member.inflight += 1
        member.requests += 1
        self.backends.append(member.name)
        links = app.links(member)
        link = links.take()
        if link is not None:
            self._send(links, link, body)
            return
        self._attempt_s = self._last_s = now_s
        self._deadline_s = now_s + app.deadlines.connect_s
        task = app.loop.create_task(links.connect())
        self._connecting = task
        task.add_done_callback(lambda done: self._connected(done, links, body))

    def _connected(self, task: asyncio.Task[Link], links: Links, body: bytes) -> None:
        if self._connecting is not task:
            # Given up in the meantime.
            if not task.cancelled() and task.exception() is None:
                task.result().close()
            return
        self._connecting = None
        error = None if task.cancelled() else task.exception()
        if error is not None or task.cancelled():
            self._failed(f"cannot connect: {error}", tried=False)
        else:
            self._send(links, task.result(), body)

    def _send(self, links: Links, link: Link, body: bytes) -> None:
        app = self._app
        deadlines = app.deadlines
        self._link = link
        self._attempt_s = self._last_s = now_s = app.loop.time()
        self._deadline_s = now_s + (deadlines.first_token_s if self.stream else deadlines.answer_s)
        self._tries += 1
        link.send(self, links.request(self.endpoint, body, self._extra))
        if self._paused_s is not None:
            link.transport.pause_reading()

    def _none_left(self, now_s: float) -> None:
        if self.backends:
            self._later(now_s)
        else:
            self._fail(faults.busy(self.model))

    def _cannot_resume(self, member: Member) -> None:
        self._avoid |= {member.name}
        if self._app.pool.pick(self.model, self._avoid) is None:
            self._fail(faults.interrupted("no backend can go on from here"))
        else:
            self.attempt()

    def _later(self, now_s: float) -> None:
        """Try again soon, unless the search has gone on for too long."""
        deadlines = self._app.deadlines
        if self._search_until_s is None:
            self._search_until_s = now_s + (
                deadlines.resume_s if self._begun else deadlines.retry_s
            )
        if now_s >= self._search_until_s:
            self._fail(self._error or faults.unreachable(self.model))
            return
        self._missed += 1
        wait_s = _BACKOFF_S[min(self._missed, len(_BACKOFF_S)) - 1]
        self._deadline_s = None
        if wait_s == 0.0:
            self.attempt()
        else:
            self._wake_s = now_s + wait_s

    def _failed(
        self,
        reason: str,
        *,
        tried: bool = True,
        blame: bool = True,
        late: bool = False,
        error: ApiError | None = None,
    ) -> None:
        """Give this backend up and go on with another, as long as that is allowed."""
        if self._done:
            return
        app = self._app
        now_s = app.loop.time()
        member = self._member
        progress = self._begun and self._last_s > self._attempt_s
        self._drop()
        if member is not None:
            if progress:
                self._tries = self._missed = 0
                self._search_until_s = None
                self._avoid = frozenset()
            self._avoid |= {member.name}
            if blame:
                app.pool.failed(member, now_s, reason)
            app.failed_over(self, member, reason, begun=self._begun)
        self._error = error or faults.failed(reason, late=late)
        if tried and self._tries >= app.settings.attempts:
            self._fail(self._error)
        else:
            self._later(now_s)

    def _drop(self) -> None:
        """Let go of the backend; what it is doing for this request is cancelled."""
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            connecting.cancel()
        link, self._link = self._link, None
        if link is not None:
            link.close()
        self._release()

    def _release(self) -> None:
        member, self._member = self._member, None
        if member is not None:
            member.inflight -= 1

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
            if not self._begun:
                self._begin()
            self.journal.append(data)
            self.client.send(data)
            return
        self._read(data)

    def on_end(self) -> None:
        """Finish with a complete answer, or find that it is none."""
        self._link = None
        if self._streaming:
            if self._finished:
                self._end_stream()
            else:
                self._failed("the stream ended early")
            return
        body = b"".join(self._gather)
        if self._status == 200 and not self._begun:
            self._succeeded()
            self._usage = answer_usage(body)
            self.first_s = self._app.loop.time()
            self.client.respond(200, body, self._note or b"application/json")
            self._finish(200, "ok")
        elif self._status in _RETRIED:
            self._refused()
        elif self._begun:
            self._failed(f"status {self._status} instead of a stream")
        elif self._status >= 400:
            self._succeeded()
            self.client.respond(self._status, upstream_error(self._status, body))
            self._finish(self._status, "error")
        else:
            self._failed(f"unexpected status {self._status}")

    def on_lost(self, reason: str, *, unused: bool) -> None:
        """Go on elsewhere; a kept connection that was closed already is nobody's failure."""
        self._link = None
        if unused and self._member is not None:
            self._app.links(self._member).drop_idle()
            self._tries -= 1
            self._release()
            self.attempt()
        elif self._finished and self._usage is not None:
            # All but the end mark is there.
            self._end_stream()
        else:
            self._failed(reason)

    def _check_size(self) -> None:
        most = self._app.limits.answer_bytes if self._status < 400 else _ERROR_BYTES
        if self._size > most:
            self._failed("the answer is too large")

    def _refused(self) -> None:
        status = self._status
        full = status == 429 or (status == 503 and self._note != b"")
        error = faults.refused(status, self._note)
        self._failed(f"status {status}", blame=not full, error=error)

    # Streams

    def _begin(self) -> None:
        self._begun = True
        self.journal = Journal()
        self.first_s = self._app.loop.time()
        self.client.begin_stream()

    def _deliver(self, event: bytes) -> None:
        if not self._begun:
            self._begin()
        self._missed = 0
        self.journal.append(event)
        self.client.send(event)

    def _read(self, data: bytes) -> None:
        """Take events apart: at the end of a stream, and in one that was moved."""
        events, self._carry = split(self._carry + data)
        for event in events:
            said = payload(event)
            if said is None:
                if self._rewriter is None:
                    self._deliver(event)
                continue
            if said == b"[DONE]":
                link, self._link = self._link, None
                if self._finished or self._rewriter is None:
                    if link is not None:
                        link.leave()
                    self._end_stream()
                else:
                    self._link = link
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
                self._fail(faults.interrupted(str(error)))
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
        if not self._begun:
            self._begin()
        last = b"".join(self._held)
        self.journal.append(last)
        self._succeeded()
        self.client.end_stream(last + DONE)
        self._finish(200, "ok")

    # The end

    def _succeeded(self) -> None:
        member, app = self._member, self._app
        if member is not None:
            app.pool.succeeded(member, app.loop.time() - self._attempt_s)

    def _fail(self, error: ApiError) -> None:
        """Tell the client that it did not work."""
        self._drop()
        if not self._begun:
            self.client.respond_error(error)
            self._finish(error.status, "error")
            return
        self.client.end_stream(b"data: " + error.body() + b"\n\n")
        self._finish(error.status, "truncated")

    def _finish(self, status: int, outcome: str) -> None:
        if self._done:
            return
        self._done = True
        member, self._member = self._member, None
        if member is not None:
            member.inflight -= 1
        self._app.finished(self, status, outcome, self._usage)

    # What the client and the clock say

    def cancel(self) -> None:
        """Stop: the client is gone."""
        self._drop()
        self._finish(499, "cancelled")

    def pause(self) -> None:
        """Take nothing from the backend until the client keeps up."""
        self._paused_s = self._app.loop.time()
        if self._link is not None:
            self._link.transport.pause_reading()

    def resume(self) -> None:
        """Go on."""
        self._paused_s = None
        self._last_s = self._app.loop.time()
        if self._link is not None:
            with contextlib.suppress(RuntimeError):
                self._link.transport.resume_reading()

    def uses(self, member: Member) -> bool:
        """Whether the request is at a backend now."""
        return self._member is member

    def member_down(self, reason: str) -> None:
        """Leave a backend that is known to be dead."""
        self._failed(f"backend down: {reason}", blame=False)

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
