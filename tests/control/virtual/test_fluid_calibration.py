"""The fluid model beside the event simulator, on a fleet that is really sized."""

from __future__ import annotations

import pytest

from atoll.control.virtual.contenders import AtollOperator
from atoll.control.virtual.fluid_calibration import (
    CalibratedFleet,
    calibrate_fleet,
    carried_requests,
    simulate_rates,
)
from atoll.control.virtual.market import hold_market
from atoll.control.virtual.virtual_demand import draw_demand
from atoll.control.virtual.virtual_run import VirtualSetting, operate
from atoll.plan.problem import Problem
from atoll.prove.sized_templates import size_for_share
from research.operating.exact_windows import WatchedOperator, check_windows, flow_rates
from tests.plan import builders

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def fleet() -> CalibratedFleet:
    asked = Problem(
        name="sized",
        services=(
            builders.service("chat", phases="together", rate_per_s=30.0),
            builders.service("mini", model="llama-3.2-1b", phases="together", rate_per_s=60.0),
        ),
        offers=tuple(
            builders.offer("aws/us-east-2", kind, usd, available=64)
            for kind, usd in (("L4:1", 0.8), ("L40S:1", 1.9))
        ),
        settings=builders.problem().settings.model_copy(update={"max_nodes_per_instance": 1}),
    )
    return calibrate_fleet(asked, asked.catalog())


def test_plans_of_sized_templates_keep_their_promises(fleet: CalibratedFleet) -> None:
    for factor in (0.5, 1.0, 2.0):
        asked = fleet.problem.replace(
            services=tuple(
                s.model_copy(update={"rate_per_s": factor * s.rate_per_s})
                for s in fleet.problem.services
            )
        )
        plan = fleet.planner(size_for_share(asked))
        rates = {s.name: (s.rate_per_s,) for s in asked.services}
        kept = simulate_rates(asked, asked.catalog(), plan, rates, seed=11)
        for service in asked.services:
            assert kept[service.name] >= service.attainment - 0.01


@pytest.mark.parametrize(
    ("shape", "points"),
    [
        ((0.7,), 2.0),
        ((0.9,), 2.0),
        ((1.0,), 3.0),
        ((0.7, 0.8, 0.9, 0.95, 1.0), 3.0),
        ((0.7, 0.7, 1.4, 0.7, 0.7), 12.0),
        ((1.2, 1.2, 0.6, 0.6, 0.6), 12.0),
    ],
)
def test_the_fluid_keeps_what_events_do(
    fleet: CalibratedFleet, shape: tuple[float, ...], points: float
) -> None:
    asked = fleet.problem
    plan = fleet.planner(size_for_share(asked))
    full = carried_requests(asked, plan)
    rates = {name: tuple(x * most for x in shape) for name, most in full.items()}
    simulated = simulate_rates(asked, asked.catalog(), plan, rates, seed=5)
    for service in asked.services:
        name = service.name
        flowed = flow_rates(service, fleet.curves[name], full[name], rates[name])
        assert 100.0 * abs(flowed - simulated[name]) <= points


def test_windows_of_a_run_are_what_events_say(fleet: CalibratedFleet) -> None:
    asked = fleet.problem
    setting = VirtualSetting(
        asked,
        draw_demand(asked, 0.25, 3, history_days=2.0),
        hold_market(asked.offers),
        fleet.curves,
        seed=3,
    )
    watched = WatchedOperator(AtollOperator(asked, fleet.planner))
    result = operate(setting, watched)
    found = check_windows(setting, result, watched, asked.catalog(), 3)
    assert len(found) == 6
    assert found[0].minute != found[-1].minute
    assert max(100.0 * abs(one.fluid - one.exact) for one in found) <= 6.0
