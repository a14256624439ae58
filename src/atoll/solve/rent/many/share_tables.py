"""What the search for the largest common share reads and changes: items, capacities, and what stands.

Of each service, phase and region a few dozen items are listed: those that cost least at given prices for what
they carry, and the smallest. Prices are those of a relaxation, which say what is scarce, or the market's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from atoll.solve.array_types import Floats, Ints, Small
from atoll.solve.rent.allocation_types import BOTH, DECODE, PREFILL
from atoll.solve.rent.fast.market_ledger import Families
from atoll.solve.rent.items import PHASES, RentModel, ServiceItems, available_nodes
from atoll.solve.rent.many.fluid_program import group_services
from atoll.solve.rent.many.market_capacities import EVERYWHERE, MarketCapacities
from atoll.solve.rent.many.share_kernel import (
    MOST_AWAY,
    Capacities,
    ShareItems,
    StandingItems,
    take_steps,
)
from atoll.solve.rent.relaxation import market_prices

_Number = TypeVar("_Number", bound=np.generic)
Chosen = Sequence[Mapping[int, int]]

_CHEAPEST, _SMALLEST = 48, 8
"""Items of each service, phase and region: those that cost least for what they carry, and the smallest."""
_MARKET, _EVEN = 1e-2, 1e-4
"""Parts of a price that come from the market, and from GPUs alike: what costs nothing would be wasted."""
_MIN_WORTH = 1e-2
"""Share of the mean that a service is worth at least."""
_EQUAL = 1e-9
_MAX_BITS = 62
"""Capacities of a region that have a bit of its word."""


class ShareTables:
    """Items in the order that the kernel reads, and what stands of them: `chosen` at first.

    `worth` is what all of each service's demand costs at the best. With `rented` items cost their
    rent on the market, too.
    """

    def __init__(
        self,
        model: RentModel,
        row_price: Floats | None,
        seed: int,
        chosen: Chosen = (),
        *,
        rented: bool = False,
    ) -> None:
        market = MarketCapacities.of(model, Families.of(model))
        price = _mix_prices(model, row_price)
        had = list(chosen) or [{} for _ in model.items]
        listed: list[_List] = [_NO_LIST] * len(had)
        # Items of services that share templates differ by what they carry, and are chosen once.
        for group in group_services(model):
            largest = max(group, key=lambda m: model.services[m].roles[0].demand)
            also = sorted(set().union(*(had[m] for m in group)))
            first = _List.of(model.items[largest], market, price, model.regions, also)
            for m in group:
                listed[m] = first.carried_by(model.items[m], model.regions)
        self._which = [each.which for each in listed]
        self._first = np.cumsum([0, *(len(which) for which in self._which)])
        worth = np.array([each.worth for each in listed])
        self.worth: Floats = np.maximum(worth, _MIN_WORTH * worth.mean()) / max(worth.sum(), 1e-300)
        self.items = self._list_items(model, market, listed, rented=rented)
        self._capacities = self._open(model, market)
        self.standing = _nothing(model, seed)
        self._load(had)

    def take_steps(self, steps: int, target: float, worse: float) -> None:
        """Take so many steps of the kernel."""
        take_steps(
            tuple(self.items), tuple(self._capacities), tuple(self.standing), steps, target, worse
        )
        self._count_anew()

    @property
    def rent(self) -> float:
        """What stands costs on the market, where items are rented."""
        standing = self.standing
        pairs = zip(standing.item, standing.number.tolist(), strict=True)
        return float(sum(self.items.rent[at[:number]].sum() for at, number in pairs))

    def chosen(self) -> list[dict[int, int]]:
        """Return the items of each service that stand, with their numbers."""
        standing = self.standing
        chosen: list[dict[int, int]] = [{} for _ in self._which]
        for at, number in zip(standing.item, standing.number.tolist(), strict=True):
            for i in at[:number].tolist():
                m = int(self.items.service[i])
                item = int(self._which[m][i - self._first[m]])
                chosen[m][item] = chosen[m].get(item, 0) + 1
        return chosen

    def _list_items(
        self,
        model: RentModel,
        market: MarketCapacities,
        listed: list[_List],
        *,
        rented: bool,
    ) -> ShareItems:
        sizes = [len(which) for which in self._which]
        uses = _stack([each.uses for each in listed], -1)
        amount = _stack([each.amount for each in listed], 0.0)
        self._bit = _bits(market, model.regions)
        needs = np.zeros(len(uses), np.int64)
        self._least = np.full(len(market.free), np.inf)
        for use, much in zip(uses.T, amount.T, strict=True):
            some = use >= 0
            needs[some] |= self._bit[use[some]]
            np.minimum.at(self._least, use[some], much[some])
        pairs = list(zip(model.items, self._which, strict=True))
        service = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
        region = np.concatenate([items.region[which] for items, which in pairs]).astype(np.int32)
        phase = np.concatenate([items.phase[which] for items, which in pairs])
        share = np.concatenate([items.share[which] for items, which in pairs])
        self._upper = np.concatenate([items.upper[which] for items, which in pairs])
        cost = np.concatenate([each.cost for each in listed])
        rent = np.zeros(len(cost))
        if rented:
            row = market_prices(model).row
            rent = np.concatenate([items.prices(row)[which] for items, which in pairs])
        group = (service.astype(np.int64) * model.regions + region) * len(PHASES) + phase
        begin = np.searchsorted(group, np.arange(len(sizes) * model.regions * len(PHASES) + 1))
        return ShareItems(
            model.regions, begin.astype(np.int64), service, region, phase, share, cost,
            cost / share, rent, needs, uses, amount,
        )  # fmt: skip

    def _open(self, model: RentModel, market: MarketCapacities) -> Capacities:
        closed = np.zeros(model.regions, np.int64)
        empty = (market.free + _EQUAL < self._least) & (self._bit != 0)
        for at in np.flatnonzero(empty).tolist():
            closed[market.region[at]] |= self._bit[at]
        return Capacities(
            market.free.copy(), self._least, np.maximum(market.region, 0).astype(np.int32),
            self._bit, closed, self._upper.astype(np.int32),
        )  # fmt: skip

    def _load(self, chosen: Chosen) -> None:
        """Let items stand; there must be room for them."""
        capacities, standing = self._capacities, self.standing
        for m, some in enumerate(chosen):
            places = {int(item): at for at, item in enumerate(self._which[m])} if some else {}
            for item, number in some.items():
                i = int(self._first[m]) + places[item]
                r = int(self.items.region[i])
                there = int(standing.number[r])
                standing.item[r, there : there + number] = i
                standing.number[r] += number
                used = self.items.uses[i] >= 0
                at = self.items.uses[i][used]
                capacities.free[at] -= number * self.items.amount[i][used]
                capacities.copies[i] -= number
                for use in at[capacities.free[at] + _EQUAL < capacities.least[at]].tolist():
                    capacities.closed[r] |= capacities.bit[use]
        self._count_anew()

    def _count_anew(self) -> None:
        """Sum up what stands, so that rounding does not add up over many steps."""
        items, standing = self.items, self.standing
        standing.level[:] = 0.0
        for at, number in zip(standing.item, standing.number.tolist(), strict=True):
            some = at[:number]
            where = items.service[some], items.region[some], items.phase[some]
            np.add.at(standing.level, where, items.share[some])
        level = standing.level
        apart = np.minimum(level[:, :, PREFILL], level[:, :, DECODE])
        standing.share[:] = (level[:, :, BOTH] + apart).sum(axis=1)


def _nothing(model: RentModel, seed: int) -> StandingItems:
    """Return that nothing stands, and room for all that can."""
    number, small = len(model.items), np.int32
    room = int(available_nodes(model.supply).sum(axis=1).max(initial=0))
    room += sum(int(items.upper[len(items) - items.running :].sum()) for items in model.items) + 2
    return StandingItems(
        np.zeros((model.regions, room), small), np.zeros(model.regions, np.int64),
        np.zeros((number, model.regions, len(PHASES))), np.zeros(number), np.ones(number),
        np.array([2 * seed + 1], np.uint64) * np.uint64(0x9E3779B97F4A7C15),
        np.zeros(MOST_AWAY, small), np.zeros(room, small), np.zeros(number, small),
        np.zeros(number, np.int8), np.zeros(number, small), np.zeros(number),
        np.zeros((number, 2), small),
    )  # fmt: skip


@dataclass(frozen=True)
class _List:
    """Items of a service that are tried, in order: what they cost and take; what its demand is worth."""

    which: Ints
    cost: Floats
    uses: Small
    amount: Floats
    worth: float = 0.0

    @classmethod
    def of(
        cls,
        items: ServiceItems,
        market: MarketCapacities,
        row_price: Floats,
        regions: int,
        also: Sequence[int],
    ) -> _List:
        """Return the items to try, and some `also`."""
        cost = np.maximum(items.prices(row_price), 1e-300)
        group = _group_of(items, np.arange(len(cost)))
        order = np.lexsort((cost / items.share, group))
        small = np.lexsort((cost / items.share, items.taken(), group))
        # Places in their groups: both orders have the groups one after the other.
        first = np.searchsorted(group[order], np.arange(regions * len(PHASES)))
        place = np.arange(len(group)) - first[group[order]]
        kept = np.zeros(len(group), np.bool_)
        kept[order[place < _CHEAPEST]] = True
        kept[small[place < _SMALLEST]] = True
        kept[len(group) - items.running :] = True
        kept[list(also)] = True
        which = np.flatnonzero(kept)
        uses, amount = _uses(items, which, market)
        return cls(which, cost[which], uses, amount)

    def carried_by(self, items: ServiceItems, regions: int) -> _List:
        """Return them in the order of what they cost for what they carry of a service's demand."""
        group = _group_of(items, self.which)
        rate = self.cost / items.share[self.which]
        order = np.lexsort((rate, group))
        flat = np.full(regions * len(PHASES), np.inf)
        np.minimum.at(flat, group, rate)
        least = flat.reshape(regions, len(PHASES))
        worth = float(np.minimum(least[:, BOTH], least[:, PREFILL] + least[:, DECODE]).min())
        return _List(
            self.which[order],
            self.cost[order],
            self.uses[order],
            self.amount[order],
            worth if np.isfinite(worth) else 0.0,
        )


_NO_LIST = _List(np.zeros(0, np.int64), np.zeros(0), np.zeros((0, 1), np.int32), np.zeros((0, 1)))


def _group_of(items: ServiceItems, which: Ints) -> Ints:
    """Return numbers by which items come in the order of region and phase."""
    return items.region[which].astype(np.int64) * len(PHASES) + items.phase[which]


def _uses(items: ServiceItems, which: Ints, market: MarketCapacities) -> tuple[Small, Floats]:
    """Return which capacities items take, padded with -1, and how much of each."""
    place, row, amount = items.list_use(which)
    each = np.diff(market.begin)[row]
    source = np.repeat(np.arange(len(row)), each)
    begin = np.cumsum(each) - each
    at = market.begin[row][source] + np.arange(len(source)) - begin[source]
    # Slices of two sizes may take from the same machines: once each, together.
    key = place[source] * (len(market.free) + 1) + market.use[at]
    known, back = np.unique(key, return_inverse=True)
    much = np.bincount(back, market.amount[at] * amount[source], minlength=len(known))
    owner, use = np.divmod(known, len(market.free) + 1)
    number = np.bincount(owner, minlength=len(which))
    column = np.arange(len(owner)) - (np.cumsum(number) - number)[owner]
    width = int(number.max(initial=1))
    uses, amounts = np.full((len(which), width), -1, np.int32), np.zeros((len(which), width))
    uses[owner, column], amounts[owner, column] = use, much
    return uses, amounts


def _bits(market: MarketCapacities, regions: int) -> Ints:
    """Return the bit of each capacity in the word of its region, 0 where it has none."""
    bit = np.zeros(len(market.free), np.int64)
    for region in range(regions):
        some = np.flatnonzero(market.region == region)[:_MAX_BITS]
        bit[some] = np.int64(1) << np.arange(len(some))
    bit[market.region == EVERYWHERE] = 0
    return bit


def _mix_prices(model: RentModel, row_price: Floats | None) -> Floats:
    """Return prices of rows at which everything has one, all that there is being worth about 1."""
    supply, cells = model.supply, model.cells
    nodes = available_nodes(supply).ravel()
    even = np.zeros(model.rows)
    even[cells:] = 1.0
    for k, sizes in enumerate(supply.sizes):
        for gpus, kind in sizes:
            even[model.cell(k, kind)] = gpus
    mixed = np.zeros(model.rows)
    parts = [(market_prices(model).row, 1.0 if row_price is None else _MARKET), (even, _EVEN)]
    if row_price is not None:
        parts.append((np.maximum(row_price, 0.0), 1.0))
    for price, part in parts:
        value = float(price[:cells] @ nodes)
        if value > 0.0:
            mixed += part / value * price
    return mixed


def _stack(tables: list[NDArray[_Number]], padding: float) -> NDArray[_Number]:
    """One table below the other, padded to the widest."""
    width = max((table.shape[1] for table in tables), default=1)
    out = np.full((sum(len(table) for table in tables), width), padding, tables[0].dtype)
    begin = 0
    for table in tables:
        out[begin : begin + len(table), : table.shape[1]] = table
        begin += len(table)
    return out
