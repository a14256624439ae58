"""A fabric on loopback: real hubs and members in one event loop, with certificates."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from atoll.fabric.identity.access import Access
from atoll.fabric.identity.authority import Authority
from atoll.fabric.registry.records import Metadata, SessionState
from atoll.fabric.transport.fabric import Fabric
from atoll.fabric.transport.fabric_settings import FabricSettings
from atoll.fabric.transport.hub import Hub, hub_options

SETTINGS = FabricSettings(connect_s=60.0)


class ListLog:
    """Keeps events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, object]]] = []

    def event(self, name: str, /, **fields: object) -> None:
        self.events.append((name, fields))

    def flush(self) -> None:
        pass

    def reasons(self) -> set[object]:
        return {fields["reason"] for name, fields in self.events if name == "fabric.refused"}


class Site:
    """A fabric's authority, its running hubs and members; closed together."""

    def __init__(self, folder: Path, hubs: int) -> None:
        self.ports = [free_port() for _ in range(hubs)]
        addresses = [f"127.0.0.1:{port}" for port in self.ports]
        self.authority = Authority.create(folder / "fabric", "test", addresses)
        self.hubs: dict[int, Hub] = {}
        self.members: list[Fabric] = []

    async def hub(self, number: int = 0, **more: Any) -> Hub:
        token = self.authority.folder / f"hub-h{number}.token"
        options = hub_options(f"@{token}", listen=[f"127.0.0.1:{self.ports[number]}"], **more)
        hub = await Hub.start(options, ListLog())
        self.hubs[number] = hub
        return hub

    async def stop_hub(self, number: int) -> None:
        await self.hubs.pop(number).close()

    def issue(self, name: str, provider: str = "ethz", role: str = "worker") -> Access:
        return self.authority.issue(name, provider, role)

    def issue_slot(self, slot: str, name: str) -> Access:
        """Let somebody into a slot that is not the next one."""
        return self.authority._issue(slot, name, "ethz", "worker", days=1)

    async def grow(self, slots: int) -> None:
        """Have more slots, and hubs that know of them."""
        self.authority.grow(slots)
        for number in tuple(self.hubs):
            await self.stop_hub(number)
            await self.hub(number)

    async def join(self, access: Access, **more: Any) -> Fabric:
        metadata = Metadata(name=more.pop("name", "x"), provider="", role="worker")
        fabric = await Fabric.connect(
            access,
            metadata,
            state=more.pop("state", SessionState.SERVING),
            settings=more.pop("settings", SETTINGS),
            **more,
        )
        self.members.append(fabric)
        return fabric

    async def join_with(self, access: Access, settings: FabricSettings) -> Fabric:
        fabric = await Fabric.connect(
            access, Metadata(name="x", provider="", role="worker"), settings=settings
        )
        self.members.append(fabric)
        return fabric

    async def close(self) -> None:
        for member in self.members:
            await member.close()
        for hub in self.hubs.values():
            await hub.close()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


async def until(test: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Wait until something is true."""
    async with asyncio.timeout(timeout_s):
        while not test():
            await asyncio.sleep(0.01)


Scenario = Callable[[Callable[[Site], Awaitable[None]]], None]

two_hubs = pytest.mark.parametrize("run", [2], indirect=True)
