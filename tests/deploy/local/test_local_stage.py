"""A pipeline of unlike nodes, from a plan's instance to tokens: local target, fabric, stage engine."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll.deploy.commands.node_commands import (
    CommandSettings,
    ServiceWeights,
    node_commands,
    read_labels,
)
from atoll.deploy.labels import Labels
from atoll.deploy.local.gpu_slots import PoolMachine
from atoll.deploy.local.local_deployer import LocalDeployer
from atoll.deploy.target import StartOrder
from atoll.fabric.registry.peers import Peer
from atoll.fabric.tunnel.tunnel_frames import TunnelRequest
from tests.runtime.join.live import Answer, World, world
from tests.runtime.local.test_placing import instance
from tests.runtime.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.slow]
KINDS = ("CORE-L", "CORE-S")
LABELS = Labels(
    fleet="lab", instance="chat-0", plan="p", placement="l", service="chat", role="chat/llm/both"
)


def order(folder: Path, token: Path, sizes: tuple[int, int]) -> StartOrder:
    made = instance([(0, 20), (20, 32)])
    nodes = [
        node.model_copy(update={"node_type": f"{kind}:{size}", "tp": size})
        for node, kind, size in zip(made.nodes, KINDS, sizes, strict=True)
    ]
    made = made.model_copy(update={"nodes": tuple(nodes)})
    settings = CommandSettings(
        fabric=str(token),
        atoll=(sys.executable, "-m", "atoll"),
        python=sys.executable,
        device="cpu",
        dtype="float32",
        kv_bytes=2**24,
        alone=False,
        split_on_cores=True,
        drain_s=30.0,
    )
    weights = ServiceWeights(str(folder), ("chat",), engine="atoll", stand_in=True)
    return StartOrder(made, LABELS, node_commands(made, weights, settings, labels=LABELS))


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("torch", "transformers", "zmq", "tokenizers", "httptools", "zenoh"):
        pytest.importorskip(package, reason="needs the extras 'engine', 'fabric' and 'serve'")
    from tests.tiny_model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def serving_peer(made: World) -> Peer | None:
    return next((p for p in made.observer.peers() if p.routable and p.metadata.services), None)


async def eventually(deployer: LocalDeployer, wanted: str) -> None:
    def reached() -> bool:
        (status,) = deployer.list("lab")
        assert status.state not in ("failed", "gone") or status.state == wanted, status
        return status.state == wanted

    await until(reached, 240.0)


async def ask(made: World, peer: Peer, body: dict[str, Any]) -> Answer:
    answer = Answer()
    headers = ((b"content-type", b"application/json"),)
    asked = TunnelRequest(b"POST", b"/v1/completions", headers, json.dumps(body).encode())
    made.caller.call(peer.sid, asked, answer)
    await until(lambda: answer.over is not None, 120.0)
    return answer


def run_with_instance(
    tmp_path: Path,
    folder: Path,
    sizes: tuple[int, int],
    work: Callable[[World, LocalDeployer], Any],
) -> None:
    machines = tuple(
        PoolMachine(name=kind.lower(), node_type=f"{kind}:{size}")
        for kind, size in zip(KINDS, sizes, strict=True)
    )

    async def live() -> None:
        deployer = LocalDeployer(machines, tmp_path / "local", drain_s=60.0)
        async with world(tmp_path) as made:
            token = tmp_path / "fabric.token"
            token.write_text(made.address)
            token.chmod(0o600)
            try:
                await asyncio.to_thread(deployer.start, order(folder, token, sizes))
                await eventually(deployer, "ready")
                await work(made, deployer)
            finally:
                for status in deployer.list("lab"):
                    await asyncio.to_thread(deployer.stop, status.handle, 0)

    asyncio.run(live())


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1)], ids=["one GPU", "tensor parallel"])
def test_two_unlike_nodes_serve_drain_and_leave(
    tmp_path: Path, tiny_folder: Path, sizes: tuple[int, int]
) -> None:
    async def work(made: World, deployer: LocalDeployer) -> None:
        # Ready means that gateways know of it.
        await until(lambda: serving_peer(made) is not None, 5.0)
        peer = serving_peer(made)
        assert peer is not None
        assert read_labels(peer.metadata.labels) == LABELS
        assert [service.model for service in peer.metadata.services] == ["chat"]
        body = {"model": "chat", "prompt": "Hi", "max_tokens": 100, "temperature": 0}
        undisturbed = await ask(made, peer, body)
        assert (undisturbed.status, undisturbed.over) == (200, "end")
        running = asyncio.create_task(ask(made, peer, body))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(deployer.drain, "lab/chat-0", 0)
        drained = await running
        assert (drained.status, drained.over) == (200, "end")
        expected = json.loads(undisturbed.body)["choices"]
        assert json.loads(drained.body)["choices"] == expected
        assert len(expected[0]["text"]) > 20
        await eventually(deployer, "gone")
        assert serving_peer(made) is None

    run_with_instance(tmp_path, tiny_folder, sizes, work)
