"""The tunnel over real hubs, with certificates."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Literal

import pytest

from atoll.fabric.identity.access import Access
from atoll.fabric.identity.authority import Authority
from atoll.fabric.registry.records import Metadata, SessionState
from atoll.fabric.transport.fabric import Fabric
from atoll.fabric.tunnel.tunnel_client import TunnelClient
from atoll.fabric.tunnel.tunnel_server import IncomingCall, TunnelServer
from tests.fabric.transport.site import Site, free_port
from tests.fabric.tunnel.harness import Log, echo, paced, request, tokens

Role = Literal["worker", "gateway"]


async def member(authority: Authority, name: str, role: Role, provider: str = "uni") -> Fabric:
    token = authority.issue(name, provider, role).pack()
    metadata = Metadata(name=name, provider=provider, role=role)
    fabric = await Fabric.connect(Access.open(token), metadata)
    if role == "worker":
        await fabric.announce(SessionState.SERVING)
    return fabric


async def known(fabric: Fabric, sid: str) -> None:
    async with asyncio.timeout(60):
        while (peer := fabric.peer(sid)) is None or not peer.alive:
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def pair(
    authority: Authority, handler: object = echo
) -> AsyncIterator[tuple[TunnelClient, TunnelServer, Fabric]]:
    worker = await member(authority, "node", "worker", "lab")
    gateway = await member(authority, "gate", "gateway")
    answerer = TunnelServer(worker, handler)  # type: ignore[arg-type]
    caller = TunnelClient(gateway)
    try:
        await known(gateway, worker.sid)
        yield caller, answerer, worker
    finally:
        await caller.close()
        await answerer.close()
        await gateway.close()
        await worker.close()


async def ask(caller: TunnelClient, sid: str, body: bytes = b"{}") -> Log:
    log = Log()
    caller.call(sid, request(body), log)
    async with asyncio.timeout(60):
        await log.done.wait()
    return log


async def test_requests_through_a_hub_with_certificates(site: Site) -> None:
    seen: list[IncomingCall] = []

    def handle(incoming: IncomingCall) -> None:
        seen.append(incoming)
        echo(incoming)

    async with pair(site.authority, handle) as (caller, answerer, worker):
        bodies = [bytes([n]) * 10 ** (n % 6) for n in range(12)]
        logs = await asyncio.gather(*(ask(caller, worker.sid, body) for body in bodies))
        assert [bytes(log.data) for log in logs] == bodies
        assert (seen[0].caller_name, seen[0].caller_provider) == ("gate", "uni")
        assert seen[0].verified
        # A worker's certificate is no gateway's.
        other = await member(site.authority, "other", "worker")
        await known(other, worker.sid)
        intruder = TunnelClient(other)
        refused = await ask(intruder, worker.sid)
        assert "may not call" in (refused.lost or "")
        answerer.accept = "self"
        assert "not taken here" in ((await ask(caller, worker.sid)).lost or "")
        await intruder.close()
        await other.close()


@pytest.fixture
def hubs(tmp_path: Path) -> Iterator[tuple[Authority, list[subprocess.Popen[bytes]]]]:
    """Two hubs of a fabric with certificates, each its own process: one may be killed."""
    ports = [free_port(), free_port()]
    authority = Authority.create(tmp_path / "f", "test", [f"127.0.0.1:{p}" for p in ports])
    hubs = [
        subprocess.Popen(
            [
                sys.executable, "-m", "atoll", "hub",
                f"@{tmp_path / 'f' / f'hub-h{number}.token'}",
                f"--listen=127.0.0.1:{port}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for number, port in enumerate(ports)
    ]  # fmt: skip
    try:
        for port in ports:
            until_s = time.monotonic() + 60
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                assert time.monotonic() < until_s
                time.sleep(0.05)
        yield authority, hubs
    finally:
        for hub in hubs:
            hub.kill()
            hub.wait()


@pytest.mark.slow
async def test_a_renewed_worker_and_a_killed_hub(
    hubs: tuple[Authority, list[subprocess.Popen[bytes]]],
) -> None:
    authority, processes = hubs
    async with pair(authority, paced(120, 0.01)) as (caller, answerer, worker):
        logs = [Log() for _ in range(20)]
        for log in logs:
            caller.call(worker.sid, request(), log)
        await asyncio.sleep(0.5)
        await worker.renew()
        async with asyncio.timeout(60):
            await asyncio.gather(*(log.done.wait() for log in logs))
        assert all(bytes(log.data) == tokens(120) for log in logs)

        logs = [Log() for _ in range(20)]
        await known(caller._fabric, worker.sid)
        for log in logs:
            caller.call(worker.sid, request(), log)
        await asyncio.sleep(0.5)
        processes[0].kill()
        async with asyncio.timeout(60):
            await asyncio.gather(*(log.done.wait() for log in logs))
        for log in logs:
            # Nothing is missing or doubled, and nothing hangs; a gateway moves what was lost.
            assert bytes(log.data) == tokens(120)[: len(log.data)]
            assert log.ended == (len(log.data) == 600)
        await known(caller._fabric, worker.sid)
        assert (await ask(caller, worker.sid)).ended
        assert answerer.running == 0
