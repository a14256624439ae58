"""Whole instances from a relaxation over parts of them, region by region, where services are very many.

The relaxation (`fluid_program`) says what each group of services is served in each region, and what that is
worth. One region after the other is solved with whole instances: at most the machines that there are, and as
much of each group as the relaxation wants there, more than that being worth less. What the region serves is
then taken from what is asked, its machines are closed, and the others are relaxed anew, so what one region
leaves is made up for in the next. Inside a group services come in turn, those of little demand first: few of
them share a region, so that prefill and decode of each can meet there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from atoll.solve.array_types import Floats, Ints
from atoll.solve.lp import Sparse
from atoll.solve.rent.allocation_types import BOTH, AllocationLimits
from atoll.solve.rent.fast.fast_search import FastSearch, Fitted
from atoll.solve.rent.fluid_program import FluidProgram
from atoll.solve.rent.incumbent import Incumbent, MipLimits
from atoll.solve.rent.items import PHASES, RentModel
from atoll.solve.rent.relaxation import Prices, lift
from atoll.solve.rent.rental_program import RentalProgram

_CANDIDATES = 10
"""Items of each service and phase that a region is solved over: those of least price for what they carry."""
_SMALL_CANDIDATES = 4
"""And those that take the least, so that what is left finds a use."""
_MORE = 1.3
"""How much more than the relaxation wants a region may serve of a service."""
_MORE_WORTH = 0.9
"""What that is worth, as a share of what the relaxation says."""
_WANT_WORTH = 2.0
"""And what is wanted: at what it says, whole instances that cost a little more would be left to others."""
_REST = 0.15
"""Share of what a region serves of a service that is not left over for another region."""
_GAP = 2e-2
"""Share of what is served to which a region is solved."""
_ITERATIONS = 8000
"""Simplex iterations of the program of a region."""
_MIN_SHARE = 1e-6
"""Share of a demand that is worth serving."""
_TARGETS = (1.0, 0.97, 0.94, 0.9, 0.85, 0.8, 0.7, 0.5, 0.3, 0.1)
"""Shares that who is short tries to reach with what is left."""
_STEP = 0.005
"""Share up to which everybody's is raised."""
_TOWARDS = 0.6
"""Part of the way to what is not reached that is tried next."""
_EQUAL = 1e-9
"""Share that sums may miss by rounding."""


@dataclass(frozen=True)
class _Wanted:
    """A service in a region: shares of its demand wanted and allowed, what all of it is worth, its items."""

    service: int
    want: float
    most: float
    worth: float
    items: Ints


class _RegionProgram(RentalProgram):
    """Whole instances of some services in one region: what they are worth less what their machines cost."""

    def __init__(
        self, model: RentModel, region: int, wanted: list[_Wanted], standing: Incumbent, seed: int
    ) -> None:
        super().__init__(_only_region(model, region), rent=1.0, seed=seed, work=standing.work)
        # Rows of all regions, as those of this one.
        kinds = len(model.supply.kinds)
        offers = np.flatnonzero(model.supply.region == region)
        row_here = np.full(model.rows, -1)
        row_here[region * kinds : (region + 1) * kinds] = np.arange(kinds)
        row_here[model.cells + offers] = kinds + np.arange(len(offers))
        self._standing = standing
        self._wanted = wanted
        number = len(wanted)
        demand = self.add_empty_rows(np.zeros(number))
        phase_row = self.add_empty_rows(np.zeros(2 * number))
        each = np.arange(number)
        want = np.array([one.want for one in wanted])
        most = np.array([one.most for one in wanted])
        worth = np.array([one.worth for one in wanted])
        nothing = np.zeros(number)
        minus = Sparse.of(each, demand + each, np.full(number, -1.0), number)
        self.lp.add_columns(-_WANT_WORTH * worth, nothing, want, minus)
        self.lp.add_columns(-_MORE_WORTH * worth, nothing, np.maximum(0.0, most - want), minus)
        rows = np.concatenate([demand + each, phase_row + 2 * each, phase_row + 2 * each + 1])
        value = np.repeat([1.0, -1.0, -1.0], number)
        both = Sparse.of(np.tile(each, 3), rows, value, number)
        self.lp.add_columns(nothing, nothing, np.full(number, np.inf), both)
        self._first = self.lp.columns
        for at, one in enumerate(wanted):
            items = model.items[one.service]
            owner, row, amount = self.use_entries(items, one.items)
            own = np.arange(len(one.items))
            phase = items.phase[one.items].astype(np.int64)
            carries = np.where(phase == BOTH, demand + at, phase_row + 2 * at + phase)
            entries = Sparse.of(
                np.concatenate([owner, own]),
                np.concatenate([row_here[row], carries]),
                np.concatenate([amount, items.share[one.items]]),
                len(own),
            )
            upper = items.upper[one.items].astype(np.float64)
            self.lp.add_columns(np.zeros(len(own)), np.zeros(len(own)), upper, entries)

    def run(self) -> list[dict[int, int]]:
        """Return the items of each service."""
        worth = sum(one.worth * one.want for one in self._wanted)
        limits = MipLimits(self._standing.deadline.limit(), 0.0, _GAP * worth, _ITERATIONS)
        result = self.solve_integer(np.arange(self._first, self.lp.columns), limits)
        if result.values is None:
            return [{} for _ in self._wanted]
        chosen: list[dict[int, int]] = []
        at = self._first
        for one in self._wanted:
            numbers = np.rint(result.values[at : at + len(one.items)]).astype(int)
            at += len(one.items)
            some = np.flatnonzero(numbers)
            chosen.append({int(one.items[i]): int(numbers[i]) for i in some})
        return chosen


def _only_region(model: RentModel, region: int) -> RentModel:
    """Return the market of one region, without services."""
    supply = model.supply
    here = np.flatnonzero(supply.region == region)
    own = replace(
        supply,
        regions=supply.regions[region : region + 1],
        region=np.zeros(len(here), np.int64),
        gpus=supply.gpus[here],
        sizes=tuple(supply.sizes[k] for k in here),
        spot=supply.spot[here],
        usd=supply.usd[here],
        available=supply.available[here],
        link=supply.link[region : region + 1, region : region + 1],
        paid=None if supply.paid is None else supply.paid[here],
    )
    return RentModel(own, AllocationLimits(), (), (), model.start[here])


class RegionDive:
    """Solves regions in turn; `search` keeps what they take."""

    def __init__(
        self,
        model: RentModel,
        guide: FluidProgram,
        search: FastSearch,
        standing: Incumbent,
        seed: int,
    ) -> None:
        self.model, self.guide, self.search = model, guide, search
        self.standing, self._seed = standing, seed
        self._left = np.ones(len(model.services))
        demand = np.array([service.roles[0].demand for service in model.services])
        self._scale = np.ones(len(model.services))
        self._order: list[list[int]] = []
        for group in guide.groups:
            self._scale[group] = demand[group] / demand[group].max()
            self._order.append(sorted(group, key=lambda m: (demand[m], m)))

    def run(self) -> Fitted | None:
        """Return whole instances with their machines, and the share that each serves; None if time was up."""
        self.search.clear()
        for region in range(self.model.regions):
            result = self.guide.relax(self.standing.deadline.limit())
            if result.status != "optimal" or self.standing.deadline.is_over():
                return None
            prices = lift(self.model, self.guide.prices(result))
            carried, duals = self.guide.carried(result)[:, region], self.guide.demand_duals(result)
            served = self._solve(region, carried, duals, prices)
            self.guide.close(region, served, self.search.ledger.machines)
        self._top_up()
        ledger = self.search.ledger
        return self.search.fitted() if ledger.sound and ledger.within else None

    def _top_up(self) -> None:
        """Let those that are short take what is left, then what others have beyond the share of the worst."""
        search, every = self.search, range(len(self.search.pickers))
        share = self._shares()
        for m in sorted(every, key=lambda m: (share[m], m)):
            if self.standing.deadline.is_over():
                break
            some = next((t for t in _TARGETS if t <= share[m] or search.raise_to(m, t)), 0.0)
            share[m] = max(share[m], some)
        low, high = min(self._shares(), default=0.0), float(np.mean(share))
        while high - low > _STEP and not self.standing.deadline.is_over():
            target = low + _TOWARDS * (high - low)
            if self._level(target):
                low = target
            else:
                high = target
        search.prune(low)

    def _shares(self) -> list[float]:
        search = self.search
        return [p.served(c) for p, c in zip(search.pickers, search.chosen, strict=True)]

    def _level(self, target: float) -> bool:
        """Let all have a share, of what those with more give back; as before where that is too little."""
        search = self.search
        books, had = search.ledger.copy(), [dict(chosen) for chosen in search.chosen]
        search.prune(target)
        share = self._shares()
        short = [m for m in range(len(share)) if share[m] < target * (1.0 - _EQUAL)]
        short.sort(key=lambda m: (share[m], m))
        if search.fill_in_turn(short, target, self.standing.deadline.is_over):
            return True
        search.ledger.go_back(books)
        search.chosen = had
        return False

    def _solve(self, region: int, carried: Floats, duals: Floats, prices: Prices) -> Floats:
        """Solve a region; return what it serves of each group."""
        wanted: list[_Wanted] = []
        owner: list[int] = []
        for group, order in enumerate(self._order):
            amount = float(carried[group])
            for m in order:
                if amount <= _MIN_SHARE:
                    break
                left = float(self._left[m])
                if left <= _MIN_SHARE:
                    continue
                want = min(left, amount / self._scale[m])
                amount -= want * self._scale[m]
                most = left if left - want < _REST * want else min(left, _MORE * want)
                items = self._near(m, region, prices)
                worth = float(duals[group] * self._scale[m])
                wanted.append(_Wanted(m, want, most, worth, items))
                owner.append(group)
        served = np.zeros(len(self._order))
        if not wanted:
            return served
        program = _RegionProgram(self.model, region, wanted, self.standing, self._seed)
        for one, group, chosen in zip(wanted, owner, program.run(), strict=True):
            m, picker = one.service, self.search.pickers[one.service]
            if not self.search.ledger.take_all(picker.items, chosen):
                continue
            self.search.chosen[m] |= chosen
            now = min(picker.served(chosen), float(self._left[m]))
            self._left[m] -= now
            served[group] += now * self._scale[m]
        return served

    def _near(self, m: int, region: int, prices: Prices) -> Ints:
        """Return the items of a service in a region that cost least for what they carry, and the smallest."""
        items = self.model.items[m]
        cuts = items.cuts(self.model.regions)
        found: list[Ints] = []
        for phase in PHASES:
            at = phase * self.model.regions + region
            here = np.arange(cuts[at], cuts[at + 1])
            if not len(here):
                continue
            place, row, amount = items.list_use(here)
            price = np.bincount(place, prices.row[row] * amount, minlength=len(here))
            each = price / np.minimum(items.share[here], self._left[m])
            found.append(here[np.argsort(each, kind="stable")[:_CANDIDATES]])
            size = np.bincount(place, amount, minlength=len(here))
            small = np.lexsort((each, size))
            found.append(here[small[:_SMALL_CANDIDATES]])
        new = len(items) - items.running
        found.append(new + np.flatnonzero(items.region[new:] == region))
        return np.unique(np.concatenate(found)).astype(np.int64)
