"""The check that holds plans against the truth finds what is wrong with a plan."""

from __future__ import annotations

from atoll.plan.plan import Plan
from atoll.plan.problem import Limits, Problem
from tests.reference.rent_ilp import RentReference
from tests.reference.test_rent_ilp import offer, problem, with_rate
from tests.slow.plans.planner_truth import judge


def claim(asked: Problem, usd: float, *, bound: float = 0.0, share: float = 1.0) -> Plan:
    """A plan that claims a cost, and has nothing behind it."""
    return Plan(
        problem_hash=asked.content_hash(),
        problem_name=asked.name,
        served_fraction={service.name: share for service in asked.services},
        usd_per_hour=usd,
        objective=usd,
        bound=bound,
        gap=max(0.0, 1.0 - bound / usd) if usd > 0 else 0.0,
        status="optimal" if share == 1.0 else "partial",
        solver="optimal",
    )


def faults(asked: Problem, plan: Plan) -> set[str]:
    verdict = judge(asked, plan, RentReference(asked, asked.catalog()))
    assert verdict.faults is not None
    # Nothing stands behind the claims, which the validator says of all of them.
    return set(verdict.faults) - {"plans_rejected"}


def three_machines(limits: Limits | None = None) -> Problem:
    """A rate that takes three machines of $2/h."""
    return problem(with_rate(2.5), offers=[offer()], limits=limits or Limits())


def test_the_optimum_is_right() -> None:
    asked = three_machines()
    assert faults(asked, claim(asked, 6.0, bound=6.0)) == set()
    assert faults(asked, claim(asked, 6.0 * 1.0009, bound=5.0)) == set()


def test_a_dearer_plan_is_worse() -> None:
    asked = three_machines()
    assert faults(asked, claim(asked, 6.1)) == {"worse_than_optimum"}
    assert faults(asked, claim(asked, 6.0, share=0.9)) == {"worse_than_optimum"}


def test_a_bound_above_the_optimum_is_false() -> None:
    asked = three_machines()
    assert faults(asked, claim(asked, 6.0, bound=6.001)) == {"bound_invalid"}


def test_a_plan_that_costs_less_than_possible_is_suspicious() -> None:
    asked = three_machines()
    assert faults(asked, claim(asked, 4.0)) == {"better_than_reference"}


def test_no_plan_where_there_is_one() -> None:
    asked = three_machines()
    nothing = claim(asked, 0.0).model_copy(
        update={"status": "infeasible", "objective": None, "bound": None, "gap": None}
    )
    assert faults(asked, nothing) == {"false_infeasible"}


def test_a_budget_is_kept() -> None:
    asked = three_machines(limits=Limits(budget_usd_per_hour=5.0))
    # Two machines serve four fifths of the rate.
    assert faults(asked, claim(asked, 4.0, share=0.8)) == set()
    assert "budget_broken" in faults(asked, claim(asked, 6.0, share=0.8))
    assert faults(asked, claim(asked, 2.0, share=0.4)) == {"worse_than_optimum"}


def test_what_is_served_short_costs_least() -> None:
    asked = three_machines(limits=Limits(max_nodes=2))
    assert faults(asked, claim(asked, 4.4, share=0.8)) == {"worse_than_optimum"}
    assert faults(asked, claim(asked, 4.0, share=0.8, bound=4.1)) == {"bound_invalid"}
