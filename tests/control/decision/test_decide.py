"""Deciding, on examples."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.control.decision.control_view import (
    EndNotice,
    Memory,
    PromiseSeen,
    TrafficSeen,
    TrafficWindow,
    recall,
)
from atoll.control.decision.decide import DrainInstance, ReweightRoutes, StartInstance, StopInstance
from atoll.control.decision.outlook import Outlook
from atoll.control.decision.path import CapacityDip
from atoll.control.decision.plan_judge import judge
from atoll.core.errors import InfeasibleError
from atoll.plan.plan import OfferKey, Plan
from atoll.plan.problem import Limits, Problem
from atoll.plan.survival import Survival
from tests.control.world import (
    OFFERS,
    POLICY,
    TICK_S,
    Loop,
    World,
    instance,
    offer,
    plan_greedily,
    problem,
    service,
)

H100: OfferKey = ("us-east", "H100:1", "on-demand")


def settled(*services: object, **changes: object) -> Loop:
    loop = Loop(World(problem(*services), **changes))  # type: ignore[arg-type]
    loop.settle()
    return loop


def traffic(rate: float, name: str = "chat") -> TrafficSeen:
    window = TrafficWindow(rate)
    return TrafficSeen(name, window, window, window)


def refuse(_: Problem) -> Plan:
    raise InfeasibleError("nothing fits")


def test_an_empty_fleet_is_brought_up_and_then_left_alone() -> None:
    loop = Loop(World(problem()))
    first = loop.decide()
    assert first.adopted
    assert first.reasons[0] == "no plan is known yet"
    starts = [a for a in first.actions if isinstance(a, StartInstance)]
    assert len(starts) == len(plan_greedily(problem()).instances) == 1
    assert starts[0].labels.instance == starts[0].instance.id
    assert starts[0].labels.plan
    for action in first.actions:
        loop.world.apply(action)
    loop.world.advance()
    loop.settle()
    assert loop.world.lanes()["chat/llm/both"] >= 8.0
    assert loop.world.routes is not None
    assert sum(route.share for route in loop.world.routes.routes) == pytest.approx(1.0)


def test_more_demand_is_met_at_once_and_less_after_a_while() -> None:
    loop = Loop(World(problem(), traffic=(traffic(5.0),)))
    loop.settle()
    small = len(loop.world.alive())
    loop.world.traffic = (traffic(30.0),)
    decision = loop.tick()
    assert any(isinstance(action, StartInstance) for action in decision.actions)
    assert any("30" in reason or "requests/s" in reason for reason in decision.reasons)
    loop.settle()
    large = len(loop.world.alive())
    assert large > small
    loop.world.traffic = (traffic(5.0),)
    low_at = loop.world.time_s
    while not any(isinstance(action, DrainInstance) for action in loop.tick().actions):
        assert loop.world.time_s < low_at + 3600.0
    assert loop.world.time_s - low_at >= POLICY.down_after_s
    loop.settle()
    assert len(loop.world.alive()) < large


def test_what_is_dearer_is_replaced_only_if_that_pays() -> None:
    loop = settled(service(rate=4.0))
    kinds = {one.nodes[0].node_type for one in loop.world.ready()}
    cheap = 0.97 * 1.8  # an L4 pair becomes a hair cheaper per request than the L40S
    loop.world.offers = (*OFFERS[:2], offer("L4:1", cheap * 3.0 / 4.0 / 2.0))
    assert not any(isinstance(a, StartInstance) for a in loop.settle())
    assert {one.nodes[0].node_type for one in loop.world.ready()} == kinds
    loop.world.offers = (*OFFERS[:2], offer("L4:1", 0.1))
    done = loop.settle()
    assert {one.nodes[0].node_type for one in loop.world.ready()} == {"L4:1"}
    at = [type(action) for action in done]
    assert at.index(StartInstance) < at.index(DrainInstance)


def test_an_infeasible_plan_takes_nothing_down() -> None:
    loop = settled()
    loop.plan = refuse
    before = loop.world.shape()
    loop.world.asked = problem(service(rate=50.0))
    told: list[str] = []
    for _ in range(40):
        decision = loop.tick()
        told += decision.reasons
        assert not any(isinstance(a, DrainInstance | StopInstance) for a in decision.actions)
    assert loop.world.shape() == before
    assert "kept: no plan: nothing fits" in told


def test_an_infeasible_plan_does_not_keep_a_lost_instance_from_coming_back() -> None:
    loop = settled()
    loop.plan = refuse
    before = loop.world.shape()
    loop.world.lose(next(iter(loop.world.alive())))
    loop.settle()
    assert loop.world.shape() == before


def test_a_plan_that_empties_a_service_is_refused() -> None:
    loop = settled(service("chat"), service("code", 3.0))
    before = loop.world.shape()

    def forget(asked: Problem) -> Plan:
        found = plan_greedily(asked)
        left = tuple(one for one in found.instances if one.service == "chat")
        return found.model_copy(update={"instances": left})

    loop.plan = forget
    loop.settle()
    assert loop.world.shape() == before


def test_a_service_that_is_taken_out_of_the_fleet_is_drained() -> None:
    loop = settled(service("chat"), service("code", 3.0))
    loop.world.asked = problem(service("chat"))
    loop.settle()
    assert {one.service for one in loop.world.alive().values()} == {"chat"}


def test_a_budget_that_is_cut_is_kept_to() -> None:
    loop = settled(service(rate=30.0))
    before = sum(one.usd_per_hour for one in loop.world.ready())
    loop.world.asked = problem(service(rate=30.0), limits=Limits(budget_usd_per_hour=6.0))

    def within(asked: Problem) -> Plan:
        found = plan_greedily(asked)
        kept: list[object] = []
        for one in found.instances:
            if sum(k.usd_per_hour for k in kept) + one.usd_per_hour <= 6.0:  # type: ignore[attr-defined]
                kept.append(one)
        return found.model_copy(update={"instances": tuple(kept), "status": "partial"})

    loop.plan = within
    loop.settle()
    after = sum(one.usd_per_hour for one in loop.world.ready())
    assert before > 6.0
    assert 0.0 < after <= 6.0


def test_what_stands_where_its_service_may_not_is_replaced_though_that_costs_more() -> None:
    dear = (OFFERS[0], offer("L40S:1", 9.0))
    loop = settled(service(rate=4.0), offers=dear)
    assert {one.nodes[0].node_type for one in loop.world.ready()} == {"H100:1"}
    loop.world.asked = problem(service(rate=4.0, only=("L40S",)))

    def plan(asked: Problem) -> Plan:
        # The planner of these tests knows nothing of `only`.
        return plan_greedily(asked.model_copy(update={"offers": dear[1:], "running": ()}))

    loop.plan = plan
    done = loop.settle()
    assert {one.nodes[0].node_type for one in loop.world.ready()} == {"L40S:1"}
    at = [type(action) for action in done]
    assert at.index(StartInstance) < at.index(DrainInstance)


def plan_with_spare(asked: Problem) -> Plan:
    """The cheapest plan that carries the demand of its one service with its largest instance lost."""
    (one,) = asked.services
    for spare in range(1, 40):
        rate = one.rate_per_s * (1.0 + spare / 20.0)
        more = one.model_copy(update={"rate_per_s": rate})
        made = plan_greedily(asked.model_copy(update={"services": (more,)}))
        carried = [each.throughput_per_s for each in made.instances]
        if sum(carried) - max(carried) >= one.demand_per_s:
            return made
    return plan_greedily(asked)


def test_a_fleet_that_survives_a_loss_does_so_again_after_one() -> None:
    few = (offer("L40S:1", 1.8, 3),)
    asked = problem(service(rate=6.0), limits=Limits(survive=1))
    loop = Loop(World(asked, few), plan=plan_with_spare)
    loop.settle()
    assert len(loop.world.ready()) == 3

    def left() -> float:
        carried = [one.throughput_per_s for one in loop.world.ready()]
        return (sum(carried) - max(carried)) / loop.world.demand()["chat/llm/both"]

    assert left() >= 1.0
    # The machine does not come back, and two still carry all: only what a second loss would leave is less.
    loop.world.lose(next(iter(loop.world.alive())))
    loop.world.offers = (offer("L40S:1", 1.8, 2),)
    loop.settle()
    assert loop.world.lanes()["chat/llm/both"] >= loop.world.demand()["chat/llm/both"]
    assert left() < 1.0
    # Others are on offer, and dearer.
    loop.world.offers = (offer("L40S:1", 1.8, 2), offer("L4:1", 2.0, 8))
    told = [reason for _ in range(20) for reason in loop.tick().reasons]
    assert left() >= 1.0
    assert any("adopted: after a loss serves 100.0%" in reason for reason in told)
    # And then it is left alone; a cheaper plan that could not lose anything is not taken.
    settled_shape = loop.world.shape()
    loop.plan = lambda asked: plan_greedily(asked.model_copy(update={"running": ()}))
    told = [reason for _ in range(20) for reason in loop.tick().reasons]
    assert loop.world.shape() == settled_shape
    assert any("refused: it would serve" in reason for reason in told)
    # Nobody who did not ask for it pays for it.
    free = Loop(World(problem(service(rate=6.0)), few), plan=plan_with_spare)
    free.settle()
    free.world.lose(next(iter(free.world.alive())))
    free.world.offers = (offer("L40S:1", 1.8, 2), offer("L4:1", 2.0, 8))
    free.settle()
    assert {one.nodes[0].node_type for one in free.world.ready()} == {"L40S:1"}


def test_what_need_not_survive_a_loss_keeps_no_plan_from_being_taken() -> None:
    """A spare machine of a service that need not be kept is given back; that of one that must be is not."""
    asked = problem(service(rate=6.0), service("mail", rate=1.0))

    def taken(*kept: str) -> bool:
        limits = Limits(survive=Survival(machines=1, services=kept))
        given = asked.model_copy(update={"limits": limits})
        made = plan_greedily(given)
        (mail,) = [one for one in made.instances if one.service == "mail"]
        spare = mail.model_copy(update={"id": "mail-both-9"})
        outlook = Outlook(0.0, {}, {}, POLICY)
        return judge(given, made, (*made.instances, spare), outlook, lambda: 0.0).adopt

    assert taken("chat")
    assert not taken("mail")


def test_a_failing_offer_is_backed_off_longer_each_time_and_another_serves() -> None:
    loop = Loop(World(problem(), broken={H100: "capacity"}))
    loop.settle()
    assert {one.nodes[0].node_type for one in loop.world.ready()} <= {"L40S:1", "L4:1"}
    assert loop.world.lanes()["chat/llm/both"] >= 8.0


def test_an_image_that_does_not_pull_is_not_tried_on_every_machine() -> None:
    broken = {each.key: "image" for each in OFFERS}
    loop = Loop(World(problem(), broken=broken))  # type: ignore[arg-type]
    for _ in range(120):
        loop.tick()
    assert loop.memory.backoffs[0].key == "chat"
    assert "image" in loop.memory.backoffs[0].describe()
    assert len(loop.world.started) <= 14  # an hour of 120 ticks: 60 s, 120 s, 240 s, then 480 s


def test_a_spot_notice_has_the_replacement_serve_before_the_end() -> None:
    loop = settled()
    (name,) = loop.world.alive()
    ends_s = loop.world.time_s + 300.0
    loop.world.notices = (EndNotice(f"job-{name}", ends_s),)
    while loop.world.time_s < ends_s - 30.0:
        loop.tick()
        assert loop.world.lanes()["chat/llm/both"] >= 8.0
    assert loop.world.observed[name].status.state in ("draining", "gone")


def test_who_takes_over_in_the_midst_of_a_move_starts_nothing_more() -> None:
    loop = settled()
    (name,) = loop.world.alive()
    seen = loop.world.observed[name]
    ends_s = loop.world.time_s + 1e6
    leaving = replace(seen.status, leave=True, ends_s=ends_s)
    loop.world.observed[name] = replace(seen, status=leaving)
    # Another serves long before the end, and then another controller takes over.
    for _ in range(40):
        if sum(one.status.state == "ready" for one in loop.world.observed.values()) < 2:
            loop.tick()
    loop.memory = Memory()
    for _ in range(20):
        loop.tick()
    assert loop.world.observed[name].status.state in ("draining", "gone")
    assert len(loop.world.started) == 2


def test_wall_time_ends_are_met_in_time_again_and_again() -> None:
    loop = settled()
    world = loop.world
    for name, seen in list(world.observed.items()):
        world.observed[name] = replace(
            seen, status=replace(seen.status, ends_s=world.time_s + 900.0)
        )
    for _ in range(200):
        loop.tick()
        for name, seen in list(world.observed.items()):
            status = seen.status
            if status.state == "starting" and status.ends_s is None:
                ends_s = world.time_s + 900.0
                world.observed[name] = replace(seen, status=replace(status, ends_s=ends_s))
        assert world.lanes()["chat/llm/both"] >= 8.0
    assert len(world.started) <= 12


def test_a_job_that_ends_on_the_only_machine_comes_back_there() -> None:
    policy = POLICY.model_copy(update={"move_s": 60.0})
    loop = Loop(World(problem(), offers=(offer("H100:1", 4.0, 1),)), policy=policy)
    loop.settle()
    (name,) = loop.world.alive()
    seen = loop.world.observed[name]
    ends_s = loop.world.time_s + 600.0
    loop.world.observed[name] = replace(seen, status=replace(seen.status, ends_s=ends_s))
    dips: list[CapacityDip] = []
    while not dips:
        dips += loop.tick().dips
    assert ends_s - policy.move_s <= loop.world.time_s - TICK_S < ends_s
    assert dips[0].lane == "chat/llm/both"
    assert (dips[0].before_per_s, dips[0].after_per_s) == (10.0, 0.0)
    loop.settle()
    assert len(loop.world.ready()) == 1
    assert name not in loop.world.alive()


def test_a_node_that_never_becomes_ready_is_given_up() -> None:
    loop = Loop(
        World(problem(), startup_s=1e9), policy=POLICY.model_copy(update={"ready_within_s": 120.0})
    )
    told: list[str] = []
    for _ in range(20):
        decision = loop.tick()
        told += [action.reason for action in decision.actions if isinstance(action, StopInstance)]
    assert told[0] == "not ready after 120 s"
    assert loop.memory.backoffs


def test_a_promise_that_is_broken_though_all_serves_brings_more() -> None:
    loop = settled()
    before = loop.world.lanes()["chat/llm/both"]
    loop.world.promises = (PromiseSeen("chat", 0.8, 0.95, 1000),)
    for _ in range(60):
        loop.tick()
    assert loop.world.lanes()["chat/llm/both"] > before
    boost = loop.memory.forecasts[0].boost
    assert 1.0 < boost <= POLICY.boost_most
    loop.world.promises = (PromiseSeen("chat", 0.99, 0.95, 1000),)
    for _ in range(200):
        loop.tick()
    assert loop.memory.forecasts[0].boost < boost


def test_a_class_that_breaks_its_promise_brings_more_though_the_service_keeps_its_own() -> None:
    loop = settled()
    before = loop.world.lanes()["chat/llm/both"]
    whole = PromiseSeen("chat", 0.97, 0.95, 1000)
    loop.world.promises = (whole, PromiseSeen("chat", 0.7, 0.9, 200, "text (long)"))
    reasons: list[str] = []
    for _ in range(60):
        reasons += loop.tick().reasons
    assert "chat keeps its promises for 70.0% of text (long), not 90.0%" in reasons
    assert loop.world.lanes()["chat/llm/both"] > before
    boost = loop.memory.forecasts[0].boost
    assert boost > 1.0
    # It is not taken back while one group is below its target, if only by chance.
    loop.world.promises = (whole, PromiseSeen("chat", 0.89, 0.9, 200, "text (long)"))
    for _ in range(200):
        loop.tick()
    assert loop.memory.forecasts[0].boost == boost
    loop.world.promises = (whole, PromiseSeen("chat", 0.91, 0.9, 200, "text (long)"))
    for _ in range(200):
        loop.tick()
    assert loop.memory.forecasts[0].boost < boost


def test_a_restarted_controller_adopts_what_runs() -> None:
    loop = settled(service("chat", 20.0), service("code", 3.0))
    again = Loop(loop.world, recall(loop.world.view()))
    decision = again.tick()
    assert [type(action) for action in decision.actions] == [ReweightRoutes]
    assert not again.settle()


def test_memory_is_optional() -> None:
    loop = settled()
    assert recall(loop.world.view()).wanted
    again = Loop(loop.world, Memory())
    assert all(isinstance(action, ReweightRoutes) for action in again.settle())


def test_a_change_of_phases_is_made_without_a_gap() -> None:
    loop = settled(service(phases="apart", rate=8.0))
    loop.world.asked = problem(service(phases="together", rate=8.0))
    for _ in range(60):
        loop.tick()
        lanes = loop.world.lanes()
        assert lanes.get("chat", lanes.get("chat/llm/both", 0.0)) >= 8.0
    assert {one.role for one in loop.world.alive().values()} == {"chat/llm/both"}


def test_what_nobody_planned_is_drained() -> None:
    loop = settled()
    loop.world.put(instance("stray"))
    done = loop.settle()
    assert [a.id for a in done if isinstance(a, DrainInstance)] == ["stray"]


def test_a_restarted_controller_without_a_plan_keeps_what_runs_and_replaces_what_dies() -> None:
    loop = settled(service("chat", 20.0), service("code", 3.0))
    before = loop.world.shape()
    again = Loop(loop.world, recall(loop.world.view()), plan=refuse)
    for _ in range(10):
        assert all(isinstance(action, ReweightRoutes) for action in again.tick().actions)
    loop.world.lose(min(loop.world.alive()))
    again.settle()
    assert loop.world.shape() == before
