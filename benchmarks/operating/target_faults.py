"""Targets that answer wrongly for a while, and what a controller makes of it.

A fleet of two instances stands on Slurm, Kubernetes or SkyPilot (stand-ins in this process, in virtual time).
Answers go wrong in each of the ways of `fault_stages.FAULTS` for 40 s: while nothing is to be done, while the
plan changes, and while another controller takes over; those in which nothing can be read also for five
minutes. Then the target answers as it should, and the fleet has to come to rest as planned.

`gone_wrongly`: instances that served and were taken for gone or failed; `started_twice`: started beyond
those of a run without a fault; `orphans`: what stands in the end and nobody wants; `secrets_lost`: secrets
that were deleted though their instance ran; `below_demand_s`: seconds in which what serves and is routed to
carried less than was asked.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from atoll.control.decision.control_view import ControlPolicy
from atoll.control.decision.decide import StartInstance
from atoll.control.operation.control_loop import (
    FleetController,
    FleetPlace,
    InstanceStore,
    LoopTurn,
    TrafficReport,
)
from atoll.control.operation.controller_lease import FileLease
from atoll.control.operation.fleet_history import History
from atoll.control.operation.targets import PoolTarget
from atoll.deploy.target import NodeCommand, StartOrder
from atoll.plan.plan import Plan, Route
from atoll.plan.problem import Problem
from benchmarks.operating.fault_stages import FAULTS, SECRET, STAGES, Stage
from benchmarks.report import Figure, finish
from tests.deploy import killed_rollouts

REGION = "aws/us-east-2"
"""SkyPilot has places of clouds; to the others it is a name."""
OLD, NEW = killed_rollouts.KINDS
CHANGE, TAKEOVER = "the plan changes", "another controller takes over"
DURING = ("rest", CHANGE, TAKEOVER)
UNREADABLE = ("time-out", "silent", "errors", "cut", "denied")
POLICY = ControlPolicy(
    startup_s=10.0, drain_s=60.0, retry_s=0.0, backoff_s=5.0, backoff_max_s=20.0, settled_s=0.0
)
TURN_S = 5.0
SHORT_TURNS, LONG_TURNS = 8, 60
_MAX_TURNS = 80


@dataclass(frozen=True)
class Case:
    """A target, the way its answers go wrong, for how many turns, and what goes on meanwhile."""

    target: str
    fault: str | None
    turns: int
    during: str

    def __str__(self) -> str:
        doing = "at rest" if self.during == "rest" else f"while {self.during}"
        return f"{self.target}, {self.fault or 'no fault'} for {self.turns * TURN_S:g} s {doing}"


@dataclass
class Outcome:
    """What came of a case; see the module."""

    gone_wrongly: int = 0
    started: int = 0
    orphans: int = 0
    secrets_lost: int = 0
    below_demand_s: float = 0.0
    rests: bool = False


class KeptRoutes:
    """Gateways that do as they are told, and know who answers."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.routes: Sequence[Route] = ()

    def look(self, now_s: float) -> TrafficReport:
        del now_s
        return TrafficReport(serving=frozenset(self._stage.serving()))

    def route(self, routes: Sequence[Route]) -> None:
        self.routes = tuple(routes)


def problem(cheap: str) -> Problem:
    """Two requests/s, one for each machine."""
    asked = killed_rollouts.problem(cheap)
    offers = [
        offer.model_copy(update={"region": REGION, "market": "on-demand"}) for offer in asked.offers
    ]
    return asked.model_copy(update={"offers": tuple(offers)})


def plan(kind: str) -> Callable[[Problem], Plan]:
    """A planner that wants two machines of a kind."""
    make = killed_rollouts.plan((kind, kind))

    def place(asked: Problem) -> Plan:
        made = make(asked)
        placed = [
            one.model_copy(
                update={
                    "region": REGION,
                    "nodes": tuple(
                        node.model_copy(update={"market": "on-demand"}) for node in one.nodes
                    ),
                }
            )
            for one in made.instances
        ]
        return made.model_copy(update={"instances": tuple(placed)})

    return place


class Fleet:
    """A fleet on a stage, its controller, and what is noted of both."""

    def __init__(self, stage: Stage, folder: Path) -> None:
        self.stage, self.folder = stage, folder
        self.gateways = KeptRoutes(stage)
        self.outcome = Outcome()
        self.started: set[str] = set()
        self.told: set[str] = set()
        self.seen: set[str] = set()
        self.secret = folder / "secret"
        self.secret.write_text("x")
        self.controller = self.control(OLD)

    def control(self, kind: str) -> FleetController:
        """Return a controller that wants machines of a kind."""
        asked = problem(kind)
        place = FleetPlace(
            killed_rollouts.FLEET,
            asked,
            {"t": PoolTarget(self.stage.deployer(), asked.offers)},
            self.gateways,
            lambda _one: "t",
            self._order,
        )
        return FleetController(
            place,
            InstanceStore(self.folder / "instances"),
            History(self.folder / "history.jsonl"),
            FileLease(self.folder / "lease.json"),
            plan(kind),
            holder="one",
            clock=lambda: self.stage.now_s,
            policy=POLICY,
        )

    def change_plan(self) -> None:
        """Have the other kind of machines be the cheap one from now on."""
        asked = problem(NEW)
        place = self.controller.place
        (target,) = place.targets.values()
        assert isinstance(target, PoolTarget)
        pool = PoolTarget(target.target, asked.offers)
        self.controller.place = replace(place, problem=asked, targets={"t": pool})
        self.controller.use_planner(plan(NEW))

    def _order(self, action: StartInstance, _plan: Plan) -> StartOrder:
        kind = action.instance.nodes[0].node_type
        secrets = ((SECRET, str(self.secret)),)
        command = NodeCommand("n0", kind, ("serve", "{port}"), 1, secrets=secrets)
        return StartOrder(action.instance, action.labels, (command,), ready_s=600.0)

    def turn(self, *, counted: bool = True) -> LoopTurn:
        """Take a turn and let its time pass; `counted` when the fleet stood before."""
        served = self.stage.serving()
        turn = self.controller.turn()
        for action in turn.decision.actions:
            name = getattr(action, "id", None)
            if name is not None:
                self.told.add(name)
        seen = {one.id for one in turn.view.instances if one.status.state not in ("gone", "failed")}
        if counted:
            wrong = served & self.seen - seen - self.told
            self.outcome.gone_wrongly += len(wrong)
            self.told |= wrong
        self.seen |= seen
        self.stage.live(TURN_S)
        self.started |= self.stage.standing()
        if counted:
            self.outcome.secrets_lost += len(self.stage.without_secret())
            if not self._carries():
                self.outcome.below_demand_s += TURN_S
        return turn

    def _carries(self) -> bool:
        """Whether all requests go to instances that serve, two at least."""
        serving = self.stage.serving()
        routes = self.gateways.routes
        carried = sum(route.share for route in routes if set(route.instances) <= serving)
        return len(serving) >= 2 and carried > 1 - 1e-6

    def rest(self, kind: str) -> bool:
        """Take turns until two machines of a kind serve and nothing is to be done."""
        counted = bool(self.started)
        for _ in range(_MAX_TURNS):
            turn = self.turn(counted=counted)
            stands = self.stage.serving() == self.stage.standing()
            settled = stands and self._carries() and self._kinds() == [kind, kind]
            if settled and not turn.decision.actions:
                return True
        return False

    def _kinds(self) -> list[str]:
        store = InstanceStore(self.folder / "instances")
        found = (store.find(name) for name in self.stage.serving())
        return sorted(one.nodes[0].node_type for one in found if one is not None)


def run(case: Case) -> Outcome:
    """Run one case."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stage = STAGES[case.target](folder / "work", (OLD, NEW), REGION)
        fleet = Fleet(stage, folder)
        assert fleet.rest(OLD), f"{case}: does not come up"
        stage.fault = case.fault
        if case.during == CHANGE:
            fleet.change_plan()
        elif case.during == TAKEOVER:
            fleet.controller = fleet.control(OLD)
        for _ in range(case.turns):
            fleet.turn()
        stage.fault = None
        fleet.outcome.rests = fleet.rest(NEW if case.during == CHANGE else OLD)
        wanted = {one.id for one in fleet.controller.memory.wanted}
        fleet.outcome.orphans = len(stage.standing() - wanted)
        fleet.outcome.started = len(fleet.started)
        return fleet.outcome


def list_cases() -> list[Case]:
    """Return every target with every fault, in all that may go on, some for long."""
    short = [
        Case(target, fault, SHORT_TURNS, during)
        for target, fault, during in itertools.product(STAGES, FAULTS, DURING)
    ]
    return [
        *short,
        *(replace(each, turns=LONG_TURNS) for each in short if each.fault in UNREADABLE),
    ]


def main() -> None:
    """Print the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=sorted(STAGES), help="only this one")
    options = parser.parse_args()
    began_s = time.process_time()
    cases = [each for each in list_cases() if options.target in (None, each.target)]
    total = Outcome(rests=True)
    plain = {
        (target, during): run(Case(target, None, SHORT_TURNS, during))
        for target in {case.target for case in cases}
        for during in DURING
    }
    twice = 0
    for case in cases:
        found = run(case)
        more = max(0, found.started - plain[case.target, case.during].started)
        twice += more
        total.gone_wrongly += found.gone_wrongly
        total.orphans += found.orphans
        total.secrets_lost += found.secrets_lost
        total.below_demand_s += found.below_demand_s
        total.rests &= found.rests
        quiet = Outcome(started=found.started, rests=True) == found and not more
        print(f"{case}: {'as it should' if quiet else found}")
    print(f"{time.process_time() - began_s:.0f} CPU-s; all came to rest: {total.rests}")
    finish(
        [
            Figure("faults", len(cases), 40, at_least=True),
            Figure("gone_wrongly", total.gone_wrongly, 0),
            Figure("started_twice", twice, 0),
            Figure("orphans", total.orphans, 0),
            Figure("secrets_lost", total.secrets_lost, 0),
            Figure("below_demand_s", total.below_demand_s, 0),
            Figure("not_at_rest", int(not total.rests), 0),
        ],
    )


if __name__ == "__main__":
    main()
