"""A client that says whatever it is told to, byte by byte, and takes apart what it is answered."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

HOST = "127.0.0.1"
CHAT = "/v1/chat/completions"
_QUIET_S = 0.06
"""So long after a whole answer another one, which there must not be, may come."""
_MAX_BYTES = 16 * 2**20
_LARGE_BYTES = 2**20
_LARGE_S = 0.05
"""Answers that are larger are looked at no more often than this."""

Piece = bytes | float
"""What is sent next, or how many seconds to wait before the next."""


@dataclass
class Reply:
    """All that came back on a connection."""

    raw: bytes = b""
    statuses: list[int] = field(default_factory=list)
    """Of final answers, in order; those of 1xx are left out."""
    bodies: list[bytes] = field(default_factory=list)
    heads: list[bytes] = field(default_factory=list)
    closed: bool = False
    """Whether the other side closed the connection."""
    whole: bool = False
    """Whether the last answer is all there."""
    seconds: float = 0.0

    @property
    def status(self) -> int:
        """Of the first answer; 0: there was none."""
        return self.statuses[0] if self.statuses else 0

    @property
    def body(self) -> bytes:
        """Of the first answer."""
        return self.bodies[0] if self.bodies else b""

    def describe(self) -> str:
        """Return it in a few words."""
        if not self.statuses:
            end = "closed" if self.closed else "silence"
            return f"no answer ({end} after {self.seconds:.1f} s) {self.raw[:60]!r}"
        shown = " ".join(map(str, self.statuses[:5]))
        return f"{shown} {self.body[:160].decode(errors='replace')}".strip()


def take_apart(
    raw: bytes, *, head_only: bool = False
) -> tuple[list[tuple[int, bytes, bytes]], bool]:
    """Return status, head and body of every answer in `raw`, and whether the last one is whole."""
    found: list[tuple[int, bytes, bytes]] = []
    while raw:
        head, ended, rest = raw.partition(b"\r\n\r\n")
        if not ended or not head.startswith(b"HTTP/1."):
            return found, False
        status = int(head[9:12]) if head[9:12].isdigit() else -1
        lower = head.lower()
        if 100 <= status < 200:
            raw = rest
            continue
        if head_only:
            body, whole = b"", True
        elif b"\r\ntransfer-encoding: chunked" in lower:
            body, rest, whole = _chunks(rest)
        elif (at := lower.find(b"\r\ncontent-length:")) >= 0:
            size = int(lower[at + 17 :].split(b"\r\n", 1)[0])
            body, rest, whole = rest[:size], rest[size:], len(rest) >= size
        else:
            body, rest, whole = rest, b"", False
        found.append((status, head, body))
        if not whole:
            return found, False
        raw = rest
    return found, bool(found)


def _chunks(rest: bytes) -> tuple[bytes, bytes, bool]:
    body: list[bytes] = []
    while True:
        line, ended, after = rest.partition(b"\r\n")
        if not ended:
            return b"".join(body), b"", False
        size = int(line, 16)
        if size == 0:
            return b"".join(body), after[2:], len(after) >= 2
        if len(after) < size + 2:
            body.append(after[:size])
            return b"".join(body), b"", False
        body.append(after[:size])
        rest = after[size + 2 :]


async def talk(
    port: int,
    pieces: Iterable[Piece],
    *,
    read_s: float = 10.0,
    answers: int = 1,
    half_close: bool = False,
    head_only: bool = False,
    quiet_s: float = _QUIET_S,
) -> Reply:
    """Open a connection, send the pieces while listening, and return what came back.

    Listening ends when the other side closes, when `answers` whole answers are there and nothing more came
    for `quiet_s`, or `read_s` after all was sent.
    """
    began_s = time.monotonic()
    reply = Reply()
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(HOST, port), read_s)
    except (OSError, TimeoutError):
        reply.closed = True
        return reply
    parts = bytearray()
    heard = asyncio.Event()

    async def listen() -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if len(parts) < _MAX_BYTES:
                    parts.extend(data)
                heard.set()
        reply.closed = True
        heard.set()

    listening = asyncio.create_task(listen())
    try:
        await _say(writer, pieces, reply)
        if half_close and not reply.closed:
            with contextlib.suppress(OSError, RuntimeError):
                writer.write_eof()
        until_s = time.monotonic() + read_s
        while not reply.closed and time.monotonic() < until_s:
            heard.clear()
            if len(parts) > _LARGE_BYTES:
                await asyncio.sleep(_LARGE_S)
            found, whole = take_apart(bytes(parts), head_only=head_only)
            wait_s = quiet_s if whole and len(found) >= answers else until_s - time.monotonic()
            try:
                await asyncio.wait_for(heard.wait(), max(0.001, wait_s))
            except TimeoutError:
                break
    finally:
        listening.cancel()
        writer.transport.abort()
    reply.raw = bytes(parts)
    reply.seconds = time.monotonic() - began_s
    found, reply.whole = take_apart(reply.raw, head_only=head_only)
    for status, head, body in found:
        reply.statuses.append(status)
        reply.heads.append(head)
        reply.bodies.append(body)
    return reply


async def _say(writer: asyncio.StreamWriter, pieces: Iterable[Piece], reply: Reply) -> None:
    with contextlib.suppress(OSError, TimeoutError):
        for piece in pieces:
            if reply.closed:
                return
            if isinstance(piece, float):
                await asyncio.sleep(piece)
                continue
            writer.write(piece)
            await asyncio.wait_for(writer.drain(), 20.0)


def head_of(
    method: str = "POST",
    path: str = CHAT,
    *headers: str,
    key: str | None = None,
    host: str | None = "attack.example",
) -> bytes:
    """Return a first line and headers, without the empty line that ends them."""
    lines = [f"{method} {path} HTTP/1.1"]
    if host is not None:
        lines.append(f"host: {host}")
    if key is not None:
        lines.append(f"authorization: Bearer {key}")
    return "".join(f"{line}\r\n" for line in (*lines, *headers)).encode("utf-8", "surrogateescape")


def request_of(
    body: bytes,
    path: str = CHAT,
    *headers: str,
    method: str = "POST",
    key: str | None = None,
    kind: str | None = "application/json",
) -> bytes:
    """Return a plain request with a body."""
    named = () if kind is None else (f"content-type: {kind}",)
    head = head_of(method, path, *named, *headers, key=key)
    return b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)


def chat_body(model: str, content: object = "Hello", **fields: object) -> bytes:
    """Return the body of a chat request."""
    data = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 4}
    return json.dumps(data | fields, separators=(",", ":")).encode()


def chunk(data: bytes, extension: bytes = b"") -> bytes:
    """Return a chunk of a body."""
    return b"%x%b\r\n%b\r\n" % (len(data), extension, data)
