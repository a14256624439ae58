"""Machines that joined, asked over a fabric that answers wrongly: late, cut, nothing, half of them, refusing.

Each machine is a stage of the local target, which is never at fault itself: what goes wrong is on the way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from atoll.deploy.joined.joined_deployer import JoinedDeployer
from atoll.deploy.joined.machine_host import InstanceHost
from atoll.deploy.joined.machine_request import (
    JoinedMachine,
    MachineAnswer,
    MachineRequest,
    PartOrder,
    pool_machines,
)
from atoll.deploy.local.local_deployer import LocalDeployer
from atoll.deploy.node_command import NodeCommand
from atoll.deploy.target import DeployError
from atoll.fabric.registry.records import Gpu
from tests.slow.targets.faults import BEGAN_S, KIND_COUNT, SECRET
from tests.slow.targets.local_stage import LocalStage


class JoinedStage:
    """Machines of a fabric, and the way to them."""

    def __init__(self, folder: Path, kinds: Sequence[str], region: str) -> None:
        self.fault: str | None = None
        self.now_s = BEGAN_S
        self._broken = False
        self._secret = folder.parent / "secret"
        self._stages: dict[str, LocalStage] = {}
        self._hosts: dict[str, InstanceHost] = {}
        self._machines: list[JoinedMachine] = []
        for kind in kinds:
            for number in range(KIND_COUNT):
                name = f"{kind[:-2].lower()}{number}"
                gpus = [Gpu(type=kind[:-2], count=int(kind[-1]), memory_bytes=1)]
                pool = pool_machines(name, gpus, region, usd_per_hour=1.0)
                stage = LocalStage(folder / name, kinds, region)
                stage.machines = pool
                self._stages[name] = stage
                self._hosts[name] = _StagedHost(stage, folder / name, self._build)
                self._machines.append(JoinedMachine(sid=name, name=name, pool=pool))

    def _build(self, part: PartOrder) -> list[NodeCommand]:
        node, secrets = part.instance.nodes[0], ((SECRET, str(self._secret)),)
        return [
            NodeCommand(node.id, node.node_type, ("sleep", "{port}"), node.gpus, secrets=secrets)
        ]

    def deployer(self) -> JoinedDeployer:
        return JoinedDeployer(self)

    def argv(self, instance: str) -> tuple[str, ...]:
        del instance
        return ("sleep", "{port}")

    # The way to the machines (`atoll.deploy.joined.joined_deployer.Machines`)

    def list(self) -> Sequence[JoinedMachine]:
        if self.fault is None:
            self._broken = False
        if self.fault in ("time-out", "denied", "late") or self._broken:
            raise DeployError("no hub of the fabric answers", kind="unreachable")
        if self.fault in ("no rows", "errors"):
            return ()
        if self.fault == "partial":
            return self._machines[1::2]
        return self._machines[::-1] if self.fault == "reordered" else self._machines

    def ask(
        self, requests: Mapping[str, MachineRequest]
    ) -> Mapping[str, MachineAnswer | DeployError]:
        return {name: self._answer(name, request) for name, request in requests.items()}

    def _answer(self, name: str, request: MachineRequest) -> MachineAnswer | DeployError:
        silence = DeployError(f"{name} does not answer", kind="unreachable")
        if self._broken:
            return silence
        if self.fault == "quota" and request.verb == "start":
            return DeployError(f"{name}: no space left", kind="quota")
        answer = self._hosts[name].answer(MachineRequest.from_json(request.to_json()))
        if self.fault == "half-started" and request.verb != "look":
            self._broken = True
            return silence
        if self.fault in ("silent", "cut"):
            return DeployError(f"{name} answers in other words", kind="settings")
        if self.fault == "duplicate":
            answer = answer.model_copy(update={"parts": (*answer.parts, *answer.parts)})
        if answer.refusal is not None:
            return DeployError(f"{name}: {answer.refusal}", kind=answer.kind or "settings")
        return answer

    # What is there

    def live(self, by_s: float) -> None:
        self.now_s += by_s
        for stage in self._stages.values():
            stage.live(by_s)

    def standing(self) -> set[str]:
        return set().union(*(stage.standing() for stage in self._stages.values()))

    def serving(self) -> set[str]:
        return set().union(*(stage.serving() for stage in self._stages.values()))

    def without_secret(self) -> set[str]:
        return set().union(*(stage.without_secret() for stage in self._stages.values()))

    def close(self) -> None:
        """End what stands for instances."""
        for stage in self._stages.values():
            stage.close()


class _StagedHost(InstanceHost):
    """A machine whose local target is a stage."""

    def __init__(self, stage: LocalStage, folder: Path, build: object) -> None:
        self._stage = stage
        super().__init__(stage.machines, folder, build)  # type: ignore[arg-type]

    def _open(self, drain_s: float) -> LocalDeployer:
        del drain_s
        return self._stage.deployer()
