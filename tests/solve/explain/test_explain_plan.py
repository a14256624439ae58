"""Explanations are facts: every figure is checked here by planning again without the code under test."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.catalog.catalog import Catalog
from atoll.core.units import format_price
from atoll.plan.files.fleet_file import parse_fleet
from atoll.plan.plan import KeptPromise, Plan
from atoll.plan.problem import Limits, Problem, Settings
from atoll.plan.validate.check import validate
from atoll.solve.derating import Derating, node_set
from atoll.solve.effort import Effort
from atoll.solve.explain import repairs
from atoll.solve.explain.break_even import break_even
from atoll.solve.explain.changes import with_more
from atoll.solve.explain.explain_plan import explain, explain_problem
from atoll.solve.explain.merit import merit, relaxes
from atoll.solve.explain.plan_explanation import (
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
from atoll.solve.explain.planning_again import Planner
from atoll.solve.explain.solvers import RentSolver
from atoll.solve.plan_request import PlanRequest
from atoll.solve.registry import solve
from atoll.solve.rent import optimal
from atoll.solve.templates.library import Libraries, libraries
from tests.cli.fleets import FAILS, SHORT, TIGHT
from tests.cli.fleets import FREE as FLEET
from tests.plan.builders import EAST
from tests.plan.builders import offer as plain_offer
from tests.plan.builders import problem as plain_problem
from tests.plan.builders import service as plain_service
from tests.seeds import examples

LAB = """\
services:
  big: {model: qwen3-32b, ttft: 2s, tpot: 80ms, rate: 3/s, lengths: azure-conv, phases: apart}
  small: {model: llama-3.1-8b, ttft: 1s, tpot: 50ms, rate: 8/s, lengths: azure-conv, phases: apart}
pool:
  owned:
    onprem:
      A100-40:8: {count: 1, whole: true}
settings: {engines: [free], max_nodes_per_instance: 3}
"""


@cache
def catalog() -> Catalog:
    return Catalog.default()


@cache
def templates(text: str) -> Libraries:
    return libraries(parse_fleet(text), catalog())


@cache
def solver(text: str) -> RentSolver:
    problem = parse_fleet(text)
    made = RentSolver(catalog(), cached=False)
    made.use(problem, templates(text))
    return made


def solved(problem: Problem, text: str) -> Plan:
    """The optimum by the solver itself; `text` says which templates belong to the problem."""
    return optimal.solve(problem, catalog(), solver(text).libraries(problem)).plan


def planner(text: str, problem: Problem | None = None, max_plans: int = 200) -> Planner:
    return Planner(
        problem or parse_fleet(text),
        catalog(),
        solver(text),
        max_plans=max_plans,
        max_seconds=1e6,
    )


def explained(text: str, problem: Problem | None = None, **asked: object) -> Explanation:
    own = problem or parse_fleet(text)
    plan = solved(own, text)
    return explain(plan, planner(text, own), libraries=templates(text), **asked)  # type: ignore[arg-type]


@cache
def explained_shortage() -> Explanation:
    return explained(SHORT, repairs=False)


def with_offer(problem: Problem, kind: str, **changes: object) -> Problem:
    return problem.replace(
        offers=tuple(
            o.model_copy(update=changes) if o.node_type == kind else o for o in problem.offers
        )
    )


def test_a_saving_is_the_difference_of_two_plans() -> None:
    problem = parse_fleet(FLEET)
    found = explained(FLEET, repairs=False)
    now = solved(problem, FLEET)
    (tight,) = (c for c in found.constraints if c.kind == "availability")
    assert (tight.where, tight.used, tight.limit) == ("L40S:1 in east", 1, 1)
    assert tight.worth is not None
    then = solved(with_offer(problem, "L40S:1", available=2), FLEET)
    saved = now.usd_per_hour - then.usd_per_hour
    assert saved > 0.5
    assert tight.worth.usd_per_hour == pytest.approx(saved, abs=1e-3 * now.usd_per_hour)
    assert tight.worth.at_most is not None
    assert tight.worth.usd_per_hour <= tight.worth.at_most + 1e-9
    assert tight.text.startswith("L40S:1 in east: 1 of 1; one more would save $")


def test_the_break_even_price_is_where_the_plan_changes() -> None:
    problem = parse_fleet(FLEET)
    base = solved(problem, FLEET)
    used = {kind for _, kind, _ in base.count_nodes()}
    (kind, *_) = sorted(set(problem.node_types) - used)
    found = break_even(kind, base, problem, planner(FLEET))
    assert found is not None
    assert found.factor is not None
    assert 0 < found.factor <= 1
    (price,) = (o.usd_per_hour for o in problem.offers if o.node_type == kind)
    cheap = with_offer(problem, kind, usd_per_hour=price * found.factor * 0.98)
    assert (solved(cheap, FLEET).objective or 0.0) < (base.objective or 0.0)
    if found.exact and found.factor < 1:
        dear = with_offer(problem, kind, usd_per_hour=price * min(1.0, found.factor * 1.02))
        assert solved(dear, FLEET).objective == pytest.approx(base.objective, rel=1e-3)


@pytest.mark.slow
def test_every_node_type_is_accounted_for() -> None:
    found = explained(FLEET)
    uses = {use.node_type: use for use in found.node_types}
    assert set(uses) == {"A10G:1", "L4:1", "L40S:1", "T4:1"}
    plan = solved(parse_fleet(FLEET), FLEET)
    for kind, use in uses.items():
        standing = [i for i in plan.instances if kind in {n.node_type for n in i.nodes}]
        assert (use.verdict == "used") == bool(standing)
        assert use.instances == tuple(i.id for i in standing)
        if use.break_even_usd_per_hour is not None:
            assert use.usd_per_hour is not None
            assert use.break_even_usd_per_hour <= use.usd_per_hour


def test_a_node_type_that_carries_nothing_says_why() -> None:
    avoided = FLEET.replace("tpot: 80ms", "tpot: 80ms, avoid: [T4]").replace(
        "tpot: 60ms", "tpot: 60ms, avoid: [T4]"
    )
    (use,) = explained(avoided, node_types=["T4:1"], repairs=False).node_types
    assert use.verdict == "carries-nothing"
    assert "chat may not stand on it" in use.text
    slow = FLEET.replace("tpot: 80ms", "tpot: 1ms").replace("ttft: 1200ms", "ttft: 1ms")
    fits = explained(slow, node_types=["T4:1"], repairs=False).node_types[0].roles
    reasons = {fit.role: fit.reason for fit in fits if not fit.carries}
    assert "breaks the promise with a single layer" in reasons["chat/llm/decode"]


def test_a_shortage_is_explained_by_what_is_served() -> None:
    problem = parse_fleet(SHORT)
    found = explained_shortage()
    assert found.short
    assert found.repairs is None
    now = solved(problem, SHORT)
    assert found.served == pytest.approx(served_share(now, problem))
    for constraint in found.constraints:
        assert constraint.worth is not None
        assert constraint.worth.served >= found.served - 1e-6
    assert any(c.worth is not None and c.worth.serves_more for c in found.constraints)


@pytest.mark.slow
def test_repairs_of_a_shortage_hold_and_are_the_smallest() -> None:
    problem = parse_fleet(SHORT)
    found = repairs.find_repairs(planner(SHORT), solved(problem, SHORT), [])
    full = [repair for repair in found if repair.meets_demand]
    alone = [r.rentals[0] for r in full if r.kind == "nodes" and len(r.rentals) == 1]
    assert alone
    for own in alone:
        enough = solved(with_more(problem, (own,)), SHORT)
        assert merit(enough, problem).meets_demand
    sure = [r.rentals[0] for r in full if len(r.rentals) == 1 and r.smallest]
    for own in sure:
        fewer = own.model_copy(update={"count": own.count - 1})
        assert solved(with_more(problem, (fewer,)), SHORT).status == "partial"
    bought = [r for r in full if r.kind == "nodes"]
    assert [r.usd_per_hour for r in bought] == sorted(r.usd_per_hour for r in bought)


def test_a_box_is_to_be_cut_and_phases_put_together() -> None:
    problem = parse_fleet(LAB)
    now = solved(problem, LAB)
    assert now.status in ("partial", "infeasible")
    found = {r.kind: r for r in repairs.find_repairs(planner(LAB), now, [])}
    assert found["cut"].meets_demand
    assert found["cut"].where.startswith("cut A100-40:8 in onprem into slices")
    assert found["nodes"].rentals[0].node_type == "A100-40:8"
    assert found["nodes"].text.startswith("+")
    free = problem.replace(
        offers=tuple(o.model_copy(update={"whole": False}) for o in problem.offers)
    )
    assert solved(free, LAB).status == "optimal"


def test_a_plan_for_less_holds_where_more_is_allowed() -> None:
    problem = parse_fleet(LAB)
    plan = solved(problem, LAB)
    free = problem.replace(
        offers=tuple(o.model_copy(update={"whole": False}) for o in problem.offers),
        services=tuple(s.model_copy(update={"phases": "auto"}) for s in problem.services),
    )
    assert relaxes(free, problem)
    assert validate(plan, free, catalog(), same_problem=False) == []


@pytest.mark.slow
def test_a_promise_can_be_the_repair() -> None:
    problem = parse_fleet(TIGHT)
    now = solved(problem, TIGHT)
    assert now.status == "partial"
    found = repairs.find_repairs(planner(TIGHT), now, [])
    loose = [r for r in found if r.kind in ("ttft", "tpot")]
    assert loose
    for repair in loose:
        assert repair.after is not None
        assert repair.before is not None
        assert 1.0 < repair.after / repair.before <= 4.0
        name = repair.where.rpartition(" ")[2]
        services = tuple(
            s.model_copy(update={f"{repair.kind}_s": repair.after}) if s.name == name else s
            for s in problem.services
        )
        plan = solved(problem.replace(services=services), TIGHT)
        assert served_share(plan, problem) >= repair.served - 2e-3


@pytest.mark.slow
def test_limits_can_be_the_repair() -> None:
    problem = parse_fleet(FLEET)
    cheapest = solved(problem, FLEET)
    poor = problem.replace(limits=Limits(budget_usd_per_hour=0.6 * cheapest.usd_per_hour))
    found = explained(FLEET, poor)
    (constraint,) = (c for c in found.constraints if c.kind == "budget")
    assert constraint.worth is not None
    assert constraint.worth.served == 1.0
    assert found.repairs is not None
    (budget,) = (r for r in found.repairs if r.kind == "budget")
    assert budget.after == pytest.approx(cheapest.usd_per_hour, rel=1e-3)


def test_a_worse_plan_is_compared_with_and_told_so() -> None:
    problem = with_offer(parse_fleet(FLEET), "L40S:1", available=3)
    worse, best = solved(parse_fleet(FLEET), FLEET), solved(problem, FLEET)
    saved = worse.usd_per_hour - best.usd_per_hour
    assert saved > 0.5
    found = explain(worse, planner(FLEET, problem))
    assert found.usd_per_hour == worse.usd_per_hour
    assert found.again is not None
    assert found.again.usd_per_hour == pytest.approx(saved, abs=0.01)
    # What planning again gives anyway is nobody else's gain.
    for worth in (c.worth for c in found.constraints if c.worth is not None):
        assert worth.again or worth.usd_per_hour > saved
    assert found.repairs is not None
    for repair in found.repairs:
        assert (repair.saved_usd_per_hour or 0.0) > saved


@pytest.mark.slow
def test_an_infeasible_plan_shows_what_could_be_served() -> None:
    found = explained(FAILS, repairs=False)
    assert found.status == "infeasible"
    assert 0 < found.served < 1
    assert found.constraints
    assert found.usd_per_hour > 0
    # The plan alone, no question about it.
    made = explain(None, planner(FAILS, max_plans=1), libraries=templates(FAILS), repairs=False)
    assert made.status == "infeasible"
    assert made.served == found.served


def test_without_time_the_questions_left_out_are_named() -> None:
    plan = solved(parse_fleet(FLEET), FLEET)
    none = explain(plan, planner(FLEET, max_plans=0))
    assert none.plans == 0
    assert none.left_out == ("everything that needs planning again",)
    assert none.usd_per_hour == plan.usd_per_hour
    one = explain(plan, planner(FLEET, max_plans=1), libraries=templates(FLEET))
    assert one.plans == 1
    assert any("would be used" in text for text in one.left_out)


@pytest.mark.slow
def test_equal_questions_have_equal_answers() -> None:
    assert explained(FLEET) == explained(FLEET)


def test_an_explanation_survives_json() -> None:
    found = explained_shortage()
    assert Explanation.from_json(found.to_json()) == found


def test_what_is_read_off_a_plan() -> None:
    problem = parse_fleet(FLEET).replace(
        limits=Limits(max_nodes=50, spread=1, budget_usd_per_hour=90.0)
    )
    plan = solved(problem, FLEET)
    kinds = {constraint.kind for constraint in tight_constraints(plan, problem)}
    assert "max-nodes" in kinds
    assert "budget" not in kinds
    for slack in slacks(plan, problem):
        assert slack.capacity_per_s >= slack.demand_per_s - 1e-6
        if slack.demand_per_s > 0:
            assert slack.spare == pytest.approx(
                max(0.0, slack.capacity_per_s / slack.demand_per_s - 1)
            )
        else:
            assert slack.spare == 0.0


def test_sentences() -> None:
    saving = Worth(usd_per_hour=2.0, at_most=2.5, served=1.0, served_now=1.0)
    assert saving.text == "save $2.00/h, $2.50/h at most"
    guess = Worth(usd_per_hour=2.0, served=1.0, served_now=1.0, estimated=True)
    assert guess.text == f"save about {format_price(2.0)} (estimate)"
    more = ExtraNodes(region="east", node_type="L4:1", market="spot", count=2)
    assert more.text == "+2 L4:1 spot in east"
    limit = Constraint(
        kind="spot-share", where="requests on spot", used=0.3, limit=0.3, loosened="any share"
    )
    assert limit.text == "requests on spot: 30% of 30%"
    link = Constraint(kind="link", where="1 full link (a - b)", loosened="links ten times as fast")
    carried = Worth(
        usd_per_hour=0.0, served=1.0, served_now=1.0, tokens_per_s=120.0, tokens_per_s_now=100.0
    )
    assert link.model_copy(update={"worth": carried}).text == (
        "1 full link (a - b); links ten times as fast would carry 120 tokens/s instead of 100"
    )
    promise = Repair(
        kind="ttft", where="TTFT of chat", before=1.5, after=1.71, usd_per_hour=9.0, smallest=False
    )
    assert promise.text == "TTFT of chat 1.5s -> 1.71s (perhaps less): $9.00/h in all"
    idle = NodeUse(node_type="L4:1", verdict="idle", used=0, available=1, usd_per_hour=1.0)
    assert idle.text == "not used, and would not be for free"
    gone = NodeUse(node_type="L4:1", verdict="not-offered", used=0, available=0)
    assert gone.text == "none can be had"


@pytest.mark.slow
@examples(4)
@given(
    st.tuples(*(st.integers(0, 3) for _ in range(4))),
    st.sampled_from((4.0, 9.0, 16.0)),
    st.sampled_from((None, 3.0, 6.0)),
    st.booleans(),
)
def test_random_fleets_are_explained_without_contradiction(
    available: tuple[int, ...], rate: float, budget: float | None, apart: bool
) -> None:
    given_fleet = parse_fleet(FLEET)
    chat, mini = given_fleet.services
    problem = given_fleet.replace(
        offers=tuple(
            o.model_copy(update={"available": n})
            for o, n in zip(given_fleet.offers, available, strict=True)
        ),
        services=(
            chat.model_copy(update={"rate_per_s": rate, "phases": "apart" if apart else "auto"}),
            mini,
        ),
        limits=Limits(budget_usd_per_hour=budget),
    )
    plan = solved(problem, FLEET)
    asked = planner(FLEET, problem, max_plans=14)
    why = explain(plan, asked, libraries=None)
    now = served_share(plan, problem)
    assert why.served == pytest.approx(now)
    for worth in (c.worth for c in why.constraints if c.worth is not None):
        assert worth.served >= worth.served_now - 1e-6
        assert worth.serves_more or worth.usd_per_hour >= -1e-6
    for repair in why.repairs or ():
        saved = repair.saved_usd_per_hour or 0.0
        assert (
            repair.served > served_share(plan, problem, mean=repair.mean) or saved or repair.freed
        )
        assert repair.meets_demand or repair.served < 1.0
    for one in asked.known:
        assert validate(one.plan, one.problem, catalog(), same_problem=False) == []
        for other in asked.known:
            if relaxes(other.problem, one.problem):
                best = asked.best(other.problem)
                assert best is not None
                assert merit(best, problem) >= one.merit


def test_a_plan_sized_by_simulation_is_not_beaten_by_what_nobody_simulated() -> None:
    problem = plain_problem(
        services=(plain_service("chat", rate_per_s=20.0, phases="together"),),
        offers=(
            plain_offer(EAST, "L40S:1", 1.86, available=40),
            plain_offer(EAST, "A10G:1", 1.01, available=40),
        ),
        settings=Settings(max_nodes_per_instance=2),
    )
    sized = problem.replace(settings=problem.settings.model_copy(update={"sized_for": "share"}))
    whole = solve(sized, PlanRequest(effort=Effort(cached=False)))
    # Simulation found that what looks best carries a fifth of it.
    found = Derating({(i.role, node_set(i)): 0.2 for i in whole.instances})
    plan = solve(sized, PlanRequest(effort=Effort(cached=False, derating=found)))
    assert {node_set(i) for i in plan.instances}.isdisjoint(map(node_set, whole.instances))
    assert plan.usd_per_hour > whole.usd_per_hour + 0.1
    kept = KeptPromise(
        service="chat", target=0.95, kept=0.97, low=0.96, high=0.98, kept_ttft=0.98, kept_tpot=0.98
    )
    promised = plan.model_copy(update={"promises": (kept,)})

    explanation = explain_problem(
        problem, promised, PlanRequest(effort=Effort(cached=False)), repairs=False
    )

    assert explanation.again is not None
    assert explanation.again.nothing
    # As a plan for capacity alone the same one is beaten by what carries more on paper.
    alone = explain_problem(sized, plan, PlanRequest(effort=Effort(cached=False)), repairs=False)
    assert alone.again is not None
    assert not alone.again.nothing
