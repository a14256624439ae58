"""The checker finds each broken constraint, and nothing in an answer that keeps them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from atoll.solve.joint.joint_check import violations
from atoll.solve.joint.joint_problem import JointAnswer, JointProblem

_BY_TIER = ("memory_gb", "tflops", "gpu_usd", "allowed")


def _problem() -> JointProblem:
    """One type, two models, one tier, two configurations; everything by hand."""
    one = np.ones(1)
    return JointProblem(
        horizon_h=10.0,
        budget=100.0,
        storage_gb=50.0,
        storage_usd=0.01,
        efficiency=1.0,
        rate=one * 100,
        tokens=one * 10,
        data_gb=one * 0.01,
        delay_usd=one,
        unmet_usd=one * 100,
        max_unmet=one * 0.5,
        delay_limit=one * 2,
        error_limit=one * 0.1,
        weights_gb=np.array([10.0, 20.0]),
        kv_gb=np.array([0.1, 0.1]),
        memory_gb=np.array([15.0]),
        tflops=np.array([1.0]),
        gpu_usd=np.array([2.0]),
        tp=np.array([1, 2]),
        pp=np.array([1, 1]),
        allowed=np.ones((1, 2), np.bool_),
        delay=np.array([[[[2.0, 1.0]], [[4.0, 2.0]]]]),
        error=np.array([[[0.1], [0.05]]]),
        compute=np.array([[[3000.0], [6000.0]]]),
        residence_s=np.array([[[4.0], [4.0]]]),
    )


def _answer(config: tuple[int, int], shares: tuple[float, float]) -> JointAnswer:
    routed = np.array(shares).reshape(1, 2, 1)
    return JointAnswer(
        np.array(config).reshape(2, 1), routed, routed > 0, np.array([1.0 - sum(shares)])
    )


def _found(problem: JointProblem, answer: JointAnswer) -> list[tuple[str, tuple[int, ...]]]:
    return [(v.constraint, v.where) for v in violations(problem, answer)]


def test_a_sound_answer_breaks_nothing() -> None:
    # Memory: 10 + 0.1 * 10 * 4 = 14 of 15 GB; work 3,000 of 3,600; data 10 GB and weights 10 GB.
    assert violations(_problem(), _answer((0, -1), (1.0, 0.0))) == []
    assert violations(_problem(), _answer((-1, 1), (0.0, 1.0))) == []


Change = Callable[[JointProblem], JointProblem]


@pytest.mark.parametrize(
    ("constraint", "amount", "change"),
    [
        ("5c", 22.0 - 21.0, lambda p: replace(p, budget=21.0)),
        ("5f", 14.0 - 13.9, lambda p: replace(p, memory_gb=np.array([13.9]))),
        ("5g", 3000.0 - 2880.0, lambda p: replace(p, tflops=np.array([0.8]))),
        ("5h", 20.0 - 19.0, lambda p: replace(p, storage_gb=19.0)),
        ("5i", 2.0 - 1.9, lambda p: replace(p, delay_limit=np.array([1.9]))),
        ("5j", 0.1 - 0.09, lambda p: replace(p, error_limit=np.array([0.09]))),
    ],
)
def test_each_limit_is_found_broken(constraint: str, amount: float, change: Change) -> None:
    (found,) = violations(change(_problem()), _answer((0, -1), (1.0, 0.0)))
    assert found.constraint == constraint
    assert found.amount == pytest.approx(amount)


def test_broken_forms_are_found() -> None:
    problem, good = _problem(), _answer((0, -1), (1.0, 0.0))
    assert ("5k", (0, 1, 0)) in _found(problem, _answer((0, -1), (0.5, 0.5)))
    unplaced = replace(good, placed=np.zeros((1, 2, 1), np.bool_))
    assert ("5k", (0, 0, 0)) in _found(problem, unplaced)
    assert _found(problem, replace(good, unmet=np.array([0.2]))) == [("5b", (0,))]
    assert ("u", (0,)) in _found(problem, _answer((0, -1), (0.2, 0.0)))
    assert ("5d", (0, 0)) in _found(problem, replace(good, config=np.array([[7], [-1]])))
    closed = replace(problem, allowed=np.array([[False, True]]))
    assert ("5d", (0, 0)) in _found(closed, good)
    assert ("5j", (0,)) in _found(replace(problem, error=problem.error * np.nan), good)
    with pytest.raises(ValueError, match="unmet: has shape"):
        violations(problem, replace(good, unmet=np.zeros(2)))


def test_the_reading_of_storage_per_type_is_looser() -> None:
    # Two equal types: 20 GB each, 40 GB together.
    one = _problem()
    double: dict[str, Any] = {}
    for field in fields(one):
        value = getattr(one, field.name)
        if isinstance(value, np.ndarray) and len(value) == 1 and field.name not in _BY_TIER:
            double[field.name] = np.concatenate([value] * 2)
    problem = replace(
        one, **double, storage_gb=30.0, tflops=np.array([2.0]), memory_gb=np.array([20.0])
    )
    half = _answer((0, -1), (1.0, 0.0))
    answer = JointAnswer(
        half.config,
        np.concatenate([half.routed] * 2),
        np.concatenate([half.placed] * 2),
        np.zeros(2),
    )
    assert [v.constraint for v in violations(problem, answer)] == ["5h"]
    assert violations(problem, answer, per_type=True) == []
