"""Requests from the tunnel to the engine's own address, answers back, byte for byte.

A slow caller stops the engine's connection from being read, which stops the engine; a caller that leaves
closes it, which engines take as the request being cancelled. Only what an instance offers can be reached,
so that a tunnel does not open the machine.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Protocol
from urllib.parse import urlsplit

import msgspec

from atoll.runtime.http.upstream import HttpUpstream, HttpUpstreamPool
from atoll.runtime.pool.member import Backend, Member
from atoll.runtime.pool.outliers import Outliers, OutlierSettings

_CONNECT_S = 5.0
_READ = frozenset({b"/health", b"/metrics", b"/v1/models"})
_ASKED = frozenset({b"/tokenize", b"/detokenize"})
"""Paths that gateways ask of an instance beside /v1."""
_PATH = re.compile(rb"/[!-~]*")
# What an engine might read as another path: dots, backslashes, escaped or doubled slashes.
_DOTS = re.compile(rb"(?:^|/)(?:\.|%2e){1,2}(?:/|$)|\\|%2f|%5c|%00|//", re.IGNORECASE)
# Under /v1, but for whoever runs the engine.
_KEPT = (b"/v1/load_lora_adapter", b"/v1/unload_lora_adapter")
_METHODS = frozenset({b"GET", b"POST", b"PUT", b"PATCH", b"DELETE"})
# Everything else is between the caller and the gateway.
_PASSED = frozenset(
    {b"accept", b"content-type", b"x-request-id", b"traceparent", b"tracestate", b"user-agent"}
)
# Without line breaks: a header's value must not begin another header.
_TOKEN = re.compile(rb"[\t -~\x80-\xff]*")
_RETRY_S = b"1"


class IncomingRequest(Protocol):
    """A request of the tunnel (`atoll.fabric.tunnel.tunnel_server.IncomingCall`)."""

    method: bytes
    path: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    on_cancel: Callable[[], None] | None
    on_writable: Callable[[], None] | None

    @property
    def writable(self) -> bool:
        """Whether the caller keeps up."""
        ...

    def head(self, status: int, content_type: bytes, retry_after: bytes = b"") -> None:
        """Begin the answer with its status and headers."""

    def send(self, data: bytes) -> None:
        """Send a piece of it."""

    def end(self) -> None:
        """Say that it is complete."""

    def fail(self, reason: str) -> None:
        """Say that it never will be."""


class Bridge:
    """Answers what comes through the tunnel by asking one server.

    `generic`: any path may be asked. `max_inflight`: more requests at a time are refused with 503, which
    sends them elsewhere. `on_trouble` is called when the server could not be reached.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        generic: bool = False,
        max_inflight: int | None = None,
        on_trouble: Callable[[], None] | None = None,
    ) -> None:
        self.generic = generic
        self.max_inflight = max_inflight
        self.open = False
        self._on_trouble = on_trouble or (lambda: None)
        self._loop = asyncio.get_running_loop()
        self._api_key = api_key
        self._links = self._make_pool(url)
        self._crossings: set[Crossing] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.requests = 0
        self.refused = 0

    @property
    def inflight(self) -> int:
        """Requests that are being answered."""
        return len(self._crossings)

    def aim(self, url: str) -> None:
        """Ask another address from now on."""
        self._links.close()
        self._links = self._make_pool(url)

    def fresh(self) -> None:
        """Drop kept connections: another process listens now."""
        self._links.drop_idle()

    def _make_pool(self, url: str) -> HttpUpstreamPool:
        metadata = {"api_key": self._api_key} if self._api_key else {}
        backend = Backend(id="engine", url=url, models=("-",), metadata=metadata)
        self._host = urlsplit(backend.url).netloc.encode()
        self._prefix = urlsplit(backend.url).path.encode()
        return HttpUpstreamPool(Member(backend, Outliers(OutlierSettings())), self._loop)

    def handle(self, incoming: IncomingRequest) -> None:
        """Take a request; the answer follows."""
        self.requests += 1
        refusal = self._refusal(incoming)
        if refusal is not None:
            self.refused += 1
            _refuse(incoming, *refusal)
            return
        crossing = Crossing(self, incoming, self._request(incoming))
        self._crossings.add(crossing)
        self._idle.clear()
        crossing.start(self._links)

    def _refusal(self, incoming: IncomingRequest) -> tuple[int, str] | None:
        if not reachable(incoming.method, incoming.path, generic=self.generic):
            return 404, "this node does not offer that path"
        if not self.open:
            return 503, "this node is not serving now"
        if self.max_inflight is not None and self.inflight >= self.max_inflight:
            return 503, "this node is full"
        return None

    def _request(self, incoming: IncomingRequest) -> bytes:
        lines = [
            incoming.method + b" " + self._prefix + incoming.path + b" HTTP/1.1",
            b"host: " + self._host,
            b"content-length: %d" % len(incoming.body),
        ]
        if self._api_key:
            lines.append(b"authorization: Bearer " + self._api_key.encode())
        lines += [
            name + b": " + value
            for name, value in incoming.headers
            if name in _PASSED and _TOKEN.fullmatch(value)
        ]
        return b"\r\n".join([*lines, b"", incoming.body])

    async def drain(self, max_s: float) -> int:
        """Take nothing new and wait until all is answered; returns how many were not in time."""
        self.open = False
        try:
            async with asyncio.timeout(max_s):
                await self._idle.wait()
        except TimeoutError:
            pass
        return self.inflight

    def abandon(self, reason: str) -> None:
        """Fail everything that runs, so that it goes on elsewhere."""
        for crossing in list(self._crossings):
            crossing.abandon(reason)

    async def close(self) -> None:
        """Fail what runs and close all connections."""
        self.open = False
        self.abandon("the node stops")
        self._links.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # For crossings

    def spawn(self, task: asyncio.Task[None]) -> None:
        """Keep a task until it is done."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def over(self, crossing: Crossing) -> None:
        """Forget a request that has ended; the bridge is idle after the last."""
        self._crossings.discard(crossing)
        if not self._crossings:
            self._idle.set()

    def trouble(self) -> None:
        """Take word that the server is not there."""
        self._on_trouble()


class Crossing:
    """One request that passes over the bridge; hears of the answer (`upstream.Receiver`)."""

    __slots__ = ("_bridge", "_incoming", "_link", "_links", "_over", "_paused", "_request", "_task")

    def __init__(self, bridge: Bridge, incoming: IncomingRequest, request: bytes) -> None:
        self._bridge = bridge
        self._incoming = incoming
        self._request = request
        self._link: HttpUpstream | None = None
        self._links: HttpUpstreamPool
        self._task: asyncio.Task[None] | None = None
        self._paused = self._over = False
        incoming.on_cancel = self._cancelled
        incoming.on_writable = self._writable

    def start(self, links: HttpUpstreamPool) -> None:
        """Send the request over a kept connection, or a new one."""
        self._links = links
        link = links.take()
        if link is not None:
            self._send(link)
        else:
            self._connect()

    def abandon(self, reason: str) -> None:
        """Give the request up, and tell the caller why."""
        if not self._over:
            self._finish(close=True)
            self._incoming.fail(reason)

    def _connect(self) -> None:
        self._task = asyncio.ensure_future(self._open_link())
        self._bridge.spawn(self._task)

    async def _open_link(self) -> None:
        try:
            async with asyncio.timeout(_CONNECT_S):
                link = await self._links.connect()
        except (OSError, TimeoutError) as error:
            if not self._over:
                self._bridge.trouble()
                self._finish(close=False)
                self._incoming.fail(f"the engine is not there: {str(error) or 'no answer'}")
            return
        if self._over:
            # It was cancelled while the connection was made.
            link.transport.close()
        else:
            self._send(link)

    def _send(self, link: HttpUpstream) -> None:
        self._link = link
        link.send(self, self._request)

    def _finish(self, *, close: bool) -> None:
        self._over = True
        link, self._link = self._link, None
        if link is not None:
            if close:
                link.close()
            elif self._paused and not link.transport.is_closing():
                # A connection that is used again must be read again.
                link.transport.resume_reading()
        self._bridge.over(self)

    # From the tunnel

    def _cancelled(self) -> None:
        if not self._over:
            self._finish(close=True)

    def _writable(self) -> None:
        if self._paused and self._link is not None:
            self._paused = False
            self._link.transport.resume_reading()

    # From the engine

    def on_head(self, status: int, content_type: bytes, retry_after: bytes) -> None:
        """Pass on how the answer begins."""
        self._incoming.head(status, content_type, retry_after)

    def on_body(self, data: bytes) -> None:
        """Pass on a piece, and read no more until the caller has room."""
        incoming = self._incoming
        incoming.send(data)
        if not incoming.writable and not self._paused and self._link is not None:
            self._paused = True
            self._link.transport.pause_reading()

    def on_end(self) -> None:
        """Pass on that it is complete."""
        self._finish(close=False)
        self._incoming.end()

    def on_lost(self, reason: str, *, unused: bool) -> None:
        """Try again where a kept connection was closed before it was used, else pass on the loss."""
        self._link = None
        if unused and not self._over:
            self._connect()
            return
        self._bridge.trouble()
        self._finish(close=False)
        self._incoming.fail(f"the engine failed: {reason}")


def reachable(method: bytes, path: bytes, *, generic: bool) -> bool:
    """Whether a request may go to the engine: the API of an instance, or anything of a generic service."""
    plain, _, _ = path.partition(b"?")
    if not _PATH.fullmatch(path) or _DOTS.search(plain):
        return False
    if generic:
        return method in _METHODS
    if plain in _READ:
        return method == b"GET"
    if plain in _ASKED:
        return method == b"POST"
    # Escapes would be undone by the engine, after this check.
    named = plain.startswith(b"/v1/") and b"%" not in plain and plain.rstrip(b"/") not in _KEPT
    return named and method in (b"GET", b"POST")


def _refuse(incoming: IncomingRequest, status: int, message: str) -> None:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": None}}
    incoming.head(status, b"application/json", _RETRY_S if status == 503 else b"")
    incoming.send(msgspec.json.encode(body))
    incoming.end()
