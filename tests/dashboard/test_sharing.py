"""Many pages ask for the same: the gateway is asked once, and never for another one."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.dashboard.bench import Bench, Browser, open_bench

MANY = 200


def asked(bench: Bench, path: str) -> int:
    return sum(r.path == f"/atoll/v1/{path}".encode() for r in bench.gateway.seen)


@pytest.mark.parametrize("key", [None, "atoll-notebook"])
@pytest.mark.parametrize("path", ["machines", "models"])
async def test_many_pages_make_one_request(tmp_path: Path, path: str, key: str | None) -> None:
    async with open_bench(tmp_path) as bench:
        browser = await bench.logged_in(key)
        answers = await asyncio.gather(
            *(browser.ask("GET", f"/atoll/v1/{path}") for _ in range(MANY))
        )
        assert {answer.status for answer in answers} == {200}
        assert len({answer.body for answer in answers}) == 1
        assert asked(bench, path) == 1
        bench.clock.now_s += 2.1
        await browser.ask("GET", f"/atoll/v1/{path}")
        assert asked(bench, path) == 2


async def test_sessions_of_a_role_share_and_roles_do_not(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        first, second = await bench.logged_in(), await bench.logged_in()
        member = await bench.logged_in("atoll-notebook")
        for browser in (first, second, first):
            await browser.ask("GET", "/atoll/v1/machines")
        assert asked(bench, "machines") == 1
        # A key is shown to the gateway before it is given what others were told.
        await member.ask("GET", "/atoll/v1/machines")
        assert asked(bench, "machines") == 2


async def test_a_key_that_was_not_shown_lately_gets_nothing_of_others(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        ada, kurt = (
            await bench.logged_in("atoll-notebook"),
            await bench.logged_in("atoll-grading"),
        )
        assert (await ada.ask("GET", "/atoll/v1/models")).status == 200
        bench.gateway.keys[2]["state"] = "revoked"
        assert (await kurt.ask("GET", "/atoll/v1/models")).status == 401
        assert (await ada.ask("GET", "/atoll/v1/models")).status == 200


async def test_what_depends_on_who_asks_is_never_shared(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        ada, kurt = (
            await bench.logged_in("atoll-notebook"),
            await bench.logged_in("atoll-grading"),
        )
        for path in ("keys", "usage", "me"):
            answers = [await each.ask("GET", f"/atoll/v1/{path}") for each in (ada, kurt)]
            if path != "usage":
                assert answers[0].body != answers[1].body
            before = asked(bench, path)
            await ada.ask("GET", f"/atoll/v1/{path}")
            assert asked(bench, path) == before + 1


async def test_a_change_is_seen_at_once(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        browser = await bench.logged_in()

        async def states() -> list[str]:
            answer = await browser.ask("GET", "/atoll/v1/machines")
            return [machine["state"] for machine in json.loads(answer.body)["machines"]]

        assert (await states())[0] == "up"
        drained = await browser.ask(
            "POST", "/atoll/v1/machines/lab%2Fgpu1/drain", {"confirm": "gpu1"}
        )
        assert drained.status == 200
        assert (await states())[0] == "drained"
        # One of others is told by the gateway's events.
        async with browser.stream("/atoll/v1/live") as answer:
            text = b""
            async for piece in answer.pieces(30.0):
                text += piece
                if b"event: gateway" in text:
                    break
            await states()
            bench.gateway.machines[1]["state"] = "down"
            bench.gateway.version += 1
            text = b""
            async for piece in answer.pieces(30.0):
                text += piece
                if f'"version": {bench.gateway.version}'.encode() in text:
                    break
        assert (await states())[1] == "down"


async def test_a_planner_that_is_still_starting_is_waited_for(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        browser = await bench.logged_in()
        bench.planner.ready.clear()
        asking = [asyncio.create_task(ask_planner(browser, method)) for method in ("GET", "POST")]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in asking)
        bench.planner.ready.set()
        assert await asyncio.gather(*asking) == [200, 200]


async def ask_planner(browser: Browser, method: str) -> int:
    path, body = ("fleets", None) if method == "GET" else ("whatif", {"fleet": "lab"})
    return (await browser.ask(method, f"/atoll/v1/{path}", body)).status


async def test_a_session_that_ends_says_why_to_its_pages(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        browser = await bench.logged_in("atoll-notebook")
        text = b""
        async with browser.stream("/atoll/v1/live") as answer:
            bench.gateway.keys[0]["state"] = "revoked"
            await browser.ask("GET", "/atoll/v1/session")
            async for piece in answer.pieces(30.0):
                text += piece
        assert b"event: over" in text
        assert b"the key was revoked" in text
