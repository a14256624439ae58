"""Where the threshold of loads lies, which scenarios are in doubt, and what a verdict makes of both."""

from __future__ import annotations

import math

import numpy as np
import pytest

from atoll.core.errors import UsageError
from atoll.perf.constants import ConstantTable, GpuConstants, default_constants
from atoll.plan.plan import Plan
from atoll.plan.problem import Offer
from atoll.plan.robustness import RiskModel
from atoll.prove.robust.expected_prices import ExpectedPrices
from atoll.prove.robust.judge import judge_plan_in
from atoll.prove.robust.robust_plan import plan_robust, refuse_unfit
from atoll.prove.robust.scenario_loads import ScenarioLoads, is_lost
from atoll.prove.robust.scenarios import Scenario, ScenarioSet
from atoll.prove.robust.service_options import Rung, compose, list_rungs
from atoll.prove.robust.trial import ScenarioLab, ServiceTrial
from tests.prove.test_rent_promises import CATALOG, CHAT, FRESH, PROBLEM, solve
from tests.sim.builders import cluster_problem

MIXED = PROBLEM.replace(
    services=(CHAT.model_copy(update={"phases": "together"}),),
    offers=(
        Offer(region="here", node_type="L40S:1", available=1, usd_per_hour=1.86),
        Offer(region="here", node_type="L40S:1", market="spot", available=9, usd_per_hour=0.9),
    ),
)
POOL = ("here", "L40S:1")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return solve(MIXED, FRESH, 60.0)


def scenario(demand: float = 1.0, *, lost: bool = False, price: float = 1.0) -> Scenario:
    gone = frozenset([POOL] if lost else [])
    return Scenario(0, {"chat": demand}, {POOL: price}, gone, 0)


def among(*scenarios: Scenario, table: ConstantTable | None = None) -> ScenarioSet:
    return ScenarioSet("x", scenarios, (table or default_constants(),))


def test_load_is_demand_over_what_is_left(plan: Plan) -> None:
    loads = ScenarioLoads(MIXED, CATALOG)
    some = among(scenario(), scenario(2.0), scenario(lost=True))
    calm, busy, lost = loads.of("chat", plan.instances, some)
    spot = [i for i in plan.instances if is_lost(i, some.scenarios[2])]
    assert len(spot) > 0
    assert calm == pytest.approx(loads.nominal("chat", plan.instances))
    assert busy == pytest.approx(2.0 * calm)
    left = len(plan.instances) - len(spot)
    assert lost == pytest.approx(calm * len(plan.instances) / left) if left else lost == math.inf


def test_slower_gpus_are_more_loaded_and_the_same_are_as_the_planner_counts(plan: Plan) -> None:
    known = default_constants().gpu("L40S")
    slow = GpuConstants("L40S", {op: c.scale_time(1.3) for op, c in known.ops.items()})
    copy = ConstantTable([GpuConstants("L40S", dict(known.ops))])
    loads = ScenarioLoads(MIXED, CATALOG)
    as_known = loads.nominal("chat", plan.instances)
    (same,) = loads.of("chat", plan.instances, among(scenario(), table=copy))
    assert same == pytest.approx(as_known)
    slower = ScenarioSet("slow", (scenario(),), (ConstantTable([slow]),))
    assert loads.of("chat", plan.instances, slower)[0] > 1.15 * as_known


def trial_of(plan: Plan, loads: list[float], kept: dict[int, float]) -> ServiceTrial:
    made = ServiceTrial("chat", plan, plan.instances, 0.95)
    made.loads["x"] = np.array(loads)
    made.kept |= {("x", at): share for at, share in kept.items()}
    return made


def test_the_threshold_lies_between_what_was_kept_and_what_was_not(plan: Plan) -> None:
    trial = trial_of(plan, [0.5, 0.8, 0.9, 1.1, math.inf], {1: 0.99, 2: 0.97, 3: 0.4})
    trial.fit("x")
    assert 0.9 < trial.threshold < 1.1
    assert trial.holds("x").tolist() == [True, True, True, False, False]


def test_what_was_simulated_counts_whatever_its_load(plan: Plan) -> None:
    trial = trial_of(plan, [0.5, 0.8, 0.9, 1.1, 1.2], {0: 1.0, 1: 0.2, 2: 0.99, 3: 0.99, 4: 0.1})
    trial.fit("x")
    assert 1.1 <= trial.threshold <= 1.2
    assert trial.holds("x").tolist() == [True, False, True, True, False]
    assert trial.told("x").tolist() == [True, True, True, True, False]


def test_beyond_what_was_simulated_capacity_promises_no_more(plan: Plan) -> None:
    trial = trial_of(plan, [0.5, 0.7, 1.3], {0: 1.0, 1: 1.0})
    trial.fit("x")
    assert trial.threshold == 1.0
    hopeless = trial_of(plan, [0.5, 0.7, 1.3], {0: 0.0, 1: 0.0})
    hopeless.fit("x")
    assert not hopeless.told("x").any()


def test_doubtful_are_those_near_the_threshold_and_not_known(plan: Plan) -> None:
    trial = trial_of(plan, [0.2, 0.99, 1.02, 1.5, math.inf], {1: 1.0})
    trial.threshold = 1.0
    assert trial.nearest("x", 2) == [2, 3]
    assert 4 not in trial.nearest("x", 9)


class _Oracle(ScenarioLab):
    """Simulates nothing: enough is kept where demand is no more than `most`."""

    most = 1.0

    def simulate(self, trial: ServiceTrial, among: ScenarioSet, at: int) -> float:
        share = 1.0 if among.scenarios[at].demand[trial.service] <= self.most else 0.5
        trial.kept[among.name, at] = share
        return share


def test_a_verdict_takes_off_what_load_gets_wrong(plan: Plan) -> None:
    lab = _Oracle(MIXED, CATALOG)
    demand = [0.5, 1.5] * 50
    fresh = ScenarioSet("x", tuple(scenario(d) for d in demand), (default_constants(),))
    trial = lab.trial(plan, "chat")
    trial.threshold = 1e9  # load says that all of them hold
    verdict = judge_plan_in(plan, MIXED, lab, fresh, 40)
    assert verdict.holds == pytest.approx(0.5)
    assert verdict.low < 0.5 < verdict.high
    assert verdict.simulated == 0.5
    assert verdict.requests_kept == pytest.approx((0.5 + 0.75) / 2.0)
    assert verdict.unserved_per_hour == pytest.approx(3600.0 * 30.0 * 0.75 / 2.0)


def test_a_verdict_of_few_that_all_hold_is_not_sure(plan: Plan) -> None:
    lab = _Oracle(MIXED, CATALOG)
    fresh = ScenarioSet("x", tuple(scenario(0.1) for _ in range(30)), (default_constants(),))
    verdict = judge_plan_in(plan, MIXED, lab, fresh, 10)
    assert verdict.holds == verdict.high == 1.0
    assert verdict.low < 0.95


def test_lost_machines_are_not_paid_and_spot_is_at_its_price(plan: Plan) -> None:
    prices = ExpectedPrices(MIXED, among(scenario(price=2.0), scenario(price=1.0, lost=True)))
    counts = plan.count_nodes()
    owed = 1.86 * counts["here", "L40S:1", "on-demand"] + 0.9 * counts["here", "L40S:1", "spot"]
    assert counts["here", "L40S:1", "spot"] > 0
    assert prices.of_plan(plan) == pytest.approx(prices.of_instances(plan.instances))
    assert prices.of_plan(plan) == pytest.approx(owed)  # twice the price, half of the time


def test_instances_of_several_plans_stand_together_or_not_at_all(plan: Plan) -> None:
    again = compose(MIXED, CATALOG, plan.instances)
    assert again is not None
    assert again.usd_per_hour == pytest.approx(plan.usd_per_hour)
    few = MIXED.replace(offers=tuple(o.model_copy(update={"available": 1}) for o in MIXED.offers))
    assert compose(few, CATALOG, plan.instances) is None


def test_rungs_without_spot_are_only_there_where_spot_is() -> None:
    risk = RiskModel(spot_loss=0.05)
    assert all(r.spot is None and not r.spread for r in list_rungs(PROBLEM, risk))
    assert Rung(0.0, spot=0.0) in list_rungs(MIXED, risk)
    sure = risk.model_copy(update={"performance": False, "spot_loss": 0.0})
    assert all(not r.slower and r.spot is None for r in list_rungs(MIXED, sure))


def test_what_is_not_planned_with_risk_is_refused_in_a_line() -> None:
    with pytest.raises(UsageError, match="fixed cluster"):
        refuse_unfit(cluster_problem([1.0]))
    with pytest.raises(UsageError, match="between 0 and 1"):
        plan_robust(PROBLEM, asked=1.5)
