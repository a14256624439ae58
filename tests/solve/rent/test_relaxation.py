"""The Lagrangian bound holds at whatever prices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.solve.rent.allocation_types import AllocationLimits
from atoll.solve.rent.relaxation import (
    Goal,
    Prices,
    evaluate,
    market_prices,
    price_of_all,
    slacks,
)
from atoll.solve.rent.rent_search import oracles_of
from tests.seeds import examples
from tests.solve.rent.cases import Case, model_of, optimum, random_case


def limited_case(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    case = random_case(
        seed, regions=int(rng.integers(1, 4)), pairs=bool(rng.integers(2)), running=True,
        scarce=float(rng.uniform(0.3, 1.2)),
    )  # fmt: skip
    limits = AllocationLimits(
        budget=float(rng.uniform(5.0, 30.0)) if rng.random() < 0.4 else None,
        max_nodes=int(rng.integers(2, 12)) if rng.random() < 0.4 else None,
    )
    return replace(case, limits=limits)


def random_prices(case: Case, rent: float, seed: int) -> Prices:
    rng = np.random.default_rng(seed)
    model = model_of(case)
    scale = 1.0 if rent else 0.02
    row = market_prices(model).row * scale * rng.uniform(0.2, 1.6, model.rows)
    limits = case.limits
    return Prices(
        row,
        budget=0.0 if limits.budget is None else float(rng.exponential(0.2 * scale)),
        nodes=0.0 if limits.max_nodes is None else float(rng.exponential(0.3 * scale)),
        rent=rent,
    )


@examples(20)
@given(st.integers(0, 100_000))
def test_no_allocation_costs_less(seed: int) -> None:
    case = limited_case(seed)
    model = model_of(case)
    oracles = oracles_of(model)
    nothing = np.zeros(len(case.services))
    least = optimum(case)
    for prices in (market_prices(model), *(random_prices(case, 1.0, seed + i) for i in range(3))):
        found = evaluate(model, oracles, "cost", prices, nothing)
        assert found.value <= least + 1e-6
    if np.isfinite(least):
        assert least <= price_of_all(model) + 1e-6


@examples(15)
@given(st.integers(0, 100_000), st.sampled_from(["common", "weighted"]))
def test_no_more_can_be_served(seed: int, goal: Goal) -> None:
    case = limited_case(seed)
    model = replace(model_of(case), start=np.zeros(len(case.supply.usd)))
    weights = np.array([asked.weight for asked in case.services])
    normal = weights / weights.sum()
    most = optimum(case, "common" if goal == "common" else "weighted")
    for i in range(3):
        found = evaluate(model, oracles_of(model), goal, random_prices(case, 0.0, seed + i), normal)
        assert 1.0 - found.value >= most - 1e-6


@examples(10)
@given(st.integers(0, 100_000))
def test_items_of_large_slack_are_in_no_better_allocation(seed: int) -> None:
    """Without them nothing gets cheaper, and nothing but the slack gets dearer."""
    case = limited_case(seed)
    least = optimum(case)
    if not np.isfinite(least):
        return
    model = model_of(case)
    oracles = oracles_of(model)
    found = evaluate(model, oracles, "cost", random_prices(case, 1.0, seed), np.zeros(2))
    for m, (items, slack) in enumerate(zip(model.items, slacks(oracles, found), strict=True)):
        # Take away every template that is out of reach in all regions: the optimum stays.
        asked = case.services[m]
        roles = []
        for role in asked.roles:
            mine = ~items.kept & (items.phase == role.phase)
            near = {int(t) for t in items.source[mine & (found.value + slack <= least + 1e-6)]}
            rate = [r if t in near else 0.0 for t, r in enumerate(role.throughput)]
            roles.append(replace(role, throughput=np.array(rate)))
        services = list(case.services)
        services[m] = replace(asked, roles=tuple(roles))
        assert optimum(replace(case, services=tuple(services))) == pytest.approx(least, abs=1e-6)
