"""Scenarios: what is drawn, with which means and spreads, and always the same."""

from __future__ import annotations

import math

import numpy as np
import pytest

from atoll.catalog import Catalog
from atoll.perf.constants import default_constants
from atoll.plan.problem import Limits, Offer, Problem
from atoll.plan.robustness import RiskModel
from atoll.prove.robust.scenarios import draw_scenarios, resolve_risk, spot_pools
from tests.prove.test_rent_promises import CHAT, PROBLEM

CATALOG = Catalog.default()
SPOT = (
    Offer(region="east", node_type="L4:1", market="spot", available=9, usd_per_hour=0.3),
    Offer(region="west", node_type="L4:1", market="spot", available=9, usd_per_hour=0.3),
)
TWO = PROBLEM.replace(
    services=(CHAT, CHAT.model_copy(update={"name": "code"})), offers=(*PROBLEM.offers, *SPOT)
)
CALM = RiskModel(performance=False, spot_loss=0.05)


def demands(problem: Problem, risk: RiskModel, service: str, number: int = 4_000) -> np.ndarray:
    drawn = draw_scenarios(problem, CATALOG, risk, number, name="x")
    return np.array([one.demand[service] for one in drawn.scenarios])


def test_demand_has_the_mean_the_spread_and_the_correlation_that_are_asked_for() -> None:
    risk = CALM.model_copy(update={"demand_sd": 0.3, "demand_correlation": 0.6})
    chat, code = demands(TWO, risk, "chat"), demands(TWO, risk, "code")
    assert chat.mean() == pytest.approx(1.0, abs=0.02)
    assert np.log(chat).std() == pytest.approx(0.3, abs=0.02)
    assert np.corrcoef(np.log(chat), np.log(code))[0, 1] == pytest.approx(0.6, abs=0.05)


def test_a_service_may_have_a_spread_of_its_own_and_so_has_what_answers_a_choice() -> None:
    risk = RiskModel(demand_sd=0.1, demand_sd_of={"chat": 0.5})
    assert risk.demand_spread("chat") == risk.demand_spread("chat.llama-3.1-8b") == 0.5
    assert risk.demand_spread("chatty") == 0.1


def test_services_that_go_together_have_the_same_demand() -> None:
    drawn = draw_scenarios(
        TWO, CATALOG, CALM, 20, name="x", together={"chat": "both", "code": "both"}
    )
    assert all(one.demand["chat"] == one.demand["code"] for one in drawn.scenarios)


def test_a_service_or_pool_more_changes_nothing_of_the_others() -> None:
    alone = TWO.replace(services=(CHAT,), offers=(*PROBLEM.offers, SPOT[0]))
    many = draw_scenarios(TWO, CATALOG, CALM, 30, name="x").scenarios
    few = draw_scenarios(alone, CATALOG, CALM, 30, name="x").scenarios
    assert [one.demand["chat"] for one in few] == [one.demand["chat"] for one in many]
    pool = ("east", "L4:1")
    assert [pool in one.lost for one in few] == [pool in one.lost for one in many]
    assert [one.price[pool] for one in few] == [one.price[pool] for one in many]


def test_pools_are_lost_as_often_as_said_and_apart_from_each_other() -> None:
    risk = CALM.model_copy(update={"spot_loss": 0.2})
    drawn = draw_scenarios(TWO, CATALOG, risk, 4_000, name="x").scenarios
    assert spot_pools(TWO) == (("east", "L4:1"), ("west", "L4:1"))
    for pool in spot_pools(TWO):
        assert np.mean([pool in one.lost for one in drawn]) == pytest.approx(0.2, abs=0.02)
    assert np.mean([len(one.lost) == 2 for one in drawn]) == pytest.approx(0.04, abs=0.012)


def test_sets_of_other_names_are_other_scenarios_and_the_same_name_is_the_same() -> None:
    one, again, other = (
        draw_scenarios(TWO, CATALOG, RiskModel(spot_loss=0.05), 3, name=name)
        for name in ("plan", "plan", "fresh")
    )
    assert one.scenarios == again.scenarios
    assert [c.gpu("L40S") for c in one.constants] == [c.gpu("L40S") for c in again.constants]
    assert one.scenarios != other.scenarios
    assert one.constants[0].gpu("L40S") != other.constants[0].gpu("L40S")


def test_without_performance_constants_are_the_ones_that_ship() -> None:
    assert draw_scenarios(TWO, CATALOG, CALM, 8, name="x").constants == (default_constants(),)


def test_what_is_left_open_of_spot_losses_is_what_the_fleet_says() -> None:
    assert resolve_risk(TWO).spot_loss == 0.05
    often = TWO.replace(limits=Limits(spot_loss_per_h=0.5))
    assert resolve_risk(often).spot_loss == pytest.approx(1.0 - math.exp(-0.5))
    assert resolve_risk(often, RiskModel(spot_loss=0.01)).spot_loss == 0.01
    own = often.replace(risk=RiskModel(demand_sd=0.7))
    assert resolve_risk(own).demand_sd == 0.7
