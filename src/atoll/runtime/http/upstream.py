"""Towards backends: kept connections, one request at a time on each.

`Upstream` and `UpstreamPool` are what a request needs of a backend; `HttpUpstream` and `HttpUpstreamPool`
are that over HTTP. Nodes of a fabric are reached by others (`atoll.runtime.federation.upstreams`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple, Protocol, cast
from urllib.parse import urlsplit

import httptools

from atoll.runtime.http.http_client import tls_context
from atoll.runtime.pool.member import Member

# So long an answer that nobody waits for may go on, for its connection to be kept.
_DRAIN_S = 5.0
# Connections to one backend that are kept at most.
_MAX_IDLE = 1024
_IDLE_S = 60.0
"""A connection that nobody took for so long is not kept: once there were more requests."""
_MAX_HEADERS = 1000
"""Of an answer; a backend that says more is not listened to."""
_LARGE_BYTES = 64 * 2**10
"""Of a body that is sent by itself."""
_AROUND_BYTES = 128 * 2**10
"""Of headers, trailers and extensions of chunks between two pieces of a body, the same."""
# Headers of a backend's answer that the gateway reads.
_NOTES = frozenset({b"x-atoll-path", b"x-atoll-usage", b"x-atoll-rate-hz", b"x-atoll-ignored"})


class Receiver(Protocol):
    """Receiver of the answer on a connection."""

    def on_head(self, status: int, content_type: bytes, retry_after: bytes) -> None:
        """Status and headers are there."""

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""

    def on_end(self) -> None:
        """The answer is complete, and the connection has no more to do with it."""

    def on_lost(self, reason: str, *, unused: bool) -> None:
        """It will never be; `unused`: a kept connection that turned out to be closed already."""


class RequestTemplate(NamedTuple):
    """Parts that requests to an endpoint have in common."""

    method: bytes = b"POST"
    content_type: bytes = b"application/json"


JSON = RequestTemplate()
GET = RequestTemplate(b"GET")


class Upstream(Protocol):
    """A connection to a backend, or what stands for one, for one request at a time."""

    @property
    def notes(self) -> Mapping[bytes, bytes] | None:
        """Headers `x-atoll-` of the backend's answer, from `on_head` on."""
        ...

    @property
    def unsent(self) -> bool:
        """Whether a part of the request is known not to have left this machine."""
        ...

    def ask(
        self,
        receiver: Receiver,
        path: bytes,
        body: bytes,
        extra: bytes,
        ask: RequestTemplate = JSON,
    ) -> None:
        """Send a request; `extra` are headers with their line ends, `receiver` hears of the answer."""

    def leave(self) -> None:
        """Listen no more; the answer is as good as over."""

    def close(self) -> None:
        """Listen no more; the backend takes that as the request being cancelled."""

    def pause(self) -> None:
        """Have the backend wait with its answer."""

    def resume(self) -> None:
        """Have the backend go on after `pause`."""


class UpstreamPool(Protocol):
    """The upstreams of one backend."""

    url: str
    open: int

    def aim(self, member: Member) -> None:
        """Take the address of a backend, which may have changed."""

    def take(self) -> Upstream | None:
        """Return an upstream that is there already, or None."""

    async def connect(self) -> Upstream:
        """Open a new upstream; OSError if the backend is not there."""

    def drop_idle(self) -> None:
        """Give up what is kept: the backend behind it is not the one it was opened to."""

    def tick(self, now_s: float) -> None:
        """Give up what takes too long."""

    def close(self) -> None:
        """Give up what is kept, and keep nothing from now on."""


class HttpUpstream(asyncio.Protocol):
    """One connection to a backend."""

    __slots__ = (
        "_around",
        "_ended",
        "_headers",
        "_pool",
        "_sized",
        "_status",
        "_touched",
        "drain_until_s",
        "kept_s",
        "lasts",
        "notes",
        "on_header",
        "parser",
        "receiver",
        "reused",
        "transport",
        "unsent",
    )

    def __init__(self, pool: HttpUpstreamPool) -> None:
        self._pool = pool
        self._headers: dict[bytes, bytes] = {}
        # Called by the parser, without any Python in between.
        self.on_header = self._headers.__setitem__
        self.parser = httptools.HttpResponseParser(self)
        self.receiver: Receiver | None = None
        self.transport: asyncio.Transport
        self.reused = False
        self.lasts = False
        """Whether the backend keeps the connection after its answer."""
        self.unsent = False
        self.notes: Mapping[bytes, bytes] | None = None
        self.drain_until_s = self.kept_s = 0.0
        self._status = 0
        self._around = 0
        self._sized = self._touched = self._ended = False

    def send(self, receiver: Receiver, request: bytes) -> None:
        """Send the bytes of a request; `receiver` hears of the answer."""
        self.receiver = receiver
        self._status = 0
        self._sized = self._touched = self._ended = False
        self.transport.write(request)

    def ask(
        self,
        receiver: Receiver,
        path: bytes,
        body: bytes,
        extra: bytes,
        ask: RequestTemplate = JSON,
    ) -> None:
        """Send a request to the backend; `receiver` hears of the answer."""
        self.receiver = receiver
        self._status = 0
        self._sized = self._touched = self._ended = False
        if len(body) < _LARGE_BYTES:
            self.transport.write(self._pool.head(path, len(body), extra, ask) + body)
        else:
            # There is no second one of it in memory while it is sent.
            self.transport.write(self._pool.head(path, len(body), extra, ask))
            self.transport.write(body)

    def leave(self) -> None:
        """Listen no more; the connection is kept if the answer ends before long."""
        self.receiver = None
        self._pool.drain(self)

    def close(self) -> None:
        """Close; a backend takes that as the request being cancelled."""
        self.receiver = None
        # Not `close`, which would send first what is still unsent.
        self.transport.abort()

    def pause(self) -> None:
        """Read no more until `resume`."""
        self.transport.pause_reading()

    def resume(self) -> None:
        """Read again after `pause`."""
        with contextlib.suppress(RuntimeError):
            self.transport.resume_reading()

    # Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection as open."""
        self.transport = cast("asyncio.Transport", transport)
        self._pool.open += 1

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the receiver: a body without a length is complete, anything else is lost."""
        self._pool.lost(self)
        receiver, self.receiver = self.receiver, None
        if receiver is None:
            return
        if exc is None and self._status >= 200 and not self._sized and not self._ended:
            # A body without a length ends with the connection.
            receiver.on_end()
        else:
            reason = f"connection lost: {exc}" if exc is not None else "connection closed"
            # A kept connection on which nothing came was closed before it was asked.
            receiver.on_lost(reason, unused=self.reused and not self._touched)

    def pause_writing(self) -> None:
        """Note that the backend does not take the request as fast as it is sent."""
        self.unsent = True

    def resume_writing(self) -> None:
        """Note that nearly all of the request is sent."""
        self.unsent = False

    def data_received(self, data: bytes) -> None:
        """Parse what came; the receiver hears of it."""
        self._touched = True
        # Since the last piece of a body: what stands around bodies has a limit of its own.
        self._around += len(data)
        if self.receiver is None and not self.drain_until_s:
            # Nobody asked.
            self.transport.abort()
            return
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            # The parser has wrapped what the receiver raised.
            raise error.__context__ or error from None
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._fail("the answer is not valid HTTP")
        else:
            if len(self._headers) > _MAX_HEADERS:
                self._fail("the answer has too many headers")
            elif self._around > _AROUND_BYTES:
                self._fail("the headers or trailers of the answer are too large")
            elif self._ended:
                # Not before all that came was read: it might be more than this answer.
                self._pool.keep(self)

    def _fail(self, reason: str) -> None:
        receiver = self.receiver
        self.close()
        if receiver is not None:
            receiver.on_lost(reason, unused=False)

    # Parser

    def on_message_begin(self) -> None:
        """Close if there was an answer already: nobody asked for another, and the next must not get it."""
        if self._ended:
            self.transport.abort()

    def on_headers_complete(self) -> None:
        """Tell that the answer begins."""
        self._status = status = self.parser.get_status_code()
        headers = self._headers
        if b"content-type" not in headers:
            # Names in other letters than most engines write them.
            headers = {name.lower(): value for name, value in headers.items()}
        self._sized = b"content-length" in headers or b"transfer-encoding" in headers
        kind, retry = headers.get(b"content-type", b""), headers.get(b"retry-after", b"")
        self.notes = None
        if not _NOTES.isdisjoint(headers):
            self.notes = {name: headers[name] for name in _NOTES if name in headers}
        self._headers.clear()
        # An interim answer (1xx) is nothing to the receiver: the one that counts follows.
        if status >= 200 and self.receiver is not None:
            self.receiver.on_head(status, kind, retry)

    def on_body(self, data: bytes) -> None:
        """Pass a piece of the body on."""
        self._around = 0
        if self.receiver is not None:
            self.receiver.on_body(data)

    def on_message_complete(self) -> None:
        """Tell that the answer is complete; the connection can serve again."""
        if self._status < 200:
            # An interim answer (1xx): the one that counts follows.
            return
        self._ended = True
        self._around = 0
        # Asked later, the parser has forgotten.
        self.lasts = self.parser.should_keep_alive()
        # Trailers are nothing to us, and no headers of the next answer.
        self._headers.clear()
        receiver, self.receiver = self.receiver, None
        if receiver is not None:
            receiver.on_end()


class HttpUpstreamPool:
    """The connections to one backend."""

    def __init__(self, member: Member, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._idle: deque[HttpUpstream] = deque()
        self._draining: set[HttpUpstream] = set()
        self.open = 0
        self.closed = False
        self.aim(member)

    def aim(self, member: Member) -> None:
        """Take the address of a backend, which may have changed."""
        backend = member.backend
        parts = urlsplit(backend.url)
        self.url = backend.url
        self._secure = parts.scheme == "https"
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if self._secure else 80)
        key = backend.metadata.get("api_key", "")
        # A key with a line end in it could add headers of its own.
        safe = key if key.isprintable() and key.isascii() else ""
        auth = f"authorization: Bearer {safe}\r\n" if safe else ""
        self._prefix = parts.path.encode()
        # Beginnings of requests, by path: all but the length and a few headers is the same each time.
        self._heads: dict[bytes, bytes] = {}
        self._common = (
            f" HTTP/1.1\r\nhost: {parts.netloc}\r\n{auth}user-agent: atoll\r\ncontent-type: "
        ).encode()

    def head(self, path: bytes, length: int, extra: bytes, ask: RequestTemplate = JSON) -> bytes:
        """Return a request up to its body of a length; `extra` are headers with their line ends."""
        head = self._heads.get(path) if ask is JSON else None
        if head is None:
            head = b"%b %b%b%b%b\r\n" % (
                ask.method,
                self._prefix,
                path,
                self._common,
                ask.content_type,
            )
            if ask is JSON:
                # There are as many as there are endpoints.
                self._heads[path] = head
        return b"%b%bcontent-length: %d\r\n\r\n" % (head, extra, length)

    def take(self) -> HttpUpstream | None:
        """Return a kept connection, the one used last, or None."""
        idle = self._idle
        while idle:
            # The one used last is the least likely to be closed by now; those not needed gather at the left
            # end.
            link = idle.pop()
            if not link.transport.is_closing():
                link.reused = True
                return link
        return None

    async def connect(self) -> HttpUpstream:
        """Open a connection; OSError if the backend is not there."""
        context = tls_context() if self._secure else None
        _, link = await self._loop.create_connection(
            lambda: HttpUpstream(self), self._host, self._port, ssl=context
        )
        return link

    def keep(self, link: HttpUpstream) -> None:
        """Keep a connection whose answer is complete for the next request, if it can be."""
        self._draining.discard(link)
        link.drain_until_s = 0.0
        if link.unsent:
            # It was answered before it was read: the rest would come before the next request.
            link.transport.abort()
        elif (
            self.closed
            or len(self._idle) >= _MAX_IDLE
            or not link.lasts
            or link.transport.is_closing()
        ):
            link.transport.close()
        else:
            link.kept_s = self._loop.time()
            self._idle.append(link)

    def drain(self, link: HttpUpstream) -> None:
        """Let an answer that nobody waits for end."""
        link.drain_until_s = self._loop.time() + _DRAIN_S
        self._draining.add(link)

    def lost(self, link: HttpUpstream) -> None:
        """Forget a connection that was closed."""
        self.open -= 1
        self._draining.discard(link)
        if link in self._idle:
            self._idle.remove(link)

    def drop_idle(self) -> None:
        """Close kept connections: the backend behind them is not the one they were opened to."""
        while self._idle:
            self._idle.pop().transport.close()

    def tick(self, now_s: float) -> None:
        """Close what drains for too long, and what was not needed for long: those at the left end."""
        for link in [k for k in self._draining if now_s >= k.drain_until_s]:
            link.close()
        while self._idle and now_s - self._idle[0].kept_s > _IDLE_S:
            self._idle.popleft().transport.close()

    def close(self) -> None:
        """Open no more and close what is idle."""
        self.closed = True
        self.drop_idle()
