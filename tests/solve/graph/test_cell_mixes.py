from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import InputError
from atoll.solve.graph.cell_mixes import efficient_cells, greedy_mix
from research.cells.exact_mix import compare_mixes, exact_mix


def test_the_greedy_mix_is_not_the_best() -> None:
    cells = ((1, 1.0), (2, 2.1), (4, 4.3))
    assert greedy_mix(cells, 4.25).gpus == 5
    assert exact_mix(cells, 4.25).gpus == 4
    assert greedy_mix(((4, 1.0), (8, 4.0)), 3.9).gpus == 16
    assert exact_mix(((4, 1.0), (8, 4.0)), 3.9).gpus == 8


def test_cells_that_serve_nothing_are_passed_over() -> None:
    rates = {1: 0.0, 2: 0.0, 4: 3.0, 8: 5.0}
    cells = efficient_cells(rates.__getitem__, 8)
    assert cells == ((4, 3.0),)
    assert greedy_mix(((1, 0.0), *cells), 7.0).gpus == 12
    with pytest.raises(InputError, match="no cell serves anything"):
        greedy_mix(((1, 0.0),), 1.0)


def test_only_cells_that_beat_the_last_efficient_one_stay() -> None:
    rates = {1: 1.0, 2: 1.9, 4: 4.5, 8: 9.0}
    assert efficient_cells(rates.__getitem__, 8) == ((1, 1.0), (4, 4.5))


def test_statistics_find_worse_greedy_mixes() -> None:
    statistics = compare_mixes(500, seed=1)
    assert 0.05 < statistics.share < 0.5
    assert statistics.worst > 1.2
    assert statistics == compare_mixes(500, seed=1)


@given(
    st.lists(st.tuples(st.sampled_from((1, 2, 3, 4)), st.floats(0.1, 5.0)), min_size=1, max_size=3),
    st.floats(0.05, 8.0),
)
def test_exact_mix_is_the_fewest_gpus(cells: list[tuple[int, float]], target: float) -> None:
    most = int(target / min(rate for _, rate in cells)) + 2
    gpus = min(
        sum(n * g for n, (g, _) in zip(counts, cells, strict=True))
        for counts in itertools.product(range(min(most, 90)), repeat=len(cells))
        if sum(n * r for n, (_, r) in zip(counts, cells, strict=True)) >= target * (1 - 1e-9)
    )
    mix = exact_mix(cells, target)
    assert mix.gpus == gpus
    assert mix.rate_per_s >= target * (1 - 1e-9)
    assert greedy_mix(cells, target).gpus >= gpus
