"""The allocator against trying everything, and case by case."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from atoll.core.errors import UsageError
from atoll.solve.rent.allocation import allocate
from atoll.solve.rent.types import Allocation, AllocationLimits, RunningColumn
from tests.solve.rent.cases import (
    Case,
    best_fraction,
    brute_force,
    faults,
    random_case,
    role,
    supply_of,
    with_spot,
)


def solve(case: Case, **options: object) -> Allocation:
    settings: dict[str, object] = {"gap": 1e-9, "deadline_s": 20.0, **options}
    answer = allocate(
        case.roles,
        case.supply,
        case.limits,
        init_penalty=case.init_penalty,
        running=case.running,
        **settings,  # type: ignore[arg-type]
    )
    assert faults(case, answer) == []
    return answer


def check_exact(case: Case) -> Allocation:
    answer = solve(case)
    least = brute_force(case)
    if np.isfinite(least):
        assert answer.status == "optimal"
        assert answer.objective == pytest.approx(least, abs=1e-7)
        assert answer.bound <= least + 1e-7
    elif answer.status == "infeasible":
        assert answer.instances == ()
    else:
        assert answer.status == "partial"
    return answer


@pytest.mark.parametrize("seed", range(30))
def test_equal_to_brute_force(seed: int) -> None:
    check_exact(random_case(seed))


@pytest.mark.parametrize("seed", range(8))
def test_equal_to_brute_force_one_role(seed: int) -> None:
    check_exact(random_case(seed, roles=1, templates=5, most=4))


@pytest.mark.parametrize("seed", range(8))
def test_equal_to_brute_force_with_spot_share(seed: int) -> None:
    case = random_case(seed, templates=3, types=2)
    rng = np.random.default_rng(seed)
    spot = with_spot(case.supply, 0.4, rng.integers(0, 3, len(case.supply.usd)).tolist())
    limits = AllocationLimits(spot_share=float(rng.uniform(0.0, 0.7)))
    check_exact(replace(case, supply=spot, limits=limits))


@pytest.mark.parametrize("seed", range(8))
def test_equal_to_brute_force_with_limits(seed: int) -> None:
    case = random_case(seed, templates=3)
    plain = solve(case)
    nodes = int(plain.offers_used.sum())
    for limits in (
        AllocationLimits(max_nodes=max(1, nodes - seed % 3)),
        AllocationLimits(budget=plain.usd_per_hour * (1.05 - 0.1 * (seed % 2))),
        AllocationLimits(spread=2),
    ):
        check_exact(replace(case, limits=limits))


@pytest.mark.parametrize("seed", range(8))
def test_equal_to_brute_force_with_running_instances(seed: int) -> None:
    case = random_case(seed, templates=3)
    rng = np.random.default_rng(seed)
    running = []
    for r, asked in enumerate(case.roles):
        t = int(rng.integers(len(asked.throughput)))
        running.append(
            RunningColumn(r, int(rng.integers(2)), asked.counts[t], int(rng.integers(1, 3)))
        )
    check_exact(replace(case, running=tuple(running), init_penalty=float(rng.uniform(0.0, 0.5))))


@pytest.mark.parametrize("seed", range(10))
def test_scarce_serves_the_largest_common_fraction(seed: int) -> None:
    case = random_case(seed, templates=3, most=2)
    case = replace(case, roles=tuple(replace(r, demand=r.demand * 2.5) for r in case.roles))
    answer = solve(case)
    most = best_fraction(case)
    assert answer.fraction_bound >= most - 1e-7
    if 0.0 < most < 1.0:
        assert answer.status == "partial"
        assert answer.served.min() >= most - 1e-4
        if answer.served.min() == pytest.approx(most, abs=1e-9):
            assert answer.objective == pytest.approx(brute_force(case, most), abs=1e-6)
        assert answer.binding


SMALL = Case(
    (
        role("a", [[1, 0], [0, 1]], [10.0, 25.0], 30.0),
        role("b", [[2, 0], [1, 1]], [15.0, 30.0], 30.0),
    ),
    supply_of([[4, 3], [3, 3]], [[1.0, 2.2], [1.1, 2.0]], [1, 2]),
)


def test_plenty_takes_the_cheapest_of_each_role() -> None:
    answer = check_exact(SMALL)
    assert answer.status == "optimal"
    assert answer.binding == ()
    assert np.all(answer.node_usd == 0.0)
    assert np.all(answer.demand_usd > 0.0)


def test_no_demand_costs_nothing() -> None:
    idle = replace(SMALL, roles=tuple(replace(r, demand=0.0) for r in SMALL.roles))
    answer = solve(idle)
    assert answer.status == "optimal"
    assert answer.objective == 0.0
    assert answer.served.tolist() == [1.0, 1.0]
    assert solve(replace(SMALL, roles=())).objective == 0.0


def test_one_idle_role_among_others() -> None:
    first, second = SMALL.roles
    check_exact(replace(SMALL, roles=(replace(first, demand=0.0), second)))


def test_nothing_available() -> None:
    none = replace(SMALL, supply=supply_of([[0, 0]], [[1.0, 1.0]], [1, 2]))
    answer = solve(none)
    assert answer.served.tolist() == [0.0, 0.0]
    assert answer.instances == ()
    assert "nothing on offer can serve a" in answer.binding
    assert solve(none, on_shortage="fail").status == "infeasible"


def test_a_role_that_cannot_be_served_does_not_starve_the_others() -> None:
    first, second = SMALL.roles
    stuck = replace(second, allowed=np.array([False, False]))
    answer = solve(replace(SMALL, roles=(first, stuck)))
    assert answer.status == "partial"
    assert answer.served.tolist() == [1.0, 0.0]


def test_pinned_node_types() -> None:
    first, second = SMALL.roles
    pinned = replace(first, allowed=np.array([True, False]))
    answer = check_exact(replace(SMALL, roles=(pinned, second)))
    assert all(c.counts[1] == 0 for c in answer.instances if c.role == 0)


def test_thousands_of_equal_nodes() -> None:
    many = Case(
        (role("a", [[1], [2], [4]], [10.0, 21.0, 43.0], 123456.0),),
        supply_of([[20000]], [[1.0]], [1]),
    )
    answer = solve(many, gap=1e-3)
    assert answer.status == "optimal"
    assert answer.objective == pytest.approx(123456.0 / 10.75, rel=1e-3)
    scarce = solve(replace(many, supply=supply_of([[9000]], [[1.0]], [1])), gap=1e-3)
    assert scarce.status == "partial"
    assert scarce.served[0] == pytest.approx(9000 * 10.75 / 123456.0, abs=2e-4)


def test_two_roles_that_need_the_same_node() -> None:
    one = Case(
        (role("a", [[1]], [10.0], 10.0), role("b", [[1]], [10.0], 10.0, weight=3.0)),
        supply_of([[1]], [[1.0]], [1]),
    )
    answer = solve(one)
    assert answer.status == "partial"
    assert answer.served.tolist() == [0.0, 1.0]


def test_priority_serves_the_weighty_role_first() -> None:
    short = Case(
        (role("a", [[1]], [10.0], 40.0), role("b", [[1]], [10.0], 40.0, weight=5.0)),
        supply_of([[5]], [[1.0]], [1]),
    )
    common = solve(short)
    assert common.served.tolist() == [0.5, 0.5]
    first = solve(short, on_shortage="priority")
    assert first.served.tolist() == [0.25, 1.0]
    assert first.fraction_bound == pytest.approx((0.25 + 5.0) / 6.0, abs=1e-4)
    failed = solve(short, on_shortage="fail")
    assert failed.status == "infeasible"
    assert failed.instances == ()
    assert failed.binding == ("availability of t0 in r0",)


def test_a_budget_may_force_partial_service() -> None:
    answer = solve(replace(SMALL, limits=AllocationLimits(budget=3.0)))
    assert answer.status == "partial"
    assert answer.usd_per_hour <= 3.0 + 1e-9
    assert "budget" in answer.binding


def test_equal_running_instances_are_kept() -> None:
    twins = Case(
        (role("a", [[1, 0], [0, 1]], [10.0, 10.0], 30.0),),
        supply_of([[9, 9], [9, 9]], [[1.0, 1.0], [1.0, 1.0]], [1, 1]),
        running=(RunningColumn(0, 1, np.array([0, 1], np.int8), 2),),
    )
    answer = solve(twins)
    assert answer.objective == pytest.approx(3.0)
    assert sum(c.kept for c in answer.instances) == 2


def test_a_running_multiset_without_a_template_can_be_kept() -> None:
    odd = np.array([3, 1], np.int8)
    case = replace(SMALL, init_penalty=1.0, running=(RunningColumn(0, 0, odd, 1, throughput=40.0),))
    answer = solve(case)
    kept = [c for c in answer.instances if c.template is None]
    assert len(kept) == 1
    assert kept[0].counts.tolist() == [3, 1]
    with pytest.raises(UsageError, match="without a template"):
        solve(replace(case, running=(RunningColumn(0, 0, odd, 1),)))


def test_a_running_instance_whose_nodes_are_gone_is_forgotten() -> None:
    gone = RunningColumn(0, 0, np.array([5, 0], np.int8), 1, throughput=100.0)
    assert solve(replace(SMALL, running=(gone,))).status == "optimal"


def test_one_more_scarce_node_saves_what_it_replaces() -> None:
    dear = Case(
        (role("a", [[1, 0], [0, 1]], [10.0, 10.0], 40.0),),
        supply_of([[2, 9]], [[1.0, 3.0]], [1, 1]),
    )
    answer = solve(dear)
    more = solve(replace(dear, supply=supply_of([[3, 9]], [[1.0, 3.0]], [1, 1])))
    assert answer.node_usd[0].tolist() == pytest.approx([2.0, 0.0])
    assert answer.objective - more.objective == pytest.approx(2.0)
    assert answer.demand_usd[0] == pytest.approx(0.3)
    assert answer.binding == ("availability of t0 in r0",)


def test_progress_is_told() -> None:
    seen: list[tuple[float, float, float]] = []
    answer = solve(random_case(3), log=lambda s, u, b: seen.append((s, u, b)))
    assert seen[-1][1] == pytest.approx(answer.objective)
    assert all(bound <= best for _, best, bound in seen)


def test_bad_input_is_refused() -> None:
    first, second = SMALL.roles
    for bad in (
        replace(SMALL, roles=(replace(first, demand=-1.0), second)),
        replace(SMALL, limits=AllocationLimits(spread=0)),
        replace(SMALL, init_penalty=-1.0),
        replace(SMALL, roles=(replace(first, throughput=first.throughput[:1]), second)),
        replace(SMALL, supply=replace(SMALL.supply, usd=-SMALL.supply.usd)),
    ):
        with pytest.raises(UsageError):
            solve(bad)
