"""Simplicity on pools: no more machines, hops, slices, shapes and phases apart than are worth it."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from atoll.core.ids import Phase
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.planner.source import read_sent
from atoll.prove.planning import plan
from atoll.report.plan.rented_tables import draw_rented_plan
from atoll.solve.plan_request import PlanRequest
from atoll.solve.registry import solve
from atoll.solve.simplicity import SAID, is_simpler, pieces_of

HOME = """
models:
  assistant: {model: MODEL, ttft: 10s, tpot: 200ms, rate: RATE, lengths: 1200x300}
pool:
  owned:
    home: {"RTX4090:1": 1, "RTX3060:1": 3, "M3-Max:1": 1}
"""
LAB = """
models:
  small: {model: qwen3-8b, ttft: 3s, tpot: 80ms, rate: 0.3/s, lengths: azure-conv}
pool:
  owned:
    room: {"V100-32:1": 6}
"""
IDLE = """
models:
  chat: {model: llama-3.1-8b, ttft: 1s, tpot: 50ms, rate: 7/s, lengths: azure-conv, phases: together}
pool:
  owned:
    onprem: {"A100-40:1": 21}
"""
MIXED = """
models:
  big: {model: qwen3-32b, ttft: 2s, tpot: 80ms, rate: 3/s, lengths: azure-conv}
  small: {model: llama-3.1-8b, ttft: 1s, tpot: 50ms, rate: 8/s, lengths: azure-conv}
pool:
  owned:
    onprem: {"A100-40:8": 1, "L4:1": 4, "T4:4": 4}
"""
RENTED = """
models:
  chat: {model: llama-3.1-8b, ttft: 1s, tpot: 50ms, rate: 20/s, lengths: azure-conv, phases: together}
pool:
  offers:
    - {region: r/a, node_type: L40S:1, market: on-demand, available: 9, usd_per_hour: 1.00}
    - {region: r/a, node_type: H100:1, market: on-demand, available: 9, usd_per_hour: USD}
"""


def problem_of(text: str, simplicity: float = 0.02) -> Problem:
    asked = read_sent("name: simple\n" + text).problem
    return asked.replace(settings=asked.settings.model_copy(update={"simplicity": simplicity}))


def planned(text: str, simplicity: float = 0.02, *, capacity: bool = False) -> Plan:
    request = PlanRequest(capacity_only=capacity, error_bars=False)
    return plan(problem_of(text, simplicity), request)


def kinds(found: Plan) -> list[list[str]]:
    return [[node.kind for node in one.nodes] for one in found.instances]


def said(found: Plan) -> list[str]:
    return [note for note in found.notes if note.startswith(SAID)]


@pytest.mark.parametrize(
    ("model", "rate"),
    [
        pytest.param("qwen3-32b@int4", "3/min", marks=pytest.mark.slow),
        ("qwen3-32b@int4", "15/min"),
        pytest.param("qwen3-8b", "3/min", marks=pytest.mark.slow),
    ],
)
def test_a_model_that_one_machine_holds_is_not_cut_over_three(model: str, rate: str) -> None:
    text = HOME.replace("MODEL", model).replace("RATE", rate)
    found = planned(text, capacity=rate != "3/min")
    assert kinds(found) == [["RTX4090:1"]]
    assert all(promise.is_kept for promise in found.promises)
    if model == "qwen3-8b":
        assert pieces_of(planned(text, 0.0, capacity=True)).hops > 0


@pytest.mark.slow
def test_a_model_that_one_machine_serves_is_not_cut_over_two() -> None:
    found = planned(LAB)
    assert kinds(found) == [["V100-32:1"]]
    assert all(promise.is_kept for promise in found.promises)
    before = planned(LAB, 0.0)
    assert len([node for one in before.instances for node in one.nodes]) > 1
    assert not said(before)
    assert said(found)[0].startswith(
        "simplicity: $0.00/h, 0% above the cheapest plan found: 1 mach"
    )


def test_machines_that_would_idle_share_the_load() -> None:
    before, found = planned(IDLE, 0.0, capacity=True), planned(IDLE)
    assert 7.0 / sum(one.throughput_per_s for one in before.instances) > 0.9
    assert 7.0 / sum(one.throughput_per_s for one in found.instances) < 0.5
    assert 1 < found.nodes < 6
    assert pieces_of(found).shapes == 1
    assert found.status == "optimal"
    assert found.objective == 0.0


def test_two_models_on_unlike_machines_take_few_pieces() -> None:
    found = planned(MIXED, capacity=True)
    assert not any(one.phase is Phase.PREFILL for one in found.instances)
    assert {len(one.nodes) for one in found.instances} == {1}
    assert pieces_of(found).total < pieces_of(planned(MIXED, 0.0, capacity=True)).total


def rented_price(share: float) -> str:
    """The fleet with H100s that cost this share more than the L40S that carry as much."""
    few = solve(problem_of(RENTED.replace("USD", "0.01"), 0.0))
    many = solve(problem_of(RENTED.replace("USD", "99"), 0.0))
    usd = many.usd_per_hour * (1.0 + share) / few.nodes
    assert few.nodes < many.nodes
    return RENTED.replace("USD", f"{usd:.6f}")


def test_rented_machines_are_fewer_where_that_costs_little() -> None:
    text = rented_price(0.015)
    cheapest, found = planned(text, 0.0, capacity=True), planned(text, capacity=True)
    assert found.nodes < cheapest.nodes
    assert cheapest.usd_per_hour < found.usd_per_hour <= 1.02 * cheapest.usd_per_hour
    # What is proven is proven of the cost, so the plan is not called optimal.
    assert found.bound == cheapest.bound
    assert found.status == "feasible"
    assert found.gap == pytest.approx(1.0 - cheapest.usd_per_hour / found.usd_per_hour, abs=1e-3)
    more = found.usd_per_hour - cheapest.usd_per_hour
    assert said(found)[0].startswith(f"simplicity: ${more:.2g}/h, 1.5%")
    console = Console(width=300, file=StringIO())
    console.print(draw_rented_plan(found, problem_of(text), [], 100))
    assert isinstance(console.file, StringIO)
    assert f"Simplicity: ${more:.2g}/h" in console.file.getvalue()


def test_what_costs_more_than_simplicity_may_is_not_taken() -> None:
    text = rented_price(0.03)
    assert planned(text, capacity=True).instances == planned(text, 0.0, capacity=True).instances
    assert planned(text, 0.04, capacity=True).usd_per_hour > solve(problem_of(text)).usd_per_hour


@pytest.mark.parametrize("text", [LAB, MIXED])
def test_without_simplicity_plans_are_those_of_the_solver(text: str) -> None:
    asked = problem_of(text, 0.0)
    assert plan(asked, PlanRequest(capacity_only=True)) == solve(asked)


def test_no_plan_is_simpler_than_itself() -> None:
    asked = problem_of(MIXED)
    found = solve(asked)
    assert not is_simpler(found, found, asked)
    assert is_simpler(planned(MIXED, capacity=True), found, asked)
    assert not is_simpler(planned(MIXED, capacity=True), found, problem_of(MIXED, 0.0))
