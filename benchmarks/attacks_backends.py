"""Attacks from behind: backends that misbehave. The gateway answers 502 or 504, or ends its stream with an
error.
"""

from __future__ import annotations

from benchmarks.attacks_case import FINE, MIB, Attack, judge
from benchmarks.attacks_engine import POISON, WAYS
from benchmarks.attacks_site import AttackedSite
from benchmarks.attacks_wire import Reply, chat_body, request_of, talk

_FAILED = frozenset({502, 503, 504})
"""503: the backend was found out, and counts as down."""
_FINE_ANYWAY = {"two-answers", "early"}
"""Ways that a client gets for an answer: odd, but whole."""
_HELD = {"endless-body": 256 * MIB, "big-event": 32 * MIB, "endless-chunk": 64 * MIB}
_LONG_S = 40.0
_MOST_DEATHS = 4
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
    before = backend.asked
    for _ in range(5):
        reply = await talk(site.ports["open"], [request_of(chat_body(POISON))], read_s=_LONG_S)
        wrong = judge(reply, _FAILED | {422})
        if wrong:
            return wrong
    seen = backend.asked - before
    return f"it was sent to backends {seen} times" if seen > _MOST_DEATHS else ""


def attacks() -> list[Attack]:
    """Return every way of misbehaving, asked for an answer and for a stream."""
    return [
        Attack("backends", "a request that backends die of", _poison, quick=True),
        *(_attack(way, stream=stream) for way in (*WAYS, "early") for stream in (False, True)),
    ]
