"""Plans of GH and AGH: fleets translated to their problem and back, checked on both sides."""

from __future__ import annotations

import pytest

from atoll.plan.choice import Choice, Variant
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.plan.validate.check import validate
from atoll.solve.comparison import compare_solvers
from atoll.solve.joint.joint_check import violations
from atoll.solve.joint.joint_problem import cost_of
from atoll.solve.plan_request import PlanRequest
from atoll.solve.registry import solve
from atoll.solve.rent.choosing.joint_fleet import CHOOSERS, MAX_TIERS, RULES, JointFleet
from atoll.solve.templates.library import template_libraries
from tests.plan.builders import catalog
from tests.solve.rent.test_choosing_plans import fleet

SOLVERS = sorted(CHOOSERS)


def plan_of(given: Problem, solver: str) -> Plan:
    return solve(given, PlanRequest(solver=solver, catalog=catalog()))


def joint_fleet(given: Problem) -> JointFleet:
    tables = template_libraries(given, catalog(), until=lambda: True, single=True)
    return JointFleet(given, tables)


@pytest.mark.parametrize("solver", SOLVERS)
def test_plans_are_valid_and_cost_no_less_than_ours(solver: str) -> None:
    given = fleet()
    found, best = plan_of(given, solver), plan_of(given, "optimal")
    assert found.solver == solver
    assert validate(found, given, catalog()) == []
    assert found.bound is None
    assert min(found.served_fraction.values()) >= 1.0
    assert found.mixes[0].error <= 0.04 + 1e-9
    assert found.objective is not None
    assert best.objective is not None
    assert found.objective >= best.objective * (1 - 1e-6)
    assert plan_of(given, solver) == found


@pytest.mark.parametrize("apart", [False, True])
def test_answers_keep_every_constraint_and_agh_improves_on_gh(apart: bool) -> None:
    given = fleet(rate=9.0)
    if not apart:
        together = tuple(s.model_copy(update={"phases": "together"}) for s in given.services)
        given = given.replace(services=together)
    joint = joint_fleet(given).joint
    answers = {name: RULES[name](joint, 0) for name in SOLVERS}
    for answer in answers.values():
        assert violations(joint, answer) == []
        assert float(answer.unmet.max()) <= 1e-9
    usd = {name: cost_of(joint, answer).total for name, answer in answers.items()}
    assert usd["agh"] <= usd["gh"] + 1e-9


@pytest.mark.parametrize("solver", SOLVERS)
def test_no_more_machines_than_there_are(solver: str) -> None:
    given = fleet(rate=400.0, available=2)
    joint = joint_fleet(given).joint
    assert violations(joint, RULES[solver](joint, 0)) == []
    found = plan_of(given, solver)
    assert found.status == "partial"
    assert 0.0 < min(found.served_fraction.values()) < 1.0
    assert found.mixes[0].error <= 0.04 + 1e-6
    assert validate(found, given, catalog()) == []


@pytest.mark.parametrize("solver", SOLVERS)
def test_budget_and_least_shares_are_kept(solver: str) -> None:
    given = fleet(rate=6.0)
    full = plan_of(given, solver).usd_per_hour
    limits = given.limits.model_copy(update={"budget_usd_per_hour": 0.6 * full})
    poor = plan_of(given.replace(limits=limits), solver)
    assert poor.usd_per_hour <= 0.6 * full
    (choice,) = given.choices
    floor = {"llama-3.1-8b": 0.25, "qwen3-32b": 0.3}
    asked = given.replace(choices=(choice.model_copy(update={"min_share": floor}),))
    found = plan_of(asked, solver)
    assert validate(found, asked, catalog()) == []
    assert min(found.served_fraction.values()) >= 1.0
    for model, share in floor.items():
        assert found.mixes[0].model_shares[model] >= share - 1e-9


def test_many_machines_are_few_tiers_and_none_is_rented_in_vain() -> None:
    given = fleet(rate=300.0, available=500)
    many = joint_fleet(given)
    assert len(many.tiers) <= MAX_TIERS * len(given.offers)
    found = plan_of(given, "agh")
    assert validate(found, given, catalog()) == []
    assert min(found.served_fraction.values()) >= 1.0
    settled = given.settled(found.mixes)
    for role in settled.roles:
        own = [i.throughput_per_s for i in found.instances if i.role == str(role)]
        carried = sum(own)
        if own:
            # By offer at most one instance is not full.
            assert carried - len(given.offers) * max(own) <= settled.demand(role)


def test_ways_that_choices_share_are_left_out() -> None:
    given = fleet()
    (chat,) = given.choices
    small, large = chat.variants
    shared = given.service(small.service).model_copy(update={"name": "shared"})
    mail = given.service("mail").model_copy(update={"name": "mail.own"})
    others = tuple(s for s in given.services if s.name != "mail")
    again = [Variant(service="shared", model=small.model, error=e) for e in (0.06, 0.0)]
    own = Variant(service="mail.own", model=small.model)
    asked = given.replace(
        services=(*others, shared, mail),
        choices=(
            chat.model_copy(update={"variants": (small, large, again[0])}),
            Choice(name="mail", variants=(own, again[1])),
        ),
    )
    found = plan_of(asked, "gh")
    assert validate(found, asked, catalog()) == []
    assert all("shared" not in mix.shares for mix in found.mixes)


def test_comparisons_let_them_choose_their_own_models() -> None:
    given = fleet()
    best = plan_of(given, "optimal")
    rows = {row.solver: row for row in compare_solvers(best, given, PlanRequest(catalog=catalog()))}
    assert set(SOLVERS) < set(rows)
    for solver in SOLVERS:
        assert rows[solver].usd_per_hour == plan_of(given, solver).usd_per_hour
        ratio = rows[solver].ratio
        assert ratio is not None
        assert ratio >= 1.0 - 1e-6
