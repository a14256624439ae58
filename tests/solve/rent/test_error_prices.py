"""What a point of error is worth: found at the condition on errors, wherever levels have their ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.solve.rent.choosing.level_choice import choose_levels
from atoll.solve.rent.choosing.level_rows import LevelRows
from tests.solve.rent.choosing_cases import random_choices


@pytest.mark.parametrize(
    "seed", [8, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (3, 10))]
)
def test_of_two_models_the_price_of_error_falls_the_more_may_err(seed: int) -> None:
    """The relaxation is convex in the error; with two models all of it could be paid by their ranges."""
    asked = random_choices(seed, ways=2)
    row = asked.rows.by_choice[0]
    least, most = min(row.errors), max(row.errors)
    prices = []
    for share in (0.0, 0.5, 0.75, 1.0):
        at = least + share * (most - least)
        rows = LevelRows((replace(row, max_error=at, floors=()),))
        case = asked.case
        found = choose_levels(case.services, case.supply, case.limits, rows, work=1e5)
        prices.append(found.error_usd[0])
    assert prices == sorted(prices, reverse=True)
    assert prices[1] > 0.0
    assert prices[-1] == 0.0
