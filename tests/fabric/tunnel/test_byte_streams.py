"""Byte streams through the tunnel, over a real hub: whole both ways, held up by who does not read, ended."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from atoll.fabric.tunnel.byte_streams import CALLERS, StreamDoor, TunnelledStreamError, dial
from atoll.fabric.tunnel.tunnel_client import TunnelClient
from atoll.fabric.tunnel.tunnel_server import TunnelServer
from atoll.runtime.executor.executor_client import ExecutorClient, InvocationError
from atoll.runtime.executor.executor_server import ExecutorServer
from atoll.runtime.executor.store import ArrayStore
from tests.fabric.transport.site import Site
from tests.fabric.tunnel.test_loopback import known, member

TOKEN = "0123456789abcdef"
MIB = 2**20
MANY = 24


@contextlib.asynccontextmanager
async def far_end(
    site: Site, port: int, provider: str = "uni"
) -> AsyncIterator[tuple[TunnelClient, str]]:
    """A node that passes streams on to a port of this machine, and a client of its fabric."""
    node = await member(site.authority, "node", "worker", provider)
    near = await member(site.authority, "near", "worker", "uni")
    door = StreamDoor(lambda: ("127.0.0.1", port) if port else None)
    server = TunnelServer(node, door.handle, accept="self", callers=CALLERS)
    client = TunnelClient(near)
    try:
        await known(near, node.sid)
        yield client, node.sid
    finally:
        await door.close()
        await client.close()
        await server.close()
        await near.close()
        await node.close()


async def test_streams_are_whole_held_up_by_slow_readers_and_end(site: Site) -> None:
    """Both directions at once, several megabytes; then a reader that waits; then the end."""
    sent = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        with contextlib.suppress(ConnectionError):
            digest = hashlib.sha256(await reader.readexactly(3 * MIB)).digest()
            writer.write(bytes(range(256)) * (2 * MIB // 256) + digest)
            await writer.drain()
            for _ in range(MANY):
                writer.write(b"x" * MIB)
                await writer.drain()
                sent += 1
        writer.close()

    tcp = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = tcp.sockets[0].getsockname()[1]
    async with far_end(site, port) as (client, sid), asyncio.timeout(120):
        reader, writer = await dial(client, sid)
        body = np.random.default_rng(5).bytes(3 * MIB)
        writer.write(body)
        await writer.drain()
        assert await reader.readexactly(2 * MIB) == bytes(range(256)) * (2 * MIB // 256)
        assert await reader.readexactly(32) == hashlib.sha256(body).digest()
        # Nobody reads: of so many megabytes only what the credits and buffers on the way hold has left.
        await asyncio.sleep(1.0)
        assert sent < MANY // 2
        got = 0
        while data := await reader.read(MIB):
            got += len(data)
        assert got == MANY * MIB
        writer.close()
    tcp.close()


async def test_an_array_is_fetched_through_the_tunnel(site: Site, tmp_path: Path) -> None:
    store = ArrayStore(tmp_path / "store", 64 * MIB, owner="far")
    executor = ExecutorServer("far", TOKEN, store)
    _, port = await executor.start("127.0.0.1", 0)
    numbers = np.arange(MIB, dtype=np.float32)
    handle = replace(store.put(numbers, "near", 60.0), host="another", path="")
    async with far_end(site, port) as (client, sid), asyncio.timeout(60):
        caller = ExecutorClient(
            store.address, TOKEN, "near", dial=lambda _host, _port: dial(client, sid)
        )
        await caller.connect()
        assert (await caller.fetch(handle) == numbers).all()
        await caller.release([handle])
        with pytest.raises(InvocationError, match="lease"):
            await caller.fetch(handle)
        await caller.close()
    await executor.close()


@pytest.mark.parametrize("provider", ["uni", "others"])
async def test_who_may_not_or_leads_nowhere_is_told(site: Site, provider: str) -> None:
    """Nobody is behind the door of one's own node; that of another owner stays shut."""
    async with far_end(site, 0, provider) as (client, sid):
        with pytest.raises(TunnelledStreamError):
            await asyncio.wait_for(dial(client, sid), 30.0)
