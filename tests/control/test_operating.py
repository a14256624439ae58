"""What holds whatever happens: random fleets, demands, prices, failures, losses, restarts and kills."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.control.decision.control_view import EndNotice, Memory, recall
from atoll.control.decision.decide import (
    ControlAction,
    Decision,
    DrainInstance,
    ReweightRoutes,
    StartInstance,
    StopInstance,
    decide,
)
from atoll.control.decision.lane_capacity import is_short
from tests.control.world import (
    EAST,
    POLICY,
    WEST,
    Loop,
    World,
    keys_of,
    offer,
    plan_greedily,
    problem,
    service,
)

seeds = st.integers(0, 2**32 - 1)


def make_offers(chance: random.Random, most: int) -> tuple[object, ...]:
    return tuple(
        offer(
            kind, round(usd * chance.uniform(0.3, 1.5), 2), chance.randint(most // 2, most), region
        )
        for kind, usd in (("H100:1", 4.0), ("L40S:1", 1.8), ("L4:1", 0.8))
        for region in (EAST, WEST)
    )


def make_world(chance: random.Random, most: int) -> World:
    services = [
        service("chat", chance.uniform(1.0, 30.0)),
        service("code", chance.uniform(1.0, 10.0), phases=chance.choice(("apart", "together"))),
    ][: chance.randint(1, 2)]
    world = World(problem(*services), make_offers(chance, most))  # type: ignore[arg-type]
    world.startup_s = chance.choice((30.0, 60.0, 120.0))
    world.drain_s = chance.choice((0.0, 30.0, 90.0))
    return world


def disturb(chance: random.Random, world: World, *, harm: bool, most: int) -> None:
    """Something happens: demand or prices move; with `harm`, offers break and instances die."""
    what = chance.choice(("rate", "price", "break", "mend", "lose", "notice", "nothing"))
    if what == "rate":
        asked = [
            replaced.model_copy(update={"rate_per_s": chance.uniform(0.5, 40.0)})
            for replaced in world.asked.services
        ]
        world.asked = world.asked.model_copy(update={"services": tuple(asked)})
    elif what == "price":
        prices = make_offers(chance, most)
        world.offers = tuple(
            old.model_copy(update={"usd_per_hour": new.usd_per_hour})  # type: ignore[attr-defined]
            for old, new in zip(world.offers, prices, strict=True)
        )
    elif what == "mend":
        world.broken = {}
    elif not harm:
        return
    elif what == "break":
        kind = chance.choice(("capacity", "quota", "memory", "image"))
        world.broken[chance.choice(world.offers).key] = kind  # type: ignore[assignment]
    elif what == "lose" and world.alive():
        world.lose(chance.choice(sorted(world.alive())))
    elif what == "notice" and world.alive():
        name = chance.choice(sorted(world.alive()))
        world.notices = (EndNotice(name, world.time_s + chance.uniform(60.0, 300.0)),)


def carry_out(loop: Loop, decision: Decision, *, strict: bool) -> None:
    """Carry a decision out and see that no action takes a lane below min(demand, before)."""
    world, demand = loop.world, loop.world.demand(loop.policy)
    for action in decision.actions:
        before = world.lanes()
        world.apply(action)
        if isinstance(action, StartInstance):
            continue
        after = world.lanes()
        for lane, left in after.items():
            if is_short(left, min(demand[lane], before[lane])):
                assert not strict, f"{lane} fell from {before[lane]} to {left} of {demand[lane]}"
                stated = [dip for dip in decision.dips if dip.lane == lane]
                assert stated, f"a dip of {lane} was not stated"


@given(seeds)
def test_no_step_goes_below_demand_or_what_was_there_where_there_is_room(seed: int) -> None:
    chance = random.Random(seed)
    loop = Loop(make_world(chance, 200))
    for _ in range(30):
        disturb(chance, loop.world, harm=False, most=200)
        carry_out(loop, loop.decide(), strict=True)
        loop.world.advance()


@given(seeds)
def test_where_there_is_little_room_every_dip_is_stated(seed: int) -> None:
    chance = random.Random(seed)
    loop = Loop(make_world(chance, 4))
    for _ in range(40):
        disturb(chance, loop.world, harm=True, most=4)
        carry_out(loop, loop.decide(), strict=False)
        loop.world.advance()


@given(seeds)
def test_nothing_is_started_where_it_is_held_back(seed: int) -> None:
    chance = random.Random(seed)
    loop = Loop(make_world(chance, 8))
    for _ in range(40):
        disturb(chance, loop.world, harm=True, most=8)
        now_s = loop.world.time_s
        decision = loop.decide()
        held = {held.key for held in loop.memory.backoffs if held.until_s > now_s}
        for action in decision.actions:
            if isinstance(action, StartInstance):
                assert action.instance.service not in held
                assert not held & set(keys_of(action.instance))
            loop.world.apply(action)
        loop.world.advance()


def shuffle(chance: random.Random, world: World) -> World:
    observed = list(world.observed.items())
    chance.shuffle(observed)
    offers = list(world.offers)
    chance.shuffle(offers)
    return replace(world, observed=dict(observed), offers=tuple(offers))


@given(seeds)
def test_the_same_view_has_the_same_decision_whatever_the_order(seed: int) -> None:
    chance = random.Random(seed)
    loop = Loop(make_world(chance, 12))
    for _ in range(15):
        disturb(chance, loop.world, harm=True, most=12)
        view, memory = loop.world.view(), loop.memory
        expected = decide(view, memory, POLICY, plan_greedily)
        assert decide(view, memory, POLICY, plan_greedily) == expected
        other, _ = decide(shuffle(chance, loop.world).view(), memory, POLICY, plan_greedily)
        assert other == expected[0]
        decision, loop.memory = expected
        for action in decision.actions:
            loop.world.apply(action)
        loop.world.advance()


@given(seeds)
def test_when_the_world_holds_still_it_comes_to_the_plan_and_rests(seed: int) -> None:
    chance = random.Random(seed)
    most = chance.choice((6, 200))
    loop = Loop(make_world(chance, most))
    for _ in range(chance.randint(0, 30)):
        disturb(chance, loop.world, harm=True, most=most)
        loop.tick()
    loop.world.broken, loop.world.notices = {}, ()
    loop.settle(200, quiet=40)
    wanted = {one.id for one in loop.memory.wanted}
    ready = {name for name, s in loop.world.observed.items() if s.status.state == "ready"}
    assert wanted <= ready
    # What is left over serves demand that the plan does not: only where there is too little for all.
    if wanted != ready:
        carried, demand = loop.world.lanes(), loop.world.demand()
        assert any(is_short(carried[lane], demand[lane]) for lane in demand)


@given(seeds)
def test_a_restart_at_any_time_adopts_what_runs_and_starts_nothing_twice(seed: int) -> None:
    chance = random.Random(seed)
    loop = Loop(make_world(chance, 200))
    loop.settle(200)
    disturb(chance, loop.world, harm=False, most=200)
    for _ in range(chance.randint(0, 12)):
        loop.tick()
    world, memory = loop.world, loop.memory
    other = replace(world, observed=dict(world.observed), started=list(world.started))
    loop.settle(300)
    again = Loop(other, recall(other.view()))
    again.settle(300)
    assert memory.planned_s is not None
    assert len(other.started) == len(set(other.started))
    rested = Loop(other, recall(other.view()))
    assert [type(a) for a in rested.tick().actions] in ([], [ReweightRoutes])
    assert set(again.world.alive()) == {one.id for one in again.memory.wanted}


def change(world: World) -> None:
    """A change that has much to do: dearer machines, more of one service and less of the other."""
    world.asked = problem(service("chat", 30.0), service("code", 2.0))
    world.offers = (offer("H100:1", 9.0), offer("L40S:1", 1.8), offer("L4:1", 0.8))


def bring_up() -> World:
    world = World(problem(service("chat", 18.0), service("code", 12.0)))
    Loop(world).settle()
    change(world)
    return world


@pytest.mark.slow
def test_a_controller_killed_between_any_two_actions_ends_the_same() -> None:
    world = bring_up()
    loop = Loop(world, recall(world.view()))
    total = len(loop.settle(200))
    expected, started = world.shape(), len(world.started)
    assert total >= 8
    for kill_after in range(total):
        world = bring_up()
        loop = Loop(world, recall(world.view()))
        left = kill_after
        while left > 0:
            actions: tuple[ControlAction, ...] = loop.decide().actions
            for action in actions[:left]:
                world.apply(action)
            left -= len(actions)
            if left >= 0:
                world.advance()
        after = Loop(world, Memory())
        after.settle(200)
        assert world.shape() == expected, kill_after
        assert len(world.started) == started == len(set(world.started)), kill_after
        assert set(world.alive()) == {one.id for one in after.memory.wanted}, kill_after


def test_all_kinds_of_actions_are_met_in_that_change() -> None:
    world = bring_up()
    kinds = {type(a) for a in Loop(world, recall(world.view())).settle(200)}
    assert {StartInstance, DrainInstance, ReweightRoutes} <= kinds
    assert StopInstance not in kinds
