"""A fleet of a tiny model behind a gateway, shared by the tests that need real nodes."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from atoll.plan.plan import Plan, Route
from tests.compat.client_checks import ORIGIN


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
    from tests.tiny_model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def forks(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The socket of a process from which all fleets fork: each would load torch anew."""
    path = str(tmp_path_factory.mktemp("forks") / "socket")
    command = [sys.executable, "-m", "atoll.runtime.supervise.fork_server", "--listen", path]
    with subprocess.Popen(
        [*command, str(tiny_folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"ready ")
        yield path
        process.stdin.close()


@contextlib.contextmanager
def serving(
    plan: Plan, services: Sequence[str], folder: Path, forks: str, stand_in: str | None = None
) -> Iterator[Running]:
    """Serve services of a plan, all with the model in `folder`, behind a gateway."""
    from atoll.runtime.endpoints.endpoint import RunDirectory
    from atoll.runtime.gateway import GatewaySettings
    from atoll.runtime.gateway.cors import CorsSettings
    from atoll.runtime.local.fleet_state import new_home, remove_home
    from atoll.runtime.local.local_endpoints import LocalModel, LocalOptions, build
    from atoll.runtime.local.local_fleet import LivenessTracker, LocalFleet
    from atoll.runtime.supervise.fork_client import ForkServer

    home, liveness = RunDirectory(new_home()), LivenessTracker()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> LocalFleet:
        models = {service: LocalModel(str(folder), folder, stand_in) for service in services}
        named = build(plan, models, home, liveness, LocalOptions(kv_bytes=8 * 2**20))
        settings = GatewaySettings(port=0, cors=CorsSettings(origins=(ORIGIN,)))
        fleet = LocalFleet("test", named, home, settings, liveness)
        fleet.agent.fork_server = ForkServer.connect(forks)
        await fleet.start()
        return fleet

    try:
        fleet = asyncio.run_coroutine_threadsafe(start(), loop).result(180)
        found = Running(fleet, loop, folder)
        try:
            yield found
        finally:
            found.wait(fleet.stop(5.0))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
        loop.close()
        remove_home(home.folder)


def one_instance() -> Plan:
    """Return a plan of one instance of the model `tiny`, whose first stage two nodes share."""
    from tests.slow.failover.chaos_fleet import tiny_plan

    instance = tiny_plan().instances[0]
    route = Route(service=instance.service, instances=(instance.id,), share=1.0)
    return tiny_plan().model_copy(update={"instances": (instance,), "routes": (route,)})


@pytest.fixture(scope="session")
def running(tiny_folder: Path, forks: str) -> Iterator[Running]:
    with serving(one_instance(), ["tiny"], tiny_folder, forks) as found:
        yield found
