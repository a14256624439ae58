"""Robust placements: no dearer than what they start from, within constraints, and near the best there is."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from atoll.solve.joint.joint_check import violations
from atoll.solve.joint.joint_problem import JointAnswer, JointProblem, cost_of
from research.joint.exchange.exchange import exchange
from research.joint.paper_instances import paper_instance
from research.joint.robust import Uncertainty, plan_robustly
from research.joint.stage2 import draw_scenarios, evaluate, reroute

pytestmark = pytest.mark.slow
"""Its kernels take most of a minute to compile, and nothing but benchmarks calls them."""

MILD = Uncertainty()
HARD = Uncertainty(stresses=(1.5,))


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("uncertainty", [MILD, HARD], ids=["mild", "hard"])
def test_it_keeps_the_constraints_and_beats_the_nominal_placement(
    seed: int, uncertainty: Uncertainty
) -> None:
    problem = paper_instance(6, 6, 10, seed)
    nominal = exchange(problem)
    robust = plan_robustly(problem, exchange, uncertainty, seed=100)
    assert violations(problem, robust.answer) == []
    drawn = uncertainty.draw(problem, 96, 100)
    assert evaluate(problem, robust.answer, drawn).mean == pytest.approx(robust.mean)
    assert robust.mean <= evaluate(problem, nominal, drawn).mean + 1e-9
    # On scenarios that nobody planned with, too.
    fresh = uncertainty.draw(problem, 300, 7)
    before, after = (evaluate(problem, one, fresh).mean for one in (nominal, robust.answer))
    assert after < before


def test_with_nothing_uncertain_it_is_the_nominal_problem() -> None:
    problem = paper_instance(4, 4, 5, 0)
    sure = Uncertainty(delay=0.0, error=0.0, rate=0.0)
    robust = plan_robustly(problem, exchange, sure, scenarios=1)
    assert robust.mean == pytest.approx(cost_of(problem, robust.answer).total)
    assert robust.mean <= cost_of(problem, exchange(problem)).total + 1e-9


def test_equal_arguments_give_equal_placements() -> None:
    problem = paper_instance(4, 4, 5, 3)
    one, two = (plan_robustly(problem, exchange, HARD, seed=5) for _ in range(2))
    assert one.mean == two.mean
    assert np.array_equal(one.answer.config, two.answer.config)
    assert np.array_equal(one.answer.placed, two.answer.placed)


def _small(seed: int) -> JointProblem:
    """Two types, two models, two tiers, three configurations: all placements can be tried."""
    whole = paper_instance(2, 2, 2, seed)
    some = [0, 1, 3]
    return replace(
        whole,
        tp=whole.tp[some],
        pp=whole.pp[some],
        allowed=whole.allowed[:, some],
        delay=whole.delay[..., some],
    )


def _best_of_all(problem: JointProblem, uncertainty: Uncertainty) -> float:
    types, models, tiers, configs = problem.shape
    drawn = uncertainty.draw(problem, 24, 9)
    best = float(problem.unmet_usd.sum())
    pairs = list(product(range(models), range(tiers)))
    for chosen in product(range(-1, configs), repeat=len(pairs)):
        config = np.array(chosen, np.int64).reshape(models, tiers)
        open_pairs = [pair for pair, c in zip(pairs, chosen, strict=True) if c >= 0]
        if len(open_pairs) > 2:
            continue
        for flags in product((False, True), repeat=types * len(open_pairs)):
            placed = np.zeros((types, models, tiers), np.bool_)
            for (i, (j, k)), flag in zip(product(range(types), open_pairs), flags, strict=True):
                placed[i, j, k] = flag
            blank = JointAnswer(config, np.zeros(placed.shape), placed, np.ones(types))
            settled = reroute(problem, blank)
            if not violations(problem, settled):
                best = min(best, evaluate(problem, settled, drawn).mean)
    return best


@pytest.mark.parametrize("seed", [0, 1])
def test_close_to_the_best_of_all_placements(seed: int) -> None:
    problem = _small(seed)
    robust = plan_robustly(problem, exchange, MILD, scenarios=24, seed=9)
    best = _best_of_all(problem, MILD)
    assert robust.mean <= best * 1.03
    assert best <= robust.mean + 1e-6 or (robust.answer.config >= 0).sum() > 2


def test_stresses_are_all_drawn() -> None:
    problem = paper_instance(4, 4, 5, 0)
    drawn = Uncertainty(stresses=(1.0, 1.5)).draw(problem, 40, 0)
    assert drawn.number == 40
    plain = draw_scenarios(problem, 20, 0)
    assert np.array_equal(drawn.delay[:20], plain.delay)
    assert float(drawn.delay[20:].max()) > 1.5
