"""What happens in a real Kubernetes cluster beside its API: machines die, are drained, objects are damaged.

Each event is a script: it changes the cluster, and takes a turn of the controller wherever it yields. What
should not be is noted in words; the fleet has to carry its demand all the time, and to come to rest.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console

from atoll.cli.fleet_status import draw_fleet_status
from atoll.control.operation import fleet_status
from atoll.control.operation.fleet_home import FleetHome, FleetRecord
from atoll.control.operation.operated import TargetLook
from atoll.control.operation.targets import PoolTarget
from atoll.deploy.kubernetes.kube_deployer import KubernetesDeployer
from atoll.deploy.target import DeployError
from atoll.deploy.target_table import TargetSettings
from tests.deploy.killed_rollouts import FLEET
from tests.deploy.kubernetes.builders import build_order
from tests.deploy.kubernetes.tiny_api import TinyApi
from tests.slow.targets.fault_stages import KubeStage
from tests.slow.targets.target_faults import NEW, OLD, REGION, TURN_S, Fleet, Outcome, problem

LARGE = "L4:4"
"""A whole machine of several GPUs."""


@dataclass
class ClusterWorld:
    """A fleet in a cluster, and what is found wrong there."""

    stage: KubeStage
    fleet: Fleet
    wrong: list[str] = field(default_factory=list)

    @property
    def api(self) -> TinyApi:
        """The cluster's API, as those use it who are not the controller."""
        return self.stage.api

    def check(self, holds: bool, what: str) -> None:
        """Note what should hold and does not."""
        if not holds:
            self.wrong.append(what)

    def pods(self) -> dict[str, str]:
        """Return the machines of pods by pod."""
        return {key[2]: pod["spec"].get("nodeName", "") for key, pod in self.api.of("pods")}

    def drain(self, machine: str, max_turns: int) -> Iterator[None]:
        """Drain a machine as kubectl does: cordon it, and evict its pods until all are gone."""
        self.api.cordon(machine)
        for _ in range(max_turns):
            left = [pod for pod, at in self.pods().items() if at == machine]
            for pod in left:
                self.evict(pod)
            if not left:
                return
            yield
        self.check(False, f"a drain has not ended after {max_turns * TURN_S:g} s")

    def evict(self, pod: str) -> int:
        """Ask that a pod leave its machine; returns the status of the answer."""
        path = f"/api/v1/namespaces/default/pods/{pod}/eviction"
        return self.api.ask("POST", path, query={}).status

    def show_status(self) -> str:
        """Return what `atoll status` says of the fleet."""
        record = FleetRecord(
            name=FLEET,
            source="lab.yaml",
            targets=TargetSettings(names=("kubernetes",)),
            since_s=0.0,
        )
        home = FleetHome(self.fleet.folder)
        deployer = PoolTarget(self.stage.deployer(), ())
        try:
            look = TargetLook("kubernetes", deployer, tuple(deployer.list(FLEET)))
        except DeployError as error:
            look = TargetLook("kubernetes", deployer, error=str(error))
        console = Console(width=200)
        with (
            mock.patch.object(fleet_status, "look_at_targets", return_value=(look,)),
            console.capture() as captured,
        ):
            seen = fleet_status.look_at_fleet(home, record, self.stage.now_s)
            console.print(draw_fleet_status(seen, self.stage.now_s))
        return captured.get()


Script = Callable[[ClusterWorld], Iterator[None]]


@dataclass(frozen=True)
class ClusterEvent:
    """A script, settings of the cluster as a target, the machines there and those wanted in the end.

    `started` is how many instances are started in all; more are duplicates.
    """

    name: str
    script: Script
    started: int
    ends: tuple[str, ...] = (OLD, OLD)
    settings: Mapping[str, Any] = field(default_factory=dict)
    machines: tuple[str, ...] = (OLD, NEW)
    ready_s: float = 600.0


def lose_machine(world: ClusterWorld) -> Iterator[None]:
    """A machine dies under an instance; its owner takes it away minutes later."""
    machine = min(world.pods().values())
    world.api.lose_machine(machine)
    yield
    world.check(len(world.stage.serving()) == 2, "a dead machine is no loss at once")
    for _ in range(20):
        yield
    world.api.remove_machine(machine)


def lose_machine_for_good(world: ClusterWorld) -> Iterator[None]:
    """A machine vanishes, and is not listed any more at once."""
    machine = min(world.pods().values())
    world.api.dead.add(machine)
    del world.api.objects["nodes", "", machine]
    for key, pod in world.api.of("pods"):
        if pod["spec"].get("nodeName") == machine:
            world.api.set_status(key[2], conditions=[{"type": "Ready", "status": "False"}])
    yield
    world.check(len(world.stage.serving()) == 2, "a machine that is gone is no loss at once")
    for key, pod in list(world.api.of("pods")):
        if pod["spec"].get("nodeName") == machine:
            del world.api.objects[key]


def drain_machine(world: ClusterWorld) -> Iterator[None]:
    """Somebody drains a machine."""
    yield from world.drain(min(world.pods().values()), max_turns=240)


def drain_all(world: ClusterWorld) -> Iterator[None]:
    """Both machines of the fleet are drained, one after the other."""
    for machine in sorted(world.pods().values()):
        yield from world.drain(machine, max_turns=240)


def drain_while_another_takes_over(world: ClusterWorld) -> Iterator[None]:
    """The controller is replaced in the midst of a drain."""
    for number, _ in enumerate(world.drain(min(world.pods().values()), max_turns=240)):
        if number == 1:
            world.fleet.controller = world.fleet.control(OLD)
        yield


def drain_while_the_controller_is_slow(world: ClusterWorld) -> Iterator[None]:
    """Nobody acts for the first minute of a drain: evictions wait."""
    drain = world.drain(min(world.pods().values()), max_turns=240)
    for _ in range(12):
        next(drain)
        world.stage.live(TURN_S)
        world.check(len(world.stage.serving()) == 2, "an eviction passed before the move")
    yield from drain


def drain_while_nobody_operates(world: ClusterWorld) -> Iterator[None]:
    """The controller is away for good when a machine is drained: the drain ends all the same."""
    drain = world.drain(min(world.pods().values()), max_turns=120)
    for _ in drain:
        world.stage.live(TURN_S)
    yield


def uncordon(world: ClusterWorld) -> Iterator[None]:
    """A machine is cordoned for a moment, and nothing is evicted."""
    machine = min(world.pods().values())
    world.api.cordon(machine)
    yield
    world.api.objects["nodes", "", machine]["spec"]["unschedulable"] = False
    world.api.objects["nodes", "", machine]["metadata"]["managedFields"] = []
    for _ in range(10):
        yield


def damage(kind: str, *path: str) -> Script:
    """Return a script in which somebody removes a field of the first object of a kind."""

    def script(world: ClusterWorld) -> Iterator[None]:
        there = next(iter(world.api.of(kind)))[1]
        for part in path[:-1]:
            there = there[part]
        removed = there.pop(path[-1])
        for _ in range(16):
            yield
            world.check("2 of 2 ready" in world.show_status(), "status does not count it any more")
            routed = {name for route in world.fleet.gateways.routes for name in route.instances}
            world.check(routed == world.stage.serving(), "requests do not go to it any more")
        there[path[-1]] = removed

    return script


def write_half_of_one(world: ClusterWorld) -> Iterator[None]:
    """Objects of others with our labels and nothing else stand in the namespace."""
    labels = dict(next(iter(world.api.of("configmaps")))[1]["metadata"]["labels"])
    for number, given in enumerate(({}, {"nodes": "many"}, {"instance": "{"})):
        name = f"theirs-{number}"
        meta = {"name": name, "namespace": "default", "labels": labels}
        world.api._create(("configmaps", "default", name), {"metadata": meta, "data": given})
    for _ in range(10):
        yield
        world.check("2 of 2 ready" in world.show_status(), "status counts what is not ours")
    for number in range(3):
        key = ("configmaps", "default", f"theirs-{number}")
        world.check(key in world.api.objects, "what is not ours was deleted")
        world.api.objects.pop(key, None)


def evict_again_and_again(world: ClusterWorld) -> Iterator[None]:
    """While the plan changes, pods of what is new are taken away before they are ready, for some minutes."""
    old = world.stage.serving()
    world.fleet.change_plan(NEW, NEW)
    api = world.api
    with mock.patch.object(api, "make_ready"):
        for _ in range(30):
            yield
            for key, pod in list(api.of("pods")):
                if pod["spec"].get("nodeName", "").startswith("l40s"):
                    del api.objects[key]
            api.step()
            world.check(old <= world.stage.serving(), "what served was ended first")
    told = (event.text for event in world.fleet.controller.history.read())
    failed = any("not ready after" in text for text in told)
    world.check(failed, "pods that are evicted for ever are for ever starting")


def share_with_another_fleet(world: ClusterWorld) -> Iterator[None]:
    """Another fleet of ours holds most machines of the kind that becomes cheap."""
    theirs = KubernetesDeployer(world.stage.client(), world.stage.settings, fleet="other")
    for number in range(3):
        theirs.start(build_order(f"their-{number}", types=(NEW,), region=REGION, fleet="other"))
    world.api.step()
    world.fleet.change_plan(NEW, NEW, yields=True)
    for _ in range(10):
        yield
        pending = [pod for pod, at in world.pods().items() if not at]
        world.check(not pending, "machines of another fleet were planned with")
    world.check(world.fleet.kinds() == [OLD, OLD], "machines of others count as free")
    for status in theirs.list("other"):
        theirs.stop(status.handle, 0)
    world.api.end_pods()


def keep_machines_whole(world: ClusterWorld) -> Iterator[None]:
    """Instances of one GPU stand on large machines, and one of a whole machine is added."""
    used = set(world.pods().values())
    world.check(len(used) == 1, "small instances are not packed")
    free = sorted({key[2] for key, _ in world.api.of("nodes")} - used)
    for machine in free[1:]:
        world.api.remove_machine(machine)
    yield
    world.fleet.change_plan(OLD, OLD, LARGE)
    for _ in range(5):
        yield
    world.check(LARGE in world.fleet.kinds(), "small instances broke up all large machines")


def change_only(world: ClusterWorld) -> Iterator[None]:
    """The fleet file says that the service may stand on the dear kind only."""
    asked = problem(OLD)
    services = tuple(one.model_copy(update={"only": (NEW,)}) for one in asked.services)
    world.fleet.change_plan(OLD, OLD, yields=True)
    world.fleet.ask(asked.model_copy(update={"services": services}))
    yield
    world.check(len(world.stage.standing()) > 2, "a changed `only` is not obeyed at once")


def ask_for_status(world: ClusterWorld) -> Iterator[None]:
    """Somebody asks how the fleet stands while the API is down, and while a lease is held."""
    world.stage.deployer().lease(FLEET, "one").release()
    holder = world.stage.deployer().lease(FLEET, "elsewhere", 90)
    holder.acquire(world.stage.now_s)
    world.check("operated by elsewhere" in world.show_status(), "who holds the lease is not shown")
    holder.release()
    for fault in ("time-out", "errors", "silent"):
        world.stage.fault = fault
        yield
        text = world.show_status()
        world.check("nobody operates it" not in text, "nobody operates it, says a silent API")
        world.check("0 of 0 ready" not in text or "2 unknown" in text, "0 of 0 ready of two")
        world.stage.fault = None
        yield


EVENTS = (
    ClusterEvent("a machine dies", lose_machine, 3),
    ClusterEvent("a machine is gone", lose_machine_for_good, 3),
    *(
        ClusterEvent(f"a drain, streams within {s} s", drain_machine, 3, settings={"drain_s": s})
        for s in (20, 600, 900)
    ),
    ClusterEvent("both machines are drained", drain_all, 4),
    ClusterEvent("a drain while another takes over", drain_while_another_takes_over, 3),
    ClusterEvent("a drain while the controller is slow", drain_while_the_controller_is_slow, 3),
    ClusterEvent("a drain while nobody operates", drain_while_nobody_operates, 2),
    ClusterEvent("a cordon that is taken back", uncordon, 3),
    *(
        ClusterEvent(f"{kind} without {path[-1]}", damage(kind, *path), 2)
        for kind in ("configmaps", "statefulsets", "pods")
        for path in (
            ("metadata", "labels", "app.kubernetes.io/instance"),
            ("metadata", "labels", "app.kubernetes.io/managed-by"),
            ("metadata", "labels", "atoll-serving.github.io/fleet"),
            ("metadata", "annotations", "atoll-serving.github.io/labels"),
            ("metadata", "annotations"),
            ("metadata", "labels"),
        )
    ),
    ClusterEvent("objects that are not ours", write_half_of_one, 2),
    ClusterEvent(
        "pods evicted again and again", evict_again_and_again, 60, (NEW, NEW), ready_s=60.0
    ),
    ClusterEvent("another fleet holds machines", share_with_another_fleet, 4, (NEW, NEW)),
    ClusterEvent(
        "small ones on large machines",
        keep_machines_whole,
        5,
        (OLD, OLD, LARGE),
        machines=(LARGE,),
    ),
    ClusterEvent("`only` changes", change_only, 4, (NEW, NEW)),
    ClusterEvent("status is asked", ask_for_status, 2),
)


def run_event(event: ClusterEvent) -> tuple[Outcome, list[str]]:
    """Run an event; returns what came of the fleet, and what was wrong in words."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stage = KubeStage(folder / "work", event.machines, REGION, **event.settings)
        fleet = Fleet(stage, folder, event.ready_s)
        assert fleet.rest(OLD, OLD), f"{event.name}: does not come up"
        world = ClusterWorld(stage, fleet)
        for _ in event.script(world):
            fleet.turn()
        return fleet.end(*event.ends), list(dict.fromkeys(world.wrong))
