"""Parts of machines: replacements go to other machines while what they replace still stands."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from atoll.control.decision.control_view import Memory, ObservedInstance
from atoll.control.decision.decide import DrainInstance, StartInstance, decide
from atoll.control.decision.machine_pool import MachinePool, move_slots
from atoll.plan.plan import Instance, Plan, Route
from atoll.plan.problem import Problem
from tests.control.world import POLICY, World, instance, offer, problem, service

MACHINES = (offer("L40S:4", 7.0, 3),)


def cut(name: str, slot: int, gpus: tuple[int, ...], per_s: float = 4.0) -> Instance:
    whole = instance(name, per_s=per_s)
    node = whole.nodes[0].model_copy(update={"node_type": "L40S:4", "slot": slot, "gpu_ids": gpus})
    return whole.model_copy(update={"nodes": (node,)})


def plan_of(asked: Problem, *instances: Instance) -> Plan:
    return Plan(
        problem_hash="",
        problem_name=asked.name,
        instances=instances,
        routes=tuple(
            Route(service=one.service, instances=(one.id,), share=1 / len(instances))
            for one in instances
        ),
        served_fraction={"chat": 1.0},
        usd_per_hour=7.0,
        status="feasible",
        solver="by hand",
    )


def test_what_replaces_two_halves_goes_to_one_other_machine() -> None:
    holding = {"a": cut("a", 0, (0, 1)), "b": cut("b", 0, (2, 3))}
    wanted = plan_of(problem(), cut("c", 0, (0, 1)), cut("d", 0, (2, 3)))
    moved = move_slots(wanted, holding, MACHINES)
    assert [node.slot for one in moved.instances for node in one.nodes] == [1, 1]
    # Without another machine it has to wait for its own.
    full = (offer("L40S:4", 7.0, 1),)
    assert move_slots(wanted, holding, full) is wanted


def test_the_end_of_a_part_of_a_machine_is_replaced_before_it_comes() -> None:
    asked = problem(service(rate=3.0)).replace(offers=MACHINES)
    world = World(asked, MACHINES)
    world.put(cut("a", 0, (0, 1)))
    seen = world.observed["a"]
    ends_s = world.time_s + POLICY.lead_s - 1.0
    world.observed["a"] = replace(
        seen, status=replace(seen.status, ends_s=ends_s, since_s=world.time_s - 1e5)
    )

    def plan(stated: Problem) -> Plan:
        return plan_of(stated, cut("chat-0", 0, (0, 1)))

    decision, memory = decide(world.view(), Memory(), POLICY, plan)
    (start,) = [each for each in decision.actions if isinstance(each, StartInstance)]
    assert not [each for each in decision.actions if isinstance(each, DrainInstance)]
    assert start.instance.nodes[0].slot == 1
    assert decision.dips == ()
    # Once it is ready, the old one goes.
    world.observed[start.instance.id] = ObservedInstance(
        replace(world.observed["a"].status, handle="new", labels=start.labels, ends_s=None),
        start.instance,
    )
    decision, _ = decide(world.view(), memory, POLICY, plan)
    (drain,) = [each for each in decision.actions if isinstance(each, DrainInstance)]
    assert drain.id == "a"


@given(st.integers(0, 2**32 - 1))
def test_only_what_does_not_stand_moves_and_only_where_it_must(seed: int) -> None:
    chance = random.Random(seed)
    offers = (offer("L40S:4", 7.0, chance.randint(1, 4)),)
    halves = ((0, 1), (2, 3), (0,), (3,), (0, 1, 2, 3))
    holding: dict[str, Instance] = {}
    pool = MachinePool(offers)
    for number in range(chance.randint(0, 6)):
        one = cut(f"h{number}", chance.randint(0, 3), chance.choice(halves))
        if pool.has_room(one):
            pool.take(one)
            holding[one.id] = one
    kept = [one for one in holding.values() if chance.random() < 0.5]
    new = [
        cut(f"w{number}", chance.randint(0, 3), chance.choice(halves))
        for number in range(chance.randint(0, 4))
    ]
    plan = plan_of(problem(), *kept, *new)
    moved = move_slots(plan, holding, offers)
    assert [one.id for one in moved.instances] == [one.id for one in plan.instances]
    assert moved == move_slots(plan, dict(reversed(holding.items())), offers)
    assert move_slots(moved, holding, offers) == moved
    left = MachinePool(offers, holding.values())
    for before, after in zip(plan.instances, moved.instances, strict=True):
        if before.id in holding:
            assert after == before
            continue
        assert after.nodes[0].gpu_ids == before.nodes[0].gpu_ids
        if after != before:
            assert left.has_room(after)
        if left.has_room(after):
            left.take(after)


def test_what_ends_serves_while_its_replacement_starts_but_not_to_the_last_moment() -> None:
    asked = problem(service(rate=3.0)).replace(offers=MACHINES)
    world = World(asked, MACHINES)
    world.put(cut("a", 0, (0, 1)))
    seen = world.observed["a"]
    began_s = world.time_s - 1e5
    policy = POLICY.model_copy(update={"move_s": 60.0})

    def drains(left_s: float, replacement: str) -> bool:
        world.put(cut("b", 1, (0, 1)), replacement)
        status = replace(seen.status, ends_s=world.time_s + left_s, since_s=began_s)
        world.observed["a"] = replace(seen, status=status)
        wanted = plan_of(asked, cut("b", 1, (0, 1)))
        memory = Memory(plan=wanted, planned_s=world.time_s, asked=asked, offers=MACHINES)
        decision, _ = decide(world.view(), memory, policy, lambda _: wanted)
        return any(isinstance(each, DrainInstance) for each in decision.actions)

    assert not drains(59.0, "starting")
    assert drains(19.0, "starting")
    assert drains(59.0, "ready")
