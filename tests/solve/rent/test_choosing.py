"""Levels of models chosen with machines: the optimum by other means, bounds, and what is promised of them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import UsageError
from atoll.solve.rent.allocation_types import BOTH
from atoll.solve.rent.choosing import search
from atoll.solve.rent.choosing.decomposition import evaluate_levels, level_slacks
from atoll.solve.rent.choosing.level_choice import LevelAllocation, choose_levels
from atoll.solve.rent.choosing.level_rows import ChoiceRow, LevelRows
from atoll.solve.rent.relaxation import Prices, market_prices
from atoll.solve.rent.rent_search import SMALL, oracles_of
from tests.seeds import examples, seeds
from tests.solve.rent.allocating import solve
from tests.solve.rent.cases import Case, faults, model_of, service, supply_of
from tests.solve.rent.choosing_cases import ChoiceCase, optima, random_choices

KINDS: tuple[dict[str, object], ...] = (
    {"ways": 2},
    {"ways": 3},
    {"ways": 3, "shared": True},
    {"ways": 3, "running": True},
    {"ways": 3, "limited": True},
    {"ways": 4, "shared": True, "limited": True},
)
QUICK = ((0, 2), (1, 2), (2, 2), (3, 2), (4, 2), (5, 2))
"""(kind, seed) of cases that CP-SAT soon proves."""


def given_case(kind: int, seed: int) -> ChoiceCase:
    return random_choices(seed, **KINDS[kind])  # type: ignore[arg-type]


def answer(case: ChoiceCase) -> LevelAllocation:
    return choose_levels(
        case.case.services,
        case.case.supply,
        case.case.limits,
        case.rows,
        init_penalty=case.case.init_penalty,
        running=case.case.running,
    )


@cache
def known_answer(kind: int, seed: int) -> LevelAllocation:
    return answer(given_case(kind, seed))


def settled(case: ChoiceCase, levels: dict[int, float]) -> tuple[Case, dict[int, int]]:
    """The plain case that levels leave, and the numbers of its services."""
    kept = [m for m in range(len(case.case.services)) if levels.get(m, 1.0) > 0.0]
    number = {m: i for i, m in enumerate(kept)}
    services = []
    for m in kept:
        asked = case.case.services[m]
        roles = tuple(replace(r, demand=r.demand * levels.get(m, 1.0)) for r in asked.roles)
        services.append(replace(asked, roles=roles))
    running = tuple(replace(r, service=number.get(r.service, len(kept))) for r in case.case.running)
    return replace(case.case, services=tuple(services), running=running), number


def problems_of(case: ChoiceCase, found: LevelAllocation) -> list[str]:
    """What is wrong with an answer, by the checks of the plain allocator."""
    assert found.allocation is not None
    plain, number = settled(case, found.levels)
    instances = tuple(
        replace(some, service=number[some.service]) for some in found.allocation.instances
    )
    served = np.ones(len(plain.services))
    return faults(plain, replace(found.allocation, instances=instances, served=served))


@pytest.fixture(scope="module")
def proven() -> dict[tuple[int, int], float]:
    best = optima([given_case(*key) for key in QUICK])
    if best is None:
        pytest.skip("ortools is not installed")
    known = {key: value for key, value in zip(QUICK, best, strict=True) if value is not None}
    assert len(known) == len(QUICK)
    return known


@pytest.mark.parametrize("key", QUICK)
@pytest.mark.parametrize("small", [True, False])
def test_levels_are_those_of_the_optimum(
    proven: dict[tuple[int, int], float],
    key: tuple[int, int],
    small: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not small:
        monkeypatch.setattr(search, "SMALL", 0)
    case, best = given_case(*key), proven[key]
    found = answer(case)
    assert found.objective == pytest.approx(best, rel=1e-3)
    assert found.bound <= best * (1 + 1e-6)
    assert found.bound >= found.objective * (1 - 2e-3)
    assert case.rows.hold(found.levels, 1e-6)
    assert problems_of(case, found) == []


@pytest.mark.slow
def test_levels_are_those_of_the_optimum_in_many_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [(kind, seed) for kind in range(len(KINDS)) for seed in range(6)]
    best = optima([given_case(*key) for key in keys], work=20.0)
    if best is None:
        pytest.skip("ortools is not installed")
    compared = 0
    for small in (SMALL, 0):
        monkeypatch.setattr(search, "SMALL", small)
        for key, value in zip(keys, best, strict=True):
            if value is None:
                continue
            case = given_case(*key)
            found = answer(case)
            compared += 1
            assert found.objective == pytest.approx(value, rel=1e-3), (key, small)
            assert found.bound <= value * (1 + 1e-6), (key, small)
            assert case.rows.hold(found.levels, 1e-5), (key, small)
            if found.allocation is not None:
                assert problems_of(case, found) == [], (key, small)
    assert compared >= 50


def one_machine_each(
    available: int, demands: tuple[float, ...], prices: tuple[float, ...], rates: tuple[float, ...]
) -> Case:
    """A kind of machine for each service, of which one carries its rate."""
    offers = [(0, f"G{m}", 1, False, usd, available, True) for m, usd in enumerate(prices)]
    supply = supply_of(offers)
    return Case(
        tuple(
            service(f"w{m}", supply, demand, {BOTH: [({f"G{m}:1": 1}, rate)]})
            for m, (demand, rate) in enumerate(zip(demands, rates, strict=True))
        ),
        supply,
    )


def cheapest_by_counting(case: Case, rows: LevelRows, most: int) -> float:
    """The least cost over all numbers of machines whose levels meet the conditions."""
    best = np.inf
    for numbers in itertools.product(range(most + 1), repeat=len(case.services)):
        carried = {
            m: n * float(case.services[m].roles[0].throughput[0]) / case.services[m].roles[0].demand
            for m, n in enumerate(numbers)
        }
        usd = float(np.array(numbers) @ case.supply.usd)
        if usd < best and _possible(rows.by_choice[0], carried):
            best = usd
    return best


def _possible(row: ChoiceRow, carried: dict[int, float]) -> bool:
    """Whether filling the ways that err least first answers all with few enough errors."""
    levels = dict.fromkeys(row.ways, 0.0)
    for ways, least in row.floors:
        levels[ways[0]] = least
        if carried[ways[0]] < least - 1e-12:
            return False
    for _, way in sorted(zip(row.errors, row.ways, strict=True)):
        rest = 1.0 - sum(levels.values())
        levels[way] += max(0.0, min(carried[way] - levels[way], rest))
    error = sum(levels[w] * e for w, e in zip(row.ways, row.errors, strict=True))
    enough = row.max_error is None or error <= row.max_error + 1e-12
    return sum(levels.values()) >= 1.0 - 1e-12 and enough


@pytest.mark.parametrize("seed", seeds(5))
@pytest.mark.parametrize("small", [True, False])
def test_tiny_cases_by_counting(seed: int, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not small:
        monkeypatch.setattr(search, "SMALL", 0)
    rng = np.random.default_rng(seed)
    demands = tuple(float(d) for d in rng.uniform(3.0, 6.0, 3))
    prices = tuple(float(p) for p in rng.uniform(0.5, 3.0, 3))
    rates = tuple(float(r) for r in rng.uniform(0.8, 2.5, 3))
    case = one_machine_each(7, demands, prices, rates)
    errors = (0.09, 0.05, 0.01)
    floors = (((2,), 0.15),) if seed % 2 else ()
    rows = LevelRows((ChoiceRow("chat", (0, 1, 2), errors, 0.02 + 0.01 * (seed % 5), floors),))
    best = cheapest_by_counting(case, rows, 7)
    found = answer(ChoiceCase(case, rows))
    if best == np.inf:
        assert found.allocation is None
        return
    assert found.objective == pytest.approx(best, rel=1e-3)
    assert found.bound <= best * (1 + 1e-9)


def test_a_mix_of_two_models_beats_each_alone() -> None:
    # 10 requests/s: two machines of the first, three of the second, or one of each.
    case = one_machine_each(10, (10.0, 10.0), (3.0, 2.1), (6.0, 4.0))
    free = ChoiceRow("chat", (0, 1), (0.06, 0.02))
    found = answer(ChoiceCase(case, LevelRows((free,))))
    assert found.objective == pytest.approx(5.1)
    # Of what costs the same, the best answers: as much as the second carries.
    assert found.levels == pytest.approx({0: 0.6, 1: 0.4})
    for way, usd in ((0, 6.0), (1, 6.3)):
        alone = LevelRows((replace(free, floors=(((way,), 1.0),)),))
        assert answer(ChoiceCase(case, alone)).objective == pytest.approx(usd)
    # With at most 3 % of errors a quarter is left to the first: three machines of the second.
    strict = answer(ChoiceCase(case, LevelRows((replace(free, max_error=0.03),))))
    assert strict.objective == pytest.approx(6.3)
    assert strict.levels == pytest.approx({0: 0.0, 1: 1.0})


@pytest.mark.parametrize("small", [True, False])
def test_more_error_is_worth_what_the_relaxation_says(
    small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not small:
        monkeypatch.setattr(search, "SMALL", 0)
    case = one_machine_each(100, (100.0, 100.0), (1.0, 2.0), (1.0, 1.0))
    rows = LevelRows((ChoiceRow("chat", (0, 1), (0.06, 0.02), 0.04),))
    found = answer(ChoiceCase(case, rows))
    # One point of error more moves a quarter of 100 machines to those that cost $1 less.
    assert found.error_usd[0] * 0.01 == pytest.approx(25.0, rel=1e-3)
    assert found.objective == pytest.approx(150.0)


@pytest.mark.parametrize("floor", [0.0, 0.13])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 4, 7, 9))]
)
def test_the_least_error_that_is_possible_is_planned_exactly(seed: int, floor: float) -> None:
    given = random_choices(seed)
    (choice,) = given.rows.by_choice
    worst, best = choice.ways[0], choice.ways[-1]
    least = floor * choice.errors[0] + (1.0 - floor) * min(choice.errors)
    floors = (((worst,), floor),) if floor else ()
    tight = replace(choice, max_error=least, floors=floors)
    found = answer(replace(given, rows=LevelRows((tight,))))
    assert found.levels[best] == pytest.approx(1.0 - floor, abs=1e-6)
    # Nobody asks about errors where these are all the levels that there are.
    fixed = dict.fromkeys(choice.ways, 0.0) | {best: 1.0 - floor, worst: floor}
    plain, _ = settled(given, fixed)
    alone = solve(plain)
    assert found.objective == pytest.approx(alone.objective, rel=1e-3)
    assert found.bound >= found.objective * (1 - 2e-3)


def test_a_shared_way_saves_a_machine() -> None:
    # Two services of 0.5 requests/s, machines that carry 1: shared they need one, apart two.
    offers = [(0, "G", 1, False, 1.0, 4, True)]
    supply = supply_of(offers)
    case = Case(
        tuple(
            service(name, supply, demand, {BOTH: [({"G:1": 1}, 1.0)]})
            for name, demand in (("a", 0.5), ("b", 0.5), ("both", 1.0))
        ),
        supply,
    )
    rows = LevelRows((ChoiceRow("x", (0, 2), (0.0, 0.0)), ChoiceRow("y", (1, 2), (0.0, 0.0))))
    found = answer(ChoiceCase(case, rows))
    assert found.objective == pytest.approx(1.0)
    assert found.levels == pytest.approx({0: 0.0, 1: 0.0, 2: 1.0})
    apart = LevelRows((ChoiceRow("x", (0,), (0.0,)), ChoiceRow("y", (1,), (0.0,))))
    without = replace(case, services=case.services[:2])
    assert answer(ChoiceCase(without, apart)).objective == pytest.approx(2.0)


@examples(6)
@given(st.sampled_from([(0, 0), (1, 1), (2, 2)]), st.integers(0, 10_000))
def test_the_bound_holds_at_any_prices(key: tuple[int, int], seed: int) -> None:
    case = given_case(*key)
    model, rng = model_of(case.case), np.random.default_rng(seed)
    best = known_answer(*key)
    base = market_prices(model)
    prices = Prices(base.row * rng.uniform(0.3, 1.4, len(base.row)))
    oracles = oracles_of(model)
    at = evaluate_levels(model, oracles, case.rows, prices)
    assert at.value <= best.objective * (1 + 1e-6)
    # An item in the best answer raises the bound by no more than what is between them.
    slack = level_slacks(oracles, case.rows, at)
    assert best.allocation is not None
    for some in best.allocation.instances:
        items = model.items[some.service]
        source = some.template if some.template is not None else some.running
        mine = np.flatnonzero(
            (items.source == source)
            & (items.phase == some.phase)
            & (items.region == some.region)
            & (items.kept == (some.running is not None))
        )
        assert len(mine) == 1
        assert at.value + slack[some.service][mine[0]] <= best.objective * (1 + 1e-6) + 1e-9


def test_equal_inputs_give_equal_levels() -> None:
    case = given_case(2, 0)
    first, again = answer(case), answer(case)
    assert first.levels == again.levels
    assert first.bound == again.bound
    assert first.allocation is not None
    assert again.allocation is not None
    assert first.allocation.instances == again.allocation.instances


def test_where_not_all_can_be_served_levels_still_answer_everything() -> None:
    rows = LevelRows((ChoiceRow("chat", (0, 1), (0.06, 0.02), 0.05),))
    scarce = answer(ChoiceCase(one_machine_each(1, (10.0, 10.0), (1.0, 2.0), (4.0, 2.0)), rows))
    assert scarce.allocation is None
    # One machine each: 4 and 2 of 10 requests/s, two thirds by the first.
    assert scarce.served == pytest.approx(0.6, abs=1e-4)
    assert scarce.levels[0] == pytest.approx(2 / 3, abs=1e-3)
    assert rows.hold(scarce.levels)


def test_choices_that_exclude_each_other_are_refused() -> None:
    case = one_machine_each(2, (10.0, 10.0, 10.0), (1.0, 2.0, 1.0), (4.0, 2.0, 3.0))
    rows = LevelRows(
        (
            ChoiceRow("x", (0, 1), (0.0, 0.0), floors=(((1,), 0.8),)),
            ChoiceRow("y", (1, 2), (0.0, 0.0), floors=(((2,), 0.8),)),
        )
    )
    with pytest.raises(UsageError, match="x and y ask for together"):
        answer(ChoiceCase(case, rows))
