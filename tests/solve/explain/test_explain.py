"""Explanations are exact: every figure is checked here by planning again without the code under test."""

from __future__ import annotations

from functools import cache

import pytest

from atoll.catalog.catalog import Catalog
from atoll.core.units import format_price
from atoll.plan.files.fleet import parse_fleet
from atoll.plan.plan import Plan
from atoll.plan.problem import Limits, Problem
from atoll.solve.explain import repairs
from atoll.solve.explain.explain import expected_plans, explain
from atoll.solve.explain.explanation import (
    Constraint,
    Explanation,
    ExtraNodes,
    NodeUse,
    Repair,
    Worth,
    served_share,
    slacks,
    tight_constraints,
)
from atoll.solve.explain.whatif import Planner, break_even
from atoll.solve.rent import optimal
from atoll.solve.templates.library import Libraries, libraries
from tests.cli.fleets import FAILS, FLEET, SHORT, TIGHT


@cache
def catalog() -> Catalog:
    return Catalog.default()


@cache
def templates(text: str) -> Libraries:
    return libraries(parse_fleet(text), catalog())


def solved(problem: Problem, text: str) -> Plan:
    """The optimum by the solver itself; `text` says which templates belong to the problem."""
    return optimal.solve(problem, catalog(), templates(text), gap=1e-6).plan


def planner(text: str, problem: Problem | None = None, **limits: float) -> Planner:
    return Planner(problem or parse_fleet(text), catalog(), templates(text), **limits)  # type: ignore[arg-type]


def explained(text: str, problem: Problem | None = None, **asked: object) -> Explanation:
    own = problem or parse_fleet(text)
    return explain(solved(own, text), planner(text, own), **asked)  # type: ignore[arg-type]


def with_offer(problem: Problem, kind: str, **changes: object) -> Problem:
    return problem.replace(
        offers=tuple(
            o.model_copy(update=changes) if o.node_type == kind else o for o in problem.offers
        )
    )


def test_a_saving_is_the_difference_of_two_plans() -> None:
    problem = parse_fleet(FLEET)
    found = explained(FLEET)
    (tight,) = found.constraints
    assert (tight.kind, tight.used, tight.limit) == ("availability", 1, 1)
    assert tight.worth is not None
    now = solved(problem, FLEET)
    then = solved(with_offer(problem, "L40S:1", available=2), FLEET)
    assert tight.worth.usd_per_hour == pytest.approx(now.usd_per_hour - then.usd_per_hour)
    assert tight.worth.at_least <= tight.worth.usd_per_hour <= tight.worth.at_most
    assert tight.text == f"L40S:1 in east: 1 of 1; one more would save {format_price(1.61)}"


def test_the_break_even_price_is_where_the_plan_changes() -> None:
    problem = parse_fleet(FLEET)
    base = solved(problem, FLEET)
    found = break_even("T4:1", base, problem, planner(FLEET))
    assert found is not None
    assert found.exact
    factor = found.factor
    assert 0 < factor < 1
    for scale, used in ((0.999, True), (1.001, False)):
        priced = with_offer(problem, "T4:1", usd_per_hour=0.53 * factor * scale)
        kinds = {kind for _, kind, _ in solved(priced, FLEET).count_nodes()}
        assert ("T4:1" in kinds) is used


def test_every_node_type_is_accounted_for() -> None:
    found = explained(FLEET)
    uses = {use.node_type: use for use in found.node_types}
    assert set(uses) == {"A10G:1", "L4:1", "L40S:1", "T4:1"}
    assert uses["L4:1"].verdict == "used"
    assert uses["L4:1"].instances == ("chat-prefill-0", "chat-prefill-1")
    assert uses["L4:1"].text == "5 of 8 used, by chat prefill"
    dear = uses["T4:1"]
    assert dear.verdict == "too-dear"
    assert dear.break_even_usd_per_hour is not None
    assert dear.break_even_usd_per_hour < 0.53
    assert "would have to fall to" in dear.text


def test_a_node_type_that_carries_nothing_says_why() -> None:
    text = FLEET.replace("settings: {", "settings: {memory_ratio: 2.9, ")
    found = explained(text, node_types=["L40S:1"])
    (use,) = found.node_types
    reasons = {fit.role: fit.reason for fit in use.roles}
    assert reasons["chat/llm/decode"] == "carries chat decode"
    # A single node is never too large for a model, whatever the memory ratio.
    assert reasons["mini/llm/both"] == "carries mini both"
    avoided = FLEET.replace("tpot: 80ms", "tpot: 80ms, avoid: [T4]").replace(
        "tpot: 60ms", "tpot: 60ms, avoid: [T4]"
    )
    (use,) = explained(avoided, node_types=["T4:1"]).node_types
    assert use.verdict == "carries-nothing"
    assert "chat may not stand on it" in use.text
    slow = FLEET.replace("tpot: 80ms", "tpot: 1ms").replace("ttft: 1200ms", "ttft: 1ms")
    fits = explained(slow, node_types=["T4:1"]).node_types[0].roles
    reasons = {fit.role: fit.reason for fit in fits if not fit.carries}
    assert "breaks the promise with a single layer" in reasons["chat/llm/decode"]


def test_a_shortage_is_explained_by_what_is_served() -> None:
    problem = parse_fleet(SHORT)
    found = explained(SHORT, repairs=False)
    assert found.short
    assert found.repairs is None
    now = solved(problem, SHORT)
    assert found.served == pytest.approx(served_share(now, problem))
    worth = {c.rental.node_type: c.worth for c in found.constraints if c.rental and c.worth}
    then = solved(with_offer(problem, "L4:1", available=3), SHORT)
    assert worth["L4:1"].served == pytest.approx(served_share(then, problem), abs=1e-3)
    assert worth["L4:1"].serves_more
    assert worth["A10G:1"].nothing


def test_repairs_are_the_smallest_that_do() -> None:
    problem = parse_fleet(SHORT)
    found = repairs.find_repairs(planner(SHORT), [])
    costs = [repair.usd_per_hour for repair in found]
    assert costs == sorted(costs, key=lambda usd: usd or 0.0)
    more = {r.rentals[0].node_type: r.rentals[0].count for r in found if len(r.rentals) == 1}
    assert more == {"L40S:1": 2, "A10G:1": 5}
    for kind, count in more.items():
        (now,) = (o.available for o in problem.offers if o.node_type == kind)
        enough = solved(with_offer(problem, kind, available=now + count), SHORT)
        fewer = solved(with_offer(problem, kind, available=now + count - 1), SHORT)
        assert (enough.status, fewer.status) == ("optimal", "partial")


def test_a_promise_can_be_the_repair() -> None:
    own = repairs.strict(parse_fleet(TIGHT))
    found = repairs.promise_repairs(planner(TIGHT, own), own)
    (loose,) = (r for r in found if r.where == "TPOT of chat")
    assert loose.after is not None
    assert 0.08 < loose.after < 0.32
    problem = parse_fleet(TIGHT)
    for tpot_s, met in ((loose.after, True), (loose.after - 0.0008, False)):
        chat, mini = problem.services
        other = problem.replace(services=(chat.model_copy(update={"tpot_s": tpot_s}), mini))
        plan = optimal.solve(other, catalog(), libraries(other, catalog())).plan
        assert (plan.status == "optimal") is met


def test_a_promise_nothing_keeps_is_loosened_until_something_does() -> None:
    text = FLEET.replace("ttft: 1200ms", "ttft: 30ms")
    found = repairs.find_repairs(planner(text), [])
    assert {repair.kind for repair in found} == {"ttft"}
    (repair,) = found
    assert repair.usd_per_hour is None
    assert "can be served at all" in repair.text


def by_limits(problem: Problem) -> list[Repair]:
    own = repairs.strict(problem)
    return list(repairs.limit_repairs(planner(FLEET, own), own))


def test_limits_can_be_the_repair() -> None:
    problem = parse_fleet(FLEET)
    cheapest = solved(problem, FLEET)
    poor = problem.replace(limits=Limits(budget_usd_per_hour=5.0))
    found = explained(FLEET, poor, repairs=False)
    (constraint,) = (c for c in found.constraints if c.kind == "budget")
    assert constraint.worth is not None
    assert constraint.worth.served == 1.0
    (budget,) = by_limits(poor)
    assert budget.after == pytest.approx(cheapest.usd_per_hour)
    (nodes,) = by_limits(problem.replace(limits=Limits(max_nodes=6)))
    assert nodes.kind == "max-nodes"
    assert nodes.after is not None
    allowed = int(nodes.after)
    for number, met in ((allowed, True), (allowed - 1, False)):
        limited = problem.replace(limits=Limits(max_nodes=number))
        assert (solved(limited, FLEET).status == "optimal") is met
    both = problem.replace(limits=Limits(max_nodes=2, budget_usd_per_hour=2.0))
    (every,) = by_limits(both)
    assert every.text.startswith("without the budget and the limit on nodes: $8.89/h")


def test_an_infeasible_plan_shows_what_could_be_served() -> None:
    found = explained(FAILS, repairs=False)
    assert found.status == "infeasible"
    assert 0 < found.served < 1
    assert found.constraints
    assert found.usd_per_hour > 0


def test_without_time_the_questions_left_out_are_named() -> None:
    plan = solved(parse_fleet(FLEET), FLEET)
    none = explain(plan, planner(FLEET, most_plans=0))
    assert none.plans == 0
    assert none.left_out == ("everything that needs planning again",)
    one = explain(plan, planner(FLEET, most_plans=1))
    assert one.plans == 1
    assert one.left_out == (
        "what 1 of the constraints are worth",
        "at which price T4:1 would be used",
    )
    assert [c.worth for c in one.constraints] == [None]
    some: list[str] = []
    assert repairs.find_repairs(planner(SHORT, most_plans=1), some) == ()
    assert some == ["repairs by more nodes, in part", "repairs by looser promises, in part"]
    assert expected_plans(plan, parse_fleet(FLEET), None) == 5


def test_equal_questions_have_equal_answers() -> None:
    assert explained(FLEET) == explained(FLEET)


def test_an_explanation_survives_json() -> None:
    found = explained(SHORT, repairs=False)
    assert Explanation.from_json(found.to_json()) == found


def test_what_is_read_off_a_plan() -> None:
    problem = parse_fleet(FLEET).replace(
        limits=Limits(max_nodes=50, spread=1, budget_usd_per_hour=90.0)
    )
    plan = solved(problem, FLEET)
    kinds = [constraint.kind for constraint in tight_constraints(plan, problem)]
    assert kinds == ["max-nodes", "availability"]
    for slack in slacks(plan, problem):
        assert slack.capacity_per_s >= slack.demand_per_s
        assert slack.spare == pytest.approx(slack.capacity_per_s / slack.demand_per_s - 1)


def test_sentences() -> None:
    saving = Worth(usd_per_hour=2.0, at_least=1.0, at_most=2.5, served=1.0, served_now=1.0)
    assert saving.text == "save between $1.00/h and $2.50/h"
    more = ExtraNodes(region="east", node_type="L4:1", market="spot", count=2)
    assert more.text == "+2 L4:1 spot in east"
    limit = Constraint(
        kind="spot-share", where="GPUs on spot", used=0.3, limit=0.3, loosened="any share"
    )
    assert limit.text == "GPUs on spot: 30% of 30%"
    promise = Repair(
        kind="ttft", where="TTFT of chat", before=1.5, after=1.71, usd_per_hour=9.0, smallest=False
    )
    assert promise.text == "TTFT of chat 1.5s -> 1.71s (perhaps less): $9.00/h in all"
    idle = NodeUse(node_type="L4:1", verdict="idle", used=0, available=1)
    assert idle.text == "not used, and would not be for free"
    gone = NodeUse(node_type="L4:1", verdict="not-offered", used=0, available=0)
    assert gone.text == "none can be had"
