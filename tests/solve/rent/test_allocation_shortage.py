"""Under shortage there is always an answer: the most that can be served, within the time there is."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.solve.lp import LinearProgram, LpResult, MipResult
from atoll.solve.rent.allocation import allocate
from atoll.solve.rent.types import Allocation, AllocationLimits
from tests.solve.rent.cases import (
    Case,
    best_fraction,
    brute_force,
    faults,
    random_case,
    role,
    supply_of,
)


def solve(case: Case, deadline_s: float = 20.0) -> Allocation:
    answer = allocate(case.roles, case.supply, case.limits, deadline_s=deadline_s, gap=1e-9)
    assert faults(case, answer) == []
    return answer


def scarce_case(seed: int, factor: float) -> Case:
    case = random_case(seed, roles=3, templates=3, types=2, most=2)
    return replace(case, roles=tuple(replace(r, demand=r.demand * factor) for r in case.roles))


def only(case: Case, some: tuple[int, ...]) -> Case:
    return replace(case, roles=tuple(case.roles[r] for r in some))


def most_roles(case: Case) -> int:
    """How many roles can have an instance at once, by trying all choices of roles."""
    for number in range(len(case.roles), 0, -1):
        for some in itertools.combinations(range(len(case.roles)), number):
            if np.isfinite(brute_force(only(case, some), 1e-9)):
                return number
    return 0


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([1.5, 3.0, 10.0]))
def test_as_many_roles_as_can_be_and_their_largest_common_fraction(
    seed: int, factor: float
) -> None:
    case = scarce_case(seed, factor)
    answer = solve(case)
    some = tuple(int(r) for r in np.flatnonzero(answer.served > 0.0))
    assert len(some) == most_roles(case)
    if not some:
        return
    most = best_fraction(only(case, some))
    assert answer.served[list(some)].min() == pytest.approx(most, abs=1.1e-4)
    assert answer.fraction_bound >= most - 1e-9
    if len(some) < len(case.roles):
        assert answer.status == "partial"
    if answer.status == "partial":
        share = float(answer.served[list(some)].min())
        assert answer.bound <= brute_force(only(case, some), share) + 1e-6
        assert answer.objective == pytest.approx(brute_force(only(case, some), share), abs=1e-6)


def test_roles_without_room_are_named() -> None:
    case = Case(
        (
            role("a", [[1, 0]], [10.0], 20.0),
            role("b", [[1, 1]], [10.0], 20.0),
            role("c", [[0, 1]], [10.0], 20.0),
        ),
        supply_of([[1, 1]], [[1.0, 1.0]], [1, 1]),
    )
    answer = solve(case)
    assert answer.status == "partial"
    assert answer.served.tolist() == [0.5, 0.0, 0.5]
    assert answer.fraction_bound == pytest.approx(0.5, abs=1e-4)
    assert "no room for b beside the others" in answer.binding


def test_of_equally_many_roles_those_of_more_weight_are_served() -> None:
    case = Case(
        (role("a", [[1]], [10.0], 10.0), role("b", [[1]], [10.0], 10.0, weight=2.0)),
        supply_of([[1]], [[1.0]], [1]),
    )
    assert solve(case).served.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("limits", [AllocationLimits(), AllocationLimits(budget=9.0, max_nodes=4)])
def test_no_time_at_all_still_gives_an_answer(limits: AllocationLimits) -> None:
    case = replace(random_case(11, roles=4, templates=6, types=3, most=4), limits=limits)
    case = replace(case, roles=tuple(replace(r, demand=r.demand * 4.0) for r in case.roles))
    answer = solve(case, deadline_s=0.0)
    assert answer.status == "partial"
    assert answer.instances
    assert answer.fraction_bound >= answer.served[answer.served > 0.0].min()


class Clock:
    """Every look at it takes a tick; an engine run takes all the time it is given."""

    def __init__(self, tick_s: float) -> None:
        self.now, self.tick_s = 0.0, tick_s
        self.asked: list[float] = []

    def __call__(self) -> float:
        self.now += self.tick_s
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(0.002)
    monkeypatch.setattr("time.perf_counter", clock)
    solve_mip = LinearProgram.solve_mip
    solve_lp = LinearProgram.solve

    def slow_mip(
        self: LinearProgram,
        *,
        time_limit_s: float,
        gap: float,
        absolute_gap: float = 1e-9,
        start: np.ndarray | None = None,
        node_limit: int | None = None,
    ) -> MipResult:
        clock.asked.append(time_limit_s)
        found = solve_mip(
            self, time_limit_s=min(5.0, time_limit_s), gap=gap, absolute_gap=absolute_gap,
            start=start, node_limit=node_limit,
        )  # fmt: skip
        clock.now += 0.3 * time_limit_s
        return found

    def slow_lp(self: LinearProgram, time_limit_s: float = np.inf) -> LpResult:
        clock.asked.append(time_limit_s)
        clock.now += min(0.01, time_limit_s)
        return solve_lp(self, time_limit_s)

    monkeypatch.setattr(LinearProgram, "solve_mip", slow_mip)
    monkeypatch.setattr(LinearProgram, "solve", slow_lp)
    return clock


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("deadline_s", [0.2, 1.0, 4.0])
def test_the_deadline_is_kept(clock: Clock, seed: int, deadline_s: float) -> None:
    case = random_case(seed, roles=4, templates=10, types=4, most=3)
    case = replace(case, roles=tuple(replace(r, demand=r.demand * 1.5) for r in case.roles))
    began = clock.now
    answer = allocate(case.roles, case.supply, case.limits, deadline_s=deadline_s, gap=0.0)
    assert clock.now - began <= 1.2 * deadline_s + 0.5
    assert max(clock.asked) <= deadline_s
    assert faults(case, answer) == []
    assert answer.status != "infeasible"
