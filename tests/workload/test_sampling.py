from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import InputError
from atoll.workload.requests import MAX_TOKENS
from atoll.workload.sampling import (
    Empirical,
    Fixed,
    Independent,
    LengthSampler,
    LogNormal,
    Normal,
    Quantiles,
)

COUNT = 200_000
GROUPED = Quantiles(
    (0.0, 0.5, 1.0), (10.0, 100.0, 1000.0), (0.0, 1.0), ((1.0, 2.0), (500.0, 900.0))
)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize(
    "lengths",
    [
        Independent(Fixed(1024), Fixed(128)),
        Independent(LogNormal(1024, 0.8), LogNormal(128, 1.5)),
        Independent(Normal(1024, 0.3), Normal(128, 0.2)),
        Independent(Normal(50, 1.0), Normal(20, 0.6)),
        GROUPED,
        Empirical(np.array([5, 7, 2000], np.int32), np.array([1, 90, 3], np.int32)),
    ],
)
def test_draws_have_the_moments_of_their_mix(lengths: LengthSampler) -> None:
    mix = lengths.mix()
    for values, mean, square in zip(
        lengths.draw(rng(), COUNT),
        (mix.input_mean, mix.output_mean),
        (mix.input_mean_square, mix.output_mean_square),
        strict=True,
    ):
        assert values.dtype == np.int32
        assert values.min() >= 1
        assert values.mean() == pytest.approx(mean, rel=0.01)
        assert np.square(values.astype(float)).mean() == pytest.approx(square, rel=0.06)


@given(st.floats(1.0, 1e6), st.floats(0.0, 5.0), st.integers(0, 100))
def test_lengths_stay_within_limits(mean: float, cv: float, seed: int) -> None:
    for law in (LogNormal(mean, cv, 5000), Normal(mean, cv, 5000)):
        drawn = law.draw(rng(seed), 50)
        assert len(drawn) == 50
        assert drawn.min() >= 1
        assert drawn.max() <= 5000


def test_a_narrow_law_is_its_mean() -> None:
    assert set(LogNormal(300, 0.0).draw(rng(), 9).tolist()) == {300}
    assert set(Normal(300, 0.0).draw(rng(), 9).tolist()) == {300}


def test_quantiles_come_back() -> None:
    prompts, _ = GROUPED.draw(rng(), COUNT)
    assert np.quantile(prompts, 0.5) == pytest.approx(100, rel=0.02)
    # Between quantiles the logarithm is linear: a quarter lies at the geometric mean of 10 and 100.
    assert np.quantile(prompts, 0.25) == pytest.approx(math.sqrt(1000), rel=0.03)
    assert (prompts.min(), prompts.max()) == (10, 1000)


def test_answers_follow_the_group_of_their_prompt() -> None:
    prompts, answers = GROUPED.draw(rng(), COUNT)
    short = prompts < 100
    assert answers[short].max() <= 2
    assert answers[prompts > 101].min() >= 500
    assert short.mean() == pytest.approx(0.5, abs=0.01)


def test_pairs_stay_together() -> None:
    pairs = Empirical(np.array([10, 20], np.int32), np.array([1, 2], np.int32))
    prompts, answers = pairs.draw(rng(), 100)
    assert np.array_equal(prompts, answers * 10)
    assert set(answers.tolist()) == {1, 2}


@pytest.mark.parametrize(
    "build",
    [
        lambda: Fixed(0),
        lambda: Fixed(MAX_TOKENS + 1),
        lambda: LogNormal(0.5, 1.0),
        lambda: LogNormal(math.nan, 1.0),
        lambda: LogNormal(10, -0.1),
        lambda: LogNormal(10, math.inf),
        lambda: Normal(math.inf, 0.1),
        lambda: Empirical(np.zeros(0, np.int32), np.zeros(0, np.int32)),
        lambda: Quantiles((0.0, 1.0), (5.0, 4.0), (0.0, 1.0), ((1.0, 2.0),)),
        lambda: Quantiles((0.0, 0.9), (4.0, 5.0), (0.0, 1.0), ((1.0, 2.0),)),
        lambda: Quantiles((0.0, 1.0), (0.0, 5.0), (0.0, 1.0), ((1.0, 2.0),)),
        lambda: Quantiles((0.0, 1.0), (4.0, 5.0), (0.0, 1.0), ()),
        lambda: Quantiles((0.0, 1.0), (4.0, 5.0), (0.0, 1.0), ((1.0, 2.0),) * 3),
    ],
)
def test_what_cannot_be(build: object) -> None:
    assert callable(build)
    with pytest.raises(InputError):
        build()
