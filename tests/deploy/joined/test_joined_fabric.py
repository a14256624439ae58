"""Machines that are told over a fabric with certificates: an agent in this process, sleeping instances."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.cli.assign import send_order
from atoll.deploy.joined.joined_deployer import JoinedDeployer
from atoll.deploy.joined.machine_fabric import MachineFabric
from atoll.deploy.joined.machine_host import HostedInstances, InstanceHost, list_machines
from atoll.deploy.joined.machine_request import PURPOSE, MachineRequest, PartOrder
from atoll.deploy.node_command import NodeCommand
from atoll.deploy.target import DeployError, InstanceStatus
from atoll.fabric.identity import fabric_keys
from atoll.fabric.identity.authority import write_secret
from atoll.fabric.registry.measured import unpack_measured
from atoll.fabric.registry.records import Hardware, Metadata
from atoll.fabric.transport.fabric import Fabric
from atoll.runtime.endpoints.endpoint import RunDirectory
from atoll.runtime.join import joined_node
from atoll.runtime.join.assignment import Assignment
from atoll.runtime.join.join_options import JoinOptions
from atoll.runtime.join.joined_node import JoinedNode
from atoll.runtime.join.signed_orders import read_reply, sign_order
from tests.deploy.joined.builders import SLEEP, joined_order
from tests.runtime.join.test_trust import trusted
from tests.runtime.waiting import until

FOUND = {"kind": "layers", "model": "m", "profile": {"step_s": 0.5}}


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder with a short name, for sockets."""
    import shutil
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="a-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def sleeping(node: JoinedNode) -> HostedInstances:
    """Host instances that sleep."""
    machines, _ = list_machines(node.fabric.metadata.name, node.hardware.gpus)

    def build(part: PartOrder) -> list[NodeCommand]:
        nodes = part.instance.nodes
        return [
            NodeCommand(node=each.id, node_type=each.node_type, argv=SLEEP, gpus=each.gpus)
            for each in nodes
        ]

    host = InstanceHost(machines, node.home.folder / "instances", build, settle_s=0.1)
    return HostedInstances(node, host)


def measured_of(fabric: Fabric, sid: str) -> dict[str, Any] | None:
    """Return what a machine tells of its measurement."""
    peer = fabric.peer(sid)
    return None if peer is None else unpack_measured(peer.metadata.labels)


async def test_an_operator_starts_and_ends_instances_on_a_machine(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def measure(_hardware: Hardware) -> dict[str, Any]:
        return FOUND

    monkeypatch.setattr(joined_node, "measure", measure)
    async with trusted(tmp_path) as (authority, operator):
        access = authority.issue("gpu7", "Uni", "worker")
        lines: list[str] = []
        options = JoinOptions(name="gpu7", gpus="L4:1", drain=2.0)
        node = JoinedNode(
            options, access, RunDirectory(home), say=lines.append, environment={}, host=sleeping
        )
        await node.start()
        fabric = MachineFabric(tmp_path / "ca" / "fabric.token", "joined")
        deployer = JoinedDeployer(fabric)

        def state() -> InstanceStatus:
            (found,) = deployer.list("lab")
            return found

        try:
            until_s = time.monotonic() + 30
            while not await asyncio.to_thread(deployer.offers):
                assert time.monotonic() < until_s
            started = await asyncio.to_thread(deployer.start, joined_order())
            assert started.hosts == ("gpu7",)
            assert "operator started chat-0 here" in lines
            while (await asyncio.to_thread(state)).state != "ready":
                assert time.monotonic() < until_s
            # An assignment does not take GPUs away from instances.
            refused = await send_order(operator, node.fabric.sid, Assignment(model="org/m"))
            assert "instances of a fleet hold" in refused.message
            # Who is no operator tells it nothing.
            other = authority.issue("other", "Uni", "worker")
            worker = await Fabric.connect(other, Metadata(name="w", provider="Uni", role="worker"))
            body = MachineRequest(verb="stop", handle=started.handle, term=9).to_json().encode()
            sid, now_s = node.fabric.sid, time.time()
            order = sign_order(PURPOSE, body, other.identity, other.fabric_id, sid, now_s)
            answer = read_reply(await worker.query(fabric_keys.host(sid), order, 10.0))
            assert not answer.accepted
            assert "no operator" in answer.message
            await worker.close()
            assert (await asyncio.to_thread(state)).state == "ready"
            # It is measured when nothing runs there, and tells everybody what was found.
            with pytest.raises(DeployError, match="something runs on the machine"):
                await asyncio.to_thread(deployer.measure, "gpu7")
            await asyncio.to_thread(deployer.stop, started.handle, 0)
            await asyncio.to_thread(deployer.measure, "gpu7")
            await until(lambda: measured_of(operator, node.fabric.sid) == FOUND)
            await until(lambda: node.is_free)
            # Whose machine it is has it back, with what runs there.
            while not await asyncio.to_thread(deployer.offers):
                assert time.monotonic() < until_s
            await asyncio.to_thread(deployer.start, joined_order("chat-1"))
            await node.leave()
            assert await asyncio.to_thread(deployer.list, "lab") == ()
        finally:
            await node.close()
            await asyncio.to_thread(fabric.close)
        # Supervisors end a moment after what they kept.
        await until(lambda: processes_of(home) == [])


def processes_of(folder: Path) -> list[str]:
    """Return what of a folder still runs."""
    from tests.e2e.operated_site import processes_of as list_processes

    return [line for line in list_processes(folder) if str(os.getpid()) not in line]


def test_a_token_that_is_no_operators_is_refused(tmp_path: Path) -> None:
    from atoll.fabric.identity.authority import Authority

    authority = Authority.create(tmp_path / "ca", "test", ["127.0.0.1:7447"])
    token = tmp_path / "worker.token"
    write_secret(token, authority.issue("w", "Uni", "worker").pack())
    fabric = MachineFabric(token, "joined")
    with pytest.raises(DeployError, match="only an operator") as caught:
        fabric.list()
    assert caught.value.kind == "settings"
    fabric.close()
