"""Budgets: whose spending counts for which, and from when on it is an alarm."""

from __future__ import annotations

import pytest

from atoll.core.errors import InputError
from atoll.runtime.gateway.budgets import BudgetSettings, month_begin_s, stand

ROWS = [
    {"key": "k1", "owner": "ada", "cost_usd": 30.0},
    {"key": "k2", "owner": "ada", "cost_usd": 12.0},
    {"key": "k3", "owner": "", "cost_usd": 5.0},
]


@pytest.mark.parametrize(
    ("budget", "spent"),
    [({"owner": "ada"}, 42.0), ({"key": "k2"}, 12.0), ({}, 47.0), ({"owner": "bob"}, 0.0)],
)
def test_what_counts(budget: dict[str, str], spent: float) -> None:
    (found,) = stand([BudgetSettings.parse({"usd_per_month": 50, **budget})], ROWS)
    assert found.spent_usd == spent


@pytest.mark.parametrize(
    ("usd", "level"), [(100.0, "info"), (52.5, "warning"), (42.0, "error"), (10.0, "error")]
)
def test_levels(usd: float, level: str) -> None:
    (found,) = stand([BudgetSettings(owner="ada", usd_per_month=usd)], ROWS)
    assert found.level == level


def test_a_budget_is_of_one() -> None:
    with pytest.raises(InputError, match="not of both"):
        BudgetSettings.parse({"usd_per_month": 5, "key": "k", "owner": "o"})


def test_months_begin_in_utc() -> None:
    assert month_begin_s(1_794_860_000.0) == 1_793_491_200.0
