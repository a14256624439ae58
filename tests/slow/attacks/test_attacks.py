"""The attacks: that each is told apart, and the fastest of them against a gateway in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from atoll.runtime.gateway.app import Gateway
from atoll.runtime.gateway.settings import GatewaySettings
from atoll.runtime.pool.member import Backend
from atoll.runtime.pool.pool import BackendPool
from benchmarks.serving.fake_engine import MODEL
from tests.slow.attacks import (
    attacks_backends,
    attacks_bodies,
    attacks_doors,
    attacks_floods,
    attacks_framing,
)
from tests.slow.attacks.attacks import Outcome, blame
from tests.slow.attacks.attacks_case import judge, raw
from tests.slow.attacks.attacks_engine import MIRROR, HostileBackend
from tests.slow.attacks.attacks_site import AttackedSite
from tests.slow.attacks.attacks_watcher import Gap
from tests.slow.attacks.attacks_wire import Reply, chat_body, request_of, take_apart, talk

_CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
_FAST = (
    "smuggling / CL.TE",
    "smuggling / TE.CL",
    "smuggling / two lengths",
    "smuggling / space before the colon",
    "smuggling / length with plus",
    "chunks / negative chunk size",
    "chunks / bare LF after a chunk size",
    "lines / obs-fold",
    "lines / NUL in a value",
    "lines / a header of 100 kB",
    "json / depth 100,000",
    "json / NaN",
    "json / bad UTF-8",
    "media / picture 'file:///etc/passwd'",
    "paths / open /v1/%2e%2e/atoll/v1/status",
    "paths / service: a path with a line end",
    "headers / x-request-id: a",
    "leaving / gone before the answer",
    "backends / garbage (answer)",
    "backends / two-lengths (answer)",
)


@asynccontextmanager
async def attacked(folder: Path, hostile: str = "garbage") -> AsyncIterator[AttackedSite]:
    """A gateway before the mirror and one backend that misbehaves, as the attacks know it."""
    site = AttackedSite(folder, with_model=False)
    site.hostile = {hostile: HostileBackend(hostile)}
    await site.mirror.open()
    await site.hostile[hostile].open()
    backends = [
        Backend(
            id=MIRROR,
            url=f"http://127.0.0.1:{site.mirror.port}",
            models=(MIRROR, MODEL),
            services=(MIRROR,),
        ),
        Backend(
            id="hostile",
            url=f"http://127.0.0.1:{site.hostile[hostile].port}",
            models=(f"hostile-{hostile}",),
        ),
    ]
    settings = GatewaySettings(port=0, admin_socket="", attempts=1)
    gateway = Gateway(BackendPool(backends), settings)
    _, port = await gateway.start()
    site.ports["open"] = port
    try:
        yield site
    finally:
        await gateway.close()
        site.mirror.close()
        site.hostile[hostile].close()


def test_the_fastest_attacks_are_answered_as_they_should_be(tmp_path: Path) -> None:
    parts = (attacks_framing, attacks_bodies, attacks_doors, attacks_floods, attacks_backends)
    known = {f"{each.family} / {each.name}": each for part in parts for each in part.attacks()}
    wanted = [known[name] for name in _FAST]

    async def go() -> dict[str, str]:
        wrong = {}
        for hostile in ("garbage", "two-lengths"):
            async with attacked(tmp_path, hostile) as site:
                for attack in wanted:
                    behind = attack.family == "backends"
                    if behind == attack.name.startswith(hostile) and (
                        behind or hostile == "garbage"
                    ):
                        wrong[attack.name] = await attack.run(site)
                # It serves on, whatever it was sent.
                sent = request_of(chat_body(MIRROR))
                assert (await talk(site.ports["open"], [sent], quiet_s=0.0)).status == 200
        return wrong

    seen = asyncio.run(asyncio.wait_for(go(), 120))
    assert len(seen) == len(_FAST)
    assert {name: why for name, why in seen.items() if why} == {}


@pytest.mark.parametrize(
    ("came", "statuses", "whole"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", [200], True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n{}", [200], False),
        (b"HTTP/1.1 100 C\r\n\r\nHTTP/1.1 413 L\r\ncontent-length: 0\r\n\r\n", [413], True),
        (
            _CHUNKED + b"HTTP/1.1 404 N\r\ncontent-length: 0\r\n\r\n",
            [200, 404],
            True,
        ),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{}", [200], False),
        (b"garbage", [], False),
    ],
)
def test_answers_are_taken_apart(came: bytes, statuses: list[int], whole: bool) -> None:
    found, ended = take_apart(came)
    assert [status for status, _, _ in found] == statuses
    assert ended is whole


def test_a_reply_is_judged_by_status_and_count() -> None:
    good = Reply(statuses=[400], bodies=[b"{}"], heads=[b""])
    assert judge(good, frozenset({400})) == ""
    assert "400" in judge(good, frozenset({401}))
    twice = Reply(statuses=[200, 200], bodies=[b"", b""], heads=[b"", b""])
    assert "2 answers" in judge(twice, frozenset({200}))
    assert "no answer" in judge(Reply(closed=True), frozenset({400}))
    assert judge(Reply(closed=True), frozenset({400}), may_close=True) == ""
    assert "silence" in judge(Reply(), frozenset({400}), may_close=True)


def test_a_gap_is_blamed_on_the_attack_that_ran_for_most_of_it() -> None:
    first, second = (raw("family", name, b"", frozenset()) for name in ("first", "second"))
    outcomes = [Outcome(first, 10.0, 11.0), Outcome(second, 11.0, 20.0)]
    gaps = [Gap(14.0, 3.2, "a", ""), Gap(10.5, 0.2, "a", ""), Gap(10.9, 0.4, "b", "")]
    blame(outcomes, gaps, {"a": 0.2})
    assert [round(outcome.delay_s, 3) for outcome in outcomes] == [0.4, 3.0]


def test_the_mirror_tells_what_it_got(tmp_path: Path) -> None:
    async def go() -> None:
        async with attacked(tmp_path) as site:
            sent = request_of(chat_body(MIRROR), "/v1/chat/completions", "cookie: a=b")
            reply = await talk(site.ports["open"], [sent], quiet_s=0.0)
            assert reply.status == 200
            (request,) = [r for r in site.mirror.requests if r.startswith(b"POST")]
            assert b"cookie" not in request
            assert request.endswith(chat_body(MIRROR))

    asyncio.run(asyncio.wait_for(go(), 60))
