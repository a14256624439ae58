"""Prefill and decode on instances of their own: two orders, one endpoint, on the local target."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.deploy.commands.node_commands import CommandSettings, ServiceWeights, node_commands
from atoll.deploy.commands.stage_node import FORK_SERVER_VARIABLE
from atoll.deploy.labels import Labels
from atoll.deploy.local.gpu_slots import PoolMachine
from atoll.deploy.local.local_deployer import LocalDeployer
from atoll.deploy.target import StartOrder
from atoll.fabric.tunnel.tunnel_frames import TunnelRequest
from atoll.runtime.http.http_client import fetch
from tests.runtime.join.live import Answer, World, world
from tests.runtime.local.test_placing import instance
from tests.runtime.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.slow]
MACHINES = tuple(PoolMachine(name=f"m{at}", node_type="L4:1") for at in range(6))
BODY = {"model": "chat", "prompt": "Hello there, my", "max_tokens": 60, "temperature": 0}


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("torch", "transformers", "zmq", "tokenizers", "httptools", "zenoh"):
        pytest.importorskip(package, reason="needs the extras 'engine', 'fabric' and 'serve'")
    from tests.tiny_model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def fork_server(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """Engines are forked from a process that has loaded them, also here."""
    socket = tmp_path / "fork_server"
    command = [sys.executable, "-m", "atoll.runtime.supervise.fork_server", "--listen", str(socket)]
    with subprocess.Popen(
        [*command, str(tiny_folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"ready ")
        monkeypatch.setenv(FORK_SERVER_VARIABLE, str(socket))
        yield socket
        assert process.stdin is not None
        process.stdin.close()
    assert not socket.exists()


def order(
    name: str, phase: str, held: list[tuple[int, int]], folder: Path, token: Path
) -> StartOrder:
    made = instance(held, name=name, phase=phase)
    labels = Labels(
        fleet="lab", instance=name, plan="p", placement=name, service="chat", role=made.role
    )
    settings = CommandSettings(
        fabric=str(token),
        atoll=(sys.executable, "-m", "atoll"),
        python=sys.executable,
        device="cpu",
        dtype="float32",
        kv_bytes=2**24,
        alone=False,
        drain_s=30.0,
    )
    weights = ServiceWeights(str(folder), ("chat",), stand_in=True)
    return StartOrder(made, labels, node_commands(made, weights, settings, labels=labels))


class Trial:
    """A fabric, the local target, and questions to the one instance that listens."""

    def __init__(self, made: World, deployer: LocalDeployer, folder: Path, token: Path) -> None:
        self.made, self.deployer = made, deployer
        self.folder, self.token = folder, token

    def state_of(self, name: str) -> str:
        return next(s.state for s in self.deployer.list("lab") if s.labels.instance == name)

    async def start(self, name: str, phase: str, held: list[tuple[int, int]]) -> None:
        await asyncio.to_thread(
            self.deployer.start, order(name, phase, held, self.folder, self.token)
        )

    async def ready(self, *names: str) -> None:
        def are_ready() -> bool:
            states = [self.state_of(name) for name in names]
            assert "failed" not in states, self.deployer.list("lab")
            return all(state == "ready" for state in states)

        await until(are_ready, 240.0)

    async def ask(self) -> str:
        await until(lambda: self._serving() is not None, 30.0)
        answer = Answer()
        headers = ((b"content-type", b"application/json"),)
        asked = TunnelRequest(b"POST", b"/v1/completions", headers, json.dumps(BODY).encode())
        sid = self._serving()
        assert sid is not None
        self.made.caller.call(sid, asked, answer)
        await until(lambda: answer.over is not None, 120.0)
        assert (answer.status, answer.over) == (200, "end"), answer
        return str(json.loads(answer.body)["choices"][0]["text"])

    def _serving(self) -> str | None:
        peers = self.made.observer.peers()
        return next((p.sid for p in peers if p.routable and p.metadata.services), None)

    async def status(self, name: str) -> dict[str, Any]:
        kept = next(self.deployer._folder.glob(f"f-lab/i-{name}/order.json"))
        port = json.loads(kept.read_text())["nodes"][0]["port"]
        _, body = await fetch(f"http://127.0.0.1:{port}/atoll/v1/status")
        return dict(json.loads(body))

    async def have_computed(self, name: str, *nodes: str) -> None:
        """Wait until these nodes of an instance and its helpers say that they computed something."""
        async with asyncio.timeout(60.0):
            while True:
                shown = (await self.status(name))["nodes"]
                if set(nodes) <= {n["name"] for n in shown if n["stats"] and n["stats"]["tokens"]}:
                    return
                await asyncio.sleep(0.1)

    async def helped_by(self, name: str, *helpers: str) -> None:
        """Wait until an instance hears just these helpers."""
        until_s = asyncio.get_running_loop().time() + 60.0
        while True:
            nodes = (await self.status(name))["nodes"]
            heard = {n["name"].partition("/")[0] for n in nodes if n["alive"]} - {name}
            if heard == set(helpers) and all(n["alive"] for n in nodes):
                return
            assert asyncio.get_running_loop().time() < until_s, nodes
            await asyncio.sleep(0.1)


async def test_prompts_are_computed_elsewhere_while_there_is_somebody(
    tmp_path: Path, tiny_folder: Path, fork_server: Path
) -> None:
    del fork_server

    deployer = LocalDeployer(MACHINES, tmp_path / "local", drain_s=60.0)
    async with world(tmp_path) as made:
        token = tmp_path / "fabric.token"
        token.write_text(made.address)
        token.chmod(0o600)
        trial = Trial(made, deployer, tiny_folder, token)
        try:
            await trial.start("decode-1", "decode", [(0, 20), (20, 32)])
            await trial.ready("decode-1")
            # Alone it does both.
            alone = await trial.ask()
            assert len(alone) > 20
            await trial.start("prefill-1", "prefill", [(0, 32)])
            await trial.start("prefill-2", "prefill", [(0, 16), (16, 32)])
            await trial.ready("prefill-1", "prefill-2")
            await trial.helped_by("decode-1", "prefill-1", "prefill-2")
            for _ in range(4):
                assert await trial.ask() == alone
            # Both helpers have computed prompts: heartbeats say so a moment later.
            await trial.have_computed("decode-1", "prefill-1/n0", "prefill-2/n0", "prefill-2/n1")
            # One goes in good order, in the middle of requests; another is killed.
            asked = [asyncio.create_task(trial.ask()) for _ in range(3)]
            await asyncio.to_thread(deployer.drain, "lab/prefill-1", 0)
            assert await asyncio.gather(*asked) == [alone] * 3
            await trial.helped_by("decode-1", "prefill-2")
            assert await trial.ask() == alone
            asked = [asyncio.create_task(trial.ask()) for _ in range(3)]
            await asyncio.to_thread(deployer.stop, "lab/prefill-2", 0)
            assert await asyncio.gather(*asked) == [alone] * 3
            await trial.helped_by("decode-1")
            assert await trial.ask() == alone
            await until(lambda: trial.state_of("prefill-1") == "gone", 60.0)
        finally:
            for status in deployer.list("lab"):
                await asyncio.to_thread(deployer.stop, status.handle, 0)
