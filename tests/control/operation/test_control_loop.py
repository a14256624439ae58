"""The loop around `decide`, over a target that lives in memory."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from atoll.catalog import Catalog
from atoll.control.decision.control_view import PaceSeen, TrafficSeen, TrafficWindow
from atoll.control.decision.decide import StartInstance
from atoll.control.operation.control_loop import (
    FleetController,
    FleetPlace,
    InstanceStore,
    TrafficReport,
)
from atoll.control.operation.controller_lease import FileLease, LeaseHeldError, SupersededError
from atoll.control.operation.fleet_history import History
from atoll.deploy.target import DeployError, FailureKind, InstanceStatus, StartOrder
from atoll.plan.plan import LossRoutes, Plan, Route
from atoll.plan.problem import Lengths, Offer, Problem, Service, Settings
from atoll.solve import registry
from atoll.solve.effort import Effort
from atoll.solve.plan_request import PlanRequest
from atoll.workload.lengths import LengthMix

CATALOG = Catalog.default()
CHAT = Service(
    name="chat",
    model="llama-3.1-8b",
    ttft_s=1.0,
    tpot_s=0.06,
    rate_per_s=20.0,
    lengths=Lengths.of(LengthMix.fixed(600.0, 120.0)),
    phases="together",
)
PROBLEM = Problem(
    name="small",
    services=(CHAT,),
    offers=(Offer(region="here", node_type="L40S:1", available=40, usd_per_hour=1.86),),
    settings=Settings(max_nodes_per_instance=1, engine="none"),
)


class Killed(BaseException):
    """The controller dies here."""


@dataclass
class World:
    """A target, gateways and a clock; what is started is ready after a while."""

    now_s: float = 1_000_000.0
    rate_per_s: float = 20.0
    statuses: dict[str, InstanceStatus] = field(default_factory=dict)
    started: list[str] = field(default_factory=list)
    refuses: FailureKind | None = None
    answers: bool = True
    dies_after: int | None = None
    routes: Sequence[Route] = ()
    calls: int = 0
    term: int = 0
    name: str = "memory"
    hosts: tuple[str, ...] = ()
    avoided: list[tuple[str, ...]] = field(default_factory=list)
    token_s: float | None = None

    def clock(self) -> float:
        return self.now_s

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        for name, one in self.statuses.items():
            if one.state == "starting" and self.now_s - one.since_s > 100.0:
                self.statuses[name] = replace(one, state="ready", since_s=self.now_s)
            elif one.state == "draining" and self.now_s - one.since_s > 30.0:
                self.statuses[name] = replace(one, state="gone", since_s=self.now_s)

    def _called(self, term: int) -> None:
        if not self.answers:
            raise DeployError("no route to the cluster", kind="unreachable")
        assert term >= self.term
        self.term = term
        self.calls += 1
        if self.dies_after is not None and self.calls > self.dies_after:
            raise Killed

    def offers(self) -> Sequence[Offer]:
        return PROBLEM.offers

    def list(self, fleet: str) -> Sequence[InstanceStatus]:
        assert fleet == "small"
        if not self.answers:
            raise DeployError("no route to the cluster", kind="unreachable")
        return tuple(self.statuses.values())

    def start(self, order: StartOrder) -> InstanceStatus:
        name = order.labels.instance
        self._called(order.labels.term)
        if self.refuses is not None:
            raise DeployError("there are none left", kind=self.refuses)
        if name not in self.statuses:
            self.started.append(name)
            self.avoided.append(order.avoid_hosts)
            self.statuses[name] = InstanceStatus(
                name, order.labels, "starting", self.now_s, hosts=self.hosts
            )
        return self.statuses[name]

    def drain(self, handle: str, term: int) -> None:
        self._called(term)
        self.statuses[handle] = replace(self.statuses[handle], state="draining", since_s=self.now_s)

    def stop(self, handle: str, term: int) -> None:
        self._called(term)
        self.statuses[handle] = replace(self.statuses[handle], state="gone", since_s=self.now_s)

    def logs(self, handle: str, lines: int = 100) -> str:
        return f"{handle}: {lines}"

    def look(self, now_s: float) -> TrafficReport:
        assert now_s == self.now_s
        window = TrafficWindow(self.rate_per_s, CHAT.lengths)
        ready = sorted(name for name, one in self.statuses.items() if one.state == "ready")[:1]
        paces = tuple(
            PaceSeen(name, self.token_s, 5_000, 20.0) for name in ready if self.token_s is not None
        )
        return TrafficReport((TrafficSeen("chat", window, window, window),), paces=paces)

    def route(self, routes: Sequence[Route]) -> None:
        self.routes = tuple(routes)

    def serving(self) -> int:
        return sum(one.state == "ready" for one in self.statuses.values())


def plan(problem: Problem) -> Plan:
    return registry.solve(problem, PlanRequest(effort=Effort(cached=False), catalog=CATALOG))


def order(action: StartInstance, _plan: Plan) -> StartOrder:
    return StartOrder(action.instance, action.labels, ())


def controller(world: World, folder: Path, holder: str = "one") -> FleetController:
    place = FleetPlace(
        "small", PROBLEM, {"memory": world}, world, lambda _instance: "memory", order
    )
    return FleetController(
        place,
        InstanceStore(folder / "instances"),
        History(folder / "history.jsonl"),
        FileLease(folder / "lease.json"),
        plan,
        holder=holder,
        clock=world.clock,
    )


def settle(world: World, control: FleetController, turns: int = 12) -> None:
    for _ in range(turns):
        control.turn()
        world.pass_time(60.0)


class SlowWorld(World):
    """A target that takes its time to answer, or not to."""

    def list(self, fleet: str) -> Sequence[InstanceStatus]:
        self.now_s += 20.0
        return super().list(fleet)


def test_the_history_is_in_order_though_targets_are_slow(tmp_path: Path) -> None:
    world = SlowWorld()
    control = controller(world, tmp_path)
    settle(world, control, 3)
    world.answers = False
    world.rate_per_s = 40.0
    settle(world, control, 3)
    events = control.history.read()
    assert {event.kind for event in events} >= {"plan", "failure"}
    times = [event.at_s for event in events]
    assert times == sorted(times)


def test_a_fleet_comes_up_and_then_stands_still(tmp_path: Path) -> None:
    world = World()
    control = controller(world, tmp_path)
    settle(world, control)
    assert world.serving() == len(world.started) > 0
    served = {name for route in world.routes for name in route.instances}
    assert served == set(world.started)
    before = list(world.started)
    settle(world, control)
    assert world.started == before
    kinds = [event.kind for event in control.history.read()]
    assert kinds.count("start") == len(before)
    assert kinds[0] == "plan"


def test_twice_the_demand_brings_replicas_and_none_is_lost(tmp_path: Path) -> None:
    world = World()
    control = controller(world, tmp_path)
    settle(world, control)
    least = world.serving()
    world.rate_per_s *= 3.0
    for _ in range(20):
        control.turn()
        world.pass_time(60.0)
        assert world.serving() >= least
    assert world.serving() > least


def test_who_serves_what_is_left_is_told_before_a_plan_is_made(tmp_path: Path) -> None:
    world = World(rate_per_s=60.0)
    control = controller(world, tmp_path)
    settle(world, control)
    in_force = control.memory.plan
    assert in_force is not None
    lost, heir, *_ = sorted(one.id for one in in_force.instances)
    all_to = (Route(service="chat", instances=(heir,), share=1.0),)
    ready = LossRoutes(lost="a machine", instances=(lost,), services=("chat",), routes=all_to)
    memory = replace(control.memory, plan=in_force.model_copy(update={"after_loss": (ready,)}))
    control.memory = memory
    told: list[Sequence[Route]] = []

    def plan_late(problem: Problem) -> Plan:
        told.append(world.routes)
        return plan(problem)

    control.use_planner(plan_late)
    world.statuses[lost] = replace(world.statuses[lost], state="gone")
    # As `operate` does it, where a change may have to wait for somebody.
    control.turn(approve=lambda _turn: False)

    assert told[0] == world.routes == all_to
    texts = [event.text for event in control.history.read() if event.kind == "reweight"]
    assert f"{lost} gone: {len(in_force.instances) - 1} instances serve" in texts
    # With two gone nothing is ready, and all that serve get their shares.
    control.memory = memory
    gone = sorted(one.id for one in in_force.instances)[2]
    world.statuses[gone] = replace(world.statuses[gone], state="gone")
    control.turn()
    assert {name for route in world.routes for name in route.instances} == {
        one.id for one in in_force.instances if one.id not in (lost, gone)
    }


def test_looking_changes_nothing(tmp_path: Path) -> None:
    world = World()
    control = controller(world, tmp_path)
    turn = control.turn(act=False)
    assert turn.decision.actions
    assert not world.started
    assert not control.history.read()
    assert not (tmp_path / "lease.json").exists()


def test_a_target_that_refuses_is_left_alone_for_a_while(tmp_path: Path) -> None:
    world = World(refuses="capacity")
    control = controller(world, tmp_path)
    settle(world, control, 20)
    asked = world.calls
    assert not world.started
    failures = [event.text for event in control.history.read() if event.kind == "failure"]
    assert failures
    assert set(failures) == {"there are none left"}
    # Once a minute would be as many calls as turns times replicas.
    assert asked < 20
    world.refuses = None
    settle(world, control, 90)
    assert world.serving() > 0


def test_a_target_that_does_not_answer_loses_nothing(tmp_path: Path) -> None:
    world = World()
    control = controller(world, tmp_path)
    settle(world, control)
    before = dict(world.statuses)
    world.answers = False
    settle(world, control, 5)
    world.answers = True
    settle(world, control, 5)
    assert {name for name, one in world.statuses.items() if one.state == "ready"} == set(before)
    assert any("no route" in event.text for event in control.history.read())


def test_what_failed_is_stopped_once_though_its_target_lists_it_on(tmp_path: Path) -> None:
    world = World()
    control = controller(world, tmp_path)
    settle(world, control)
    lost = world.started[0]

    def stop(handle: str, term: int) -> None:
        World.stop(world, handle, term)
        # As a target that shows for a while why something failed.
        world.statuses[handle] = replace(world.statuses[handle], state="failed")

    world.stop = stop  # type: ignore[method-assign]
    world.statuses[lost] = replace(world.statuses[lost], state="failed", reason="killed")
    settle(world, control, 30)
    stops = [event for event in control.history.read() if event.kind == "stop"]
    assert [event.instance for event in stops] == [lost]
    assert world.serving() == len(world.started) - 1


def test_what_is_held_back_keeps_its_name_and_is_not_planned_for_every_turn(tmp_path: Path) -> None:
    world = World()
    control = controller(world, tmp_path)
    settle(world, control)
    world.refuses, world.rate_per_s = "settings", 60.0
    control.turn()
    world.pass_time(1.0)
    control.turn()  # the refusal is seen, and what was refused gets another name
    waiting = {one.id for one in control.memory.wanted} - set(world.started)
    planned = len([event for event in control.history.read() if event.kind == "plan"])
    for _ in range(20):
        world.pass_time(1.0)
        control.turn()
    assert {one.id for one in control.memory.wanted} - set(world.started) == waiting
    assert len([event for event in control.history.read() if event.kind == "plan"]) <= planned + 1


@pytest.fixture(scope="module")
def serving_alone(tmp_path_factory: pytest.TempPathFactory) -> int:
    """How many serve in the end under one controller that nobody kills."""
    world = World(rate_per_s=60.0)
    settle(world, controller(world, tmp_path_factory.mktemp("alone")), 30)
    return world.serving()


@pytest.mark.parametrize(
    "after", [0, 2, 4, *(pytest.param(after, marks=pytest.mark.slow) for after in (1, 3, 5))]
)
def test_a_controller_that_is_killed_at_any_action_is_followed_by_another(
    tmp_path: Path, serving_alone: int, after: int
) -> None:
    world = World(rate_per_s=60.0, dies_after=after)
    first = controller(world, tmp_path, "one")
    with contextlib.suppress(Killed):
        settle(world, first)
    world.dies_after = None
    second = controller(world, tmp_path, "two")
    with pytest.raises(LeaseHeldError):
        second.turn()
    world.pass_time(120.0)
    settle(world, second, 30)
    assert world.serving() == serving_alone
    assert len(world.started) == len(set(world.started))
    # Nothing stands that nobody knows of.
    known = {name for name in world.statuses if second.store.find(name) is not None}
    assert {n for n, one in world.statuses.items() if one.state != "gone"} <= known


def test_a_controller_that_is_superseded_stops_acting(tmp_path: Path) -> None:
    world = World(refuses="superseded")
    control = controller(world, tmp_path)
    with pytest.raises(SupersededError, match="there are none left"):
        control.turn()
    assert world.calls == 1
    (told,) = [event for event in control.history.read() if event.kind == "failure"]
    assert told.instance is not None
    # Its lease is still its own, and it stays silent all the same.
    world.refuses = None
    with pytest.raises(SupersededError):
        control.turn()
    assert not world.started
    assert control.turn(act=False).decision.actions


def test_targets_hear_of_hosts_that_keep_dying(tmp_path: Path) -> None:
    world = World(hosts=("h1",))
    control = controller(world, tmp_path)
    for _ in range(200):
        control.turn()
        world.pass_time(60.0)
        for name, one in world.statuses.items():
            if one.state == "ready" and "h1" in one.hosts:
                world.statuses[name] = replace(one, state="failed", reason="died", kind="ended")
        if world.avoided[-1]:
            break
    assert world.avoided[-1] == ("h1",)
    assert world.avoided[0] == ()


def test_a_controller_without_the_store_adopts_what_targets_describe(tmp_path: Path) -> None:
    world = World()
    control = controller(world, tmp_path)
    settle(world, control)
    for name, one in world.statuses.items():
        world.statuses[name] = replace(one, instance=control.store.find(name))
    world.pass_time(300.0)
    (tmp_path / "elsewhere").mkdir()
    before = list(world.started)
    settle(world, controller(world, tmp_path / "elsewhere", "two"))
    assert world.started == before
    assert world.serving() == len(before)


def test_an_instance_that_drifts_is_named_once_and_once_when_it_does_not_any_more(
    tmp_path: Path,
) -> None:
    world = World()
    own = controller(world, tmp_path)
    own.turn()
    world.pass_time(120.0)
    own.turn()

    def notes() -> list[str]:
        return [event.text for event in own.history.read() if event.kind == "note"]

    before = len(notes())
    world.token_s = 1.0
    for _ in range(3):
        world.pass_time(30.0)
        own.turn()
    (drift,) = notes()[before:]
    assert "atoll profile --server URL" in drift
    found = re.search(r"where ([\d.]+) ms are predicted", drift)
    assert found is not None
    world.token_s = float(found[1]) * 1e-3
    world.pass_time(30.0)
    own.turn()
    name = drift.partition(":")[0]
    assert notes()[-1] == f"{name} is as fast as predicted again"
