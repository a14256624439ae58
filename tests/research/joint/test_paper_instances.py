"""The rebuilt instances lie within the paper's ranges, are fixed by their seed, and make sense."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from atoll.core.errors import UsageError
from research.joint.paper_instances import KINDS, SIZES, TIERS, paper_instance


def test_the_paper_ranges_hold() -> None:
    problem = paper_instance(6, 6, 10, 0)
    assert problem.shape == (6, 6, 10, 12)
    assert [kind.name for kind in KINDS[4:]] == ["Image", "Video"]
    assert 18_000 <= problem.rate[0] <= 25_000
    assert 1_000 <= problem.rate[5] <= 3_000
    assert problem.delay_limit.min() >= 1.5
    assert problem.delay_limit.max() <= 25
    assert problem.error_limit.min() >= 0.02
    assert problem.error_limit.max() <= 0.08
    assert (problem.weights_gb[0], problem.weights_gb[-1]) == (2.0, 140.0)
    assert problem.kv_gb[0] == pytest.approx(31e-6)
    assert problem.kv_gb[-1] == pytest.approx(305e-6)
    assert (problem.memory_gb.min(), problem.memory_gb.max()) == (24.0, 80.0)
    assert (problem.tflops.min(), problem.tflops.max()) == (40.7, 1484.0)
    assert (problem.gpu_usd.min(), problem.gpu_usd.max()) == (0.35, 2.5)
    assert (problem.budget, problem.storage_gb, problem.horizon_h) == (100.0, 1000.0, 24.0)
    assert sorted({(int(n), int(m)) for n, m in zip(problem.tp, problem.pp, strict=True)}) == [
        (n, m) for n in (1, 2, 4, 8) for m in (1, 2, 4)
    ]


def test_equal_seeds_give_equal_bits_and_others_do_not() -> None:
    one, two, other = (paper_instance(10, 10, 20, seed) for seed in (3, 3, 4))
    for field in dataclasses.fields(one):
        assert np.array_equal(getattr(one, field.name), getattr(two, field.name)), field.name
    assert not np.array_equal(one.rate, other.rate)
    assert not np.array_equal(one.gpu_usd[10:], other.gpu_usd[10:])


def test_more_types_leave_the_first_ones_as_they_are() -> None:
    small, large = paper_instance(6, 6, 10, 1), paper_instance(15, 6, 10, 1)
    assert np.array_equal(small.rate, large.rate[:6])
    assert np.array_equal(small.delay, large.delay[:6])
    assert large.budget == pytest.approx(100 * np.sqrt(2.5))
    assert large.storage_gb == pytest.approx(2500)


@pytest.mark.parametrize("size", SIZES)
def test_larger_models_err_less_and_take_longer(size: tuple[int, int, int]) -> None:
    problem = paper_instance(*size, seed=2)
    assert problem.shape[:3] == size
    assert (np.diff(problem.error, axis=1) < 0).all()
    assert (np.diff(problem.delay, axis=1) > 0).all()
    fits = problem.weights_gb[:, None, None] < problem.memory_gb[:, None] * problem.gpus
    able = (problem.error <= problem.error_limit[:, None, None])[..., None] & (
        problem.delay <= problem.delay_limit[:, None, None, None]
    )
    # Every type has a configuration that serves all of it, and the smallest model cannot do maths.
    assert (able & fits).any(axis=(1, 2, 3)).all()
    assert not able[3, 0].any()


def test_quantised_tiers_err_more_and_cost_less() -> None:
    problem = paper_instance(6, 6, 10, 0)
    names = [tier.name for tier in TIERS]
    full, half, quarter = (names.index(f"H100-80-{p}") for p in ("FP16", "INT8", "INT4"))
    assert problem.error[:, :, half] == pytest.approx(1.15 * problem.error[:, :, full])
    assert problem.error[:, :, quarter] == pytest.approx(1.35 * problem.error[:, :, full])
    assert problem.gpu_usd[full] > problem.gpu_usd[half] > problem.gpu_usd[quarter]


def test_the_scenarios_of_the_paper_can_be_asked_for() -> None:
    plain, dear = paper_instance(budget=72.0), paper_instance(budget=72.0, media_unmet=5.0)
    assert plain.budget == 72.0
    assert dear.unmet_usd / plain.unmet_usd == pytest.approx([1, 1, 1, 1, 5, 5])


def test_a_size_that_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="models: must be from 1"):
        paper_instance(6, 0, 10)
