"""AGH: never dearer than GH, feasible, the same each time."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.solve.joint.greedy.agh import agh, orders_of
from atoll.solve.joint.greedy.gh import gh
from atoll.solve.joint.joint_check import violations
from atoll.solve.joint.joint_problem import cost_of
from research.joint.paper_instances import paper_instance
from tests.seeds import seeds


@pytest.mark.parametrize("size", [(4, 4, 5), (6, 6, 10), (10, 10, 10)])
@pytest.mark.parametrize("seed", seeds(5, fast=2))
def test_it_is_never_dearer_than_gh(size: tuple[int, int, int], seed: int) -> None:
    problem = paper_instance(*size, seed)
    answer = agh(problem)
    assert violations(problem, answer) == []
    assert cost_of(problem, answer).total <= cost_of(problem, gh(problem)).total + 1e-9


def test_orders_are_permutations_and_fewer_for_larger_problems() -> None:
    for size, number in (
        ((4, 4, 5), 28),
        ((10, 10, 10), 18),
        ((15, 15, 10), 13),
        ((20, 20, 20), 11),
    ):
        orders = orders_of(paper_instance(*size), 0)
        assert orders.shape == (number, size[0])
        assert (np.sort(orders, axis=1) == np.arange(size[0])).all()
    problem = paper_instance(6, 6, 10)
    assert np.array_equal(orders_of(problem, 0)[0], np.argsort(-problem.rate, kind="stable"))


def test_equal_seeds_give_equal_bits() -> None:
    problem = paper_instance(10, 10, 10, 1)
    one, two = agh(problem, 7), agh(problem, 7)
    assert np.array_equal(one.routed, two.routed)
    assert np.array_equal(one.config, two.config)
