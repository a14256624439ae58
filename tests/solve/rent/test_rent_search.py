"""The search where nodes are scarce: what repairing finds, and what prices prove, against the truth."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.solve.deadline import Deadline
from atoll.solve.rent import mix_master
from atoll.solve.rent.allocation_types import BOTH
from atoll.solve.rent.greedy_allocation import served_share
from atoll.solve.rent.incumbent import Incumbent, MipLimits, Target, Work
from atoll.solve.rent.instance_master import InstanceMaster
from atoll.solve.rent.items import RentModel
from atoll.solve.rent.mix_master import Decomposition
from atoll.solve.rent.relaxation import market_prices
from atoll.solve.rent.rent_search import oracles_of, repair
from tests.seeds import examples
from tests.solve.rent.cases import Case, model_of, optimum, random_case, service, supply_of

_DEAR = 3.0


def _standing() -> Incumbent:
    return Incumbent(Target(1e-3), Deadline(600.0), Work(20_000.0))


def _converged(model: RentModel, standing: Incumbent) -> Decomposition | None:
    """Mixes at the best prices; None where some service cannot be served at all."""
    mixes = Decomposition(
        model, oracles_of(model), "cost", np.zeros(len(model.services)), standing, 0
    )
    least = np.array([legs.least for legs in mixes.rate(market_prices(model)).legs])
    if not np.isfinite(least).all():
        return None
    mixes.unserved = _DEAR * np.maximum(1.0, least)
    mixes.master.set_unserved(mixes.unserved)
    mixes.converge()
    return mixes


def _repaired(case: Case) -> tuple[RentModel, Incumbent]:
    model, standing = model_of(case), _standing()
    mixes = _converged(model, standing)
    if mixes is not None:
        every = [np.arange(len(items)) for items in model.items]
        repair(model, mixes, every, standing, 0)
    return model, standing


@pytest.mark.slow
@examples(12)
@given(st.integers(0, 100_000))
def test_what_is_repaired_serves_everything_and_fits(seed: int) -> None:
    rng = np.random.default_rng(seed)
    case = random_case(
        seed, services=int(rng.integers(2, 5)), regions=int(rng.integers(1, 4)),
        scarce=float(rng.uniform(0.6, 1.4)),
    )  # fmt: skip
    model, standing = _repaired(case)
    least = optimum(case)
    assert standing.bound <= least + 1e-6 * max(1.0, abs(least))
    if standing.solution is None:
        return
    assert standing.objective >= least - 1e-6
    assert np.all(standing.solution.machines <= case.supply.available)
    for items, number in zip(model.items, standing.solution.items, strict=True):
        assert served_share(items, number, model.regions) >= 1.0 - 1e-6


@pytest.mark.parametrize("cases", [8, pytest.param(16, marks=pytest.mark.slow)])
def test_max_of_what_can_be_served_is_found(cases: int) -> None:
    """Of scarce cases that have an answer, nearly all are repaired, and none that has not."""
    possible = found = 0
    for seed in range(cases):
        case = random_case(seed, services=3, regions=2, scarce=1.1)
        _, standing = _repaired(case)
        if np.isfinite(optimum(case)):
            possible += 1
            found += standing.solution is not None
        else:
            assert standing.solution is None
    assert possible >= 5
    assert found >= 0.9 * possible


def test_two_services_make_room_for_each_other() -> None:
    """Each wants the one cheap machine; both fit only if one takes the dear one."""
    supply = supply_of([(0, "A", 1, False, 1.0, 1, True), (0, "B", 1, False, 5.0, 1, True)])
    templates = {BOTH: [({"A:1": 1}, 1.0), ({"B:1": 1}, 1.0)]}
    case = Case(tuple(service(name, supply, 1.0, templates) for name in "ab"), supply)
    _, standing = _repaired(case)
    assert standing.objective == pytest.approx(6.0)


def test_what_cannot_be_repaired_is_said_as_far_as_it_goes() -> None:
    """Two services on three machines of half a demand each: one is served, and half of the other."""
    supply = supply_of([(0, "A", 1, False, 1.0, 3, True)])
    services = tuple(service(name, supply, 2.0, {BOTH: [({"A:1": 1}, 1.0)]}) for name in "ab")
    model, standing = model_of(Case(services, supply)), _standing()
    mixes = _converged(model, standing)
    assert mixes is not None
    closest = repair(model, mixes, [np.arange(len(items)) for items in model.items], standing, 0)
    assert standing.solution is None
    assert closest is not None
    shares = [
        served_share(items, number, model.regions)
        for items, number in zip(model.items, closest.items, strict=True)
    ]
    assert sorted(shares) == [pytest.approx(0.5), pytest.approx(1.0)]


def test_the_bound_of_mixes_does_not_stop_at_market_prices() -> None:
    """Services compete for the cheap machines: prices must rise until one of them leaves."""
    supply = supply_of([(0, "A", 1, False, 1.0, 2, True), (0, "B", 1, False, 5.0, 9, True)])
    templates = {BOTH: [({"A:1": 1}, 1.0), ({"B:1": 1}, 1.0)]}
    model = model_of(Case(tuple(service(n, supply, 1.0, templates) for n in "abcd"), supply))
    standing = _standing()
    assert _converged(model, standing) is not None
    assert standing.bound == pytest.approx(12.0, rel=1e-3)


@pytest.mark.parametrize("price", [0.5, 3.0])
def test_an_instance_program_pays_for_what_is_left_unserved(price: float) -> None:
    """One machine for two services at 1 USD: each served one saves its price, if that is more."""
    supply = supply_of([(0, "A", 1, False, 1.0, 1, True)])
    templates = {BOTH: [({"A:1": 1}, 1.0)]}
    model = model_of(Case(tuple(service(n, supply, 1.0, templates) for n in "ab"), supply))
    every = [np.arange(len(items)) for items in model.items]
    master = InstanceMaster(model, "cost", np.full(2, price), every, Work(1e6), 0)
    answer = master.solve(MipLimits(60.0, 0.0, 1e-9, 1000))
    assert answer.objective == pytest.approx(min(2 * price, 1.0 + price))
    assert answer.served.sum() == pytest.approx(1.0 if price > 1.0 else 0.0)


def test_mixes_at_prices_a_little_off_fit_together_where_those_of_the_best_prices_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # At lifted prices the mixes of this case fit together at once.
    monkeypatch.setattr(mix_master, "lift", lambda _model, prices: prices)
    case = random_case(9, services=3, regions=2, scarce=1.1)
    model, standing = model_of(case), _standing()
    mixes = _converged(model, standing)
    assert mixes is not None
    mixes.choose(200)
    before = standing.solution
    assert before is None
    mixes.vary(200)
    assert standing.solution is not None
    assert optimum(case) - 1e-6 <= standing.objective <= 1.1 * optimum(case)
    assert np.all(standing.solution.machines <= case.supply.available)
    for items, number in zip(model.items, standing.solution.items, strict=True):
        assert served_share(items, number, model.regions) >= 1.0 - 1e-6
