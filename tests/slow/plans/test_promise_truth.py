"""The check that holds promises against the truth finds what is false of a plan."""

from __future__ import annotations

import pytest

from atoll.plan.files.fleet_file import build_problem
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.plan.validate.check import validate
from tests.slow.plans import promise_truth
from tests.slow.plans.promise_executors import list_executor_rivals
from tests.slow.plans.promise_fleets import make_fleet
from tests.slow.plans.promise_rivals import CAPACITY_RULES, Yard
from tests.slow.plans.promise_truth import Judge, Outcome


def fleet(rate: str = "2/s", **fields: object) -> Problem:
    """One small model on machines of $1/h, whole, and on spot for half of that."""
    offer = {"region": "r", "node_type": "L4:1", "available": 4, "usd_per_hour": 1.0, "whole": True}
    spot = {**offer, "market": "spot", "usd_per_hour": 0.5}
    service = {"model": "llama-3.1-8b", "ttft": "2s", "tpot": "100ms", "rate": rate}
    return build_problem(
        {
            "name": "small",
            "services": {"chat": service | {"lengths": "200x40", "phases": "together"}},
            "pool": {"offers": [offer, spot]},
            "settings": {"max_nodes_per_instance": 1, "engines": ["vllm"]},
            **fields,
        }
    )


def claim(problem: Problem, number: int, usd: float, **fields: object) -> Plan:
    """A plan of so many on-demand machines that claims a price, and that it keeps its promises."""
    yard = Yard(problem, problem.catalog())
    piece = next(p for p in yard.pieces["chat"] if not p.on_spot)
    ways: dict[tuple[int, ...], float] = {(n,): 1.0 / number for n in range(number)}
    made = yard.assemble(problem, [piece] * number, ways)
    return made.model_copy(update={"objective": usd, "usd_per_hour": usd, **fields})


def test_all_plans_of_three_instances_are_written_down_and_valid() -> None:
    problem = fleet()
    found = Yard(problem, problem.catalog()).list_rivals(claim(problem, 4, 9.0), 9.0)
    rivals = [rival for rival in found if rival.how == "of three"]
    # On-demand and spot: 2 alone, 3 pairs, 4 triples.
    assert len(rivals) == 9
    assert {rival.usd_per_hour for rival in rivals} == {0.5, 1.0, 1.5, 2.0, 2.5, 3.0}
    for rival in rivals:
        broken = validate(rival.plan, problem)
        assert [b for b in broken if b.rule not in CAPACITY_RULES] == []
        assert rival.plan.usd_per_hour == rival.usd_per_hour


def test_a_larger_plan_is_changed_in_one_place() -> None:
    problem = fleet()
    changed = [
        rival
        for rival in Yard(problem, problem.catalog()).list_rivals(claim(problem, 4, 4.0), 4.0)
        if rival.how == "one changed"
    ]
    assert sorted(rival.usd_per_hour for rival in changed) == [3.0, 3.5]


def test_spot_stays_within_its_limit() -> None:
    problem = fleet(limits={"spot_share": "30%"})
    for rival in Yard(problem, problem.catalog()).list_rivals(claim(problem, 4, 9.0), 9.0):
        spot = {i.id for i in rival.plan.instances if i.nodes[0].market == "spot"}
        assert sum(r.share for r in rival.plan.routes if spot & {*r.instances}) <= 0.3 + 1e-9
        assert sum(r.share for r in rival.plan.routes) == pytest.approx(1.0)
        assert len(spot) < len(rival.plan.instances)


def test_the_integer_program_finds_the_cheapest_by_capacity() -> None:
    problem = fleet()
    assert Yard(problem, problem.catalog()).least_by_capacity() == pytest.approx(0.5)
    half = fleet(limits={"spot_share": "0%"})
    assert Yard(half, half.catalog()).least_by_capacity() == pytest.approx(1.0)
    nothing = fleet("1000/s")
    assert Yard(nothing, nothing.catalog()).least_by_capacity() is None


@pytest.mark.slow
def test_a_cheaper_plan_that_keeps_and_a_bound_above_it_are_found() -> None:
    problem = fleet()
    outcome = Outcome(0, "rent")
    plan = claim(problem, 3, 3.0, bound=3.0, gap=0.0, status="optimal")
    promise_truth._check_rivals(plan, problem, problem.catalog(), outcome, kept=True)
    assert set(outcome.faults) == {"cheaper_keeps", "bound_false"}
    assert "$0.500/h" in outcome.faults["cheaper_keeps"][0]
    honest = Outcome(0, "rent")
    cheapest = claim(problem, 1, 0.5, bound=0.5, gap=0.0, status="optimal")
    promise_truth._check_rivals(cheapest, problem, problem.catalog(), honest, kept=True)
    assert honest.faults == {}


@pytest.mark.slow
def test_a_class_below_its_target_is_found() -> None:
    overloaded = fleet("40/s")
    judge = Judge(overloaded, overloaded.catalog())
    below = judge.find_below(claim(overloaded, 1, 1.0))
    assert below["chat"][0] < 0.5
    assert not judge.surely_keeps(claim(overloaded, 1, 1.0))
    calm = fleet("0.5/s")
    assert Judge(calm, calm.catalog()).find_below(claim(calm, 1, 1.0)) == {}


def test_a_rival_that_was_lucky_once_does_not_surely_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = fleet()
    lucky = range(promise_truth.SEED - 1, promise_truth.SEED + promise_truth._RUNS)

    def kept(_plan: Plan, _p: Problem, _c: object, _s: float, seed: int) -> dict[str, float]:
        return {"chat": 1.0 if always or seed in lucky else 0.9}

    monkeypatch.setattr(promise_truth, "kept_by_class", kept)
    always = False
    assert not Judge(problem, problem.catalog()).surely_keeps(claim(problem, 1, 1.0))
    always = True
    assert Judge(problem, problem.catalog()).surely_keeps(claim(problem, 1, 1.0))


def test_too_much_spot_and_idle_instances_are_found() -> None:
    problem = fleet(limits={"spot_share": "10%"})
    yard = Yard(problem, problem.catalog())
    spot = next(p for p in yard.pieces["chat"] if p.on_spot)
    outcome = Outcome(0, "spot")
    made = yard.assemble(problem, [spot, spot], {(0,): 1.0})
    promise_truth._check_spot(made, problem, outcome)
    assert len(outcome.faults["spot_false"]) == 2


@pytest.mark.slow
def test_what_others_take_from_a_full_instance_counts_as_on_spot() -> None:
    chat = {"model": "llama-3.1-8b", "ttft": "2s", "tpot": "200ms", "rate": "1.5/s"}
    problem = fleet(
        services={"chat": {**chat, "lengths": "600x600", "phases": "together"}},
        limits={"spot_share": "50%"},
        settings={"max_nodes_per_instance": 1, "engines": ["atoll"]},
    )
    yard = Yard(problem, problem.catalog())
    spot, off = (next(p for p in yard.pieces["chat"] if p.on_spot is on) for on in (True, False))
    judge = Judge(problem, problem.catalog())
    # Routes send half of the requests to a machine that has room for a third of them.
    ways: dict[tuple[int, ...], float] = {(0,): 0.5, (1,): 1 / 6, (2,): 1 / 6, (3,): 1 / 6}
    plan = yard.assemble(problem, [off, spot, spot, spot], ways)
    assert judge.find_below(plan) == {}
    assert judge.beyond_spot(plan)["chat"] > 0.6
    assert not judge.surely_keeps(plan)
    within = yard.assemble(problem, [off, off, spot, spot], {(n,): 0.25 for n in range(4)})
    assert judge.surely_keeps(within)


@pytest.mark.slow
def test_executors_are_divided_in_every_way() -> None:
    problem = next(make_fleet(seed) for seed in (3, 13) if make_fleet(seed).graph_services)
    catalog = problem.catalog()
    empty = Plan(problem_hash="0", problem_name="x", usd_per_hour=0, status="infeasible", solver="")
    rivals = list(list_executor_rivals(problem, catalog, empty, 1e9))
    assert {len(rival.plan.instances) for rival in rivals} == {1, 2, 3}
    for rival in rivals[:10]:
        broken = validate(rival.plan, problem)
        assert [b for b in broken if b.rule not in CAPACITY_RULES] == []
