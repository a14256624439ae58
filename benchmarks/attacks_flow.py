"""Attacks over time: too slow, too many, too small pieces, gone too early."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import Counter

from benchmarks.attacks_case import FINE, KEYLESS, MIB, Attack, judge
from benchmarks.attacks_engine import MIRROR, NARROW
from benchmarks.attacks_site import BODY_BYTES, BUFFERED_BYTES, CONNECTIONS, DEADLINES, AttackedSite
from benchmarks.attacks_wire import (
    HOST,
    Piece,
    Reply,
    chat_body,
    chunk,
    head_of,
    request_of,
    talk,
)
from benchmarks.fake_engine import MODEL

_SLOW = frozenset({408, 400})
_CHUNKED = "transfer-encoding: chunked"
_FULL = frozenset({429, 503})
_SMALL_CHUNKS = chunk(b"  ") * 4096
_RELEASE_S = 3.0


def _slow() -> list[Attack]:
    async def headers(site: AttackedSite) -> str:
        pieces: list[Piece] = [b"GET /v1/models HTTP/1.1\r\nhost: a\r\n"]
        for number in range(12):
            pieces += [0.5, b"x-%d: y\r\n" % number]
        reply = await talk(site.ports["open"], pieces, read_s=4.0)
        return judge(reply, _SLOW, may_close=True)

    async def first_line(site: AttackedSite) -> str:
        pieces: list[Piece] = []
        for byte in b"GET /v1/mo":
            pieces += [bytes((byte,)), 0.5]
        return judge(await talk(site.ports["open"], pieces, read_s=4.0), _SLOW, may_close=True)

    async def nothing(site: AttackedSite) -> str:
        reply = await talk(site.ports["open"], [], read_s=DEADLINES["header_s"] + 3.0)
        return "" if reply.closed else "a connection that says nothing stays open"

    async def body(site: AttackedSite) -> str:
        pieces: list[Piece] = [head_of() + b"content-length: 1000\r\n\r\n"]
        for _ in range(20):
            pieces += [b" ", 0.5]
        return judge(await talk(site.ports["open"], pieces, read_s=4.0), _SLOW, may_close=True)

    async def chunked_body(site: AttackedSite) -> str:
        pieces: list[Piece] = [head_of("POST", "/v1/chat/completions", _CHUNKED) + b"\r\n"]
        for _ in range(20):
            pieces += [chunk(b" "), 0.5]
        return judge(await talk(site.ports["open"], pieces, read_s=4.0), _SLOW, may_close=True)

    async def many(site: AttackedSite) -> str:
        async def one() -> str:
            pieces: list[Piece] = [b"GET /v1/models HTTP/1.1\r\n"]
            for _ in range(5):
                pieces += [1.0, b"x: y\r\n"]
            return judge(await talk(site.ports["open"], pieces, read_s=6.0), _SLOW, may_close=True)

        return _some(await asyncio.gather(*(one() for _ in range(300))))

    async def reading(site: AttackedSite) -> str:
        return await _read_nothing(site)

    return [
        Attack("slow", "headers", headers),
        Attack("slow", "first line", first_line),
        Attack("slow", "nothing at all", nothing),
        Attack("slow", "body", body),
        Attack("slow", "chunks", chunked_body),
        Attack("slow", "300 at once", many),
        Attack("slow", "readers that do not read", reading, held_bytes=32 * MIB),
    ]


async def _read_nothing(site: AttackedSite) -> str:
    """Ask for endless streams and read nothing: they end, and the backend is let go of."""
    body = chat_body(MIRROR, "for-ever", stream=True)
    sockets = []
    try:
        for _ in range(20):
            opened = socket.socket()
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            opened.setblocking(False)
            sockets.append(opened)
            with contextlib.suppress(BlockingIOError):
                opened.connect((HOST, site.ports["open"]))
        await asyncio.sleep(0.3)
        for opened in sockets:
            opened.send(request_of(body))
        return await _released(site, DEADLINES["client_s"] + 6.0)
    finally:
        for opened in sockets:
            opened.close()


async def _released(site: AttackedSite, within_s: float) -> str:
    """Return whether the mirror still answers somebody after a while."""
    until_s = time.monotonic() + within_s
    await asyncio.sleep(0.3)
    while site.running() and time.monotonic() < until_s:
        await asyncio.sleep(0.1)
    return f"{site.running()} requests are still at the backend" if site.running() else ""


def _some(wrong: list[str]) -> str:
    found = Counter(text for text in wrong if text)
    return "; ".join(f"{count}x {text}" for text, count in found.most_common(2))


def _bombs() -> list[Attack]:
    head = head_of("POST", "/v1/chat/completions", _CHUNKED) + b"\r\n"
    rounds = 30 * MIB // (2 * 4096)

    def pieces(start: bytes, count: int = rounds) -> list[Piece]:
        return [start, *([_SMALL_CHUNKS] * count), b"0\r\n\r\n"]

    async def one(site: AttackedSite) -> str:
        reply = await talk(site.ports["open"], pieces(head), read_s=20.0)
        return judge(reply, frozenset({400, 413}), may_close=True)

    async def strangers(site: AttackedSite) -> str:
        replies = await asyncio.gather(
            *(talk(site.ports["keyed"], pieces(head, rounds // 3), read_s=20.0) for _ in range(6))
        )
        return _some([judge(reply, KEYLESS, may_close=True) for reply in replies])

    async def strangers_at_length(site: AttackedSite) -> str:
        start = head_of() + b"content-length: %d\r\n\r\n" % (30 * MIB)
        block: list[Piece] = [start, *([b" " * MIB] * 29)]
        replies = await asyncio.gather(
            *(talk(site.ports["keyed"], block, read_s=8.0) for _ in range(8))
        )
        return _some([judge(reply, KEYLESS, may_close=True) for reply in replies])

    async def held(site: AttackedSite, target: str, count: int) -> list[Reply]:
        key = site.key if target == "keyed" else None
        start = head_of(key=key) + b"content-length: %d\r\n\r\n" % (30 * MIB)
        block: list[Piece] = [start, *([b" " * MIB] * 29), 1.0]
        return await asyncio.gather(
            *(talk(site.ports[target], block, read_s=8.0) for _ in range(count))
        )

    async def unfinished(site: AttackedSite) -> str:
        replies = await held(site, "open", 10)
        return _some([judge(r, frozenset({408, 413, 503}), may_close=True) for r in replies])

    async def unfinished_with_key(site: AttackedSite) -> str:
        replies = await held(site, "keyed", 8)
        return _some([judge(r, frozenset({408, 413, 503}), may_close=True) for r in replies])

    async def held_headers(site: AttackedSite) -> str:
        async def one() -> str:
            sent = b"GET /v1/models HTTP/1.1\r\n" + b"".join(
                b"x%d: %b\r\n" % (i, b"y" * 300) for i in range(90)
            )
            reply = await talk(site.ports["open"], [sent], read_s=DEADLINES["header_s"] + 3.0)
            return judge(reply, _SLOW, may_close=True)

        return _some(await asyncio.gather(*(one() for _ in range(500))))

    return [
        Attack("bombs", "30 MiB in 2-byte chunks", one, held_bytes=BODY_BYTES),
        Attack("bombs", "6 x 10 MiB in 2-byte chunks, no key", strangers),
        Attack("bombs", "8 x 30 MiB, no key", strangers_at_length),
        Attack("bombs", "10 x 30 MiB unfinished", unfinished, held_bytes=BUFFERED_BYTES["open"]),
        Attack(
            "bombs",
            "8 x 30 MiB unfinished, with a key",
            unfinished_with_key,
            held_bytes=BUFFERED_BYTES["keyed"],
        ),
        Attack("bombs", "500 x 28 kB of headers", held_headers, held_bytes=500 * 32 * 1024),
    ]


def _floods() -> list[Attack]:
    async def idle(site: AttackedSite, target: str, count: int) -> str:
        """Open many connections; one more client must get its answer, or be told that all is full."""
        writers: list[asyncio.StreamWriter] = []
        over = count > CONNECTIONS[target]
        try:
            for _ in range(count // 50):
                opened = await asyncio.gather(
                    *(asyncio.open_connection(HOST, site.ports[target]) for _ in range(50)),
                    return_exceptions=True,
                )
                writers += [one[1] for one in opened if isinstance(one, tuple)]
            key = site.key if target == "keyed" else None
            reply = await talk(site.ports[target], [request_of(chat_body(MODEL), key=key)])
            return judge(reply, FINE | _FULL if over else FINE)
        finally:
            for writer in writers:
                writer.transport.abort()
            await asyncio.sleep(0.5)

    async def pipelined(site: AttackedSite) -> str:
        sent = (head_of("GET", "/v1/models") + b"\r\n") * 5000
        reply = await talk(site.ports["open"], [sent], answers=5000, read_s=20.0, quiet_s=0.5)
        wrong = [status for status in reply.statuses if status != 200]
        return f"{len(wrong)} of them {wrong[0]}" if wrong else "" if reply.statuses else "silence"

    async def pipelined_chats(site: AttackedSite) -> str:
        sent = request_of(chat_body(MODEL)) * 1000
        reply = await talk(site.ports["open"], [sent], answers=1000, read_s=20.0, quiet_s=0.5)
        wrong = [status for status in reply.statuses if status != 200]
        return f"{len(wrong)} of them {wrong[0]}" if wrong else "" if reply.statuses else "silence"

    async def pipelined_streams_left(site: AttackedSite) -> str:
        sent = request_of(chat_body(MIRROR, "for-ever", stream=True)) * 200
        reader, writer = await asyncio.open_connection(HOST, site.ports["open"])
        writer.write(sent)
        await reader.read(1000)
        writer.transport.abort()
        return await _released(site, _RELEASE_S)

    async def narrow(site: AttackedSite) -> str:
        sent = request_of(chat_body(NARROW, "slowly"))
        replies = await asyncio.gather(
            *(talk(site.ports["open"], [sent], read_s=15.0, quiet_s=0.0) for _ in range(200))
        )
        wrong = [judge(reply, FINE | _FULL) for reply in replies]
        refused = [r for r in replies if r.status in _FULL]
        if any(b"\r\nretry-after:" not in r.heads[0].lower() for r in refused):
            wrong.append("refused without Retry-After")
        if not refused:
            wrong.append("nobody was refused")
        return _some(wrong)

    async def running(site: AttackedSite) -> str:
        sent = request_of(chat_body(MIRROR, "slowly"), key=site.key)
        replies = await asyncio.gather(
            *(talk(site.ports["keyed"], [sent], read_s=15.0, quiet_s=0.0) for _ in range(300))
        )
        wrong = [judge(reply, FINE | _FULL) for reply in replies]
        if not any(r.status in _FULL for r in replies):
            wrong.append("nobody was refused")
        return _some(wrong)

    async def wrong_keys(site: AttackedSite) -> str:
        async def one(number: int) -> str:
            key = f"atoll-{number:012d}-{'x' * 43}"
            sent = request_of(chat_body(MODEL), key=key) * 20
            reply = await talk(site.ports["keyed"], [sent], answers=20, quiet_s=0.2)
            return judge(reply, KEYLESS, most=20)

        return _some(await asyncio.gather(*(one(number) for number in range(50))))

    async def opening(site: AttackedSite) -> str:
        for _ in range(40):
            opened = await asyncio.gather(
                *(asyncio.open_connection(HOST, site.ports["open"]) for _ in range(50)),
                return_exceptions=True,
            )
            for one in opened:
                if isinstance(one, tuple):
                    one[1].transport.abort()
        return ""

    async def few(site: AttackedSite) -> str:
        return await idle(site, "open", 2000)

    async def all_of_them(site: AttackedSite) -> str:
        return await idle(site, "keyed", 1700)

    return [
        Attack("floods", "2,000 idle connections", few, held_bytes=32 * MIB),
        Attack("floods", "1,700 connections where 1,500 may be", all_of_them, held_bytes=24 * MIB),
        Attack("floods", "2,000 connections opened and reset", opening, held_bytes=8 * MIB),
        Attack("floods", "5,000 requests in one go", pipelined, held_bytes=8 * MIB),
        Attack("floods", "1,000 chats in one go", pipelined_chats, held_bytes=8 * MIB),
        Attack("floods", "200 streams in one go, left", pipelined_streams_left, quick=True),
        Attack("floods", "200 chats where 4 may run", narrow, quick=True),
        Attack("floods", "300 chats where 64 may run", running),
        Attack("floods", "1,000 wrong keys", wrong_keys),
    ]


def _leaving() -> list[Attack]:
    async def half(site: AttackedSite, body: bytes) -> str:
        reply = await talk(site.ports["open"], [request_of(body)], half_close=True)
        return judge(reply, FINE)

    async def half_chat(site: AttackedSite) -> str:
        return await half(site, chat_body(MODEL))

    async def half_slow(site: AttackedSite) -> str:
        return await half(site, chat_body(MIRROR, "slowly"))

    async def half_stream(site: AttackedSite) -> str:
        sent = request_of(chat_body(MODEL, stream=True))
        reply = await talk(site.ports["open"], [sent], half_close=True)
        done = b"data: [DONE]" in reply.raw
        return judge(reply, FINE) or ("" if done else "the stream was cut")

    async def half_page(site: AttackedSite) -> str:
        sent = head_of("GET", "/v1/models") + b"\r\n"
        return judge(await talk(site.ports["open"], [sent], half_close=True), FINE)

    async def half_request(site: AttackedSite) -> str:
        sent = head_of() + b"content-length: 100\r\n\r\n{"
        reply = await talk(site.ports["open"], [sent], half_close=True, read_s=9.0)
        return judge(reply, frozenset({400, 408}), may_close=True)

    async def early(site: AttackedSite, body: bytes, wait_s: float, count: int = 30) -> str:
        for _ in range(count):
            _, writer = await asyncio.open_connection(HOST, site.ports["open"])
            writer.write(request_of(body))
            await writer.drain()
            if wait_s:
                await asyncio.sleep(wait_s)
            writer.transport.abort()
        return await _released(site, _RELEASE_S)

    async def at_once(site: AttackedSite) -> str:
        return await early(site, chat_body(MIRROR, "slowly"), 0.0)

    async def soon(site: AttackedSite) -> str:
        return await early(site, chat_body(MIRROR, "slowly"), 0.02)

    async def in_stream(site: AttackedSite) -> str:
        return await early(site, chat_body(MIRROR, "for-ever", stream=True), 0.05)

    async def narrow(site: AttackedSite) -> str:
        """Slots of a backend that has few are free again once the clients have left."""
        wrong = await early(site, chat_body(NARROW, "slowly"), 0.01, 20)
        reply = await talk(site.ports["open"], [request_of(chat_body(NARROW))])
        return wrong or judge(reply, FINE)

    async def in_body(site: AttackedSite) -> str:
        for _ in range(20):
            _, writer = await asyncio.open_connection(HOST, site.ports["open"])
            writer.write(head_of() + b"content-length: 20000000\r\n\r\n" + b" " * MIB)
            await writer.drain()
            writer.transport.abort()
        return ""

    return [
        Attack("leaving", "half-closed chat", half_chat, quick=True),
        Attack("leaving", "half-closed, answer later", half_slow, quick=True),
        Attack("leaving", "half-closed stream", half_stream, quick=True),
        Attack("leaving", "half-closed page", half_page, quick=True),
        Attack("leaving", "half-closed in a body", half_request, quick=True),
        Attack("leaving", "gone at once", at_once, quick=True),
        Attack("leaving", "gone before the answer", soon, quick=True),
        Attack("leaving", "gone in a stream", in_stream, quick=True),
        Attack("leaving", "gone, few slots", narrow, quick=True),
        Attack("leaving", "gone in a body", in_body, held_bytes=20 * MIB),
    ]


def attacks() -> list[Attack]:
    """Return the attacks over time."""
    return [*_slow(), *_bombs(), *_floods(), *_leaving()]
