"""The allocator against an integer program of its own, and case by case."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import UsageError
from atoll.solve.rent import rent_search, scarcity
from atoll.solve.rent.allocation_types import (
    BOTH,
    DECODE,
    PREFILL,
    Allocation,
    AllocationLimits,
    RunningColumn,
)
from tests.seeds import examples, seeds
from tests.solve.rent.allocating import solve
from tests.solve.rent.cases import Case, optimum, random_case, service, supply_of


def check_exact(case: Case) -> Allocation:
    """Solve, and compare with the least cost there is."""
    answer = solve(case)
    least = optimum(case)
    if np.isfinite(least):
        assert answer.status == "optimal"
        # What runs is kept for a hair more than it costs.
        assert answer.objective == pytest.approx(least, rel=3e-6, abs=1e-6)
        assert answer.bound <= least + 1e-6
        assert np.all(answer.served == 1.0)
    else:
        assert answer.status in ("partial", "infeasible")
    assert not answer.cut_short
    return answer


@pytest.fixture
def by_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """No problem is small, so that prices, slacks, cuts and stages have to do what they do at scale."""
    monkeypatch.setattr(rent_search, "SMALL", 0)
    monkeypatch.setattr(scarcity, "SMALL", 0)
    monkeypatch.setattr(rent_search, "_STAGES", (4, 8))


@pytest.mark.parametrize("seed", seeds(16))
def test_equal_to_the_optimum(seed: int) -> None:
    check_exact(random_case(seed, regions=1 + seed % 3))


@pytest.mark.parametrize("seed", seeds(8))
def test_equal_to_the_optimum_over_links(seed: int) -> None:
    check_exact(random_case(seed, pairs=True, regions=2 + seed % 2, scarce=0.8))


@pytest.mark.parametrize("seed", seeds(10))
def test_equal_to_the_optimum_with_running_instances(seed: int) -> None:
    check_exact(random_case(seed, running=True))


@pytest.mark.parametrize("seed", seeds(6))
def test_equal_to_the_optimum_within_limits(seed: int) -> None:
    case = random_case(seed, scarce=0.7, running=seed % 3 == 0)
    plain = solve(case)
    nodes = int(plain.machines.sum())
    for limits in (
        AllocationLimits(max_nodes=max(1, nodes - seed % 2)),
        AllocationLimits(budget=plain.usd_per_hour * (1.1 - 0.2 * (seed % 2))),
    ):
        check_exact(replace(case, limits=limits))


@pytest.mark.parametrize("seed", seeds(8))
def test_equal_to_the_optimum_where_a_budget_is_of_other_prices(seed: int) -> None:
    case = random_case(seed, scarce=0.6, running=seed % 3 == 0)
    rng = np.random.default_rng(seed)
    paid = case.supply.usd * rng.uniform(0.2, 3.0, len(case.supply.usd))
    case = replace(case, supply=replace(case.supply, paid=paid))
    free = solve(case)
    spent = float(paid @ free.machines)
    limited = replace(case, limits=AllocationLimits(budget=spent * (0.75 + 0.05 * seed)))
    answer = check_exact(limited)
    if answer.status == "optimal":
        assert answer.objective >= free.bound - 1e-6


@pytest.mark.parametrize("seed", seeds(8))
def test_equal_to_the_optimum_spread_over_regions(seed: int) -> None:
    case = random_case(seed, regions=2 + seed % 2, scarce=0.5, running=bool(seed % 2), most=4)
    check_exact(replace(case, limits=AllocationLimits(spread=2)))


@pytest.mark.usefixtures("by_stages")
@pytest.mark.parametrize("seed", seeds(12, 30))
def test_equal_to_the_optimum_by_stages(seed: int) -> None:
    case = random_case(seed, running=seed % 2 == 0, pairs=seed % 3 == 1, scarce=0.8)
    answer = solve(case)
    least = optimum(case)
    if np.isfinite(least):
        assert answer.objective == pytest.approx(least, rel=1e-4)
        assert answer.bound <= least + 1e-6
        assert answer.status == "optimal"


@pytest.mark.usefixtures("by_stages")
@pytest.mark.parametrize("seed", seeds(4))
def test_equal_to_the_optimum_spread_by_stages(seed: int) -> None:
    case = random_case(seed, regions=3, scarce=0.5, most=4)
    case = replace(case, limits=AllocationLimits(spread=2))
    answer, least = solve(case), optimum(case)
    if np.isfinite(least) and answer.status == "optimal":
        assert answer.objective == pytest.approx(least, rel=1e-3)
    assert answer.bound <= least + 1e-6


@examples(12)
@given(st.integers(0, 100_000))
def test_anything_goes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    case = random_case(
        seed,
        services=int(rng.integers(1, 4)),
        regions=int(rng.integers(1, 4)),
        pairs=bool(rng.integers(2)),
        running=bool(rng.integers(2)),
        scarce=float(rng.uniform(0.2, 1.5)),
    )
    limits = AllocationLimits(
        budget=float(rng.uniform(5.0, 30.0)) if rng.random() < 0.3 else None,
        max_nodes=int(rng.integers(2, 12)) if rng.random() < 0.3 else None,
        spread=2 if rng.random() < 0.2 else 1,
    )
    check_exact(replace(case, limits=limits))


def permute(case: Case, seed: int) -> Case:
    """The same market and services in another order."""
    rng = np.random.default_rng(seed)
    supply = case.supply
    offers = rng.permutation(len(supply.usd))
    order = rng.permutation(len(case.services))
    to = {int(old): new for new, old in enumerate(offers)}
    return replace(
        case,
        services=tuple(case.services[m] for m in order),
        supply=replace(
            supply,
            region=supply.region[offers],
            gpus=supply.gpus[offers],
            sizes=tuple(supply.sizes[k] for k in offers),
            spot=supply.spot[offers],
            usd=supply.usd[offers],
            available=supply.available[offers],
        ),
        running=tuple(
            replace(
                kept,
                service=int(np.flatnonzero(order == kept.service)[0]),
                gpus=tuple((to[k], gpus) for k, gpus in kept.gpus),
            )
            for kept in case.running
        ),
    )


def said(answer: Allocation) -> tuple[object, ...]:
    return (
        answer.status, answer.instances, answer.machines.tolist(), answer.slices, answer.objective,
        answer.bound, answer.served.tolist(), answer.binding, answer.demand_usd.tolist(),
        answer.node_usd.tolist(), answer.statistics,
    )  # fmt: skip


@pytest.mark.parametrize("seed", seeds(6))
def test_equal_input_gives_equal_answers(seed: int) -> None:
    case = random_case(seed, running=True, pairs=True, scarce=0.6 + 0.3 * (seed % 3))
    first = solve(case)
    assert said(first) == said(solve(case))
    other = solve(permute(case, seed))
    assert other.status == first.status
    if first.status == "optimal":
        assert other.objective == pytest.approx(first.objective, rel=1e-5)


def market(
    *offers: tuple[str, int, float, int],
) -> list[tuple[int, str, int, bool, float, int, bool]]:
    """Offers of one region: (GPU, GPUs of a machine, USD per hour, available)."""
    return [(0, gpu, gpus, False, usd, number, False) for gpu, gpus, usd, number in offers]


PLENTY = supply_of(
    [
        (0, "A", 1, False, 1.0, 4, False), (0, "B", 2, False, 2.2, 3, True),
        (1, "A", 1, False, 1.1, 3, False), (1, "B", 2, False, 2.0, 3, True),
    ],
    regions=2,
)  # fmt: skip
SMALL = Case(
    (
        service("a", PLENTY, 30.0, {BOTH: [({"A:1": 1}, 10.0), ({"B:2": 1}, 25.0)]}),
        service("b", PLENTY, 30.0, {BOTH: [({"A:1": 2}, 15.0), ({"A:1": 1, "B:2": 1}, 30.0)]}),
    ),
    PLENTY,
)


def test_plenty_takes_the_cheapest_of_each_service() -> None:
    answer = check_exact(SMALL)
    assert answer.binding == ()
    assert np.all(answer.node_usd == 0.0)
    assert np.all(answer.demand_usd > 0.0)


def test_no_demand_costs_nothing() -> None:
    def idle(asked: Case) -> Case:
        return replace(
            asked,
            services=tuple(
                replace(s, roles=tuple(replace(r, demand=0.0) for r in s.roles))
                for s in asked.services
            ),
        )

    answer = solve(idle(SMALL))
    assert (answer.status, answer.objective) == ("optimal", 0.0)
    assert answer.served.tolist() == [1.0, 1.0]
    assert solve(replace(SMALL, services=())).objective == 0.0
    half = solve(replace(SMALL, services=(idle(SMALL).services[0], SMALL.services[1])))
    alone = check_exact(replace(SMALL, services=SMALL.services[1:]))
    assert half.objective == pytest.approx(alone.objective)
    assert {c.service for c in half.instances} == {1}


def test_nothing_available() -> None:
    none = replace(SMALL, supply=replace(PLENTY, available=np.zeros(4, np.int64)))
    answer = solve(none)
    assert answer.served.tolist() == [0.0, 0.0]
    assert answer.instances == ()
    assert "nothing on offer can serve a" in answer.binding
    assert solve(none, on_shortage="fail").status == "infeasible"


def test_a_service_that_cannot_be_served_does_not_starve_the_others() -> None:
    first, second = SMALL.services
    stuck = replace(second, allowed=np.zeros(len(PLENTY.kinds), np.bool_))
    answer = solve(replace(SMALL, services=(first, stuck)))
    assert answer.status == "partial"
    assert answer.served.tolist() == [1.0, 0.0]


def test_pinned_kinds() -> None:
    first, second = SMALL.services
    pinned = replace(first, allowed=np.array([kind == "A:1" for kind in PLENTY.kinds]))
    answer = check_exact(replace(SMALL, services=(pinned, second)))
    assert all(c.template == 0 for c in answer.instances if c.service == 0)


def test_two_services_share_a_machine() -> None:
    supply = supply_of(market(("A", 4, 4.0, 1)))
    case = Case(
        tuple(service(f"m{m}", supply, 10.0, {BOTH: [({"A:2": 1}, 10.0)]}) for m in range(2)),
        supply,
    )
    answer = check_exact(case)
    assert answer.objective == pytest.approx(4.0)
    assert answer.slices == {(0, 2): 2}
    dear = replace(supply, available=np.array([2]))
    three = replace(case, services=(*case.services, replace(case.services[0], name="m2")))
    assert check_exact(replace(three, supply=dear)).objective == pytest.approx(8.0)


def test_phases_pair_inside_a_region() -> None:
    """Prefill is cheap in one region and decode in the other, but caches do not travel."""
    supply = supply_of(
        [(0, "A", 1, False, 1.0, 9, False), (0, "B", 1, False, 5.0, 9, False),
         (1, "A", 1, False, 5.0, 9, False), (1, "B", 1, False, 1.0, 9, False)],
        regions=2, link=10.0,
    )  # fmt: skip
    asked = service(
        "m", supply, 10.0, {PREFILL: [({"A:1": 1}, 10.0)], DECODE: [({"B:1": 1}, 10.0)]},
        kv_bytes_per_s=10.0,
    )  # fmt: skip
    case = Case((asked,), supply)
    assert check_exact(case).objective == pytest.approx(6.0)
    free = replace(case, services=(replace(asked, pairs=((0, 1),)),))
    assert check_exact(free).objective == pytest.approx(2.0)
    # The link carries half: all stays at home.
    narrow = replace(free, supply=replace(supply, link=np.full((2, 2), 5.0)))
    assert check_exact(narrow).objective == pytest.approx(6.0)
    wrong = replace(case, services=(replace(asked, pairs=((1, 0),)),))
    assert check_exact(wrong).objective == pytest.approx(6.0)


def test_a_link_is_shared() -> None:
    supply = supply_of(
        [(0, "A", 1, False, 1.0, 9, False), (1, "B", 1, False, 1.0, 9, False),
         (0, "C", 1, False, 5.0, 9, False)],
        regions=2, link=10.0,
    )  # fmt: skip
    asked = service(
        "m", supply, 10.0,
        {PREFILL: [({"A:1": 1}, 10.0)], DECODE: [({"B:1": 1}, 10.0)], BOTH: [({"C:1": 1}, 10.0)]},
        pairs=((0, 1),), kv_bytes_per_s=10.0,
    )  # fmt: skip
    case = Case((asked, replace(asked, name="n")), supply)
    assert check_exact(case).objective == pytest.approx(7.0)


def test_a_phase_without_a_partner_need_not_stand() -> None:
    """Spread over regions, what serves phases together needs no prefill beside it."""
    supply = supply_of(
        [(g, gpu, 1, False, 1.0, 9, False) for g in range(2) for gpu in "AB"], regions=2
    )
    asked = service(
        "m", supply, 10.0,
        {PREFILL: [({"B:1": 1}, 10.0)], DECODE: [], BOTH: [({"A:1": 1}, 10.0)]},
    )  # fmt: skip
    case = Case((asked,), supply, AllocationLimits(spread=2))
    assert check_exact(case).objective == pytest.approx(2.0)


@pytest.mark.slow
def test_thousands_of_equal_nodes() -> None:
    supply = supply_of(market(("A", 1, 1.0, 20000)))
    templates = {BOTH: [({"A:1": 1}, 10.0), ({"A:1": 2}, 21.0), ({"A:1": 4}, 43.0)]}
    many = Case((service("a", supply, 123456.0, templates),), supply)
    answer = solve(many, gap=1e-3)
    assert answer.status == "optimal"
    assert answer.objective == pytest.approx(123456.0 / 10.75, rel=1e-3)
    fewer = replace(supply, available=np.array([9000]))
    scarce = solve(replace(many, supply=fewer), gap=1e-3)
    assert scarce.status == "partial"
    assert scarce.served[0] == pytest.approx(9000 * 10.75 / 123456.0, abs=2e-4)


@pytest.mark.parametrize("max_nodes", [pytest.param(None, marks=pytest.mark.slow), 4_130])
def test_thousands_of_instances_spread_over_regions(max_nodes: int | None) -> None:
    """However many instances of a role there are, it may stand."""
    supply = supply_of([(g, "A", 1, False, 1.0, 2700, False) for g in range(2)], regions=2)
    asked = service("a", supply, 41152.0, {BOTH: [({"A:1": 1}, 10.0)]})
    limits = AllocationLimits(spread=2, max_nodes=max_nodes)
    answer = solve(Case((asked,), supply, limits), gap=1e-3)
    assert answer.status == "optimal"
    assert sum(column.number for column in answer.instances) == 4116
    assert {column.region for column in answer.instances} == {0, 1}


def test_equal_running_instances_are_kept() -> None:
    supply = supply_of([(g, gpu, 1, False, 1.0, 9, False) for g in range(2) for gpu in "AB"], 2)
    asked = service("a", supply, 30.0, {BOTH: [({"A:1": 1}, 10.0), ({"B:1": 1}, 10.0)]})
    case = Case((asked,), supply, running=(RunningColumn(0, BOTH, 1, ((3, 1),), 2, 10.0),))
    answer = check_exact(case)
    assert answer.objective == pytest.approx(3.0)
    assert sum(c.number for c in answer.instances if c.running == 0) == 2


def test_what_runs_without_a_template_can_be_kept() -> None:
    odd = RunningColumn(0, BOTH, 0, ((0, 3), (1, 2)), 1, 40.0)
    answer = check_exact(replace(SMALL, init_penalty=1.0, running=(odd,)))
    assert [c.number for c in answer.instances if c.running is not None] == [1]


def test_what_runs_on_machines_that_are_gone_is_forgotten() -> None:
    gone = RunningColumn(0, BOTH, 0, ((0, 5),), 1, 100.0)
    answer = solve(replace(SMALL, running=(gone,)))
    assert answer.status == "optimal"
    assert all(c.running is None for c in answer.instances)


def scarce_node(cheap: int) -> Case:
    supply = supply_of(market(("A", 1, 1.0, cheap), ("B", 1, 3.0, 9)))
    templates = {BOTH: [({"A:1": 1}, 10.0), ({"B:1": 1}, 10.0)]}
    return Case((service("a", supply, 40.0, templates),), supply)


def test_one_more_scarce_node_saves_what_it_replaces() -> None:
    answer, more = check_exact(scarce_node(2)), check_exact(scarce_node(3))
    assert answer.objective - more.objective == pytest.approx(2.0)


def test_a_scarce_node_has_its_price_and_is_named() -> None:
    answer = solve(scarce_node(2))
    assert answer.node_usd[0].tolist() == pytest.approx([2.0, 0.0])
    assert answer.demand_usd[0] == pytest.approx(0.3)
    assert answer.binding == ("availability of A:1 in r0",)


def test_progress_is_told() -> None:
    seen: list[tuple[float, float, float]] = []
    answer = solve(random_case(3), log=lambda s, u, b: seen.append((s, u, b)))
    assert seen[-1][1] == pytest.approx(answer.objective, rel=1e-5)
    assert all(bound <= best for _, best, bound in seen)


def test_bad_input_is_refused() -> None:
    first, second = SMALL.services
    (role,) = first.roles
    for bad in (
        replace(SMALL, services=(replace(first, roles=(replace(role, demand=-1.0),)), second)),
        replace(SMALL, limits=AllocationLimits(spread=0)),
        replace(SMALL, init_penalty=-1.0),
        replace(
            SMALL,
            services=(replace(first, roles=(replace(role, throughput=role.throughput[:1]),)),),
        ),
        replace(SMALL, supply=replace(PLENTY, usd=-PLENTY.usd)),
    ):
        with pytest.raises(UsageError):
            solve(bad)
