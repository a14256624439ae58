"""The path of safe steps, the pool and names, on examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from atoll.control.decision.control_view import ObservedInstance
from atoll.control.decision.instance_names import name_instances, stamp_name
from atoll.control.decision.machine_pool import MachinePool, rent_of
from atoll.control.decision.path import PathQuestion, foresee, next_steps
from atoll.control.decision.route_weights import spread_routes
from atoll.deploy.target import InstanceState
from atoll.plan.plan import Instance, Plan, Route
from atoll.plan.problem import Offer, Problem
from tests.control.world import EAST, POLICY, WEST, World, instance, offer, problem, service


def ask(
    present: Sequence[tuple[Instance, InstanceState]],
    wanted: Sequence[Instance],
    offers: Sequence[Offer],
    rate: float = 8.0,
    **changes: object,
) -> PathQuestion:
    asked = problem(service(rate=rate)).model_copy(update={"offers": tuple(offers)})
    world = World(asked)
    for one, state in present:
        world.put(one, state)
    observed = list(world.observed.values())
    return PathQuestion(asked, observed, wanted, world.time_s, POLICY, **changes)  # type: ignore[arg-type]


def names(found: Sequence[tuple[ObservedInstance | Instance, str]]) -> list[str]:
    return [one.id for one, _ in found]


OLD = [instance("a1"), instance("a2")]
NEW = [instance("b1", node_type="H100:1", usd=4.0)]


def test_new_ones_come_first_and_old_ones_go_when_the_new_serve() -> None:
    roomy = (offer("L40S:1", 1.8), offer("H100:1", 4.0))
    both = [(one, "ready") for one in OLD]
    first = next_steps(ask(both, NEW, roomy))  # type: ignore[arg-type]
    assert (names(first.starts), names(first.drains)) == (["b1"], [])
    meanwhile = next_steps(ask([*both, (NEW[0], "starting")], NEW, roomy))  # type: ignore[list-item]
    assert meanwhile.empty
    last = next_steps(ask([*both, (NEW[0], "ready")], NEW, roomy))  # type: ignore[list-item]
    assert names(last.drains) == ["a1", "a2"]
    assert not last.dips
    whole = foresee(ask(both, NEW, roomy))  # type: ignore[arg-type]
    assert whole.complete
    assert not whole.dips


def test_a_service_that_has_not_caught_up_gives_up_nothing_but_what_is_taken_from_it() -> None:
    roomy = (offer("L40S:1", 1.8), offer("H100:1", 4.0))
    stands = [(one, "ready") for one in (*OLD, *NEW)]
    late = ask(stands, NEW, roomy, recovering=frozenset({"chat"}))  # type: ignore[arg-type]
    step = next_steps(late)
    assert not step.drains
    assert "a1 waits: its service has not caught up" in step.waits
    # Another service is no reason, and what has to go goes.
    other = replace(late, recovering=frozenset({"code"}))
    assert names(next_steps(other).drains) == ["a1", "a2"]
    assert names(next_steps(replace(late, ending=frozenset({"a2"}))).drains) == ["a2"]
    assert foresee(late).complete
    # So does what is in the way of what is wanted.
    tight = (offer("L40S:1", 1.8, 2), offer("H100:1", 4.0))
    wanted = [*NEW, instance("b2")]
    full = ask(stands, wanted, tight, recovering=frozenset({"chat"}))  # type: ignore[arg-type]
    assert names(next_steps(full).drains) == ["a1"]


def test_without_room_the_smallest_dip_is_taken_and_stated() -> None:
    tight = (offer("L40S:1", 1.8, 3),)
    present = [
        (instance("a1", per_s=4.0), "ready"),
        (instance("a2", per_s=1.0), "ready"),
        (instance("a3", per_s=3.0), "ready"),
    ]
    wanted = [instance("a1", per_s=4.0), instance("b1", per_s=5.0)]
    step = next_steps(ask(present, wanted, tight))  # type: ignore[arg-type]
    assert names(step.drains) == ["a2"]
    (dip,) = step.dips
    assert (dip.before_per_s, dip.after_per_s, dip.demand_per_s) == (8.0, 7.0, 8.0)
    whole = foresee(ask(present, wanted, tight))  # type: ignore[arg-type]
    assert whole.complete
    assert whole.dips == step.dips


def test_nothing_is_broken_while_something_under_way_makes_room() -> None:
    tight = (offer("L40S:1", 1.8, 3),)
    present = [
        (instance("a1"), "ready"),
        (instance("a2"), "ready"),
        (instance("old"), "draining"),
    ]
    step = next_steps(ask(present, [instance("b1"), instance("b2")], tight))  # type: ignore[arg-type]
    assert step.empty


def test_a_drained_one_counts_nothing_and_is_stopped_when_its_time_is_over() -> None:
    question = ask(
        [(instance("a1"), "ready"), (instance("a2"), "draining")], [instance("a1")], (), rate=4.0
    )
    assert next_steps(question).empty
    late = PathQuestion(
        question.problem, question.observed, question.wanted, question.time_s + 61.0, POLICY
    )
    assert names(next_steps(late).stops) == ["a2"]


def test_failed_ones_are_cleaned_up_and_twins_are_told_apart() -> None:
    question = ask([(instance("a1"), "ready"), (instance("a2"), "failed")], [instance("a1")], ())
    assert names(next_steps(question).stops) == ["a2"]
    twin = World(question.problem)
    twin.put(instance("a1"))
    seen = twin.observed["a1"]
    other = ObservedInstance(
        seen.status.__class__("job-2", seen.status.labels, "starting", 0.0), seen.instance
    )
    double = PathQuestion(
        problem(service(rate=4.0)), [other, seen], [instance("a1")], question.time_s, POLICY
    )
    step = next_steps(double)
    assert [one.status.handle for one, _ in step.stops] == ["job-2"]
    assert not step.drains


def test_replacements_start_a_few_at_a_time_but_demand_is_not_held_up() -> None:
    roomy = (offer("L40S:1", 1.8), offer("H100:1", 4.0))
    old = [(instance(f"a{k}"), "ready") for k in range(8)]
    new = [instance(f"b{k}") for k in range(8)]
    calm = next_steps(ask(old, new, roomy, rate=32.0))  # type: ignore[arg-type]
    assert len(calm.starts) == 2  # a quarter of eight
    urgent = next_steps(ask(old, new, roomy, rate=60.0))  # type: ignore[arg-type]
    assert len(urgent.starts) == 7  # 32 stand, 28 more are needed at once


def test_what_leaves_soon_is_replaced_all_at_once() -> None:
    roomy = (offer("L40S:1", 1.8), offer("H100:1", 4.0))
    old = [(instance(f"a{k}"), "ready") for k in range(8)]
    new = [instance(f"b{k}") for k in range(8)]
    asked = ask(old, new, roomy, rate=32.0)  # type: ignore[arg-type]
    leaving = replace(asked, spared=frozenset(f"a{k}" for k in range(6)))
    # Two stay and carry 8 of the 32; the others are not waited for.
    assert len(next_steps(leaving).starts) == 6
    assert not next_steps(leaving).drains


def test_cut_machines_are_shared_gpu_by_gpu() -> None:
    def cut(name: str, slot: int, gpus: tuple[int, ...]) -> Instance:
        whole = instance(name)
        node = whole.nodes[0].model_copy(
            update={"node_type": "L40S:4", "slot": slot, "gpu_ids": gpus}
        )
        return whole.model_copy(update={"nodes": (node,)})

    pool = MachinePool([offer("L40S:4", 7.0, 1)], [cut("a", 0, (0, 1))])
    assert pool.has_room(cut("b", 0, (2, 3)))
    assert not pool.has_room(cut("b", 0, (1, 2)))
    assert not pool.has_room(cut("b", 1, (0,)))
    pool.take(cut("b", 0, (2, 3)))
    pool.give_back(cut("a", 0, (0, 1)))
    assert pool.has_room(cut("c", 0, (0, 1)))
    pool.give_back(cut("b", 0, (2, 3)))
    assert pool.has_room(cut("c", 1, (0,)))
    assert rent_of([offer("L40S:4", 7.0, 1)], [cut("a", 0, (0, 1)), cut("b", 0, (2,))]) == 7.0


def test_a_host_is_taken_once() -> None:
    offers = [offer("L40S:1", 0.0, 2, market="owned")]
    pool = MachinePool(offers, [instance("a", market="owned", host="h1")])
    assert not pool.has_room(instance("b", market="owned", host="h1"))
    assert pool.has_room(instance("b", market="owned", host="h2"))


def plan_of(asked: Problem, *instances: Instance) -> Plan:
    return Plan(
        problem_hash="",
        problem_name=asked.name,
        instances=instances,
        routes=tuple(
            Route(service=one.service, instances=(one.id,), share=1 / len(instances))
            for one in instances
        ),
        usd_per_hour=1.0,
        status="feasible",
        solver="by hand",
    )


def test_what_runs_keeps_its_name_and_no_name_comes_twice() -> None:
    given = plan_of(problem(), instance("chat-both-0"), instance("chat-both-1", node_type="H100:1"))
    running = {"x-t0001": instance("x-t0001")}
    named = name_instances(given, running, 5.0, running)
    assert [one.id for one in named.instances] == ["chat-both-1-t03uw", "x-t0001"]
    assert {name for route in named.routes for name in route.instances} == {
        one.id for one in named.instances
    }
    assert stamp_name("chat-both-1-t03uw", 5.0, {"chat-both-1-t03uw"}) == "chat-both-1-1-t03uw"
    moved = name_instances(given, {"chat-both-0": instance("chat-both-0", region=WEST)}, 5.0, ())
    assert "chat-both-0" not in {one.id for one in moved.instances}


def test_routes_follow_capacity_while_the_plan_is_not_reached() -> None:
    asked = problem(service(phases="apart"))
    serving = [
        instance("p1", "chat/llm/prefill", region=EAST),
        instance("p2", "chat/llm/prefill", region=WEST),
        instance("d1", "chat/llm/decode", region=EAST, per_s=6.0),
        instance("d2", "chat/llm/decode", region=WEST, per_s=2.0),
    ]
    routes = spread_routes(asked, serving, ())
    shares = {route.instances: route.share for route in routes}
    assert shares == pytest.approx({("p1", "d1"): 0.5, ("p2", "d1"): 0.25, ("p2", "d2"): 0.25})
    given = (Route(service="chat", instances=("p1", "d1"), share=1.0),)
    assert spread_routes(asked, [serving[0], serving[2]], given) == given
    assert spread_routes(asked, serving[:2], ()) == ()
