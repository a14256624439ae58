"""A machine's side of the target: a local target for instances, told by signed orders of operators.

`InstanceHost` answers requests: it builds the commands of an instance from its recipe by the engine files of
this machine, and has the local target (`atoll.deploy.local`) run them and keep account. `host_instances`
takes requests over the fabric for an agent (`atoll join`) that has nothing of its own to serve. Instances end
with the agent, however it ends: whose machine it is can have it back at any time.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.core.errors import AtollError
from atoll.core.files import atomic_write, read_text_limited
from atoll.deploy.commands.node_commands import CommandSettings, InstanceRecipe
from atoll.deploy.joined.machine_request import (
    MAX_LOG_CHARACTERS,
    PURPOSE,
    MachineAnswer,
    MachineRequest,
    PartOrder,
    StandingPart,
    check_part,
    pool_machines,
    refusal_of,
)
from atoll.deploy.local.daemon import ORDER, ProcessId, process_start
from atoll.deploy.local.gpu_slots import PoolMachine
from atoll.deploy.local.local_deployer import LocalDeployer
from atoll.deploy.node_command import NodeCommand
from atoll.deploy.target import DeployError, StartOrder
from atoll.deploy.terms import read_term
from atoll.fabric.identity import fabric_keys
from atoll.runtime.endpoints.compile_cache import own_folder
from atoll.runtime.join.hardware import list_gpus
from atoll.runtime.join.signed_orders import OrderReceiver, OrderReply, encode

if TYPE_CHECKING:
    from atoll.fabric.identity.identity import Person
    from atoll.fabric.registry.records import Gpu
    from atoll.runtime.join.joined_node import JoinedNode
    from atoll.runtime.join.signed_orders import OrderQuery

BuildCommands = Callable[[PartOrder], Sequence[NodeCommand]]
_PART = "p-"
_MAX_PART_BYTES = 2**20
_KV_BYTES = 128 * 2**20
"""KV cache of a process on cores."""


class InstanceHost:
    """Instances of fleets on this machine. `build` makes the commands of a part, in the order of its nodes.

    `models` is the folder of weights that operators may name, `is_free` says whether the machine's GPUs are
    its own to give: an assignment may have them.
    """

    def __init__(
        self,
        machines: Sequence[PoolMachine],
        folder: Path,
        build: BuildCommands,
        *,
        models: str | None = None,
        is_free: Callable[[], bool] = lambda: True,
        owner: ProcessId | None = None,
        settle_s: float = 0.5,
    ) -> None:
        self._machines, self._folder, self._build = machines, folder, build
        self._models, self._is_free = models, is_free
        self._owner, self._settle_s = owner, settle_s
        self._local = self._open(600.0)

    def answer(self, request: MachineRequest) -> MachineAnswer:
        """Do what is asked; a refusal is an answer, too."""
        try:
            return self._answer(request)
        except AtollError as error:
            return refusal_of(error)

    @property
    def busy(self) -> bool:
        """Whether GPUs are held by instances."""
        return any(True for _ in self._local.list_held())

    def close(self, drain_s: float, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """End all instances, which have so many seconds to finish, and none once `is_hurried`."""
        self._local.close(drain_s, is_hurried)

    def _answer(self, request: MachineRequest) -> MachineAnswer:
        if request.verb == "look":
            return self._look(request.fleet)
        if request.verb == "start":
            return self._start(request)
        if request.verb == "drain":
            self._local.drain(request.handle, request.term)
        elif request.verb == "stop":
            self._local.stop(request.handle, request.term)
        elif request.verb == "logs":
            text = self._local.logs(request.handle, request.lines)
            return MachineAnswer(text=text[-MAX_LOG_CHARACTERS:])
        return MachineAnswer()

    def _look(self, fleet: str) -> MachineAnswer:
        parts = []
        for status in self._local.list(fleet):
            order = self._read_part(status.handle)
            if order is None:
                continue
            parts.append(
                StandingPart(
                    handle=status.handle,
                    order=order,
                    state=status.state,
                    since_s=status.since_s,
                    reason=status.reason,
                    kind=status.kind,
                )
            )
        term = read_term(self._local.fleet_folder(fleet)) if fleet else None
        held = tuple(self._local.list_held())
        return MachineAnswer(parts=tuple(parts), held=held, term=term or 0)

    def _start(self, request: MachineRequest) -> MachineAnswer:
        part = request.part
        if part is None:
            raise DeployError("nothing to start", kind="settings")
        if not self._is_free():
            raise DeployError("this machine is measured or serves an assignment", kind="capacity")
        check_part(part, self._models)
        commands = [each for each in self._build(part) if each.node in part.nodes]
        if {each.node for each in commands} != set(part.nodes):
            raise DeployError(
                "the machine builds other commands than the controller",
                kind="settings",
                hint="use the same version of Atoll on both",
            )
        local = self._open(part.drain_s)
        home = local.home_of(part.labels)
        if not (home / ORDER).exists():
            self._forget_parts(home.parent)
            home.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Before it stands: whoever finds it must be able to say what it is.
            atomic_write(_part_of(home), part.to_json())
        order = StartOrder(part.instance, part.labels, tuple(commands), ready_s=part.ready_s)
        handle = local.start(order).handle
        looked = self._look(part.labels.fleet)
        return MachineAnswer(parts=tuple(each for each in looked.parts if each.handle == handle))

    def _open(self, drain_s: float) -> LocalDeployer:
        return LocalDeployer(
            self._machines,
            self._folder,
            drain_s=drain_s,
            settle_s=self._settle_s,
            owner=self._owner,
        )

    def _read_part(self, handle: str) -> PartOrder | None:
        path = _part_of(self._local.home_of_handle(handle))
        if not path.exists():
            return None
        return PartOrder.from_json(read_text_limited(path, _MAX_PART_BYTES), path=path)

    def _forget_parts(self, folder: Path) -> None:
        """Remove what is known of instances that the local target has forgotten."""
        kept = {_part_of(home) for home in folder.glob("i-*")}
        for path in folder.glob(f"{_PART}*"):
            if path not in kept:
                path.unlink(missing_ok=True)


class HostedInstances:
    """Instances that an agent hosts for its fabric's operators, in threads of their own.

    One request is worked on at a time: the local target takes a lock in any case.
    """

    def __init__(self, node: JoinedNode, host: InstanceHost) -> None:
        self._node, self._host = node, host
        self._work = ThreadPoolExecutor(1, thread_name_prefix="hosting")
        self._tasks: set[asyncio.Task[None]] = set()
        self._hurried, self._leaving = threading.Event(), False
        self._receiver = OrderReceiver(
            node.fabric, PURPOSE, fabric_keys.host, self._ordered, node.log, time.time
        )

    @property
    def busy(self) -> bool:
        """Whether GPUs are held by instances."""
        return self._host.busy

    async def leave(self, drain_s: float) -> None:
        """Take no more orders and end all instances, which have so many seconds to finish."""
        if not self._leaving:
            self._leaving = True
            self._receiver.close()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._work, self._host.close, drain_s, self._hurried.is_set)

    async def close(self) -> None:
        """End all that is left now."""
        self._hurried.set()
        await self.leave(0.0)
        self._work.shutdown()

    def _ordered(self, body: bytes, person: Person, query: OrderQuery) -> None:
        request = MachineRequest.from_json(body)
        if request.verb not in ("look", "logs"):
            self._node.log.event("host.order", by=person.name, verb=request.verb)
        if request.verb == "measure":
            self._node.measure_again()
            query.reply(encode(OrderReply(True, body=MachineAnswer().to_json().encode())))
            return
        task = asyncio.get_running_loop().create_task(self._reply(request, person, query))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reply(self, request: MachineRequest, person: Person, query: OrderQuery) -> None:
        loop = asyncio.get_running_loop()
        try:
            answer = await loop.run_in_executor(self._work, self._host.answer, request)
        except OSError as error:
            answer = MachineAnswer(refusal=f"the machine: {error.strerror}", kind="unreachable")
        if request.part is not None and answer.refusal is None:
            self._node.say(f"{person.name} started {request.part.labels.instance} here")
        elif answer.refusal is not None:
            self._node.say(f"refused to {request.verb}: {answer.refusal}")
        query.reply(encode(OrderReply(True, body=answer.to_json().encode())))


def host_instances(node: JoinedNode) -> HostedInstances:
    """Host instances on the machine of an agent that has joined."""
    from atoll.fabric.identity.authority import write_secret

    folder = node.home.folder
    token = folder / "machine.token"
    write_secret(token, node.access.pack() + "\n")
    machines, on_gpus = list_machines(node.fabric.metadata.name, node.hardware.gpus)
    settings = CommandSettings(
        fabric=str(token),
        atoll=(sys.executable, "-m", "atoll"),
        python=sys.executable,
        **({} if on_gpus else {"device": "cpu", "dtype": "float32", "kv_bytes": _KV_BYTES}),  # type: ignore[arg-type]
        alone=on_gpus,
    )
    host = InstanceHost(
        machines,
        folder / "instances",
        lambda part: _commands(part, settings),
        models=node.options.models,
        is_free=lambda: node.is_free,
        owner=ProcessId(pid=os.getpid(), start=process_start(os.getpid()) or ""),
    )
    return HostedInstances(node, host)


def _part_of(home: Path) -> Path:
    """Return the file that says what an instance is, beside its folder, which comes later."""
    return home.with_name(_PART + home.name.removeprefix("i-") + ".json")


def list_machines(name: str, gpus: Sequence[Gpu]) -> tuple[tuple[PoolMachine, ...], bool]:
    """Return this machine as machines of a pool, and whether its driver has the GPUs that it says it has."""
    numbers: dict[str, list[int]] = {}
    for device in list_gpus():
        numbers.setdefault(device.type, []).append(device.id)
    machines = tuple(
        machine.model_copy(update={"gpu_ids": tuple(ids)})
        if len(ids := numbers.get(machine.node_type.rpartition(":")[0], [])) == machine.slots
        else machine
        for machine in pool_machines(name, gpus, "joined")
    )
    return machines, any(machine.gpu_ids is not None for machine in machines)


def _commands(part: PartOrder, settings: CommandSettings) -> Sequence[NodeCommand]:
    told = replace(
        settings,
        drain_s=part.drain_s,
        ready_s=part.ready_s,
        compile_cache=str(own_folder()) if settings.device == "cuda" else None,
    )
    recipe: InstanceRecipe = part.recipe()
    return recipe.commands(told)
