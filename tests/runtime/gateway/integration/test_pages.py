"""What the gateway answers by itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.runtime.gateway.engine import Fault, ScriptedEngine
from tests.runtime.gateway.harness import CHAT, Bench, chat, running


def with_bench(test: Callable[[Bench], Awaitable[None]], **options: Any) -> None:
    async def go() -> None:
        async with running(
            [ScriptedEngine(), ScriptedEngine(model="org/other")], **options
        ) as bench:
            await test(bench)

    asyncio.run(go())


def test_models() -> None:
    async def go(bench: Bench) -> None:
        listed = (await bench.get("/v1/models")).json
        assert listed["object"] == "list"
        assert [m["id"] for m in listed["data"]] == ["m", "org/other"]
        assert all(m["object"] == "model" for m in listed["data"])
        assert (await bench.get("/v1/models/org/other?x=1")).json["id"] == "org/other"
        assert (await bench.get("/v1/models/none")).status == 404

    with_bench(go)


def test_health_and_head() -> None:
    async def go(bench: Bench) -> None:
        assert (await bench.get("/health")).json == {"status": "ok", "backends_up": 2}
        raw = b"HEAD /health HTTP/1.1\r\nconnection: close\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", bench.port)
        writer.write(raw)
        head = await reader.read()
        assert head.startswith(b"HTTP/1.1 200")
        assert head.endswith(b"\r\n\r\n")
        writer.close()

    with_bench(go)


def test_metrics_count_requests_once() -> None:
    async def go(bench: Bench) -> None:
        bench.engines[0].faults = [Fault("die", 3)]
        bench.gateway.pool.update(
            bench.gateway.pool.members["e1"].backend.model_copy(
                update={"models": ("m", "org/other")}
            )
        )
        await bench.post(CHAT, chat(stream=True))
        await bench.post(CHAT, chat(n=-1))
        for number in range(30):
            await bench.post(CHAT, chat(model=f"unknown-{number}"))
        reply = await bench.get("/metrics")
        assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
        page = reply.body.decode()
        # Names that clients make up are no labels.
        assert "unknown" not in page
        found = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
        }

        def value(name: str, **labels: str) -> float:
            return found[f"atoll_gateway_{name}", frozenset(labels.items())]

        kind = {"model": "m", "endpoint": "/v1/chat/completions"}
        assert value("requests_total", **kind, status="200") == 1
        assert value("failovers_total", model="m", when="after") == 1
        assert value("rejected_total", status="404") == 30
        assert value("backend_state", backend="e0", state="up") == 1
        assert value("request_seconds_count", **kind) == 1
        record = bench.records[0]
        assert value("tokens_total", model="m", kind="completion") == record.completion_tokens
        assert all(name.startswith("atoll_") for name, _ in found)

    with_bench(go)


def test_openapi_describes_every_endpoint() -> None:
    async def go(bench: Bench) -> None:
        document = (await bench.get("/openapi.json")).json
        assert document["openapi"].startswith("3.1")
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings"):
            schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"][
                "schema"
            ]
            name = schema["$ref"].rsplit("/", 1)[1]
            assert "model" in document["components"]["schemas"][name]["required"]
        for path in ("/v1/models", "/health", "/metrics"):
            assert "get" in document["paths"][path]
        assert json.dumps(document)

    with_bench(go)


JSON = "content-type: application/json\r\n"


def test_backends_come_and_go() -> None:
    async def go(bench: Bench) -> None:
        status = (await bench.get("/atoll/v1/status")).json
        assert status["status"] == "serving"
        assert [b["id"] for b in status["backends"]] == ["e0", "e1"]
        extra = ScriptedEngine(model="third")
        backend = {
            "id": "x",
            "url": await extra.start(),
            "models": ["third"],
            "metadata": {"api_key": "hidden", "note": "seen"},
        }
        assert (await bench.post(CHAT, chat(model="third"))).status == 404
        reply = await bench.post("/atoll/v1/backends", backend, JSON)
        assert reply.status == 200
        assert b"hidden" not in reply.body
        assert b"seen" in reply.body
        assert (await bench.post(CHAT, chat(model="third"))).status == 200
        assert extra.seen[0].headers["authorization"] == "Bearer hidden"
        # The same again changes it.
        assert (
            await bench.post("/atoll/v1/backends", backend | {"models": ["fourth"]}, JSON)
        ).status == 200
        assert (await bench.post(CHAT, chat(model="third"))).status == 404
        assert (await bench.get("/atoll/v1/backends/x", method="DELETE")).status == 200
        assert (await bench.get("/atoll/v1/backends/x", method="DELETE")).status == 404
        assert (await bench.post(CHAT, chat(model="fourth"))).status == 404
        for bad in (
            b"",
            b"{}",
            b'{"id":"y","url":"ftp://x","models":["m"]}',
            b'{"id":"y","url":"http://x","models":[]}',
            b'{"id":"y","url":"http://x:0","models":["m"],"weight":-1}',
        ):
            reply = await bench.post("/atoll/v1/backends", bad, JSON)
            assert reply.status == 400, bad
        assert (await bench.get("/atoll/v1/nothing")).status == 404
        assert (await bench.get("/atoll/v1/status", method="DELETE")).status == 405
        await extra.stop()

    with_bench(go)


@pytest.mark.parametrize(
    "headers",
    ["origin: http://evil.example\r\n" + JSON, "content-type: text/plain\r\n", ""],
)
def test_web_pages_cannot_administer(headers: str) -> None:
    async def go(bench: Bench) -> None:
        body = b'{"id":"x","url":"http://127.0.0.1:1","models":["x"]}'
        host = "127.0.0.1" if "origin" in headers else "localhost"
        raw = f"POST /atoll/v1/backends HTTP/1.1\r\nhost: {host}\r\n{headers}"
        raw += f"content-length: {len(body)}\r\n\r\n"
        assert (await bench.ask(raw.encode() + body)).status == 403
        raw = f"GET /atoll/v1/status HTTP/1.1\r\nhost: evil.example:{bench.port}\r\n\r\n"
        assert (await bench.ask(raw.encode())).status == 403

    with_bench(go)


def test_admin_token() -> None:
    async def go(bench: Bench) -> None:
        assert (await bench.get("/atoll/v1/status")).status == 401
        assert (await bench.get("/atoll/v1/status", "authorization: Bearer no\r\n")).status == 401
        assert (await bench.get("/atoll/v1/status", "authorization: Bearer yes\r\n")).status == 200
        assert (await bench.get("/v1/models")).status == 200

    with_bench(go, admin_token="yes")
