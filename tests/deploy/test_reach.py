"""Ways between nodes of a fleet: TCP where it leads there, else the other way, which is remembered."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from atoll.deploy.commands.reach import reach, way_beside


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(await reader.readline())
    await writer.drain()
    writer.close()


async def test_the_other_way_is_taken_where_tcp_leads_nowhere_and_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    tried: list[tuple[str, int]] = []
    direct = asyncio.open_connection

    async def tcp(host: str, at: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        tried.append((host, at))
        if host == "10.255.0.1":
            raise ConnectionRefusedError
        return await direct(host, at)

    async def other(host: str, at: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        assert at == port
        return await direct("127.0.0.1", at)

    monkeypatch.setattr(asyncio, "open_connection", tcp)
    dial = reach(other)
    for host in ("127.0.0.1", "10.255.0.1", "10.255.0.1"):
        reader, writer = await dial(host, port)
        writer.write(f"{host}\n".encode())
        assert await reader.readline() == f"{host}\n".encode()
        writer.close()
    assert tried == [("127.0.0.1", port), ("10.255.0.1", port)]
    assert reach(None) is asyncio.open_connection
    server.close()


async def test_a_process_beside_is_told_the_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ATOLL_WAY", raising=False)
    assert way_beside() is None
    server = await asyncio.start_unix_server(echo, tmp_path / "way.sock")
    monkeypatch.setenv("ATOLL_WAY", str(tmp_path / "way.sock"))
    dial = way_beside()
    assert dial is not None
    reader, writer = await dial("10.255.0.1", 7)
    assert await reader.readline() == b"10.255.0.1:7\n"
    writer.close()
    server.close()
