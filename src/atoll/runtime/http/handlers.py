"""An application of the server in which an async function answers each request.

The simple way to serve HTTP: a task a request, cancelled when the client goes away. Requests on one
connection are answered in order. For what the gateway does with thousands of streams this costs too much.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from typing import Protocol

from atoll.runtime.http.http_server import (
    REQUEST_ID,
    Application,
    Connection,
    ConnectionDeadlines,
    ConnectionLimits,
    Request,
)
from atoll.runtime.openai import ApiError

_LOG = logging.getLogger(__name__)
_BACKLOG = 1024
"""Connections that may wait to be accepted."""
_TICK_S = 0.5
"""Between two looks for clients that take too long."""
# Between two looks whether all connections are gone, while the server closes.
_DRAIN_CHECK_S = 0.02
Headers = tuple[tuple[str, str], ...]
"""Headers of an answer besides the usual: names and values without line ends."""


@dataclass(frozen=True, slots=True)
class Response:
    """An answer that is complete before it is sent."""

    body: bytes
    status: int = 200
    content_type: str = "application/json"
    headers: Headers = ()


@dataclass(frozen=True, slots=True)
class EventStream:
    """An answer in pieces, as server-sent events."""

    pieces: AsyncGenerator[bytes, None]
    headers: Headers = ()


@dataclass(frozen=True, slots=True)
class ByteStream:
    """An answer in pieces of any kind, as streamed sound.

    One that fails on the way ends without its last chunk, so that a client knows it is not whole.
    """

    pieces: AsyncGenerator[bytes, None]
    content_type: str
    headers: Headers = ()


async def with_beats(
    pieces: AsyncGenerator[bytes, None], every_s: float
) -> AsyncGenerator[bytes, None]:
    """Yield events, and a comment wherever there was none for so long: who has left is noticed by writing."""
    async with contextlib.aclosing(pieces):
        waiting = asyncio.ensure_future(anext(pieces))
        try:
            while True:
                # Unlike `wait_for`, this does not cancel what it waits for.
                await asyncio.wait({waiting}, timeout=every_s)
                if not waiting.done():
                    yield b": \n\n"
                    continue
                try:
                    piece = waiting.result()
                except StopAsyncIteration:
                    return
                yield piece
                waiting = asyncio.ensure_future(anext(pieces))
        finally:
            if not waiting.done():
                waiting.cancel()
                with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
                    await waiting


Answer = Response | EventStream | ByteStream
Handler = Callable[[Request], Awaitable[Answer]]
"""Answers a request; an ApiError is answered as such."""


class HandlerServer(Application):
    """Listens, and has the handler answer every request."""

    def __init__(
        self,
        handler: Handler,
        limits: ConnectionLimits | None = None,
        deadlines: ConnectionDeadlines | None = None,
        upgrades: Mapping[bytes, Callable[[Connection, Request], None]] | None = None,
    ) -> None:
        """Have `handler` answer; `upgrades`: by path, who begins a WebSocket (ApiError where it does not)."""
        super().__init__(limits, deadlines)
        self.handler = handler
        self._upgrades = dict(upgrades or {})
        self.upgrades = frozenset(self._upgrades)
        self.running: set[HandlerCall] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def start(self, host: str, port: int, *, field: str = "--port") -> tuple[str, int]:
        """Listen, and return the host and port listened on; InputError names `field`."""
        self._tick()
        return await self.listen(host, port, backlog=_BACKLOG, field=field)

    async def start_on_socket(self, path: Path) -> None:
        """Listen on a Unix socket that only this user can open; it is removed at the end."""
        self._tick()
        await self.listen_on_socket(
            path,
            backlog=_BACKLOG,
            field="--socket",
            taken=f"another process listens at {path}",
            hint="name a path that can be written",
        )

    async def close(self, drain_s: float = 0.0) -> None:
        """Accept nothing more, wait for what runs, then cut off what is left."""
        self.draining = True
        if self._server is None:
            return
        self.stop_listening()
        for connection in list(self.connections):
            connection.finish_up()
        deadline_s = self.loop.time() + drain_s
        # A connection is there until its client has all of the answer.
        while self.connections and self.loop.time() < deadline_s:
            await asyncio.sleep(_DRAIN_CHECK_S)
        self.abort_connections()
        if self._timer is not None:
            self._timer.cancel()
        # Connections hear that they are closed in the loop's next round.
        await asyncio.sleep(0)

    def handle(self, connection: Connection, request: Request) -> None:
        """Begin to answer a request in a task of its own."""
        request_id = request.headers.get(b"x-request-id", b"")
        if REQUEST_ID.fullmatch(request_id):
            request.id = request_id
        else:
            request.id = b"req-" + secrets.token_hex(16).encode()
        peer = connection.transport.get_extra_info("peername")
        request.peer = str(peer[0]) if isinstance(peer, tuple) else ""
        if request.upgrade:
            try:
                self._upgrades[request.path](connection, request)
            except ApiError as error:
                connection.respond_error(error)
            return
        HandlerCall(self, connection, request, self.handler)

    def refused(self, error: ApiError) -> None:
        """Note a request that could not be read."""
        _LOG.info("refused with %d: %s", error.status, error.message)

    def _tick(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._timer = self.loop.call_later(_TICK_S, self._tick)
        now_s = self.loop.time()
        self.tick_connections(now_s, formatdate(usegmt=True).encode())
        for call in list(self.running):
            call.tick(now_s)


class HandlerHost(Protocol):
    """Whoever has requests answered by handlers: a `HandlerServer`, or a part of another application."""

    running: set[HandlerCall]
    """Calls being answered; `tick` of each is to be called now and then."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Where it runs."""
        ...

    @property
    def deadlines(self) -> ConnectionDeadlines:
        """How long clients may take."""
        ...


class HandlerCall:
    """One request being answered by a handler (`atoll.runtime.http.http_server.Responder`)."""

    __slots__ = (
        "_connection",
        "_handler",
        "_paused_s",
        "_request",
        "_server",
        "_task",
        "_writable",
    )

    def __init__(
        self, server: HandlerHost, connection: Connection, request: Request, handler: Handler
    ) -> None:
        self._server = server
        self._connection = connection
        self._request = request
        self._handler = handler
        self._paused_s: float | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._task = server.loop.create_task(self._answer())
        self._task.add_done_callback(self._done)
        connection.exchange = self
        server.running.add(self)

    def cancel(self) -> None:
        """Stop: the client is gone."""
        self._task.cancel()

    def pause(self) -> None:
        """Take no more pieces of a stream until the client has read those before."""
        self._paused_s = self._server.loop.time()
        self._writable.clear()

    def resume(self) -> None:
        """Take pieces again after `pause`."""
        self._paused_s = None
        self._writable.set()

    def tick(self, now_s: float) -> None:
        """Give up on a client that has stopped reading."""
        if self._paused_s is not None and now_s - self._paused_s > self._server.deadlines.client_s:
            self._connection.abort()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._server.running.discard(self)
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.error("%r failed while it was answered", self._request.path, exc_info=error)
            self._connection.abort()

    async def _answer(self) -> None:
        connection = self._connection
        try:
            answer = await self._handler(self._request)
        except ApiError as error:
            connection.respond_error(error)
            return
        except Exception:  # noqa: BLE001 - one request must not end the others
            _LOG.exception("%r failed", self._request.path)
            connection.respond_error(ApiError(500, "internal error", kind="server_error"))
            return
        if isinstance(answer, Response):
            send_response(connection, answer)
        else:
            await self._send(answer)

    async def _send(self, answer: EventStream | ByteStream) -> None:
        connection = self._connection
        begun = False
        # A generator left half way must end now, not when it is collected.
        async with contextlib.aclosing(answer.pieces) as pieces:
            try:
                async for piece in pieces:
                    # Not before the first piece: until then an error can still be answered as one.
                    if not begun:
                        begun = True
                        self._begin(answer)
                    if piece:
                        # An empty chunk would be the end of the stream.
                        connection.send(piece)
                    if not self._writable.is_set():
                        await self._writable.wait()
            except ApiError as error:
                if begun:
                    # The client has a part: the connection is cut, so that it is not taken for the whole.
                    raise
                connection.respond_error(error)
                return
        if not begun:
            self._begin(answer)
        connection.end_stream(b"")

    def _begin(self, answer: EventStream | ByteStream) -> None:
        if isinstance(answer, EventStream):
            self._connection.begin_stream(_lines(answer.headers))
        else:
            self._connection.begin(200, answer.content_type.encode(), _lines(answer.headers))


def send_response(connection: Connection, answer: Response) -> None:
    """Answer the request being served on a connection."""
    extra = _lines(answer.headers)
    connection.respond(answer.status, answer.body, answer.content_type.encode(), extra)


def _lines(headers: Headers) -> bytes:
    """Return headers as they are written; one that would be two lines is refused."""
    for name, value in headers:
        if any(c in name + value for c in "\r\n\0"):
            raise ValueError(f"header {name[:40]!r} has a line end in it")
    return "".join(f"{name}: {value}\r\n" for name, value in headers).encode("latin-1", "replace")
