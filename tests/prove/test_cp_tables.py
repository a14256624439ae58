"""Latencies that fill the tables of solvers: simulated, the same each time, and for ever where cut short."""

from __future__ import annotations

import math

import pytest

from atoll.plan.files.fleet_file import parse_fleet
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.prove.cp_tables import SimulatedLatency
from atoll.prove.simulation_deadline import SimulationCutShortError
from atoll.solve.plan_request import PlanRequest
from atoll.solve.registry import solve

FLEET = """
services:
  chat: {model: llama-3.1-8b, rate: 4/s, ttft: 10s, tpot: 200ms, phases: together, lengths: 300x40}
cluster:
  nodes: {here: {"A100-80:2": 1}}
  links: [{between: ["*", "*"], bandwidth: 100Gbit/s, latency: 10us}]
"""


def made() -> tuple[Plan, Problem]:
    problem = parse_fleet(FLEET)
    return solve(problem, PlanRequest(solver="memp")), problem


def test_latencies_are_simulated_and_the_same_each_time() -> None:
    plan, problem = made()
    fill = SimulatedLatency(problem.catalog())
    found = fill(plan, problem, 30.0)
    assert 0.0 < found.p50_s <= found.p95_s < 5.0
    assert 0.0 < found.mean_s <= found.p95_s
    assert SimulatedLatency(problem.catalog())(plan, problem, 30.0) == found
    assert fill.runs == 1


def test_more_requests_wait_longer() -> None:
    plan, problem = made()
    fill = SimulatedLatency(problem.catalog())
    (service,) = problem.services
    busier = problem.replace(services=(service.model_copy(update={"rate_per_s": 400.0}),))
    assert fill(plan, busier, 10.0).mean_s > 2.0 * fill(plan, problem, 10.0).mean_s


def test_what_the_deadline_ends_takes_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, problem = made()

    def cut(*_args: object, **_more: object) -> None:
        raise SimulationCutShortError("no time is left")

    monkeypatch.setattr("atoll.sim.api.simulate", cut)
    fill = SimulatedLatency(problem.catalog())
    assert fill(plan, problem, 10.0).mean_s == math.inf
    assert fill.runs == 0
