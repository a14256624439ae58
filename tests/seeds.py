"""How many random cases are tried: some in every run, all of them in `make test-full`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from hypothesis import settings

EXAMPLES = 6
"""Examples of a property in a run of the fast tests, at most."""
FULL_EXAMPLES = 20
"""Examples of a property in a run of all tests, unless it says otherwise."""
SEEDS = 3
"""Seeds of a test in a run of the fast tests, at most."""


def examples(full: int) -> settings:
    """Settings of a property that tries `full` examples where all tests run."""
    tried = settings().max_examples
    few = min(full, EXAMPLES)
    return settings(max_examples=few if tried <= EXAMPLES else full * tried // FULL_EXAMPLES)


def seeds(full: int, first: int = 0, *, fast: int = SEEDS) -> list[Any]:
    """So many seeds in a row; all but the `fast` first ones are slow."""
    slow = [pytest.mark.slow]
    return [pytest.param(first + at, marks=slow if at >= fast else []) for at in range(full)]


def slow_except(fast: Collection[object], values: Iterable[object]) -> list[Any]:
    """Values of a parameter, of which a fast run tries those in `fast` alone."""
    slow = [pytest.mark.slow]
    return [
        pytest.param(
            *(one if isinstance(one, tuple) else (one,)), marks=[] if one in fast else slow
        )
        for one in values
    ]
