"""GH: feasible, and what each of its mechanisms is for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from atoll.solve.joint.greedy.agh import agh
from atoll.solve.joint.greedy.gh import gh
from atoll.solve.joint.joint_check import violations
from atoll.solve.joint.joint_problem import JointAnswer, JointProblem, cost_of
from research.joint.paper_instances import paper_instance

SEEDS = range(5)
Solver = Callable[..., JointAnswer]


def pressed(seed: int) -> JointProblem:
    """An instance in which delays matter: with half the time, and money enough."""
    problem = paper_instance(6, 6, 10, seed, budget=400.0)
    return replace(problem, delay_limit=0.5 * problem.delay_limit)


@pytest.mark.parametrize("seed", SEEDS)
def test_answers_are_feasible(seed: int) -> None:
    for problem in (
        paper_instance(6, 6, 10, seed),
        paper_instance(10, 10, 10, seed),
        pressed(seed),
    ):
        assert violations(problem, gh(problem)) == []
        assert violations(problem, agh(problem)) == []


def test_without_the_selection_of_configurations_weights_or_delays_do_not_fit() -> None:
    for seed in SEEDS:
        problem = paper_instance(6, 6, 10, seed)
        found = {one.constraint for one in violations(problem, gh(problem, select=False))}
        if found:
            assert found <= {"5f", "5i"}
    broken = [
        violations(paper_instance(6, 6, 10, s), gh(paper_instance(6, 6, 10, s), select=False))
        for s in SEEDS
    ]
    assert sum(map(bool, broken)) >= 3
    assert any(violations(pressed(s), agh(pressed(s), select=False)) for s in SEEDS)


def test_without_upgrades_delays_are_too_long() -> None:
    broken = [violations(pressed(seed), agh(pressed(seed), upgrade=False)) for seed in SEEDS]
    assert any(broken)
    assert {one.constraint for each in broken for one in each} == {"5i"}


def test_without_ranking_answers_are_feasible_and_dearer() -> None:
    ranked, plain = 0.0, 0.0
    for seed in SEEDS:
        problem = paper_instance(6, 6, 10, seed, budget=400.0)
        answer = agh(problem, rank=False)
        assert violations(problem, answer) == []
        plain += cost_of(problem, answer).total
        ranked += cost_of(problem, agh(problem)).total
    assert plain > 1.5 * ranked


@pytest.mark.parametrize("solver", [gh, agh])
def test_a_type_larger_than_any_pair_is_spread_where_pairs_are_filled(solver: Solver) -> None:
    problem = paper_instance(6, 6, 10, 0, budget=4000.0)
    # So many requests that a pair of one GPU carries a fifth of any type at most.
    alone = (problem.load_tflop / problem.capacity_tflop).min(axis=(1, 2))
    problem = replace(
        problem,
        rate=problem.rate * 5.0 / alone.min(),
        data_gb=0.0 * problem.data_gb,
        tp=problem.tp[:1],
        pp=problem.pp[:1],
        allowed=problem.allowed[:, :1],
        delay=0.0 * problem.delay[..., :1],
        error=0.0 * problem.error,
        residence_s=0.0 * problem.residence_s,
    )
    assert solver(problem).unmet.min() == 1.0
    spread = solver(problem, fill=True)
    assert violations(problem, spread) == []
    assert spread.unmet.min() < 0.9


@pytest.mark.parametrize("solver", [gh, agh])
@pytest.mark.parametrize("seed", SEEDS)
def test_no_more_gpus_are_taken_than_a_lot_has(solver: Solver, seed: int) -> None:
    problem = paper_instance(6, 6, 10, seed, budget=400.0)
    free = solver(problem)
    used = np.where(free.config >= 0, problem.gpus[free.config], 0).sum(axis=0)
    lot = np.arange(10, dtype=np.int64) // 5
    wanted = np.bincount(lot, used)
    few = replace(problem, lot=lot, stock=np.floor(0.6 * wanted).astype(np.int64))
    assert violations(few, solver(few)) == []
    assert {one.constraint for one in violations(few, free)} == {"stock"}
    enough = replace(problem, lot=lot, stock=wanted.astype(np.int64) + 100)
    assert np.array_equal(solver(enough).routed, free.routed)


def test_equal_calls_give_equal_bits() -> None:
    problem = paper_instance(6, 6, 10, 3)
    one, two = gh(problem), gh(problem)
    assert np.array_equal(one.routed, two.routed)
    assert np.array_equal(one.config, two.config)
