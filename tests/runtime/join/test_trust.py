"""Joining and assigning with certificates: tokens, a worker that may not assign, Atoll's own engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from atoll.cli.assign import find_node, send_order
from atoll.core.errors import UsageError
from atoll.fabric.identity.access import Access
from atoll.fabric.identity.authority import Authority
from atoll.fabric.registry.records import Metadata
from atoll.fabric.transport.fabric import Fabric
from atoll.fabric.transport.hub import Hub, hub_options
from atoll.fabric.tunnel.tunnel_client import TunnelClient
from atoll.fabric.tunnel.tunnel_frames import TunnelRequest
from atoll.runtime.endpoints.endpoint import RunDirectory
from atoll.runtime.http.listen_address import free_ports
from atoll.runtime.join.assignment import Assignment
from atoll.runtime.join.join_options import JoinOptions
from atoll.runtime.join.joined_node import JoinedNode
from tests.runtime.join.live import Answer, engine
from tests.runtime.waiting import until

ROOT = Path(__file__).resolve().parents[3]


@contextlib.asynccontextmanager
async def trusted(tmp_path: Path) -> AsyncIterator[tuple[Authority, Fabric]]:
    """A fabric with certificates, and its operator in it."""
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    authority = Authority.create(tmp_path / "ca", "test", [address])
    token = (tmp_path / "ca" / "hub-h0.token").read_text()
    hub = await Hub.start(hub_options(token.strip(), listen=[address]))
    access = Access.open(str(tmp_path / "ca"))
    metadata = Metadata(name="planner", provider="test", role="operator")
    operator = await Fabric.connect(access, metadata)
    try:
        yield authority, operator
    finally:
        await operator.close()
        await hub.close()


def serves(fabric: Fabric, model: str) -> bool:
    return any(
        peer.routable and any(service.model == model for service in peer.metadata.services)
        for peer in fabric.peers()
    )


@pytest.mark.slow
async def test_a_token_is_enough_to_join_and_nobody_but_an_operator_assigns(tmp_path: Path) -> None:
    async with trusted(tmp_path) as (authority, operator):
        token = tmp_path / "worker.token"
        token.write_text(authority.issue("cluster", "Uni", "worker").pack())
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "atoll", "join", "--fabric", f"@{token}"),
                *("--name", "gpu1", "--accept-assignments", "--log", str(tmp_path / "log")),
                *("--", *engine()),
            ],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        await until(lambda: serves(operator, "org/m"))
        peer = find_node(operator.peers(), "gpu1")
        assert (peer.name, peer.provider, peer.verified) == ("cluster/gpu1", "Uni", True)
        other = authority.issue("other", "Uni", "worker")
        worker = await Fabric.connect(other, Metadata(name="w", provider="Uni", role="worker"))
        refused = await send_order(worker, peer.sid, Assignment(model="org/evil"))
        assert not refused.accepted
        assert "no operator" in refused.message
        await worker.close()
        accepted = await send_order(operator, peer.sid, Assignment())
        assert accepted.accepted
        await until(lambda: not serves(operator, "org/m"))
        process.send_signal(signal.SIGTERM)
        await until(lambda: process.poll() is not None)
        _, said = process.communicate()
        assert process.returncode == 0
        assert "operator ended the assignment" in said
        events = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
        reasons = [e["reason"] for e in events if e["event"] == "order.refused"]
        assert reasons == ["role"]
        # No secret is ever written down.
        assert token.read_text()[20:60] not in said + (tmp_path / "log").read_text()


async def test_the_token_of_a_hub_is_refused(tmp_path: Path) -> None:
    Authority.create(tmp_path / "ca", "test", ["127.0.0.1:7447"])
    access = Access.open(f"@{tmp_path}/ca/hub-h0.token")

    with pytest.raises(UsageError, match="a hub's"):
        JoinedNode(JoinOptions(), access, RunDirectory(tmp_path))


@pytest.mark.slow
@pytest.mark.engine
def test_an_operator_assigns_weights_to_atolls_own_engine(tmp_path: Path) -> None:
    for package in ("torch", "transformers", "zmq", "tokenizers"):
        pytest.importorskip(package, reason="needs the extra 'engine'")
    from tests.tiny_model import write_tiny_model

    models = tmp_path / "models"
    folder = write_tiny_model(models / "tiny")
    home = Path(os.environ.get("TMPDIR", "/tmp")) / f"atoll-join-{os.getpid()}"
    home.mkdir(mode=0o700)

    async def run() -> None:
        async with trusted(tmp_path) as (authority, operator):
            access = authority.issue("cluster", "Uni", "worker")
            options = JoinOptions(name="cpu1", models=str(models), health_interval=0.5)
            lines: list[str] = []
            node = JoinedNode(options, access, RunDirectory(home), say=lines.append, environment={})
            await node.start()
            await until(lambda: operator.peer(node.fabric.sid) is not None)
            order = Assignment(
                engine="atoll", model=str(folder), name="tiny", settings={"kv-mib": "8"}
            )
            assert (await send_order(operator, node.fabric.sid, order)).accepted
            await until(lambda: serves(operator, "tiny"), 120)
            peer = find_node(operator.peers(), "cpu1")
            assert peer.metadata.engine == "atoll"
            caller, answer = TunnelClient(operator), Answer()
            body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 5, "stream": True})
            submit = TunnelRequest(
                *(b"POST", b"/v1/completions"),
                ((b"content-type", b"application/json"),),
                body.encode(),
            )
            caller.call(peer.sid, submit, answer)
            await until(lambda: answer.over is not None, 120)
            assert (answer.status, answer.over) == (200, "end")
            assert answer.body.endswith(b"data: [DONE]\n\n")
            await caller.close()
            await node.leave()
            await node.close()

    try:
        asyncio.run(run())
    finally:
        for path in home.iterdir():
            path.unlink()
        home.rmdir()


async def test_a_node_whose_token_was_revoked_ends_and_says_why(tmp_path: Path) -> None:
    async with trusted(tmp_path) as (authority, operator):
        access = authority.issue("cluster", "Uni", "worker")
        node = JoinedNode(JoinOptions(name="n"), access, RunDirectory(tmp_path))
        await node.start()
        try:
            await until(lambda: len(operator.peers()) == 2)
            serial = next(m.serial for m in authority.members if m.name == "cluster")
            node.fabric.verifier.revoke([int(serial, 16)])
            async with asyncio.timeout(60):
                with pytest.raises(UsageError, match="revoked"):
                    await node.wait_ended()
        finally:
            await node.close()
