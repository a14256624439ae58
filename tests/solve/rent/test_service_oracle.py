"""What one service costs at given prices, against trying all numbers of all items."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from atoll.solve.rent.allocation_types import BOTH, DECODE, PREFILL, RunningColumn, ServiceDemand
from atoll.solve.rent.items import MANY, ItemPatterns, RentModel, ServiceItems, items_of
from atoll.solve.rent.service_oracle import ServiceOracle, zones_of
from atoll.solve.rent.step_functions import GRID
from tests.seeds import seeds
from tests.solve.rent.cases import Case, model_of, service, supply_of

Floats = NDArray[np.float64]
WAYS = [(BOTH,), (PREFILL, DECODE), (PREFILL, DECODE, BOTH)]


@dataclass(frozen=True)
class Tiny:
    """A service with few items and prices of rows."""

    asked: ServiceDemand
    items: ServiceItems
    regions: int
    row_price: Floats

    @property
    def oracle(self) -> ServiceOracle:
        return ServiceOracle(self.asked, self.items, self.regions)


def tiny(seed: int) -> Tiny:
    """At most six items that each carry a quarter of the demand or more."""
    rng = np.random.default_rng(seed)
    regions = int(rng.integers(1, 4))
    supply = supply_of([(g, "A", 2, False, 1.0, 9, False) for g in range(regions)], regions)
    phases = WAYS[int(rng.integers(3))]
    templates = {
        phase: [({"A:1": 1}, float(rng.uniform(0.25, 1.2))) for _ in range(2)] for phase in phases
    }
    pairs = tuple(
        (g, h) for g, h in itertools.permutations(range(regions), 2) if rng.random() < 0.3
    )
    asked = service("m", supply, 1.0, templates, pairs=pairs)
    running = [
        RunningColumn(
            0, int(rng.choice(phases)), g, ((g, 1),), int(rng.integers(1, 3)),
            float(rng.uniform(0.25, 0.9)),
        )
        for g in range(regions)
        if rng.random() < 0.6
    ]  # fmt: skip
    every = items_of(asked, 0, running, supply)
    some = np.sort(rng.choice(len(every), min(6, len(every)), replace=False))
    # Prices per item rather than per row: each has a row of its own.
    own = np.arange(len(some), dtype=np.int32).reshape(-1, 1)
    items = replace(
        every,
        phase=every.phase[some],
        region=every.region[some],
        pattern=own[:, 0],
        patterns=ItemPatterns(
            own, np.ones_like(own), every.share[some], every.source[some], every.upper[some]
        ),
        kinds=0,
        running=int(every.kept[some].sum()),
    )
    return Tiny(asked, items, regions, rng.uniform(0.0, 3.0, len(some)))


def choices(case: Tiny) -> tuple[NDArray[np.int64], Floats, Floats]:
    """All numbers of items worth trying, the share each serves with any pairing of a zone, and its cost."""
    items = case.items
    most = [
        min(int(u), int(np.ceil(1.0 / s))) for u, s in zip(items.upper, items.share, strict=True)
    ]
    every = np.array(list(itertools.product(*(range(n + 1) for n in most))), np.int64)
    zone = zones_of(case.asked.pairs, case.regions)
    served = np.zeros(len(every))
    for z in range(int(zone.max()) + 1):
        level = [
            every[:, here] @ items.share[here]
            for phase in (PREFILL, DECODE, BOTH)
            for here in [np.flatnonzero((items.phase == phase) & (zone[items.region] == z))]
        ]
        served += np.minimum(level[PREFILL], level[DECODE]) + level[BOTH]
    return every, served, every @ case.row_price


@given(st.integers(0, 100_000))
def test_bounds_hold_and_picks_serve(seed: int) -> None:
    case = tiny(seed)
    every, served, cost = choices(case)
    oracle = case.oracle
    low, high = oracle.legs(case.row_price), oracle.legs(case.row_price, lower=False)
    for level in (GRID, GRID // 2, GRID // 3):
        enough = served >= level / GRID - 1e-12
        least = float(cost[enough].min()) if enough.any() else np.inf
        assert low.total.at(level) <= least + 1e-9
        assert high.total.at(level) >= least - 1e-9
        picked = oracle.pick(high, level)
        if not np.isfinite(high.total.at(level)):
            assert picked is None
            continue
        assert picked is not None
        numbers = np.array([picked.get(i, 0) for i in range(len(case.items))])
        at = np.flatnonzero((every == numbers).all(axis=1))
        assert np.all(numbers <= case.items.upper)
        assert len(at) == 1
        assert served[at[0]] >= level / GRID - 1e-12
        assert cost[at[0]] <= high.total.at(level) + 1e-9
    # The grid is fine: only a cover that a step would undo costs anything else.
    enough = served >= 1.0 + 20 / GRID
    if enough.any():
        assert high.least <= float(cost[enough].min()) + 1e-9
    loose = served >= 1.0 - 20 / GRID
    if loose.any() and not np.isinf(low.least):
        assert low.least >= float(cost[loose].min()) * (1 - 1e-3) - 1e-9


@given(st.integers(0, 100_000))
def test_slacks_hold(seed: int) -> None:
    case = tiny(seed)
    every, served, cost = choices(case)
    oracle = case.oracle
    legs = oracle.legs(case.row_price)
    enough = served >= 1.0 - 1e-12
    if not enough.any():
        return
    slack = oracle.slacks(legs)
    for item in range(len(case.items)):
        using = enough & (every[:, item] > 0)
        if using.any():
            assert legs.least + slack[item] <= float(cost[using].min()) + 1e-9


def test_slack_finds_what_no_optimum_uses() -> None:
    supply = supply_of([(0, "A", 1, False, 1.0, 9, False), (0, "B", 1, False, 1.0, 9, False)])
    asked = service("m", supply, 1.0, {BOTH: [({"A:1": 1}, 0.5), ({"B:1": 1}, 0.5)]})
    model: RentModel = model_of(Case((asked,), supply))
    oracle = ServiceOracle(asked, model.items[0], 1)
    legs = oracle.legs(np.array([1.0, 1.5, 0.0, 0.0]))
    assert legs.least == pytest.approx(2.0)
    assert oracle.slacks(legs).tolist() == pytest.approx([0.0, 0.5], abs=1e-3)


def test_nothing_can_serve() -> None:
    supply = supply_of([(0, "A", 1, False, 1.0, 9, False)])
    asked = service("m", supply, 1.0, {PREFILL: [({"A:1": 1}, 0.5)], DECODE: []})
    model = model_of(Case((asked,), supply))
    oracle = ServiceOracle(asked, model.items[0], 1)
    assert oracle.legs(np.ones(2)).least == np.inf
    assert oracle.pick(oracle.legs(np.ones(2), lower=False)) is None
    assert np.all(oracle.slacks(oracle.legs(np.ones(2))) == 0.0)


def test_kept_items_are_used_no_more_often_than_they_run() -> None:
    supply = supply_of([(0, "A", 1, False, 1.0, 99, False)])
    asked = service("m", supply, 1.0, {BOTH: [({"A:1": 1}, 0.25)]})
    running = (RunningColumn(0, BOTH, 0, ((0, 1),), 2, 0.25),)
    model = model_of(Case((asked,), supply, running=running))
    assert model.items[0].upper.tolist() == [MANY, 2]
    oracle = ServiceOracle(asked, model.items[0], 1)
    legs = oracle.legs(np.array([3.0, 1.0]), lower=False)
    assert legs.least == pytest.approx(2 * 1.0 + 2 * 3.0)
    assert oracle.pick(legs) == {0: 2, 1: 2}


def test_zones_join_regions_that_caches_travel_between() -> None:
    assert zones_of((), 3).tolist() == [0, 1, 2]
    assert len(set(zones_of(((0, 2),), 3)[[0, 2]].tolist())) == 1
    assert set(zones_of(((0, 1), (1, 2)), 3).tolist()) == {0}


def in_many_regions(seed: int, regions: int = 7) -> tuple[ServiceDemand, ServiceItems, Floats]:
    """A service in many regions at prices of their own; some have not all kinds."""
    rng = np.random.default_rng(seed)
    offers = [
        (g, gpu, 2, False, 1.0, int(rng.integers(0, 4)), False)
        for g in range(regions)
        for gpu in ("A", "B")
    ]
    supply = supply_of(offers, regions)
    templates = {
        phase: [
            ({"A:1": 1}, float(rng.uniform(0.1, 0.4))),
            ({"B:2": 1, "A:1": 1}, float(rng.uniform(0.3, 0.9))),
            ({"B:1": 2}, float(rng.uniform(0.2, 0.5))),
        ]
        for phase in (PREFILL, DECODE)
    }
    asked = service("m", supply, 1.0, templates)
    model = model_of(Case((asked,), supply))
    # Few different prices, so that some regions cost no more than others for anything.
    price = rng.integers(1, 4, model.rows).astype(np.float64)
    return asked, model.items[0], price


@pytest.mark.parametrize("grid", [GRID, GRID // 8])
@pytest.mark.parametrize("seed", seeds(12))
def test_regions_that_others_lead_change_nothing(seed: int, grid: int) -> None:
    asked, items, price = in_many_regions(seed)
    oracle, plain = (ServiceOracle(asked, items, 7, g) for g in (grid, GRID))
    plain._zone_order = None
    every, some = plain.legs(price), oracle.legs(price)
    assert np.any(some.leads != np.arange(7)) or seed > 3
    served = plain.legs(price, lower=False)
    for part in (0.2, 0.5, 1.0):
        least = some.total.at(int(part * grid))
        # A step of each item is lost at most.
        assert least <= served.total.at(int(part * GRID)) + 1e-9
        assert least >= every.total.at(int(part * GRID)) * (1.0 - 40.0 / grid) - 1e-9
    chosen = oracle.pick(oracle.legs(price, lower=False))
    assert chosen is not None
    level = items.levels(chosen, 7)
    assert float(np.minimum(level[PREFILL], level[DECODE]).sum()) >= 1.0 - 1e-9
    paid = sum(float(items.prices(price)[item]) * n for item, n in chosen.items())
    assert paid <= served.least * (1.0 + 40.0 / grid) + 1e-9
    # Slacks are lower bounds: never above those that look at every region, but for a step or two.
    above = oracle.slacks(some) - plain.slacks(every)
    assert float(above.max()) <= served.least * 80.0 / grid + 1e-9
