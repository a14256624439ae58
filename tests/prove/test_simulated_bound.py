"""The least that plans cost by simulated capacities: what templates carry at most, and what follows."""

from __future__ import annotations

import math

import pytest

from atoll.catalog import Catalog
from atoll.core.ids import Phase
from atoll.plan.files.fleet_file import build_problem, parse_fleet
from atoll.plan.plan import Instance, Plan, SimulatedCapacity
from atoll.plan.problem import Lengths, Offer, Problem, Service, Settings
from atoll.plan.validate.check import validate
from atoll.prove.load_curves import STEPS, TOP, LoadCurve, LoadJob, measure_loads
from atoll.prove.rent_promises import keep_promises
from atoll.prove.simulated_bound import UNKNOWN, GoodCurve, SimulatedBound
from atoll.prove.simulation_deadline import SimulationCutShortError
from atoll.prove.smaller_plans import larger_plans, smaller_plans
from atoll.solve import registry
from atoll.solve.assembly import keep
from atoll.solve.derating import Derating
from atoll.solve.effort import Effort
from atoll.solve.plan_request import PlanRequest
from atoll.solve.templates.library import template_libraries
from atoll.workload.lengths import LengthMix

CATALOG = Catalog.default()
CHAT = Service(
    name="chat",
    model="llama-3.1-8b",
    ttft_s=1.0,
    tpot_s=0.06,
    rate_per_s=150.0,
    phases="together",
    lengths=Lengths.of(LengthMix.fixed(600.0, 120.0)),
)
PROBLEM = Problem(
    name="small",
    services=(CHAT,),
    offers=(Offer(region="here", node_type="L40S:1", available=40, usd_per_hour=2.0),),
    settings=Settings(max_nodes_per_instance=1, engines=("vllm", "sglang", "atoll")),
)
SHORT_PROMPTS = {
    "name": "kappa",
    "models": {
        "a": {
            "model": "qwen3-32b",
            "ttft": "400ms",
            "tpot": "300ms",
            "rate": "3.3/s",
            "lengths": "128x500",
            "phases": "together",
        }
    },
    "pool": {
        "offers": [
            {
                "region": "r",
                "node_type": "L40S:2",
                "available": 8,
                "usd_per_hour": 1.0,
                "whole": True,
            }
        ]
    },
    "settings": {"max_nodes_per_instance": 1},
}


def request(derating: Derating | None = None) -> PlanRequest:
    effort = Effort(cached=False, derating=derating)
    return PlanRequest(effort=effort, deadline_s=300.0, catalog=CATALOG)


class Allocator:
    """Plans as it is asked, and remembers the bounds."""

    def __init__(self) -> None:
        self.bounds: list[float] = []

    def __call__(self, problem: Problem, derating: Derating) -> Plan:
        plan = registry.solve(problem, request(derating))
        assert plan.bound is not None
        self.bounds.append(plan.bound)
        return plan


def asked(headroom: float) -> Problem:
    return PROBLEM.replace(services=(CHAT.model_copy(update={"headroom": headroom}),))


def test_unknown_templates_carry_a_tenth_more_and_are_simulated_if_they_matter() -> None:
    hasty, patient = Allocator(), Allocator()
    first = SimulatedBound(PROBLEM, CATALOG, hasty, lambda _: 0.95).find(0.0)
    last = SimulatedBound(PROBLEM, CATALOG, patient, lambda _: 0.95).find(math.inf)
    assert hasty.bounds == [first]
    assert patient.bounds == [first, last]
    one = keep(PROBLEM, CATALOG, registry.solve(PROBLEM, request()).instances[0])
    assert first == 2.0 * math.ceil(CHAT.rate_per_s / (UNKNOWN * one.throughput_per_s))
    # Steps of a sixteenth: at what the bound says of a machine too few keep their promise.
    assert first is not None
    assert last is not None
    assert last > first


def test_a_bound_is_what_was_found_before_the_deadline() -> None:
    allocator = Allocator()

    def until_late(problem: Problem, derating: Derating) -> Plan:
        if allocator.bounds:
            raise SimulationCutShortError("late")
        return allocator(problem, derating)

    found = SimulatedBound(PROBLEM, CATALOG, until_late, lambda _: 0.95).find(math.inf)
    assert allocator.bounds == [found]


def test_a_promise_for_fewer_requests_leaves_a_lower_bound() -> None:
    large = PROBLEM.replace(
        services=(CHAT.model_copy(update={"rate_per_s": 600.0}),),
        offers=(PROBLEM.offers[0].model_copy(update={"available": 100}),),
    )
    strict = SimulatedBound(large, CATALOG, Allocator(), lambda _: 0.99).find(math.inf)
    lenient = SimulatedBound(large, CATALOG, Allocator(), lambda _: 0.2).find(math.inf)
    assert strict is not None
    assert lenient is not None
    assert lenient < strict


def test_loads_above_the_analytic_throughput_are_simulated_long_enough_to_be_too_much() -> None:
    # Two thousand requests are over before a queue of seconds has grown.
    patient = CHAT.model_copy(update={"ttft_s": 5.0, "tpot_s": 0.2})
    mine = PROBLEM.replace(services=(patient,))
    instance = keep(mine, CATALOG, registry.solve(mine, request()).instances[0])
    curve = LoadCurve(top=TOP)
    while (step := curve.next_step(0.95)) is not None:
        (curve.kept[step],) = measure_loads(mine, CATALOG, [LoadJob(instance, step)])
    assert curve.kept[max(curve.kept)] < 0.95
    assert curve.load(0.95) <= curve.max_load(0.95) <= UNKNOWN


def test_the_most_that_is_carried_is_the_least_load_that_is_too_much() -> None:
    assert LoadCurve({12: 0.99, 13: 0.9}).max_load(0.95) == 13 / STEPS
    assert LoadCurve({16: 0.99, 18: 0.5}, TOP).max_load(0.95) == 18 / STEPS
    assert LoadCurve({20: 0.99}, TOP).max_load(0.95) == TOP / STEPS
    assert LoadCurve({20: 0.99}, TOP).load(0.95) == TOP / STEPS
    assert LoadCurve({16: 0.99}, TOP).next_step(0.95) == 18
    assert LoadCurve({16: 0.99, 18: 0.5}, TOP).next_step(0.95) == 17
    assert LoadCurve({16: 0.99}).next_step(0.95) is None


def test_a_template_may_lose_more_than_its_service_where_others_lose_less() -> None:
    """At 18/16 of its load it keeps the promise of more requests than at the largest that keeps 95 %."""
    curve = GoodCurve({12: 1.0, 15: 0.96, 16: 0.94, 18: 0.93, 19: 0.6, 20: 0.5}, TOP)
    assert curve.max_load(0.95) == 1.0
    assert curve.max_good(0.95) == pytest.approx(19 / STEPS * 0.93 / 0.95)
    # A cliff: nothing is gained beyond it.
    assert GoodCurve({15: 0.99, 16: 0.2, 20: 0.1}, TOP).max_good(0.95) == 1.0


def test_loads_are_simulated_until_no_other_could_keep_more() -> None:
    curve = GoodCurve(top=TOP)
    asked_for = []
    while (step := curve.next_step(0.9)) is not None:
        asked_for.append(step)
        curve.kept[step] = 1.0 if step <= 14 else max(0.0, 1.0 - 0.11 * (step - 14))
    assert {14, 15, 16} <= {*asked_for}
    true = max(step / STEPS * kept / 0.9 for step, kept in curve.kept.items())
    assert true <= curve.max_good(0.9) <= 1.1 * true
    # What is surely less needs no simulation.
    assert len(asked_for) < 9


def test_short_prompts_that_ask_for_much_need_one_machine() -> None:
    problem = build_problem(SHORT_PROMPTS)
    plan = keep_promises(problem, request())
    assert (plan.usd_per_hour, plan.bound, plan.status) == (1.0, 1.0, "optimal")
    assert plan.instances[0].phase is Phase.BOTH
    assert all(promise.is_surely_kept for promise in plan.promises)
    # One machine would not do if its engine booked whole answers.
    assert plan.instances[0].throughput_per_s > 3.3


def no_more(_instance: Instance, _per_s: float) -> SimulatedCapacity | None:
    """Nothing carries more than the capacity model says."""
    return None


def test_a_plan_with_room_is_tried_with_an_instance_less() -> None:
    roomy = registry.solve(asked(1.5), request())
    libraries = template_libraries(PROBLEM, CATALOG, cached=False)
    (found,) = smaller_plans(roomy, PROBLEM, CATALOG, libraries, math.inf, no_more)
    assert len(found.instances) == len(roomy.instances) - 1
    assert found.served_fraction == {"chat": 1.0}
    assert not validate(found, PROBLEM, CATALOG)
    assert (
        smaller_plans(roomy, PROBLEM, CATALOG, libraries, found.usd_per_hour - 0.01, no_more) == []
    )
    tight = registry.solve(PROBLEM, request())
    assert smaller_plans(tight, PROBLEM, CATALOG, libraries, math.inf, no_more) == []


@pytest.mark.parametrize(("rate", "kind"), [(0.5, "L4:1"), (6.0, None)])
def test_a_cheaper_machine_stands_in_where_it_carries_enough(rate: float, kind: str | None) -> None:
    cheap = Offer(region="here", node_type="L4:1", available=1, usd_per_hour=0.5)
    little = CHAT.model_copy(update={"rate_per_s": rate, "tpot_s": 0.12})
    large = PROBLEM.replace(services=(little,))
    plan = registry.solve(large, request())
    both = large.replace(offers=(*large.offers, cheap))
    libraries = template_libraries(both, CATALOG, cached=False)
    found = smaller_plans(plan, both, CATALOG, libraries, math.inf, no_more)
    assert [p.instances[0].nodes[0].kind for p in found] == ([kind] if kind else [])


LOST_SPOT = """
name: lost
services:
  a: {model: phi-4-14b, ttft: 2s, tpot: 100ms, rate: 2/s, lengths: 400x80, phases: together}
pool:
  offers:
    - {region: r, node_type: "L40S:1", market: spot, available: 2, usd_per_hour: 0.7}
    - {region: r, node_type: "L40S:1", available: 8, usd_per_hour: 1.86}
settings: {max_nodes_per_instance: 1, engines: [vllm]}
limits: {spot_loss: 2/h}
"""


def test_an_instance_more_of_what_a_plan_has_on_every_market() -> None:
    problem = parse_fleet(LOST_SPOT)
    libraries = template_libraries(problem, CATALOG, cached=False)
    one = registry.solve(problem, request())
    assert [i.nodes[0].market for i in one.instances] == ["spot"]
    two = larger_plans(one, problem, CATALOG, libraries, ["a"])
    assert [round(plan.usd_per_hour, 2) for plan in two] == [1.4, 2.56]
    assert larger_plans(one, problem, CATALOG, libraries, []) == []
    # No third one on spot is to be had.
    three = larger_plans(two[0], problem, CATALOG, libraries, ["a"])
    assert [round(plan.usd_per_hour, 2) for plan in three] == [3.26]
    for plan in (*two, *three):
        assert validate(plan, problem, CATALOG) == []


@pytest.mark.slow
def test_a_second_spot_node_keeps_what_the_loss_of_one_would_break() -> None:
    plan = keep_promises(parse_fleet(LOST_SPOT), request())
    assert plan.usd_per_hour == pytest.approx(1.4)
    assert all(promise.is_kept for promise in plan.promises)
