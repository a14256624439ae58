"""A fleet of a tiny model behind a gateway, shared by the tests that need real nodes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass
class Running:
    """A fleet that runs in a thread of its own."""

    fleet: Any
    loop: asyncio.AbstractEventLoop
    folder: Path

    @property
    def instance_url(self) -> str:
        """Where the first instance listens, without the gateway."""
        return str(self.fleet.endpoints[0].endpoint.backend.url)

    def wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run something in the fleet's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("torch", "transformers", "zmq", "tokenizers", "httptools"):
        pytest.importorskip(package, reason="needs the extras 'engine' and 'serve'")
    from benchmarks.tiny_model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def running(tiny_folder: Path) -> Iterator[Running]:
    from atoll.runtime.adapters.base import Home
    from atoll.runtime.gateway import GatewaySettings
    from atoll.runtime.local.build import LocalOptions, Model, build
    from atoll.runtime.local.fleet import Hearing, LocalFleet
    from atoll.runtime.state import new_home, remove_home
    from benchmarks.chaos import SERVICE, tiny_plan

    home, hearing = Home(new_home()), Hearing()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> LocalFleet:
        named = build(
            tiny_plan(),
            {SERVICE: Model(str(tiny_folder), tiny_folder)},
            home,
            hearing,
            LocalOptions(kv_bytes=8 * 2**20),
        )
        fleet = LocalFleet(
            "test", named, home, GatewaySettings(port=0), hearing, warm=(str(tiny_folder),)
        )
        await fleet.start()
        return fleet

    fleet = asyncio.run_coroutine_threadsafe(start(), loop).result(180)
    found = Running(fleet, loop, tiny_folder)
    yield found
    found.wait(fleet.stop(5.0))
    loop.call_soon_threadsafe(loop.stop)
    thread.join(5)
    loop.close()
    remove_home(home.folder)
