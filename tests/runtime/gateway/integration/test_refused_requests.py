"""Requests that no further backend gets: poison, mistakes of clients that engines call their own; CORS."""

from __future__ import annotations

import asyncio
import json
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from atoll.runtime.gateway.cors import CorsSettings
from atoll.runtime.gateway.settings import GatewayLimits
from atoll.runtime.openai import FORMS, REQUESTS
from tests.runtime.gateway.engine import Fault, ScriptedEngine
from tests.runtime.gateway.harness import CHAT, COMPLETIONS, Bench, chat, read_reply, running


def faulty(*faults: list[Fault], **options: Any) -> AbstractAsyncContextManager[Bench]:
    """Run a gateway over an engine with each of these faults."""
    return running([ScriptedEngine(faults=list(f)) for f in faults or [[]]], **options)


def error_of(reply: Any) -> tuple[int, str]:
    return reply.status, reply.json["error"]["code"]


# Poison


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("what", ["die_before_head", "kept"])
async def test_what_two_backends_died_of_is_sent_to_no_third(stream: bool, what: str) -> None:
    faults = [Fault("die_before_head")] * 9 if what != "kept" else []
    async with faulty(*[faults] * 4) as bench:
        if what == "kept":
            # Connections that are kept are no excuse.
            for _ in range(4):
                assert (await bench.post(CHAT, chat("fine"))).status == 200
            for engine in bench.engines:
                engine.faults = [Fault("die_before_head")] * 9
        before = sum(len(e.seen) for e in bench.engines)
        killer = chat("killer", stream=stream)
        assert error_of(await bench.post(CHAT, killer)) == (422, "poison_request")
        seen = sum(len(e.seen) for e in bench.engines) - before
        # A kept connection that closes at once may have been closed before: that is tried once more.
        assert seen in ((2, 3) if what == "kept" else (2,))
        # It is known from now on, byte for byte.
        before = sum(len(e.seen) for e in bench.engines)
        assert error_of(await bench.post(CHAT, killer)) == (422, "poison_request")
        assert sum(len(e.seen) for e in bench.engines) == before
        for engine in bench.engines:
            engine.faults = []
        assert (await bench.post(CHAT, chat("something else"))).status == 200


async def test_where_backends_die_anyway_a_request_goes_on() -> None:
    async with faulty(*[[Fault("die_before_head")]] * 3, []) as bench:
        bench.gateway.deaths.note("another", bench.gateway.loop.time())
        assert (await bench.post(CHAT, chat())).status == 200
        assert sum(len(e.seen) for e in bench.engines) == 4


async def test_a_stream_that_had_begun_is_no_poison() -> None:
    async with faulty(*[[Fault("die", 1)]] * 3, []) as bench:
        reply = await bench.post(CHAT, chat("x y z", stream=True))
        assert reply.status == 200
        assert reply.text
        assert not bench.gateway.deaths.guilty


# Whose fault


@pytest.mark.parametrize("stream", [False, True])
async def test_a_mistake_that_an_engine_calls_its_own_is_the_clients(stream: bool) -> None:
    async with faulty(*[[Fault("bad_grammar")] * 9] * 2) as bench:
        for number in range(8):
            reply = await bench.post(CHAT, chat(f"{number}", stream=stream))
            assert error_of(reply) == (400, "engine_refused")
            assert reply.json["error"]["message"] == "failed to parse grammar"
        assert sum(len(e.seen) for e in bench.engines) == 8
        assert {m.state for m in bench.gateway.pool.members.values()} == {"up"}
        assert {m.failures for m in bench.gateway.pool.members.values()} == {0}


async def test_a_mistake_told_as_the_first_event_is_the_clients() -> None:
    async with faulty(*[[Fault("client_error_event")] * 9] * 2) as bench:
        reply = await bench.post(COMPLETIONS, {"model": "m", "prompt": "x", "stream": True})
        assert error_of(reply) == (400, "engine_refused")
        assert reply.json["error"]["message"] == "bad schema"
        assert sum(len(e.seen) for e in bench.engines) == 1


async def test_one_bad_request_ejects_nobody_however_often_it_comes() -> None:
    async with faulty(*[[Fault("500")] * 99] * 3) as bench:
        for _ in range(6):
            reply = await bench.post(CHAT, chat())
            assert error_of(reply) == (502, "upstream_error")
            assert "scripted" in reply.json["error"]["message"]
        assert {m.state for m in bench.gateway.pool.members.values()} == {"up"}
        assert (await bench.get("/ready")).status == 200


async def test_a_backend_that_fails_what_others_answer_is_ejected() -> None:
    async with faulty([Fault("500")] * 99, []) as bench:
        for _ in range(20):
            assert (await bench.post(CHAT, chat())).status == 200
        assert [m.state for m in bench.gateway.pool.members.values()] == ["ejected", "up"]


@pytest.mark.parametrize("status", ["400", "404", "413", "422"])
async def test_what_a_backend_says_the_client_did_is_passed_on(status: str) -> None:
    async with faulty(*[[Fault(status)] * 9] * 2) as bench:
        for _ in range(6):
            reply = await bench.post(CHAT, chat())
            assert reply.status == int(status)
            assert reply.json["error"]["message"] == "scripted"
        assert sum(len(e.seen) for e in bench.engines) == 6
        assert {m.failures for m in bench.gateway.pool.members.values()} == {0}


async def test_a_status_that_is_none_is_no_answer() -> None:
    async with faulty([Fault("999")], []) as bench:
        assert (await bench.post(CHAT, chat())).status == 200
        assert [len(e.seen) for e in bench.engines] == [1, 1]


# What the gateway knows is wrong


async def test_what_is_unusual_and_right_passes() -> None:
    async with faulty() as bench:
        bodies = [chat(top_p=0), chat(temperature=1e-320), chat(stop_token_ids=[1, 2], stop="x")]
        bodies.append(chat(messages=[{"role": "developer", "content": "x"}]))
        for body in bodies:
            assert (await bench.post(CHAT, body)).status == 200


async def test_nothing_a_client_says_becomes_a_header_of_its_own() -> None:
    async with faulty() as bench:
        for name in ("x-request-id", "traceparent", "tracestate"):
            for value in ("a\r\n\tx-injected: 1", "a\rx-injected: 1", "a\0b", "a\nx-injected: 1"):
                body = json.dumps(chat()).encode()
                head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n{name}: {value}\r\n"
                raw = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
                reply = await bench.ask(raw)
                assert reply.status in (200, 400), (name, value)
        reply = await bench.post(CHAT, chat(), f"tracestate: {'a' * 5000}\r\n")
        assert "tracestate" not in bench.engines[0].seen[-1].headers
        reply = await bench.post(CHAT, chat(model="m\r\nx-injected: 1"))
        assert reply.status == 404
        assert not any("x-injected" in seen.headers for seen in bench.engines[0].seen)
        assert "x-injected" not in reply.headers


# Clients that say no more, and clients that are gone


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_shuts_its_side_has_the_whole_answer(stream: bool) -> None:
    async with faulty() as bench:
        bench.engines[0].step_s = 0.01
        reader, writer = await asyncio.open_connection("127.0.0.1", bench.port)
        body = json.dumps(chat(stream=stream)).encode()
        writer.write(b"POST %b HTTP/1.1\r\nhost: x\r\n" % CHAT.encode())
        writer.write(b"content-length: %d\r\n\r\n%b" % (len(body), body))
        writer.write_eof()
        interim = b"HTTP/1.1 100 Continue\r\n\r\n"
        answered = asyncio.StreamReader()
        answered.feed_data((await reader.read()).replace(interim, b""))
        answered.feed_eof()
        reply = await read_reply(answered)
        assert reply.status == 200
        assert reply.text if stream else reply.json["choices"]
        writer.close()
        assert bench.records[0].outcome == "ok"


async def test_a_client_that_is_gone_costs_no_backend() -> None:
    async with faulty([Fault("stall_before")] * 9, attempts=1) as bench:
        _, writer = await asyncio.open_connection("127.0.0.1", bench.port)
        body = json.dumps(chat()).encode()
        writer.write(b"POST %b HTTP/1.1\r\nhost: x\r\n" % CHAT.encode())
        writer.write(b"content-length: %d\r\n\r\n%b" % (len(body), body))
        async with asyncio.timeout(60):
            while not bench.engines[0].running:
                await asyncio.sleep(0.01)
        writer.close()
        await bench.settled()
        assert [r.outcome for r in bench.records] == ["cancelled"]


# Administration

_PRIVATE = (
    "/atoll/v1/status",
    "/atoll/v1/backends",
    "/atoll/v1/routes",
    "/atoll/v1/traffic",
    "/atoll/v1/me",
    "/atoll/v1/keys",
    "/atoll/v1/usage",
    "/metrics",
)
_WRITINGS = (
    "{0}",
    "/{0}",
    "http://localhost{0}",
    "http://127.0.0.1:80{0}",
    "/v1/..{0}",
    "/services/x/../..{0}",
    "/./{0}",
    "{0}/",
    "{0}.",
    "{0}?x=/v1/models",
    "{0}%00",
    "{0};x",
)
_CLAIMS = (
    "x-forwarded-for: 127.0.0.1\r\nforwarded: for=127.0.0.1;host=localhost\r\nx-real-ip: 127.0.0.1\r\n"
    "x-atoll-role: admin\r\nx-atoll-owner: root\r\n"
    "x-original-url: {0}\r\nx-rewrite-url: {0}\r\nauthorization: Bearer \r\n"
)


@pytest.mark.parametrize("path", _PRIVATE)
async def test_nothing_of_the_administration_opens_on_the_public_port(path: str) -> None:
    written = [w.format(path) for w in _WRITINGS]
    written += [
        path.upper(),
        path.replace("a", "%61"),
        path.replace("/", "/%2e/"),
        "/%2f" + path[1:],
    ]
    async with faulty() as bench:
        for target in written:
            for method in ("GET", "POST", "DELETE"):
                reply = await bench.get(target, _CLAIMS.format(path), method)
                assert reply.status in (400, 401, 403, 404, 405), (method, target)
        assert list(bench.gateway.pool.members) == ["e0"]


async def test_every_route_says_what_it_is_to_strangers() -> None:
    """All that answers with more than an error to someone without a key or token is listed here."""
    paths = [*REQUESTS, *FORMS, *_PRIVATE, "/services/x/y", "/tokenize", "/detokenize"]
    paths += ["/health", "/ready", "/openapi.json", "/v1/models", "/v1/models/m", "/", "/docs"]
    async with faulty() as bench:
        opened = set()
        for path in paths:
            for method in ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"):
                if (await bench.get(path, method=method)).status < 400:
                    opened.add((method, path))
        pages = ("/health", "/ready", "/openapi.json", "/v1/models", "/v1/models/m")
        assert opened == {("GET", path) for path in pages}


# Pages of other origins

_PAGE = "origin: https://app.example\r\n"
_ASKS = "access-control-request-method: POST\r\naccess-control-request-headers: authorization\r\n"


@pytest.mark.parametrize("origins", [("https://app.example", "https://b.example"), ("*",)])
async def test_pages_of_named_origins_may_ask(origins: tuple[str, ...]) -> None:
    said = "*" if origins == ("*",) else "https://app.example"
    cors = CorsSettings(origins=origins, max_age_s=60)
    async with faulty(cors=cors, limits=GatewayLimits(body_bytes=2000)) as bench:
        reply = await bench.get(CHAT, _PAGE + _ASKS, "OPTIONS")
        assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, said)
        assert "authorization" in reply.headers["access-control-allow-headers"]
        assert "POST" in reply.headers["access-control-allow-methods"]
        assert reply.headers["access-control-max-age"] == "60"
        replies = [
            await bench.post(CHAT, chat(), _PAGE),
            await bench.post(CHAT, chat(stream=True), _PAGE),
            await bench.post(CHAT, chat(n=-1), _PAGE),
            await bench.post(CHAT, b"x" * 5000, _PAGE),
            await bench.get("/v1/models", _PAGE),
            await bench.get("/nowhere", _PAGE),
        ]
        assert [r.status for r in replies] == [200, 200, 400, 413, 200, 404]
        for reply in replies:
            assert reply.headers["access-control-allow-origin"] == said
            assert "access-control-allow-credentials" not in reply.headers
            assert "x-request-id" in reply.headers["access-control-expose-headers"]


async def test_other_pages_and_the_administration_stay_closed() -> None:
    async with faulty(cors=CorsSettings(origins=("https://app.example",))) as bench:
        other = "origin: https://evil.example\r\n"
        for headers, path in (
            (other, CHAT),
            ("origin: null\r\n", CHAT),
            (_PAGE, "/atoll/v1/status"),
        ):
            reply = await bench.get(path, headers + _ASKS, "OPTIONS")
            assert reply.status in (403, 405)
            assert "access-control-allow-origin" not in reply.headers
        reply = await bench.post(CHAT, chat(), other)
        assert (reply.status, reply.headers["vary"]) == (200, "origin")
        assert "access-control-allow-origin" not in reply.headers


async def test_without_the_setting_no_page_may_ask() -> None:
    async with faulty() as bench:
        assert (await bench.get(CHAT, _PAGE + _ASKS, "OPTIONS")).status == 405
        reply = await bench.post(CHAT, chat(), _PAGE)
        assert not any(name.startswith("access-control") for name in reply.headers)


@pytest.mark.parametrize(
    "origin", ["app.example", "https://app.example/", "https://a.example\r\nx: y", "", "https://*"]
)
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ValueError, match="origin"):
        CorsSettings(origins=(origin,))
