"""A small HTTP/1.1 server for instances: requests in, answers or streams out, nothing else.

A client that goes away cancels what was done for it. Requests on one connection are answered in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, cast

from atoll.core.errors import MissingDependencyError
from atoll.runtime.openai import ApiError, error_body

_LOG = logging.getLogger(__name__)
MOST_BODY_BYTES = 32 * 2**20
_MOST_HEADER_BYTES = 64 * 2**10
_MOST_PIPELINED = 16


@dataclass(slots=True)
class Request:
    """A whole request; header names are in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    keep_alive: bool


@dataclass(slots=True)
class Response:
    """A whole answer."""

    body: bytes
    status: int = 200
    content_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class EventStream:
    """An answer in pieces, as server-sent events."""

    pieces: AsyncIterator[bytes]


Handler = Callable[[Request], Awaitable[Response | EventStream]]


def error_response(error: ApiError) -> Response:
    """Return an error as an answer."""
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    return Response(error.body(), error.status, headers=headers)


class Server:
    """Listens, and hands every request to the handler."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen, and return where."""
        parser = _parser_class()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Connection(self._handler, parser, self._connections), host, port, backlog=1024
        )
        found = self._server.sockets[0].getsockname()
        return str(found[0]), int(found[1])

    @property
    def busy(self) -> int:
        """How many requests are being answered."""
        return sum(1 for connection in self._connections if connection.busy)

    async def close(self, drain_s: float = 0.0) -> None:
        """Accept nothing more, wait for what runs, then cut what is left."""
        if self._server is not None:
            self._server.close()
        deadline_s = asyncio.get_running_loop().time() + drain_s
        while self.busy and asyncio.get_running_loop().time() < deadline_s:
            await asyncio.sleep(0.02)
        for connection in list(self._connections):
            connection.cut()
        await asyncio.sleep(0)


def _parser_class() -> Any:
    try:
        import httptools
    except ImportError as error:
        raise MissingDependencyError("httptools", "serve", needed_for="an instance") from error
    return httptools.HttpRequestParser


class _Connection(asyncio.Protocol):
    """One client. Called back by httptools while it reads."""

    def __init__(self, handler: Handler, parser: Any, all_: set[_Connection]) -> None:
        self._handler = handler
        self._parser = parser(self)
        self._all = all_
        self._transport: asyncio.Transport | None = None
        self._waiting: deque[Request] = deque()
        self._task: asyncio.Task[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._begin()

    @property
    def busy(self) -> bool:
        return self._task is not None

    def cut(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # What asyncio says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, since uvloop's transports do not derive from asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        self._all.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._all.discard(self)
        self._transport = None
        self._writable.set()
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        import httptools

        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(400, "upgrades are not supported")
        except httptools.HttpParserError as error:
            # What the callbacks refuse arrives here as the cause.
            cause = error.__context__
            if isinstance(cause, ApiError):
                self._refuse(cause.status, cause.message)
            else:
                self._refuse(400, f"not a valid HTTP request: {error}")

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    # What httptools says

    def _begin(self) -> None:
        self._url = b""
        self._headers: dict[str, str] = {}
        self._header_bytes = 0
        self._pieces: list[bytes] = []
        self._body_bytes = 0

    def on_message_begin(self) -> None:
        self._begin()

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._count_header(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_header(len(name) + len(value))
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._headers.get("expect", "").lower() == "100-continue" and self._transport:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, piece: bytes) -> None:
        self._body_bytes += len(piece)
        if self._body_bytes > MOST_BODY_BYTES:
            raise ApiError(413, f"the body is larger than {MOST_BODY_BYTES} bytes")
        self._pieces.append(piece)

    def on_message_complete(self) -> None:
        path = self._url.decode("latin-1").partition("?")[0]
        self._waiting.append(
            Request(
                method=self._parser.get_method().decode("latin-1"),
                path=path,
                headers=self._headers,
                body=b"".join(self._pieces),
                keep_alive=self._parser.should_keep_alive(),
            )
        )
        if len(self._waiting) > _MOST_PIPELINED:
            raise ApiError(400, "too many requests at once on one connection")
        self._next()

    def _count_header(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > _MOST_HEADER_BYTES:
            raise ApiError(431, "the headers are too large")

    # Answers

    def _next(self) -> None:
        if self._task is None and self._waiting and self._transport is not None:
            self._task = asyncio.get_running_loop().create_task(
                self._answer(self._waiting.popleft())
            )

    async def _answer(self, request: Request) -> None:
        keep_alive = request.keep_alive
        try:
            answer = await self._handled(request)
            if isinstance(answer, EventStream):
                keep_alive = await self._send_stream(answer) and keep_alive
            else:
                self._send(answer, keep_alive=keep_alive)
        except asyncio.CancelledError:
            keep_alive = False
        finally:
            self._task = None
        if self._transport is None:
            return
        if keep_alive:
            self._next()
        else:
            self._transport.close()

    async def _handled(self, request: Request) -> Response | EventStream:
        try:
            return await self._handler(request)
        except ApiError as error:
            return error_response(error)
        except Exception:  # noqa: BLE001  one request must not end the others
            _LOG.exception("%s %s failed", request.method, request.path)
            return Response(error_body("an error inside the instance", "server_error"), 500)

    def _refuse(self, status: int, message: str) -> None:
        if self._transport is None:
            return
        if self._task is None:
            self._send(error_response(ApiError(status, message)), keep_alive=False)
        self._transport.close()

    def _send(self, answer: Response, *, keep_alive: bool) -> None:
        if self._transport is None:
            return
        lines = [
            f"HTTP/1.1 {answer.status} {_phrase(answer.status)}",
            f"content-type: {answer.content_type}",
            f"content-length: {len(answer.body)}",
            *(f"{name}: {value}" for name, value in answer.headers.items()),
        ]
        if not keep_alive:
            lines.append("connection: close")
        self._transport.write("\r\n".join([*lines, "", ""]).encode("latin-1") + answer.body)

    async def _send_stream(self, answer: EventStream) -> bool:
        """Send the pieces; returns whether the stream came to its end."""
        transport = self._transport
        if transport is None:
            return False
        head = (
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        # A generator left half way must end now, not when it is collected.
        async with contextlib.aclosing(answer.pieces) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                transport.write(b"%s%x\r\n%s\r\n" % (head, len(piece), piece))
                head = b""
                if not self._writable.is_set():
                    await self._writable.wait()
                if transport.is_closing():
                    return False
        transport.write(head + b"0\r\n\r\n")
        return True


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Unknown"
