"""Limits on work end linear and integer solves at the same point each time; the clock is told apart."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.solve.lp import LinearProgram, MipResult, Sparse
from tests.seeds import examples

ROWS, COLUMNS = 20, 40
SMALL = (10, 20)


def covering(seed: int, rows: int = ROWS, columns: int = COLUMNS) -> LinearProgram:
    """Return a covering program whose integer optimum takes hundreds of nodes."""
    rng = np.random.default_rng(seed)
    program = LinearProgram()
    program.add_columns(
        rng.integers(10, 100, columns).astype(np.float64),
        np.zeros(columns),
        np.full(columns, 20.0),
        Sparse.of(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0), columns),
    )
    taken = [np.sort(rng.choice(columns, columns // 2, replace=False)) for _ in range(rows)]
    values = rng.integers(10, 100, (rows, columns // 2)).astype(np.float64)
    program.add_rows(
        3.0 * values.sum(axis=1) + 0.5,
        np.full(rows, np.inf),
        Sparse.of(
            np.repeat(np.arange(rows), columns // 2), np.concatenate(taken), values.ravel(), rows
        ),
    )
    program.set_integer(np.arange(columns))
    return program


def solve_within(seed: int, iterations: int | None, nodes: int | None = None) -> MipResult:
    return covering(seed).solve_mip(
        time_limit_s=600.0, gap=1e-6, node_limit=nodes, iteration_limit=iterations
    )


def same(one: MipResult, other: MipResult) -> bool:
    assert one.values is not None
    assert other.values is not None
    return (one.status, one.objective, one.bound, one.nodes, one.iterations) == (
        other.status,
        other.objective,
        other.bound,
        other.nodes,
        other.iterations,
    ) and np.array_equal(one.values, other.values)


@pytest.mark.parametrize("iterations", [500, pytest.param(2000, marks=pytest.mark.slow)])
def test_an_iteration_limit_ends_at_the_same_point(iterations: int) -> None:
    first, second = solve_within(3, iterations), solve_within(3, iterations)

    assert first.status == "stopped"
    assert not first.timed_out
    assert same(first, second)


@pytest.mark.slow
def test_a_node_limit_ends_at_the_same_point() -> None:
    first, second = solve_within(3, None, 20), solve_within(3, None, 20)

    assert first.status == "stopped"
    assert not first.timed_out
    assert 20 <= first.nodes <= 40
    assert same(first, second)


@examples(4)
@given(seed=st.integers(0, 50), iterations=st.sampled_from([50, 200, 1000]))
def test_what_a_limit_leaves_is_feasible_and_its_bound_holds(seed: int, iterations: int) -> None:
    stopped = covering(seed, *SMALL).solve_mip(
        time_limit_s=600.0, gap=1e-6, iteration_limit=iterations
    )
    whole = covering(seed, *SMALL).solve_mip(time_limit_s=600.0, gap=1e-6)

    assert whole.status == "optimal"
    assert stopped.bound <= whole.objective + 1e-6
    assert stopped.objective >= whole.objective - 1e-6
    assert stopped.values is not None
    assert np.allclose(stopped.values, np.round(stopped.values), atol=1e-6)
    fixed = covering(seed, *SMALL)
    fixed.set_bounds(np.arange(SMALL[1]), stopped.values, stopped.values)
    assert fixed.solve().status == "optimal"
    assert stopped.iterations <= whole.iterations


@pytest.mark.slow
def test_more_work_comes_no_less_far() -> None:
    results = [solve_within(3, limit) for limit in (500, 2000, 8000)]

    for less, more in itertools.pairwise(results):
        assert more.objective <= less.objective
        assert more.bound >= less.bound
        assert more.iterations > less.iterations


def test_a_start_is_never_lost_to_a_limit() -> None:
    start = np.full(COLUMNS, 20.0)
    result = covering(3).solve_mip(time_limit_s=600.0, gap=0.0, start=start, iteration_limit=1)

    assert result.values is not None
    assert result.objective < np.inf


def test_a_limit_on_simplex_iterations_stops_and_goes_on_from_there() -> None:
    whole = covering(0, 60, 200).solve()
    program = covering(0, 60, 200)
    first = program.solve(iteration_limit=10)

    assert whole.status == "optimal"
    assert whole.iterations > 10
    assert first.status == "stopped"
    assert first.iterations == 10
    assert not first.timed_out
    assert program.solve().objective == pytest.approx(whole.objective)


def test_the_clock_is_told_apart_from_the_work() -> None:
    late = covering(3).solve_mip(time_limit_s=0.01, gap=1e-6)

    assert late.status == "stopped"
    assert late.timed_out
    assert covering(3).solve_mip(time_limit_s=0.0, gap=1e-6).timed_out
    assert covering(0, 60, 200).solve(0.0).timed_out
    assert not solve_within(3, None).timed_out


def test_an_interrupt_from_the_keyboard_ends_an_integer_solve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = iter([0.0])

    def clock() -> float:
        for value in calls:
            return value
        raise KeyboardInterrupt

    monkeypatch.setattr("atoll.solve.lp.perf_counter", clock)
    with pytest.raises(KeyboardInterrupt):
        covering(3).solve_mip(time_limit_s=600.0, gap=1e-6)


def test_equal_instances_are_solved_to_their_best() -> None:
    # Three ways in two phases on slices of one, one and two GPUs; with a tolerance of 1e-9 HiGHS 1.15
    # called 0.114 and more the least that is left unserved here.
    shares = [
        ((0.885994805323297, 0.442997402661649, 0.0690797434727747),) * 2,
        ((1.0, 1.0, 1.0),) * 2,
        (
            (0.854023283768617, 0.427011641884309, 0.0666233920677237),
            (0.854023283768617, 0.427011641884309, 0.084786428807594),
        ),
    ]
    matrix, lower, upper = np.zeros((16, 30)), np.zeros(16), np.full(16, np.inf)
    matrix[[0, 1, 2], [2, 3, 4]] = 1.0  # slices, of two machines with one GPU and two with two
    matrix[3, [0, 2]] = 1.0, -1.0
    matrix[4, [1, 3, 4]] = 2.0, -1.0, -2.0
    for way, phases in enumerate(shares):
        matrix[5 + way, [5 + way, 9 + way]] = 1.0
        lower[5 + way] = 1.0
        for phase, each in enumerate(phases):
            items = 12 + 6 * way + 3 * phase + np.arange(3)
            matrix[8 + 2 * way + phase, [5 + way, *items]] = -1.0, *each
            matrix[[2, 1, 0], items] = -1.0
    for row, way in ((14, 0), (15, 1)):
        matrix[row, [8, 9 + way, 11]] = -1.0, 1.0, 1.0
        lower[row] = upper[row] = 1.0
    cost = np.zeros(30)
    cost[8] = 1.0
    highest = np.array([2.0, 2.0, 2.0, 4.0, 2.0, *[1.0] * 7, *[np.inf] * 18])
    program, nothing = LinearProgram(), np.zeros(0, np.int64)
    program.add_columns(cost, np.zeros(30), highest, Sparse.of(nothing, nothing, np.zeros(0), 30))
    rows, columns = np.nonzero(matrix)
    program.add_rows(lower, upper, Sparse.of(rows, columns, matrix[rows, columns], 16))
    program.set_integer(np.array([*range(5), *range(12, 30)]))

    found = program.solve_mip(time_limit_s=600.0, gap=5e-4, absolute_gap=5e-10)

    assert found.objective == pytest.approx(0.0793533, abs=1e-6)
    assert found.bound <= found.objective + 1e-6
