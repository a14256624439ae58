"""A first allocation serves everything and fits, though it need not be the cheapest."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.solve.rent.allocation_types import BOTH, DECODE, PREFILL, RunningColumn
from atoll.solve.rent.greedy_allocation import fill, served_share
from atoll.solve.rent.rent_search import oracles_of
from atoll.solve.rent.rental_program import cheapest_supply, costs
from tests.seeds import seeds
from tests.solve.rent.cases import Case, model_of, optimum, random_case, service, supply_of


@given(st.integers(0, 100_000))
def test_it_serves_everything_and_fits(seed: int) -> None:
    rng = np.random.default_rng(seed)
    case = random_case(
        seed, services=int(rng.integers(1, 4)), regions=int(rng.integers(1, 4)),
        running=bool(rng.integers(2)), scarce=float(rng.uniform(0.1, 1.0)),
    )  # fmt: skip
    model = model_of(case)
    chosen = fill(model, oracles_of(model))
    least = optimum(case)
    if chosen is None:
        return
    for items, number in zip(model.items, chosen, strict=True):
        assert served_share(items, number, model.regions) >= 1.0 - 1e-9
        assert all(0 < n <= items.upper[i] for i, n in number.items())
    solution = cheapest_supply(model, chosen, 0)
    assert solution is not None
    assert np.all(solution.machines <= case.supply.available)
    assert sum(costs(model, solution)) >= least - 1e-6


@pytest.mark.parametrize("seed", seeds(20))
def test_it_finds_something_where_there_is_plenty(seed: int) -> None:
    case = random_case(seed, scarce=0.5)
    supply = replace(case.supply, available=case.supply.available + 50)
    model = model_of(replace(case, supply=supply))
    if np.isfinite(optimum(replace(case, supply=supply))):
        assert fill(model, oracles_of(model)) is not None


def test_nothing_serves_a_phase_alone() -> None:
    supply = supply_of([(0, "A", 1, False, 1.0, 9, False)])
    asked = service("m", supply, 1.0, {PREFILL: [({"A:1": 1}, 1.0)], DECODE: []})
    model = model_of(Case((asked,), supply))
    assert fill(model, oracles_of(model)) is None


def test_it_takes_what_is_left() -> None:
    """The first service leaves one GPU of the cheap offer, and the second makes do with it."""
    supply = supply_of([(0, "A", 2, False, 1.0, 1, False), (0, "B", 1, False, 9.0, 1, False)])
    templates = {BOTH: [({"A:1": 1}, 1.0), ({"B:1": 1}, 1.0)]}
    case = Case(
        tuple(service(f"m{m}", supply, 1.0, templates) for m in range(3)),
        supply,
        running=(RunningColumn(0, BOTH, 0, ((0, 1),), 1, 1.0),),
    )
    model = model_of(case)
    chosen = fill(model, oracles_of(model))
    assert chosen is not None
    solution = cheapest_supply(model, chosen, 0)
    assert solution is not None
    assert solution.machines.tolist() == [1, 1]
