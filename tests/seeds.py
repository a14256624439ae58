"""How many random cases are tried: some in every run, all of them in `make test-full`."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings

EXAMPLES = 20
"""Examples of a property in a run of the fast tests, unless it says otherwise."""


def examples(fast: int) -> settings:
    """Settings of a property whose examples take long: `fast` of them, more where all try more."""
    return settings(max_examples=fast * settings().max_examples // EXAMPLES)


def seeds(fast: int, full: int, first: int = 0) -> list[Any]:
    """So many seeds in a row; all but the `fast` first ones are slow."""
    slow = [pytest.mark.slow]
    return [pytest.param(first + at, marks=slow if at >= fast else []) for at in range(full)]
