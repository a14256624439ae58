"""What starting costs, how long a saving lasts, and what of a plan is worth its starts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.control.decision.control_view import (
    ControlPolicy,
    ForecastState,
    PromiseSeen,
    TrafficSeen,
    TrafficWindow,
)
from atoll.control.decision.decide import StartInstance
from atoll.control.decision.forecast import forecast, min_rate
from atoll.control.decision.machine_pool import rent_of
from atoll.control.decision.outlook import Outlook
from atoll.control.decision.plan_judge import Verdict, judge
from atoll.control.decision.start_price import price_starts
from atoll.plan.plan import Instance, Plan
from atoll.plan.problem import Reserve
from tests.control.world import Loop, World, instance, offer, problem, service

NOON_S = 1_000_000 * 86_400.0 + 12 * 3600.0
POLICY = ControlPolicy(startup_s=300.0, cold_s=300.0, start_risk=0.1)
WINDOW = TrafficWindow(6.0)
# Steady until three, then twice as much until six.
AFTERNOON = tuple(2.0 if 15 <= hour < 18 else 1.0 for hour in range(24))


def seen(profile: tuple[float, ...] = (), rate: float = 6.0) -> TrafficSeen:
    window = TrafficWindow(rate)
    return TrafficSeen("chat", window, window, window, profile)


def outlook(profile: tuple[float, ...] = (), rate: float = 6.0, **own: float) -> Outlook:
    # It was always right before: no spread.
    known = ForecastState("chat", errors=(0.0,) * 96)
    policy = POLICY.model_copy(update=own)
    return Outlook(NOON_S, {"chat": seen(profile, rate)}, {"chat": known}, policy)


def weigh(living: list[Instance], wanted: list[Instance], ahead: Outlook) -> Verdict:
    asked = problem(service(rate=6.0))
    new = Plan(
        problem_hash="",
        problem_name="toy",
        instances=tuple(wanted),
        usd_per_hour=rent_of(asked.offers, wanted),
        status="feasible",
        solver="toy",
    )
    return judge(asked, new, living, ahead, lambda: 0.0)


def test_a_start_costs_time_risk_and_a_cold_cache() -> None:
    price = price_starts([instance("a"), instance("b", node_type="H100:1", usd=4.0)], POLICY)
    assert price.time_usd == pytest.approx(5.8 / 12)
    assert price.risk_usd == pytest.approx(0.1 * 5.8 / 12)
    assert price.cache_usd == pytest.approx(5.8 / 12)
    assert price.describe() == "$1.02 once (time $0.48, risk $0.048, cold cache $0.48)"
    assert price.usd == pytest.approx(5.8 * POLICY.start_rent_s / 3600.0)


def test_a_rate_suffices_until_demand_is_expected_to_exceed_it() -> None:
    asked = service(rate=6.0)
    steady, rising = outlook(), outlook(AFTERNOON, payback_s=6 * 3600.0)
    assert steady.suffices_until_s(asked, 6.5) is None
    assert steady.suffices_until_s(asked, 5.0) == NOON_S + 600.0
    until_s = rising.suffices_until_s(asked, 9.0)
    assert until_s is not None
    assert NOON_S + 2.5 * 3600.0 <= until_s <= NOON_S + 3.5 * 3600.0
    assert rising.suffices_until_s(asked, 12.0) is None


def test_what_is_given_up_and_missed_soon_stays_and_says_in_numbers_why() -> None:
    large, small = instance("a", node_type="H100:1", usd=4.0), instance("b")
    spare = weigh([large, small], [large], outlook())
    assert spare.adopt
    assert "keeping costs $1.80/h more until 15:00 UTC, changing nothing" in spare.reason
    # An hour later both are asked for: an hour of it costs more than to start it again.
    profile = tuple(2.0 if hour >= 13 else 1.0 for hour in range(24))
    soon = weigh([large, small], [large], outlook(profile, cold_s=3600.0))
    assert not soon.adopt
    assert soon.reason.endswith("not worth it")
    assert "changing $1.97 once (time $0.15, risk $0.015, cold cache $1.80)" in soon.reason


def test_a_saving_that_pays_back_slower_than_it_lasts_is_held_back() -> None:
    dear, cheap = (
        instance("a", node_type="H100:1", usd=4.0),
        instance("b", node_type="L4:1", usd=0.8),
    )
    asked = [cheap, cheap.model_copy(update={"id": "c"})]
    for payback_s, adopted in ((1200.0, False), (4 * 3600.0, True)):
        verdict = weigh([dear], asked, outlook(payback_s=payback_s))
        assert verdict.adopt is adopted, verdict.reason


def test_what_one_service_needs_changes_nothing_of_another() -> None:
    loop = Loop(World(problem(service(rate=6.0), service("mail", rate=6.0))))
    loop.settle()
    mail = {one.id for one in loop.world.ready() if one.service == "mail"}
    # Mail would be a little cheaper elsewhere, by less than starting costs; chat needs more.
    loop.world.offers = tuple(
        one if one.node_type != "L40S:1" else one.model_copy(update={"usd_per_hour": 1.55})
        for one in loop.world.offers
    )
    window = TrafficWindow(20.0)
    loop.world.traffic = (TrafficSeen("chat", window, window, window),)
    done = loop.settle()
    started = {one.instance.service for one in done if isinstance(one, StartInstance)}
    assert started == {"chat"}
    assert mail <= {one.id for one in loop.world.ready()}


def test_demand_that_goes_up_and_down_by_chance_starts_nothing() -> None:
    loop = Loop(World(problem(service(rate=30.0)), traffic=(seen(rate=30.0),)))
    loop.settle(200)
    for k in range(120):
        # The pace of a slow wave: down for half an hour, up for half an hour, by a twelfth.
        rate = 30.0 * (1.0 + (0.08 if k // 60 % 2 else -0.08))
        loop.world.traffic = (seen(rate=rate),)
        assert not any(isinstance(one, StartInstance) for one in loop.tick().actions)


def test_a_promise_that_a_loss_broke_is_no_reason_to_plan_for_more() -> None:
    loop = Loop(World(problem(service(rate=8.0)), traffic=(seen(rate=8.0),)))
    loop.settle(100)
    now_s = loop.world.time_s
    loop.world.promises = (PromiseSeen("chat", 0.5, 0.95, 1000),)
    for name, one in loop.world.observed.items():
        status = replace(one.status, since_s=now_s - 100.0)
        loop.world.observed[name] = replace(one, status=status)
    loop.tick()
    assert [state.boost for state in loop.memory.forecasts] == [1.0]
    for name, one in loop.world.observed.items():
        status = replace(one.status, since_s=now_s - 1000.0)
        loop.world.observed[name] = replace(one, status=status)
    loop.world.time_s += loop.policy.retry_s
    loop.tick()
    assert loop.memory.forecasts[0].boost > 1.0


@given(
    st.lists(st.floats(0.0, 1e3), min_size=1, max_size=40),
    st.floats(0.0, 1.0),
    st.floats(0.3, 0.95),
)
def test_the_reserve_is_always_planned_for(
    rates: list[float], share: float, quantile: float
) -> None:
    stated = service(reserve=Reserve(share=share, quantile=quantile))
    policy = ControlPolicy().of(stated)
    assert (policy.reserve, policy.quantile) == (share, quantile)
    state = ForecastState("chat")
    for k, rate in enumerate(rates):
        planned, state = forecast(seen(rate=rate), state, 180.0 * k, policy)
        assert planned >= (1.0 + share) * min_rate(rate)
    assert ControlPolicy().of(service()) == ControlPolicy()


def test_offers_are_only_those_of_now() -> None:
    """A plan's parts that cannot stand side by side are judged as a whole, and come to rest."""
    loop = Loop(World(problem(service(rate=6.0), service("mail", rate=6.0))))
    loop.settle()
    loop.world.offers = (offer("L40S:1", 1.8, 4), offer("L4:1", 0.1, 4))
    loop.settle()
    assert {one.service for one in loop.world.ready()} == {"chat", "mail"}
