"""What an attack is, and the usual ways to write one: bytes or a body sent, statuses that may answer them."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tests.slow.attacks.attacks_site import BODY_BYTES, AttackedSite
from tests.slow.attacks.attacks_wire import CHAT, Piece, Reply, request_of, talk

MIB = 2**20
BAD = frozenset({400})
TOO_LARGE = frozenset({413})
KEYLESS = frozenset({401})
FINE = frozenset({200})
FORBIDDEN = frozenset({403})
ABSENT = frozenset({404})
METHOD = frozenset({405})
LATE = frozenset({408})
Statuses = frozenset[int]
Body = Callable[[], bytes] | object
"""Of a request: bytes, what makes them (large ones), or what JSON is made of."""
Row = tuple[str, Body, Statuses]
Check = Callable[[AttackedSite, Reply], str]
"""Returns what is wrong with an answer beyond its status; empty: nothing."""


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack.

    run: does it and returns what was wrong, or nothing. quick: whether it is part of a quick run.
    held_bytes: what the limits of a gateway let it hold there, and instance_bytes in the instance: the
    memory that is no growth.
    """

    family: str
    name: str
    run: Callable[[AttackedSite], Awaitable[str]]
    quick: bool = False
    held_bytes: int = 0
    instance_bytes: int = 0
    needs_model: bool = False
    """Whether it is about the model, not the protocol."""


def judge(
    reply: Reply, allowed: Statuses, *, most: int = 1, may_close: bool = False, near: str = ""
) -> str:
    """Return what is wrong with a reply: a status that is not allowed, too many answers, none."""
    prefix = f"{near}: " if near else ""
    if not reply.statuses:
        return "" if may_close and reply.closed else f"{prefix}{reply.describe()}"
    wrong = [status for status in reply.statuses if status not in allowed]
    if wrong:
        return f"{prefix}{reply.describe()}"
    if len(reply.statuses) > most:
        return f"{prefix}{len(reply.statuses)} answers: {reply.describe()}"
    return ""


def summarise(wrong: list[str]) -> str:
    """Return what went wrong most often of many, with how often."""
    found = Counter(text for text in wrong if text)
    return "; ".join(f"{count}x {text}" for text, count in found.most_common(2))


def raw(
    family: str,
    name: str,
    pieces: Iterable[Piece] | bytes | Callable[[], Iterable[Piece]],
    allowed: Statuses,
    *,
    target: str = "open",
    most: int = 1,
    may_close: bool = False,
    half_close: bool = False,
    head_only: bool = False,
    read_s: float = 8.0,
    check: Check | None = None,
    quick: bool = True,
    held_bytes: int = 0,
) -> Attack:
    """Return an attack that sends bytes as they are; many are made when they are needed."""

    async def run(site: AttackedSite) -> str:
        made = pieces() if callable(pieces) else pieces
        sent = [made] if isinstance(made, bytes) else made
        reply = await talk(
            site.ports[target],
            sent,
            read_s=read_s,
            answers=most,
            half_close=half_close,
            head_only=head_only,
        )
        wrong = judge(reply, allowed, most=most, may_close=may_close)
        return wrong or (check(site, reply) if check is not None else "")

    return Attack(family, name, run, quick=quick, held_bytes=held_bytes)


def post(
    family: str,
    name: str,
    body: Body,
    allowed: Statuses = BAD,
    *,
    path: str = CHAT,
    target: str = "open",
    headers: tuple[str, ...] = (),
    kind: str | None = "application/json",
    with_key: bool = False,
    read_s: float = 15.0,
    check: Check | None = None,
    quick: bool = False,
    held_bytes: int = 0,
    instance_bytes: int = 0,
    needs_model: bool = False,
) -> Attack:
    """Return an attack that posts a body."""

    async def run(site: AttackedSite) -> str:
        # In a thread: the backends of this process must go on answering meanwhile.
        made = await asyncio.to_thread(body) if callable(body) else body
        data = made if isinstance(made, bytes) else json.dumps(made).encode()
        key = site.key if with_key else None
        sent = request_of(data, path, *headers, kind=kind, key=key)
        reply = await talk(site.ports[target], [sent], read_s=read_s)
        return judge(reply, allowed) or (check(site, reply) if check is not None else "")

    return Attack(
        family,
        name,
        run,
        quick=quick,
        held_bytes=held_bytes,
        instance_bytes=instance_bytes,
        needs_model=needs_model,
    )


def ask_model(
    family: str, path: str, rows: list[Row], *, held_bytes: int = BODY_BYTES, named: bool = False
) -> list[Attack]:
    """Return attacks on the model by a path, whose names say which if they are `named` by it."""
    return [
        post(
            family,
            f"{path} {name}" if named else name,
            body,
            allowed,
            path=path,
            needs_model=True,
            quick=not callable(body),
            held_bytes=held_bytes if callable(body) else 8 * MIB,
            instance_bytes=4 * BODY_BYTES if callable(body) else 16 * MIB,
            read_s=30.0,
        )
        for name, body, allowed in rows
    ]


def admin_closed(site: AttackedSite, reply: Reply) -> str:
    """Return what is wrong with an answer that must not come from the admin API."""
    del site
    opened = b'"backends"' in reply.raw or b"atoll_gateway_" in reply.raw
    return "the admin API answered" if opened else ""


def deep_schema(depth: int) -> dict[str, Any]:
    """Return a schema of objects in objects."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema
