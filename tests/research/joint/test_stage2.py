"""Stage 2 against a plain linear program; what it counts; how stress shows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from atoll.core.errors import UsageError
from atoll.solve.joint.greedy.agh import agh
from atoll.solve.joint.joint_problem import JointAnswer, JointProblem, cost_of
from research.joint.paper_instances import paper_instance
from research.joint.stage2 import (
    UNSERVED,
    Scenarios,
    demand_only,
    draw_scenarios,
    evaluate,
)
from tests.seeds import examples
from tests.solve.joint.small_problems import random_problem


def _reference(problem: JointProblem, answer: JointAnswer, scenarios: Scenarios, s: int) -> float:
    """(12a) to (12f) of one scenario as printed; return C4 + C5."""
    types, models, tiers, _ = problem.shape
    every = [(i, j, k) for i in range(types) for j in range(models) for k in range(tiers)]
    box = (scenarios.number, types, models, tiers)
    late, wrong = np.broadcast_to(scenarios.delay, box)[s], np.broadcast_to(scenarios.error, box)[s]
    rate = problem.rate * scenarios.rate[s]
    number = len(every) + types
    cost = np.zeros(number)
    equal = np.zeros((types, number))
    delay, error = np.zeros((types, number)), np.zeros((types, number))
    work = np.zeros((models * tiers, number))
    room = np.zeros(models * tiers)
    bounds = []
    for column, (i, j, k) in enumerate(every):
        c = int(answer.config[j, k])
        seconds = problem.delay[i, j, k, c] * late[i, j, k] if c >= 0 else 0.0
        cost[column] = problem.delay_usd[i] * seconds
        equal[i, column] = 1.0
        delay[i, column] = seconds
        error[i, column] = problem.error[i, j, k] * wrong[i, j, k]
        work[j * tiers + k, column] = problem.compute[i, j, k] / 1e3 * problem.tokens[i] * rate[i]
        gpus = int(problem.tp[c] * problem.pp[c]) if c >= 0 else 0
        room[j * tiers + k] = problem.efficiency * 3600 * problem.tflops[k] * gpus
        bounds.append((0.0, float(answer.placed[i, j, k])))
    for i in range(types):
        cost[len(every) + i] = problem.unmet_usd[i]
        equal[i, len(every) + i] = 1.0
        bounds.append((0.0, 1.0))
    rows = np.concatenate([delay, error, work])
    most = np.concatenate([problem.delay_limit, problem.error_limit, room])
    found = linprog(cost, rows, most, equal, np.ones(types), bounds)
    return float(found.fun)


def _random_answer(problem: JointProblem, draw: np.random.Generator) -> JointAnswer:
    types, models, tiers, configs = problem.shape
    config = draw.integers(-1, configs, (models, tiers))
    placed = (draw.random((types, models, tiers)) < 0.7) & (config >= 0)
    return JointAnswer(config, np.zeros(placed.shape), placed, np.ones(types))


@examples(25)
@given(st.integers(0, 10_000), st.floats(0.5, 3.0))
def test_routes_cost_what_a_plain_programme_says(seed: int, flops: float) -> None:
    problem = random_problem(seed, types=3, models=2, tiers=3)
    problem = replace(problem, tflops=problem.tflops * flops)
    answer = _random_answer(problem, np.random.default_rng(seed))
    scenarios = draw_scenarios(problem, 4, seed)
    cost = evaluate(problem, answer, scenarios)
    for s in range(4):
        fixed = cost.terms.rent + cost.terms.weights
        price = problem.horizon_h * problem.storage_usd
        data = price * ((1 - cost.unmet[s]) * scenarios.rate[s]) @ problem.data_stored_gb
        expected = _reference(problem, answer, scenarios, s)
        assert cost.each[s] - fixed - data == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_both_ways_of_solving_are_taken() -> None:
    problem = random_problem(3)
    answer = _random_answer(problem, np.random.default_rng(1))
    scenarios = draw_scenarios(problem, 20, 0)
    plenty = replace(problem, tflops=problem.tflops * 1e3)
    scarce = replace(problem, tflops=problem.tflops / 10)
    assert evaluate(plenty, answer, scenarios).solved_whole == 0
    assert evaluate(scarce, answer, scenarios).solved_whole == 20
    assert evaluate(scarce, answer, scenarios).mean > evaluate(plenty, answer, scenarios).mean


def test_without_change_it_costs_what_was_planned() -> None:
    problem = paper_instance(4, 4, 5, 0)
    answer = agh(problem)
    cost = evaluate(problem, answer, demand_only(np.ones((2, 4))))
    planned = cost_of(problem, answer)
    assert cost.terms.rent == pytest.approx(planned.rent)
    assert cost.terms.weights == pytest.approx(planned.weights)
    # Stage 2 has no budget, so it can only be cheaper.
    assert planned.total * (1 - 1e-4) <= cost.mean <= planned.total + 1e-6
    assert cost.violation_rate == (answer.unmet > UNSERVED).mean()
    assert cost.mean == pytest.approx(cost.terms.total)


def test_stress_costs_and_violates_more() -> None:
    problem = paper_instance(4, 4, 5, 0)
    answer = agh(problem)
    costs = [
        evaluate(problem, answer, draw_scenarios(problem, 200, 1, stress=stress))
        for stress in (1.0, 1.2, 1.5)
    ]
    assert costs[0].mean < costs[1].mean < costs[2].mean
    assert 0 < costs[0].violation_rate < costs[1].violation_rate < costs[2].violation_rate
    assert costs[2].violation_rate == pytest.approx(float((costs[2].unmet > 0.01).mean()))


def test_an_empty_placement_serves_nothing() -> None:
    problem = random_problem(1)
    types, models, tiers, _ = problem.shape
    nothing = JointAnswer(
        np.full((models, tiers), -1),
        np.zeros((types, models, tiers)),
        np.zeros((types, models, tiers), np.bool_),
        np.ones(types),
    )
    cost = evaluate(problem, nothing, draw_scenarios(problem, 5))
    assert cost.mean == pytest.approx(problem.unmet_usd.sum())
    assert cost.violation_rate == 1.0


def test_scenarios_are_within_their_spread_and_fixed_by_the_seed() -> None:
    problem = random_problem(1)
    drawn, again = (draw_scenarios(problem, 50, 7, stress=1.5) for _ in range(2))
    assert np.array_equal(drawn.delay, again.delay)
    assert np.array_equal(drawn.rate, again.rate)
    assert 1.5 * 0.75 <= drawn.error.min() < drawn.error.max() <= 1.5 * 1.25
    assert 0.8 <= drawn.rate.min() < drawn.rate.max() <= 1.2
    with pytest.raises(UsageError, match="count"):
        draw_scenarios(problem, 0)
