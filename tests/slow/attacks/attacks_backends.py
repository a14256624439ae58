"""Attacks from behind: backends that misbehave. The gateway answers 502 or 504, or ends its stream with an
error.
"""

from __future__ import annotations

import asyncio

from tests.slow.attacks.attacks_case import FINE, MIB, Attack, judge
from tests.slow.attacks.attacks_engine import DEADLY, MIRROR, POISON, WAYS
from tests.slow.attacks.attacks_site import ANSWER_BYTES, AttackedSite
from tests.slow.attacks.attacks_wire import HOST, Reply, chat_body, request_of, talk

_FAILED = frozenset({502, 503, 504})
"""503: the backend was found out, and counts as down."""
_FINE_ANYWAY = {"two-answers", "early"}
"""Ways that a client gets for an answer: odd, but whole."""
_HELD = {"endless-body": ANSWER_BYTES, "big-event": 32 * MIB, "endless-chunk": 64 * MIB}
_LONG_S = 40.0
_MAX_DEATHS = 4
"""Backends that one request may take down, however often it is asked."""


def _ended(reply: Reply) -> str:
    """Return what is wrong with a stream that has begun: it must end, as an answer or as an error."""
    return "" if reply.whole or reply.closed else "the stream hangs"


def _attack(way: str, *, stream: bool) -> Attack:
    async def run(site: AttackedSite) -> str:
        content = "a" * (5 * MIB) if way == "early" else "Hello"
        asked: dict[str, object] = {"stream": True} if stream else {}
        body = chat_body(f"hostile-{way}", content, max_tokens=1, **asked)
        limit_s = 10.0 if way == "drip" else _LONG_S
        reply = await talk(site.ports["open"], [request_of(body)], read_s=limit_s)
        if way == "drip" and not reply.statuses and not reply.closed:
            # It gives signs of life; who waits for it may.
            return ""
        if way == "mistake" and stream:
            told = b'"type":"invalid_request_error"' in reply.raw
            return judge(reply, FINE) or ("" if told else f"told otherwise: {reply.raw[-200:]!r}")
        if stream and reply.status == 200:
            return "" if way == "drip" else _ended(reply)
        allowed = FINE if way in _FINE_ANYWAY else _FAILED
        if b"\r\nset-cookie" in reply.raw.lower() or b"\rx: y" in reply.raw:
            return "a backend wrote headers of the answer"
        return judge(reply, allowed)

    kind = "stream" if stream else "answer"
    slow = way in ("silent", "no-end", "drip", "endless-body", "endless-header", "endless-chunk")
    return Attack(
        "backends",
        f"{way} ({kind})",
        run,
        quick=not slow and way != "status-100",
        held_bytes=_HELD.get(way, 8 * MIB),
    )


async def _poison(site: AttackedSite) -> str:
    """Ask what backends die of, again and again: few of them may see it."""
    backend = site.hostile["resets"]
    before, sent = backend.poisoned, request_of(chat_body(POISON, DEADLY.decode()))
    for _ in range(5):
        reply = await talk(site.ports["open"], [sent], read_s=_LONG_S)
        wrong = judge(reply, _FAILED | {422})
        if wrong:
            return wrong
    seen = backend.poisoned - before
    return f"it was sent to backends {seen} times" if seen > _MAX_DEATHS else ""


async def _endless(site: AttackedSite) -> str:
    """Read a stream that has no end: the gateway gives it one."""
    body = chat_body(MIRROR, "for-ever", stream=True)
    reader, writer = await asyncio.open_connection(HOST, site.ports["open"])
    try:
        writer.write(request_of(body))
        tail = b""
        async with asyncio.timeout(_LONG_S):
            while b'"code":"stream_interrupted"' not in tail:
                data = await reader.read(2**18)
                if not data:
                    return "the stream was cut"
                tail = tail[-1000:] + data
    except TimeoutError:
        return "the stream has no end"
    finally:
        writer.transport.abort()
    return ""


def attacks() -> list[Attack]:
    """Return every way of misbehaving, asked for an answer and for a stream."""
    return [
        Attack("backends", "a request that backends die of", _poison, quick=True),
        Attack("backends", "a stream without an end", _endless, held_bytes=ANSWER_BYTES),
        *(_attack(way, stream=stream) for way in (*WAYS, "early") for stream in (False, True)),
    ]
