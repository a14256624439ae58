"""Snapshots as server-sent events: made once every two seconds for all who listen, and not while nobody does.

A listener has at most one snapshot on its way. Whoever reads slower gets the newest one next, and whoever
does not read at all for as long as clients may is let go. Listeners are no requests: nothing waits for them,
and they wait for nothing but the next snapshot, for days if they like.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from atoll.runtime.gateway.console.view import GatewayView
from atoll.runtime.gateway.faults import server_fault
from atoll.runtime.http.http_request import Responder

_EVERY_S = 2.0
"""Between two snapshots."""
_CHECKED_TICKS = 15
"""Snapshots between two checks whether listeners may still listen: a key may be revoked."""
_MAX_LISTENERS = 1000
_KEY_PART = 4
"""One key has at most one part in so many of the listeners."""
_RETRY_S = 5
"""After which a client that was refused may ask again."""


class ListenedConnection(Protocol):
    """A connection on which a stream of events is written (`http_server.Connection`)."""

    transport: asyncio.Transport
    exchange: Responder | None

    def begin_stream(self, headers: bytes = b"") -> None:
        """Begin a stream of events."""

    def send(self, data: bytes) -> None:
        """Send whole events."""

    def end_stream(self, data: bytes) -> None:
        """Send the last events of the stream and end it."""

    def abort(self) -> None:
        """Close without another word."""


class LiveListener:
    """One who listens (`http_request.Responder`)."""

    __slots__ = ("_connection", "_feed", "_stalled_s", "allowed", "who")

    def __init__(
        self,
        feed: LiveFeed,
        connection: ListenedConnection,
        allowed: Callable[[], bool] | None,
        who: str | None,
    ) -> None:
        self._feed = feed
        self._connection = connection
        self.allowed = allowed
        self.who = who
        self._stalled_s: float | None = None
        """Since when it has not read what was sent."""

    def tell(self, event: bytes, now_s: float, max_s: float) -> None:
        """Send an event if the one before was read; let go of whoever has read none for `max_s` seconds."""
        if not self._connection.transport.get_write_buffer_size():
            self._stalled_s = None
            self._connection.send(event)
        elif self._stalled_s is None:
            self._stalled_s = now_s
        elif now_s - self._stalled_s > max_s:
            self._connection.abort()

    def end(self) -> None:
        """End the stream."""
        self._connection.end_stream(b"")

    def cancel(self) -> None:
        """Stop: the client is gone."""
        self._feed.leave(self)

    def pause(self) -> None:
        """Nothing: `tell` sees for itself whether the client keeps up."""

    def resume(self) -> None:
        """Nothing: the next snapshot comes by itself."""


class LiveFeed:
    """Tells all who listen how the gateway stands; `make` returns that as one line."""

    def __init__(
        self, context: GatewayView, make: Callable[[], bytes], max_listeners: int = _MAX_LISTENERS
    ) -> None:
        self._context = context
        self._make = make
        self._max_listeners = max_listeners
        self._timer: asyncio.TimerHandle | None = None
        self._event = b""
        self._made_s = float("-inf")
        self._ticks = 0
        self.listeners: set[LiveListener] = set()

    def join(
        self,
        connection: ListenedConnection,
        allowed: Callable[[], bool] | None = None,
        who: str | None = None,
    ) -> None:
        """Begin to tell a client; 503 where too many listen, or where the gateway stops.

        Whether it is still `allowed` to listen is asked now and then; `who` is the key that it came with.
        """
        context = self._context
        if (
            context.draining
            or len(self.listeners) >= self._max_listeners
            or self._has_its_share(who)
        ):
            why = "the gateway is shutting down" if context.draining else "too many listen already"
            raise server_fault(503, why, retry_s=_RETRY_S)
        now_s = context.loop.time()
        if now_s - self._made_s >= _EVERY_S or not self._event:
            self._renew(now_s)
        listener = LiveListener(self, connection, allowed, who)
        self.listeners.add(listener)
        connection.exchange = listener
        connection.begin_stream()
        connection.send(self._event)
        if self._timer is None:
            self._timer = context.loop.call_later(_EVERY_S, self.tick)

    def _has_its_share(self, who: str | None) -> bool:
        if who is None:
            return False
        own = sum(each.who == who for each in self.listeners)
        return own >= max(1, self._max_listeners // _KEY_PART)

    def leave(self, listener: LiveListener) -> None:
        """Tell a client no more; with the last one all work ends."""
        self.listeners.discard(listener)
        if not self.listeners and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def tick(self) -> None:
        """Tell all who listen."""
        context = self._context
        self._timer = context.loop.call_later(_EVERY_S, self.tick)
        now_s = context.loop.time()
        try:
            self._renew(now_s)
        except Exception as error:  # noqa: BLE001 - a page that cannot be made must not end the others
            context.log.event("live.bug", error=repr(error))
            return
        self._ticks += 1
        if self._ticks % _CHECKED_TICKS == 0:
            self._end([each for each in self.listeners if each.allowed and not each.allowed()])
        max_s = context.settings.deadlines.client_s
        for listener in list(self.listeners):
            listener.tell(self._event, now_s, max_s)

    def _renew(self, now_s: float) -> None:
        self._event = b"event: snapshot\ndata: " + self._make() + b"\n\n"
        self._made_s = now_s

    def close(self) -> None:
        """End all streams, so that clients look elsewhere."""
        self._end(list(self.listeners))

    def _end(self, listeners: Sequence[LiveListener]) -> None:
        for listener in listeners:
            self.leave(listener)
            listener.end()


class LiveAnswer(NamedTuple):
    """An answer that stays: whoever gets it listens from then on."""

    feed: LiveFeed
    allowed: Callable[[], bool] | None = None
    who: str | None = None
