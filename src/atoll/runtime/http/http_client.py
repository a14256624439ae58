"""A small HTTP/1.1 client: one request on a connection of its own, and the whole answer.

For questions asked now and then: is an engine well, what does it offer, how is a fleet. Requests that
clients wait for go over kept connections (`atoll.runtime.http.upstream`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from atoll.core.errors import AtollError, MissingDependencyError

_READ_BYTES = 2**16
_MAX_HEADER_BYTES = 64 * 2**10
_MAX_BYTES = 64 * 2**20
_MAX_ERROR_BYTES = 2**14
_MAX_STREAMED_BYTES = 2**50
"""Of an answer that is passed on as it comes: nothing of it is kept."""


@cache
def tls_context() -> ssl.SSLContext:
    """Return the settings of TLS towards servers: the authorities this machine trusts, read once."""
    return ssl.create_default_context()


class FetchError(AtollError):
    """A server did not answer, or not in HTTP."""


class StatusError(FetchError):
    """A server answered with another status than 200; `body` is how its answer begins."""

    def __init__(self, url: str, status: int, body: bytes) -> None:
        text = body[:200].decode("utf-8", "replace")
        super().__init__(f"{url} answered with status {status}: {text}")
        self.status = status
        self.body = body


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """Answer of a server; names of headers are in small letters."""

    status: int
    headers: Mapping[str, str]
    body: bytes


async def fetch(
    url: str,
    *,
    body: object = None,
    timeout_s: float = 5.0,
    api_key: str | None = None,
    unix_socket: Path | str | None = None,
) -> tuple[int, bytes]:
    """GET a URL, or POST a JSON body to it; returns status and body. FetchError if there is none."""
    answer = await request(
        url, body=body, timeout_s=timeout_s, api_key=api_key, unix_socket=unix_socket
    )
    return answer.status, answer.body


async def request(
    url: str,
    *,
    method: str | None = None,
    body: object = None,
    data: bytes | None = None,
    timeout_s: float = 5.0,
    api_key: str | None = None,
    headers: Mapping[str, str] | None = None,
    max_bytes: int = _MAX_BYTES,
    unix_socket: Path | str | None = None,
) -> HttpResponse:
    """Send a request and return the whole answer; FetchError if there is none within `timeout_s`.

    Without a method it is GET, or POST where there is a body, which is sent as JSON; `data` is sent as it
    is, and `headers` say of what type. An answer of more than `max_bytes`, headers included, is refused.
    With `unix_socket` the connection goes to that socket, and the URL says only what is asked for there.
    """
    try:
        # The whole of it, not only the headers, has so long.
        async with (
            asyncio.timeout(timeout_s),
            open_stream(
                url,
                method=method,
                body=body,
                data=data,
                timeout_s=timeout_s,
                api_key=api_key,
                headers=headers,
                max_bytes=max_bytes,
                unix_socket=unix_socket,
            ) as answer,
        ):
            whole = b"".join([piece async for piece in answer.pieces(timeout_s)])
    except TimeoutError as error:
        raise FetchError(f"{url} did not answer within {timeout_s:g} s") from error
    return HttpResponse(answer.status, answer.headers, whole)


async def stream_lines(
    url: str,
    *,
    body: object,
    timeout_s: float = 60.0,
    api_key: str | None = None,
    on_headers: Callable[[dict[str, str]], None] | None = None,
) -> AsyncGenerator[bytes, None]:
    """POST a JSON body and yield the lines of the answer as they come, without their ends.

    `on_headers` is given the answer's headers before the first line. FetchError if no more of it comes for
    `timeout_s` or if it is cut short, StatusError if its status is not 200.
    """
    rest = b""
    opened = open_stream(url, body=body, timeout_s=timeout_s, api_key=api_key, max_bytes=_MAX_BYTES)
    async with opened as answer, contextlib.aclosing(answer.pieces(timeout_s)) as pieces:
        if on_headers is not None:
            on_headers(dict(answer.headers))
        if answer.status != 200:
            said = b"".join([piece async for piece in pieces])
            raise StatusError(url, answer.status, said[:_MAX_ERROR_BYTES])
        async for piece in pieces:
            # What comes after the last line end is not a whole line yet.
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                yield line
    # The last line need not have an end.
    if rest:
        yield rest


class StreamedResponse:
    """An answer whose body is read as it comes; names of headers are in small letters."""

    def __init__(self, url: str, reader: ResponseReader, connection: asyncio.StreamReader) -> None:
        self._url = url
        self._reader = reader
        self._connection = connection
        self.status = reader.status
        self.headers: Mapping[str, str] = dict(reader.headers)

    async def pieces(
        self, timeout_s: float = 600.0, beat_s: float | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Yield the body as it comes; FetchError if it is cut short or nothing comes for `timeout_s`.

        With `beat_s` it yields b"" as often while nothing comes.
        """
        silent_s = 0.0
        while True:
            if data := self._reader.take():
                silent_s = 0.0
                yield data
            if self._reader.complete:
                return
            # Beats or not, the silence may last `timeout_s` in all.
            wait_s = timeout_s - silent_s if beat_s is None else min(beat_s, timeout_s - silent_s)
            try:
                async with asyncio.timeout(wait_s):
                    await self._reader.read(self._connection)
            except TimeoutError as error:
                silent_s += wait_s
                if silent_s >= timeout_s:
                    raise FetchError(f"{self._url} said nothing for {timeout_s:g} s") from error
                yield b""
            except (OSError, ValueError) as error:
                raise FetchError(f"{self._url} stopped answering: {error}") from error


@contextlib.asynccontextmanager
async def open_stream(
    url: str,
    *,
    method: str | None = None,
    body: object = None,
    data: bytes | None = None,
    timeout_s: float = 60.0,
    api_key: str | None = None,
    headers: Mapping[str, str] | None = None,
    max_bytes: int = _MAX_STREAMED_BYTES,
    unix_socket: Path | str | None = None,
) -> AsyncIterator[StreamedResponse]:
    """Send a request and give its answer once the headers are there; leaving cancels what is left of it.

    FetchError if there are none within `timeout_s`. What is sent is as in `request`.
    """
    named = method or ("GET" if body is None else "POST")
    try:
        async with contextlib.AsyncExitStack() as stack:
            parts = urlsplit(url)
            sent = _compose(parts, named, body, api_key, headers or {}, data)
            reader = ResponseReader(max_bytes, is_head=named == "HEAD")
            # Only until the headers are there: pieces of the body have a time of their own.
            async with asyncio.timeout(timeout_s):
                connection = await stack.enter_async_context(_send(parts, unix_socket, sent))
                while not reader.status:
                    await reader.read(connection)
            opened = stack.pop_all()
    except TimeoutError as error:
        raise FetchError(f"{url} did not answer within {timeout_s:g} s") from error
    except (OSError, ValueError) as error:
        raise FetchError(f"{url} did not answer: {error}") from error
    async with opened:
        yield StreamedResponse(url, reader, connection)


@contextlib.asynccontextmanager
async def _send(
    parts: SplitResult, unix_socket: Path | str | None, sent: bytes
) -> AsyncIterator[asyncio.StreamReader]:
    if unix_socket is not None:
        reader, writer = await asyncio.open_unix_connection(unix_socket)
    else:
        secure = parts.scheme == "https"
        context = tls_context() if secure else None
        port = parts.port or (443 if secure else 80)
        reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=context)
    try:
        writer.write(sent)
        yield reader
    finally:
        # There is nothing left to say, and a server that is slow to say goodbye is not waited for.
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def _compose(
    parts: SplitResult,
    method: str,
    body: object,
    api_key: str | None,
    headers: Mapping[str, str],
    data: bytes | None = None,
) -> bytes:
    if data is None:
        data = b"" if body is None else json.dumps(body).encode()
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    lines = [
        f"{method} {target} HTTP/1.1",
        # Without the user and the password that a URL may hold.
        f"host: {parts.netloc.rpartition('@')[2]}",
        "connection: close",
        *(() if "accept" in headers else ("accept: application/json",)),
        f"content-length: {len(data)}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    if body is not None:
        lines.append("content-type: application/json")
    if api_key:
        lines.append(f"authorization: Bearer {api_key}")
    # A line break would let a value add headers of its own.
    if any("\r" in line or "\n" in line for line in lines):
        raise ValueError("a header holds a line break")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + data


class ResponseReader:
    """Reads one answer out of the bytes of a connection; ValueError for what is none.

    `is_head`: the answer to a HEAD has no body, whatever length its headers say.
    """

    def __init__(self, max_bytes: int = _MAX_BYTES, *, is_head: bool = False) -> None:
        # The parser comes with an extra: without it this module can be imported still.
        try:
            import httptools
        except ImportError as error:
            raise MissingDependencyError("httptools", "serve", needed_for="HTTP") from error

        self._errors = (httptools.HttpParserError, httptools.HttpParserUpgrade)
        self._parser: Any = httptools.HttpResponseParser(self)
        self._max_bytes = max_bytes
        self._is_head = is_head
        self._received = 0
        self.status = 0
        """0 until the headers are there."""
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._ends_with_connection = False
        self.complete = False

    async def read(self, connection: asyncio.StreamReader) -> None:
        """Take what comes next on a connection, its end included."""
        data = await connection.read(_READ_BYTES)
        if data:
            self.feed(data)
        else:
            self.end()

    def feed(self, data: bytes) -> None:
        """Take bytes as they came."""
        self._received += len(data)
        if self._received > self._max_bytes:
            raise ValueError(f"more than {self._max_bytes} bytes")
        # One read may bring the headers and the beginning of the body together.
        if not self.status and self._received > _MAX_HEADER_BYTES + _READ_BYTES:
            raise ValueError("the headers are too large")
        try:
            self._parser.feed_data(data)
        except self._errors as error:
            # What comes after the end of the answer was not asked for.
            if not self.complete:
                raise ValueError(f"no HTTP: {error}") from error

    def end(self) -> None:
        """Take the end of the connection, which is the end of an answer that says no length."""
        if not self._ends_with_connection:
            raise ValueError("the connection was closed before the answer was complete")
        self.complete = True

    def response(self) -> HttpResponse:
        """Return the answer, once it is complete."""
        return HttpResponse(self.status, self._headers, b"".join(self._body))

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers so far; names are in small letters."""
        return self._headers

    def take(self) -> bytes:
        """Return what came of the body since the last time."""
        data = b"".join(self._body)
        self._body.clear()
        return data

    # Called by the parser.

    def on_message_begin(self) -> None:
        """Forget the headers of an interim answer."""
        if not self.status:
            self._headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; trailers, which come after the body, are nothing to us."""
        if not self.status:
            self._headers[name.decode("latin-1").lower()] = value.decode("latin-1").strip()

    def on_headers_complete(self) -> None:
        """Find out where the body will end."""
        status = self._parser.get_status_code()
        if self.status or status < 200:
            # An interim answer (1xx): the one that counts follows.
            return
        self.status = status
        if self._is_head or status in (204, 304):
            # These have no body, whatever the headers say.
            self.complete = True
            return
        coding = self._headers.get("transfer-encoding", "").lower()
        # If the last coding is not chunked, the body ends with the connection.
        self._ends_with_connection = (
            not coding.endswith("chunked") if coding else "content-length" not in self._headers
        )

    def on_body(self, data: bytes) -> None:
        """Keep a piece of the body."""
        if not self.complete:
            self._body.append(data)

    def on_message_complete(self) -> None:
        """Note the end of the answer, unless it was an interim one."""
        if self.status:
            self.complete = True
