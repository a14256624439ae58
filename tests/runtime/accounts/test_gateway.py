"""A gateway with keys in front of engines that fail: who is let in, and what the ledger has."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

from atoll.runtime.accounts import schema
from atoll.runtime.accounts.accounts import Accounts
from atoll.runtime.accounts.api_keys import NewKey
from atoll.runtime.accounts.database import Database
from atoll.runtime.gateway.app import Gateway
from atoll.runtime.gateway.settings import GatewaySettings, HealthSettings
from atoll.runtime.pool.member import Backend
from atoll.runtime.pool.pool import BackendPool
from atoll.telemetry.logs import JsonLog
from tests.runtime.accounts.helpers import sqlite_url
from tests.runtime.gateway.engine import Fault, ScriptedEngine
from tests.runtime.gateway.harness import CHAT, Bench, Reply, chat, deadlines_for


@dataclass
class Place:
    """A gateway with keys, its engines, its log and its database."""

    bench: Bench
    accounts: Accounts
    database: Database
    log: Path

    async def key(self, **spec: object) -> str:
        text, _ = await self.database.create_key(NewKey.parse({"name": "n", **spec}))
        await self.accounts.sync()
        return text

    async def ask(self, key: str | None, **more: object) -> Reply:
        header = "" if key is None else f"authorization: Bearer {key}\r\n"
        return await self.bench.post(CHAT, chat(**more), header)  # type: ignore[arg-type]

    async def rows(self, table: sa.Table) -> list[sa.Row[tuple[object, ...]]]:
        await self.bench.settled()
        await self.accounts.sync()
        async with self.database.reading() as connection:
            return list(await connection.execute(sa.select(table)))


@asynccontextmanager
async def place(folder: Path, *engines: ScriptedEngine) -> AsyncIterator[Place]:
    url = sqlite_url(folder)
    accounts = await Accounts.open(url, journal=folder / "journal", refresh_s=60.0)
    database = await Database.open(url)
    pool = BackendPool()
    for number, engine in enumerate(engines):
        engine.name = f"e{number}"
        address = await engine.start()
        pool.add(Backend(id=engine.name, url=address, models=(engine.model,), kind=engine.kind))
    settings = GatewaySettings(
        port=0, deadlines=deadlines_for(engines), health=HealthSettings(enabled=False)
    )
    handle = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    gateway = Gateway(pool, settings, log=JsonLog(handle), accounts=accounts)
    _, port = await gateway.start()
    try:
        yield Place(Bench(gateway, list(engines), port), accounts, database, folder / "log")
    finally:
        await gateway.close()
        for engine in engines:
            await engine.stop()
        await accounts.close()
        await database.close()
        os.close(handle)


async def test_who_is_let_in_and_who_is_not(tmp_path: Path) -> None:
    async with place(tmp_path, ScriptedEngine(), ScriptedEngine(model="other")) as it:
        key = await it.key(models=("m",), requests_per_min=2)
        assert (await it.ask(None)).status == 401
        assert (await it.ask("sk-other")).status == 401
        forbidden = await it.ask(key, model="other")
        assert forbidden.status == 403
        assert forbidden.json["error"]["code"] == "model_not_allowed"
        assert (await it.ask(key)).status == 200
        assert (await it.ask(key, stream=True)).status == 200
        slower = await it.ask(key)
        assert slower.status == 429
        assert int(slower.headers["retry-after"]) in (29, 30)
        assert slower.json["error"]["code"] == "rate_limit_exceeded"


async def test_models_are_those_that_the_policy_of_the_key_permits(tmp_path: Path) -> None:
    """A model of which every node is forbidden is not there; what changes shows at once."""

    async def listed(it: Place, key: str) -> list[str]:
        header = f"authorization: Bearer {key}\r\n"
        shown = await it.bench.get("/v1/models", header)
        names = [model["id"] for model in shown.json["data"]]
        for name in ("m", "other", "small", "both"):
            one = await it.bench.get(f"/v1/models/{name}", header)
            assert one.status == (200 if name in names else 404), name
        return names

    async with place(tmp_path, ScriptedEngine(), ScriptedEngine(model="other")) as it:
        pool, gateway = it.bench.gateway.pool, it.bench.gateway
        far = pool.members["e1"].backend
        pool.update(
            far.model_copy(update={"metadata": {"region": "eu-1"}, "aliases": {"small": "other"}})
        )
        shares = {"shares": {"m": 1, "other": 1}}
        gateway.configure(
            GatewaySettings.parse(
                gateway.settings.model_dump()
                | {"choices": {"chat": shares}, "aliases": {"both": "chat"}}
            )
        )
        anybody = await it.key()
        every = ["chat", "m", "other", "both", "small"]
        assert await listed(it, anybody) == every
        key = await it.key(policy={"regions": ("eu",)})
        assert await listed(it, key) == ["chat", "other", "both", "small"]
        assert await listed(it, await it.key(policy={"providers": ("ETH",)})) == []
        narrow = await it.key(policy={"regions": ("eu",)}, models=("m", "small"))
        assert await listed(it, narrow) == ["small"]
        pool.update(far.model_copy(update={"metadata": {"region": "us"}}))
        assert await listed(it, key) == []
        pool.update(pool.members["e0"].backend.model_copy(update={"metadata": {"region": "eu"}}))
        assert await listed(it, key) == ["chat", "m", "both"]


async def test_the_ledger_has_what_clients_received_through_failures(tmp_path: Path) -> None:
    faults = [Fault("die", 5), Fault("500"), Fault("none"), Fault("end_early", 3)]
    async with place(tmp_path, ScriptedEngine(faults=faults), ScriptedEngine()) as it:
        key = await it.key()
        received = prompts = 0
        for number in range(6):
            asked = {"include_usage": True}
            reply = await it.ask(key, text=f"hello {number}", stream=True, stream_options=asked)
            assert reply.status == 200
            usage = reply.chunks[-1]["usage"]
            received += usage["completion_tokens"]
            prompts += usage["prompt_tokens"]
        rows = await it.rows(schema.operations)
        parts = await it.rows(schema.attempts)
        assert len(rows) == 6
        assert {row.outcome for row in rows} == {"ok"}
        assert sum(row.completion_tokens for row in rows) == received
        assert sum(row.prompt_tokens for row in rows) == prompts
        assert sum(part.completion_tokens for part in parts) == received
        assert len(parts) > len(rows)
        assert "failed" in {part.outcome for part in parts}


async def test_keys_are_in_no_log_and_reach_no_engine(tmp_path: Path) -> None:
    engine = ScriptedEngine(faults=[Fault("500")])
    async with place(tmp_path, engine, ScriptedEngine()) as it:
        key = await it.key(requests_per_min=2)
        secret = key.split("-")[2]
        assert (await it.ask(key)).status == 200
        assert (await it.ask(key[:-1])).status == 401
        assert (await it.ask(key, temperature="no")).status == 400
        assert (await it.bench.get("/v1/none", f"authorization: Bearer {key}\r\n")).status == 404
        await it.rows(schema.operations)
        it.bench.gateway.log.flush()
        logged = it.log.read_text()
        assert '"event":"request"' in logged
        assert secret[:12] not in logged
        assert engine.seen
        assert not any(secret in str(seen) for seen in engine.seen)


async def test_slow_readers_pay_for_what_they_got(tmp_path: Path) -> None:
    """A client that stops reading and leaves is billed what its machine had got, not what lay in buffers."""
    async with place(tmp_path, ScriptedEngine(kind="openai")) as it:
        key = await it.key()
        raw = json.dumps(chat(stream=True, max_tokens=9000, ignore_eos=True)).encode()
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(slow, ("127.0.0.1", it.bench.port))
        while not it.bench.gateway.connections:
            await asyncio.sleep(0.01)
        # Buffers of megabytes would take long to fill.
        (connection,) = it.bench.gateway.connections
        connection.transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDBUF, 32_768
        )
        connection.transport.set_write_buffer_limits(high=32_768)
        head = f"POST {CHAT} HTTP/1.0\r\nauthorization: Bearer {key}\r\n"
        await loop.sock_sendall(slow, f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw)
        # Until the gateway waits for it.
        async with asyncio.timeout(60):
            while not any(relay._paused_s for relay in it.bench.gateway.relays):
                await asyncio.sleep(0.01)
        (relay,) = it.bench.gateway.relays
        sent = relay.journal.read().tokens
        # A look at it: taken out, there would be room for more.
        got = slow.recv(65_536, socket.MSG_PEEK)
        slow.close()
        (row,) = await it.rows(schema.operations)
        assert row.outcome == "cancelled"
        whole = got.partition(b"\r\n\r\n")[2].split(b"\n\n")[:-1]
        read = sum(b'"content":' in event and b'"role"' not in event for event in whole)
        assert abs(row.completion_tokens - read) <= 1
        assert row.completion_tokens < sent / 2
