"""The controller of the check of rollouts, as a process of its own that may be killed at any moment.

`python -m benchmarks.rollout_controller FOLDER HOLDER` keeps the fleet true to FOLDER/asked.json, turn by
turn. Everything else of it is the real thing: `FleetController`, `decide`, the local target, its lease.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

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
from atoll.control.operation.gateways import GatewayAddress, GatewayGroup
from atoll.core.files import read_text_limited
from atoll.deploy.commands.node_commands import CommandSettings, ServiceWeights, node_commands
from atoll.deploy.local.gpu_slots import pretend_machines
from atoll.deploy.local.local_deployer import LocalDeployer
from atoll.deploy.target import StartOrder
from atoll.plan.plan import Plan
from tests.slow.targets.rollout_changes import SERVICE, AskedOfFleet

FLEET = "rollout"
ASKED, GATEWAY, HISTORY = "asked.json", "gateway.json", "history.jsonl"
INSTANCES, LEASE, TARGET = "instances", "lease.json", "local"
POLICY = ControlPolicy(
    epoch_s=600.0,
    startup_s=10.0,
    ready_within_s=120.0,
    drain_s=90.0,
    move_s=1.0,
    retry_s=1.0,
    backoff_s=2.0,
    backoff_max_s=4.0,
    settled_s=1.0,
)
LEASE_S = 4.0
_EVERY_S = 0.25
_DRAIN_S = 60.0
_KEEP_S = 60.0


class ToldGateways(GatewayGroup):
    """The real gateway, told who serves; how much is asked stands in the file."""

    def look(self, now_s: float) -> TrafficReport:
        """Leave out what it measures: it would plan for streams that are there to see it change."""
        return TrafficReport(notices=super().look(now_s).notices)


def make_target(folder: Path, asked: AskedOfFleet) -> LocalDeployer:
    """Return this machine as what is on offer."""
    machines = pretend_machines(asked.offers())
    return LocalDeployer(machines, folder / TARGET, drain_s=_DRAIN_S, keep_s=_KEEP_S)


def read_asked(folder: Path) -> AskedOfFleet:
    """Read what is asked now."""
    return AskedOfFleet.from_json(read_text_limited(folder / ASKED))


def make_order(folder: Path, action: StartInstance, asked: AskedOfFleet) -> StartOrder:
    """Return what the nodes of an instance run."""
    source = folder / ("no-such-model" if asked.broken == "weights" else "model")
    python = "no-such-python" if asked.broken == "program" else sys.executable
    settings = CommandSettings(
        fabric=str(folder / "fabric.token"),
        atoll=(sys.executable, "-m", "atoll"),
        python=python,
        device="cpu",
        dtype="float32",
        kv_bytes=8 * 2**20,
        alone=False,
        drain_s=_DRAIN_S,
        ready_s=100.0,
    )
    weights = ServiceWeights(str(source), (SERVICE,), engine="atoll")
    commands = node_commands(action.instance, weights, settings, labels=action.labels)
    return StartOrder(action.instance, action.labels, commands, ready_s=100.0)


def control(folder: Path, holder: str) -> FleetController:
    """Return a controller that knows nothing yet."""
    gateway = json.loads(read_text_limited(folder / GATEWAY))
    address = GatewayAddress(gateway["url"], Path(gateway["admin_socket"]))
    gateways = ToldGateways(read_asked(folder).problem(FLEET), [address])

    def place(asked: AskedOfFleet) -> FleetPlace:
        def order(action: StartInstance, plan: Plan) -> StartOrder:
            del plan
            return make_order(folder, action, read_asked(folder))

        return FleetPlace(
            FLEET,
            asked.problem(FLEET),
            {"local": make_target(folder, asked)},
            gateways,
            lambda _instance: "local",
            order,
        )

    return FleetController(
        place(read_asked(folder)),
        InstanceStore(folder / INSTANCES),
        History(folder / HISTORY),
        FileLease(folder / LEASE),
        lambda problem: read_asked(folder).plan(problem),
        holder=holder,
        clock=time.time,
        policy=POLICY,
        valid_s=LEASE_S,
    )


def main(arguments: list[str]) -> None:
    """Turn until killed."""
    folder, holder = Path(arguments[0]), arguments[1]
    controller = control(folder, holder)
    while True:
        asked = read_asked(folder)
        gateways, problem = controller.place.gateways, asked.problem(FLEET)
        assert isinstance(gateways, ToldGateways)
        gateways.problem = problem
        targets = {"local": make_target(folder, asked)}
        controller.place = replace(controller.place, problem=problem, targets=targets)
        try:
            controller.turn()
        except LeaseHeldError:
            time.sleep(_EVERY_S)
        time.sleep(_EVERY_S)


if __name__ == "__main__":
    main(sys.argv[1:])
