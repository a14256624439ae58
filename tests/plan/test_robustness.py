"""Risk in fleet files, and what a plan says of its robustness, in JSON."""

from __future__ import annotations

import pytest

from atoll.core.errors import AtollError
from atoll.plan.files.fleet_file import parse_fleet
from atoll.plan.plan import Plan
from atoll.plan.robustness import CertaintyLevel, RiskModel, Robustness

FLEET = """\
services:
  chat: {model: llama-3.1-8b, ttft: 1s, tpot: 60ms, rate: 3/s, lengths: 512x128}
pool:
  offers: [{region: here, node_type: "L40S:1", available: 4, usd_per_hour: 1.86}]
"""
LEVEL = CertaintyLevel(
    asked=0.95,
    usd_per_hour=3.0,
    expected_usd_per_hour=2.9,
    nodes=2,
    planned=0.96,
    holds=0.93,
    low=0.9,
    high=0.96,
    requests_kept=0.99,
)
FOUND = Robustness(
    risk=RiskModel(spot_loss=0.05),
    levels=(LEVEL.model_copy(update={"asked": None, "holds": 0.4}), LEVEL),
    chosen=1,
    scenarios=10,
    judged=20,
    simulated=5,
)


def test_a_fleet_file_says_what_is_uncertain() -> None:
    problem = parse_fleet(
        FLEET + "risk: {demand: {chat: 40%, default: 10%}, spot_loss: 2%, performance: false}\n"
    )
    assert problem.risk == RiskModel(
        demand_sd=0.1, demand_sd_of={"chat": 0.4}, spot_loss=0.02, performance=False
    )
    assert parse_fleet(FLEET + "risk: {demand: 30%}\n").risk == RiskModel(demand_sd=0.3)


def test_a_fleet_without_risk_keeps_its_hash() -> None:
    problem = parse_fleet(FLEET)
    assert problem.risk is None
    assert "risk" not in problem.model_dump(mode="json")
    assert problem.replace(risk=RiskModel()).content_hash() != problem.content_hash()


@pytest.mark.parametrize(
    ("risk", "said"),
    [
        ("{demand: {chta: 40%}}", "chta"),
        ("{demand: 20}", "demand"),
        ("{spot_los: 5%}", "spot_los"),
        ("{demand_correlation: 2}", "demand_correlation"),
    ],
)
def test_a_mistake_names_its_field(risk: str, said: str) -> None:
    with pytest.raises(AtollError) as refused:
        parse_fleet(FLEET + f"risk: {risk}\n")
    assert said in str(refused.value)


def test_what_a_plan_says_of_it_survives_json_and_is_left_out_where_there_is_none() -> None:
    plan = Plan(problem_hash="x", problem_name="x", usd_per_hour=1.0, status="feasible", solver="x")
    assert "robustness" not in plan.model_dump(mode="json")
    told = plan.model_copy(update={"robustness": FOUND})
    assert Plan.from_json(told.to_json()) == told


def test_a_shortfall_is_what_is_missing_of_what_was_asked() -> None:
    assert FOUND.level.shortfall == pytest.approx(0.02)
    assert FOUND.nominal.shortfall == 0.0
    priced = LEVEL.model_copy(update={"unserved_usd": 1.0})
    assert priced.expected_total_usd == pytest.approx(3.9)
