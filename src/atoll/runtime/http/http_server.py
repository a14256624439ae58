"""The server: HTTP/1.1 on a connection, without a task a request.

A connection reads requests one after the other and hands each to the application, which answers at once
or later. Everything a client can do slowly has a deadline, everything it can do largely has a limit. The
gateway is an application of its own; `atoll.runtime.http.handlers` makes one of an async function.
"""

from __future__ import annotations

import asyncio
import re
from abc import abstractmethod
from pathlib import Path
from typing import cast

import httptools

from atoll.runtime.http.answering import STATUS_LINES, AnswerWriter, headers_of
from atoll.runtime.http.http_request import (
    REQUEST_ID,
    ConnectionDeadlines,
    ConnectionLimits,
    IncomingBody,
    Request,
    Responder,
    Upgraded,
)
from atoll.runtime.http.listen_address import bind_private, cannot_listen, limit_unsent
from atoll.runtime.openai import ApiError

__all__ = (
    "REQUEST_ID",
    "Application",
    "Connection",
    "ConnectionDeadlines",
    "ConnectionLimits",
    "Request",
    "Responder",
)

# After a refusal the client has so long to read it, before the connection is cut.
_LINGER_S = 2.0
# Bytes of an answer that a client has not read, at which its source has to wait.
_HIGH_WATER = 256 * 2**10
_UNCOUNTED_BYTES = 16 * 2**10
"""Of a body that came whole: what is smaller is not worth counting."""
_MAX_AT_ONCE = 16
"""Requests of one connection that are answered before others have their turn."""
_MAX_QUEUED = 64
"""Requests of a connection that wait for the answer to the one before."""
_QUEUED_BYTES = 2**10
"""Memory of such a request besides its body."""
_CHUNK_BYTES = 16
"""Bytes that may stand around a chunk of a body: its length, line ends, a word of extension."""
_FIRST_LINE_BYTES = 32
"""Of the first line of a request beside its path, and the empty line after its headers."""
_MANY_CHUNKS = 1000
"""A body of so many is read a little at a time: each costs as much as a request."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_SWEEPS = 10
"""Ticks in which all connections are looked at, where they are many: a second."""
_FEW = 1000
"""So many are looked at in one tick anyway."""
_PROBES_S = (0.05, 0.2, 1.0, 5.0)
"""Between two looks whether a client that says no more is still there."""
# A name or an IPv4 address, or an IPv6 address in brackets; with or without a port.
_HOST = re.compile(rb"([A-Za-z0-9._~!$&'()*+,;=%-]{0,255}|\[[0-9A-Za-z:.%]{2,100}\])(:[0-9]{0,5})?")
_ONCE = frozenset(
    {b"host", b"authorization", b"content-type", b"x-api-key", b"x-atoll-role", b"x-atoll-owner"}
)
"""Headers that say two things if they are there twice: whoever stands before us may have read the other."""


class Application:
    """Listens, and owns the connections of its clients; what they ask, those that extend it answer."""

    once: frozenset[bytes] = frozenset()
    """Headers that are refused where they are there twice, besides those that always are."""
    upgrades: frozenset[bytes] = frozenset()
    """Paths that take a WebSocket."""

    def __init__(
        self, limits: ConnectionLimits | None = None, deadlines: ConnectionDeadlines | None = None
    ) -> None:
        self.limits = limits or ConnectionLimits()
        self.deadlines = deadlines or ConnectionDeadlines()
        self.connections: set[Connection] = set()
        self._unswept: list[Connection] = []
        self.buffered = 0
        """Bytes in memory of what clients have sent."""
        self.date = b""
        self.draining = False
        self.loop: asyncio.AbstractEventLoop
        self._server: asyncio.Server | None = None
        self._socket: Path | None = None

    async def listen(
        self, host: str, port: int, *, backlog: int, field: str = "--port", share: bool = False
    ) -> tuple[str, int]:
        """Listen on a port and return the address; InputError names `field` where that cannot be.

        With `share`, other processes of this user that say so, too, may listen there, each to its part of
        the connections.
        """
        self.loop = asyncio.get_running_loop()
        try:
            self._server = await self.loop.create_server(
                lambda: Connection(self), host, port, backlog=backlog, reuse_port=share or None
            )
        except OSError as error:
            raise cannot_listen(error, host, port, field) from error
        limit_unsent(self._server)
        address = self._server.sockets[0].getsockname()
        return str(address[0]), int(address[1])

    async def listen_on_socket(
        self, path: Path, *, backlog: int, field: str, taken: str, hint: str
    ) -> None:
        """Listen on a Unix socket that only this user can open (`bind_private`)."""
        self.loop = asyncio.get_running_loop()
        bound = bind_private(path, field=field, taken=taken, hint=hint)
        self._server = await self.loop.create_unix_server(
            lambda: Connection(self), sock=bound, backlog=backlog
        )
        self._socket = path

    def stop_listening(self) -> None:
        """Accept no more connections. The socket is removed: another process may take its path at once."""
        if self._server is not None:
            self._server.close()
        if self._socket is not None:
            self._socket.unlink(missing_ok=True)
            self._socket = None

    def abort_connections(self) -> None:
        """Close all connections without another word."""
        for connection in list(self.connections):
            connection.abort()

    def tick_connections(self, now_s: float, date: bytes) -> None:
        """Close connections that are overdue; `date` is what answers carry from now on.

        Of tens of thousands, nearly all idle, a tenth is looked at each time.
        """
        self.date = date
        if not self._unswept:
            self._unswept = list(self.connections)
        some = max(_FEW, -(-len(self.connections) // _SWEEPS))
        now, self._unswept = self._unswept[:some], self._unswept[some:]
        for connection in now:
            connection.tick(now_s)

    def expect(self, request: Request) -> None:
        """Refuse (ApiError) a request by its headers, before its body has come; here, none."""

    @abstractmethod
    def handle(self, connection: Connection, request: Request) -> None:
        """Answer a request, now or later."""

    @abstractmethod
    def refused(self, error: ApiError) -> None:
        """Note a request that could not be read."""


class Connection(AnswerWriter):
    """A connection of a client."""

    # The parser calls `on_url` and `on_body` as methods of the lists that collect: no Python runs for them.
    __slots__ = (
        "_app",
        "_body",
        "_chunks",
        "_closing",
        "_current",
        "_deadline_s",
        "_doubled",
        "_half_closed",
        "_headers",
        "_host",
        "_in_body",
        "_parser",
        "_piece",
        "_queue",
        "_received",
        "_reserved",
        "_stalled",
        "_turns",
        "_url",
        "_websocket",
        "exchange",
        "on_body",
        "on_url",
    )

    def __init__(self, app: Application) -> None:
        self._app = self._app_state = app
        self._url: list[bytes] = []
        self._headers: dict[bytes, bytes] = {}
        self._body = IncomingBody()
        self.on_url = self._url.append
        self.on_body = self._body.append
        self._parser = httptools.HttpRequestParser(self)
        self._piece = b""
        """What is being parsed."""
        # A list: it is short where there is anything in it, and an empty deque takes 700 bytes more.
        self._queue: list[Request] = []
        self._current: Request | None = None
        """The request whose body comes in pieces."""
        self._in_body = False
        self._chunks = 0
        self._doubled = 0
        """Headers, or trailers, with the name of one before."""
        self._host: bytes | None = None
        """The last one, which needs no second look."""
        self._serving: Request | None = None
        self.written = 0
        self._begun = False
        self._closing = False
        self._half_closed = False
        """Whether the client says no more."""
        self._stalled = False
        """Whether it does not read what it is answered."""
        self._turns = 0
        """Requests served of what was read last."""
        self._received = 0
        """Bytes of a request that is not complete."""
        self._reserved = 0
        """Those of them that count as taken memory."""
        self._deadline_s = app.loop.time() + app.deadlines.header_s
        self.exchange: Responder | None = None
        self._websocket: Upgraded | None = None
        """Where bytes go once the connection is one."""

    # Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Join the application's connections, or refuse if there are too many."""
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=_HIGH_WATER)
        connections = self._app.connections
        # Also one that is refused: `tick` ends those in this set only.
        connections.add(self)
        if len(connections) > self._app.limits.connections:
            self._refuse(
                ApiError(503, "too many connections", kind="server_error", retry_after_s=1)
            )

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget everything; whoever was answering stops."""
        del exc
        self._app.connections.discard(self)
        self._closing = True
        self._release_unserved()
        self._body.clear()
        if self._serving is not None:
            self._app.buffered -= self._serving.held
            self._serving.held = 0
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.cancel()

    def eof_received(self) -> bool:
        """Let a client that says no more have the answer; one that waits for none is gone."""
        if self._serving is None or self._closing:
            return False
        self._half_closed = True
        self._probe(0, self._app.loop.time())
        return True

    def _probe(self, number: int, since_s: float) -> None:
        """Find out whether a client that says no more still listens.

        One that left sends the same end as one that waits, but its machine refuses what it is sent. So an
        interim answer is sent, which every client of HTTP/1.1 skips; the next write after it was refused
        fails. Who speaks HTTP/1.0 knows none of these: it has a limited time instead.
        """
        serving = self._serving
        if self._closing or serving is None:
            return
        loop = self._app.loop
        if serving.old:
            if loop.time() - since_s > self._app.deadlines.client_s:
                self.abort()
                return
        elif not self._begun:
            self.write(_CONTINUE)
        wait_s = _PROBES_S[min(number, len(_PROBES_S) - 1)]
        loop.call_later(wait_s, self._probe, number + 1, since_s)

    def data_received(self, data: bytes) -> None:
        """Parse what came; every request that is complete goes to the application."""
        if self._websocket is not None:
            self._websocket.receive(data)
            return
        if self._closing:
            return
        # The time for the headers begins with the first bytes of a request.
        fresh = self._received == 0
        self._received += len(data)
        self._turns = 0
        self._piece = data
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            # The parser wraps what its callbacks raise; what is no ApiError is a bug, and goes on up.
            cause = error.__context__
            if not isinstance(cause, ApiError):
                raise
            self._refuse(cause)
        except httptools.HttpParserUpgrade as upgrade:
            # What is behind the request is in the other protocol; nothing is, of one that was refused.
            self._pass_on(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse(ApiError(400, "the request is not valid HTTP"))
        else:
            self._piece = b""
            # Nothing is left of a request that came whole, the usual case.
            if self._received:
                self._limit_unfinished(len(data), fresh=fresh)

    def _limit_unfinished(self, size: int, *, fresh: bool) -> None:
        """Keep a request that comes in pieces within its limits."""
        app = self._app
        limits = app.limits
        # What is not complete counts as taken memory, over all clients together.
        self._reserved += size
        app.buffered += size
        if not self._in_body:
            if fresh:
                self._deadline_s = app.loop.time() + app.deadlines.header_s
            count = len(self._headers) + self._doubled
            if self._received > limits.header_bytes or count > limits.headers:
                self._refuse(_headers_too_large())
            elif app.buffered > limits.buffered_bytes:
                self._refuse(too_much_held(self._reserved, limits.buffered_bytes))
            return
        if self._current is None:
            try:
                self._expect_body()
            except ApiError as error:
                self._refuse(error)
                return
        # It may have come with headers of the largest size: both limits together.
        if self._received > self._body_limit() + limits.header_bytes:
            self._refuse(_too_large(self._body_limit()))
        elif (
            self._is_padded(self._body.fold())
            or len(self._headers) + self._doubled > limits.headers
        ):
            # Extensions of chunks, or trailers: the headers were taken out.
            self._refuse(_headers_too_large())
        elif app.buffered > limits.buffered_bytes:
            self._refuse(too_much_held(self._reserved, limits.buffered_bytes))
        elif self._chunks > _MANY_CHUNKS and not self._queue:
            # A body in tiny chunks could keep the loop busy: others have their turn before the next read.
            self.transport.pause_reading()
            app.loop.call_soon(self._read_on)

    def _is_padded(self, body_bytes: int) -> bool:
        """Whether there is more around the chunks of a body, or after them, than headers may have."""
        head = self._current
        if head is None:
            return False
        head_bytes = len(head.path) + len(head.query) + _FIRST_LINE_BYTES
        head_bytes += sum(len(name) + len(value) + 4 for name, value in head.headers.items())
        around = self._received - body_bytes - head_bytes
        return around > self._app.limits.header_bytes + _CHUNK_BYTES * self._chunks

    def _read_on(self) -> None:
        """Read again, now that others had their turn."""
        if not self._queue and not self._closing:
            self.transport.resume_reading()

    def _expect_body(self) -> None:
        """Say to a client whose headers are there that the body may come, or that it may not."""
        app = self._app
        self._current = request = self._request()
        headers = request.headers
        length = headers.get(b"content-length")
        # Refused by its own word: nothing of the body need come.
        if length is not None and int(length) > self._body_limit():
            raise _too_large(self._body_limit())
        coding = headers.get(b"transfer-encoding")
        # With any other coding, whoever stands before us may read other requests out of the same bytes.
        if coding is not None and (request.old or coding.strip().lower() != b"chunked"):
            raise ApiError(400, "transfer-encoding: only chunked is taken, by HTTP/1.1")
        expected = headers.get(b"expect")
        if expected is not None and expected.lower() != b"100-continue":
            raise ApiError(417, "expect: only 100-continue is known")
        app.expect(request)
        # As long as the answer before is on its way nothing may be written in between, and no time runs.
        if self._serving is None:
            self._deadline_s = app.loop.time() + app.deadlines.body_s
            if expected is not None:
                self.write(_CONTINUE)

    def _body_limit(self) -> int:
        """Return how large the body that comes may be."""
        limits, current = self._app.limits, self._current
        return limits.body_bytes if current is None else limits.body_limit(current.path)

    def pause_writing(self) -> None:
        """Have the source of the answer wait."""
        self._stalled = True
        if self.exchange is not None:
            self.exchange.pause()

    def resume_writing(self) -> None:
        """Have the source of the answer go on."""
        self._stalled = False
        if self.exchange is not None:
            self.exchange.resume()
        elif self._queue:
            self._next()

    # Parser

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; trailers, which come after the last chunk, are only counted."""
        name = name.lower()
        headers = self._headers
        if name in headers:
            self._doubled += 1
            if (name in _ONCE or name in self._app.once) and not self._in_body:
                raise ApiError(400, f"the header {name.decode()} is there twice")
        headers[name] = b"" if self._in_body else value

    def on_headers_complete(self) -> None:
        """The body follows."""
        self._in_body = True

    def on_chunk_header(self) -> None:
        """Count a chunk; the first one ends what is known of the body before it comes."""
        self._chunks += 1
        if self._current is None:
            self._expect_body()

    def on_message_complete(self) -> None:
        """Hand the request on, or keep it until the one before is answered."""
        request = self._current or self._request()
        if self._parser.should_upgrade():
            self._check_upgrade(request)
        request.body = body = self._body.take()
        if self._chunks:
            # What came behind it in the same piece belongs to another request.
            if self._is_padded(len(body)) and not self._is_followed():
                raise _headers_too_large()
            self._forget_trailers()
        self._current = None
        self._in_body = False
        self._received = 0
        size = len(body)
        # A small body that came whole is not counted: most requests pay nothing for this limit.
        if size > _UNCOUNTED_BYTES or size > self._app.limits.body_bytes or self._reserved:
            self._count(request)
        request.keep_alive = not (request.old or request.upgrade) and (
            self._parser.should_keep_alive()
        )
        if self._serving is not None or self._queue or self._stalled:
            self._enqueue(request)
        elif self._turns >= _MAX_AT_ONCE:
            self._enqueue(request)
            self._app.loop.call_soon(self._next)
        else:
            self._turns += 1
            self._serving = request
            self._app.handle(self, request)

    def _check_upgrade(self, request: Request) -> None:
        """Refuse a change of protocol but to WebSocket, where one is taken, on a connection that is free."""
        wanted = request.headers.get(b"upgrade", b"").strip().lower()
        free = self._serving is None and not self._queue and not self._body.fold()
        if wanted != b"websocket" or request.path not in self._app.upgrades or not free:
            raise ApiError(400, "upgrading the connection is not supported")
        request.upgrade = True

    def upgrade(self, websocket: Upgraded) -> None:
        """Have a WebSocket take what comes from now on."""
        self._websocket = self.exchange = websocket
        self._received = 0

    def _pass_on(self, data: bytes) -> None:
        if data and self._websocket is not None:
            self._websocket.receive(data)

    def linger(self) -> None:
        """Close once the client has read what was sent, or a moment later."""
        self._close(self._app.loop.time())

    def _is_followed(self) -> bool:
        """Whether what was read last may hold the beginning of another request."""
        return not self._piece.endswith(b"0\r\n\r\n") or self._piece.count(b" HTTP/1.") > 1

    def _forget_trailers(self) -> None:
        """Leave out what came after the last chunk, of which there may be no more than headers."""
        count, self._doubled = len(self._headers) + self._doubled, 0
        self._chunks = 0
        self._headers.clear()
        if count > self._app.limits.headers:
            raise _headers_too_large()

    def _count(self, request: Request) -> None:
        """Count the body of a request as taken memory, in place of the pieces it came in."""
        app, size = self._app, len(request.body)
        app.buffered += size - self._reserved
        self._reserved = 0
        request.held = size
        limit = app.limits.body_limit(request.path)
        error = _too_large(limit) if size > limit else None
        if error is None and app.buffered > app.limits.buffered_bytes:
            error = too_much_held(size, app.limits.buffered_bytes)
        if error is not None:
            app.buffered -= size
            # The refusal carries the headers that belong to its answer (`extra`).
            self._current = request
            # A stranger is told that it is one, not how much would have been taken.
            app.expect(request)
            raise error

    def _enqueue(self, request: Request) -> None:
        """Keep a request until the one before it is answered."""
        if len(self._queue) >= _MAX_QUEUED:
            self._app.buffered -= request.held
            raise ApiError(400, "too many requests before the first answer")
        if not request.held:
            request.held = len(request.body) + _QUEUED_BYTES
            self._app.buffered += request.held
        self._queue.append(request)
        # Until the last of them is taken: a client cannot fill the memory by asking ahead.
        self.transport.pause_reading()

    def hold(self, size: int) -> None:
        """Count bytes of memory that the request being served takes besides its body, or refuse it."""
        app, serving = self._app, self._serving
        if serving is not None:
            serving.held += size
            app.buffered += size
            size = serving.held
        if app.buffered > app.limits.buffered_bytes:
            raise too_much_held(size, app.limits.buffered_bytes)

    def _request(self) -> Request:
        """Return the request whose headers are there."""
        limits = self._app.limits
        received = self._headers
        url = self._url
        # What was received bounds the headers from above and is known already.
        count, self._doubled = len(received) + self._doubled, 0
        if count > limits.headers or (
            self._received > limits.header_bytes
            and sum(len(k) + len(v) + 4 for k, v in received.items()) + sum(map(len, url))
            > limits.header_bytes
        ):
            raise _headers_too_large()
        # The query is kept apart: keys and the like do not belong in logs.
        path, _, query = (url[0] if len(url) == 1 else b"".join(url)).partition(b"?")
        url.clear()
        parser = self._parser
        request = Request(parser.get_method(), path, received.copy(), query)
        received.clear()
        version = parser.get_http_version()
        if version == "1.1":
            host = request.headers.get(b"host")
            if host is None or host != self._host:
                self._host = _checked_host(host)
        elif version == "1.0":
            request.old = True
        else:
            raise ApiError(400, "HTTP/1.1 is spoken here")
        return request

    # Answers

    def abort(self) -> None:
        """Close without another word."""
        self._closing = True
        self.transport.abort()

    def _finish_serving(self) -> None:
        app = self._app
        request, self._serving = self._serving, None
        self.exchange = None
        self._begun = False
        now_s = app.loop.time()
        if request is None or not request.keep_alive or app.draining:
            # The client wants it so, or the gateway stops.
            if request is not None:
                app.buffered -= request.held
            self._close(now_s)
            return
        if request.held:
            app.buffered -= request.held
        if self._half_closed and not self._queue:
            self._close(now_s)
            return
        deadlines = app.deadlines
        # The next request may have begun to come: then its time runs, not that of an idle connection.
        self._deadline_s = now_s + (deadlines.body_s if self._received else deadlines.idle_s)
        if self._queue:
            # In a turn of its own: answers that are there at once would nest ever deeper.
            self._app.loop.call_soon(self._next)

    def _next(self) -> None:
        if self._queue and self._serving is None and not self._closing and not self._stalled:
            request = self._queue.pop(0)
            if not self._queue:
                self.transport.resume_reading()
            self._serving = request
            self._app.handle(self, request)

    def _refuse(self, error: ApiError) -> None:
        """Answer what cannot be read on and close, once the client had time to read it."""
        # Answers keep the order of requests: what was asked before is answered first.
        waiting = self._queue.pop(0) if self._serving is None and self._queue else None
        last = self._serving or waiting
        if last is not None:
            # The answer to the request before is still to come; it is the last.
            last.keep_alive = False
            self._release_unserved()
            self._body.clear()
            self.transport.pause_reading()
            if waiting is not None:
                self._queue.append(waiting)
            return
        self._closing = True
        body = error.body()
        current = self._current
        self.write(
            b"%bcontent-type: application/json\r\ncontent-length: %d\r\n%b%bconnection: close\r\n\r\n%b"
            % (
                STATUS_LINES[error.status],
                len(body),
                b"" if current is None else current.extra,
                headers_of(error),
                body,
            )
        )
        self._release_unserved()
        self._body.clear()
        self._app.refused(error)
        # Closed at once, the connection might be reset before the client has read the answer.
        self._deadline_s = self._app.loop.time() + _LINGER_S
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _close(self, now_s: float) -> None:
        """Close once the client has read what was sent, but not later than it may take for that."""
        self._closing = True
        self._deadline_s = now_s + self._app.deadlines.client_s
        self.transport.close()

    def _release_unserved(self) -> None:
        """Forget what waits to be served, and what has come of the next request."""
        app = self._app
        app.buffered -= self._reserved
        self._reserved = 0
        for request in self._queue:
            app.buffered -= request.held
        self._queue.clear()

    def tick(self, now_s: float) -> None:
        """Close what is overdue."""
        # Whoever answers a request keeps its deadlines.
        if now_s < self._deadline_s or (self._serving is not None and not self._closing):
            return
        if self._closing:
            self.transport.abort()
        elif self._received:
            self._refuse(ApiError(408, "the request took too long to arrive"))
        else:
            self._close(now_s)

    def finish_up(self) -> None:
        """Close now if idle, else after the request being served."""
        if self._serving is None and not self._closing:
            self._close(self._app.loop.time())


def _checked_host(host: bytes | None) -> bytes:
    """Return the value of a Host header, if it is there and is one."""
    if host is None:
        raise ApiError(400, "the header host is missing")
    if _HOST.fullmatch(host) is None:
        raise ApiError(400, "the header host names no host")
    return host


def too_much_held(size: int, limit: int) -> ApiError:
    """Return what a client is told whose request is not held: of others there is too much, or of it."""
    if size > limit:
        return ApiError(
            413,
            f"the request takes more than {limit} bytes once it is read",
            code="request_too_large",
        )
    return ApiError(
        503,
        "too many large requests at once",
        kind="server_error",
        code="overloaded",
        retry_after_s=1,
    )


def _headers_too_large() -> ApiError:
    return ApiError(431, "the headers are too large")


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes", code="request_too_large")
