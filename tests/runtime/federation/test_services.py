"""Services that are no models, over plain HTTP: what is passed on, and when another node is tried."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from atoll.runtime.gateway.app import Gateway
from atoll.runtime.gateway.settings import GatewaySettings, HealthSettings
from atoll.runtime.pool.member import Backend
from atoll.runtime.pool.pool import BackendPool
from tests.runtime.gateway.harness import QUICK, Bench

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter, str], Awaitable[None]]


class Server:
    """Answers each request with a handler and remembers what it was asked."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.asked: list[tuple[str, str, bytes]] = []

    async def start(self) -> str:
        self.server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                size = head.lower().partition("content-length: ")[2].partition("\r")[0]
                body = await reader.readexactly(int(size or 0))
                self.asked.append((head.partition("\r\n")[0], head, body))
                await self.handler(reader, writer, head)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


async def well(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _head: str) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: image/png\r\ncontent-length: 13\r\n\r\n"
    writer.write(head + b"made of bytes")


async def dies(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _head: str) -> None:
    writer.transport.abort()


async def breaks(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _head: str) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: a/b\r\ncontent-length: 100\r\n\r\nhalf")
    await writer.drain()
    writer.close()


async def refuses(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _head: str) -> None:
    writer.write(
        b"HTTP/1.1 422 X\r\ncontent-type: text/plain\r\nretry-after: 3\r\ncontent-length: 2\r\n\r\nno"
    )


@asynccontextmanager
async def services(handlers: list[Handler]) -> AsyncIterator[tuple[Bench, list[Server]]]:
    """A gateway over servers that answer so."""
    servers = [Server(handler) for handler in handlers]
    pool = BackendPool(
        [
            Backend(id=f"s{i}", url=await server.start(), services=("draw",))
            for i, server in enumerate(servers)
        ]
    )
    settings = GatewaySettings(
        port=0,
        deadlines=QUICK,
        health=HealthSettings(enabled=False),
        policy="iwrr",
        admin_socket="",
    )
    gateway = Gateway(pool, settings)
    _, port = await gateway.start()
    try:
        yield Bench(gateway, [], port), servers
        async with asyncio.timeout(60):
            while gateway.service_proxies or any(m.inflight for m in pool.members.values()):
                await asyncio.sleep(0.01)
    finally:
        await gateway.close()
        for server in servers:
            server.server.close()


async def test_requests_pass_as_they_are() -> None:
    async with services([well]) as (bench, servers):
        reply = await bench.post(
            "/services/draw/a/b%20c?x=1&y=2",
            b"\x00\xff",
            "content-type: image/jpeg\r\nauthorization: Bearer s3cret\r\naccept: image/png\r\n",
        )
        assert (reply.status, reply.body) == (200, b"made of bytes")
        assert reply.headers["content-type"] == "image/png"
        ((line, head, body),) = servers[0].asked
        assert line == "POST /a/b%20c?x=1&y=2 HTTP/1.1"
        assert body == b"\x00\xff"
        assert "content-type: image/jpeg" in head
        assert "accept: image/png" in head
        assert "s3cret" not in head
        reply = await bench.get("/services/draw/", method="HEAD")
        assert (reply.status, servers[0].asked[-1][0]) == (200, "GET / HTTP/1.1")
        assert (await bench.get("/services/paint/")).status == 404
        assert (await bench.get("/services/draw/", method="TRACE")).status == 405


async def test_refusals_pass_too() -> None:
    async with services([refuses]) as (bench, _servers):
        reply = await bench.get("/services/draw/x")
        assert (reply.status, reply.body) == (422, b"no")
        assert reply.headers["retry-after"] == "3"


@pytest.mark.parametrize(("method", "status"), [("GET", 200), ("DELETE", 200), ("POST", 502)])
async def test_another_is_tried_where_asking_twice_does_no_harm(method: str, status: int) -> None:
    async with services([dies, well]) as (bench, servers):
        seen: set[Any] = set()
        for _ in range(4):
            reply = await bench.get("/services/draw/x", method=method)
            seen.add(reply.status)
        assert seen == ({200} if status == 200 else {200, 502})
        assert servers[0].asked
        assert servers[1].asked


async def test_an_answer_that_breaks_off_is_cut_off() -> None:
    async with services([breaks]) as (bench, _servers):
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError, ValueError)):
            await bench.get("/services/draw/x")


async def test_everybody_is_dead() -> None:
    async with services([well, well]) as (bench, servers):
        for server in servers:
            server.server.close()
        await asyncio.sleep(0.05)
        reply = await bench.post("/services/draw/x", b"")
        assert reply.status in (502, 503)
