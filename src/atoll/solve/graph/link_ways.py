"""Ways that data goes between two parts of a request, and how long each takes.

Two parts that stand at places a and b, and take v and w seconds there, keep a budget together if

    v + h(a, b) + w <= budget

where h is what handing over takes from place to place. Partners are nested in latency only where h is the
same for all. So a *way* is a set of places for the first part, another for the second, and the longest that
handing over takes from any of the one to any of the other. With flows of its own for every way partners are
nested again. For every pair of places there is a way that takes just as long as that pair: nothing is lost.
Ways that let no pair of executors through which a wider one does not are left out, so that fast links leave
one way, which all places are in.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from atoll.solve.array_types import Floats

_SAME_S = 1e-9


class LinkWay(NamedTuple):
    """Places of two parts, and the longest that handing over takes between them, in seconds."""

    first: frozenset[Hashable]
    second: frozenset[Hashable]
    seconds: float


def list_ways(
    first: Mapping[Hashable, Sequence[float]],
    second: Mapping[Hashable, Sequence[float]],
    handing_s: Callable[[Hashable, Hashable], float],
    budget_s: float,
) -> list[LinkWay]:
    """Return the ways from the places of one part to those of another, the widest first.

    `first` and `second` have the latencies of executors by place, in s. The widest way is always there, even
    if it keeps the budget for no pair of them.
    """
    rows, columns = list(first), list(second)
    if not rows or not columns:
        return [LinkWay(frozenset(rows), frozenset(columns), 0.0)]
    took = np.array([[handing_s(a, b) for b in columns] for a in rows])
    found: list[tuple[LinkWay, Floats]] = []
    for seconds in np.unique(took[np.isfinite(took)]):
        near = took <= seconds
        for partners in {row.tobytes(): row for row in near if row.any()}.values():
            inside = (near >= partners).all(axis=1)
            some = [a for a, is_in in zip(rows, inside, strict=True) if is_in]
            others = [b for b, is_in in zip(columns, partners, strict=True) if is_in]
            sums = np.add.outer(
                np.unique([v for a in some for v in first[a]]),
                np.unique([v for b in others for v in second[b]]),
            )
            found.append((LinkWay(frozenset(some), frozenset(others), float(seconds)), sums))
    # The widest come first, of equal ones the fastest: whoever covers a way comes before it.
    found.sort(key=lambda each: (-len(each[0].first) - len(each[0].second), each[0].seconds))
    kept: list[LinkWay] = []
    for way, sums in found:
        within = sums <= budget_s - way.seconds + _SAME_S
        covered = any(
            way.first <= wide.first
            and way.second <= wide.second
            and not bool((within & (sums > budget_s - wide.seconds + _SAME_S)).any())
            for wide in kept
        )
        if not kept or (bool(within.any()) and not covered):
            kept.append(way)
    return kept
