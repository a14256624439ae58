"""Attacks on the console: roles, keys, usage and live pages, by keys of few rights, or by many at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

from benchmarks.serving.fake_engine import MODEL
from tests.slow.attacks.attacks_case import (
    ABSENT,
    BAD,
    FINE,
    FORBIDDEN,
    METHOD,
    Attack,
    Statuses,
    judge,
    summarise,
)
from tests.slow.attacks.attacks_site import AttackedSite
from tests.slow.attacks.attacks_wire import Reply, chat_body, head_of, request_of, talk

_PREFIX = "/atoll/v1/"
_BUSY = frozenset({200, 503})
_LISTENERS = 400
_QUESTIONS = 200
_OVERRIDE = "x-http-method-override: DELETE"
_EVIL = json.dumps({"name": "evil", "role": "admin"}).encode()


def attacks() -> list[Attack]:
    """Return the attacks of this module."""
    return [*_roles(), *_doors(), *_usage(), *_crowds()]


def _ask(
    name: str,
    method: str,
    path: str,
    allowed: Statuses,
    *headers: str,
    body: bytes = b"",
    who: str = "member",
) -> Attack:
    """Return an attack with a key of a role: `{viewer}` in a path is the id of the viewer's key."""

    async def run(site: AttackedSite) -> str:
        key = site.key if who == "member" else site.viewer_key
        at = path.replace("{viewer}", site.viewer_key.split("-")[1])
        sent = request_of(body, at, *headers, key=key, method=method)
        reply = await talk(site.ports["keyed"], [sent], read_s=8.0)
        return judge(reply, allowed) or _leak(site, reply)

    return Attack("console", f"{who}: {name}", run, quick=True)


def _leak(site: AttackedSite, reply: Reply) -> str:
    """Return what an answer says that it must not: the text of a key."""
    shown = [
        key for key in (site.key, site.viewer_key, site.expired_key) if key.encode() in reply.raw
    ]
    return "the answer has the text of a key" if shown else ""


def _roles() -> list[Attack]:
    said = ("admin", "member", "viewer", "ADMIN", "", "admin, member", "\u00e4")
    made = [_ask(f"as {r!r}", "GET", f"{_PREFIX}me", FORBIDDEN, f"x-atoll-role: {r}") for r in said]
    twice = ("x-atoll-role: viewer", "X-Atoll-Role: admin")
    owner = "x-atoll-owner: root@lab.example"
    return [
        *made,
        _ask("a role twice", "GET", f"{_PREFIX}keys", BAD, *twice),
        _ask("another owner", "GET", f"{_PREFIX}keys", FORBIDDEN, owner),
        _ask("an owner twice", "GET", f"{_PREFIX}keys", BAD, owner, owner),
        _ask("as an admin", "GET", f"{_PREFIX}me", FORBIDDEN, "x-atoll-role: admin", who="viewer"),
        _ask("asks a model", "POST", "/v1/chat/completions", FORBIDDEN, body=chat_body(MODEL), who="viewer"),
    ]  # fmt: skip


def _doors() -> list[Attack]:
    drain, keys = f"{_PREFIX}machines/fake-0/drain", f"{_PREFIX}keys"
    force = json.dumps({"confirm": "fake-0", "force": True}).encode()
    made = []
    for who in ("member", "viewer"):
        made += [
            *(
                _ask(path, "GET", f"{_PREFIX}{path}", FORBIDDEN, who=who)
                for path in ("status", "fabric", "backends", "traffic", "routes")
            ),
            _ask("metrics", "GET", "/metrics", FORBIDDEN, who=who),
            _ask("makes an admin", "POST", keys, FORBIDDEN, body=_EVIL, who=who),
            _ask("becomes an admin", "PATCH", f"{keys}/{{viewer}}", FORBIDDEN, body=_EVIL, who=who),
            _ask("drains", "POST", drain, FORBIDDEN, body=force, who=who),
            _ask("takes back", "DELETE", drain, FORBIDDEN, who=who),
            _ask("revokes another", "DELETE", f"{keys}/{{viewer}}", FORBIDDEN, who=who),
            _ask("revokes nothing", "DELETE", f"{keys}/nobody", FORBIDDEN, who=who),
            _ask("another method", "GET", f"{keys}/{{viewer}}", METHOD, _OVERRIDE, who=who),
        ]  # fmt: skip
    paths = (
        "//atoll/v1/keys",
        f"{_PREFIX}/keys",
        f"{_PREFIX}keys/",
        f"{_PREFIX}KEYS",
        f"{_PREFIX}%6beys",
        f"{_PREFIX}keys;x",
        f"{_PREFIX}../v1/keys",
        "http://localhost/atoll/v1/keys",
    )
    made += [_ask(path, "GET", path, ABSENT) for path in paths]
    return [*made, *_strangers()]


def _strangers() -> list[Attack]:
    def stranger(path: str) -> Attack:
        async def run(site: AttackedSite) -> str:
            sent = head_of("GET", path, "x-atoll-role: admin") + b"\r\n"
            return judge(await talk(site.ports["keyed"], [sent], read_s=8.0), FORBIDDEN)

        return Attack("console", f"no key: {path}", run, quick=True)

    names = ("me", "live", "snapshot", "models", "machines", "keys", "usage")
    return [stranger(f"{_PREFIX}{name}") for name in names]


def _usage() -> list[Attack]:
    bad = (
        "since_s=NaN",
        "since_s=inf",
        "until_s=-1",
        "since_s=1e308",
        "since_s=" + "9" * 5000,
        "by=",
        "by=key,key",
        "by=key,day,model",
        "by=prompt",
        "format=html",
        "by=day&by=key",
        "owner=bob",
        "by=%ff",
        "&".join(f"a{n}=1" for n in range(100)),
    )
    made = [_ask(query[:30], "GET", f"{_PREFIX}usage?{query}", BAD) for query in bad]
    return [
        *made,
        _ask("of another key", "GET", f"{_PREFIX}usage?key={{viewer}}", FORBIDDEN),
        _ask("of no key", "GET", f"{_PREFIX}usage?key=nobody", FORBIDDEN),
        _ask("of its own", "GET", f"{_PREFIX}usage?by=key,owner", FINE),
    ]


def _crowds() -> list[Attack]:
    async def listen(site: AttackedSite) -> str:
        """Listen with one key as often as it goes; another must find a place."""
        port = site.ports["keyed"]
        sent = head_of("GET", f"{_PREFIX}live", f"authorization: Bearer {site.key}") + b"\r\n"
        opened = [await _begin(port, sent) for _ in range(_LISTENERS)]
        try:
            other = head_of("GET", f"{_PREFIX}live", f"authorization: Bearer {site.viewer_key}")
            reply = await talk(port, [other + b"\r\n"], read_s=3.0)
            return judge(reply, FINE, near="another listener")
        finally:
            _leave(opened)

    async def flood(site: AttackedSite) -> str:
        """Ask for usage often at once; another is answered nevertheless."""
        port = site.ports["keyed"]
        sent = request_of(b"", f"{_PREFIX}usage?by=day,model", key=site.key, method="GET")
        asked = [asyncio.create_task(talk(port, [sent], read_s=20.0)) for _ in range(_QUESTIONS)]
        mine = request_of(b"", f"{_PREFIX}keys", key=site.viewer_key, method="GET")
        reply = await talk(port, [mine], read_s=20.0)
        wrong = [judge(each, _BUSY) for each in await asyncio.gather(*asked)]
        return judge(reply, FINE, near="another") or summarise(wrong)

    return [
        Attack("console", f"{_LISTENERS} listeners of one key", listen, quick=True),
        Attack("console", f"{_QUESTIONS} questions of one key", flood, quick=True),
    ]


async def _begin(port: int, sent: bytes) -> asyncio.StreamWriter:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    await reader.readline()
    return writer


def _leave(writers: Sequence[asyncio.StreamWriter]) -> None:
    for writer in writers:
        writer.transport.abort()
