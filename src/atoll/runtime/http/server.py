"""The server: HTTP/1.1 on a connection, without a task a request.

A connection reads requests one after the other and hands each to the application, which answers at once
or later. Everything a client can do slowly has a deadline, everything it can do largely has a limit. The
gateway is an application of its own; `atoll.runtime.http.handlers` makes one of an async function.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from http import HTTPStatus
from typing import Protocol, cast

import httptools

from atoll.runtime.openai import ApiError

REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
"""What a client may call its request; other names are replaced."""
_STATUS = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in HTTPStatus}
_LINGER_S = 2.0
_HIGH_WATER = 256 * 2**10


class Request:
    """One request of a client, complete."""

    __slots__ = ("body", "headers", "id", "keep_alive", "method", "old", "path", "query", "trace")

    def __init__(
        self, method: bytes, path: bytes, headers: dict[bytes, bytes], query: bytes = b""
    ) -> None:
        self.method = method
        self.path = path
        self.query = query
        self.headers = headers
        self.body = b""
        self.id = b""
        self.trace = ""
        self.keep_alive = True
        self.old = False
        """HTTP/1.0: no chunks, one request a connection."""


class Responder(Protocol):
    """What answers a request later."""

    def cancel(self) -> None:
        """Stop: the client is gone."""

    def pause(self) -> None:
        """Send no more for now: the client does not keep up."""

    def resume(self) -> None:
        """Send again after `pause`: the client keeps up."""


class ConnectionLimits(Protocol):
    """How much of everything a connection accepts."""

    @property
    def body_bytes(self) -> int:
        """Of one request; more is answered with 413."""
        ...

    def body_limit(self, path: bytes) -> int:
        """Return `body_bytes`, or how many more a request to this path may have."""
        ...

    @property
    def header_bytes(self) -> int:
        """Of the first line and headers of a request together; more is answered with 431."""
        ...

    @property
    def headers(self) -> int:
        """Of one request; more are answered with 431."""
        ...

    @property
    def connections(self) -> int:
        """At the same time; more are answered with 503."""
        ...

    @property
    def buffered_bytes(self) -> int:
        """Large bodies of requests in memory at the same time; more are answered with 503."""
        ...


class ConnectionDeadlines(Protocol):
    """How long a client may take over anything, in seconds."""

    @property
    def header_s(self) -> float:
        """From the first byte of a connection or request to the end of its headers."""
        ...

    @property
    def body_s(self) -> float:
        """From the headers of a request to the end of its body."""
        ...

    @property
    def idle_s(self) -> float:
        """Between two requests of a connection."""
        ...

    @property
    def client_s(self) -> float:
        """For a client that has stopped reading its answer."""
        ...


class Application(Protocol):
    """What connections belong to."""

    @property
    def limits(self) -> ConnectionLimits:
        """How much is accepted."""
        ...

    @property
    def deadlines(self) -> ConnectionDeadlines:
        """How long clients may take."""
        ...

    connections: set[Connection]
    buffered: int
    """Bytes of large bodies of requests in memory."""
    date: bytes
    loop: asyncio.AbstractEventLoop
    draining: bool

    def handle(self, connection: Connection, request: Request) -> None:
        """Answer a request, now or later."""

    def refused(self, error: ApiError) -> None:
        """Note a request that could not be read."""


class Connection(asyncio.Protocol):
    """A connection of a client."""

    # The parser calls `on_url`, `on_header` and `on_body` most often: they are the methods of the lists
    # and the dict that collect, so that no Python runs for them.
    __slots__ = (
        "_app",
        "_body",
        "_closing",
        "_current",
        "_deadline_s",
        "_headers",
        "_in_body",
        "_parser",
        "_queue",
        "_received",
        "_reserved",
        "_serving",
        "_url",
        "exchange",
        "on_body",
        "on_header",
        "on_url",
        "transport",
    )

    def __init__(self, app: Application) -> None:
        self._app = app
        self._url: list[bytes] = []
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self.on_url = self._url.append
        self.on_header = self._headers.__setitem__
        self.on_body = self._body.append
        self._parser = httptools.HttpRequestParser(self)
        self._queue: deque[Request] = deque()
        self._current: Request | None = None
        """The request whose body comes in pieces."""
        self._in_body = False
        self._serving: Request | None = None
        self._closing = False
        self._received = 0
        """Bytes of a request that is not complete."""
        self._reserved = 0
        self._deadline_s = app.loop.time() + app.deadlines.header_s
        self.exchange: Responder | None = None
        self.transport: asyncio.Transport

    # Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Join the application's connections, or refuse if there are too many."""
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=_HIGH_WATER)
        connections = self._app.connections
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
        self._release()
        self._queue.clear()
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.cancel()

    def eof_received(self) -> bool:
        """Take the end of what the client says as the end of the client."""
        return False

    def data_received(self, data: bytes) -> None:
        """Parse what came; every request that is complete goes to the application."""
        if self._closing:
            return
        fresh = self._received == 0
        self._received += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            if not isinstance(cause, _RefusedError):
                raise
            self._refuse(cause.error)
        except httptools.HttpParserError:
            self._refuse(ApiError(400, "the request is not valid HTTP"))
        else:
            if self._received:
                self._limit_unfinished(len(data), fresh=fresh)

    def _limit_unfinished(self, size: int, *, fresh: bool) -> None:
        """Keep a request that comes in pieces within its limits."""
        app = self._app
        limits = app.limits
        if not self._in_body:
            if fresh:
                self._deadline_s = app.loop.time() + app.deadlines.header_s
            if self._received > limits.header_bytes:
                self._refuse(_headers_too_large())
            return
        self._reserved += size
        app.buffered += size
        if self._current is None:
            try:
                self._expect_body()
            except _RefusedError as refused:
                self._refuse(refused.error)
                return
        if len(self._headers) > limits.headers:
            # Trailers: the headers were taken out.
            self._refuse(_headers_too_large())
        elif self._received > self._body_limit() + limits.header_bytes:
            self._refuse(_too_large(self._body_limit()))
        elif app.buffered > limits.buffered_bytes:
            self._refuse(
                ApiError(
                    503, "too many large requests at once", kind="server_error", retry_after_s=1
                )
            )

    def _expect_body(self) -> None:
        """Say to a client whose headers are there that the body may come, or that it may not."""
        app = self._app
        self._current = request = self._request()
        length = request.headers.get(b"content-length")
        if length is not None and int(length) > self._body_limit():
            raise _RefusedError(_too_large(self._body_limit()))
        if self._serving is None:
            self._deadline_s = app.loop.time() + app.deadlines.body_s
            if request.headers.get(b"expect", b"").lower() == b"100-continue":
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _body_limit(self) -> int:
        """Return how large the body that comes may be."""
        limits, current = self._app.limits, self._current
        return limits.body_bytes if current is None else limits.body_limit(current.path)

    def pause_writing(self) -> None:
        """Have the source of the answer wait."""
        if self.exchange is not None:
            self.exchange.pause()

    def resume_writing(self) -> None:
        """Have the source of the answer go on."""
        if self.exchange is not None:
            self.exchange.resume()

    # Parser

    def on_headers_complete(self) -> None:
        """What follows is the body."""
        self._in_body = True

    def on_chunk_header(self) -> None:
        """Take the headers before trailers, which come after the last chunk, can pass for them."""
        if self._current is None:
            self._expect_body()

    def on_message_complete(self) -> None:
        """Hand the request on, or keep it until the one before is answered."""
        if self._parser.should_upgrade():
            raise _RefusedError(ApiError(400, "upgrading the connection is not supported"))
        request = self._current or self._request()
        body = self._body
        request.body = body[0] if len(body) == 1 else b"".join(body)
        body.clear()
        # Trailers after a body in chunks are nothing to us.
        self._headers.clear()
        self._current = None
        self._in_body = False
        self._received = 0
        limits = self._app.limits
        if len(request.body) > limits.body_bytes:
            most = limits.body_limit(request.path)
            if len(request.body) > most:
                raise _RefusedError(_too_large(most))
        request.keep_alive = not request.old and self._parser.should_keep_alive()
        if self._serving is None:
            self._serving = request
            self._app.handle(self, request)
        else:
            self._queue.append(request)
            self.transport.pause_reading()

    def _request(self) -> Request:
        """Return the request whose headers are there."""
        limits = self._app.limits
        received = self._headers
        url = self._url
        # What was received bounds the headers from above and is known already.
        if len(received) > limits.headers or (
            self._received > limits.header_bytes
            and sum(len(k) + len(v) + 4 for k, v in received.items()) + sum(map(len, url))
            > limits.header_bytes
        ):
            raise _RefusedError(_headers_too_large())
        # The query is kept apart: keys and the like do not belong in logs.
        path, _, query = (url[0] if len(url) == 1 else b"".join(url)).partition(b"?")
        url.clear()
        parser = self._parser
        names = map(bytes.lower, received)
        headers = dict(zip(names, received.values(), strict=True))
        request = Request(parser.get_method(), path, headers, query)
        received.clear()
        request.old = parser.get_http_version() != "1.1"
        return request

    # Answers

    def head(
        self, status: int, content_type: bytes, extra: bytes = b"", length: int | None = None
    ) -> bytes:
        """Return the first line and headers of the answer to the request being served.

        Without a length the body follows in chunks, or to the end of the connection.
        """
        request = self._serving
        assert request is not None
        if length is not None:
            framing = b"content-length: %d\r\n" % length
        else:
            framing = b"" if request.old else b"transfer-encoding: chunked\r\n"
        if not request.keep_alive or self._app.draining:
            framing += b"connection: close\r\n"
        return b"%bdate: %b\r\nx-request-id: %b\r\ncontent-type: %b\r\n%b%b\r\n" % (
            _STATUS.get(status) or b"HTTP/1.1 %d \r\n" % status,
            self._app.date,
            request.id,
            content_type,
            framing,
            extra,
        )

    def respond(
        self,
        status: int,
        body: bytes,
        content_type: bytes = b"application/json",
        extra: bytes = b"",
    ) -> None:
        """Answer the request being served, completely."""
        request = self._serving
        head = self.head(status, content_type, extra, len(body))
        if request is not None and request.method == b"HEAD":
            body = b""
        self.transport.write(head + body)
        self._finish_serving()

    def respond_error(self, error: ApiError) -> None:
        """Answer the request being served with an error."""
        self.respond(error.status, error.body(), extra=_extra(error))

    def begin_stream(self, headers: bytes = b"") -> None:
        """Begin a stream of events as the answer to the request being served; `headers` are added."""
        extra = b"cache-control: no-cache\r\nx-accel-buffering: no\r\n" + headers
        self.transport.write(self.head(200, b"text/event-stream; charset=utf-8", extra))

    def begin(self, status: int, content_type: bytes, extra: bytes) -> None:
        """Begin an answer whose pieces follow."""
        self.transport.write(self.head(status, content_type, extra))

    def send(self, data: bytes) -> None:
        """Send a piece of the stream."""
        serving = self._serving
        if serving is not None and serving.old:
            self.transport.write(data)
        else:
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def end_stream(self, data: bytes) -> None:
        """Send the last piece of the stream and end it."""
        serving = self._serving
        if not data:
            if serving is None or not serving.old:
                self.transport.write(b"0\r\n\r\n")
        elif serving is not None and serving.old:
            self.transport.write(data)
        else:
            self.transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data))
        self._finish_serving()

    def abort(self) -> None:
        """Close without another word."""
        self._closing = True
        self.transport.abort()

    def _finish_serving(self) -> None:
        request, self._serving = self._serving, None
        self.exchange = None
        if self._reserved:
            self._release()
        now_s = self._app.loop.time()
        if request is None or not request.keep_alive or self._app.draining:
            self._close(now_s)
            return
        self._deadline_s = now_s + self._app.deadlines.idle_s
        if self._queue:
            self._app.loop.call_soon(self._next)

    def _next(self) -> None:
        if self._queue and self._serving is None and not self._closing:
            request = self._queue.popleft()
            if not self._queue:
                self.transport.resume_reading()
            self._serving = request
            self._app.handle(self, request)

    def _refuse(self, error: ApiError) -> None:
        """Answer what cannot be read on and close, once the client had time to read it."""
        if self._serving is not None:
            # The answer to the request before is still to come; it is the last.
            self._serving.keep_alive = False
            self._queue.clear()
            self.transport.pause_reading()
            return
        self._closing = True
        body = error.body()
        self.transport.write(
            b"%bcontent-type: application/json\r\ncontent-length: %d\r\n%bconnection: close\r\n\r\n%b"
            % (_STATUS[error.status], len(body), _extra(error), body)
        )
        self._release()
        self._app.refused(error)
        self._deadline_s = self._app.loop.time() + _LINGER_S
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _close(self, now_s: float) -> None:
        """Close once the client has read what was sent, but not later than it may take for that."""
        self._closing = True
        self._deadline_s = now_s + self._app.deadlines.client_s
        self.transport.close()

    def _release(self) -> None:
        self._app.buffered -= self._reserved
        self._reserved = 0

    def tick(self, now_s: float) -> None:
        """Close what is overdue."""
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


class _RefusedError(Exception):
    def __init__(self, error: ApiError) -> None:
        super().__init__(error.message)
        self.error = error


def _headers_too_large() -> ApiError:
    return ApiError(431, "the headers are too large")


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body is larger than {most} bytes", code="request_too_large")


def _extra(error: ApiError) -> bytes:
    extra = b""
    if error.retry_after_s is not None:
        extra += b"retry-after: %d\r\n" % error.retry_after_s
    if error.allow is not None:
        extra += b"allow: %b\r\n" % error.allow.encode()
    return extra
