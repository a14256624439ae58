"""Plans of any-to-any models on slow links: transfers are charged on the way they take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.core.errors import InternalError
from atoll.plan.executor_use import executor_use
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.plan.validate.check import validate
from atoll.plan.validate.violation import InvalidPlanError
from atoll.sim.tasks.from_plan import task_fleet
from atoll.solve.comparison import compare_solvers, refuse_cheaper
from atoll.solve.graph.graph_solver import CUTS
from atoll.solve.plan_request import PlanRequest
from atoll.solve.registry import solve
from tests.solve.graph.fleets import fleet, offer, seeing

OFFERS = (offer("L40S:2", 3.6), offer("L40S:1", 1.9), offer("L4:1", 0.8))
IMAGES = {"image+text": {"share": 1.0, "input": 200, "output": 100, "images": {"count": 6}}}


def slow(gbit: float, offers: tuple[dict[str, object], ...] = OFFERS, **nics: str) -> Problem:
    links = {"in_region": {"bandwidth": f"{gbit}Gbit/s", "latency": "60us"}}
    every = {str(each["node_type"]): f"{gbit}Gbit/s" for each in offers}
    own = {name.replace("_", ":"): bandwidth for name, bandwidth in nics.items()}
    own_links = {**links, "nics": {**every, **own}}
    model = seeing(classes=IMAGES, rate="4/s", ttft="2s")
    return fleet({"see": model}, offers, catalog={"links": own_links})


def planned(problem: Problem, solver: str | None = None) -> Plan:
    return solve(problem, replace(PlanRequest(), solver=solver))


@pytest.mark.parametrize("gbit", [0.05, 1.0, 5.0, 50.0])
def test_no_simple_rule_beats_what_is_proven(gbit: float) -> None:
    problem = slow(gbit)
    plan = planned(problem)
    assert plan.status in ("optimal", "feasible")
    assert validate(plan, problem) == []
    assert plan.bound is not None
    for cut in CUTS:
        try:
            other = planned(problem, cut)
        except InvalidPlanError:
            continue
        if other.status in ("optimal", "feasible"):
            assert other.usd_per_hour >= plan.bound * (1 - 1e-9)
            assert other.usd_per_hour >= plan.usd_per_hour * (1 - 1e-3)


def test_faster_links_never_cost_more() -> None:
    costs = [planned(slow(gbit)).usd_per_hour for gbit in (0.05, 0.5, 5.0, 50.0)]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > costs[-1]


def test_a_machine_more_on_offer_costs_nothing_however_slow_its_interface_is() -> None:
    some = OFFERS[:2]
    alone = planned(slow(10.0, some))
    both = planned(slow(10.0, (*some, offer("L4:1", 50.0, 8)), L4_1="10Mbit/s"))
    assert both.usd_per_hour == pytest.approx(alone.usd_per_hour)


def test_what_one_executor_hands_itself_takes_no_time() -> None:
    problem = slow(0.05)
    plan = planned(problem, "monolith")
    (use,) = executor_use(plan, problem, problem.catalog()).classes
    # Several executors share the one step of the path, and none hands over to another.
    assert len(plan.instances) > 1
    assert use.first_text_s is not None
    assert use.ttft_s is not None
    assert use.first_text_s <= use.ttft_s


def test_a_rule_that_is_cheaper_than_what_is_proven_is_an_error() -> None:
    problem = slow(10.0)
    plan = planned(problem)
    assert [c.solver for c in compare_solvers(plan, problem)]
    wrong = plan.model_copy(update={"bound": 2.0 * plan.usd_per_hour})
    with pytest.raises(InternalError, match="what is proven is wrong"):
        list(compare_solvers(wrong, problem))
    # A bound of promised plans may be by simulated capacities: the one by capacity alone counts.
    known = wrong.model_copy(update={"capacity_bound": plan.bound})
    refuse_cheaper(plan, known, problem)


def test_a_link_that_is_stated_for_two_machines_carries_what_goes_between_them() -> None:
    model = seeing(classes=IMAGES, rate="1/s", paths=[["vision", "llm"]], ttft="20s")
    offers = (offer("L40S:1", 4.0), offer("L4:1", 0.8))
    pairs = (["L40S:1", "L40S:1"], ["L40S:1", "L4:1"], ["L4:1", "L4:1"])
    stated = [{"between": pair, "bandwidth": "60Mbit/s", "latency": "60us"} for pair in pairs]
    free = fleet({"see": model}, offers)
    held = fleet({"see": model}, offers, catalog={"links": {"nodes": stated}})
    before, plan = planned(free), planned(held)
    assert served(before) == served(plan) == 1.0
    # The plan that knows no such link sends more over it.
    assert {v.rule for v in validate(restamped(before, held), held)} == {"link-capacity"}
    assert validate(plan, held) == []
    assert plan.usd_per_hour > before.usd_per_hour
    # Simulations send over it, too.
    simulated = task_fleet(plan, held, held.catalog())
    assert len(simulated.links) == len(simulated.boxes) * (len(simulated.boxes) - 1) > 0
    assert {link.bytes_per_s for link in simulated.links.values()} == {60e6 / 8}
    assert not task_fleet(before, free, free.catalog()).links


@pytest.mark.parametrize(
    ("gpus", "bandwidth", "usd"), [(1, "30MB/s", 12.0), (2, "30MB/s", 6.0), (2, "3GB/s", 6.0)]
)
def test_groups_of_gpus_inside_machines_bound_what_goes_between_them(
    gpus: int, bandwidth: str, usd: float
) -> None:
    model = seeing(classes=IMAGES, rate="1/s", paths=[["vision", "llm"]], ttft="4s")
    links: dict[str, object] = {"in_region": {"bandwidth": "20Mbit/s", "latency": "60us"}}
    groups = {"L40S:4": {"gpus": gpus, "bandwidth": bandwidth, "latency": "10us"}}
    free = fleet({"see": model}, (offer("L40S:4", 6.0, 2),), catalog={"links": links})
    links["groups"] = groups
    held = fleet({"see": model}, (offer("L40S:4", 6.0, 2),), catalog={"links": links})
    before, plan = planned(free), planned(held)
    # Without groups the vision and the llm have two GPUs each, of one machine.
    assert before.usd_per_hour == 6.0
    broken = {v.rule for v in validate(restamped(before, held), held)}
    assert broken == ({"link-capacity"} if bandwidth == "30MB/s" else set())
    assert validate(plan, held) == []
    assert plan.usd_per_hour == usd
    assert plan.bound == 6.0
    assert plan.status == ("optimal" if usd == 6.0 else "feasible")
    (use,) = executor_use(plan, held, held.catalog()).classes
    assert use.first_text_s is not None
    if bandwidth == "3GB/s":
        (old,) = executor_use(before, free, free.catalog()).classes
        assert old.first_text_s is not None
        assert use.first_text_s > old.first_text_s


def served(plan: Plan) -> float:
    return min(plan.served_fraction.values())


def restamped(plan: Plan, problem: Problem) -> Plan:
    return plan.model_copy(update={"problem_hash": problem.content_hash()})
