"""The mixes of one role found so far, and the search for better ones at given prices.

Of two mixes that use the same nodes only the better is kept: what is rented does not depend on how the
nodes are grouped into instances.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll.solve.cover import cheapest_by_weight, cheapest_cover, closure, cover
from atoll.solve.rent.columns import GRID
from atoll.solve.rent.mixes.mixes import DEEPEST, MixItems, search_mixes

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_STEPS = np.arange(GRID + 1) / GRID
_BELOW = np.maximum(0.0, np.arange(GRID + 1) - 1.0) / GRID
_WIDEN = 2.0
_ENDLESS = 1e12
_EASY_WORK = 20_000
_WORK = 400_000
_LESSONS = 15


@dataclass(frozen=True)
class Mix:
    """Nodes in `use` per cell, cost of starting, share of the demand served, and the items by source."""

    use: Ints
    init: float
    share: float
    items: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class SearchGuide:
    """What the search for mixes is led by: item costs with a surcharge on nodes, and `cover` at those.

    No mix costs less than `table[-1, -1]` less `surplus`, the surcharge on all that can be had.
    """

    cost: Floats
    table: Floats
    surplus: float


@dataclass(frozen=True)
class PricedRole:
    """A role at some prices: no mix costs less than `least`; `fresh` is a mix to add if one was found.

    `rate` is what the demand costs at the best price per throughput, `cost` is that of the items.
    """

    least: float
    rate: float
    cost: Floats
    guide: SearchGuide
    fresh: Mix | None


class MixPool:
    """Mixes of one role; leaving all its demand unserved costs `unserved` (inf: not allowed)."""

    def __init__(self, items: MixItems, cells: int, regions: int, spread: int) -> None:
        self.items = items
        self.mixes: list[Mix] = []
        self._cells, self._regions, self._spread = cells, regions, spread
        self._place: dict[bytes, int] = {}
        self._arrays: tuple[Floats, Floats, Floats] | None = None
        self._surcharge = np.zeros(len(items.room))

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

    def price(self, cell: Floats, unserved: float, eps: float) -> PricedRole:
        """Find the cheapest mix at these prices, or prove the known ones cheapest to within `eps`."""
        items = self.items
        if not len(items):
            nothing = SearchGuide(np.zeros(0), np.zeros((2, GRID + 1)), 0.0)
            return PricedRole(unserved, unserved, np.zeros(0), nothing, None)
        cost = items.prices(cell)
        rate = float((cost / items.share).min())
        known = min(unserved, float(self.values(cell, unserved).min(initial=np.inf)))
        guide = self._guide(cost, unserved)
        least = float(guide.table[-1, -1]) - guide.surplus
        if np.isinf(unserved):
            least = max(least, rate)
        least = min(least, unserved)
        if float(items.share[0]) * DEEPEST < 1.0:
            return PricedRole(least, rate, cost, guide, None)
        work = _EASY_WORK
        step = max(eps, 1e-3 * abs(least))
        while np.isfinite(least):
            # Raise the limit step by step: the lower it is, the less there is to search.
            limit = min(known - eps, least + step)
            last = limit >= known - eps
            mixes, exhaustive = self.mixes_below(cost, guide, unserved, limit, 1, work)
            if mixes:
                value = self._value(mixes[0], cell, unserved)
                return PricedRole(value if exhaustive else least, rate, cost, guide, mixes[0])
            if exhaustive:
                least = max(least, limit)
                if last:
                    break
                step *= _WIDEN
                least = np.inf if step > _ENDLESS else least
            elif work == _EASY_WORK:
                work = _WORK
                self._learn(cost, unserved, min(known, least + step))
                guide = self._guide(cost, unserved)
                least = max(least, min(unserved, float(guide.table[-1, -1]) - guide.surplus))
            else:
                return PricedRole(least, rate, cost, guide, self._find_any(cost, guide, unserved))
        return PricedRole(least, rate, cost, guide, None)

    def _value(self, mix: Mix, cell: Floats, unserved: float) -> float:
        value = float(mix.use @ cell) + mix.init
        return value + unserved * (1.0 - mix.share) if np.isfinite(unserved) else value

    def _find_any(self, cost: Floats, guide: SearchGuide, unserved: float) -> Mix | None:
        """Any mix at all, where there is none yet."""
        if self.mixes or np.isfinite(unserved):
            return None
        mixes, _ = self.mixes_below(cost, guide, unserved, _ENDLESS, 1, _WORK)
        return mixes[0] if mixes else None

    def _guide(self, cost: Floats, unserved: float) -> SearchGuide:
        items = self.items
        surplus = float(self._surcharge @ items.room)
        charged = cost + items.surcharges(self._surcharge) if surplus > 0.0 else cost
        groups = self._regions if self._spread > 1 else 1
        best = cheapest_by_weight(charged, items.weight, items.region, groups, GRID + 1)
        if self._spread == 1:
            value, _, _ = closure(best[0])
            table = np.stack([value, value])
        else:
            nothing = np.zeros(0, np.int64)
            table = cover(
                best, self._spread, nothing, nothing.astype(np.int32), np.zeros(0), nothing
            )
        # Whatever the grid, a share of the demand costs at least that share at the best price per
        # throughput; d steps are more than d - 1 of them.
        table = np.maximum(table, float((charged / items.share).min()) * _BELOW)
        table[0, 0] = 0.0
        if np.isfinite(unserved):
            slope = unserved * _STEPS
            table = np.minimum.accumulate(table - slope, axis=1) + slope
        return SearchGuide(charged, table, surplus)

    def _learn(self, cost: Floats, unserved: float, aim: float) -> None:
        """Surcharge nodes that the cheapest cover takes more of than there are (subgradient steps)."""
        if np.isfinite(unserved):
            return
        items, room = self.items, self.items.room[:-1].astype(np.float64)
        surcharge, best = self._surcharge, -np.inf
        for lesson in range(_LESSONS):
            charged = cost + items.surcharges(surcharge)
            value, picks = cheapest_cover(charged, items.weight, GRID + 1)
            value -= float(surcharge @ items.room)
            if value > best:
                best, self._surcharge = value, surcharge
            over = items.use(picks) - room
            over[(over < 0.0) & (surcharge[:-1] <= 0.0)] = 0.0
            square = float(over @ over)
            if square == 0.0:
                return
            stride = max(aim - value, 1e-3 * abs(value)) / square * 0.9**lesson
            surcharge = np.append(np.maximum(0.0, surcharge[:-1] + stride * over), 0.0)

    def items_near(self, guide: SearchGuide, limit: float) -> Ints:
        """Return the items that may be part of a mix below `limit`."""
        ahead = guide.table[max(0, self._spread - 1), GRID - self.items.weight]
        return np.flatnonzero(guide.cost + ahead < limit + guide.surplus)

    def subadditive(self, cost: Floats) -> Floats:
        """Return the subadditive function of `cover` at these item costs."""
        items = self.items
        best = cheapest_by_weight(cost, items.weight, items.region, 1, GRID + 1)
        value, _, _ = closure(best[0])
        return np.maximum(value, float((cost / items.share).min()) * _STEPS)

    def find_fitting(self, cell: Floats, room: Ints, unserved: float, eps: float) -> Mix | None:
        """Return a mix of what `room` has left per cell that is cheaper by `eps` than those known to fit."""
        items = self.items
        if not len(items) or float(items.share[0]) * DEEPEST < 1.0:
            return None
        values = self.values(cell, unserved)
        fits = np.array([bool(np.all(mix.use <= room)) for mix in self.mixes], np.bool_)
        limit = min(unserved, _ENDLESS, float(values[fits].min(initial=np.inf))) - eps
        cost = items.prices(cell)
        surcharge, self._surcharge = self._surcharge, np.zeros(len(items.room))
        guide = self._guide(cost, unserved)
        self._surcharge = surcharge
        left = np.concatenate([room, items.room[len(room) :]])
        mixes, _ = self.mixes_below(cost, guide, unserved, limit, 1, _EASY_WORK, left)
        return mixes[0] if mixes else None

    def mixes_below(
        self,
        cost: Floats,
        guide: SearchGuide,
        unserved: float,
        limit: float,
        most: int,
        work: int,
        room: Ints | None = None,
    ) -> tuple[list[Mix], bool]:
        """Return mixes below `limit` (the cheapest, or up to `most`) and whether there are no others.

        `room` is what can be had (None: all there is).
        """
        near = self.items_near(guide, limit)
        if not len(near):
            return [], True
        some = self.items.take(near)
        picks, lengths, exhaustive = search_mixes(
            cost[near],
            guide.cost[near],
            guide.surplus,
            some.share,
            some.region,
            some.cells,
            some.room if room is None else room,
            guide.table,
            unserved,
            limit,
            most,
            work,
        )
        return [
            self._mix(near[pick[:length]]) for pick, length in zip(picks, lengths, strict=True)
        ], exhaustive

    def mix_of(self, chosen: dict[int, int]) -> Mix:
        """Return the mix of items given by source and number."""
        place = {int(source): i for i, source in enumerate(self.items.source)}
        return self._mix(
            np.array([place[source] for source in chosen for _ in range(chosen[source])], np.int64)
        )

    def _mix(self, picks: Ints) -> Mix:
        items = self.items
        number = Counter(int(source) for source in items.source[picks])
        return Mix(
            items.use(picks)[: self._cells].astype(np.int64),
            float(items.init[picks].sum()),
            min(1.0, float(items.share[picks].sum())),
            tuple(sorted(number.items())),
        )
