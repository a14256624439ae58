"""Attacks by the slow and the large: headers, bodies and readers that take for ever, bodies that cost more
than they look.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

from tests.slow.attacks.attacks_case import KEYLESS, LATE, MIB, TOO_LARGE, Attack, judge, summarise
from tests.slow.attacks.attacks_engine import MIRROR
from tests.slow.attacks.attacks_site import BODY_BYTES, BUFFERED_BYTES, DEADLINES, AttackedSite
from tests.slow.attacks.attacks_wire import (
    HOST,
    Piece,
    Reply,
    chat_body,
    chunk,
    head_of,
    request_of,
    talk,
)

_HELD = frozenset({408, 503})
"""What is held of unfinished bodies is so much that some are refused; the rest is too late."""
_CHUNKED = "transfer-encoding: chunked"
_SMALL_CHUNKS = chunk(b"  ") * 4096
_ROUNDS = 30 * MIB // (2 * 4096)
_HEAD = head_of("POST", "/v1/chat/completions", _CHUNKED) + b"\r\n"


async def _slow_headers(site: AttackedSite) -> str:
    pieces: list[Piece] = [b"GET /v1/models HTTP/1.1\r\nhost: a\r\n"]
    for number in range(12):
        pieces += [0.5, b"x-%d: y\r\n" % number]
    reply = await talk(site.ports["open"], pieces, read_s=4.0)
    return judge(reply, LATE)


async def _slow_first_line(site: AttackedSite) -> str:
    pieces: list[Piece] = []
    for byte in b"GET /v1/mo":
        pieces += [bytes((byte,)), 0.5]
    return judge(await talk(site.ports["open"], pieces, read_s=4.0), LATE)


async def _slow_nothing(site: AttackedSite) -> str:
    reply = await talk(site.ports["open"], [], read_s=DEADLINES["header_s"] + 3.0)
    return "" if reply.closed else "a connection that says nothing stays open"


async def _slow_body(site: AttackedSite) -> str:
    pieces: list[Piece] = [head_of() + b"content-length: 1000\r\n\r\n"]
    for _ in range(20):
        pieces += [b" ", 0.5]
    return judge(await talk(site.ports["open"], pieces, read_s=4.0), LATE)


async def _slow_chunked_body(site: AttackedSite) -> str:
    pieces: list[Piece] = [head_of("POST", "/v1/chat/completions", _CHUNKED) + b"\r\n"]
    for _ in range(20):
        pieces += [chunk(b" "), 0.5]
    return judge(await talk(site.ports["open"], pieces, read_s=4.0), LATE)


async def _slow_many(site: AttackedSite) -> str:
    async def one() -> str:
        pieces: list[Piece] = [b"GET /v1/models HTTP/1.1\r\n"]
        for _ in range(5):
            pieces += [1.0, b"x: y\r\n"]
        return judge(await talk(site.ports["open"], pieces, read_s=6.0), LATE)

    return summarise(await asyncio.gather(*(one() for _ in range(300))))


def _slow() -> list[Attack]:
    return [
        Attack("slow", "headers", _slow_headers),
        Attack("slow", "first line", _slow_first_line),
        Attack("slow", "nothing at all", _slow_nothing),
        Attack("slow", "body", _slow_body),
        Attack("slow", "chunks", _slow_chunked_body),
        Attack("slow", "300 at once", _slow_many),
        Attack("slow", "readers that do not read", _read_nothing, held_bytes=32 * MIB),
    ]


def _bomb_pieces(start: bytes, count: int = _ROUNDS) -> list[Piece]:
    return [start, *([_SMALL_CHUNKS] * count), b"0\r\n\r\n"]


async def _bomb_one(site: AttackedSite) -> str:
    reply = await talk(site.ports["open"], _bomb_pieces(_HEAD), read_s=20.0)
    # What came around it counts, too.
    return judge(reply, TOO_LARGE)


async def _bomb_strangers(site: AttackedSite) -> str:
    replies = await asyncio.gather(
        *(
            talk(site.ports["keyed"], _bomb_pieces(_HEAD, _ROUNDS // 3), read_s=20.0)
            for _ in range(6)
        )
    )
    return summarise([judge(reply, KEYLESS, may_close=True) for reply in replies])


async def _bomb_strangers_at_length(site: AttackedSite) -> str:
    start = head_of() + b"content-length: %d\r\n\r\n" % (30 * MIB)
    block: list[Piece] = [start, *([b" " * MIB] * 29)]
    replies = await asyncio.gather(
        *(talk(site.ports["keyed"], block, read_s=8.0) for _ in range(8))
    )
    return summarise([judge(reply, KEYLESS, may_close=True) for reply in replies])


async def _bomb_held(site: AttackedSite, target: str, count: int) -> list[Reply]:
    key = site.key if target == "keyed" else None
    start = head_of(key=key) + b"content-length: %d\r\n\r\n" % (30 * MIB)
    block: list[Piece] = [start, *([b" " * MIB] * 29), 1.0]
    return await asyncio.gather(
        *(talk(site.ports[target], block, read_s=8.0) for _ in range(count))
    )


async def _bomb_unfinished(site: AttackedSite) -> str:
    replies = await _bomb_held(site, "open", 10)
    return summarise([judge(r, _HELD, may_close=True) for r in replies])


async def _bomb_unfinished_with_key(site: AttackedSite) -> str:
    replies = await _bomb_held(site, "keyed", 8)
    return summarise([judge(r, _HELD, may_close=True) for r in replies])


async def _bomb_whole(site: AttackedSite) -> str:
    body = await asyncio.to_thread(chat_body, MIRROR, "a" * (20 * MIB))
    sent = request_of(body)
    replies = await asyncio.gather(
        *(talk(site.ports["open"], [sent], read_s=30.0, quiet_s=0.0) for _ in range(10))
    )
    return summarise([judge(r, frozenset({200, 503}), may_close=True) for r in replies])


async def _bomb_held_headers(site: AttackedSite) -> str:
    async def _bomb_one() -> str:
        sent = b"GET /v1/models HTTP/1.1\r\n" + b"".join(
            b"x%d: %b\r\n" % (i, b"y" * 300) for i in range(90)
        )
        reply = await talk(site.ports["open"], [sent], read_s=DEADLINES["header_s"] + 3.0)
        return judge(reply, LATE)

    return summarise(await asyncio.gather(*(_bomb_one() for _ in range(500))))


def _bombs() -> list[Attack]:
    return [
        Attack("bombs", "30 MiB in 2-byte chunks", _bomb_one, held_bytes=BODY_BYTES),
        Attack("bombs", "6 x 10 MiB in 2-byte chunks, no key", _bomb_strangers),
        Attack("bombs", "8 x 30 MiB, no key", _bomb_strangers_at_length),
        Attack(
            "bombs", "10 x 30 MiB unfinished", _bomb_unfinished, held_bytes=BUFFERED_BYTES["open"]
        ),
        Attack(
            "bombs",
            "8 x 30 MiB unfinished, with a key",
            _bomb_unfinished_with_key,
            held_bytes=BUFFERED_BYTES["keyed"],
        ),
        Attack("bombs", "10 x 20 MiB, whole", _bomb_whole, held_bytes=BUFFERED_BYTES["open"]),
        Attack("bombs", "500 x 28 kB of headers", _bomb_held_headers, held_bytes=500 * 32 * 1024),
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
        return await site.released(DEADLINES["client_s"] + 6.0)
    finally:
        for opened in sockets:
            opened.close()


def attacks() -> list[Attack]:
    """Return the slow and the large."""
    return [*_slow(), *_bombs()]
