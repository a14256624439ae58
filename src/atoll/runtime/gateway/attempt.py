"""The attempts of one request: choose a backend, connect, send, let go of it when it fails.

`relay` and `service_proxy` hold one `Attempts` each. They say which backend is next and what to send it,
hear its answer, and decide what follows a failure; the way there and back is here. `RetryBudget` says how
often, and for how long, another backend is looked for.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Protocol

from atoll.runtime.gateway.poison import DeathBook, Doubts
from atoll.runtime.gateway.queue import RequestQueue
from atoll.runtime.http.upstream import JSON, Receiver, RequestTemplate, Upstream, UpstreamPool
from atoll.runtime.openai import Usage
from atoll.runtime.pool.member import Member
from atoll.runtime.pool.pool import BackendPool
from atoll.telemetry.usage_record import Attempt

_SPEECH_BYTES_S = 48_000
"""A second of speech in a stream of events: 16 bits, one channel, 24 kHz."""
_PROMPT_WORK = 1 / 64
"""Work of reading a token, relative to writing one: prefill reads many tokens at once."""
_MAX_DIED = 8
"""Nodes that may vanish under one request between two tokens: it might be what kills them."""
_MAX_BROKEN = 64
"""A request moves so often at most, though each backend gave it a token: a bad one could go on for ever."""
_END_S = 60.0
"""A backend that dies less than this before its announced end has ended: clocks differ, notices are short."""
_BACKOFF_S = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8)
"""Waits before the first and further tries (s): the first is at once, the last is repeated."""


class AttemptContext(Protocol):
    """Part of a gateway that attempts need."""

    loop: asyncio.AbstractEventLoop
    pool: BackendPool
    queue: RequestQueue
    deaths: DeathBook

    def upstreams(self, member: Member) -> UpstreamPool:
        """Return the connections to a backend."""
        ...


class Sender(Receiver, Protocol):
    """A request that is sent to one backend after another, and hears their answers."""

    body: bytes
    """As the backend chosen last is to get it."""

    def choose(self, now_s: float) -> Member | None:
        """Return the backend to try next, or None: there is none now."""
        ...

    def on_nobody(self, now_s: float) -> None:
        """No backend was chosen."""

    def on_unreachable(self, reason: str) -> None:
        """The backend cannot be connected to."""


class Attempts:
    """Where a request is, and where it has been.

    The sender is named in calls and not kept: the two would refer to each other, and a request that ends
    would have to be found by the garbage collector.
    """

    # Most requests never leave these as they are: defaults of the class cost a request nothing.
    member: Member | None = None
    """The backend that has the request."""
    upstream: Upstream | None = None
    """The connection on which it was sent."""
    connecting: asyncio.Task[Upstream] | None = None
    avoid: frozenset[str] = frozenset()
    """Backends that failed it."""
    tries = 0
    """Times it was sent; whoever decides on failures may forgive some."""
    reopened = False
    """Whether a kept connection was closed under it already; that happens once by chance, not twice."""
    load_before = 0.0
    """`Member.integrate_load` when the attempt began."""
    ended_s = 0.0
    """When the last backend was let go of."""
    prefills: tuple[Attempts, ...] = ()
    """Those for backends that computed the prompt for another one."""
    _paused = False
    _doubts: Doubts | None = None
    """Once a backend failed the request in a way that may be its own fault."""

    def __init__(
        self,
        context: AttemptContext,
        path: bytes,
        headers: bytes,
        template: RequestTemplate = JSON,
    ) -> None:
        self._context = context
        self._path = path
        self.headers = headers
        self._template = template
        self.backends: list[str] = []
        """Names of all that were tried, in order."""
        self.begins: list[float] = []
        """When each of them was."""
        self.began_s = 0.0
        """When the attempt under way was sent, or began to connect."""

    def attempt(self, sender: Sender) -> None:
        """Send the request to the next backend, or have the sender know that there is none."""
        context = self._context
        now_s = context.loop.time()
        member = sender.choose(now_s)
        if member is None:
            sender.on_nobody(now_s)
            return
        self.member = member
        # Before `inflight` changes: what ran so far is summed up with the old count.
        if context.pool.learns:
            self.load_before = member.integrate_load(now_s)
        member.inflight += 1
        member.requests += 1
        self.backends.append(member.name)
        self.begins.append(now_s)
        upstreams = context.upstreams(member)
        upstream = upstreams.take()
        # A kept connection is used in the same turn of the loop, without a task.
        if upstream is not None:
            self._send(sender, upstream, now_s)
            return
        self.began_s = now_s
        self.connecting = task = context.loop.create_task(_connect(upstreams))
        task.add_done_callback(partial(self._use_connection, sender))

    def _use_connection(self, sender: Sender, task: asyncio.Task[Upstream]) -> None:
        error = None if task.cancelled() else task.exception()
        failed = task.cancelled() or error is not None
        if self.connecting is not task:
            # Given up in the meantime.
            if not failed:
                task.result().close()
            return
        self.connecting = None
        if failed:
            sender.on_unreachable(f"cannot connect: {error}")
        else:
            self._send(sender, task.result(), self._context.loop.time())

    def _send(self, sender: Sender, upstream: Upstream, now_s: float) -> None:
        self.upstream = upstream
        self.began_s = now_s
        # Counted when it is sent: a connection that is refused costs no try.
        self.tries += 1
        upstream.ask(sender, self._path, sender.body, self.headers, self._template)
        # The client did not keep up already before this attempt.
        if self._paused:
            upstream.pause()

    def reopen(self, sender: Sender, member: Member) -> None:
        """Try again after a kept connection turned out to be closed already: that is nobody's failure."""
        # Others that were kept may be closed as well.
        self._context.upstreams(member).drop_idle()
        self.reopened = True
        self.tries -= 1
        self.release()
        self.attempt(sender)

    def give_up(self, reason: str, now_s: float, *, blame: bool) -> None:
        """Let go of a backend that failed the request, and avoid it; `blame` holds it against it."""
        member = self.member
        self.drop()
        if member is not None:
            self.avoid |= {member.name}
            if blame:
                self._context.pool.note_failure(member, now_s, reason)

    # Whose fault it is

    def note_death(self, *, silent: bool) -> bool:
        """Write down that the backend died; return whether backends do, whatever they are asked.

        `silent`: no backend has answered a part of the request.
        """
        member, upstream, context = self.member, self.upstream, self._context
        if member is None:
            return False
        if member.ends_s is not None and time.time() > member.ends_s - _END_S:
            # As it was announced: nobody killed it.
            return True
        now_s, book = context.loop.time(), context.deaths
        death = book.note(member.name, now_s)
        # A request of which a part never left is not what killed the backend.
        if silent and upstream is not None and not upstream.unsent:
            self._doubt().note_death(death)
        return book.are_common((death,) if self._doubts is None else self._doubts.deaths, now_s)

    def doubt(self, member: Member, reason: str) -> None:
        """Hold a failure against a backend only once another one has answered the request."""
        self._doubt().note_failure(member, reason)

    def share_doubts(self, other: Attempts) -> None:
        """Have what speaks against the request count in both."""
        other._doubts = self._doubt()

    def is_poison(self, body: bytes, now_s: float) -> bool:
        """Whether the request is what backends died of; then others like it are known from now on."""
        doubts, book = self._doubts, self._context.deaths
        if doubts is None or not book.is_guilty(doubts.deaths, now_s):
            return False
        book.convict(doubts.deaths, body, now_s)
        return True

    def _doubt(self) -> Doubts:
        if self._doubts is None:
            self._doubts = Doubts()
        return self._doubts

    def note_success(self, model: str, usage: Usage | None) -> None:
        """Have the pool know that the backend answered, and how fast."""
        member, pool = self.member, self._context.pool
        if member is None:
            return
        now_s = self._context.loop.time()
        seconds = now_s - self.began_s
        pool.note_success(member, seconds)
        if self._doubts is not None:
            self._doubts.settle(pool, member, now_s)
        # Only where one backend did all of it: the time of a request that moved says nothing of its speed.
        if pool.learns and usage is not None and len(self.backends) == 1 and seconds > 0:
            load = member.integrate_load(now_s) - self.load_before
            # Less the request itself, and with those that others have sent there.
            beside = load / seconds - 1.0 + member.elsewhere
            work = work_of(usage.prompt_tokens, usage.completion_tokens)
            pool.learn(member, model, work, seconds, beside, now_s)

    # Letting go

    def drop(self) -> None:
        """Let go of the backend; what it is doing for this request is cancelled."""
        connecting, self.connecting = self.connecting, None
        if connecting is not None:
            connecting.cancel()
        upstream, self.upstream = self.upstream, None
        if upstream is not None:
            upstream.close()
        self.release()

    def release(self) -> None:
        """Give the place at the backend free, to whoever waits for one."""
        member, self.member = self.member, None
        if member is None:
            return
        context = self._context
        self.ended_s = now_s = context.loop.time()
        if context.pool.learns:
            member.integrate_load(now_s)
        member.inflight -= 1
        if context.queue.waiting:
            context.queue.wake()

    def pause(self) -> None:
        """Have the backend wait with its answer, this one and those to come."""
        self._paused = True
        if self.upstream is not None:
            self.upstream.pause()

    def resume(self) -> None:
        """Have it go on."""
        self._paused = False
        if self.upstream is not None:
            self.upstream.resume()


async def _connect(upstreams: UpstreamPool) -> Upstream:
    return await upstreams.connect()


class RetryBudget:
    """Attempts left to one request after backends failed it. Decides only; time is a parameter."""

    __slots__ = ("_broken", "_died", "_missed", "until_s")

    def __init__(self) -> None:
        self._broken = 0
        """Streams that broke off after a token."""
        self._died = 0
        """Nodes that vanished under the request since its last token."""
        self._missed = 0
        """Searches for a backend since the last token."""
        self.until_s: float | None = None
        """When the search ends; None: it has not begun."""

    def note_progress(self) -> None:
        """Begin anew: the backend that failed had given a token."""
        self._broken += 1
        self._missed = self._died = 0
        self.until_s = None

    def restart_search(self) -> None:
        """Begin anew: a backend was found."""
        self._missed = 0
        self.until_s = None

    def excuse_death(self) -> bool:
        """Return whether a node that vanished costs the request no try."""
        excused = self._died < _MAX_DIED
        self._died += excused
        return excused

    @property
    def is_spent(self) -> bool:
        """Whether the request has moved too often."""
        return self._broken > _MAX_BROKEN

    def next_wait_s(self, now_s: float, search_s: float) -> float | None:
        """Return how long to wait before the next try, or None: the search has gone on for `search_s`."""
        if self.until_s is None:
            self.until_s = now_s + search_s
        if now_s >= self.until_s:
            return None
        self._missed += 1
        return _BACKOFF_S[min(self._missed, len(_BACKOFF_S)) - 1]


def work_of(prompt_tokens: float, completion_tokens: float) -> float:
    """Return what a request costs a backend, in tokens written."""
    # The 1 is for the request itself, however short its answer is.
    return 1.0 + completion_tokens + _PROMPT_WORK * prompt_tokens


def spoken_seconds(base64_chars: int) -> float:
    """Return how long so much sound lasts, if it is 16-bit, mono, at 24 kHz."""
    # Four characters of base64 are three bytes.
    return base64_chars * 3 / 4 / _SPEECH_BYTES_S


def share_of(member: Member, model: str, tokens: int, seconds: float, outcome: str) -> Attempt:
    """Return what a backend did for a request: tokens written, in so many seconds, and how it ended."""
    offer, facts = member.offer(model), member.facts
    return Attempt(
        member.name,
        offer.node or None,
        offer.provider or None,
        tokens,
        seconds,
        outcome,
        None if facts is None else facts.usd_per_mtoken_in,
        None if facts is None else facts.usd_per_mtoken_out,
    )
