"""Attacks by the many and those who leave: connections and requests without end, clients gone too early."""

from __future__ import annotations

import asyncio

from benchmarks.serving.fake_engine import MODEL
from tests.slow.attacks.attacks_case import FINE, KEYLESS, MIB, Attack, judge, summarise
from tests.slow.attacks.attacks_engine import MIRROR, NARROW
from tests.slow.attacks.attacks_site import CONNECTIONS, AttackedSite
from tests.slow.attacks.attacks_wire import HOST, chat_body, head_of, request_of, talk

_FULL = frozenset({429, 503})
_RELEASE_S = 3.0


async def _flood_idle(site: AttackedSite, target: str, count: int) -> str:
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


async def _flood_pipelined(site: AttackedSite) -> str:
    sent = (head_of("GET", "/v1/models") + b"\r\n") * 5000
    reply = await talk(site.ports["open"], [sent], answers=5000, read_s=20.0, quiet_s=0.5)
    wrong = [status for status in reply.statuses if status != 200]
    return f"{len(wrong)} of them {wrong[0]}" if wrong else "" if reply.statuses else "silence"


async def _flood_pipelined_chats(site: AttackedSite) -> str:
    sent = request_of(chat_body(MODEL)) * 1000
    reply = await talk(site.ports["open"], [sent], answers=1000, read_s=20.0, quiet_s=0.5)
    wrong = [status for status in reply.statuses if status != 200]
    return f"{len(wrong)} of them {wrong[0]}" if wrong else "" if reply.statuses else "silence"


async def _flood_pipelined_streams_left(site: AttackedSite) -> str:
    sent = request_of(chat_body(MIRROR, "for-ever", stream=True)) * 200
    reader, writer = await asyncio.open_connection(HOST, site.ports["open"])
    writer.write(sent)
    await reader.read(1000)
    writer.transport.abort()
    return await site.released(_RELEASE_S)


async def _flood_narrow(site: AttackedSite) -> str:
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
    return summarise(wrong)


async def _flood_running(site: AttackedSite) -> str:
    sent = request_of(chat_body(MIRROR, "slowly"), key=site.key)
    replies = await asyncio.gather(
        *(talk(site.ports["keyed"], [sent], read_s=15.0, quiet_s=0.0) for _ in range(300))
    )
    wrong = [judge(reply, FINE | _FULL) for reply in replies]
    if not any(r.status in _FULL for r in replies):
        wrong.append("nobody was refused")
    return summarise(wrong)


async def _flood_wrong_keys(site: AttackedSite) -> str:
    async def one(number: int) -> str:
        key = f"atoll-{number:012d}-{'x' * 43}"
        sent = request_of(chat_body(MODEL), key=key) * 20
        reply = await talk(site.ports["keyed"], [sent], answers=20, quiet_s=0.2)
        return judge(reply, KEYLESS, most=20)

    return summarise(await asyncio.gather(*(one(number) for number in range(50))))


async def _flood_opening(site: AttackedSite) -> str:
    for _ in range(40):
        opened = await asyncio.gather(
            *(asyncio.open_connection(HOST, site.ports["open"]) for _ in range(50)),
            return_exceptions=True,
        )
        for one in opened:
            if isinstance(one, tuple):
                one[1].transport.abort()
    return ""


async def _flood_few(site: AttackedSite) -> str:
    return await _flood_idle(site, "open", 2000)


async def _flood_all_of_them(site: AttackedSite) -> str:
    return await _flood_idle(site, "keyed", 1700)


def _floods() -> list[Attack]:
    return [
        Attack("floods", "2,000 idle connections", _flood_few, held_bytes=32 * MIB),
        Attack(
            "floods",
            "1,700 connections where 1,500 may be",
            _flood_all_of_them,
            held_bytes=24 * MIB,
        ),
        Attack("floods", "2,000 connections opened and reset", _flood_opening, held_bytes=8 * MIB),
        Attack("floods", "5,000 requests in one go", _flood_pipelined, held_bytes=8 * MIB),
        Attack("floods", "1,000 chats in one go", _flood_pipelined_chats, held_bytes=8 * MIB),
        Attack("floods", "200 streams in one go, left", _flood_pipelined_streams_left, quick=True),
        Attack("floods", "200 chats where 4 may run", _flood_narrow, quick=True),
        Attack("floods", "300 chats where 64 may run", _flood_running),
        Attack("floods", "1,000 wrong keys", _flood_wrong_keys),
    ]


async def _leave_half(site: AttackedSite, body: bytes) -> str:
    reply = await talk(site.ports["open"], [request_of(body)], half_close=True)
    return judge(reply, FINE)


async def _leave_half_chat(site: AttackedSite) -> str:
    return await _leave_half(site, chat_body(MODEL))


async def _leave_half_slow(site: AttackedSite) -> str:
    return await _leave_half(site, chat_body(MIRROR, "slowly"))


async def _leave_half_stream(site: AttackedSite) -> str:
    sent = request_of(chat_body(MODEL, stream=True))
    reply = await talk(site.ports["open"], [sent], half_close=True)
    done = b"data: [DONE]" in reply.raw
    return judge(reply, FINE) or ("" if done else "the stream was cut")


async def _leave_half_page(site: AttackedSite) -> str:
    sent = head_of("GET", "/v1/models") + b"\r\n"
    return judge(await talk(site.ports["open"], [sent], half_close=True), FINE)


async def _leave_half_request(site: AttackedSite) -> str:
    sent = head_of() + b"content-length: 100\r\n\r\n{"
    reply = await talk(site.ports["open"], [sent], half_close=True, read_s=9.0)
    # Nobody waits for an answer to half a request.
    return judge(reply, frozenset(), may_close=True)


async def _leave_early(site: AttackedSite, body: bytes, wait_s: float, count: int = 30) -> str:
    for _ in range(count):
        _, writer = await asyncio.open_connection(HOST, site.ports["open"])
        writer.write(request_of(body))
        await writer.drain()
        if wait_s:
            await asyncio.sleep(wait_s)
        writer.transport.abort()
    return await site.released(_RELEASE_S)


async def _leave_at_once(site: AttackedSite) -> str:
    return await _leave_early(site, chat_body(MIRROR, "slowly"), 0.0)


async def _leave_soon(site: AttackedSite) -> str:
    return await _leave_early(site, chat_body(MIRROR, "slowly"), 0.02)


async def _leave_in_stream(site: AttackedSite) -> str:
    return await _leave_early(site, chat_body(MIRROR, "for-ever", stream=True), 0.05)


async def _leave_narrow(site: AttackedSite) -> str:
    """Slots of a backend that has few are free again once the clients have left."""
    wrong = await _leave_early(site, chat_body(NARROW, "slowly"), 0.01, 20)
    reply = await talk(site.ports["open"], [request_of(chat_body(NARROW))])
    return wrong or judge(reply, FINE)


async def _leave_in_body(site: AttackedSite) -> str:
    for _ in range(20):
        _, writer = await asyncio.open_connection(HOST, site.ports["open"])
        writer.write(head_of() + b"content-length: 20000000\r\n\r\n" + b" " * MIB)
        await writer.drain()
        writer.transport.abort()
    return ""


def _leaving() -> list[Attack]:
    return [
        Attack("leaving", "half-closed chat", _leave_half_chat, quick=True),
        Attack("leaving", "half-closed, answer later", _leave_half_slow, quick=True),
        Attack("leaving", "half-closed stream", _leave_half_stream, quick=True),
        Attack("leaving", "half-closed page", _leave_half_page, quick=True),
        Attack("leaving", "half-closed in a body", _leave_half_request, quick=True),
        Attack("leaving", "gone at once", _leave_at_once, quick=True),
        Attack("leaving", "gone before the answer", _leave_soon, quick=True),
        Attack("leaving", "gone in a stream", _leave_in_stream, quick=True),
        Attack("leaving", "gone, few slots", _leave_narrow, quick=True),
        Attack("leaving", "gone in a body", _leave_in_body, held_bytes=20 * MIB),
    ]


def attacks() -> list[Attack]:
    """Return the many and those who leave."""
    return [*_floods(), *_leaving()]
