"""Searching only templates that can matter, and diving: bounds hold, answers are sound."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from atoll.solve.deadline import Deadline
from atoll.solve.rent import allocation, rent_search
from atoll.solve.rent.allocation import rent_model
from atoll.solve.rent.allocation_types import DECODE, PREFILL
from atoll.solve.rent.incumbent import Work
from atoll.solve.rent.items import RentModel
from atoll.solve.rent.many.fluid_program import FluidProgram
from atoll.solve.rent.relaxation import evaluate, market_prices
from atoll.solve.rent.rent_search import oracles_of
from atoll.solve.rent.service_oracle import ServiceOracle
from atoll.solve.rent.template_pool import TemplatePool
from tests.seeds import seeds
from tests.solve.rent.allocating import solve
from tests.solve.rent.cases import Case, optimum, random_case, service, supply_of


def many_templates(seed: int, available: int = 9, regions: int = 6) -> Case:
    """Two services of the same twelve templates a phase, in six regions or fewer, some sold out."""
    rng = np.random.default_rng(seed)
    offers = [
        (
            g,
            gpu,
            1,
            False,
            usd * float(rng.uniform(0.8, 1.3)),
            int(rng.integers(0, available)),
            True,
        )
        for g in range(regions)
        for gpu, usd in (("A", 1.0), ("B", 0.6), ("C", 0.3))
    ]
    supply = supply_of(offers, regions)
    templates = {}
    for phase in (PREFILL, DECODE):
        some = []
        for _ in range(12):
            counts = rng.integers(0, 4, 3)
            counts[int(rng.integers(3))] += 1
            nodes = dict(zip(supply.kinds, counts.tolist(), strict=True))
            carried = float(counts @ [1.0, 0.7, 0.3]) * float(rng.uniform(0.5, 1.1))
            some.append(({kind: n for kind, n in nodes.items() if n}, carried))
        templates[phase] = some
    return Case(tuple(service(f"m{m}", supply, 3.0 + 2.0 * m, templates) for m in range(2)), supply)


def twice_as_much(case: Case) -> Case:
    """So much that not all of it can be served."""
    services = tuple(
        replace(s, roles=tuple(replace(r, demand=2.0 * r.demand) for r in s.roles))
        for s in case.services
    )
    return replace(case, services=services)


@pytest.mark.parametrize("seed", seeds(6))
def test_a_pool_has_the_bound_of_all_templates_at_its_prices(seed: int) -> None:
    case = many_templates(seed)
    whole = rent_model(case.services, case.supply, case.limits, (), 0.0, {0: 1.0, 1: 1.0})
    market = market_prices(whole)
    rng = np.random.default_rng(seed)
    row = market.row * rng.lognormal(0.0, 0.3, len(market.row))
    pool = TemplatePool(case.services, case.supply)
    assert len(pool) == 0
    assert pool.grow(row) > 0
    # Once it has what is needed at some prices, these add nothing.
    assert pool.grow(row) == 0
    some = rent_model(pool.services(), case.supply, case.limits, (), 0.0, {0: 1.0, 1: 1.0})
    assert sum(map(len, some.items)) < sum(map(len, whole.items))
    for all_of_it, part in zip(oracles_of(whole), oracles_of(some), strict=True):
        assert part.legs(row).least == pytest.approx(all_of_it.legs(row).least, rel=1e-4)
        served = part.legs(row, lower=False).least
        assert served == pytest.approx(all_of_it.legs(row, lower=False).least, rel=1e-3)
    # Templates of a pool keep the numbers that they have among all.
    for service_, items in zip(pool.services(), some.items, strict=True):
        for role in service_.roles:
            own = items.source[items.phase == role.phase]
            assert role.among is not None
            assert set(own.tolist()) <= set(role.among.tolist())


@pytest.mark.parametrize("scarce", [0.5, 1.6])
@pytest.mark.parametrize("seed", seeds(12))
def test_what_is_found_of_a_pool_is_sound(
    seed: int, scarce: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = random_case(seed, regions=2 + seed % 2, scarce=scarce, running=seed % 2 == 1)
    plain = solve(case, gap=1e-3)
    monkeypatch.setattr(allocation, "_MANY_ITEMS", -1)
    monkeypatch.setattr(rent_search, "MANY_TABLES", -1)
    answer = solve(case, gap=1e-3)
    assert answer.fraction_bound >= plain.fraction_bound - 1e-3 or answer.served.min() == 1.0
    least = optimum(case)
    if np.isfinite(least) and answer.served.min(initial=1.0) == 1.0:
        assert answer.bound <= least * (1.0 + 1e-6) + 1e-6
        assert answer.objective >= least * (1.0 - 1e-6) - 1e-6


@pytest.mark.parametrize(("seed", "regions"), [(4, 2), pytest.param(1, 6, marks=pytest.mark.slow)])
def test_a_dive_comes_near_the_best(
    seed: int, regions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = many_templates(seed, regions=regions)
    plain = solve(case, gap=1e-2)
    monkeypatch.setattr(allocation, "_MANY_ITEMS", -1)
    monkeypatch.setattr(rent_search, "MANY_TABLES", -1)
    answer = solve(case, gap=1e-3)
    assert plain.served.min() == answer.served.min() == 1.0
    assert answer.bound <= plain.objective + 1e-6
    assert plain.bound <= answer.objective <= 1.1 * plain.objective


@pytest.mark.parametrize(
    ("seed", "part"), [(1, 0.9999), pytest.param(2, 0.8, marks=pytest.mark.slow)]
)
def test_a_search_comes_near_the_most_that_can_be_served(
    seed: int, part: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = twice_as_much(many_templates(seed, available=5))
    most = optimum(case, "common")
    monkeypatch.setattr(allocation, "_MANY_ITEMS", -1)
    monkeypatch.setattr(rent_search, "MANY_TABLES", -1)
    answer = solve(case, gap=1e-3)
    served = answer.served.min()
    assert answer.status == "partial"
    assert part * most <= served <= most + 1e-6
    assert most - 1e-6 <= answer.fraction_bound < 1.0
    # What is proven of the cost is proven of the share that is served.
    least = optimum(case, "cost", (answer.served * (1.0 - 1e-8)).tolist())
    assert answer.bound <= least + 1e-5


@pytest.mark.slow
def test_what_a_search_finds_is_served_at_the_least_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    case = twice_as_much(many_templates(6, available=5))
    monkeypatch.setattr(allocation, "_MANY_ITEMS", -1)
    monkeypatch.setattr(rent_search, "MANY_TABLES", -1)
    answer = solve(case, gap=1e-3)
    least = optimum(case, "cost", (answer.served * (1.0 - 1e-8)).tolist())
    assert answer.usd_per_hour == pytest.approx(least, rel=1e-3)


@pytest.mark.parametrize("seed", seeds(4))
def test_a_program_goes_on_with_more_templates(seed: int) -> None:
    case = many_templates(seed)
    pool = TemplatePool(case.services, case.supply)
    bare = rent_model((), case.supply, case.limits, (), 0.0, {})
    pool.grow(market_prices(bare).row)

    def model() -> RentModel:
        return rent_model(pool.services(), case.supply, case.limits, (), 0.0, {0: 1.0, 1: 1.0})

    program = FluidProgram(model(), rent=1.0, seed=0, work=Work(np.inf))
    before = len(pool)
    pool.grow(program.converge(Deadline(np.inf)).row * 1.3, 0.3)
    assert len(pool) > before
    program.widen(model())
    program.converge(Deadline(np.inf))
    anew = FluidProgram(model(), rent=1.0, seed=0, work=Work(np.inf))
    anew.converge(Deadline(np.inf))
    found, other = program.relax(np.inf), anew.relax(np.inf)
    assert found.objective == pytest.approx(other.objective, rel=2e-3)


@pytest.mark.parametrize("seed", seeds(4))
def test_parts_of_instances_price_what_is_short(seed: int) -> None:
    case = many_templates(seed, available=2)
    model = rent_model(case.services, case.supply, case.limits, (), 0.0, {0: 1.0, 1: 1.0})
    program = FluidProgram(model, rent=0.0, seed=0, work=Work(np.inf))
    prices = program.converge(Deadline(np.inf))
    unserved = program.relax(np.inf).objective
    oracles = oracles_of(model)
    left = evaluate(model, oracles, "common", prices, np.zeros(2)).value
    most = solve(case, gap=1e-3).served.min()
    # Whole instances serve no more than parts, and what is proven at these prices is at least that.
    assert most < 1.0
    assert most <= 1.0 - left + 1e-6
    assert left >= unserved - 2.0 / oracles[0].grid


def test_no_split_over_many_zones_costs_less_than_the_best_price_for_throughput() -> None:
    case = many_templates(3)
    model = rent_model(case.services, case.supply, case.limits, (), 0.0, {0: 1.0, 1: 1.0})
    row = market_prices(model).row
    for items, asked in zip(model.items, model.services, strict=True):
        # So coarse that every item is rounded up to one of a few steps.
        oracle = ServiceOracle(asked, items, model.regions, 8)
        per_share = items.prices(row) / items.share
        rates = [
            sum(
                per_share[(items.phase == phase) & (items.region == g)].min(initial=np.inf)
                for phase in (PREFILL, DECODE)
            )
            for g in range(model.regions)
        ]
        assert oracle.legs(row).least >= min(rates) * 7.0 / 8.0 * (1.0 - 1e-9)
        assert oracle.legs(row).least <= oracle.legs(row, lower=False).least + 1e-9
