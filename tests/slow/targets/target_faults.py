"""Targets that answer wrongly for a while, and what a controller makes of it.

A fleet of two stands on the local target, machines that joined, Slurm, Kubernetes or SkyPilot (stand-ins, in
virtual time).
Answers go wrong in each of the ways of `faults.FAULTS` for 40 s: while nothing is to be done, while the
plan changes, and while another controller takes over; those in which nothing can be read also for five
minutes. Then the target answers as it should, and the fleet has to come to rest as planned. What happens in a
Kubernetes cluster beside its API (machines that die or are drained, damaged objects, other fleets) is in
`cluster_events`; where Slurm is installed, a real one is tried, too (`real_slurm`).

`gone_wrongly`: instances that served and were taken for gone or failed; `started_twice`: started beyond
those of a run without a fault; `orphans`: what stands in the end and nobody wants; `secrets_lost`: secrets
that were deleted though their instance ran; `below_demand_s`: seconds in which what serves and is routed to
carried less than was asked; `events_wrong`: what else should not be, in words above the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import tempfile
import time
from collections import Counter
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
from atoll.deploy.commands.node_commands import InstanceRecipe, ServiceWeights
from atoll.deploy.node_command import NodeCommand
from atoll.deploy.target import StartOrder
from atoll.plan.plan import Plan, Route
from atoll.plan.problem import Problem
from benchmarks.report import Figure
from tests.deploy import killed_rollouts
from tests.slow.targets.fault_stages import STAGES, KubeStage, Stage
from tests.slow.targets.faults import FAULTS, SECRET
from tests.slow.verdict import conclude

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

    def add(self, other: Outcome) -> None:
        """Count what came of another case, too."""
        self.gone_wrongly += other.gone_wrongly
        self.orphans += other.orphans
        self.secrets_lost += other.secrets_lost
        self.below_demand_s += other.below_demand_s
        self.rests &= other.rests


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


def problem(cheap: str, kinds: Sequence[str] = (OLD, NEW)) -> Problem:
    """Two requests/s, one for each machine."""
    asked = killed_rollouts.problem(cheap, kinds)
    offers = [
        offer.model_copy(update={"region": REGION, "market": "on-demand"}) for offer in asked.offers
    ]
    return asked.model_copy(update={"offers": tuple(offers)})


def plan(kinds: Sequence[str], *, yields: bool = False) -> Callable[[Problem], Plan]:
    """A planner that wants machines of these kinds; one that yields wants two others if they are short."""

    def place(asked: Problem) -> Plan:
        made = killed_rollouts.plan(_choose(asked, kinds) if yields else kinds)(asked)
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


def _choose(asked: Problem, kinds: Sequence[str]) -> Sequence[str]:
    only = asked.services[0].only
    has = {
        offer.node_type: 0 if only and offer.node_type not in only else offer.available
        for offer in asked.offers
    }
    counts = Counter(kinds)
    if all(has.get(kind, 0) >= count for kind, count in counts.items()):
        return kinds
    return [max(has, key=lambda kind: has[kind])] * 2


class Fleet:
    """A fleet on a stage, its controller, and what is noted of both."""

    def __init__(self, stage: Stage, folder: Path, ready_s: float = 600.0) -> None:
        self.stage, self.folder, self._ready_s = stage, folder, ready_s
        self.target = stage.deployer().name
        self.gateways = KeptRoutes(stage)
        self.outcome = Outcome()
        self.started: set[str] = set()
        self.told: set[str] = set()
        self.seen: set[str] = set()
        self.secret = folder / "secret"
        self.secret.write_text("x")
        self.secret.chmod(0o600)
        self.controller = self.control(OLD)

    def control(self, kind: str) -> FleetController:
        """Return a controller that wants two machines of a kind."""
        asked = problem(kind)
        place = FleetPlace(
            killed_rollouts.FLEET,
            asked,
            {self.target: PoolTarget(self.stage.deployer(), asked.offers)},
            self.gateways,
            lambda _one: self.target,
            self._order,
        )
        file = self.folder / "lease.json"
        lease = self.stage.lease() if isinstance(self.stage, KubeStage) else FileLease(file)
        return FleetController(
            place,
            InstanceStore(self.folder / "instances"),
            History(self.folder / "history.jsonl"),
            lease,
            plan((kind, kind)),
            holder="one",
            clock=lambda: self.stage.now_s,
            policy=POLICY,
        )

    def change_plan(self, *kinds: str, yields: bool = False) -> None:
        """Want machines of these kinds from now on; the first one is the cheap one."""
        self.ask(problem(kinds[0], tuple(dict.fromkeys((OLD, NEW, *kinds)))))
        self.controller.use_planner(plan(kinds, yields=yields))

    def ask(self, asked: Problem) -> None:
        """Ask for something else from now on, of those who plan."""
        place = self.controller.place
        (target,) = place.targets.values()
        assert isinstance(target, PoolTarget)
        pool = PoolTarget(target.target, asked.offers)
        self.controller.place = replace(place, problem=asked, targets={self.target: pool})

    def _order(self, action: StartInstance, _plan: Plan) -> StartOrder:
        kind = action.instance.nodes[0].node_type
        secrets = ((SECRET, str(self.secret)),)
        gpus = int(kind.partition(":")[2])
        argv = self.stage.argv(action.instance.id)
        command = NodeCommand("n0", kind, argv, gpus, secrets=secrets)
        recipe = InstanceRecipe(action.instance, ServiceWeights("org/m", ("m",)), action.labels)
        return StartOrder(
            *(action.instance, action.labels, (command,)), ready_s=self._ready_s, recipe=recipe
        )

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

    def rest(self, *kinds: str) -> bool:
        """Take turns until machines of these kinds serve and nothing is to be done."""
        counted = bool(self.started)
        for _ in range(_MAX_TURNS):
            turn = self.turn(counted=counted)
            stands = self.stage.serving() == self.stage.standing()
            settled = stands and self._carries() and self.kinds() == sorted(kinds)
            if settled and not turn.decision.actions:
                return True
        return False

    def end(self, *kinds: str) -> Outcome:
        """Let the fleet come to rest with machines of these kinds, and return what came of it."""
        self.outcome.rests = self.rest(*kinds)
        wanted = {one.id for one in self.controller.memory.wanted}
        self.outcome.orphans = len(self.stage.standing() - wanted)
        self.outcome.started = len(self.started)
        return self.outcome

    def kinds(self) -> list[str]:
        """Return the kinds of machines that serve."""
        store = InstanceStore(self.folder / "instances")
        found = (store.find(name) for name in self.stage.serving())
        return sorted(one.nodes[0].node_type for one in found if one is not None)


def run(case: Case) -> Outcome:
    """Run one case."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stage = STAGES[case.target](folder / "work", (OLD, NEW), REGION)
        with contextlib.closing(stage):
            return _run(case, Fleet(stage, folder))


def _run(case: Case, fleet: Fleet) -> Outcome:
    stage = fleet.stage
    assert fleet.rest(OLD, OLD), f"{case}: does not come up"
    stage.fault = case.fault
    if case.during == CHANGE:
        fleet.change_plan(NEW, NEW)
    elif case.during == TAKEOVER:
        fleet.controller = fleet.control(OLD)
    for _ in range(case.turns):
        fleet.turn()
    stage.fault = None
    kind = NEW if case.during == CHANGE else OLD
    return fleet.end(kind, kind)


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
    # These need what is above.
    from tests.slow.targets import cluster_events
    from tests.slow.targets.real_slurm import run_real_slurm, why_not

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only faults that last for 40 s")
    parser.add_argument("--target", choices=sorted(STAGES), help="only this one")
    options = parser.parse_args()
    began_s = time.process_time()
    longest = SHORT_TURNS if options.quick else LONG_TURNS
    cases = [
        each
        for each in list_cases()
        if options.target in (None, each.target) and each.turns <= longest
    ]
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
        total.add(found)
        quiet = Outcome(started=found.started, rests=True) == found and not more
        print(f"{case}: {'as it should' if quiet else found}")
    events = cluster_events.EVENTS if options.target in (None, "kubernetes") else ()
    wrong = 0
    for event in events:
        found, complaints = cluster_events.run_event(event)
        more = max(0, found.started - event.started)
        twice += more
        total.add(found)
        wrong += len(complaints)
        quiet = Outcome(started=found.started, rests=True) == found and not more
        said = "; ".join([*complaints, *([] if quiet else [str(found)])])
        print(f"kubernetes, {event.name}: {said or 'as it should'}")
    real, reason = 0, why_not() if options.target in (None, "slurm") else "not asked for"
    if reason is not None:
        print(f"real Slurm: skipped, {reason}")
    for name, found in run_real_slurm() if reason is None else ():
        real += 1
        twice += max(0, found.started - 2)
        total.add(found)
        quiet = Outcome(started=2, rests=True) == found
        print(f"real Slurm, {name}: {'as it should' if quiet else found}")
    print(f"{time.process_time() - began_s:.0f} CPU-s; all came to rest: {total.rests}")
    conclude(
        [
            Figure("faults", len(cases), 40, at_least=True),
            Figure("events", len(events), 0, at_least=True),
            Figure("events_wrong", wrong, 0),
            Figure("real_slurm", real, 0, at_least=True),
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
