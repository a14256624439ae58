"""Robust plans as a whole: surer and dearer along the curve, out of sample, and always the same."""

from __future__ import annotations

import pytest

from atoll.plan.plan import Plan
from atoll.plan.problem import Offer, Problem
from atoll.plan.robustness import RiskModel
from atoll.plan.validate.check import validate
from atoll.prove.robust import robust_plan, scenarios, service_options
from atoll.prove.robust.robust_plan import plan_robust
from atoll.solve.plan_request import PlanRequest
from tests.prove.test_rent_promises import CATALOG, CHAT, FRESH, PROBLEM

LIGHT = PROBLEM.replace(services=(CHAT.model_copy(update={"rate_per_s": 10.0}),))
RISK = RiskModel(demand_sd=0.3)
SPOT = LIGHT.replace(
    offers=(
        Offer(region="here", node_type="L40S:1", available=20, usd_per_hour=1.86),
        Offer(region="here", node_type="L40S:1", market="spot", available=20, usd_per_hour=0.9),
    )
)


@pytest.fixture(autouse=True, scope="module")
def few() -> object:
    """Fewer scenarios and steps than usual."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(robust_plan, "_PLANNING", 32)
        patch.setattr(robust_plan, "_JUDGED", 64)
        patch.setattr(robust_plan, "_MAX_SIMULATED", 8)
        patch.setattr(scenarios, "DRAWS", 4)
        patch.setattr(service_options, "STEPS", (1.0, 2.0, 3.0))
        yield


def make(problem: Problem, risk: RiskModel = RISK, **asked: float) -> Plan:
    return plan_robust(problem, PlanRequest(effort=FRESH, catalog=CATALOG), risk=risk, **asked)


@pytest.fixture(scope="module")
def made(few: object) -> Plan:
    return make(LIGHT, asked=0.9, unserved_usd=1.0)


def test_it_is_a_plan_for_the_fleet_that_keeps_its_promises(made: Plan) -> None:
    assert validate(made, LIGHT) == []
    assert made.problem_hash == LIGHT.content_hash()
    assert all(promise.is_kept for promise in made.promises)
    assert Plan.from_json(made.to_json()) == made


def test_it_holds_more_often_than_the_plan_without_risk_and_costs_more(made: Plan) -> None:
    found = made.robustness
    assert found is not None
    assert found.level.asked == 0.9
    assert found.level.usd_per_hour == made.usd_per_hour
    assert found.level.holds > found.nominal.holds + 0.2
    assert found.level.holds >= 0.8
    assert found.level.usd_per_hour > found.nominal.usd_per_hour
    assert found.level.requests_kept > found.nominal.requests_kept


def test_costs_never_fall_along_the_curve_and_all_levels_are_there(made: Plan) -> None:
    assert made.robustness is not None
    levels = made.robustness.levels
    assert [level.asked for level in levels] == [None, 0.8, 0.9, 0.95, 0.99]
    costs = [level.expected_usd_per_hour for level in levels]
    assert costs == sorted(costs)
    planned = [level.planned for level in levels]
    assert planned == sorted(planned)


def test_the_level_with_the_min_total_is_marked(made: Plan) -> None:
    found = made.robustness
    assert found is not None
    assert found.best is not None
    totals = [level.expected_total_usd for level in found.levels]
    assert totals[found.best] == min(totals)
    for level in found.levels:
        assert level.unserved_usd == pytest.approx(level.unserved_per_hour / 1000.0)


@pytest.mark.slow
def test_the_same_plan_every_time(made: Plan) -> None:
    assert make(LIGHT, asked=0.9, unserved_usd=1.0).to_json() == made.to_json()


@pytest.mark.slow
def test_spot_that_is_lost_often_is_not_relied_on() -> None:
    risk = RISK.model_copy(update={"performance": False, "demand_sd": 0.1, "spot_loss": 0.2})
    found = make(SPOT, risk, asked=0.95).robustness
    assert found is not None
    assert found.nominal.spot_nodes == found.nominal.nodes
    assert found.nominal.holds < 0.85
    assert found.level.holds >= 0.9
    assert found.level.spot_nodes < found.level.nodes
    assert (
        found.nominal.expected_usd_per_hour < found.nominal.usd_per_hour
    )  # lost ones are not paid


@pytest.mark.slow
def test_without_risk_there_is_nothing_to_pay_for() -> None:
    calm = RiskModel(demand_sd=0.0, spot_price_sd=0.0, spot_loss=0.0, performance=False)
    found = make(LIGHT, calm, asked=0.95).robustness
    assert found is not None
    assert found.level.usd_per_hour == found.nominal.usd_per_hour
    assert found.level.holds >= 0.9  # arrivals are luck all the same
