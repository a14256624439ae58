"""Whole instances of some services in one region: the integer program that is solved region by region.

    maximise    sum of worth of what is served, in pieces of falling worth - rent of the machines
    subject to  the machines of the region, and as much prefill as decode of each service

A piece is a share of a service's demand of which each unit is worth the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from atoll.solve.array_types import Floats, Ints
from atoll.solve.lp import Sparse
from atoll.solve.rent.allocation_types import BOTH, DECODE, PREFILL, AllocationLimits
from atoll.solve.rent.incumbent import MipLimits, Work
from atoll.solve.rent.items import PHASES, RentModel, Solution
from atoll.solve.rent.relaxation import Prices
from atoll.solve.rent.rental_program import RentalProgram

_CANDIDATES = 6
"""Items of each service and phase that a region is solved over: those of least price for what they carry."""
_SMALL_CANDIDATES = 3
"""And those that take the least, so that what is left finds a use."""


@dataclass(frozen=True)
class Wanted:
    """A service in a region: (share of its demand, what all of its demand is worth) by piece; its items."""

    service: int
    pieces: tuple[tuple[float, float], ...]
    items: Ints


class RegionProgram(RentalProgram):
    """Whole instances of some services in one region; all of them have equally many pieces.

    `whole`: whatever it costs, all pieces are served.
    """

    def __init__(
        self,
        model: RentModel,
        region: int,
        wanted: list[Wanted],
        *,
        rent: float,
        seed: int,
        work: Work,
        whole: bool = False,
    ) -> None:
        super().__init__(_only_region(model, region), rent=rent, seed=seed, work=work)
        # Rows of all regions, as those of this one.
        kinds = len(model.supply.kinds)
        offers = np.flatnonzero(model.supply.region == region)
        row_here = np.full(model.rows, -1)
        row_here[region * kinds : (region + 1) * kinds] = np.arange(kinds)
        row_here[model.cells + offers] = kinds + np.arange(len(offers))
        self._model, self._offers, self._wanted = model, offers, wanted
        number = len(wanted)
        demand = self.add_empty_rows(np.zeros(number))
        phase_row = self.add_empty_rows(np.zeros(2 * number))
        each, nothing = np.arange(number), np.zeros(number)
        minus = Sparse.of(each, demand + each, np.full(number, -1.0), number)
        pieces = np.moveaxis(np.array([one.pieces for one in wanted]), 0, -1)
        self._amounts = pieces[:, 0]
        self._first_piece = self.lp.columns
        for amount, worth in pieces:
            self.lp.add_columns(-worth, amount if whole else nothing, amount, minus)
        rows = np.concatenate([demand + each, phase_row + 2 * each, phase_row + 2 * each + 1])
        value = np.repeat([1.0, -1.0, -1.0], number)
        both = Sparse.of(np.tile(each, 3), rows, value, number)
        self._first_both = self.lp.add_columns(nothing, nothing, np.full(number, np.inf), both)
        self._first = self.lp.columns
        for at, one in enumerate(wanted):
            items = model.items[one.service]
            owner, row, taken = self.use_entries(items, one.items)
            own = np.arange(len(one.items))
            phase = items.phase[one.items].astype(np.int64)
            carries = np.where(phase == BOTH, demand + at, phase_row + 2 * at + phase)
            entries = Sparse.of(
                np.concatenate([owner, own]),
                np.concatenate([row_here[row], carries]),
                np.concatenate([taken, items.share[one.items]]),
                len(own),
            )
            upper = items.upper[one.items].astype(np.float64)
            self.lp.add_columns(np.zeros(len(own)), np.zeros(len(own)), upper, entries)

    def run(
        self,
        limits: MipLimits,
        standing: Solution | None = None,
        had: Sequence[Mapping[int, int]] = (),
    ) -> list[dict[int, int]]:
        """Return the items of each service, from those that it had of a solution of all regions."""
        start = None if standing is None else self._start(standing, had)
        result = self.solve_integer(np.arange(self._first, self.lp.columns), limits, start)
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

    def _start(self, standing: Solution, had: Sequence[Mapping[int, int]]) -> Floats:
        """Columns of what services had, on the machines that stood."""
        values, number = np.zeros(self.lp.columns), len(self._wanted)
        values[: len(self._offers)] = standing.machines[self._offers]
        for at, (k, gpus, kind) in enumerate(self.slices):
            slices = standing.slices.get((int(self._offers[k]), gpus, kind), 0)
            values[len(self._offers) + at] = slices
        at = self._first
        for m, (one, some) in enumerate(zip(self._wanted, had, strict=True)):
            level = self._model.items[one.service].levels(some, self._model.regions).sum(axis=1)
            values[self._first_both + m] = apart = min(level[PREFILL], level[DECODE])
            left = level[BOTH] + apart
            for piece, amount in enumerate(self._amounts[:, m].tolist()):
                values[self._first_piece + piece * number + m] = min(amount, left)
                left -= min(amount, left)
            for item in one.items.tolist():
                values[at] = some.get(item, 0)
                at += 1
        return values


def find_near(
    model: RentModel, service: int, region: int, most: float, prices: Prices
) -> tuple[Ints, float]:
    """Return the items of a service in a region that cost least for what they carry, and the smallest.

    More than a share `most` of the demand counts for nothing. Also returns what all of the demand would
    cost at the price of the best of them.
    """
    items = model.items[service]
    cuts = items.cuts(model.regions)
    found: list[Ints] = []
    least = np.full(len(PHASES), np.inf)
    for phase in PHASES:
        at = phase * model.regions + region
        here = np.arange(cuts[at], cuts[at + 1])
        if not len(here):
            continue
        place, row, amount = items.list_use(here)
        price = np.bincount(place, prices.row[row] * amount, minlength=len(here))
        each = price / np.minimum(items.share[here], most)
        least[phase] = each.min()
        found.append(here[np.argsort(each, kind="stable")[:_CANDIDATES]])
        size = np.bincount(place, amount, minlength=len(here))
        small = np.lexsort((each, size))
        found.append(here[small[:_SMALL_CANDIDATES]])
    new = len(items) - items.running
    found.append(new + np.flatnonzero(items.region[new:] == region))
    cost = min(least[BOTH], least[PREFILL] + least[DECODE])
    return np.unique(np.concatenate(found)).astype(np.int64), float(cost)


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
