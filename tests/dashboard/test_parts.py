"""Sessions, limits, hosts, cookies, links, files and events, each by itself."""

from __future__ import annotations

import asyncio
import gzip
import os
import time
from pathlib import Path

import pytest

from atoll.core.errors import InputError
from atoll.core.roles import read_role
from atoll.dashboard.headers import KnownHosts, read_cookie, select_sent, write_cookie
from atoll.dashboard.links import LoginLinks
from atoll.dashboard.live import EventParser, LivePage
from atoll.dashboard.sessions import LoginLimiter, LoginSession, SessionStore
from atoll.dashboard.static import StaticFiles
from atoll.dashboard.trust import ProxyTrust, read_network
from atoll.runtime.http.http_server import Request
from atoll.runtime.openai import ApiError


def make_session() -> LoginSession:
    return LoginSession("key", "notebook", "member", key="atoll-secret")


class TestSessions:
    def test_only_the_hash_of_an_id_is_kept(self) -> None:
        store = SessionStore()
        text, _ = store.add(make_session(), 0.0)
        assert len(text) >= 43  # 256 bits
        assert text not in repr(vars(store))
        assert store.find(text, 1.0) is not None

    def test_one_that_is_not_used_ends(self) -> None:
        store = SessionStore(idle_s=10.0, absolute_s=25.0)
        text, _ = store.add(make_session(), 0.0)
        assert store.find(text, 9.0) is not None
        assert store.find(text, 19.5) is None

    def test_one_that_is_used_ends_too(self) -> None:
        store = SessionStore(idle_s=10.0, absolute_s=25.0)
        text, _ = store.add(make_session(), 0.0)
        for now_s in (8.0, 16.0, 24.0):
            assert store.find(text, now_s) is not None
        assert store.find(text, 26.0) is None
        assert len(store.expire(26.0)) == 1
        assert len(store) == 0

    def test_the_one_unused_for_longest_makes_room(self) -> None:
        store = SessionStore(most=2)
        first, _ = store.add(make_session(), 0.0)
        second, _ = store.add(make_session(), 1.0)
        store.find(first, 2.0)
        third, gone = store.add(make_session(), 3.0)
        assert [store.find(text, 4.0) is not None for text in (first, second, third)] == [
            True,
            False,
            True,
        ]
        assert gone[0].ended
        assert gone[0].key is None

    def test_secrets_are_not_shown(self) -> None:
        session = make_session()
        assert "atoll-secret" not in repr(session)
        assert session.csrf not in repr(session)

    def test_another_csrf_token_is_refused(self) -> None:
        session = make_session()
        session.check_csrf(session.csrf.encode())
        for token in (None, b"", b"x", make_session().csrf.encode()):
            with pytest.raises(ApiError, match="x-csrf-token"):
                session.check_csrf(token)


def test_logins_fail_so_often_and_no_more() -> None:
    limiter = LoginLimiter(tries=3, per_s=0.1)
    limiter.try_once("10.0.0.1", 0.0)
    limiter.note_success("10.0.0.1", 0.0)
    for _ in range(3):
        limiter.try_once("10.0.0.1", 0.0)
    with pytest.raises(ApiError) as caught:
        limiter.try_once("10.0.0.1", 0.0)
    assert caught.value.status == 429
    assert caught.value.retry_after_s == 11
    limiter.try_once("10.0.0.2", 0.0)
    limiter.try_once("10.0.0.1", 11.0)


def test_who_has_logged_in_is_not_locked_out_by_others_at_the_same_address() -> None:
    limiter = LoginLimiter(tries=3, per_s=0.1)
    limiter.try_once("10.0.0.1", 0.0, "good")
    limiter.note_success("10.0.0.1", 0.0, "good")
    for number in range(3):
        limiter.try_once("10.0.0.1", 0.0, f"wrong-{number}")
    for _ in range(5):
        limiter.try_once("10.0.0.1", 0.0, "good")
        limiter.note_success("10.0.0.1", 0.0, "good")
        with pytest.raises(ApiError):
            limiter.try_once("10.0.0.1", 0.0, "wrong")
    # Once it is no good any more, it waits like others.
    limiter.try_once("10.0.0.1", 0.0, "good")
    with pytest.raises(ApiError):
        limiter.try_once("10.0.0.1", 0.0, "good")


class TestHosts:
    @pytest.mark.parametrize("host", ["127.0.0.1:8090", "localhost:8090", "[::1]:8090"])
    def test_loopback_has_its_names(self, host: str) -> None:
        KnownHosts("127.0.0.1", 8090).check_host({b"host": host.encode()})

    @pytest.mark.parametrize(
        "host", ["", "evil.example:8090", "127.0.0.1", "127.0.0.1:80", "10.0.0.7:8090"]
    )
    def test_other_names_are_refused(self, host: str) -> None:
        with pytest.raises(ApiError) as caught:
            KnownHosts("127.0.0.1", 8090).check_host({b"host": host.encode()})
        assert caught.value.status == 421

    def test_all_addresses_but_no_name(self) -> None:
        hosts = KnownHosts("0.0.0.0", 8090)
        assert hosts.includes("10.0.0.7:8090")
        assert hosts.includes("[fe80::1]:8090")
        assert not hosts.includes("evil.example:8090")
        assert not hosts.includes("10.0.0.7:9000")

    def test_a_public_url_is_one(self) -> None:
        hosts = KnownHosts("127.0.0.1", 8090, ("https://atoll.lab.example/",))
        assert hosts.includes("atoll.lab.example")
        assert hosts.includes("Atoll.lab.example:443")
        assert not hosts.includes("atoll.lab.example:8090")

    @pytest.mark.parametrize(
        ("headers", "allowed"),
        [
            ({b"origin": b"http://127.0.0.1:8090"}, True),
            ({b"sec-fetch-site": b"same-origin"}, True),
            ({b"origin": b"http://127.0.0.1:8090", b"sec-fetch-site": b"same-origin"}, True),
            ({}, False),
            ({b"origin": b"null"}, False),
            ({b"origin": b"https://evil.example"}, False),
            ({b"origin": b"http://127.0.0.1:8091"}, False),
            ({b"sec-fetch-site": b"same-site"}, False),
            ({b"origin": b"http://127.0.0.1:8090", b"sec-fetch-site": b"cross-site"}, False),
        ],
    )
    def test_only_our_pages_may_change_things(
        self, headers: dict[bytes, bytes], allowed: bool
    ) -> None:
        hosts = KnownHosts("127.0.0.1", 8090)
        if allowed:
            hosts.check_origin(headers)
        else:
            with pytest.raises(ApiError):
                hosts.check_origin(headers)


def test_only_listed_headers_are_sent_on() -> None:
    sent = select_sent(
        {
            b"content-type": b"application/json",
            b"x-atoll-events": b"1",
            b"x-atoll-node": b"lab/gpu1",
            b"x-atoll-role": b"admin",
            b"x-atoll-owner": b"root",
            b"authorization": b"Bearer mine",
            b"cookie": b"atoll_session=1",
            b"x-forwarded-user": b"root",
            b"x-csrf-token": b"1",
            b"host": b"h",
        }
    )
    assert sorted(sent) == ["content-type", "x-atoll-events", "x-atoll-node"]


def test_cookies() -> None:
    name, value = write_cookie("atoll_session", "abc", max_age_s=60, secure=False)
    assert name == "set-cookie"
    assert value == "atoll_session=abc; Path=/; HttpOnly; SameSite=Strict; Max-Age=60"
    assert write_cookie("atoll_session", "abc", max_age_s=60, secure=True)[1].endswith("; Secure")
    called = "atoll_session"
    assert read_cookie({b"cookie": b"a=1; atoll_session=abc; b=2"}, called) == "abc"
    assert read_cookie({b"cookie": b"a=1"}, called) is None
    assert read_cookie({b"cookie": b'\xff="'}, called) is None
    assert read_cookie({}, called) is None


class TestLinks:
    def test_good_once(self, tmp_path: Path) -> None:
        links = LoginLinks(tmp_path / "links")
        token = links.make()
        assert token not in "".join(path.name for path in tmp_path.rglob("*"))
        assert (tmp_path / "links").stat().st_mode & 0o777 == 0o700
        assert LoginLinks(tmp_path / "links").use(token)  # of whichever process
        assert not links.use(token)

    def test_not_for_long(self, tmp_path: Path) -> None:
        links = LoginLinks(tmp_path / "links", valid_s=600.0)
        token = links.make()
        (path,) = (tmp_path / "links").iterdir()
        os.utime(path, (time.time() - 601, time.time() - 601))
        assert not links.use(token)
        assert not path.exists()

    @pytest.mark.parametrize("token", ["", "x", "../dashboard.json", "é" * 43, "a" * 43])
    def test_not_others(self, tmp_path: Path, token: str) -> None:
        links = LoginLinks(tmp_path / "links")
        links.make()
        assert not links.use(token)


class TestStatic:
    @pytest.fixture
    def files(self, tmp_path: Path) -> StaticFiles:
        (tmp_path / "secret.txt").write_text("not to be served")
        pages = tmp_path / "static"
        (pages / "js").mkdir(parents=True)
        (pages / "index.html").write_text("<!doctype html><title>Atoll</title>" + " " * 500)
        (pages / "js" / "app.js").write_text("export const answer = 42;\n" * 100)
        (pages / "notes.bin").write_text("of no known type")
        return StaticFiles(pages)

    def test_only_what_is_there_and_known(self, files: StaticFiles) -> None:
        assert files.names == ("index.html", "js/app.js")
        for name in (
            "../secret.txt",
            "js/../../secret.txt",
            "%2e%2e/secret.txt",
            "/etc/passwd",
            "js",
            "notes.bin",
            "",
        ):
            with pytest.raises(ApiError) as caught:
                files.serve(name, {})
            assert caught.value.status == 404

    def test_packed_for_who_takes_it(self, files: StaticFiles) -> None:
        plain = files.serve("js/app.js", {})
        packed = files.serve("js/app.js", {b"accept-encoding": b"br, gzip"})
        assert ("content-encoding", "gzip") in packed.headers
        assert gzip.decompress(packed.body) == plain.body
        assert len(packed.body) < len(plain.body) / 10
        refused = files.serve("js/app.js", {b"accept-encoding": b"gzip;q=0"})
        assert refused.body == plain.body
        assert plain.content_type == "text/javascript; charset=utf-8"

    def test_not_sent_twice(self, files: StaticFiles) -> None:
        first = files.serve("js/app.js", {b"accept-encoding": b"gzip"})
        tag = dict(first.headers)["etag"].encode()
        again = files.serve("js/app.js", {b"accept-encoding": b"gzip", b"if-none-match": tag})
        assert again.status == 304
        other = files.serve("js/app.js", {b"if-none-match": tag})
        assert other.status == 200  # packed and plain are two things

    def test_nothing_installed_is_a_page_too(self, tmp_path: Path) -> None:
        assert b"<!doctype html>" in StaticFiles(tmp_path / "none").serve_index({}).body


class TestTrust:
    def make_request(self, peer: str, **headers: str) -> Request:
        lines = {k.replace("_", "-").encode(): v.encode() for k, v in headers.items()}
        made = Request(b"GET", b"/atoll/v1/session", lines)
        made.peer = peer
        return made

    def trust(self) -> ProxyTrust:
        return ProxyTrust(
            proxies=(read_network("10.0.0.7"), read_network("fd00::/8")),
            header="X-Forwarded-User",
            role_header="X-Forwarded-Groups",
            roles={"admins": "admin", "lab": "member"},
        )

    def test_only_the_proxy_is_believed(self) -> None:
        trust = self.trust()
        for peer, known in (
            ("10.0.0.7", True),
            ("10.0.0.8", False),
            ("fd00::1", True),
            ("", False),
        ):
            said = self.make_request(peer, x_forwarded_user="ada@lab.example")
            assert (trust.identify(said) is not None) == known
        mapped = self.make_request("::ffff:10.0.0.7", x_forwarded_user="ada@lab.example")
        assert trust.identify(mapped) is not None

    @pytest.mark.parametrize(
        ("groups", "role"),
        [("lab, admins", "admin"), ("lab", "member"), ("other", "viewer"), ("", "viewer")],
    )
    def test_the_highest_role_of_all_groups(self, groups: str, role: str) -> None:
        said = self.make_request("10.0.0.7", x_forwarded_user="ada", x_forwarded_groups=groups)
        visitor = self.trust().identify(said)
        assert visitor is not None
        assert visitor.role == role

    def test_off_by_default(self) -> None:
        assert ProxyTrust().identify(self.make_request("127.0.0.1", x_forwarded_user="a")) is None

    def test_https_and_addresses_by_the_proxys_word_only(self) -> None:
        trust = self.trust()
        headers = {"x_forwarded_proto": "https", "x_forwarded_for": "6.6.6.6, 1.2.3.4"}
        proxied = self.make_request("10.0.0.7", **headers)
        direct = self.make_request("10.0.0.9", **headers)
        assert trust.came_by_https(proxied)
        assert trust.client(proxied) == "1.2.3.4"
        assert not trust.came_by_https(direct)
        assert trust.client(direct) == "10.0.0.9"

    def test_what_is_wrong_is_said(self) -> None:
        with pytest.raises(InputError, match="no role"):
            read_role("king")
        with pytest.raises(InputError, match="no address"):
            read_network("proxy.example")


def test_events_are_read_however_they_are_cut() -> None:
    stream = (
        b"retry: 1\n\n: hello\n\nevent: snapshot\r\ndata: {}\r\n\r\ndata: a\ndata:b\n\nevent: x\n\n"
    )
    for size in (1, 3, 1000):
        parser = EventParser()
        found = []
        for at in range(0, len(stream), size):
            found += parser.feed(stream[at : at + size])
        assert found == [(b"snapshot", b"{}"), (b"message", b"a\nb")]


def test_a_slow_page_is_told_the_newest_only() -> None:
    async def play() -> bytes:
        page = LivePage(make_session())
        for number in range(10_000):
            page.put("gateway", b"event: gateway\ndata: %d\n\n" % number)
        page.put("health", b"event: health\ndata: {}\n\n")
        assert len(page.waiting) == 2
        return page.take()

    assert asyncio.run(play()) == b"event: gateway\ndata: 9999\n\nevent: health\ndata: {}\n\n"
