"""A question to a backend beside its requests: how it is, what it serves."""

from __future__ import annotations

import asyncio

from atoll.runtime.http.upstream import GET, RequestTemplate, Upstream, UpstreamPool


class _Reply:
    """Waits for one answer, and keeps nothing of its connection: there is one for every question."""

    def __init__(self, upstream: Upstream, loop: asyncio.AbstractEventLoop, max_bytes: int) -> None:
        self.answer: asyncio.Future[tuple[int, bytes]] = loop.create_future()
        self._upstream = upstream
        self._status = 0
        self._left = max_bytes
        self._parts: list[bytes] = []

    def on_head(self, status: int, content_type: bytes, retry_after: bytes) -> None:
        del content_type, retry_after
        self._status = status

    def on_body(self, data: bytes) -> None:
        self._left -= len(data)
        if self._left >= 0:
            self._parts.append(data)

    def on_end(self) -> None:
        self._upstream.close()
        if not self.answer.done():
            self.answer.set_result((self._status, b"".join(self._parts)))

    def on_lost(self, reason: str, *, unused: bool) -> None:
        del unused
        if not self.answer.done():
            self.answer.set_exception(ConnectionError(reason))


async def ask_backend(
    upstreams: UpstreamPool,
    path: str,
    *,
    timeout_s: float,
    ask: RequestTemplate = GET,
    body: bytes = b"",
    max_bytes: int = 0,
) -> tuple[int, bytes]:
    """Return the status of an answer, and so many bytes of it at most; OSError or TimeoutError: none came."""
    async with asyncio.timeout(timeout_s):
        # A new connection: a kept one says nothing about who listens now.
        upstream = await upstreams.connect()
        reply = _Reply(upstream, asyncio.get_running_loop(), max_bytes)
        try:
            upstream.ask(reply, path.encode(), body, b"", ask)
            return await reply.answer
        finally:
            # Cancelled or late: nobody else closes the connection then.
            if not reply.answer.done() or reply.answer.cancelled():
                upstream.close()
