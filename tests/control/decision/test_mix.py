"""A shifting mix of classes: what executors carry of it, when it is planned for, and what then starts."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.control.decision.control_view import (
    ForecastState,
    Memory,
    TrafficSeen,
    TrafficWindow,
)
from atoll.control.decision.decide import DrainInstance, StartInstance, reroute
from atoll.control.decision.executor_capacity import ClassNeed, ExecutorKind, max_requests
from atoll.control.decision.forecast import forecast_classes
from atoll.control.decision.outlook import look_ahead
from atoll.control.decision.restate import restate_mix
from atoll.control.decision.route_weights import spread_paths
from atoll.plan.files.fleet_file import parse_fleet
from atoll.plan.plan import Instance, PartWork, Plan, RequestPath, RequestStep
from atoll.plan.problem import Problem
from tests.cli.graphs import SMALL
from tests.control.world import POLICY, Loop, World

FLEET = parse_fleet(SMALL.replace("available: 6", "available: 60"))
SECONDS = {
    "vision": (PartWork("image+text", "vision", 0.4),),
    "llm": (PartWork("image+text", "llm", 0.2), PartWork("text", "llm", 0.1)),
}


def executor(name: str, parts: str) -> Instance:
    node = {"id": "n0", "node_type": "L4:1", "market": "on-demand", "start": 0, "end": 1, "tp": 1}
    return Instance.parse(
        {
            "id": name,
            "service": "look",
            "role": f"look/{parts}/serve",
            "region": "east",
            "stages": 1,
            "nodes": [node],
            "flows": [],
            "throughput_per_s": 0.0,
            "usd_per_hour": 0.8,
            "work": [one for part in parts.split("+") for one in SECONDS[part]],
        }
    )


def plan_apart(asked: Problem) -> Plan:
    """As many eyes and minds as the mix needs, those that run first."""
    (service,) = asked.services
    share = {klass.name: klass.share for klass in service.classes}
    chosen: list[Instance] = []
    for part, seconds in SECONDS.items():
        busy = service.demand_per_s * sum(share[one.klass] * one.seconds for one in seconds)
        here = [one for one in asked.running if one.parts == (part,)]
        new = (executor(f"look-{part}-{number}", part) for number in range(100))
        chosen += [*here, *(one for one in new if one.id not in {h.id for h in here})][
            : math.ceil(busy - 1e-9)
        ]
    return Plan(
        problem_hash="",
        problem_name=asked.name,
        instances=tuple(chosen),
        served_fraction={"look": 1.0},
        usd_per_hour=0.8 * len(chosen),
        status="feasible",
        solver="toy",
    )


def traffic(rate: float, pictures: float) -> TrafficSeen:
    def seen(name: str, per_s: float, classes: tuple[TrafficSeen, ...] = ()) -> TrafficSeen:
        window = TrafficWindow(per_s)
        return TrafficSeen(name, window, window, window, classes=classes)

    each = (seen("image+text", rate * pictures), seen("text", rate * (1.0 - pictures)))
    return seen("look", rate, each)


def test_other_shares_are_planned_for_at_the_same_rate_and_said_in_numbers() -> None:
    world = World(FLEET, FLEET.offers, traffic=(traffic(30.0, 0.3),))
    loop = Loop(world, plan=plan_apart)
    loop.settle()
    eyes = sum(one.parts == ("vision",) for one in world.ready())
    world.traffic = (traffic(30.0, 0.6),)
    decision = loop.tick()
    told = [reason for reason in decision.reasons if "image+text" in reason]
    assert told[0].startswith("'image+text' is ")
    assert told[0].endswith("% of look's requests, planned 30%")
    assert any(isinstance(action, StartInstance) for action in decision.actions)
    loop.settle()
    more = sum(one.parts == ("vision",) for one in world.ready())
    assert more >= 30.0 * 0.6 * 0.4 > eyes
    # A mix that moves by less than the policy's share is no reason.
    world.traffic = (traffic(30.0, 0.58),)
    assert not [reason for reason in loop.tick().reasons if "image+text" in reason]
    # And back: what is not needed goes once demand has stayed low.
    world.traffic = (traffic(30.0, 0.3),)
    assert any(isinstance(action, DrainInstance) for action in loop.settle())
    assert sum(one.parts == ("vision",) for one in world.ready()) < more


def test_without_traffic_of_classes_the_fleet_files_shares_hold() -> None:
    window = TrafficWindow(30.0)
    seen = TrafficSeen("look", window, window, window)
    world = World(FLEET, FLEET.offers, traffic=(seen,))
    loop = Loop(world, plan=plan_apart)
    loop.settle()
    assert loop.memory.mixes == {"look": pytest.approx({"image+text": 0.6, "text": 0.4})}


def test_a_class_that_nobody_asks_for_keeps_a_small_share() -> None:
    world = World(FLEET, FLEET.offers, traffic=(traffic(30.0, 0.0),))
    loop = Loop(world, plan=plan_apart)
    loop.settle()
    mix = loop.memory.mixes["look"]
    assert 0.0 < mix["image+text"] < 0.05
    assert sum(mix.values()) == pytest.approx(1.0)


def test_classes_are_forecast_each_by_itself() -> None:
    rates, state = forecast_classes(traffic(30.0, 0.6), ForecastState("look"), 1e6, POLICY)
    assert [one.service for one in state.classes] == ["image+text", "text"]
    # Each with room for what may come, the smaller with more of it.
    assert rates["image+text"] > 18.0
    assert rates["text"] / 12.0 > rates["image+text"] / 18.0


def plan_over(*instances: Instance) -> Plan:
    """A plan in which just these serve, with a path for text alone to know it by."""
    step = RequestStep(parts=("llm",), instances={instances[-1].id: 1.0})
    path = RequestPath(service="look", klass="text", share=1.0, steps=(step,))
    return plan_apart(FLEET).model_copy(update={"instances": instances, "paths": (path,)})


def test_paths_are_the_plans_where_just_the_planned_serve_and_else_those_that_carry_most() -> None:
    eye, mind, whole = (
        executor(n, p) for n, p in zip("abc", ("vision", "llm", "vision+llm"), strict=True)
    )
    plan = plan_over(eye, mind)
    assert spread_paths(FLEET, (eye, mind), plan, {}) == plan.paths
    # Nobody sees, or serves at all: what was planned goes on.
    assert spread_paths(FLEET, (mind,), plan, {}) == plan.paths
    assert spread_paths(FLEET, (), plan, {}) == plan.paths
    # Which share a class has is what was planned for, whatever comes now.
    sees = {"look": {"image+text": 1.0, "text": 0.0}}
    alone = spread_paths(FLEET, (eye, mind, whole), plan, sees)
    assert {path.klass for path in alone} == {"image+text"}
    # One more serves than is planned: everybody is as busy as the best way has it.
    paths = spread_paths(FLEET, (eye, mind, whole), plan, {})
    (service,) = FLEET.services
    busy = dict.fromkeys("abc", 0.0)
    seconds = {(one.klass, one.part): one.seconds for part in SECONDS.values() for one in part}
    for klass in service.classes:
        mine = [path for path in paths if path.klass == klass.name]
        assert sum(path.share for path in mine) == pytest.approx(1.0)
        for path in mine:
            for step in path.steps:
                assert sum(step.instances.values()) == pytest.approx(1.0)
                for name, weight in step.instances.items():
                    took = sum(seconds[klass.name, part] for part in step.parts)
                    busy[name] += klass.share * path.share * weight * took
    most = max_requests(NEEDS, {kind("vision"): 1, kind("llm"): 1, kind("vision", "llm"): 1})
    assert max(busy.values()) * most <= 1.0 + 1e-6


def test_a_lost_executor_is_gone_round_at_once_and_told_once() -> None:
    here = [executor(*one) for one in (("a", "vision"), ("b", "llm"), ("c", "vision+llm"))]
    step = RequestStep(parts=("vision", "llm"), instances={"c": 1.0})
    path = RequestPath(service="look", klass="image+text", share=1.0, steps=(step,))
    plan = plan_over(*here).model_copy(update={"paths": (path,)})
    world = World(FLEET, FLEET.offers)
    for one in here:
        world.put(one)
    memory = Memory(plan=plan, paths=plan.paths)
    assert reroute(world.view(), memory) is None
    world.lose("c")
    told = reroute(world.view(), memory)
    assert told is not None
    assert {name for one in told.paths for s in one.steps for name in s.instances} == {"a", "b"}
    memory = replace(memory, paths=told.paths)
    assert reroute(world.view(), memory) is None
    # Nobody else sees: there is nothing else to tell.
    world.lose("a")
    again = reroute(world.view(), memory)
    assert again is None or reroute(world.view(), replace(memory, paths=again.paths)) is None


def test_phases_apart_and_together_are_two_ways() -> None:
    apart = [
        executor(name, "llm").model_copy(
            update={
                "role": f"look/llm.{phase}/serve",
                "work": tuple(
                    one._replace(part=f"llm.{phase}", seconds=one.seconds / 2)
                    for one in SECONDS["llm"]
                ),
            }
        )
        for name, phase in (("p", "prefill"), ("q", "decode"))
    ]
    here = (executor("a", "vision"), executor("b", "llm"), *apart)
    paths = [p for p in spread_paths(FLEET, here, plan_over(here[0]), {}) if p.klass == "text"]
    ways = {tuple(part for step in path.steps for part in step.parts) for path in paths}
    assert ways <= {("llm",), ("llm.prefill", "llm.decode")}
    assert sum(path.share for path in paths) == pytest.approx(1.0)


NEEDS = (ClassNeed("image+text", 0.6, ("vision", "llm")), ClassNeed("text", 0.4, ("llm",)))


def kind(*parts: str) -> ExecutorKind:
    return ExecutorKind(parts, tuple(one for part in parts for one in SECONDS[part]), 0.0)


def test_a_plan_is_full_at_a_second_a_second() -> None:
    # 0.24 s of vision and 0.16 s of llm a request.
    assert max_requests(NEEDS, {kind("vision"): 1, kind("llm"): 1}) == pytest.approx(1 / 0.24)
    assert max_requests(NEEDS, {kind("vision", "llm"): 2}) == pytest.approx(2 / 0.4)
    assert max_requests(NEEDS, {kind("llm"): 9}) == 0.0
    assert max_requests(NEEDS, {}) == 0.0
    # What sees writes only what the other cannot.
    both = {kind("vision", "llm"): 1, kind("llm"): 1}
    assert max_requests(NEEDS, both) == pytest.approx(1 / 0.24)
    assert max_requests(NEEDS, both | {kind("vision"): 1}) == pytest.approx(3 / 0.4)


@given(
    st.floats(0.05, 0.95),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(0, 3),
)
def test_best_ways_are_those_of_trying_all(
    share: float, eyes: int, minds: int, wholes: int
) -> None:
    needs = (NEEDS[0]._replace(share=share), NEEDS[1]._replace(share=1.0 - share))
    stand = {kind("vision"): eyes, kind("llm"): minds, kind("vision", "llm"): wholes}
    found = max_requests(needs, stand)
    # By hand: which share of pictures is seen, and of all answers written, by what does both.
    see, write = 0.4 * share, 0.2 * share + 0.1 * (1.0 - share)
    best = 0.0
    steps = [k / 40 for k in range(41)]
    for seen, written in product(steps, steps):
        loads = [(see * (1 - seen), eyes), (write * (1 - written), minds)]
        loads.append((see * seen + write * written, wholes))
        if all(count or load == 0.0 for load, count in loads):
            best = max(best, min(count / load for load, count in loads if load))
    assert found >= best - 1e-6
    assert found <= best * 1.06 + 1e-6


def pressed(seen: TrafficSeen) -> dict[str, float]:
    """What must be carried of each class where 20 requests/s of both are planned for."""
    world = World(FLEET, FLEET.offers, traffic=(seen,))
    planned = FLEET.services[0].model_copy(update={"rate_per_s": 40.0})
    planned = restate_mix(planned, {"image+text": 0.5, "text": 0.5}, POLICY)
    problem = FLEET.model_copy(update={"services": (planned,)})
    (found,) = look_ahead(world.view(), (), POLICY).pressing(problem).services
    return {klass.name: found.rate_per_s * klass.share for klass in found.classes}


def test_a_class_that_is_asked_for_all_that_is_planned_for_it_presses_alone() -> None:
    least = 20.0 * (1.0 - POLICY.slack)
    assert pressed(traffic(30.0, 0.6)) == pytest.approx({"image+text": least, "text": least})
    # Fewer requests than before, but pictures as many as there may be.
    assert pressed(traffic(25.0, 0.9)) == pytest.approx({"image+text": 20.0, "text": least})
    # Where classes are not told apart, all of them press alike.
    window = TrafficWindow(60.0)
    assert pressed(TrafficSeen("look", window, window, window)) == pytest.approx(
        {"image+text": 20.0, "text": 20.0}
    )


def plan_free(asked: Problem) -> Plan:
    """All that is asked, or an eye alone where no machine is free."""
    whole = plan_apart(asked)
    stand = {one.id for one in asked.running}
    free = sum(one.available for one in asked.offers if one.node_type == "L4:1") - len(stand)
    if sum(one.id not in stand for one in whole.instances) <= free:
        return whole
    eye = next(one for one in asked.running if one.parts == ("vision",))
    left = {"instances": (eye,), "status": "partial", "served_fraction": {"look": 0.1}}
    return whole.model_copy(update=left)


def test_what_cannot_be_replaced_for_now_ends_nothing_else() -> None:
    world = World(FLEET, FLEET.offers, traffic=(traffic(30.0, 0.6),))
    loop = Loop(world, plan=plan_free)
    loop.settle()
    eyes = {one.id for one in world.ready() if one.parts == ("vision",)}
    assert len(eyes) > 3
    for one in world.ready():
        if one.id not in eyes:
            world.lose(one.id)
    world.broken = dict.fromkeys((offer.key for offer in FLEET.offers), "capacity")
    for _ in range(8):
        loop.tick()
        assert eyes <= {one.id for one in world.ready()}
    assert loop.memory.backoffs
    # When machines can be had again, they serve with those that are new.
    world.broken = {}
    loop.settle(400)
    assert world.lanes()["look"] >= 30.0
    assert eyes <= {one.id for one in world.ready()}
