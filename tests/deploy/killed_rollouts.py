"""Rollouts on the local target whose controller is killed (SIGKILL) at one point after the other.

`python -m tests.deploy.killed_rollouts FOLDER REPLACED` brings two instances up, then changes the plan again
and again, `REPLACED` of them at a time. The controller of each change is a fork of this process that kills
itself at the next point: before an action, after it, and inside of a start before and after the daemon is
born. Another controller follows. Prints a JSON line for each change.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from atoll.control.decision.control_view import ControlPolicy
from atoll.control.decision.decide import StartInstance
from atoll.control.operation.control_loop import (
    FleetController,
    FleetPlace,
    InstanceStore,
    TrafficReport,
)
from atoll.control.operation.controller_lease import FileLease, LeaseHeldError
from atoll.control.operation.fleet_history import History
from atoll.deploy.local.daemon import ORDER, STATE, DaemonState, process_start
from atoll.deploy.local.gpu_slots import pretend_machines
from atoll.deploy.local.local_deployer import LocalDeployer
from atoll.deploy.node_command import NodeCommand
from atoll.deploy.target import InstanceStatus, StartOrder
from atoll.plan.plan import Flow, Instance, Node, Plan, Route
from atoll.plan.problem import Lengths, Offer, Problem, Service, Settings

FLEET, ROLE, REGION = "lab", "chat/llm/both", "here"
KINDS = ("L4:1", "L40S:1")
HEALTHY = """
import signal, socket, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
listening = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    asking, _ = listening.accept()
    asking.recv(65536)
    asking.sendall(b"HTTP/1.1 200 OK\\r\\ncontent-length: 2\\r\\nconnection: close\\r\\n\\r\\n{}")
    asking.close()
"""
POLICY = ControlPolicy(
    startup_s=1.0, drain_s=60.0, retry_s=0.0, backoff_s=0.05, backoff_max_s=0.05, settled_s=0.0
)
_LEASE_S = 0.5
_MAX_S = 120.0


def instance(name: str, kind: str) -> Instance:
    """An instance of one machine."""
    return Instance(
        id=name,
        service="chat",
        role=ROLE,
        region=REGION,
        stages=1,
        nodes=(Node(id="n0", node_type=kind, market="owned", start=0, end=32, tp=1),),
        flows=(Flow(src="source", dst="n0", per_s=1), Flow(src="n0", dst="sink", per_s=1)),
        throughput_per_s=1.0,
        usd_per_hour=1.0,
    )


def problem(cheap: str, kinds: Sequence[str] = KINDS) -> Problem:
    """One request/s for each kind of machines, each for one machine; one kind is cheaper than the others."""
    service = Service(
        name="chat",
        model="llama-3.1-8b",
        ttft_s=1.0,
        tpot_s=0.1,
        rate_per_s=float(len(kinds)),
        lengths=Lengths(
            input_mean=10.0, output_mean=10.0, input_mean_square=100.0, output_mean_square=100.0
        ),
        phases="together",
    )
    offers = tuple(
        Offer(
            region=REGION,
            node_type=kind,
            market="owned",
            available=4,
            usd_per_hour=1.0 if kind == cheap else 9.0,
        )
        for kind in kinds
    )
    return Problem(name=FLEET, services=(service,), offers=offers, settings=Settings())


def plan(kinds: Sequence[str]) -> Callable[[Problem], Plan]:
    """A planner that has one answer."""
    instances = tuple(instance(f"chat-{at}", kind) for at, kind in enumerate(kinds))

    def make(asked: Problem) -> Plan:
        return Plan(
            problem_hash=asked.content_hash(),
            problem_name=asked.name,
            instances=instances,
            routes=tuple(
                Route(service="chat", instances=(one.id,), share=1.0 / len(instances))
                for one in instances
            ),
            served_fraction={"chat": 1.0},
            usd_per_hour=2.0,
            status="feasible",
            solver="given",
        )

    return make


class KillSwitch:
    """Kills this process when the given point is reached; points are counted from 1, 0 is never."""

    def __init__(self, point: int) -> None:
        self._left = point

    def pass_point(self) -> None:
        """A point where a controller might be killed."""
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


class MortalDeployer(LocalDeployer):
    """The local target, with a point before and after every action."""

    switch = KillSwitch(0)

    def start(self, order: StartOrder) -> InstanceStatus:
        self.switch.pass_point()
        status = super().start(order)
        self.switch.pass_point()
        return status

    def drain(self, handle: str, term: int) -> None:
        self.switch.pass_point()
        super().drain(handle, term)
        self.switch.pass_point()

    def stop(self, handle: str, term: int) -> None:
        self.switch.pass_point()
        super().stop(handle, term)
        self.switch.pass_point()


class NoGateways:
    """Nobody asks."""

    def look(self, now_s: float) -> TrafficReport:
        del now_s
        return TrafficReport()

    def route(self, routes: Sequence[Route]) -> None:
        MortalDeployer.switch.pass_point()


def order(action: StartInstance, _plan: Plan) -> StartOrder:
    """What an instance runs: something that answers."""
    command = NodeCommand(
        node="n0",
        node_type=action.instance.nodes[0].node_type,
        argv=(sys.executable, "-S", "-c", HEALTHY, "{port}"),
        gpus=1,
    )
    return StartOrder(action.instance, action.labels, (command,), ready_s=60.0)


def deployer(folder: Path, cheap: str) -> MortalDeployer:
    """The target."""
    machines = pretend_machines(problem(cheap).offers)
    return MortalDeployer(machines, folder / "local", settle_s=0.0)


def is_complete(
    statuses: Sequence[InstanceStatus], store: InstanceStore, kinds: Sequence[str]
) -> bool:
    """Whether just the planned instances serve, and nothing else holds anything."""
    alive = [seen for seen in statuses if seen.state not in ("gone", "failed")]
    there = sorted(
        found.nodes[0].node_type
        for seen in alive
        if seen.state == "ready" and (found := store.find(seen.labels.instance)) is not None
    )
    return len(alive) == len(there) and there == sorted(kinds)


def operate(folder: Path, holder: str, kinds: Sequence[str], cheap: str) -> None:
    """A controller's whole life: until the fleet stands as planned."""
    target = deployer(folder, cheap)
    store = InstanceStore(folder / "instances")
    place = FleetPlace(
        FLEET, problem(cheap), {"local": target}, NoGateways(), lambda _one: "local", order
    )
    controller = FleetController(
        place,
        store,
        History(folder / "history.jsonl"),
        FileLease(folder / "lease.json"),
        plan(kinds),
        holder=holder,
        clock=time.time,
        policy=POLICY,
        valid_s=_LEASE_S,
    )
    until_s = time.monotonic() + _MAX_S
    while not is_complete(target.list(FLEET), store, kinds):
        assert time.monotonic() < until_s, target.list(FLEET)
        # The lease of whoever was killed has to end first.
        with contextlib.suppress(LeaseHeldError):
            controller.turn()
        time.sleep(0.02)


def fork_controller(folder: Path, holder: str, kinds: Sequence[str], cheap: str, point: int) -> int:
    """Have a fork operate, killed at a point; returns its number."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        MortalDeployer.switch = switch = KillSwitch(point)

        def bear_daemon(words: list[str], **named: Any) -> None:
            switch.pass_point()
            del named["check"], named["timeout"]
            with subprocess.Popen(words, **named):
                switch.pass_point()  # it loads Python now, and goes on by itself
            switch.pass_point()

        subprocess.run = bear_daemon  # type: ignore[assignment]  # as the deployer calls it
        operate(folder, holder, kinds, cheap)
        code = 0
    finally:
        os._exit(code)


def watch(folder: Path, pid: int, seen: dict[str, float]) -> int:
    """Wait for a controller; `seen` has the least that was ready meanwhile."""
    target = deployer(folder, KINDS[0])
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        ready = sum(one.state == "ready" for one in target.list(FLEET))
        seen["min_ready"] = min(seen.get("min_ready", ready), ready)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)


def list_homes(folder: Path) -> set[Path]:
    """Return every home that a daemon has ever run in."""
    return {path.parent for path in (folder / "local").glob(f"f-{FLEET}/i-*/{STATE}")}


def say(**words: object) -> None:
    """Print a line; at once, for a fork must not print it again."""
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def main(arguments: list[str]) -> None:
    """Change the plan, killed at one point more each time, until a controller lives through it."""
    folder, replaced = Path(arguments[0]), int(arguments[1])
    kinds = [KINDS[0]] * 2
    operate(folder, "first", kinds, KINDS[0])
    point, code = 0, 1
    while code:
        point += 1
        cheap = KINDS[1] if kinds[0] == KINDS[0] else KINDS[0]
        kinds = [cheap] * replaced + [kinds[-1]] * (2 - replaced)
        before = list_homes(folder)
        seen: dict[str, float] = {}
        pid = fork_controller(folder, f"killed-{point}", kinds, cheap, point)
        code = watch(folder, pid, seen)
        if code:
            pid = fork_controller(folder, f"follows-{point}", kinds, cheap, 0)
            assert watch(folder, pid, seen) == 0
        statuses = deployer(folder, cheap).list(FLEET)
        states = [one.state for one in statuses]
        half = [
            path.parent.name
            for path in (folder / "local").glob(f"f-{FLEET}/i-*/{ORDER}")
            if not (path.parent / STATE).exists()
        ]
        say(
            point=point,
            code=code,
            ready=states.count("ready"),
            others=sum(state not in ("ready", "gone", "failed") for state in states),
            started=len(list_homes(folder) - before),
            half=half,
            min_ready=seen["min_ready"],
        )
    target = deployer(folder, KINDS[0])
    pids = [
        each
        for home in list_homes(folder)
        for each in DaemonState.from_json((home / STATE).read_text()).processes
    ]
    for status in target.list(FLEET):
        target.stop(status.handle, 2**31)
    say(left=sum(process_start(p.pid) == p.start for p in pids))


if __name__ == "__main__":
    main(sys.argv[1:])
