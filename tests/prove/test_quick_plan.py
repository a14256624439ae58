"""Plans in a second: sized by simulation, within a budget and what there is, the same every time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.plan.validate.check import validate
from atoll.planner.change import DialChange, apply_change
from atoll.planner.source import read_sent, read_source
from atoll.prove import headroom
from atoll.prove import quick_plan as quick
from atoll.prove.headroom import HeadroomSizing, short_services
from atoll.prove.kept import look_at
from atoll.prove.planning import plan
from atoll.prove.quick_plan import plan_quickly, scale_demand
from atoll.prove.simulation_deadline import SimulationCutShortError
from atoll.solve.graph import graph_service
from atoll.solve.plan_request import PlanRequest

ASSISTANT = Path(__file__).parents[2] / "examples" / "assistant.yaml"
SMALL = """
name: small
services:
  chat: {model: llama-3.1-8b, ttft: 2s, tpot: 100ms, rate: 4/s, lengths: 512x128}
  titles: {model: llama-3.1-8b, ttft: 2s, tpot: 100ms, rate: 1/s, lengths: 300x20}
pool: {cloud: {regions: [aws/us-east-2], gpus: [L4], available: 8}}
settings: {max_nodes_per_instance: 2}
"""


@pytest.fixture(autouse=True)
def _forgets() -> None:
    quick._cache.clear()


def test_a_plan_keeps_its_promises_and_is_valid() -> None:
    problem = read_sent(SMALL).problem
    found = plan_quickly(problem, simulate_s=30.0, seed=0)
    assert found.served == 1.0
    assert found.keeps_all
    assert not validate(found.plan, found.problem)
    assert found.plan.bound is None
    assert found.plan.gap is None
    again = plan_quickly(problem, simulate_s=30.0, seed=0)
    assert again is found
    quick._cache.clear()
    anew = plan_quickly(problem, simulate_s=30.0, seed=0)
    assert anew.plan.to_json() == found.plan.to_json()
    assert anew.kept == found.kept


TIGHT = """
name: tight
services:
  chat: {model: llama-3.1-8b, ttft: 3s, tpot: 80ms, rate: RATE/s, lengths: azure-conv}
pool: {cloud: {regions: [aws/us-east-2], gpus: [L4], available: 32}}
settings: {max_nodes_per_instance: 2}
"""


def test_the_fast_solver_sizes_for_promises() -> None:
    problem = read_sent(TIGHT.replace("RATE", "9")).problem
    request = PlanRequest(solver="fast", error_bars=False)
    capacity = plan(problem, replace(request, capacity_only=True))
    assert capacity.promises == ()
    short = look_at(capacity, problem, problem.catalog())
    assert not all(promise.is_kept for promise in short)
    found = plan(problem, request)
    assert found.solver == "fast"
    assert [promise.is_kept for promise in found.promises] == [True]
    assert found.promises == look_at(found, problem, problem.catalog())
    assert found.usd_per_hour > capacity.usd_per_hour
    assert not validate(found, problem)
    assert plan(problem, request).to_json() == found.to_json()


def test_the_fast_solver_says_what_is_kept_within_a_budget() -> None:
    problem = read_sent(TIGHT.replace("RATE", "9")).problem
    request = PlanRequest(solver="fast", error_bars=False)
    usd = plan(problem, replace(request, capacity_only=True)).usd_per_hour
    limits = problem.limits.model_copy(update={"budget_usd_per_hour": usd * 1.01})
    poor = problem.replace(limits=limits)
    found = plan(poor, request)
    assert found.usd_per_hour <= usd * 1.01
    assert [promise.is_kept for promise in found.promises] == [False]
    assert not validate(found, poor)


@pytest.mark.slow
def test_the_fast_solver_sizes_what_is_served_beside_what_cannot_be() -> None:
    other = "  huge: {model: qwen3-32b, ttft: 50ms, tpot: 1ms, rate: 1/s, lengths: 512x128}\npool:"
    problem = read_sent(TIGHT.replace("RATE", "9").replace("pool:", other)).problem
    found = plan(problem, PlanRequest(solver="fast", error_bars=False))
    assert found.status == "partial"
    assert found.served_fraction == {"chat": 1.0, "huge": 0.0}
    assert {p.service: p.is_kept for p in found.promises}["chat"]
    assert not validate(found, problem)


def test_the_fast_solver_is_cut_short_by_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: object, **__: object) -> None:
        raise SimulationCutShortError("late")

    monkeypatch.setattr(headroom, "sample_kept", late)
    found = plan(read_sent(SMALL).problem, PlanRequest(solver="fast", error_bars=False))
    assert found.cut_short
    assert found.instances
    assert found.promises == ()


def test_a_budget_is_kept_and_what_is_served_keeps_its_promises() -> None:
    source = read_sent(SMALL)
    whole = plan_quickly(source.problem, simulate_s=30.0, seed=0)
    more = apply_change(source, DialChange(demand={"chat": 6.0})).problem
    dear = plan_quickly(more, simulate_s=30.0, seed=0)
    budget = (whole.plan.usd_per_hour + dear.plan.usd_per_hour) / 2.0
    change = DialChange(demand={"chat": 6.0}, budget_usd_per_hour=budget)
    found = plan_quickly(apply_change(source, change).problem, simulate_s=30.0, seed=0)
    assert found.plan.usd_per_hour <= budget
    assert 0.0 < found.served < 1.0
    assert found.keeps_all
    assert not validate(found.plan, found.problem)


def test_what_there_is_not_enough_of_is_shared() -> None:
    source = read_sent(SMALL)
    change = DialChange(demand={"chat": 40.0}, available={"L4": 0.125})
    found = plan_quickly(apply_change(source, change).problem, simulate_s=30.0, seed=0)
    assert 0.0 < found.served < 1.0
    assert found.plan.instances


@pytest.mark.parametrize("needed", [1.0, 1.02, 1.1, 1.37])
def test_headroom_is_what_promises_need_and_little_more(needed: float) -> None:
    problem = read_sent(SMALL).problem
    first = plan(problem, PlanRequest(solver="fast", capacity_only=True, error_bars=False))

    def find(asked: Problem) -> Plan:
        """Whoever asks for more room pays as much more."""
        assert asked.service("titles").headroom == 1.0
        return first.model_copy(update={"usd_per_hour": asked.service("chat").headroom})

    def judge(made: Plan) -> dict[str, float | None]:
        return {"chat": 1.0 if made.usd_per_hour >= needed else 0.94, "titles": 1.0}

    found, kept = HeadroomSizing(problem, find(problem), find, judge, lambda _text: None).run()
    assert kept == {"chat": 1.0, "titles": 1.0}
    assert needed <= found.usd_per_hour <= 1.04 * needed


def test_where_nothing_can_be_paid_nothing_is_served() -> None:
    problem = apply_change(read_sent(SMALL), DialChange(budget_usd_per_hour=0.01)).problem
    found = plan_quickly(problem, simulate_s=30.0, seed=0)
    assert found.served == 0.0
    assert not found.plan.instances
    assert set(found.kept.values()) == {None}


def test_demand_is_scaled_for_all() -> None:
    problem = read_sent(SMALL).problem
    half = scale_demand(problem, 0.5)
    assert [s.rate_per_s for s in half.services] == [s.rate_per_s / 2 for s in problem.services]


def test_short_are_those_below_their_target() -> None:
    problem = read_sent(SMALL).problem
    assert short_services(problem, {"chat": 0.9, "titles": None}) == {"chat": 0.9}


def test_an_any_to_any_fleet_is_sized_by_work_and_begins_with_what_another_needed() -> None:
    problem = read_source(str(ASSISTANT)).problem
    said: list[str] = []
    found = plan_quickly(problem, simulate_s=30.0, seed=0, tell=said.append)
    assert not short_services(problem, found.kept)
    assert not found.plan.cut_short
    assert found.problem == problem
    assert said[0] == "planning"
    quick._cache.clear()
    again = plan_quickly(problem, simulate_s=30.0, seed=0)
    assert again.plan == found.plan
    assert again.headroom == found.headroom == {"assistant": 1.0}
    # More room is planned for from the start, if it is there, and never less than the fleet asks.
    more = plan_quickly(problem, simulate_s=30.0, seed=0, like={"assistant": 1.01, "gone": 2.0})
    assert more.headroom == {"assistant": 1.01}
    assert not validate(more.plan, more.problem)
    most = plan_quickly(problem, simulate_s=30.0, seed=0, like={"assistant": 4.0})
    assert (most.headroom, most.plan) == ({"assistant": 1.0}, found.plan)
    less = plan_quickly(problem, simulate_s=30.0, seed=0, like={"assistant": 0.5})
    assert less.headroom == {"assistant": 1.0}


def test_executors_are_priced_once_for_all_demands_and_prices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = read_source(str(ASSISTANT)).problem
    plan_quickly(problem, simulate_s=30.0, seed=0)
    monkeypatch.setattr(graph_service, "work_on", None)  # Nothing is priced any more.
    monkeypatch.setattr(graph_service.ServiceProgram, "_copies", None)
    dearer = tuple(
        offer.model_copy(update={"usd_per_hour": 2.0 * offer.usd_per_hour})
        for offer in problem.offers
    )
    for changed in (scale_demand(problem, 1.5), problem.replace(offers=dearer)):
        assert plan_quickly(changed, simulate_s=30.0, seed=0).plan.instances
