"""Finding a backend for a request, and another if that one fails.

Before the client has seen anything, a failed attempt is simply made again elsewhere. Once a stream has
begun, it is moved (`resume`). A request is sent to at most `attempts` backends without a token in
between; a connection that is refused costs no attempt, but the search for a backend has a deadline.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from atoll.runtime.gateway import faults
from atoll.runtime.gateway.events import StreamJournal
from atoll.runtime.gateway.requirements import Requirements
from atoll.runtime.gateway.resume import Rewriter, resume
from atoll.runtime.http.server import Connection, Request
from atoll.runtime.http.upstream import Upstream, UpstreamPool
from atoll.runtime.openai import (
    AnyRequest,
    ApiError,
    Generation,
    Usage,
    with_model,
    with_usage,
)
from atoll.runtime.pool.pool import Member
from atoll.telemetry.usage import Attempt

if TYPE_CHECKING:
    from atoll.runtime.gateway.app import Gateway

_MOST_DIED = 8
"""Nodes that may vanish under one request between two tokens: it might be what kills them."""
_MOST_BROKEN = 64
"""A request moves so often at most, though each backend gave it a token: a bad one could go on for ever."""
_BACKOFF_S = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8)


class Attempts(ABC):
    """A request on its way to a backend; `relay` adds what becomes of the answer."""

    # Most requests never leave these as they are: defaults of the class cost a request nothing.
    stream = False
    wish: Requirements | None = None
    """What is special about it; most requests of a plain gateway have nothing."""
    slot: int | None = None
    """Where the journal of the accounts counts its tokens."""
    begun = False
    """Whether the client has a part of the answer."""
    first_s: float | None = None
    """When the answer began."""
    journal = StreamJournal()
    """What the client has received; one of its own from the first event on."""
    attempts: tuple[Attempt, ...] = ()
    """Those that are over, where anybody wants to know."""
    _avoid: frozenset[str] = frozenset()
    _connecting: asyncio.Task[Upstream] | None = None
    _way: Upstream | None = None
    _member: Member | None = None
    _rewriter: Rewriter | None = None
    _wake_s: float | None = None
    _search_until_s: float | None = None
    _paused_s: float | None = None
    _deadline_s: float | None = None
    _tries = 0
    _missed = 0
    _broken = 0
    """Streams that broke off after a token."""
    _died = 0
    """Nodes that vanished under the request since its last token."""
    _counted = 0
    """Tokens of attempts that are over."""
    _area = 0.0
    """`Member.clocked` when the attempt began."""
    _error: ApiError | None = None
    _usage: Usage | None = None
    _done = False

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
        """Of an answer that is no stream."""

    # What a relay adds

    @abstractmethod
    def on_head(self, status: int, content_type: bytes, retry_after: bytes) -> None:
        """Begin to read an answer."""

    @abstractmethod
    def on_body(self, data: bytes) -> None:
        """Take a piece of it."""

    @abstractmethod
    def on_end(self) -> None:
        """Finish with it."""

    @abstractmethod
    def on_lost(self, reason: str, *, unused: bool) -> None:
        """Learn that it will never be."""

    @abstractmethod
    def _clear(self) -> None:
        """Forget an answer that came to nothing."""

    @abstractmethod
    def _fail(self, error: ApiError) -> None:
        """Tell the client that it did not work."""

    # The way there

    def serve_as(self, model: str) -> None:
        """Ask for another model than before: the one behind an alias, or one that may stand in."""
        if model != self.model or (self.request.models is not None and not self.backends):
            self.model = model
            self._body = with_model(self._body, model)

    def attempt(self) -> None:
        """Send the request to the next backend, or find out that there is none."""
        app = self._app
        now_s = app.loop.time()
        again = bool(self.backends)
        pool = app.pool
        if again:
            self._wake_s = self._rewriter = None
            self._clear()
        if self.wish is None:
            member = pool.pick(self.model, self._avoid, squeeze=again, now_s=now_s)
        else:
            self._wake_s = None
            member = self._choose(now_s, squeeze=again)
            if member is not None and not again:
                app.waiting.pop(self, None)
                self._search_until_s = None
                self._missed = 0
        if member is None:
            self._none_left(now_s)
            return
        body = self._body
        if self.begun and isinstance(self.request, Generation):
            resumption = resume(self.request, body, self.journal.delivered(), member.backend.kind)
            if resumption is None:
                self._cannot_resume(member, now_s)
                return
            body, self._rewriter = resumption.body, resumption.rewriter
        self._member = member
        if pool.learns:
            self._area = member.clocked(now_s)
        member.inflight += 1
        member.requests += 1
        self.backends.append(member.name)
        ways = app.links(member)
        way = ways.take()
        if way is not None:
            self._send(way, body)
            return
        self._attempt_s = self._last_s = now_s
        self._deadline_s = now_s + app.deadlines.connect_s
        task = app.loop.create_task(_connect(ways))
        self._connecting = task
        task.add_done_callback(lambda done: self._connected(done, body))

    def _choose(self, now_s: float, *, squeeze: bool) -> Member | None:
        if self.wish is None:
            return self._app.pool.pick(self.model, self._avoid, squeeze=squeeze, now_s=now_s)
        return self._app.chooser.choose(self, self.wish, self._avoid, now_s, squeeze=squeeze)

    def _connected(self, task: asyncio.Task[Upstream], body: bytes) -> None:
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
            self._send(task.result(), body)

    def _send(self, way: Upstream, body: bytes) -> None:
        app = self._app
        deadlines = app.deadlines
        self._way = way
        self._attempt_s = self._last_s = now_s = app.loop.time()
        self._deadline_s = now_s + (deadlines.first_token_s if self.stream else deadlines.answer_s)
        self._tries += 1
        way.ask(self, self.endpoint, body, self._extra)
        if self._paused_s is not None:
            way.pause()

    # When there is none

    def _none_left(self, now_s: float) -> None:
        if self.backends:
            self._later(now_s)
            return
        if self.wish is None:
            self._fail(faults.busy(self.model))
            return
        error, wait_s = self._app.chooser.nobody(self.wish)
        if wait_s <= 0.0 and self._search_until_s is None:
            self._fail(error)
            return
        if self._search_until_s is None:
            self._search_until_s = now_s + wait_s
        self._error = error
        # In the order in which they came; those that wait longer keep their place.
        self._app.waiting.setdefault(self)
        self._later(now_s)

    def _cannot_resume(self, member: Member, now_s: float) -> None:
        self._avoid |= {member.name}
        if self._choose(now_s, squeeze=False) is None:
            self._fail(faults.stream_interrupted("no backend can go on from here"))
        else:
            self.attempt()

    def _later(self, now_s: float) -> None:
        """Try again soon, unless the search has gone on for too long."""
        deadlines = self._app.deadlines
        if self._search_until_s is None:
            self._search_until_s = now_s + (deadlines.resume_s if self.begun else deadlines.retry_s)
        if now_s >= self._search_until_s:
            self._fail(self._error or faults.unreachable(self.model))
            return
        self._missed += 1
        wait_s = _BACKOFF_S[min(self._missed, len(_BACKOFF_S)) - 1]
        self._deadline_s = None
        if wait_s == 0.0 and self.backends:
            self.attempt()
        else:
            self._wake_s = now_s + wait_s

    def _failed(
        self,
        reason: str,
        *,
        tried: bool = True,
        died: bool = False,
        blame: bool = True,
        late: bool = False,
        error: ApiError | None = None,
    ) -> None:
        """Give this backend up and go on with another, as long as that is allowed.

        One that `died` (its node is gone from the fabric) has not failed the request: that is no try.
        """
        if self._done:
            return
        app = self._app
        now_s = app.loop.time()
        member = self._member
        progress = self.begun and self._last_s > self._attempt_s
        if member is not None and app.detailed:
            self._over(member, "failed", self.journal.delivered().tokens, now_s)
        self._drop()
        if member is not None:
            if progress:
                self._broken += 1
                self._tries = self._missed = self._died = 0
                self._search_until_s = None
                self._avoid = frozenset()
            elif died and self._died < _MOST_DIED:
                self._died += 1
                self._tries -= 1
                tried = False
            self._avoid |= {member.name}
            if blame:
                app.pool.failed(member, now_s, reason)
            app.failed_over(self, member, reason, begun=self.begun)
        self._error = error or faults.attempt_failed(reason, late=late)
        if (tried and self._tries >= app.settings.attempts) or self._broken > _MOST_BROKEN:
            self._fail(self._error)
        else:
            self._later(now_s)

    def _drop(self) -> None:
        """Let go of the backend; what it is doing for this request is cancelled."""
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            connecting.cancel()
        way, self._way = self._way, None
        if way is not None:
            way.close()
        self._release()

    def _release(self) -> None:
        member, self._member = self._member, None
        if member is None:
            return
        app = self._app
        if app.pool.learns:
            member.clocked(app.loop.time())
        member.inflight -= 1
        if app.waiting:
            app.freed()

    def _over(self, member: Member, outcome: str, tokens: int, now_s: float) -> None:
        """Write down what a backend did for the request; `tokens` are those of all attempts so far."""
        offer, facts = member.offer(self.model), member.facts
        self.attempts += (
            Attempt(
                member.name,
                offer.node or None,
                offer.provider or None,
                max(0, tokens - self._counted),
                now_s - self._attempt_s,
                outcome,
                None if facts is None else facts.usd_per_mtoken_in,
                None if facts is None else facts.usd_per_mtoken_out,
            ),
        )
        self._counted = max(tokens, self._counted)

    def uses(self, member: Member) -> bool:
        """Whether the request is at a backend now."""
        return self._member is member

    def goes_by(self, kind: type) -> bool:
        """Whether it reached its backend in this way."""
        return isinstance(self._way, kind)

    def member_down(self, reason: str) -> None:
        """Leave a backend that is known to be dead, or about to end."""
        self._failed(reason, blame=False)

    def can_move(self, now_s: float) -> bool:
        """Whether another backend than the one it is at could take it now and go on with it."""
        member = self._member
        if member is None:
            return False
        avoid, self._avoid = self._avoid, self._avoid | {member.name}
        try:
            other = self._choose(now_s, squeeze=False)
        finally:
            self._avoid = avoid
        if other is None or not self.begun or not isinstance(self.request, Generation):
            return other is not None
        said = self.journal.delivered()
        return resume(self.request, self._body, said, other.backend.kind) is not None


async def _connect(ways: UpstreamPool) -> Upstream:
    return await ways.connect()
