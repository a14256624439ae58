"""Under shortage there is always an answer: the most that can be served, within the time there is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from atoll.solve import deadline
from atoll.solve.deadline import Deadline
from atoll.solve.lp import LinearProgram, LpResult, MipResult
from atoll.solve.rent import mix_master, relaxation, rent_search, scarcity
from atoll.solve.rent.allocation import rent_model
from atoll.solve.rent.allocation_types import BOTH, Allocation, AllocationLimits, Shortage
from atoll.solve.rent.incumbent import Incumbent, Target, Work
from atoll.solve.rent.items import Solution
from atoll.solve.rent.relaxation import Evaluation
from atoll.solve.rent.scarcity import EXACT
from tests.seeds import examples, seeds
from tests.solve.rent.allocating import solve
from tests.solve.rent.cases import (
    Case,
    model_of,
    only,
    optimum,
    random_case,
    service,
    supply_of,
)

CLOSE = 1.1 * EXACT


def scarce_case(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    case = random_case(
        seed, services=int(rng.integers(1, 4)), regions=int(rng.integers(1, 3)),
        pairs=bool(rng.integers(2)), running=bool(rng.integers(2)), most=2,
        scarce=float(rng.choice([1.5, 3.0, 10.0])),
    )  # fmt: skip
    limits = AllocationLimits(
        budget=float(rng.uniform(3.0, 20.0)) if rng.random() < 0.25 else None,
        max_nodes=int(rng.integers(1, 8)) if rng.random() < 0.25 else None,
        spread=2 if len(case.supply.regions) > 1 and rng.random() < 0.2 else 1,
    )
    return replace(case, limits=limits)


def check_common(case: Case, answer: Allocation) -> None:
    """As many services as can stand, those of most weight, and of these the largest common fraction."""
    if answer.status in ("optimal", "feasible"):
        assert np.isfinite(optimum(case))
        return
    weights = np.array([asked.weight for asked in case.services])
    some = [int(m) for m in np.flatnonzero(answer.served > 0.0)]
    stand = len(some) + 0.5 * float(weights[some].sum() / weights.sum())
    # All weights together count for less than one more service.
    assert stand == pytest.approx(optimum(case, "stand"), abs=0.2)
    if not some:
        assert answer.instances == ()
        return
    most = optimum(only(case, some), "common")
    assert answer.served[some].min() == pytest.approx(most, abs=CLOSE)
    assert answer.fraction_bound >= most - 1e-6
    assert answer.status == "partial"
    check_cost(case, answer)


def check_cost(case: Case, answer: Allocation) -> None:
    """What is served is served at the least cost."""
    some = [int(m) for m in np.flatnonzero(answer.served > 0.0)]
    asked = (answer.served[some] * (1.0 - 1e-8)).tolist()
    least = optimum(only(case, some), "cost", asked)
    # A solver's feasibility tolerance may decide whether a fraction that just fits is met.
    looser = optimum(only(case, some), "cost", [f * (1.0 - 1e-5) for f in asked])
    assert answer.objective <= least * (1.0 + 3e-6) + 1e-6
    assert answer.objective >= looser * (1.0 - 3e-6) - 1e-6
    assert answer.bound <= least + 1e-5


@examples(12)
@given(st.integers(0, 100_000))
def test_the_largest_common_fraction(seed: int) -> None:
    case = scarce_case(seed)
    check_common(case, solve(case))


@pytest.mark.slow
@examples(6)
@given(st.integers(0, 100_000))
def test_the_largest_weighted_mean(seed: int) -> None:
    case = scarce_case(seed)
    answer = solve(case, "priority")
    if answer.status != "partial":
        return
    weights = np.array([asked.weight for asked in case.services])
    able = [m for m in range(len(weights)) if optimum(only(case, [m]), "stand") > 0.5]
    assert able
    served = float(weights @ answer.served / weights[able].sum())
    most = optimum(only(case, able), "weighted")
    assert served == pytest.approx(most, abs=CLOSE)
    check_cost(case, answer)


@examples(8)
@given(st.integers(0, 100_000))
def test_failing_is_saying_that_not_all_can_be_served(seed: int) -> None:
    case = scarce_case(seed)
    answer = solve(case, "fail")
    if np.isfinite(optimum(case)):
        assert answer.status == "optimal"
    else:
        assert (answer.status, answer.instances, answer.objective) == ("infeasible", (), 0.0)


@pytest.mark.parametrize("seed", seeds(6))
def test_the_largest_common_fraction_of_many_items(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Chosen items instead of all of them: what is answered is still served, and proven."""
    monkeypatch.setattr(rent_search, "SMALL", 0)
    monkeypatch.setattr(scarcity, "SMALL", 0)
    case = random_case(seed, scarce=2.0)
    answer = solve(case)
    if answer.status == "partial":
        some = [int(m) for m in np.flatnonzero(answer.served > 0.0)]
        most = optimum(only(case, some), "common")
        assert answer.served[some].min() == pytest.approx(most, abs=CLOSE)
        assert answer.fraction_bound >= most - 1e-6
        check_cost(case, answer)


def test_who_is_served_worst_chooses_anew_with_two_others() -> None:
    """Of three services that is the whole problem: from any start the largest common share is found."""
    raised = 0
    for seed in range(8):
        case = random_case(seed, services=3, scarce=2.0)
        model = replace(model_of(case), start=np.zeros(len(model_of(case).start)))
        standing = Incumbent(Target(0.0, EXACT), Deadline(60.0), Work(50_000.0))
        weights = np.full(3, 1.0 / 3.0)
        some, start = scarcity._stand_together(
            rent_model(
                case.services, case.supply, case.limits, (), 0.0, dict.fromkeys(range(3), 1e-6)
            ),
            weights,
            standing.deadline,
            standing.work,
            0,
        )
        if len(some) < 3:
            continue
        lacks = 1.0 - scarcity._shares(model, start).min()
        standing.offer(start, lacks)

        def take(solution: Solution | None, objective: float, _: NDArray[np.float64]) -> None:
            if solution is not None:
                standing.offer(solution, objective)  # noqa: B023

        every = [np.arange(len(items)) for items in model.items]
        scarcity._raise_lowest(model, every, weights, standing, take, 0)
        assert 1.0 - standing.objective == pytest.approx(optimum(case, "common"), abs=CLOSE)
        raised += standing.objective < lacks - 0.01
    assert raised >= 2


def one(*services: tuple[str, dict[str, int], float, float], nodes: dict[str, int]) -> Case:
    """Services of (name, nodes of its only template, demand, weight) that carry 10 an instance."""
    supply = supply_of([(0, gpu, 1, False, 1.0, number, False) for gpu, number in nodes.items()])
    return Case(
        tuple(
            service(name, supply, demand, {BOTH: [(template, 10.0)]}, weight=weight)
            for name, template, demand, weight in services
        ),
        supply,
    )


def test_services_without_room_are_named() -> None:
    case = one(
        ("a", {"A:1": 1}, 20.0, 1.0),
        ("b", {"A:1": 1, "B:1": 1}, 20.0, 1.0),
        ("c", {"B:1": 1}, 20.0, 1.0),
        nodes={"A": 1, "B": 1},
    )
    answer = solve(case)
    assert answer.status == "partial"
    assert answer.served == pytest.approx([0.5, 0.0, 0.5])
    assert answer.fraction_bound == pytest.approx(0.5, abs=1e-4)
    assert "no room for b beside the others" in answer.binding


def test_of_equally_many_services_those_of_more_weight_are_served() -> None:
    case = one(("a", {"A:1": 1}, 10.0, 1.0), ("b", {"A:1": 1}, 10.0, 3.0), nodes={"A": 1})
    assert solve(case).served.tolist() == [0.0, 1.0]


def test_priority_serves_the_weighty_service_first() -> None:
    case = one(("a", {"A:1": 1}, 40.0, 1.0), ("b", {"A:1": 1}, 40.0, 5.0), nodes={"A": 5})
    assert solve(case).served == pytest.approx([0.5, 0.5])
    first = solve(case, "priority")
    assert first.served == pytest.approx([0.25, 1.0])
    assert first.fraction_bound == pytest.approx((0.25 + 5.0) / 6.0, abs=1e-4)
    failed = solve(case, "fail")
    assert failed.status == "infeasible"
    assert failed.binding == ("availability of A:1 in r0",)


def test_a_budget_may_force_partial_service() -> None:
    case = one(("a", {"A:1": 1}, 40.0, 1.0), nodes={"A": 9})
    answer = solve(replace(case, limits=AllocationLimits(budget=3.0)))
    assert answer.served == pytest.approx([0.75])
    assert "budget" in answer.binding


@pytest.mark.parametrize("on_shortage", ["fraction", "priority", "fail"])
@pytest.mark.parametrize("limits", [AllocationLimits(), AllocationLimits(budget=9.0, max_nodes=4)])
@pytest.mark.parametrize("scarce", [0.4, 4.0])
def test_no_time_at_all(limits: AllocationLimits, on_shortage: Shortage, scarce: float) -> None:
    """Whatever there is to say is valid, and says that it was cut short."""
    case = replace(random_case(11, services=3, scarce=scarce), limits=limits)
    answer = solve(case, on_shortage, deadline_s=0.0)
    assert answer.cut_short
    least = optimum(case)
    if answer.status in ("optimal", "feasible"):
        assert answer.bound <= least + 1e-6 <= answer.objective + 2e-6


class Clock:
    """Every look at it takes a tick; an engine run takes a good part of the time it is given."""

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
    solve_mip, solve_lp = LinearProgram.solve_mip, LinearProgram.solve

    def slow_mip(
        self: LinearProgram,
        *,
        time_limit_s: float,
        gap: float,
        absolute_gap: float = 1e-9,
        start: NDArray[np.float64] | None = None,
        node_limit: int | None = None,
        iteration_limit: int = 100_000,
    ) -> MipResult:
        small = self.columns < 60  # the cheapest machines for what is chosen: at once
        found = solve_mip(
            self, time_limit_s=min(5.0, time_limit_s), gap=gap, absolute_gap=absolute_gap,
            start=start, node_limit=node_limit, iteration_limit=iteration_limit,
        )  # fmt: skip
        if not small:
            clock.asked.append(time_limit_s)
            clock.now += 0.3 * time_limit_s
        return found

    def slow_lp(self: LinearProgram, time_limit_s: float = np.inf) -> LpResult:
        clock.asked.append(time_limit_s)
        clock.now += min(0.01, time_limit_s)
        return solve_lp(self, time_limit_s)

    monkeypatch.setattr(LinearProgram, "solve_mip", slow_mip)
    monkeypatch.setattr(LinearProgram, "solve", slow_lp)
    return clock


@pytest.mark.parametrize("seed", seeds(4))
@pytest.mark.parametrize("deadline_s", [0.2, 1.0, 4.0])
def test_the_deadline_is_kept(clock: Clock, seed: int, deadline_s: float) -> None:
    case = random_case(seed, services=4, scarce=1.3)
    began = clock.now
    answer = solve(case, deadline_s=deadline_s)
    assert clock.now - began <= 1.1 * deadline_s + 2.0
    assert max(clock.asked, default=0.0) <= deadline_s
    if clock.now - began > deadline_s:
        assert answer.cut_short


@pytest.mark.parametrize("on_shortage", ["fraction", "priority"])
@pytest.mark.parametrize("scarce", [0.4, 4.0])
def test_no_bound_is_begun_that_ends_after_the_deadline(
    monkeypatch: pytest.MonkeyPatch, on_shortage: Shortage, scarce: float
) -> None:
    """Where services are very many each bound takes seconds: something simple is served instead."""
    now = [0.0]
    case = random_case(11, services=3, scarce=scarce)
    bounds = relaxation.evaluate

    def slowly(*given: Any) -> Evaluation:
        now[0] += 5.0
        return bounds(*given)

    monkeypatch.setattr(deadline, "_now", lambda: now[0])
    monkeypatch.setattr(mix_master, "evaluate", slowly)
    monkeypatch.setattr(rent_search, "MANY_TABLES", 0)
    each = len(case.services) * len(case.supply.regions)
    monkeypatch.setattr(rent_search, "_RATE_S", 5.0 / each)
    answer = solve(case, on_shortage, deadline_s=4.0)
    assert now[0] <= 4.0
    assert answer.cut_short
    assert answer.status in ("feasible", "partial")
    assert float(answer.served.max()) > 0.0
