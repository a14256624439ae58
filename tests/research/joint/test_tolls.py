"""The bound from tolls: never above the optimum; routes, and what opening adds, against programmes."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from atoll.solve.joint.joint_problem import Floats, JointProblem
from research.joint.exact.candidates import Candidates
from research.joint.exact.integer_program import JointProgram
from research.joint.exact.toll_routes import Tolls, TollTable, TollWork
from research.joint.exact.tolls import raise_tolls
from tests.seeds import seeds
from tests.solve.joint.small_problems import paper_optimum, random_problem

pytestmark = pytest.mark.slow
"""Its kernels take most of a minute to compile, and nothing but benchmarks calls them."""


def _table(problem: JointProblem, columns: Candidates) -> TollTable:
    return TollTable(
        columns.rent,
        problem.weights_gb[columns.model],
        np.ascontiguousarray(columns.load.T),
        np.ascontiguousarray(columns.cache.T),
        np.ascontiguousarray((columns.delay * problem.delay_usd).T),
        np.ascontiguousarray((columns.delay / problem.delay_limit).T - 1.0),
        np.ascontiguousarray((columns.error / problem.error_limit).T - 1.0),
        problem.unmet_usd,
        problem.data_stored_gb,
        np.array([problem.horizon_h * problem.storage_usd, problem.budget, problem.storage_gb]),
    )


def _raised(problem: JointProblem, passes: int = 200) -> tuple[float, Tolls, TollWork]:
    columns = Candidates.of(problem)
    types, number = problem.shape[0], columns.number
    tolls = Tolls(
        np.tile(columns.rent / types, (types, 1)), np.zeros(number), np.zeros(number), np.zeros(2)
    )
    bound, work = raise_tolls(
        _table(problem, columns),
        tolls,
        opened=0,
        cut=np.inf,
        target=problem.budget + float(problem.unmet_usd.sum()),
        passes=passes,
        rate=1.0,
    )
    return bound, tolls, work


@pytest.mark.parametrize("seed", seeds(6))
def test_the_bound_is_below_the_optimum_and_passes_raise_it(seed: int) -> None:
    problem = random_problem(seed)
    first, best = _raised(problem, passes=1)[0], _raised(problem)[0]
    optimum = paper_optimum(problem)
    assert first <= best * (1.0 + 1e-9)
    assert best <= optimum * (1.0 + 1e-7)
    assert best >= 0.5 * optimum


@pytest.mark.parametrize("seed", seeds(4))
def test_tolls_split_the_rent(seed: int) -> None:
    problem = random_problem(seed)
    _, tolls, _ = _raised(problem)
    rent = Candidates.of(problem).rent
    assert min(float(part.min()) for part in tolls) >= 0.0
    assert tolls.placed.sum(axis=0) + tolls.load + tolls.cache == pytest.approx(rent)


def _cheapest(fixed: Floats, part: Floats, late: Floats, wrong: Floats, unmet: float) -> float:
    """One type as an integer program: shares, placements, the rest unserved."""
    number = len(fixed)
    cost = np.concatenate([part - unmet, fixed])
    rows = np.zeros((3 + number, 2 * number))
    rows[0, :number] = 1.0
    rows[1, :number] = late + 1.0
    rows[2, :number] = wrong + 1.0
    rows[3:, :number], rows[3:, number:] = np.eye(number), -np.eye(number)
    top = np.concatenate([np.ones(3), np.zeros(number)])
    found = milp(
        cost,
        constraints=LinearConstraint(rows, -np.inf, top),
        bounds=Bounds(0.0, 1.0),
        integrality=np.repeat([0, 1], number),
        options={"mip_rel_gap": 1e-9},
    )
    return unmet + float(found.fun)


@pytest.mark.parametrize("seed", seeds(8))
def test_routes_are_the_cheapest_of_each_type(seed: int) -> None:
    problem = random_problem(seed, types=2, models=4, tiers=2)
    # With both limits near what candidates have, routes over two and three are needed.
    table = _table(problem, Candidates.of(problem))
    bound, tolls, _ = _raised(problem, passes=20)
    more = 1.0 + tolls.totals[0] / problem.budget
    gb_usd = table.limits[0] * more + tolls.totals[1] / problem.storage_gb
    total = -float(tolls.totals.sum())
    for i in range(2):
        room = more * (tolls.load * table.load[i] + tolls.cache * table.cache[i])
        total += _cheapest(
            table.keep * gb_usd + more * tolls.placed[i],
            table.data[i] * gb_usd + room + table.usd[i],
            table.late[i],
            table.wrong[i],
            float(table.unmet[i]),
        )
    assert bound == pytest.approx(total, rel=1e-6)


def test_routes_over_three_are_found() -> None:
    # One is slow, one is wrong, and the third, which is neither, is dear: a third each is cheapest.
    one = np.full((1, 3), 0.1)
    table = TollTable(
        rent=np.ones(3),
        keep=np.zeros(3),
        load=one,
        cache=one,
        usd=np.array([[0.0, 0.0, 100.0]]),
        late=np.array([[2.0, -1.0, -1.0]]),
        wrong=np.array([[-1.0, 2.0, -1.0]]),
        unmet=np.array([1000.0]),
        data=np.zeros(1),
        limits=np.array([0.01, 100.0, 100.0]),
    )
    tolls = Tolls(np.ones((1, 3)), np.zeros(3), np.zeros(3), np.zeros(2))
    bound, work = raise_tolls(table, tolls, opened=0, cut=np.inf, target=1e3, passes=1, rate=1.0)
    assert bound == pytest.approx(3.0 + 100.0 / 3.0)
    assert sorted(work.picks[0]) == [0, 1, 2]
    assert work.parts[0] == pytest.approx([1.0 / 3.0] * 3)
    # Open, they cost their rent whoever uses them.
    tolls = Tolls(np.zeros((1, 3)), np.zeros(3), np.zeros(3), np.zeros(2))
    bound, _ = raise_tolls(table, tolls, opened=3, cut=np.inf, target=1e3, passes=1, rate=1.0)
    assert bound == pytest.approx(3.0 + 100.0 / 3.0)


@pytest.mark.parametrize("seed", seeds(4))
def test_what_opening_adds_is_below_what_it_costs(seed: int) -> None:
    problem = random_problem(seed)
    columns = Candidates.of(problem)
    bound, _, work = _raised(problem)
    assert (work.spare > 0.0).any()
    every = np.arange(columns.number)
    for f in every[:: max(1, columns.number // 6)]:
        program = JointProgram(problem, columns, every, opened=np.array([f]))
        answer, mip = program.solve(None, 1e-6, None, None, np.inf)
        assert answer is not None
        assert bound + work.spare[f] <= mip.objective * (1.0 + 1e-6)
