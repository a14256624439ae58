"""Services within what there is: tables against enumeration, bounds against the truth."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.solve.deadline import Deadline
from atoll.solve.rent import mix_master
from atoll.solve.rent.capped import capped_oracle
from atoll.solve.rent.capped.capped_cover import LEVELS, cover_capped
from atoll.solve.rent.capped.capped_oracle import capped_oracles, fits, tighten
from atoll.solve.rent.incumbent import Incumbent, Target, Work
from atoll.solve.rent.mix_master import Decomposition
from atoll.solve.rent.relaxation import Evaluation, evaluate, market_prices
from atoll.solve.rent.rent_search import oracles_of
from tests.seeds import examples
from tests.solve.rent.cases import model_of, optimum, random_case

item = st.tuples(
    st.tuples(st.integers(0, 2), st.integers(0, 2)),
    st.integers(0, LEVELS),
    st.integers(0, 40).map(float),
)


def _enumerate(
    items: list[tuple[tuple[int, int], int, float]], room: tuple[int, int], level: int
) -> float:
    """The least cost of covering a level, by trying all numbers of all items."""
    best = np.inf
    most = [min(4, -(-level // w)) if w else 0 for _, w, _ in items]
    for number in product(*(range(n + 1) for n in most)):
        used = [sum(n * v[j] for n, (v, _, _) in zip(number, items, strict=True)) for j in (0, 1)]
        covered = sum(n * w for n, (_, w, _) in zip(number, items, strict=True))
        if covered >= level and used[0] <= room[0] and used[1] <= room[1]:
            best = min(best, sum(n * c for n, (_, _, c) in zip(number, items, strict=True)))
    return best


@examples(40)
@given(
    st.lists(item, min_size=1, max_size=4),
    st.tuples(st.integers(0, 3), st.integers(0, 2)),
    st.sampled_from((LEVELS // 3, LEVELS // 2, LEVELS)),
)
def test_a_table_is_what_enumeration_finds(
    items: list[tuple[tuple[int, int], int, float]], caps: tuple[int, int], level: int
) -> None:
    # No item so small that covering takes more than the four that are tried.
    items = [(v, w if w == 0 else max(w, LEVELS // 4), c) for v, w, c in items]
    room = np.array(caps, np.int64)
    table, _ = cover_capped(
        np.array([v for v, _, _ in items], np.int64),
        np.array([w for _, w, _ in items], np.int64),
        np.array([c for _, _, c in items]),
        room,
    )
    states = list(product(range(caps[0] + 1), range(caps[1] + 1)))
    assert len(table.value) == len(states)
    for state, here in enumerate(states):
        found = float(table.value[state, level])
        assert found == _enumerate(items, here, level)
        if np.isfinite(found):
            chosen = table.pick(state, level, room)
            assert sum(items[i][2] for i in chosen) == found
            assert sum(items[i][1] for i in chosen) >= level
            assert all(sum(items[i][0][j] for i in chosen) <= here[j] for j in (0, 1))


@given(st.integers(0, 100_000), st.floats(0.5, 2.5))
def test_the_bound_within_what_there_is_holds(seed: int, factor: float) -> None:
    """It is no lower than without caps, and no allocation costs less."""
    case = random_case(seed, regions=1 + seed % 3, most=2, scarce=1.2)
    model = model_of(case)
    capped = capped_oracles(model, [], Work(np.inf))
    prices = market_prices(model)
    prices.row[:] *= np.random.default_rng(seed).uniform(0.4, factor, len(prices.row))
    row = prices.row
    for service, oracle in enumerate(capped):
        items: dict[int, int] | None = None
        for _ in range(10):
            items = oracle.pick(oracle.legs(row, lower=False))
            if not items or not oracle.note(items):
                break
        # Instances of both phases at once are not counted, nor what KV travels between.
        apart = items and all(model.items[service].phase[i] < 2 for i in items)
        if apart and oracle.possible:
            assert fits(model, service, items or {})
    nothing = np.zeros(len(case.services))
    found = evaluate(model, capped, "cost", prices, nothing)
    loose = evaluate(model, oracles_of(model), "cost", prices, nothing)
    assert found.value >= loose.value - 1e-9
    assert found.value <= optimum(case) + 1e-6


def test_prices_end_where_everything_is_served_though_bounds_stay_a_little_below(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A bound on a grid stays below the relaxation, which says too little while leaving out is cheap."""

    def coarse(*asked: Any) -> Evaluation:
        found = evaluate(*asked)
        return replace(found, value=0.99 * found.value)

    monkeypatch.setattr(mix_master, "evaluate", coarse)
    monkeypatch.setattr(capped_oracle, "_UNSERVED_PRICE", 0.2)
    case = random_case(9, services=3, scarce=0.94)
    model = model_of(case)
    standing = Incumbent(Target(1e-3), Deadline(600.0), Work(100_000.0))
    oracles = oracles_of(model)
    mixes = Decomposition(model, oracles, "cost", np.zeros(len(oracles)), standing, 0)
    least = np.array([legs.least for legs in mixes.rate(market_prices(model)).legs])
    mixes.unserved = 3.0 * np.maximum(1.0, least)
    mixes.master.set_unserved(mixes.unserved)
    mixes.converge()
    capped = tighten(mixes, 0)
    assert capped is not mixes
    assert capped.master.unserved_shares(capped.master.relax(600.0)).max() < 1e-6
    assert capped.root.value <= optimum(case)
