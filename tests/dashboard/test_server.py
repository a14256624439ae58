"""The dashboard as browsers see it: logging in, staying in, being kept out."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import pytest

from atoll.dashboard.server import DashboardSettings
from atoll.dashboard.sessions import IDLE_S
from atoll.dashboard.trust import ProxyTrust, read_network
from tests.dashboard.bench import Bench, Browser, error_code, open_bench, until
from tests.dashboard.fakes import FakeGateway


async def is_nobody(browser: Browser) -> bool:
    answer = await browser.ask("GET", "/atoll/v1/session")
    return answer.status == 200 and json.loads(answer.body)["role"] is None


async def test_logging_in_with_a_key(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        browser = bench.browser()
        before = await browser.ask("GET", "/atoll/v1/session")
        assert before.status == 200
        said = json.loads(before.body)
        assert said["role"] is None
        assert said["login"] == {"key": True, "link": True, "header": False}
        assert said["fresh"] is False
        answer = await browser.log_in(key="atoll-notebook")
        assert answer.status == 200
        cookie = answer.headers["set-cookie"]
        assert cookie.startswith(f"atoll_session_{bench.port}=")
        assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(cookie.split("; "))
        assert "Secure" not in cookie
        session = json.loads(answer.body)
        assert session["name"] == "notebook"
        assert session["owner"] == "ada@lab.example"
        assert session["role"] == "member"
        assert session["base_url"] == f"{bench.gateway.url}/v1"
        assert session["planner"] is True
        assert b"atoll-notebook" not in answer.body
        again = await browser.ask("GET", "/atoll/v1/session")
        assert json.loads(again.body) == session
        assert "set-cookie" not in again.headers


async def test_a_link_logs_in_once(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        token = bench.links.make()
        first = await bench.browser().log_in(token=token)
        assert json.loads(first.body)["role"] == "admin"
        second = await bench.browser().log_in(token=token)
        assert second.status == 401
        assert error_code(second) == "invalid_api_key"


async def test_a_link_that_is_used_up_logs_nobody_out(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        browser = bench.browser()
        token = bench.links.make()
        await browser.log_in(token=token)
        again = await browser.log_in(token=token)
        assert again.status == 401
        assert "set-cookie" not in again.headers
        assert not await is_nobody(browser)


async def test_logging_in_again_ends_the_session_before(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        browser = await bench.logged_in("atoll-notebook")
        old = browser.cookie
        await browser.log_in(key="atoll-root")
        assert browser.cookie != old
        browser.cookie = old
        assert await is_nobody(browser)
        assert len(bench.dashboard.sessions) == 1


async def test_logging_out(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        browser = await bench.logged_in("atoll-notebook")
        refused = await browser.ask("DELETE", "/atoll/v1/session", without=("x-csrf-token",))
        assert (refused.status, error_code(refused)) == (403, "csrf")
        cookie = browser.cookie
        answer = await browser.ask("DELETE", "/atoll/v1/session")
        assert answer.status == 200
        assert "Max-Age=0" in answer.headers["set-cookie"]
        browser.cookie = cookie
        assert (await browser.ask("GET", "/atoll/v1/me")).status == 401


async def test_sessions_end_when_nobody_uses_them(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        browser = await bench.logged_in("atoll-notebook")
        bench.clock.now_s += IDLE_S + 1
        assert await is_nobody(browser)


async def test_failed_logins_are_limited(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        browser = bench.browser()
        codes = [(await browser.log_in(key=f"atoll-{n}")).status for n in range(12)]
        assert codes == [401] * 10 + [429] * 2
        # A key that is good is refused too: nobody learns which one it was.
        limited = await browser.log_in(key="atoll-root")
        assert limited.status == 429
        assert int(limited.headers["retry-after"]) > 0
        bench.clock.now_s += 60.0
        assert (await browser.log_in(key="atoll-root")).status == 200


async def test_a_revoked_key_ends_its_session(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        for path in ("/atoll/v1/models", "/atoll/v1/keys", "/v1/models"):
            key = bench.gateway.keys[0]
            key["state"] = "active"
            browser = await bench.logged_in("atoll-notebook")
            assert (await browser.ask("GET", path)).status == 200
            key["state"] = "revoked"
            bench.clock.now_s += 11.0  # for so long a key is not asked about again
            answer = await browser.ask("GET", path)
            assert (answer.status, error_code(answer)) == (401, "key_over")
            assert "login" in json.loads(answer.body)
            assert len(bench.dashboard.sessions) == 0
            key["state"] = "active"
            assert (await browser.ask("GET", path)).status == 401


async def test_who_asks_with_a_revoked_key_is_told_why(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        browser = await bench.logged_in("atoll-notebook")
        bench.gateway.keys[0]["state"] = "revoked"
        answer = await browser.ask("GET", "/atoll/v1/session")
        assert json.loads(answer.body)["role"] is None
        assert json.loads(answer.body)["message"] == "the key was revoked or has expired"
        assert "Max-Age=0" in answer.headers["set-cookie"]


async def test_what_changes_things_needs_the_token_and_our_origin(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        browser = await bench.logged_in("atoll-root")
        body = {"name": "new"}
        path = "/atoll/v1/keys"
        no_token = await browser.ask("POST", path, body, without=("x-csrf-token",))
        assert (no_token.status, error_code(no_token)) == (403, "csrf")
        other = await bench.logged_in("atoll-root")
        foreign = await browser.ask("POST", path, body, x_csrf_token=other.csrf)
        assert foreign.status == 403
        for origin in ("https://evil.example", "null", bench.url + "1"):
            answer = await browser.ask("POST", path, body, origin=origin)
            assert (answer.status, error_code(answer)) == (403, "foreign_origin")
        silent = await browser.ask("POST", path, body, without=("origin",))
        assert silent.status == 403
        login = await bench.browser().ask(
            "POST", "/atoll/v1/session", {"key": "atoll-root"}, origin="https://evil.example"
        )
        assert login.status == 403
        form = await bench.browser().ask(
            "POST", "/atoll/v1/session", {"key": "atoll-root"}, content_type="text/plain"
        )
        assert form.status == 415
        assert len(bench.gateway.keys) == 6
        assert (await browser.ask("POST", path, body)).status == 201


async def send(bench: Bench, text: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(bench.url.rpartition(":")[2]))
    writer.write(text.replace("\n", "\r\n").encode())
    async with asyncio.timeout(30.0):
        answer = await reader.read()
    writer.close()
    return answer


async def test_other_names_for_this_machine_are_refused(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        browser = await bench.logged_in()
        for path in (
            "/",
            "/atoll/v1/session",
            "/atoll/v1/me",
            "/atoll/v1/live",
            "/static/index.html",
        ):
            text = (
                f"GET {path} HTTP/1.1\nhost: evil.example\n"
                f"cookie: {browser.cookie_name}={browser.cookie}\nconnection: close\n\n"
            )
            answer = await send(bench, text)
            assert answer.startswith(b"HTTP/1.1 421 "), path
            assert b"content-security-policy" in answer


async def test_large_bodies_come_only_of_who_is_logged_in(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        host = bench.url.removeprefix("http://")
        head = f"host: {host}\norigin: {bench.url}\ncontent-length: 30000000\n"
        answer = await send(bench, f"POST /atoll/v1/traces HTTP/1.1\n{head}\nabc")
        assert answer.startswith(b"HTTP/1.1 401 ")
        answer = await send(bench, f"POST /atoll/v1/session HTTP/1.1\n{head}\nabc")
        assert answer.startswith(b"HTTP/1.1 413 ")


async def test_every_answer_is_careful(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        browser = await bench.logged_in()
        for path in (
            "/",
            "/models",
            "/nothing.js",
            "/static/none.js",
            "/healthz",
        ):
            answer = await browser.ask("GET", path)
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self';"), path
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"
            assert answer.headers["cross-origin-opener-policy"] == "same-origin"
            assert "microphone=(self)" in answer.headers["permissions-policy"]
        for path in ("/atoll/v1/models", "/atoll/v1/session"):
            data = await browser.ask("GET", path)
            assert "sandbox" in data.headers["content-security-policy"]
            assert data.headers["cache-control"] == "no-store"
        report = await browser.ask("GET", "/atoll/v1/reports/r-77aa")
        policy = report.headers["content-security-policy"]
        assert policy.startswith("sandbox allow-scripts; default-src 'none';")
        assert "frame-ancestors 'self'" in policy
        assert "allow-same-origin" not in policy


async def test_pages(tmp_path: Path) -> None:
    static = tmp_path / "static"
    static.mkdir()
    (static / "index.html").write_text("<!doctype html>the page")
    (tmp_path / "secret.txt").write_text("secret")

    async with open_bench(tmp_path, DashboardSettings(static=static)) as bench:
        browser = bench.browser()
        for path in ("/", "/keys", "/plan/lab"):
            answer = await browser.ask("GET", path)
            assert (answer.status, answer.body) == (200, b"<!doctype html>the page"), path
        for path in (
            "/secret.txt",
            "/static/../secret.txt",
            "/static/%2e%2e/secret.txt",
            "/x.js",
        ):
            assert (await browser.ask("GET", path)).status == 404, path
        page = await browser.ask("GET", "/static/index.html")
        assert page.status == 200
        known = await browser.ask("GET", "/static/index.html", if_none_match=page.headers["etag"])
        assert (known.status, known.body) == (304, b"")
        assert known.headers["content-length"] == str(len(page.body))
        assert (await browser.ask("POST", "/keys", {})).status == 405
        assert json.loads((await browser.ask("GET", "/healthz")).body)["status"] == "ok"


async def test_a_fresh_install(tmp_path: Path) -> None:
    async with open_bench(tmp_path, missing=True) as bench:
        browser = bench.browser()
        before = json.loads((await browser.ask("GET", "/atoll/v1/session")).body)
        assert before["fresh"] is True
        assert before["login"] == {"key": False, "link": True, "header": False}
        await browser.log_in(token=bench.links.make())
        session = json.loads((await browser.ask("GET", "/atoll/v1/session")).body)
        assert (session["gateway"], session["base_url"], session["planner"]) == (
            None,
            None,
            False,
        )
        for path, code in (
            ("/atoll/v1/models", "no_gateway"),
            ("/atoll/v1/fleets", "no_planner"),
        ):
            answer = await browser.ask("GET", path)
            assert (answer.status, error_code(answer)) == (503, code)


def proxied(**changes: object) -> DashboardSettings:
    trust = ProxyTrust(
        proxies=(read_network("127.0.0.1"),),
        header="X-Forwarded-User",
        role_header="X-Forwarded-Groups",
        roles={"admins": "admin", "lab": "member"},
    )
    return DashboardSettings(trust=trust, public_urls=("https://atoll.lab.example",))


async def test_logged_in_by_a_proxy(tmp_path: Path) -> None:
    async with open_bench(tmp_path, proxied()) as bench:
        said = {"x_forwarded_user": "ada@lab.example", "x_forwarded_groups": "lab"}
        browser = bench.browser(**said, x_forwarded_proto="https")
        browser.extra["origin"] = "https://atoll.lab.example"
        answer = await browser.ask("GET", "/atoll/v1/session")
        session = json.loads(answer.body)
        assert (session["name"], session["role"]) == ("ada@lab.example", "member")
        assert answer.headers["set-cookie"].endswith("; Secure")
        browser.csrf = session["csrf"]
        listed = json.loads((await browser.ask("GET", "/atoll/v1/keys")).body)
        assert {key["name"] for key in listed["keys"]} == {"notebook", "pipeline"}
        seen = bench.gateway.seen[-1].headers
        assert seen[b"x-atoll-role"] == b"member"
        assert seen[b"x-atoll-owner"] == b"ada@lab.example"
        made = await browser.ask("POST", "/atoll/v1/keys", {"name": "x"})
        assert (made.status, error_code(made)) == (403, "role_forbids")
        # The cookie alone is nobody: the proxy has to go on saying so, and the same.
        browser.extra.pop("x-forwarded-user")
        assert (await browser.ask("GET", "/atoll/v1/keys")).status == 401
        browser.extra["x-forwarded-user"] = "eve@lab.example"
        assert (await browser.ask("GET", "/atoll/v1/keys")).status == 401


async def test_a_header_of_anybody_else_is_nothing(tmp_path: Path) -> None:
    trust = ProxyTrust(proxies=(read_network("10.0.0.7"),), header="X-Forwarded-User")

    for settings in (DashboardSettings(trust=trust), DashboardSettings()):
        async with open_bench(tmp_path, settings) as bench:
            browser = bench.browser(x_forwarded_user="root@lab.example")
            assert await is_nobody(browser)
            assert bench.gateway.seen == []


def test_no_secret_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def play() -> list[str]:
        async with open_bench(tmp_path) as bench:
            token = bench.links.make()
            secrets = ["atoll-notebook", "atoll-wrong-one", token, bench.gateway.token]
            browser = await bench.logged_in("atoll-notebook")
            secrets += [browser.cookie, browser.csrf]
            await bench.browser().log_in(key="atoll-wrong-one")
            by_link = bench.browser()
            await by_link.log_in(token=token)
            body = {"model": "qwen3-32b", "messages": [{"role": "user", "content": "my prompt"}]}
            assert (await by_link.ask("POST", "/v1/chat/completions", body)).status == 200
            secrets += [by_link.cookie, by_link.csrf, "my prompt"]
            secrets += [text for text in bench.gateway.secrets if len(text) > 20]
            await bench.gateway.close()
            await browser.ask("GET", "/atoll/v1/models")
            await by_link.ask("DELETE", "/atoll/v1/session")
            await until(lambda: not bench.dashboard._tasks or len(bench.dashboard._tasks) == 1)
            return secrets

    for secret in asyncio.run(play()):
        assert secret not in caplog.text
    assert "is logged in by key" in caplog.text


async def test_an_open_gateway_needs_no_key(tmp_path: Path) -> None:
    gateway = FakeGateway(keys_needed=False, token_s=0.0)
    async with open_bench(tmp_path, gateway=gateway) as bench:
        browser = await bench.logged_in()
        body = {"model": "qwen3-32b", "messages": []}
        assert (await browser.ask("POST", "/v1/chat/completions", body)).status == 200
        assert b"authorization" not in gateway.seen[-1].headers
        assert len(gateway.keys) == 6
