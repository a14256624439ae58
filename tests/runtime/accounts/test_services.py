"""Requests to services that are no models are in the ledger, once, with what they used."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from atoll.runtime.accounts import schema
from atoll.runtime.accounts.accounts import Accounts
from atoll.runtime.accounts.journal import UsageJournal, read_segment
from atoll.runtime.gateway.service_proxy import ServiceMeter
from atoll.runtime.pool.member import Backend
from tests.runtime.accounts.helpers import sqlite_url
from tests.runtime.accounts.test_accounts import world
from tests.runtime.accounts.test_gateway import Place, place
from tests.runtime.federation.test_services import Handler, Server, breaks, dies, refuses, well
from tests.runtime.gateway.engine import ScriptedEngine


async def talks(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _head: str) -> None:
    body = json.dumps({"text": "x", "usage": {"prompt_tokens": 7, "completion_tokens": 5}}).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    writer.write(head % len(body) + body)


@asynccontextmanager
async def served(
    folder: Path, handlers: list[Handler]
) -> AsyncIterator[tuple[Place, list[Server]]]:
    """A gateway with keys over servers that answer so."""
    async with place(folder, ScriptedEngine()) as it:
        servers = [Server(handler) for handler in handlers]
        for number, server in enumerate(servers):
            url = await server.start()
            it.bench.gateway.pool.add(Backend(id=f"s{number}", url=url, services=("draw",)))
        try:
            yield it, servers
        finally:
            for server in servers:
                server.server.close()


def bearer(key: str) -> str:
    return f"authorization: Bearer {key}\r\n"


async def ended(it: Place) -> None:
    async with asyncio.timeout(30):
        while it.bench.gateway.service_proxies:
            await asyncio.sleep(0.005)


async def test_bytes_seconds_and_tokens_are_under_the_name_of_the_service(tmp_path: Path) -> None:
    async with served(tmp_path, [well]) as (it, servers):
        key = await it.key(tokens_total=13, requests_per_min=4)
        reply = await it.bench.post("/services/draw/x", b"ask" * 5, bearer(key))
        assert reply.status == 200
        servers[0].handler = talks
        said = await it.bench.post("/services/draw/x", b"", bearer(key))
        assert said.json["usage"]["completion_tokens"] == 5
        servers[0].handler = refuses
        # 12 of 13 tokens are used.
        assert (await it.bench.get("/services/draw/x", bearer(key))).status == 422
        servers[0].handler = talks
        assert (await it.bench.get("/services/draw/x", bearer(key))).status == 200
        over = await it.bench.get("/services/draw/x", bearer(key))
        assert (over.status, over.json["error"]["code"]) == (429, "rate_limit_exceeded")
        await ended(it)
        rows = await it.rows(schema.operations)
        shown = [
            (r.model, r.endpoint, r.status, r.outcome, r.bytes_in, r.bytes_out, r.completion_tokens)
            for r in sorted(rows, key=lambda r: r.started_s)
        ]
        of = ("draw", "/services/draw")
        size = len(said.body)
        assert shown == [
            (*of, 200, "ok", 15, 13, 0),
            (*of, 200, "ok", 0, size, 5),
            (*of, 422, "ok", 0, 2, 0),
            (*of, 200, "ok", 0, size, 5),
        ]
        assert all(r.seconds > 0 and r.first_token_s > 0 for r in rows)
        (total,) = [c for c in await it.rows(schema.counters) if c.period == "total"]
        assert total.tokens == 24
        parts = await it.rows(schema.attempts)
        assert {(p.backend, p.outcome) for p in parts} == {("s0", "ok")}
        page = it.bench.gateway.metrics.page(0, 0).decode()
        assert (
            'atoll_gateway_requests_total{endpoint="/services",model="draw",status="200"} 3.0'
            in page
        )


async def test_quotas_hold_for_services(tmp_path: Path) -> None:
    async with served(tmp_path, [talks]) as (it, servers):
        key = await it.key(tokens_total=12)
        assert (await it.bench.get("/services/draw/x", bearer(key))).status == 200
        over = await it.bench.get("/services/draw/x", bearer(key))
        assert (over.status, over.json["error"]["code"]) == (429, "insufficient_quota")
        assert len(servers[0].asked) == 1


async def test_what_moves_breaks_or_is_given_up_counts_once(tmp_path: Path) -> None:
    async with served(tmp_path, [dies, well]) as (it, servers):
        key = await it.key()
        for _ in range(2):
            assert (await it.bench.get("/services/draw/x", bearer(key))).status == 200
        servers[0].handler = servers[1].handler = breaks
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError, ValueError)):
            await it.bench.get("/services/draw/x", bearer(key))
        hangs = asyncio.Event()

        async def hang(*_: object) -> None:
            await hangs.wait()

        servers[0].handler = servers[1].handler = hang
        leaving = asyncio.create_task(it.bench.post("/services/draw/x", b"abc", bearer(key)))
        async with asyncio.timeout(30):
            while not it.bench.gateway.service_proxies:
                await asyncio.sleep(0.005)
        leaving.cancel()
        await ended(it)
        hangs.set()
        rows = sorted(await it.rows(schema.operations), key=lambda r: r.started_s)
        assert [(r.outcome, r.bytes_in, r.bytes_out) for r in rows] == [
            ("ok", 0, 13),
            ("ok", 0, 13),
            ("truncated", 0, 4),
            ("cancelled", 3, 0),
        ]
        parts = await it.rows(schema.attempts)
        assert len(parts) == 5
        assert sum(p.outcome == "failed" for p in parts) == 2


async def test_a_gateway_that_is_killed_leaves_the_request_and_its_bytes(tmp_path: Path) -> None:
    async with world(sqlite_url(tmp_path), tmp_path / "j") as it:
        header, key_id = await it.key()
        accounts: Accounts = it.accounts
        meter = ServiceMeter(accounts, accounts.admit(header, "draw"), "r-1", "draw", 40, 0.0)
        meter.begin(200, b"image/png", 0.1)
        meter.take(b"x" * 100)
        meter.take(b"x" * 11)
        # As a killed process leaves it.
        copy = tmp_path / "dead" / "0"
        copy.mkdir(parents=True)
        (copy / "slots").write_bytes((tmp_path / "j" / "0" / "slots").read_bytes())
        journal = UsageJournal.claim(tmp_path / "dead", slots=4)
        assert journal.recovered.crashed == 1
        (done,) = [d for path in journal.segments() for d in read_segment(path)]
        assert (done.key_id, done.bytes_in, done.bytes_out) == (key_id, 40, 111)
        assert done.record is not None
        assert (done.record.model, done.record.endpoint) == ("draw", "/services/draw")
        assert done.record.outcome == "crashed"
        journal.release()
        # The one that lives counts it once, however often it is closed.
        meter.close(200, "ok", ["s0"], 1.0)
        meter.close(200, "ok", ["s0"], 2.0)
        await accounts.sync()
        (row,) = await it.rows(schema.operations)
        assert (row["bytes_in"], row["bytes_out"], row["seconds"]) == (40, 111, 1.0)


@pytest.mark.parametrize(
    ("kind", "pieces", "tokens"),
    [
        (b"application/json", [b'{"usage": {"prompt_tokens": 3}}'], 3),
        (b"application/json; charset=utf-8", [b'{"usage"', b': {"input_tokens": 4}}'], 4),
        (b"application/json", [b"[1, 2]"], 0),
        (b"application/json", [b'{"usage": 5}'], 0),
        (b"application/json", [b'{"usage": ' + b"[" * 100_000], 0),
        (b"application/json", [b'{"a": "', b"x" * 2**20, b'", "usage": {"prompt_tokens": 3}}'], 0),
        (b"text/plain", [b'{"usage": {"prompt_tokens": 3}}'], 0),
        (
            b"text/event-stream",
            [
                b'data: {"usage": {"prompt_tokens": 1}}\n\n' + b"data: x" * 9000 + b"\n\n",
                b'data: {"usage": {"prompt_tokens": 9}}\r\n\r\ndata: [DONE]\r\n\r\n',
            ],
            9,
        ),
        (b"text/event-stream", [b"\xff" * 50_000], 0),
    ],
)
def test_usage_is_found_where_openai_puts_it(kind: bytes, pieces: list[bytes], tokens: int) -> None:
    class Quiet:
        def opened(self, *_: object) -> int:
            return 0

        def passed(self, *_: object) -> None: ...

        def closed(self, *_: object) -> None: ...

    class Nobody:
        key_id = None

    meter = ServiceMeter(Quiet(), Nobody(), "r", "s", 0, 0.0)  # type: ignore[arg-type]
    meter.begin(200, kind, 0.0)
    for piece in pieces:
        meter.take(piece)
    assert len(meter._kept) <= 2**20
    assert meter.close(200, "ok", [], 1.0).prompt_tokens == tokens
