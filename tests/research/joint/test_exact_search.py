"""The exact solver against the paper's own formulation; its bound, its limits, its start."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from atoll.core.errors import InfeasibleError
from atoll.solve.joint.joint_check import violations
from atoll.solve.joint.joint_problem import cost_of
from research.joint.exact.candidates import Candidates
from research.joint.exact.exact_search import exact
from research.joint.paper_instances import paper_instance
from tests.seeds import seeds
from tests.solve.joint.small_problems import paper_optimum, random_problem

pytestmark = pytest.mark.slow
"""Its kernels take most of a minute to compile, and nothing but benchmarks calls them."""


@pytest.mark.parametrize("seed", seeds(6))
def test_it_equals_the_paper_formulation(seed: int) -> None:
    problem = random_problem(seed)
    found = exact(problem, gap=1e-6)
    assert found.cost == pytest.approx(paper_optimum(problem), rel=1e-5)
    assert found.bound <= found.cost
    assert found.gap <= 1e-6
    assert violations(problem, found.answer) == []
    assert found.cost == pytest.approx(cost_of(problem, found.answer).total)


@pytest.mark.parametrize("seed", range(6, 60))
def test_it_equals_the_paper_formulation_on_more(seed: int) -> None:
    problem = random_problem(seed, types=2 + seed % 3, models=2 + seed % 2, tiers=1 + seed % 3)
    found = exact(problem, gap=1e-6)
    assert found.cost == pytest.approx(paper_optimum(problem), rel=1e-5)
    assert violations(problem, found.answer) == []


def test_a_small_paper_instance_is_proven() -> None:
    problem = paper_instance(4, 4, 5, 0)
    found = exact(problem)
    assert found.gap <= 1e-4
    assert not found.cut_short
    assert violations(problem, found.answer) == []
    assert (found.answer.unmet < 0.01).all()
    again = exact(problem, incumbent=found.answer)
    assert again.cost == pytest.approx(found.cost, rel=1e-4)
    assert again.cost <= found.cost


def test_fifteen_types_and_models_are_proven() -> None:
    problem = paper_instance(15, 15, 10, 2)
    found = exact(problem, gap=1e-3)
    assert found.gap <= 1e-3
    assert not found.cut_short
    assert found.kept < found.configurations // 2
    assert violations(problem, found.answer) == []


def test_it_gives_the_same_twice() -> None:
    one, two = (exact(random_problem(4)) for _ in range(2))
    assert np.array_equal(one.answer.config, two.answer.config)
    assert np.array_equal(one.answer.routed, two.answer.routed)
    assert (one.nodes, one.iterations) == (two.nodes, two.iterations)


def test_a_limit_on_work_returns_what_it_has_and_says_so() -> None:
    problem = paper_instance(6, 6, 10, 0)
    cut = exact(problem, node_limit=0, deadline_s=1e6)
    assert cut.cut_short
    assert not cut.timed_out
    assert cut.bound <= cut.cost
    assert violations(problem, cut.answer) == []
    late = exact(problem, deadline_s=0.0)
    assert late.cut_short
    assert late.timed_out
    assert late.bound <= late.cost


def test_unserved_demand_is_within_its_limit() -> None:
    problem = random_problem(0)
    assert exact(problem).answer.unmet.max() > 0.3
    tight = replace(problem, max_unmet=np.full(3, 0.35), budget=2 * problem.budget)
    found = exact(tight, gap=1e-6)
    assert found.cost == pytest.approx(paper_optimum(tight), rel=1e-5)
    assert violations(tight, found.answer) == []
    with pytest.raises(InfeasibleError, match="max_unmet"):
        exact(replace(tight, max_unmet=np.zeros(3), budget=1.0))


def test_configurations_that_another_beats_are_left_out() -> None:
    problem = paper_instance(6, 6, 10, 0)
    columns = Candidates.of(problem)
    # One card in each tier; 140 GB need two of 80 GB at least; of 8 = 8 x 1 = 4 x 2 = 2 x 4 only one is kept.
    assert (
        problem.weights_gb[columns.model]
        < problem.memory_gb[columns.tier] * problem.gpus[columns.config]
    ).all()
    kept = {
        (int(j), int(k), int(problem.gpus[c]))
        for j, k, c in zip(columns.model, columns.tier, columns.config, strict=True)
    }
    assert len(kept) == columns.number
    assert (problem.pp[columns.config] == 1)[problem.gpus[columns.config] <= 8].all()
