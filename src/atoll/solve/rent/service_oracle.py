"""Cost of serving one service at given prices of rows, as a function of how much of it is served.

A service is served in *legs*: phases apart in a zone, or together in a region. A zone is a set of regions
between which KV caches may travel; mostly each region is its own. Let P_z, D_z and B_z be what covering d
costs with whole prefill, decode and both-phase instances of zone z (`cover`). Then

    A_z(d) = P_z(d) + D_z(d)                         phases apart
    F_z(d) = min over a + b = d of A_z(a) + B_z(b)   some of each
    S(d)   = min over splits of d over zones of the sum of F_z

Availability, limits, link bandwidth and spread are left out, so S is a lower bound where shares are rounded
up to the grid. Rounded down, the same recursion finds instances that do serve d.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from atoll.solve.array_types import Floats, Ints, Small
from atoll.solve.cover import cheapest_by_weight, closure, cover
from atoll.solve.rent.allocation_types import BOTH, DECODE, PREFILL, ServiceDemand
from atoll.solve.rent.items import PHASES, ServiceItems
from atoll.solve.rent.step_functions import (
    EMPTY,
    GRID,
    StepFunction,
    cheapest_rate,
    combine,
    min_with,
    round_shares,
    steps_of,
)

_STEPS = np.arange(GRID + 1) / GRID
_SHARE_BELOW = np.maximum(0.0, np.arange(GRID + 1) - 1.0) / GRID
"""Share of the demand that a level is more than: levels are rounded up."""
_SERVES_NOTHING = np.full(GRID + 1, np.inf)
"""Costs by level of a phase without items: nothing is free, anything else impossible."""
_SERVES_NOTHING[0] = 0.0
Rents = dict[tuple[int, int], float]
"""By phase and zone what all of a service's demand of that phase costs another one that borrows it."""


@dataclass(frozen=True)
class Legs:
    """The functions of one service at some prices: tables by (phase, zone), legs by zone, and their sum.

    Running instances off spot may cost less than nothing where spot is limited: they make room for more of
    it. They are taken to cost nothing, and `gain` (<= 0) is what all of them could bring. `lent` is what each
    item would bring if another service used all of it.
    """

    cost: Floats
    gain: float
    tables: dict[tuple[int, int], Floats]
    apart: tuple[StepFunction, ...]
    both: tuple[StepFunction, ...]
    zones: tuple[StepFunction, ...]
    totals: tuple[StepFunction, ...]
    lent: Floats | float = 0.0

    @property
    def total(self) -> StepFunction:
        """Cost of serving a level by all zones together; `totals[z]` by those up to z."""
        return self.totals[-1]

    @property
    def least(self) -> float:
        """Lower bound on the cost of serving all of it."""
        return self.total.at(GRID)


def zones_of(pairs: tuple[tuple[int, int], ...], regions: int) -> Ints:
    """Return the zone of each region: regions that KV caches may travel between are one."""
    zone = np.arange(regions)
    for g, h in pairs:
        zone[zone == zone[h]] = zone[g]
    return np.unique(zone, return_inverse=True)[1].astype(np.int64)


class ServiceOracle:
    """Answers for one service at any prices."""

    def __init__(self, service: ServiceDemand, items: ServiceItems, regions: int) -> None:
        self.items = items
        self.zone = zones_of(service.pairs, regions)
        self.zones = int(self.zone.max(initial=0)) + 1
        self._up, self._down = round_shares(items.patterns.share)
        self._new: dict[tuple[int, int], slice | Ints] = {}
        self._kept: dict[tuple[int, int], Ints] = {}
        # New items are in order of phase and region, so each region's are a slice.
        new = len(items) - items.running
        cuts = items.cuts(regions)
        for phase in PHASES:
            for zone in range(self.zones):
                places = phase * regions + np.flatnonzero(self.zone == zone)
                self._new[phase, zone] = _join_spans(cuts[places], cuts[places + 1])
                self._kept[phase, zone] = new + np.flatnonzero(
                    (items.phase[new:] == phase) & (self.zone[items.region[new:]] == zone)
                )
        self._priced: tuple[Floats, Floats, float] | None = None

    def steps_up(self, items: Ints) -> Small:
        """Return what some items carry in steps of the grid, rounded up."""
        return self._up[self.items.pattern[items]]

    def _steps_down(self, items: Ints) -> Small:
        return self._down[self.items.pattern[items]]

    def _upper(self, items: Ints) -> Small:
        return self.items.patterns.upper[self.items.pattern[items]]

    def _share(self, items: Ints) -> Floats:
        return self.items.patterns.share[self.items.pattern[items]]

    def legs(self, row_price: Floats, *, lower: bool = True) -> Legs:
        """Return the functions at these prices: a lower bound, or else what whole instances do serve."""
        cost, gain = self._price(row_price)
        tables = {key: self._table(key, cost, lower) for key in self._new}
        return self._legs(cost, gain, tables, lower=lower)

    def lend(self, legs: Legs) -> tuple[Legs, Rents]:
        """Return a lower bound where another service may use a part of single phases, and at which rents.

        Where c is rented and a of it used here, P(c) is paid and the rent of c - a comes back. Any rents give
        a bound if whoever borrows pays them; these are the best prices for throughput there are.
        """
        tables, rents = dict(legs.tables), {}
        lent = np.zeros(len(legs.cost))
        for key in self._new:
            items = np.concatenate([self._list_new(key), self._kept[key]])
            items = items[self._share(items) > 0.0]
            if key[0] == BOTH or not len(items):
                continue
            rent = rents[key] = float((legs.cost[items] / self._share(items)).min())
            lent[items] = rent * self.steps_up(items) / GRID
            back = legs.tables[key] - rent * _STEPS
            # Any level from a on may be rented; a itself may be almost a step less.
            least = np.minimum.accumulate(back[::-1])[::-1] + rent * (_STEPS - 1.0 / GRID)
            tables[key] = np.maximum(least, rent * _SHARE_BELOW)
        return replace(self._legs(legs.cost, legs.gain, tables, lower=True), lent=lent), rents

    def borrow(self, legs: Legs, rents: Rents) -> Legs:
        """Return a lower bound where any part of a phase may be had from another service at its rent."""
        tables = dict(legs.tables)
        for key, rent in rents.items():
            own = legs.tables[key]
            some = np.minimum.accumulate(own - rent * _STEPS) + rent * _STEPS
            # Own instances may cover a step less than all: then what is borrowed is a step less, too.
            tables[key] = np.minimum(own, np.append(0.0, some[:-1]))
        return self._legs(legs.cost, legs.gain, tables, lower=True)

    def _legs(
        self, cost: Floats, gain: float, tables: dict[tuple[int, int], Floats], *, lower: bool
    ) -> Legs:
        apart, both, zones = [], [], []
        for zone in range(self.zones):
            # Apart, prefill and decode of a zone serve the same level.
            sums = tables[PREFILL, zone] + tables[DECODE, zone]
            apart.append(steps_of(sums, lower=lower))
            both.append(steps_of(tables[BOTH, zone], lower=lower))
            zones.append(_either(apart[-1], both[-1], lower=lower))
        totals = [zones[0]]
        for function in zones[1:]:
            totals.append(_either(totals[-1], function, lower=lower))
        return Legs(cost, gain, tables, tuple(apart), tuple(both), tuple(zones), tuple(totals))

    def _price(self, row_price: Floats) -> tuple[Floats, float]:
        """Return the cost of each item, at least 0, and what items that cost less could bring."""
        if self._priced is None or not np.array_equal(self._priced[0], row_price):
            cost = self.items.prices(row_price)
            last = np.arange(len(cost) - self.items.running, len(cost))
            gain = float((np.minimum(0.0, cost[last]) * self._upper(last)).sum())
            np.maximum(0.0, cost, out=cost)
            # Bounds and mixes are often asked for at the same prices, one after the other.
            self._priced = (row_price.copy(), cost, gain)
        return self._priced[1:]

    def _table(self, key: tuple[int, int], cost: Floats, lower: bool) -> Floats:
        """Return the cost of covering every level with whole instances of a phase and zone."""
        if not self._any(*key):
            return _SERVES_NOTHING
        new, kept = self._new[key], self._kept[key]
        # Rounded up, a cover is never dearer than the truth; rounded down, it truly covers.
        weights = self._up if lower else self._down
        best = np.full((1, GRID + 1), np.inf)
        rate = cheapest_rate(
            cost[new], self.items.pattern[new], weights, self.items.patterns.share, best[0]
        )
        # Items below one step cover nothing.
        best[:, 0] = np.inf
        if len(kept):
            weight = weights[self.items.pattern[kept]]
            some, weight = kept[weight > 0], weight[weight > 0]
            table = cover(
                best,
                1,
                np.zeros(len(some), np.int64),
                weight,
                cost[some],
                # More of one item than cover everything are never needed.
                np.minimum(self._upper(some), -(-GRID // weight)).astype(np.int64),
            )[-1]
            table[0] = 0.0
        else:
            table, _, _ = closure(best[0])
        if lower:
            # Whatever the grid, a share of the demand costs at least that share at the best price for
            # throughput; d steps are more than d - 1 of them.
            rate = min(rate, float((cost[kept] / self._share(kept)).min(initial=np.inf)))
            table = np.maximum(table, rate * _SHARE_BELOW)
        return np.asarray(table)

    def pick(self, legs: Legs, level: int = GRID) -> dict[int, int] | None:
        """Return items that serve a level at what `legs` (no lower bound) say it costs, None if none do."""
        place = int(np.searchsorted(legs.total.level, level))
        if place == len(legs.total.level):
            return None
        chosen: dict[int, int] = {}
        points = [0] * self.zones
        # Back from the last zone: each total knows the point of the zones before and that of its own.
        for zone in range(self.zones - 1, 0, -1):
            points[zone] = int(legs.totals[zone].second[place])
            place = int(legs.totals[zone].first[place])
        points[0] = place
        for zone, point in enumerate(points):
            function = legs.zones[zone]
            a, b = _parts(legs, zone, function, point)
            if a > 0 and not self._pick_apart(legs, zone, a, chosen):
                return None
            if b > 0 and not self._pick_one(legs, (BOTH, zone), b, chosen):
                return None
        return chosen

    def _pick_apart(self, legs: Legs, zone: int, level: int, chosen: dict[int, int]) -> bool:
        """Add the items that cover a level of prefill and decode in one zone, if there are such."""
        return all(
            self._pick_one(legs, (phase, zone), level, chosen) for phase in (PREFILL, DECODE)
        )

    def _pick_one(
        self, legs: Legs, key: tuple[int, int], level: int, chosen: dict[int, int]
    ) -> bool:
        """Add the items that cover a level of one phase in one zone; return whether there are such."""
        cost, new = legs.cost, self._list_new(key)
        down = self._steps_down(new)
        new, down = new[down > 0], down[down > 0]
        zeros = np.zeros(len(new), np.int32)
        table, _, _ = closure(cheapest_by_weight(cost[new], down, zeros, 1, GRID + 1)[0])
        # Running items first, weighed against what new ones cost for the rest.
        d = self._pick_kept(key, cost, table[: level + 1], chosen)
        while d > 0:
            if not len(new):
                return False
            rest = np.maximum(0, d - down)
            value = cost[new] + table[rest]
            place = int(np.argmin(value))
            if not np.isfinite(value[place]):
                return False
            item = int(new[place])
            chosen[item] = chosen.get(item, 0) + 1
            d = int(rest[place])
        return True

    def _pick_kept(
        self, key: tuple[int, int], cost: Floats, table: Floats, chosen: dict[int, int]
    ) -> int:
        """Add the running items of the best cover of the last level of a table, return what they leave.

        `table` is what new items cost. Each layer adds one running item, so that none is used too often.
        """
        every, last = self._kept[key], len(table) - 1
        down = dict(zip(every.tolist(), self._steps_down(every).tolist(), strict=True))
        upper = dict(zip(every.tolist(), self._upper(every).tolist(), strict=True))
        kept = [i for i, steps in down.items() if steps > 0]
        max_kept = [min(upper[i], -(-last // down[i])) for i in kept]
        layers = [table]
        for item, number in zip(kept, max_kept, strict=True):
            layer = layers[-1].copy()
            for n in range(1, number + 1):
                rest = np.maximum(0, np.arange(last + 1) - n * down[item])
                np.minimum(layer, n * cost[item] + layers[-1][rest], out=layer)
            layers.append(layer)
        d = last
        for item, number, before in zip(kept[::-1], max_kept[::-1], layers[-2::-1], strict=True):
            numbers = np.arange(number + 1)
            rest = np.maximum(0, d - numbers * down[item])
            n = int(np.argmin(numbers * cost[item] + before[rest]))
            if n:
                chosen[item] = chosen.get(item, 0) + n
                d = int(rest[n])
        return d

    def slacks(self, legs: Legs) -> Floats:
        """Return by how much each item, once used, raises the cost of serving everything, at least."""
        out = np.full(len(self.items), np.inf)
        min_cost = legs.least
        # For each zone the cost of all others: of those before it and of those after it.
        before = [EMPTY]
        for function in legs.zones[:-1]:
            before.append(_either(before[-1], function, lower=True))
        after = [EMPTY]
        for function in legs.zones[:0:-1]:
            after.append(_either(after[-1], function, lower=True))
        after.reverse()
        for zone in range(self.zones):
            others = _either(before[zone], after[zone], lower=True)
            if any(self._any(phase, zone) for phase in (PREFILL, DECODE)):
                rest = _either(legs.both[zone], others, lower=True).dense()[::-1]
                for phase, partner in ((PREFILL, DECODE), (DECODE, PREFILL)):
                    if self._any(phase, zone):
                        beside = rest + legs.tables[partner, zone]
                        self._slack(out, legs, (phase, zone), beside, min_cost)
            if self._any(BOTH, zone):
                rest = _either(legs.apart[zone], others, lower=True).dense()[::-1]
                self._slack(out, legs, (BOTH, zone), rest, min_cost)
        return np.asarray(np.maximum(0.0, out))

    def _any(self, phase: int, zone: int) -> bool:
        new = self._new[phase, zone]
        number = new.stop - new.start if isinstance(new, slice) else len(new)
        return bool(number or len(self._kept[phase, zone]))

    def _list_new(self, key: tuple[int, int]) -> Ints:
        new = self._new[key]
        return np.arange(new.start, new.stop) if isinstance(new, slice) else new

    def _slack(
        self, out: Floats, legs: Legs, key: tuple[int, int], beside: Floats, min_cost: float
    ) -> None:
        items = np.concatenate([self._list_new(key), self._kept[key]])
        # By weight: what the rest costs depends on nothing else of an item.
        weight, back = np.unique(self.steps_up(items), return_inverse=True)
        with_it = min_with(legs.tables[key], np.ascontiguousarray(beside), weight.astype(np.int64))
        if np.isfinite(min_cost):
            out[items] = legs.cost[items] + with_it[back] - min_cost
        else:
            # Nothing bounds the cost, so nothing can be ruled out.
            out[items] = 0.0


def _join_spans(begin: Ints, end: Ints) -> slice | Ints:
    """Items of all spans: a slice where they follow each other, for it copies nothing."""
    if np.array_equal(begin[1:], end[:-1]):
        return slice(int(begin[0]), int(end[-1]))
    return np.concatenate([np.arange(a, b) for a, b in zip(begin, end, strict=True)])


def _either(a: StepFunction, b: StepFunction, *, lower: bool) -> StepFunction:
    """`combine`, at once where one of the two serves nothing."""
    if a.level[-1] == 0:
        zeros = np.zeros(len(b.level), np.int64)
        return StepFunction(b.level, b.value, zeros, np.arange(len(b.level)))
    if b.level[-1] == 0:
        zeros = np.zeros(len(a.level), np.int64)
        return StepFunction(a.level, a.value, np.arange(len(a.level)), zeros)
    return combine(a, b, lower=lower)


def _parts(legs: Legs, zone: int, function: StepFunction, point: int) -> tuple[int, int]:
    """The levels served apart and together at one point of a zone's function."""
    a, b = int(function.first[point]), int(function.second[point])
    return int(legs.apart[zone].level[a]), int(legs.both[zone].level[b])
