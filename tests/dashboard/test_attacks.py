"""The dashboard against those who mean it ill: members, other pages, other programs of the machine."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest

from atoll.dashboard import proxy
from atoll.dashboard.headers import KnownHosts, name_cookie, read_cookie, write_cookie
from atoll.dashboard.server import DashboardSettings
from atoll.dashboard.sessions import LoginSession, SessionStore
from atoll.dashboard.trust import ProxyTrust, read_network
from atoll.runtime.openai import ApiError
from tests.dashboard.bench import Bench, Browser, error_code, open_bench, until

APPROVE = "/atoll/v1/fleets/lab/next"
WHAT_IF = {"fleet": "lab", "demand": {"chat": 1.5}}


async def send(bench: Bench, *lines: str, body: str = "") -> bytes:
    """Send a request as it is written, and read until the dashboard closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", bench.port)
    length = f"content-length: {len(body)}"
    writer.write("\r\n".join([*lines, length, "connection: close", "", body]).encode())
    async with asyncio.timeout(30.0):
        answer = await reader.read()
    writer.close()
    return answer


# Keys


def key_named(bench: Bench, name: str) -> dict[str, object]:
    return next(key for key in bench.gateway.keys if key["name"] == name)


async def test_a_revoked_key_has_no_plan_approved(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        browser = await bench.logged_in("atoll-root")
        key_named(bench, "root")["state"] = "revoked"
        asked = len(bench.planner.seen)
        answer = await browser.ask("POST", APPROVE, {"id": "c41d", "approve": True})
        assert answer.status == 401
        assert len(bench.planner.seen) == asked
        assert len(bench.dashboard.sessions) == 0


async def test_a_revoked_key_does_not_look_for_long(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        browser = await bench.logged_in("atoll-notebook")
        key_named(bench, "notebook")["state"] = "revoked"
        bench.clock.now_s += 11.0
        assert (await browser.ask("GET", "/atoll/v1/fleets")).status == 401


async def test_an_admin_that_is_one_no_more_has_no_plan_approved(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        browser = await bench.logged_in("atoll-root")
        key_named(bench, "root")["role"] = "viewer"
        answer = await browser.ask("POST", APPROVE, {"id": "c41d", "approve": True})
        assert answer.status == 403
        assert bench.planner.roles[-1] == "viewer"


async def test_an_owner_may_be_called_anything(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        key_named(bench, "notebook")["owner"] = "李 Zoë"
        browser = await bench.logged_in("atoll-notebook")
        assert (await browser.ask("GET", "/atoll/v1/fleets")).status == 200
        assert bench.planner.owners[-1] == "李 Zoë"


# Logging in


async def test_guesses_at_the_same_time_are_counted(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        browsers = [bench.browser() for _ in range(40)]
        tries = [b.log_in(key=f"atoll-{n}") for n, b in enumerate(browsers)]
        statuses = Counter(answer.status for answer in await asyncio.gather(*tries))
        assert statuses == {401: 10, 429: 30}


async def test_guesses_of_others_do_not_lock_the_owner_out(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        tries = [await bench.browser().log_in(key=f"atoll-{n}") for n in range(11)]
        assert tries[-1].status == 429
        assert (await bench.browser().log_in(token=bench.links.make())).status == 200


async def test_a_gateway_that_is_away_is_no_wrong_guess(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        await bench.gateway.close()
        codes = [(await bench.browser().log_in(key="atoll-root")).status for _ in range(12)]
        assert codes == [502] * 12


async def test_a_link_tried_by_many_at_once_lets_one_in(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        token = bench.links.make()
        tries = [bench.browser().log_in(token=token) for _ in range(8)]
        statuses = Counter(answer.status for answer in await asyncio.gather(*tries))
        assert statuses == {200: 1, 401: 7}


def test_logging_in_again_and_again_pushes_nobody_out() -> None:
    store = SessionStore(most=10, max_of_one=3)
    other, _ = store.add(LoginSession("key", "bob", "member", key="atoll-bob"), 0.0)
    made = [
        store.add(LoginSession("key", "eve", "member", key="atoll-eve"), float(n))
        for n in range(1, 50)
    ]
    assert len(store) == 4
    assert store.find(other, 50.0) is not None
    assert [store.find(text, 50.0) is not None for text, _ in made[-4:]] == [False, *[True] * 3]
    assert sum(len(gone) for _, gone in made) == 46


# Taking all there is


async def test_one_person_does_not_take_all_pages(tmp_path: Path) -> None:
    async with open_bench(tmp_path, DashboardSettings(max_pages=4)) as bench:
        eve, other = await bench.logged_in("atoll-notebook"), await bench.logged_in()
        again = await bench.logged_in("atoll-notebook")
        async with eve.stream("/atoll/v1/live") as first:
            assert first.status == 200
            for browser in (eve, again):
                second = await browser.ask("GET", "/atoll/v1/live")
                assert (second.status, error_code(second)) == (503, "too_many_pages")
            async with other.stream("/atoll/v1/live") as answer:
                assert answer.status == 200


async def test_one_person_does_not_take_the_whole_planner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "_BEAT_S", 0.02)

    async with open_bench(tmp_path) as bench:
        bench.planner.step_s = 30.0
        eve, other = await bench.logged_in("atoll-notebook"), await bench.logged_in()
        again = await bench.logged_in("atoll-notebook")
        running = [asyncio.create_task(ask_for_long(eve)) for _ in range(4)]
        asking = bench.dashboard._forwarder._asking
        await until(lambda: sum(each.count for each in asking.values()) == 4)
        await until(lambda: sum(r.path.endswith(b"whatif") for r in bench.planner.seen) == 2)
        for browser in (eve, again):
            refused = await browser.ask("POST", "/atoll/v1/whatif", WHAT_IF)
            assert (refused.status, error_code(refused)) == (429, "too_many_questions")
        async with other.stream("/atoll/v1/whatif", "POST", WHAT_IF) as answer:
            assert answer.status == 200
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        bench.planner.step_s = 0.001
        await until(lambda: not bench.dashboard.listener.running)
        assert (await eve.ask("POST", "/atoll/v1/whatif", WHAT_IF)).status == 200


async def ask_for_long(browser: Browser) -> None:
    async with browser.stream("/atoll/v1/whatif", "POST", WHAT_IF) as answer:
        async for _ in answer.pieces(60.0):
            pass


# Other pages and programs


@pytest.mark.parametrize(
    ("host", "origin", "good"),
    [
        ("10.0.0.5:8090", "http://10.0.0.5:8090", True),
        ("localhost:8090", "http://127.0.0.1:8090", True),
        ("10.0.0.5:8090", "http://6.6.6.6:8090", False),
        ("10.0.0.5:8090", "null", False),
        ("10.0.0.5:8090", "http://10.0.0.5:8090@evil.example", False),
        ("10.0.0.5:8090", "http://10.0.0.5:8090.evil.example", False),
        ("10.0.0.5:8090", "", False),
    ],
)
def test_a_page_at_another_address_is_foreign(host: str, origin: str, *, good: bool) -> None:
    known = KnownHosts("0.0.0.0", 8090)
    headers = {b"host": host.encode(), b"origin": origin.encode()}
    if good:
        known.check_origin(headers)
        return
    with pytest.raises(ApiError) as caught:
        known.check_origin(headers)
    assert caught.value.code == "foreign_origin"


def test_cookies_of_other_programs_are_no_matter() -> None:
    ours = name_cookie(8090, secure=False)
    assert name_cookie(8091, secure=False) != ours
    for others in ('a={"b": 1}', 'a="b', "a", "=", "\\", f"x{ours}=no", f"{ours}="):
        assert read_cookie({b"cookie": f"{others}; {ours}=abc; b=2".encode()}, ours) == "abc"
    held = name_cookie(8090, secure=True)
    assert held.startswith("__Host-")
    assert write_cookie(held, "abc", max_age_s=60, secure=True)[1].endswith("; Secure")


@pytest.mark.parametrize("name", ["origin", "x-csrf-token", "authorization", "host"])
async def test_headers_that_decide_are_there_once(tmp_path: Path, name: str) -> None:
    async with open_bench(tmp_path) as bench:
        browser = await bench.logged_in("atoll-notebook")
        said = {**browser.headers(), "host": f"127.0.0.1:{bench.port}", "authorization": "x"}
        lines = [f"{key}: {value}" for key, value in said.items()]
        doubled = f"{name.title()}: {said[name]}"
        first = "DELETE /atoll/v1/keys/x HTTP/1.1"
        assert (await send(bench, first, *lines)).startswith(b"HTTP/1.1 40") is True
        answer = await send(bench, first, doubled, *lines)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"is there twice" in answer


@pytest.mark.parametrize("name", ["X-Forwarded-User", "x-forwarded-groups"])
async def test_what_the_proxy_says_is_said_once(tmp_path: Path, name: str) -> None:
    trust = ProxyTrust(
        proxies=(read_network("127.0.0.1"),),
        header="X-Forwarded-User",
        role_header="X-Forwarded-Groups",
        roles={"admins": "admin"},
    )

    async with open_bench(tmp_path, DashboardSettings(trust=trust)) as bench:
        lines = (
            "GET /atoll/v1/session HTTP/1.1",
            f"host: 127.0.0.1:{bench.port}",
            "x-forwarded-user: ada@lab.example",
            "x-forwarded-groups: lab",
        )
        assert b'"role":"viewer"' in await send(bench, *lines)
        for at in (2, 4):
            forged = (*lines[:at], f"{name}: admins", *lines[at:])
            assert (await send(bench, *forged)).startswith(b"HTTP/1.1 400 ")


async def test_a_name_that_no_gateway_knows_is_nobody(tmp_path: Path) -> None:
    trust = ProxyTrust(proxies=(read_network("127.0.0.1"),), header="X-Forwarded-User")

    async with open_bench(tmp_path, DashboardSettings(trust=trust)) as bench:
        for letters, role in ((120, "viewer"), (121, None)):
            browser = bench.browser(x_forwarded_user="a" * letters)
            told = json.loads((await browser.ask("GET", "/atoll/v1/session")).body)
            assert told["role"] == role


@pytest.mark.parametrize(
    "path",
    [
        "//evil.example/",
        "/login?next=//evil.example",
        "/%2f%2fevil.example",
        "/static/%2e%2e/server.py",
        "/static/..%2f..%2fserver.py",
        "/atoll/v1//evil.example/atoll/v1/keys",
        "/atoll/v1/%2e%2e/%2e%2e/metrics",
        "/v1/%2e%2e/metrics",
        "/atoll/v1/me%0d%0ax-atoll-role:%20admin",
        "http://evil.example/atoll/v1/me",
    ],
)
async def test_no_path_leads_elsewhere(tmp_path: Path, path: str) -> None:
    async with open_bench(tmp_path) as bench:
        browser = await bench.logged_in("atoll-notebook")
        asked = len(bench.gateway.seen)
        said = {**browser.headers(), "host": f"127.0.0.1:{bench.port}"}
        lines = [f"{key}: {value}" for key, value in said.items()]
        answer = await send(bench, f"GET {path} HTTP/1.1", *lines)
        assert answer.split(b" ")[1] in (b"200", b"400", b"404")
        assert b"\r\nlocation:" not in answer.lower()
        assert b"from __future__" not in answer
        for seen in bench.gateway.seen[asked:]:
            assert seen.path.startswith(b"/atoll/v1/")
            assert b"x-atoll-role" not in seen.headers


async def test_what_a_service_answers_is_no_page_of_ours(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        browser = await bench.logged_in("atoll-notebook")
        for path in ("/atoll/v1/keys", "/atoll/v1/fleets", "/atoll/v1/reports/r-1"):
            answer = await browser.ask("GET", path)
            policy = answer.headers["content-security-policy"]
            assert "sandbox" in policy
            assert "allow-same-origin" not in policy
            assert answer.headers["cache-control"] == "no-store"
            assert "set-cookie" not in answer.headers
        session = json.loads((await browser.ask("GET", "/atoll/v1/session")).body)
        assert "atoll-notebook" not in json.dumps(session)
