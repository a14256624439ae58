"""Machines that joined a fabric, without the fabric: hosts of instances in this process."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from atoll.deploy.commands.node_commands import InstanceRecipe, ServiceWeights
from atoll.deploy.joined.machine_host import InstanceHost
from atoll.deploy.joined.machine_request import (
    JoinedMachine,
    MachineAnswer,
    MachineRequest,
    PartOrder,
    pool_machines,
)
from atoll.deploy.node_command import NodeCommand
from atoll.deploy.target import DeployError, StartOrder
from atoll.fabric.registry.records import Gpu
from tests.deploy.kubernetes.builders import build_order

SLEEP = (sys.executable, "-c", "import time; print('at work', flush=True); time.sleep(600)")


@dataclass
class FakeMachines:
    """Machines by name; those in `silent` are there and do not answer, those in `away` are not there.

    `losing`: machines that do what they are asked, and whose answer is lost.
    """

    folder: Path
    hosts: dict[str, InstanceHost] = field(default_factory=dict)
    pools: dict[str, JoinedMachine] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    away: set[str] = field(default_factory=set)
    losing: set[str] = field(default_factory=set)
    asked: list[tuple[str, MachineRequest]] = field(default_factory=list)
    argv: Sequence[str] = SLEEP
    models: str | None = None

    def add(self, name: str, *gpus: tuple[str, int]) -> InstanceHost:
        """Let a machine join."""
        found = [Gpu(type=kind, count=count, memory_bytes=1) for kind, count in gpus]
        pool = pool_machines(name, found, "joined")
        self.pools[name] = JoinedMachine(sid=f"sid-{name}", name=name, pool=pool)
        self.hosts[name] = InstanceHost(
            pool, self.folder / name, self._build, models=self.models, settle_s=0.1
        )
        return self.hosts[name]

    def list(self) -> Sequence[JoinedMachine]:
        return tuple(self.pools[name] for name in sorted(self.pools.keys() - self.away))

    def ask(
        self, requests: Mapping[str, MachineRequest]
    ) -> Mapping[str, MachineAnswer | DeployError]:
        return {sid: self._answer(sid.removeprefix("sid-"), each) for sid, each in requests.items()}

    def close(self) -> None:
        """End all that runs."""
        for host in self.hosts.values():
            host.close(0.0)

    def _answer(self, name: str, request: MachineRequest) -> MachineAnswer | DeployError:
        self.asked.append((name, request))
        lost = DeployError(f"{name} does not answer", kind="unreachable")
        if name in self.silent | self.away:
            return lost
        # As it travels.
        answer = self.hosts[name].answer(MachineRequest.from_json(request.to_json()))
        answer = MachineAnswer.from_json(answer.to_json())
        if name in self.losing and request.verb != "look":
            return lost
        if answer.refusal is not None:
            return DeployError(f"{name}: {answer.refusal}", kind=answer.kind or "settings")
        return answer

    def _build(self, part: PartOrder) -> Sequence[NodeCommand]:
        return [
            NodeCommand(
                node=node.id, node_type=node.node_type, argv=tuple(self.argv), gpus=node.gpus
            )
            for node in part.instance.nodes
        ]


def joined_order(
    instance: str = "chat-0",
    *,
    types: tuple[str, ...] = ("L4:1",),
    term: int = 0,
    source: str = "hf://org/model",
    fleet: str = "lab",
) -> StartOrder:
    """Return an order with its recipe."""
    order = build_order(instance, types=types, term=term, region="joined", fleet=fleet)
    weights = ServiceWeights(source, ("chat",))
    return replace(order, recipe=InstanceRecipe(order.instance, weights, order.labels))
