"""Energy and carbon as objectives of fleets with any-to-any services."""

from __future__ import annotations

import pytest

from atoll.plan.footprint import ObjectiveWeights, PowerGrid
from atoll.plan.plan import Plan
from atoll.plan.power import draw_of, power_of
from atoll.plan.problem import Problem
from atoll.plan.validate.check import validate
from atoll.prove.planning import plan as find_plan
from atoll.solve.plan_request import PlanRequest
from atoll.solve.registry import solve
from tests.solve.graph.fleets import HERE, THERE, fleet, offer, seeing

OFFERS = (
    offer("A100-80:1", 2.0, 20),
    offer("L4:1", 0.9, 40),
    {**offer("A100-80:1", 1.9, 20), "region": THERE},
)
CLEAN = PowerGrid(g_per_kwh={HERE: 30.0, THERE: 700.0})


def asked(**weights: float) -> Problem:
    problem = fleet({"see": seeing(rate="1/s")}, OFFERS)
    return problem.replace(weights=ObjectiveWeights(**weights), grid=CLEAN)


def planned(problem: Problem) -> Plan:
    plan = solve(problem)
    assert validate(plan, problem) == []
    return plan


def test_executors_draw_as_much_as_they_work() -> None:
    problem = asked()
    plan = planned(problem)
    catalog = problem.catalog()
    draw = draw_of(plan, problem, catalog)
    for one in plan.executor_instances:
        own = draw.instances[one.id]
        limit = one.gpus * catalog.gpu(one.nodes[0].kind.split(":")[0]).tdp_w
        assert own.idle_w < own.watts <= limit + 1e-9
        assert own.dynamic_w == pytest.approx(own.busy * (limit - own.idle_w))
        assert own.requests_per_s == pytest.approx(one.throughput_per_s)
    assert draw.watts == pytest.approx(sum(own.watts for own in draw.instances.values()))
    # Half of the requests keep them half as busy.
    less = plan.model_copy(update={"served_fraction": {"see": 0.5}})
    half = draw_of(less, problem, catalog)
    for name, own in half.instances.items():
        assert own.busy == pytest.approx(0.5 * draw.instances[name].busy)


@pytest.mark.slow
def test_the_objective_is_what_is_minimised() -> None:
    cheap, frugal, clean = (
        planned(asked(**weights))
        for weights in ({}, {"usd": 0.0, "usd_per_kwh": 1.0}, {"usd": 0.0, "usd_per_tonne": 1000.0})
    )
    used = {name: power_of(one, asked()) for name, one in (("cheap", cheap), ("frugal", frugal))}
    assert used["frugal"].watts <= used["cheap"].watts
    assert cheap.usd_per_hour <= frugal.usd_per_hour
    assert {one.region for one in clean.instances} == {HERE}
    for one in (frugal, clean):
        assert one.power is not None
        assert one.power.weighted_usd_per_hour is not None


def test_promises_are_kept_with_an_objective_and_power_is_stated() -> None:
    problem = asked(usd=0.0, usd_per_kwh=1.0)
    plan = find_plan(problem, PlanRequest(deadline_s=60.0, capacity_only=True))
    assert validate(plan, problem) == []
    assert plan.power is not None
    # With a grid and no objective a plan says what it draws.
    stated = find_plan(asked(), PlanRequest(deadline_s=60.0, capacity_only=True))
    assert stated.power is not None
    assert stated.power.kg_per_hour is not None
