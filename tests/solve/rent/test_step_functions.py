"""Step functions against trying every split."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from atoll.solve.rent import step_functions as steps
from atoll.solve.rent.step_functions import EMPTY, GRID, StepFunction, combine, min_with, steps_of
from tests.seeds import seeds

Floats = NDArray[np.float64]


def dense_of(points: list[tuple[int, float]]) -> Floats:
    """A function at all levels: what the cheapest point at or above a level costs, nothing costs nothing."""
    out = np.full(GRID + 1, np.inf)
    out[0] = 0.0
    for level, value in points:
        out[: level + 1] = np.minimum(out[: level + 1], np.where(np.arange(level + 1), value, 0.0))
    return out


points = st.lists(
    st.tuples(st.integers(1, GRID), st.integers(1, 50).map(float)), min_size=0, max_size=5
)


def min_split(a: Floats, b: Floats, level: int) -> float:
    return float((a[: level + 1] + b[: level + 1][::-1]).min())


@given(points)
def test_points_say_what_every_level_costs(some: list[tuple[int, float]]) -> None:
    dense = dense_of(some)
    function = steps_of(dense, lower=True)
    assert np.array_equal(function.dense(), dense)
    assert np.all(np.diff(function.level) > 0)
    assert np.all(np.diff(function.value) > 0)
    for level in {0, 1, GRID, *(p[0] for p in some)}:
        assert function.at(level) == dense[level]


@given(points, points, st.lists(st.integers(0, GRID), max_size=5), st.booleans())
def test_two_functions_split_as_is_best(
    one: list[tuple[int, float]], other: list[tuple[int, float]], levels: list[int], lower: bool
) -> None:
    a, b = dense_of(one), dense_of(other)
    first, second = steps_of(a, lower=lower), steps_of(b, lower=lower)
    both = combine(first, second, lower=lower)
    edges = [int(min(GRID, x + y)) for x in first.level for y in second.level]
    for level in {0, GRID, *levels, *edges}:
        assert both.at(level) == min_split(a, b, level)
    for level, value, i, j in zip(both.level, both.value, both.first, both.second, strict=True):
        assert first.level[i] + second.level[j] >= level
        assert first.value[i] + second.value[j] == value


def test_nothing_adds_nothing() -> None:
    some = steps_of(dense_of([(5, 2.0), (GRID, 7.0)]), lower=True)
    both = combine(EMPTY, some, lower=True)
    assert np.array_equal(both.dense(), some.dense())


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("seed", seeds(4))
def test_joined_points_stay_on_their_side(
    monkeypatch: pytest.MonkeyPatch, seed: int, lower: bool
) -> None:
    rng = np.random.default_rng(seed)

    def random_function() -> StepFunction:
        level = np.sort(rng.choice(np.arange(1, GRID + 1), 60, replace=False))
        value = np.cumsum(rng.uniform(0.01, 1.0, 60))
        return steps_of(
            dense_of(list(zip(level.tolist(), value.tolist(), strict=True))), lower=lower
        )

    fine = random_function(), random_function()
    exact = combine(*fine, lower=lower).dense()
    monkeypatch.setattr(steps, "MAX", 20)
    rough = [steps_of(function.dense(), lower=lower) for function in fine]
    assert all(len(function.level) <= 42 for function in rough)
    joined = combine(rough[0], rough[1], lower=lower)
    assert len(joined.level) <= 42
    known = np.isfinite(exact)
    assert np.array_equal(np.isfinite(joined.dense()), known)
    error = exact[known] - joined.dense()[known]
    assert np.all(error >= -1e-12) if lower else np.all(error <= 1e-12)
    # One join of each function and one of their sum, each of 1/20 of the largest value.
    assert np.abs(error).max() <= 4 * exact[known].max() / 20


@given(points, points, st.lists(st.integers(0, GRID), min_size=1, max_size=6))
def test_min_with_an_item_is_no_more_than_it_costs(
    one: list[tuple[int, float]], other: list[tuple[int, float]], weights: list[int]
) -> None:
    table, rest = dense_of(one), dense_of(other)[::-1].copy()
    found = min_with(table, rest, np.array(weights, np.int64))
    for weight, value in zip(weights, found, strict=True):
        level = np.arange(GRID + 1)
        true = float((table[np.maximum(0, level - weight)] + rest).min())
        assert value <= true
        # Levels go by 16: it is what the item costs if it carried 16 more.
        assert value >= float((table[np.maximum(0, level - weight - 15)] + rest).min())
