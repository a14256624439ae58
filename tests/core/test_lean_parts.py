"""Parts that count no references: what numba makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from atoll.core.compiling import entry, lean_part, part


class Columns(NamedTuple):
    numbers: Any
    shares: Any


def first_plus_one(columns: Columns) -> int:
    return int(columns.numbers[0] + 1)


@pytest.mark.parametrize(("kind", "counts"), [(part, True), (lean_part, False)])
def test_lean_parts_count_no_references(kind: Callable[[Any], Any], counts: bool) -> None:
    inner = kind(first_plus_one)

    def plain(arrays: Any) -> int:
        return int(inner(Columns(*arrays)))

    outer: Any = entry("(Tuple((int64[::1], float64[::1])),)")(plain)
    outer._cache.disable()
    assert outer((np.array([3]), np.ones(1))) == 4
    (made,) = inner.overloads.values()
    assert ("NRT_incref" in made.library.get_llvm_str()) == counts
