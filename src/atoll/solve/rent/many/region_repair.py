"""Regions solved anew, one after the other, until who is served worst is served enough.

A dive leaves some services with nearly all they ask for and others with little: what the last regions have
does not suit who is left. So each region in turn is emptied and solved again with whole instances, for those
who had something there and those who are shortest of all. A share is worth the more the less a service has
beside it (`_CUTS`), so who has enough gives way to who has not, and what one region gives up another makes
up for.

Pass after pass all are to have the same share, the target. It rises where all have it, and comes down towards
what the worst-served has where passes no longer help. The best seen is kept. In the end each region serves
what it serves then at the least cost.
"""

from __future__ import annotations

import numpy as np

from atoll.solve.array_types import Floats, Ints
from atoll.solve.rent.fast.fast_search import FastSearch
from atoll.solve.rent.fast.market_ledger import Books
from atoll.solve.rent.incumbent import Incumbent, MipLimits
from atoll.solve.rent.items import Solution
from atoll.solve.rent.many.region_program import RegionProgram, Wanted, find_near
from atoll.solve.rent.relaxation import Prices

_CUTS = ((0.6, 8.0), (0.8, 4.0), (0.9, 2.0), (1.0, 1.0))
"""Shares of the target, and what a share up to there is worth, as a multiple of what it is worth to any."""
_OTHERS = 40
"""Services that may have something in a region beside those that had."""
_GAP = 0.03
"""Share of what all is worth, split evenly among regions, to which one is solved."""
_MISSED = 0.1
"""Share of the worth of what all miss together to which one is solved, where that is less."""
_ITERATIONS = 3000
"""Simplex iterations of the program of a region, at a thousand columns."""
_WORK = 0.9
"""Share of the work left that raising the least share may take."""
_PASSES = 8
"""Passes over all regions at most."""
_HIGHER = 1.02
"""The next target where all have this one."""
_FEW = 0.01
"""Share of the worth of all by which a pass must raise it for the next one to have the same target."""
_TOWARDS = 0.6
"""The next target else, as a part of the way from the least to the mean."""
_STALLED = 2
"""Passes that raise the least by next to nothing after which no more are made."""
_MIN_GAIN = 2e-3
"""Share of the least that is next to nothing."""
_RENT_GAP = 5e-3
"""Share of the rent of a region to which it is solved for the least."""
_EQUAL = 1e-6
"""Share of a target that sums may miss by rounding."""


class RegionRepair:
    """Solves regions anew; `search` keeps what they take, `worth` says what all of each demand is worth."""

    def __init__(
        self, search: FastSearch, worth: Floats, prices: Prices, standing: Incumbent, seed: int
    ) -> None:
        self.search, self._worth, self._prices = search, worth, prices
        self._standing, self._seed = standing, seed
        self._min_left = 0.0

    def run(self) -> float:
        """Return the share that the worst-served has in the end."""
        search, work = self.search, self._standing.work
        self._min_left = work.left - work.part(_WORK)
        target, low, stalled = 1.0, float(self._shares().min(initial=1.0)), 0
        best, kept = low, self._keep()
        for _ in range(_PASSES):
            before = self._value(self._shares(), target)
            for region in range(search.model.regions):
                if self._is_over():
                    break
                self._solve(region, target)
            share = self._shares()
            low = float(share.min(initial=1.0))
            helped = self._value(share, target) >= before * (1.0 + _FEW)
            stalled = 0 if helped or low > best * (1.0 + _MIN_GAIN) else stalled + 1
            if low > best:
                best, kept = low, self._keep()
            if self._is_over() or stalled == _STALLED:
                break
            if low >= target * (1.0 - _EQUAL):
                target *= _HIGHER
            elif not helped:
                mean = float(np.minimum(share, target).mean())
                target = max(best * (1.0 + _MIN_GAIN), low + _TOWARDS * (mean - low))
        self._go_back(kept)
        search.prune(best)
        for region in range(search.model.regions):
            if work.left > 0.0 and not self._standing.deadline.is_over():
                self._cheapen(region, best * (1.0 - _EQUAL))
        return float(self._shares().min(initial=1.0))

    def _is_over(self) -> bool:
        standing = self._standing
        return standing.deadline.is_over() or standing.work.left <= self._min_left

    def _keep(self) -> tuple[Books, list[dict[int, int]]]:
        return self.search.ledger.copy(), [dict(chosen) for chosen in self.search.chosen]

    def _go_back(self, kept: tuple[Books, list[dict[int, int]]]) -> None:
        books, chosen = kept
        self.search.ledger.go_back(books)
        self.search.chosen = [dict(some) for some in chosen]

    def _shares(self) -> Floats:
        search = self.search
        pairs = zip(search.pickers, search.chosen, strict=True)
        return np.array([picker.served(chosen) for picker, chosen in pairs])

    def _empty(self, region: int) -> list[dict[int, int]]:
        """Give back what stands in a region; return what that was, by service."""
        search = self.search
        had: list[dict[int, int]] = []
        for items, chosen in zip(search.model.items, search.chosen, strict=True):
            had.append({i: number for i, number in chosen.items() if items.region[i] == region})
            if had[-1]:
                search.ledger.take_all(items, had[-1], -1)
                for item in had[-1]:
                    del chosen[item]
        return had

    def _solve(self, region: int, target: float) -> None:
        """Solve a region anew for who is short; it stays as it was where that gains nothing."""
        kept, before = self._keep(), self._value(self._shares(), target)
        standing = self.search.ledger.solution(())
        had = self._empty(region)
        share = self._shares()
        wanted = self._choose(region, share, had, target)
        gap = _GAP * target * float(self._worth.sum()) / self.search.model.regions
        # Where little is missed, less than that is worth finding.
        all_of_it = self._value(np.full(len(share), target), target)
        gap = min(gap, _MISSED * (all_of_it - before))
        self._take(region, wanted, had, standing, rent=0.0, gap=0.0, absolute_gap=gap)
        if self._value(self._shares(), target) <= before:
            self._go_back(kept)

    def _cheapen(self, region: int, target: float) -> None:
        """Serve in a region what has to be served there at less cost; as it was where that finds nothing."""
        kept, before = self._keep(), self.search.ledger.cost
        standing = self.search.ledger.solution(())
        had = self._empty(region)
        share = self._shares()
        wanted: list[Wanted] = []
        for m in np.flatnonzero(share < target).tolist():
            need = target - float(share[m])
            near, _ = find_near(self.search.model, m, region, need, self._prices)
            wanted.append(Wanted(m, ((need, 0.0),), _with(near, had[m])))
        self._take(region, wanted, had, standing, rent=1.0, gap=_RENT_GAP, absolute_gap=0.0)
        if self.search.ledger.cost >= before or float(self._shares().min()) < target:
            self._go_back(kept)

    def _take(
        self,
        region: int,
        wanted: list[Wanted],
        had: list[dict[int, int]],
        standing: Solution,
        *,
        rent: float,
        gap: float,
        absolute_gap: float,
    ) -> None:
        """Take whole instances for services in a region that is empty; with rent, all that they want."""
        if not wanted:
            return
        search, deadline = self.search, self._standing.deadline
        program = RegionProgram(
            search.model,
            region,
            wanted,
            rent=rent,
            seed=self._seed,
            work=self._standing.work,
            whole=rent > 0.0,
        )
        limits = MipLimits(deadline.limit(), gap, absolute_gap, _ITERATIONS)
        found = program.run(limits, standing, [had[one.service] for one in wanted])
        for one, chosen in zip(wanted, found, strict=True):
            if search.ledger.take_all(search.model.items[one.service], chosen):
                search.chosen[one.service] |= chosen

    def _choose(
        self, region: int, share: Floats, had: list[dict[int, int]], target: float
    ) -> list[Wanted]:
        """Who may have something in a region: who had, and to whom it is worth most for what it costs."""
        stay: list[Wanted] = []
        others: list[tuple[float, Wanted]] = []
        for m in np.flatnonzero(share < target * (1.0 - _EQUAL)).tolist():
            missed = target - float(share[m])
            pieces = self._pieces(m, float(share[m]), target)
            near, cost = find_near(self.search.model, m, region, missed, self._prices)
            one = Wanted(m, pieces, _with(near, had[m]))
            if had[m]:
                stay.append(one)
            elif np.isfinite(cost):
                worth = sum(amount * each for amount, each in pieces) / missed
                others.append((worth / max(cost, _EQUAL), one))
        others.sort(key=lambda other: (-other[0], other[1].service))
        return stay + [one for _, one in others[:_OTHERS]]

    def _pieces(self, m: int, share: float, target: float) -> tuple[tuple[float, float], ...]:
        """What more than a share is worth to a service, piece by piece."""
        pieces: list[tuple[float, float]] = []
        begin = share
        for cut, worth in _CUTS:
            end = max(begin, cut * target)
            pieces.append((end - begin, worth * float(self._worth[m])))
            begin = end
        return tuple(pieces)

    def _value(self, share: Floats, target: float) -> float:
        """What such shares are worth, by the same pieces."""
        value, begin = 0.0, 0.0
        for cut, worth in _CUTS:
            end = cut * target
            value += worth * float(self._worth @ np.clip(share - begin, 0.0, end - begin))
            begin = end
        return value


def _with(near: Ints, had: dict[int, int]) -> Ints:
    return np.union1d(near, np.array(sorted(had), np.int64)).astype(np.int64)
