"""Repairs truly help: each is a plan that serves more, or as much for less, by the smallest change."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.plan.problem import Limits, Problem
from atoll.solve.explain.changes import with_limits, with_more
from atoll.solve.explain.explain_plan import explain
from atoll.solve.explain.merit import merit
from atoll.solve.explain.plan_explanation import MIN_SERVED, MIN_USD, Repair, served_share
from atoll.solve.explain.repairs import find_repairs
from tests.seeds import examples
from tests.solve.explain import toy
from tests.solve.explain.test_planning_again import problems

seeds = st.integers(0, 10_000)


def found(problem: Problem) -> tuple[Repair, ...]:
    return find_repairs(toy.planner(problem), toy.best_plan(problem), [])


@pytest.mark.slow
@examples(12)
@given(problems(), seeds)
def test_repairs_serve_more_or_cost_less_whatever_the_solver_does(
    problem: Problem, seed: int
) -> None:
    base = toy.any_plan(problem, seed)
    planner = toy.planner(problem, toy.erratic(seed), max_plans=60)
    planner.learn(problem, base)
    repairs = find_repairs(planner, base, [])
    for repair in repairs:
        now = served_share(base, problem, mean=repair.mean)
        assert repair.served >= now - 1e-6
        saved = repair.saved_usd_per_hour
        assert repair.served > now + MIN_SERVED or (saved is not None and saved > MIN_USD)
    meets = [repair.meets_demand for repair in repairs]
    assert meets == sorted(meets, reverse=True)


@examples(8)
@given(problems(scarce=True))
def test_repairs_are_what_the_changed_problem_gives(problem: Problem) -> None:
    for repair in found(problem):
        if repair.kind == "nodes":
            then = with_more(problem, repair.rentals)
        elif repair.kind == "max-nodes":
            then = with_limits(problem, max_nodes=int(repair.after or 0))
        elif repair.kind == "budget":
            then = with_limits(problem, budget_usd_per_hour=repair.after)
        else:
            continue
        best = toy.best_plan(then)
        assert merit(best, problem).meets_demand == repair.meets_demand
        assert served_share(best, problem, mean=repair.mean) >= repair.served - 1e-9
        if repair.meets_demand:
            assert abs(best.usd_per_hour - repair.usd_per_hour) < 1e-6
        if repair.smallest and repair.meets_demand and len(repair.rentals) == 1:
            (own,) = repair.rentals
            fewer = own.model_copy(update={"count": own.count - 1})
            smaller = toy.best_plan(with_more(problem, (fewer,)))
            assert not merit(smaller, problem).meets_demand


def test_a_whole_machine_is_to_be_cut_before_one_is_bought() -> None:
    services = (toy.service("big", 3.0), toy.service("small", 2.0))
    box = toy.offer("A100-40:4", 1, 0.0, market="owned", whole=True)
    problem = toy.problem(services, (box,))
    repairs = found(problem)
    assert repairs[0].kind == "cut"
    assert repairs[0].meets_demand
    assert repairs[0].text == (
        "cut A100-40:4 in east into slices (without `whole`): $0.00/h in all"
    )
    assert any(r.kind == "nodes" and "of your own" in r.text for r in repairs)


def test_phases_can_be_put_together() -> None:
    problem = toy.problem((toy.service("big", 2.0, phases="apart"),), (toy.offer("L4:1", 4, 1.0),))
    (repair,) = found(problem)
    assert repair.kind == "phases"
    assert repair.saved_usd_per_hour == 2.0
    assert repair.text == (
        "phases of big also together (`phases: auto`): $2.00/h in all, $2.00/h less"
    )


def test_those_that_meet_all_demand_are_told_from_those_that_help() -> None:
    services = (toy.service("big", 4.0, avoid=("L40S",)),)
    offers = (toy.offer("L4:1", 1, 1.0), toy.offer("L40S:1", 1, 2.0))
    repairs = found(toy.problem(services, offers))
    assert next(r.kind for r in repairs if r.meets_demand) == "nodes"
    helps = {r.kind: r for r in repairs if not r.meets_demand}
    assert helps["pinning"].served == 0.875
    assert "serves 87.5%" in helps["pinning"].text


def test_limits_are_loosened_no_further_than_needed() -> None:
    services, offers = (toy.service("big", 4.0),), (toy.offer("L4:1", 5, 1.0),)
    problem = toy.problem(services, offers, Limits(max_nodes=1))
    (nodes,) = (r for r in found(problem) if r.kind == "max-nodes")
    assert (nodes.before, nodes.after, nodes.smallest) == (1, 4, True)
    problem = toy.problem(services, offers, Limits(budget_usd_per_hour=2.0))
    (budget,) = (r for r in found(problem) if r.kind == "budget")
    assert (budget.before, budget.after) == (2.0, 4.0)
    both = Limits(max_nodes=1, budget_usd_per_hour=1.0)
    kinds = {r.kind: r for r in found(toy.problem(services, offers, both))}
    assert kinds["limits"].text == "without the budget and the limit on nodes: $4.00/h in all"


def test_changes_are_joined_only_where_that_gains_more_than_each() -> None:
    services = (
        toy.service("big", 2.0, phases="apart"),
        toy.service("small", 1.0, phases="apart"),
    )
    offers = (toy.offer("L4:1", 4, 1.0), toy.offer("L40S:1", 2, 2.0))
    joined = [r.where for r in found(toy.problem(services, offers)) if r.kind == "phases"]
    assert [where.count("phases of") for where in joined] == [2, 1, 1]
    picky = tuple(s.model_copy(update={"avoid": ("T4",)}) for s in services)
    # A machine that helps nobody is not to be cut, together with another or not.
    boxes = (
        toy.offer("A100-40:4", 1, 1.0, whole=True),
        toy.offer("T4:4", 1, 9.0, whole=True),
    )
    cut = [r.where for r in found(toy.problem(picky, boxes)) if r.kind == "cut"]
    assert len(cut) == 1
    assert cut[0].startswith("cut A100-40:4 in east")


def test_what_there_is_no_time_for_is_named() -> None:
    problem = toy.problem((toy.service("big", 4.0),), (toy.offer("L4:1", 1, 1.0),))
    planner, left_out = toy.planner(problem, max_plans=1), list[str]()
    assert find_repairs(planner, toy.best_plan(problem), left_out) == ()
    assert left_out == ["changes by more nodes, in part", "changes by looser promises, in part"]


@examples(12)
@given(problems(), seeds)
def test_an_explanation_starts_from_the_plan_given(problem: Problem, seed: int) -> None:
    base = toy.any_plan(problem, seed)
    why = explain(base, toy.planner(problem, toy.erratic(seed), max_plans=60))
    assert why.usd_per_hour == base.usd_per_hour
    assert why.served == served_share(base, problem)
    assert why.again is not None
    assert why.again.served >= why.served - 1e-6
    for worth in (c.worth for c in why.constraints if c.worth is not None):
        assert worth.served >= worth.served_now - 1e-6
        assert worth.serves_more or worth.usd_per_hour >= -1e-6
    assert why == explain(base, toy.planner(problem, toy.erratic(seed), max_plans=60))
