"""Exchange: feasible, never dearer than AGH, near the optimum where that is known, the same each time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.solve.choice.agh import agh
from atoll.solve.choice.check import violations
from atoll.solve.choice.exchange import exchange
from atoll.solve.choice.gh import gh
from atoll.solve.choice.instances import paper_instance
from atoll.solve.choice.problem import ChoiceProblem, cost_of
from tests.solve.choice.small_choices import random_problem


def check(problem: ChoiceProblem) -> float:
    """Check an answer and that it is the cheapest of three; return its cost."""
    answer = exchange(problem, effort=20_000)
    assert violations(problem, answer) == []
    usd = cost_of(problem, answer).total
    others = [cost_of(problem, one).total for one in (agh(problem), gh(problem))]
    assert usd <= others[0] + 1e-9
    assert others[0] <= others[1] + 1e-9
    return usd


@given(st.integers(0, 10_000))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_small_random_problems(seed: int) -> None:
    check(random_problem(seed))


@pytest.mark.parametrize("size", [(4, 4, 5), (6, 6, 10), (10, 10, 10), (15, 15, 10)])
def test_paper_instances(size: tuple[int, int, int]) -> None:
    for seed in range(2):
        check(paper_instance(*size, seed))


@pytest.mark.parametrize(
    ("seed", "optimum"), [(0, 87.3913), (1, 61.1454), (2, 56.1085), (3, 139.5023), (4, 75.1950)]
)
def test_near_the_proven_optimum(seed: int, optimum: float) -> None:
    problem = paper_instance(4, 4, 5, seed)
    assert cost_of(problem, exchange(problem)).total <= 1.03 * optimum


def test_equal_calls_give_equal_bits() -> None:
    problem = paper_instance(6, 6, 10, 2)
    one, two = exchange(problem, 5, effort=20_000), exchange(problem, 5, effort=20_000)
    assert np.array_equal(one.routed, two.routed)
    assert np.array_equal(one.config, two.config)
