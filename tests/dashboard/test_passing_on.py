"""What goes through the dashboard to the gateway and the planner, and what comes back."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from atoll.dashboard.server import DashboardSettings
from tests.dashboard.bench import Bench, Browser, error_code, open_bench, until
from tests.dashboard.fakes import FakeGateway

CHAT = {"model": "qwen3-32b", "stream": True, "messages": [{"role": "user", "content": "Hello"}]}


async def test_a_key_asks_with_its_own_rights(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        browser = await bench.logged_in("atoll-notebook")
        answer = await browser.ask(
            "GET",
            "/atoll/v1/keys",
            authorization="Bearer atoll-root",
            x_atoll_role="admin",
            x_atoll_owner="root@lab.example",
        )
        assert {k["name"] for k in json.loads(answer.body)["keys"]} == {"notebook", "pipeline"}
        seen = bench.gateway.seen[-1].headers
        assert seen[b"authorization"] == b"Bearer atoll-notebook"
        assert not {b"x-atoll-role", b"x-atoll-owner", b"cookie", b"x-csrf-token"} & seen.keys()
        await browser.ask("GET", "/atoll/v1/fleets", x_atoll_role="admin")
        assert bench.planner.roles[-1] == "member"


async def test_paths_and_queries_arrive_as_they_were(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        browser = await bench.logged_in()
        answer = await browser.ask("GET", "/atoll/v1/usage?by=day,key&format=csv")
        assert answer.headers["content-type"].startswith("text/csv")
        assert "usage.csv" in answer.headers["content-disposition"]
        drain = "/atoll/v1/machines/lab%2Fgpu1/drain"
        done = await browser.ask("POST", drain, {"confirm": "gpu1"})
        assert json.loads(done.body)["state"] == "drained"
        assert bench.gateway.seen[-1].path == b"/atoll/v1/machines/lab%2Fgpu1/drain"
        wrong = await browser.ask("POST", drain, {"confirm": "gpu2"})
        assert wrong.status == 400


@pytest.mark.parametrize(
    "path",
    [
        "/atoll/v1/../../metrics",
        "/atoll/v1/%2e%2e/%2e%2e/metrics",
        "/atoll/v1/a%2f..%2fb",
        "/atoll/v1/a\\..\\b",
        "/atoll/v1/a%00b",
        "/atoll/v1/machines/..%2f..%2fmetrics/drain",
        "/v1/..",
        "/atoll/v1/keys%0d%0ax: y",
    ],
)
async def test_paths_that_climb_are_refused(tmp_path: Path, path: str) -> None:
    async with open_bench(tmp_path) as bench:
        browser = await bench.logged_in()
        count = len(bench.gateway.seen)
        for method in ("GET", "POST"):
            answer = await browser.ask(method, path)
            assert answer.status in (400, 404, 405)
        assert len(bench.gateway.seen) == count


async def read_chat(browser: Browser) -> tuple[str, bytes]:
    async with browser.stream("/v1/chat/completions", "POST", CHAT, x_atoll_events="1") as answer:
        assert answer.status == 200
        return answer.headers["x-atoll-node"], b"".join([p async for p in answer.pieces(30.0)])


async def test_a_conversation_is_streamed(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        node, text = await read_chat(await bench.logged_in("atoll-notebook"))
        assert node == "gpu1"
        assert text.count(b': atoll {"event": "node"') == 2
        assert text.endswith(b"data: [DONE]\n\n")


async def test_it_comes_piece_by_piece(tmp_path: Path) -> None:
    gateway = FakeGateway(token_s=0.1)
    async with open_bench(tmp_path, gateway=gateway) as bench:
        browser = await bench.logged_in("atoll-notebook")
        async with browser.stream("/v1/chat/completions", "POST", CHAT) as answer:
            pieces = answer.pieces(30.0)
            assert b"data: {" in await anext(pieces)
            assert gateway.chats_done == 0
            await pieces.aclose()
        # Who leaves has the gateway stop.
        await until(lambda: gateway.chats_cancelled + gateway.chats_done > 0)
        assert gateway.chats_done == 0


async def test_a_link_gets_a_key_to_ask_with(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        browser = await bench.logged_in()
        await asyncio.gather(read_chat(browser), read_chat(browser))
        (made,) = bench.gateway.keys[6:]
        assert (made["name"], made["role"], made["state"]) == ("dashboard", "member", "active")
        assert made["expires_s"] > made["created_s"] + 11 * 3600
        await browser.ask("DELETE", "/atoll/v1/session")
        await until(lambda: made["state"] == "revoked")


async def test_made_keys_end_with_the_dashboard(tmp_path: Path) -> None:
    gateway = FakeGateway(token_s=0.0)
    async with open_bench(tmp_path, gateway=gateway) as bench:
        await read_chat(await bench.logged_in())
        assert gateway.keys[-1]["state"] == "active"
        await bench.dashboard.close()
        assert gateway.keys[-1]["state"] == "revoked"


async def test_a_made_key_that_was_revoked_is_replaced(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        browser = await bench.logged_in()
        await read_chat(browser)
        bench.gateway.keys[-1]["state"] = "revoked"
        await read_chat(browser)
        assert len(bench.gateway.keys) == 8


async def test_viewers_do_not_ask_models(tmp_path: Path) -> None:
    gateway = FakeGateway(keys_needed=False)
    async with open_bench(tmp_path, gateway=gateway) as bench:
        browser = await bench.logged_in("atoll-finance")
        answer = await browser.ask("POST", "/v1/chat/completions", CHAT)
        assert (answer.status, error_code(answer)) == (403, "role_forbids")
        assert (await browser.ask("GET", "/v1/models")).status == 200
        refused = await browser.ask("POST", "/atoll/v1/whatif", {"fleet": "lab"})
        assert (refused.status, error_code(refused)) == (403, "role_forbids")


async def test_a_trace_goes_up(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        browser = await bench.logged_in()
        lines = ["arrival,input,output"] * 100_000
        answer = await browser.ask("POST", "/atoll/v1/traces", lines, x_atoll_filename="mine.csv")
        assert answer.status == 201
        assert bench.planner.traces[-1]["name"] == "mine.csv"


async def test_what_if_is_streamed(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        browser = await bench.logged_in()
        body = {"fleet": "lab", "demand": {"chat": 2.0}}
        async with browser.stream("/atoll/v1/whatif", "POST", body) as answer:
            text = b"".join([piece async for piece in answer.pieces(30.0)])
        assert text.count(b"event: progress") == 4
        assert text.count(b"event: result") == 1


async def test_a_service_that_is_gone_is_said(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        browser = await bench.logged_in()
        await bench.gateway.close()
        answer = await browser.ask("GET", "/atoll/v1/models")
        assert (answer.status, error_code(answer)) == (502, "gateway_down")
        assert (await browser.ask("GET", "/atoll/v1/session")).status == 200


# Live


async def open_pages(bench: Bench, browser: Browser, count: int, seen: list[int]) -> None:
    """Open pages and read each until it was told of both services twice."""

    async def page(at: int) -> None:
        text = b""
        async with browser.stream("/atoll/v1/live") as answer:
            assert answer.status == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            async for piece in answer.pieces(30.0):
                text += piece
                if text.count(b"event: gateway") >= 2 and b"event: fleets" in text:
                    seen[at] = text.count(b"event: health")
                    await bench_full.wait()
                    return

    bench_full = asyncio.Event()
    pages = [asyncio.create_task(page(at)) for at in range(count)]
    await until(lambda: all(seen))
    assert len(bench.dashboard.live.pages) == count
    assert (bench.gateway.live_open, bench.planner.live_open) == (1, 1)
    bench_full.set()
    await asyncio.gather(*pages)


async def test_two_hundred_pages_are_one_connection(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        browser = await bench.logged_in()
        await open_pages(bench, browser, 200, [0] * 200)
        assert (bench.gateway.live_count, bench.planner.live_count) == (1, 1)
        await until(lambda: not bench.dashboard.live.pages)


async def test_the_snapshot_is_passed_on_unchanged(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        browser = await bench.logged_in()
        text = b""
        async with browser.stream("/atoll/v1/live") as answer:
            async for piece in answer.pieces(30.0):
                text += piece
                if b"event: gateway" in text and text.endswith(b"\n\n"):
                    break
        line = next(part for part in text.split(b"\n\n") if part.startswith(b"event: gateway"))
        snapshot = json.loads(line.partition(b"data: ")[2])
        assert snapshot["models"][0]["name"] == "qwen3-32b"
        assert snapshot["version"] == 17


async def test_too_many_pages(tmp_path: Path) -> None:
    async with open_bench(tmp_path, DashboardSettings(max_pages=1)) as bench:
        browser = await bench.logged_in()
        async with browser.stream("/atoll/v1/live") as first:
            assert first.status == 200
            second = await browser.ask("GET", "/atoll/v1/live")
            assert (second.status, error_code(second)) == (503, "too_many_pages")


async def test_pages_need_a_session_and_end_with_it(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        assert (await bench.browser().ask("GET", "/atoll/v1/live")).status == 401
        browser = await bench.logged_in("atoll-notebook")
        async with browser.stream("/atoll/v1/live") as answer:
            assert (await browser.ask("DELETE", "/atoll/v1/session")).status == 200
            async for _ in answer.pieces(30.0):
                pass  # to its end


async def test_without_rights_of_its_own_it_listens_with_a_key(tmp_path: Path) -> None:
    async with open_bench(tmp_path, owned=False) as bench:
        before = await bench.browser().ask("GET", "/atoll/v1/session")
        assert json.loads(before.body)["login"]["link"] is False
        browser = await bench.logged_in("atoll-notebook")
        await open_pages(bench, browser, 2, [0] * 2)
        seen = [r for r in bench.gateway.seen if r.path.endswith(b"/atoll/v1/live")]
        assert [r.headers[b"authorization"] for r in seen] == [b"Bearer atoll-notebook"]


async def test_a_gateway_that_goes_and_comes_back(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        browser = await bench.logged_in()
        port = int(bench.gateway.url.rpartition(":")[2])
        text = b""
        again: FakeGateway | None = None
        async with browser.stream("/atoll/v1/live") as answer:
            async for piece in answer.pieces(30.0):
                text += piece
                if again is None and b'"gateway": "up"' in text:
                    await bench.gateway.close()
                    again = FakeGateway(interval_s=0.05)
                    again.token = bench.gateway.token
                    await again.start(port)
                down, _, later = text.partition(b'"gateway": "down"')
                if down and b'"gateway": "up"' in later:
                    break
        assert again is not None
        assert again.live_count == 1
        await again.close()
