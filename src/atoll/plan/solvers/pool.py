"""The mixes of one role found so far, and the search for better ones at given prices.

Of two mixes that use the same nodes only the better is kept: what is rented does not depend on how the
nodes are grouped into instances.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll.plan.solvers.columns import GRID
from atoll.plan.solvers.cover import cheapest_by_weight, closure, cover
from atoll.plan.solvers.mixes import Items, search_mixes

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_STEPS = np.arange(GRID + 1) / GRID
_DEEPER = 2.0
_WORK = 4_000_000


@dataclass(frozen=True)
class Mix:
    """Nodes in `use` per cell, cost of starting, share of the demand served, and the items by source."""

    use: Ints
    init: float
    share: float
    items: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Priced:
    """A role at some prices: no mix costs less than `least`; `fresh` is a mix to add if one was found.

    `rate` is what the demand costs at the best price per throughput; `cost` of the items and `table`
    (see `cover`) are those the search used.
    """

    least: float
    rate: float
    cost: Floats
    table: Floats
    fresh: Mix | None


class MixPool:
    """Mixes of one role; `unserved` is the price of leaving all of its demand unserved (inf: not allowed)."""

    def __init__(self, items: Items, cells: int, regions: int, spread: int) -> None:
        self.items = items
        self.mixes: list[Mix] = []
        self._cells, self._regions, self._spread = cells, regions, spread
        self._place: dict[bytes, int] = {}
        self._arrays: tuple[Floats, Floats, Floats] | None = None

    def add(self, mix: Mix) -> bool:
        """Keep a mix unless one that uses the same nodes is as good; return whether it was kept."""
        key = mix.use.tobytes()
        old = self._place.get(key)
        if old is not None:
            known = self.mixes[old]
            if (known.init, -known.share) <= (mix.init, -mix.share):
                return False
        self._place[key] = len(self.mixes)
        self.mixes.append(mix)
        self._arrays = None
        return True

    def values(self, cell: Floats, unserved: float) -> Floats:
        """Return what each mix costs at these prices, with what it leaves unserved."""
        if self._arrays is None:
            use = np.array([m.use for m in self.mixes], np.float64).reshape(-1, self._cells)
            init = np.array([m.init for m in self.mixes])
            self._arrays = use, init, np.array([m.share for m in self.mixes])
        use, init, share = self._arrays
        value = use @ cell + init
        if np.isfinite(unserved):
            value = value + unserved * (1.0 - share)
        return np.asarray(value)

    def tables(self, cell: Floats, unserved: float) -> tuple[Floats, Floats]:
        """Return item costs and, for 0..spread more regions, the least cost of covering d steps."""
        items = self.items
        cost = items.prices(cell)
        groups = self._regions if self._spread > 1 else 1
        best = cheapest_by_weight(cost, items.weight, items.region, groups, GRID + 1)
        if self._spread == 1:
            value, _, _ = closure(best[0])
            table = np.stack([value, value])
        else:
            nothing = np.zeros(0, np.int64)
            table = cover(
                best, self._spread, nothing, nothing.astype(np.int32), np.zeros(0), nothing
            )
        if len(items):
            table = np.maximum(table, float((cost / items.share).min()) * _STEPS)
        table[0, 0] = 0.0
        if np.isfinite(unserved):
            slope = unserved * _STEPS
            table = np.minimum.accumulate(table - slope, axis=1) + slope
        return cost, table

    def price(self, cell: Floats, unserved: float, eps: float) -> Priced:
        """Find the cheapest mix at these prices, or prove the known ones cheapest to within `eps`."""
        if not len(self.items):
            return Priced(unserved, unserved, np.zeros(0), np.zeros((2, GRID + 1)), None)
        cost, table = self.tables(cell, unserved)
        rate = float((cost / self.items.share).min())
        known = min(unserved, float(self.values(cell, unserved).min(initial=np.inf)))
        least = min(float(table[-1, -1]), unserved)
        if not np.isfinite(least):
            return Priced(least, rate, cost, table, None)
        step = max(eps, 1e-3 * abs(least))
        while True:
            # Raise the limit step by step: the lower it is, the less there is to search.
            limit = min(known - eps, least + step)
            last = limit >= known - eps
            found, exhaustive = self.below(cost, table, unserved, limit, 1)
            if found:
                mix = found[0]
                value = float(mix.use @ cell) + mix.init
                if np.isfinite(unserved):
                    value += unserved * (1.0 - mix.share)
                return Priced(value if exhaustive else least, rate, cost, table, mix)
            if not exhaustive:
                return Priced(least, rate, cost, table, None)
            least = max(least, limit)
            if last or step > 1e12:
                return Priced(least if last else np.inf, rate, cost, table, None)
            step *= _DEEPER

    def below(
        self,
        cost: Floats,
        table: Floats,
        unserved: float,
        limit: float,
        most: int,
        work: int = _WORK,
    ) -> tuple[list[Mix], bool]:
        """Return mixes below `limit` (the cheapest, or up to `most`) and whether there are no others."""
        ahead = table[max(0, self._spread - 1), GRID - self.items.weight]
        near = np.flatnonzero(cost + ahead < limit)
        if not len(near):
            return [], True
        some = self.items.take(near)
        picks, lengths, exhaustive = search_mixes(
            cost[near],
            some.share,
            some.region,
            some.cells,
            some.room,
            table,
            unserved,
            limit,
            most,
            work,
        )
        return [
            self._mix(near[pick[:length]]) for pick, length in zip(picks, lengths, strict=True)
        ], exhaustive

    def _mix(self, picks: Ints) -> Mix:
        items = self.items
        use = np.bincount(items.cells[picks].ravel(), minlength=len(items.room))[: self._cells]
        number = Counter(int(source) for source in items.source[picks])
        return Mix(
            use.astype(np.int64),
            float(items.init[picks].sum()),
            min(1.0, float(items.share[picks].sum())),
            tuple(sorted(number.items())),
        )
