"""Backends that misbehave, each in its own way, and one that tells what it was sent.

The way is named by the model asked for (`hostile-WAY`); `mirror` answers with the request as it came.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

from tests.slow.tcp_server import TcpServer

MIRROR = "mirror"
NARROW = "narrow"
POISON = "poison"
"""A model whose backends all die of every request."""
DEADLY = b"what backends die of"
"""What such a request says."""
_SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
_BLOCK = b"x" * 65536

LIES: dict[str, object] = {
    "negative": {"prompt_tokens": -5, "completion_tokens": -(10**9), "total_tokens": -1},
    "huge": {"prompt_tokens": 10**18, "completion_tokens": 10**18, "speech_seconds": 1e300},
    "beyond": {"prompt_tokens": 10**300, "completion_tokens": 10**300, "image_pixels": 10**300},
    "words": {"prompt_tokens": "many", "completion_tokens": None, "audio_seconds": "long"},
    "a list": [1, 2],
    "a number": 5,
}
"""What the mirror says was used, where a request asks for `usage-NAME`."""

Way = Callable[["asyncio.StreamWriter"], Awaitable[None]]


def _event(text: str) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    data = {"id": "c", "object": "chat.completion.chunk", "created": 1, "choices": [choice]}
    return f"data: {json.dumps(data)}\n\n".encode()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def _endless_headers(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    for number in range(10_000_000):
        writer.write(b"x-%d: y\r\n" % number)
        await writer.drain()


async def _endless_header(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nx-long: ")
    for _ in range(16384):
        writer.write(_BLOCK)
        await writer.drain()


async def _endless_chunk(writer: asyncio.StreamWriter) -> None:
    writer.write(_SSE + b"ffffffffff\r\ndata: ")
    for _ in range(4096):
        writer.write(_BLOCK)
        await writer.drain()


async def _endless_body(writer: asyncio.StreamWriter) -> None:
    writer.write(_JSON + b"content-length: 999999999999\r\n\r\n")
    for _ in range(16384):
        writer.write(_BLOCK)
        await writer.drain()


async def _endless_trailer(writer: asyncio.StreamWriter) -> None:
    writer.write(_JSON + b"transfer-encoding: chunked\r\n\r\n" + _chunk(b"{}") + b"0\r\nx-long: ")
    for _ in range(16384):
        writer.write(_BLOCK)
        await writer.drain()


async def _no_end(writer: asyncio.StreamWriter) -> None:
    writer.write(_SSE + _chunk(_event("a")))
    await asyncio.sleep(60)


async def _silent(writer: asyncio.StreamWriter) -> None:
    del writer
    await asyncio.sleep(60)


async def _garbage(writer: asyncio.StreamWriter) -> None:
    writer.write(bytes(range(256)) * 64)
    await writer.drain()


async def _garbage_events(writer: asyncio.StreamWriter) -> None:
    writer.write(_SSE)
    for data in (
        b"\xff\xfe\x00garbage",
        b"data: {]\n\n",
        b"event: x\nid: \x00\n\n",
        b"data: [" * 9,
    ):
        writer.write(_chunk(data + b"\n\n"))
    writer.write(b"0\r\n\r\n")
    await writer.drain()


async def _big_event(writer: asyncio.StreamWriter) -> None:
    writer.write(_SSE + _chunk(_event("a" * 10 * 2**20)))
    await writer.drain()
    done = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    writer.write(_chunk(done) + b"0\r\n\r\n")
    await writer.drain()


async def _drip(writer: asyncio.StreamWriter) -> None:
    for byte in _SSE + _chunk(_event("drip")) * 1000:
        writer.write(bytes((byte,)))
        await writer.drain()
        await asyncio.sleep(0.05)


async def _status_999(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 999 Odd\r\ncontent-length: 2\r\n\r\n{}")
    await writer.drain()


async def _status_100(writer: asyncio.StreamWriter) -> None:
    for _ in range(200_000):
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        await writer.drain()


async def _splits(writer: asyncio.StreamWriter) -> None:
    headers = b"content-type: text/plain\rset-cookie: a=b\r\nx-atoll-path: a\rx: y\r\n"
    writer.write(b"HTTP/1.1 200 OK\r\n" + headers + b"content-length: 2\r\n\r\n{}")
    await writer.drain()


async def _two_lengths(writer: asyncio.StreamWriter) -> None:
    writer.write(_JSON + b"content-length: 2\r\ncontent-length: 99\r\n\r\n{}")
    await writer.drain()


async def _short(writer: asyncio.StreamWriter) -> None:
    writer.write(_JSON + b"content-length: 1000\r\n\r\n{")
    await writer.drain()


async def _deep(writer: asyncio.StreamWriter) -> None:
    body = b'{"usage":' + b"[" * 500_000
    writer.write(_JSON + b"content-length: %d\r\n\r\n" % len(body) + body)
    await writer.drain()


async def _deep_field(writer: asyncio.StreamWriter) -> None:
    body = b'{"choices":[],"x":' + b"[" * 500_000 + b"]" * 500_000 + b"}"
    writer.write(_JSON + b"content-length: %d\r\n\r\n" % len(body) + body)
    await writer.drain()


async def _mistake(writer: asyncio.StreamWriter) -> None:
    error = {"message": "no such tool", "type": "invalid_request_error"}
    event = f"data: {json.dumps({'error': error})}\n\n".encode()
    writer.write(_SSE + _chunk(_event("a")) + _chunk(event))
    await writer.drain()
    await asyncio.sleep(60)


async def _deep_events(writer: asyncio.StreamWriter) -> None:
    writer.write(_SSE + _chunk(b'data: {"finish_reason":"' + b"[" * 200_000 + b"\n\n"))
    writer.write(b"0\r\n\r\n")
    await writer.drain()


async def _redirect(writer: asyncio.StreamWriter) -> None:
    writer.write(
        b"HTTP/1.1 302 F\r\nlocation: http://169.254.169.254/\r\ncontent-length: 0\r\n\r\n"
    )
    await writer.drain()


async def _upgrade(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nhello")
    await writer.drain()


async def _gzip(writer: asyncio.StreamWriter) -> None:
    writer.write(_JSON + b"content-encoding: gzip\r\ncontent-length: 4\r\n\r\n\x1f\x8b\x08\x00")
    await writer.drain()


async def _two_answers(writer: asyncio.StreamWriter) -> None:
    body = b'{"id":"one","choices":[]}'
    answer = _JSON + b"content-length: %d\r\n\r\n" % len(body) + body
    writer.write(answer + answer.replace(b"one", b"two"))
    await writer.drain()
    await asyncio.sleep(5)


async def _resets(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


WAYS: dict[str, Way] = {
    "endless-headers": _endless_headers,
    "endless-header": _endless_header,
    "endless-chunk": _endless_chunk,
    "endless-body": _endless_body,
    "endless-trailer": _endless_trailer,
    "no-end": _no_end,
    "silent": _silent,
    "garbage": _garbage,
    "garbage-events": _garbage_events,
    "big-event": _big_event,
    "drip": _drip,
    "status-999": _status_999,
    "status-100": _status_100,
    "splits": _splits,
    "two-lengths": _two_lengths,
    "short": _short,
    "deep": _deep,
    "deep-field": _deep_field,
    "deep-events": _deep_events,
    "mistake": _mistake,
    "redirect": _redirect,
    "upgrade": _upgrade,
    "gzip": _gzip,
    "two-answers": _two_answers,
    "resets": _resets,
}


class HostileBackend(TcpServer):
    """Listens, answers health checks, and misbehaves otherwise, in one way; None: the mirror."""

    def __init__(self, way: str | None) -> None:
        super().__init__()
        self._way = way
        self.requests: list[bytes] = []
        """Everything but health checks that came here, as it came."""
        self.poisoned = 0
        """Requests that say `DEADLY`, as trials of a backend that is back do not."""
        self.running = 0
        """Requests that are being answered."""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer requests, each in its way."""
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET /health"):
                writer.write(_JSON + b"content-length: 2\r\n\r\n{}")
                continue
            lower = head.lower()
            at = lower.find(b"content-length:")
            size = int(lower[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if self._way == "early":
                # The answer comes before the request has ended.
                body = b'{"id":"early","choices":[]}'
                writer.write(_JSON + b"content-length: %d\r\n\r\n" % len(body) + body)
                return
            body = await reader.readexactly(size)
            self.poisoned += DEADLY in body
            self.running += 1
            try:
                if self._way is None:
                    self.requests.append(head + body[:65536])
                    await self._mirror(writer, head, body)
                else:
                    await WAYS[self._way](writer)
                    return
            finally:
                self.running -= 1

    async def _mirror(self, writer: asyncio.StreamWriter, head: bytes, body: bytes) -> None:
        if b"slowly" in body:
            await asyncio.sleep(0.5)
        if b"for-ever" in body:
            writer.write(_SSE)
            while not writer.is_closing():
                writer.write(_chunk(_event("more " * 4000)))
                await writer.drain()
                await asyncio.sleep(0.002)
            return
        told: dict[str, object] = {
            "id": "mirror",
            "object": "chat.completion",
            "choices": [],
            "model": MIRROR,
        }
        told |= {"head": head.decode("latin-1"), "usage": {"prompt_tokens": 1}}
        for name, usage in LIES.items():
            if f"usage-{name}".encode() in body:
                told["usage"] = usage
        if b'"stream":true' in body:
            end: dict[str, object] = {
                "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]
            }
            last = [end, {"choices": [], "usage": told["usage"]}]
            events = b"".join(f"data: {json.dumps(told | each)}\n\n".encode() for each in last)
            writer.write(_SSE + _chunk(_event("a")) + _chunk(events + b"data: [DONE]\n\n"))
            writer.write(b"0\r\n\r\n")
            await writer.drain()
            return
        data = json.dumps(told).encode()
        writer.write(_JSON + b"content-length: %d\r\n\r\n" % len(data) + data)
        await writer.drain()
