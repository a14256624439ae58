"""Reaching a hub through an HTTP CONNECT proxy."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from atoll.core.errors import InputError
from atoll.fabric.transport.forward import Forwarder, proxy_for
from atoll.fabric.transport.link import UnreachableError
from tests.fabric.transport.site import SETTINGS, Scenario, Site, free_port


class Proxy:
    """The smallest HTTP proxy that knows CONNECT; keeps the heads it was sent."""

    def __init__(self, answer: bytes = b"HTTP/1.1 200 OK\r\n\r\n") -> None:
        self.heads: list[bytes] = []
        self.answer = answer
        self.tasks: set[asyncio.Task[None]] = set()
        self.server: asyncio.Server

    async def start(self) -> str:
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        return f"http://user:p%40ss@127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        self.server.close()
        for task in tuple(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            self.heads.append(head)
            writer.write(self.answer)
            if b" 200 " in self.answer:
                host, _, port = head.split()[1].decode().rpartition(":")
                far_reader, far_writer = await asyncio.open_connection(host, int(port))
                try:
                    await asyncio.wait(
                        [
                            asyncio.ensure_future(self.copy(reader, far_writer)),
                            asyncio.ensure_future(self.copy(far_reader, writer)),
                        ],
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                finally:
                    far_writer.close()
        except (asyncio.CancelledError, OSError, EOFError):
            pass
        finally:
            writer.close()
            self.tasks.discard(task)

    async def copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass


def test_a_member_joins_through_a_proxy(run: Scenario) -> None:
    async def scenario(site: Site) -> None:
        proxy = Proxy()
        address = await proxy.start()
        near = await site.join(site.issue("near"))
        far = await site.join_with(site.issue("far"), replace(SETTINGS, proxy=address))
        assert near.sid in {peer.sid for peer in far.peers()}
        hub = f"127.0.0.1:{site.ports[0]}".encode()
        assert proxy.heads[0].startswith(b"CONNECT " + hub + b" HTTP/1.1\r\n")
        assert b"Proxy-Authorization: Basic dXNlcjpwQHNz\r\n" in proxy.heads[0]
        await far.close()
        await proxy.close()

    run(scenario)


def test_a_proxy_that_refuses_is_no_way_in(run: Scenario) -> None:
    async def scenario(site: Site) -> None:
        proxy = Proxy(b"HTTP/1.1 403 Forbidden\r\n\r\n")
        address = await proxy.start()
        with pytest.raises(UnreachableError):
            await site.join_with(site.issue("far"), replace(SETTINGS, proxy=address, connect_s=0.3))
        assert proxy.heads
        await proxy.close()

    run(scenario)


async def test_a_forwarder_says_why_it_failed() -> None:
    proxy = Proxy(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")
    forwarder = await Forwarder.start(await proxy.start(), "hub.example:7447")
    host, _, port = forwarder.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    assert await reader.read() == b""
    writer.close()
    assert forwarder.refused == 1
    assert "407" in forwarder.last_error
    await forwarder.close()
    await proxy.close()
    gone = await Forwarder.start(f"127.0.0.1:{free_port()}", "hub.example:7447")
    host, _, port = gone.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    assert await reader.read() == b""
    writer.close()
    assert gone.refused == 1
    await gone.close()


def test_the_environment_names_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert proxy_for("hub.example:7447", None) is None
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    assert proxy_for("hub.example:7447", None) == "http://proxy:3128"
    assert proxy_for("127.0.0.1:7447", None) is None
    assert proxy_for("hub.example:7447", "") is None
    assert proxy_for("127.0.0.1:7447", "http://other:1") == "http://other:1"
    monkeypatch.setenv("no_proxy", "hub.example")
    assert proxy_for("hub.example:7447", None) is None


@pytest.mark.parametrize("proxy", ["socks5://h:1", "http://", "http://h:99999"])
def test_bad_proxies_are_named_without_their_password(proxy: str) -> None:
    with pytest.raises(InputError, match="proxy"):
        Forwarder(proxy, "hub:1")
    with pytest.raises(InputError) as error:
        Forwarder("https://user:secret@h:1", "hub:1")
    assert "secret" not in str(error.value)
