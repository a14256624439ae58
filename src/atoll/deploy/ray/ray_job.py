"""The job of one instance, in a Ray cluster: places its nodes, watches them, and says how the instance is.

`python -m atoll.deploy.ray.ray_job` reads `order.json` where it was started. It makes one placement group, a
bundle for every node, and in every bundle an actor that runs the node's command. Every change of state is a
line in the job's log, which whoever lists instances reads. SIGTERM drains: every command gets SIGTERM and the
order's time to end. When this process ends, however it does, Ray ends the actors and gives the group back.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from atoll.core.errors import AtollError, MissingDependencyError
from atoll.core.files import read_text_limited
from atoll.deploy.ray.ray_machines import ACCELERATOR, GPU, GROUP_PREFIX
from atoll.deploy.ray.ray_node import NodeRunner
from atoll.deploy.ray.ray_package import (
    GROUP_VARIABLE,
    NAMESPACE,
    ORDER,
    RayNode,
    RayOrder,
    RayState,
    name_actor,
)
from atoll.deploy.target import DeployError, FailureKind, InstanceState, classify_exit

_LOOK_S = 0.5
_WAIT_S = 1.0
_UNAVAILABLE_S = 60.0
"""How long Ray may be unsure of an actor; it takes a machine for lost after about 30 s."""
_MACHINE_LABEL = "ray.io/node-id"


class NodeLostError(AtollError):
    """A node's machine or actor is gone."""

    def __init__(self, reason: str, kind: FailureKind = "ended") -> None:
        super().__init__(reason)
        self.kind: FailureKind = kind


class NodeGroup(Protocol):
    """The nodes of an instance, wherever they stand."""

    async def place(self) -> Sequence[RayNode]:
        """Wait for room, and return where the nodes will stand; DeployError where there is none in time."""
        ...

    async def start(self) -> None:
        """Start every node's command."""
        ...

    async def look(self, node: str) -> Mapping[str, str]:
        """Return how a node is, as `NodeRunner.look`; NodeLostError where it is gone."""
        ...

    async def drain(self, node: str) -> None:
        """Have a node end when its streams have."""
        ...


class InstanceJob:
    """The life of one instance; see the module."""

    def __init__(
        self,
        order: RayOrder,
        group: NodeGroup,
        say: Callable[[RayState], None],
        *,
        clock: Callable[[], float] = time.time,
        look_s: float = _LOOK_S,
    ) -> None:
        self._order, self._group, self._say = order, group, say
        self._clock, self._look_s = clock, look_s
        self._drained = asyncio.Event()
        self._nodes: tuple[RayNode, ...] = ()
        self._state: RayState | None = None

    def drain(self) -> None:
        """Begin to end."""
        self._drained.set()

    async def run(self) -> int:
        """See the instance through; returns the exit code, which is 0 if it was drained."""
        self._write("starting", f"waits for {self._order.wanted}")
        placing = asyncio.create_task(self._begin())
        draining = asyncio.create_task(self._drained.wait())
        try:
            await asyncio.wait({placing, draining}, return_when=asyncio.FIRST_COMPLETED)
            if not placing.done():
                # Nothing runs that could finish anything.
                self._write("gone", "was drained")
                return 0
            await placing
            return await self._watch()
        except (DeployError, NodeLostError) as error:
            self._write("failed", error.message, error.kind)
            return 1
        finally:
            placing.cancel()
            draining.cancel()

    async def _begin(self) -> None:
        self._nodes = tuple(await self._group.place())
        self._write("starting")
        await self._group.start()

    async def _watch(self) -> int:
        told, names = False, [each.node for each in self._order.commands if each.argv]
        while True:
            if self._drained.is_set() and not told:
                told = True
                self._write("draining")
                await asyncio.gather(*(self._tell(name) for name in names))
            looks = {name: await self._look(name, told) for name in names}
            states = {look["state"] for look in looks.values()}
            failed = next((name for name in names if looks[name]["state"] == "failed"), None)
            if told and states <= {"gone", "failed"}:
                self._write("gone", "was drained")
                return 0
            if not told and failed is not None:
                self._fail(failed, looks[failed])
                return 1
            if not told and states == {"ready"}:
                self._write("ready")
            if told:
                await asyncio.sleep(self._look_s)
                continue
            # Whoever drains need not wait for the next look.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._drained.wait(), self._look_s)

    async def _look(self, node: str, draining: bool) -> Mapping[str, str]:
        try:
            return await self._group.look(node)
        except NodeLostError:
            # What was told to end and is no more has ended.
            if draining:
                return {"state": "gone"}
            raise

    async def _tell(self, node: str) -> None:
        try:
            await self._group.drain(node)
        except NodeLostError:
            return

    def _fail(self, node: str, look: Mapping[str, str]) -> None:
        was_ready = self._state is not None and self._state.state == "ready"
        reason, last = look.get("reason", "ended"), look.get("last", "no word")
        kind: FailureKind = "ended" if was_ready else classify_exit(reason, last)
        self._write("failed", f"{node} {reason}: {last}", kind)

    def _write(
        self, state: InstanceState, reason: str = "", kind: FailureKind | None = None
    ) -> None:
        old = self._state
        since_s = old.since_s if old is not None and old.state == state else self._clock()
        new = RayState(state=state, since_s=since_s, reason=reason, kind=kind, nodes=self._nodes)
        if new != old:
            self._state = new
            self._say(new)


class ActorGroup:
    """The nodes of an instance as actors in a placement group."""

    def __init__(self, ray: Any, order: RayOrder) -> None:
        self._ray, self._order = ray, order
        self._util = importlib.import_module("ray.util")
        self._group: Any = None
        self._first: dict[str, int] = {}
        self._actors: dict[str, Any] = {}
        self._nodes: dict[str, RayNode] = {}

    async def place(self) -> Sequence[RayNode]:
        """Make the placement group and wait until it stands."""
        order, until_s = self._order, time.monotonic() + self._order.schedule_s
        while not await self._reserve():
            if time.monotonic() > until_s:
                raise DeployError(
                    f"no room for {order.wanted} came within {order.schedule_s:g} s",
                    kind="capacity",
                )
        placed = self._util.placement_group_table(self._group)["bundles_to_node_id"]
        hosts = {node["NodeID"]: node["NodeName"] for node in self._ray.nodes()}
        at = 0
        for command in order.commands:
            self._first[command.node] = at
            self._nodes[command.node] = RayNode(
                node=command.node,
                machine=placed[at],
                host=hosts[placed[at]],
                log=f"{order.job}.{command.node}.log" if command.argv else "",
            )
            at += len(order.bundles(command))
        return tuple(self._nodes.values())

    async def _reserve(self) -> bool:
        """Whether the group stands; tried for a moment."""
        order = self._order
        if self._group is None:
            # Bundles of one GPU must be told their machine, or a node's would come to stand on several.
            chosen = self._choose() if order.spread else [c.only for c in order.commands]
            if chosen is None:
                await asyncio.sleep(_WAIT_S)
                return False
            pairs = [
                (bundle, self._selector(only))
                for command, only in zip(order.commands, chosen, strict=True)
                for bundle in order.bundles(command)
            ]
            selectors = [selector for _, selector in pairs]
            # Versions of Ray without selectors are told of none.
            extra = {"bundle_label_selector": selectors} if any(selectors) else {}
            self._group = self._util.placement_group(
                [bundle for bundle, _ in pairs],
                strategy="PACK",
                name=f"{GROUP_PREFIX}{order.job}",
                **extra,
            )
        if await asyncio.to_thread(self._group.wait, _WAIT_S):
            return True
        if order.spread:
            # Somebody was faster on a machine that was chosen: choose anew.
            self._util.remove_placement_group(self._group)
            self._group = None
        return False

    def _choose(self) -> list[str | None] | None:
        state = importlib.import_module("ray._private.state")
        return assign_machines(self._order, state.available_resources_per_node())

    async def start(self) -> None:
        """Start an actor for every command, and there the command."""
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        order, kind = self._order, self._ray.remote(NodeRunner)
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in self._ray.nodes()}
        for command in order.commands:
            if not command.argv:
                continue
            # Where Ray starts workers, the GPUs are theirs.
            bundle = {} if order.spread else order.bundles(command)[0]
            node = self._nodes[command.node]
            self._actors[command.node] = kind.options(
                name=name_actor(order.job, command.node),
                num_cpus=bundle.pop("CPU", 0),
                num_gpus=bundle.pop(GPU, 0),
                resources=bundle,
                max_restarts=0,
                scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=self._first[command.node]
                ),
            ).remote(
                command.node,
                command.argv,
                {**command.env, **self._cluster_variables()},
                command.secrets,
                ready_s=order.ready_s,
                drain_s=order.drain_s,
                log=node.log,
            )
        starts = [
            self._ask(name, "start", addresses[self._nodes[name].machine]) for name in self._actors
        ]
        await asyncio.gather(*starts)

    def _cluster_variables(self) -> dict[str, str]:
        """What a server needs to find the bundles of its workers, in the order of its ranks."""
        if not self._order.spread:
            return {}
        count = sum(len(self._order.bundles(command)) for command in self._order.commands)
        return {
            GROUP_VARIABLE: f"{GROUP_PREFIX}{self._order.job}",
            "RAY_ADDRESS": self._ray.get_runtime_context().gcs_address,
            "VLLM_RAY_BUNDLE_INDICES": ",".join(map(str, range(count))),
        }

    async def look(self, node: str) -> Mapping[str, str]:
        """Ask a node's actor; those that have its nodes for their workers lose them with the machine."""
        for name in self._nodes.keys() - self._actors.keys():
            if not self._stands(name):
                raise self._lost(name, "")
        found: Mapping[str, str] = await self._ask(node, "look")
        return found

    async def drain(self, node: str) -> None:
        """Tell a node's actor."""
        await self._ask(node, "drain")

    async def _ask(self, node: str, verb: str, *words: str) -> Any:
        exceptions = importlib.import_module("ray.exceptions")
        until_s = time.monotonic() + _UNAVAILABLE_S
        while True:
            try:
                return await getattr(self._actors[node], verb).remote(*words)
            except exceptions.RayActorError as error:
                # Ray says so while it does not know yet whether a machine is gone.
                unsure = isinstance(error, exceptions.ActorUnavailableError)
                if not unsure or time.monotonic() > until_s:
                    raise self._lost(node, str(error)) from error
            await asyncio.sleep(_LOOK_S)

    def _lost(self, node: str, text: str) -> NodeLostError:
        stood = self._nodes[node]
        if not self._stands(node):
            return NodeLostError(f"{node} was lost: {stood.host} has left the cluster")
        kind: FailureKind = "memory" if classify_exit("", text) == "memory" else "ended"
        return NodeLostError(f"{node} was lost: its actor on {stood.host} was killed", kind)

    def _stands(self, node: str) -> bool:
        """Whether a node's machine is in the cluster."""
        alive = {each["NodeID"] for each in self._ray.nodes() if each["Alive"]}
        return self._nodes[node].machine in alive

    def _selector(self, only: str | None) -> dict[str, str]:
        if only is not None:
            return {_MACHINE_LABEL: only}
        avoid = self._order.avoid
        return {_MACHINE_LABEL: f"!in({','.join(avoid)})"} if avoid else {}


def assign_machines(
    order: RayOrder, free: Mapping[str, Mapping[str, float]]
) -> list[str | None] | None:
    """Return a machine for every command of an order, by what is free of each; None if there is no room.

    Large commands choose first, each the machine on which least is left over.
    """
    left = {name: dict(resources) for name, resources in free.items() if name not in order.avoid}
    chosen: dict[str, str] = {}
    for command in sorted(order.commands, key=lambda command: -command.gpus):
        kind = f"{ACCELERATOR}{command.accelerator}"
        fitting = [
            name
            for name, resources in left.items()
            if resources.get(GPU, 0.0) >= command.gpus
            and (command.accelerator is None or kind in resources)
            and command.only in (None, name)
        ]
        if not fitting:
            return None
        best = min(fitting, key=lambda name: (left[name].get(GPU, 0.0), name))
        left[best][GPU] = left[best].get(GPU, 0.0) - command.gpus
        chosen[command.node] = best
    return [chosen[command.node] for command in order.commands]


def load_ray(*, show_actors: bool = False) -> Any:
    """Return Ray, connected to the cluster that this runs in, or say how to get it.

    A job's log is for its states: what actors write stays in their files, unless it is to be shown.
    """
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise MissingDependencyError("ray", "ray", needed_for="a job of the Ray target") from error
    ray.init(namespace=NAMESPACE, log_to_driver=show_actors, logging_level=logging.WARNING)
    return ray


def _say(state: RayState) -> None:
    sys.stdout.write(f"{state.line()}\n")
    sys.stdout.flush()


async def _serve(ray: Any, order: RayOrder) -> int:
    job = InstanceJob(order, ActorGroup(ray, order), _say)
    # Ray's own handler would end this process at once.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, job.drain)
    return await job.run()


def main() -> int:
    """Read the order, see the instance through, and return the exit code."""
    try:
        order = RayOrder.from_json(read_text_limited(Path(ORDER)), path=Path(ORDER))
        return asyncio.run(_serve(load_ray(), order))
    except AtollError as error:
        kind: FailureKind = "image" if isinstance(error, MissingDependencyError) else "settings"
        _say(RayState(state="failed", since_s=time.time(), reason=str(error), kind=kind))
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
