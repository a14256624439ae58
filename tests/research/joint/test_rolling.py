"""A day of windows: how it is accounted, and that a new placement is taken only where it is cheaper."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.core.errors import UsageError
from atoll.solve.joint.greedy.agh import agh
from atoll.solve.joint.joint_problem import JointAnswer, JointProblem
from research.joint.rolling import demand_walks, rolling, static
from research.joint.stage2 import demand_only, evaluate
from tests.solve.joint.small_problems import random_problem


def test_walks_start_at_one_and_spread_with_sigma() -> None:
    problem = random_problem(0)
    walks = demand_walks(problem, 0.03, trials=200, windows=100, seed=1)
    assert walks.shape == (200, 100, 3)
    assert (walks[:, 0] == 1.0).all()
    assert np.log(walks[:, -1]).std() == pytest.approx(0.03 * np.sqrt(99), rel=0.1)
    assert np.array_equal(walks, demand_walks(problem, 0.03, trials=200, windows=100, seed=1))
    # The same steps at every sigma: levels compare on one path.
    assert np.log(demand_walks(problem, 0.06, trials=2)) == pytest.approx(
        2 * np.log(demand_walks(problem, 0.03, trials=2))
    )
    with pytest.raises(UsageError, match="trials and windows"):
        demand_walks(problem, 0.01, trials=0)


def test_steady_demand_costs_the_same_in_any_number_of_windows() -> None:
    problem = random_problem(3)
    answer = agh(problem)
    once = evaluate(problem, answer, demand_only(np.ones((1, 3)))).mean
    for windows in (1, 7):
        kept = static(problem, answer, demand_walks(problem, 0.0, trials=2, windows=windows))
        assert kept.mean == pytest.approx(once)
        assert kept.std == pytest.approx(0.0, abs=1e-9)


def test_a_solver_that_offers_the_same_changes_nothing() -> None:
    problem = random_problem(3)
    answer = agh(problem)
    walks = demand_walks(problem, 0.2, trials=3, windows=10)
    kept, rolled = static(problem, answer, walks), rolling(problem, lambda _: answer, walks)
    assert rolled.each == pytest.approx(kept.each)
    assert rolled.violation_rate == pytest.approx(kept.violation_rate)
    assert rolled.changes == 0
    assert kept.std == pytest.approx(float(np.std(kept.each, ddof=1)))


def test_planning_anew_is_never_dearer_and_sees_the_window() -> None:
    problem = random_problem(9)
    seen: list[float] = []

    def solver(now: JointProblem) -> JointAnswer:
        seen.append(float(now.rate[0] / problem.rate[0]))
        return agh(now)

    first = solver(problem)
    walks = demand_walks(problem, 0.6, trials=1, windows=4, seed=2)
    rolled = rolling(problem, solver, walks, first=first)
    kept = static(problem, first, walks)
    assert seen[1:] == pytest.approx(walks[0, 1:, 0])
    assert (rolled.each <= kept.each + 1e-9).all()
    assert rolled.changes >= 1
    assert rolled.mean < kept.mean


def test_a_worse_offer_is_not_taken() -> None:
    problem = random_problem(9)
    first = agh(problem)
    types, models, tiers, _ = problem.shape
    nothing = JointAnswer(
        np.full((models, tiers), -1),
        np.zeros((types, models, tiers)),
        np.zeros((types, models, tiers), np.bool_),
        np.ones(types),
    )
    walks = demand_walks(problem, 0.02, trials=2, windows=5)
    rolled = rolling(problem, lambda _: nothing, walks, first=first)
    assert rolled.changes == 0
    assert rolled.each == pytest.approx(static(problem, first, walks).each)
