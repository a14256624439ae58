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

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from atoll.solve.array_types import Bools, Floats, Ints, Small
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

_ROUNDING = 1e-11
"""Share of a cost by which sums of the same terms may differ."""
_FEW_ZONES = 4
"""Zones up to which all are looked at, whatever they cost."""
Rents = dict[tuple[int, int], float]
"""By phase and zone what all of a service's demand of that phase costs another one that borrows it."""


@dataclass(frozen=True)
class Legs:
    """The functions of one service at some prices: tables by (phase, zone), legs by zone, and their sum.

    Running instances off spot may cost less than nothing where spot is limited: they make room for more of
    it. They are taken to cost nothing, and `gain` (<= 0) is what all of them could bring. `lent` is what each
    item would bring if another service used all of it. `leads[z]` is the zone that costs no more than z
    for anything, so that z was not looked at; z itself where it was. Levels are in steps of 1/`grid`.
    """

    cost: Floats
    gain: float
    tables: dict[tuple[int, int], Floats]
    apart: tuple[StepFunction, ...]
    both: tuple[StepFunction, ...]
    zones: tuple[StepFunction, ...]
    totals: tuple[StepFunction, ...]
    leads: Ints
    grid: int = GRID
    split: _Split | None = None
    lent: Floats | float = 0.0

    @property
    def total(self) -> StepFunction:
        """Cost of serving a level by all zones together; `totals[z]` by those up to z."""
        return self.totals[-1]

    @property
    def least(self) -> float:
        """Lower bound on the cost of serving all of it."""
        return self.total.at(self.grid)


@dataclass(frozen=True)
class _Split:
    """What serving each level costs where any parts of it may be served in any zones.

    F of a zone is subadditive, so parts in one zone are never dearer together: the least over all zones,
    closed under sums, is the least over all splits. `parts` are the levels it is made of, `part_usd` what
    they cost, and `zone` says where each level is cheapest by itself.
    """

    value: Floats
    alone: Floats
    zone: Ints
    parts: Ints
    part_usd: Floats

    @classmethod
    def of(cls, zones: Sequence[StepFunction], grid: int) -> _Split:
        alone, zone = np.full(grid + 1, np.inf), np.zeros(grid + 1, np.int64)
        for z, function in enumerate(zones):
            if function.level[-1] > 0:
                dense = function.dense(grid)
                less = dense < alone
                alone[less], zone[less] = dense[less], z
        alone[0] = np.inf
        value, parts, part_usd = closure(alone, _ROUNDING)
        return cls(value, alone, zone, parts, part_usd)

    def pick(self, level: int) -> list[tuple[int, int]]:
        """Return the zones and the levels there that serve a level."""
        found = []
        while level > 0:
            alone = level + int(np.argmin(self.alone[level:]))
            some = self.parts < level
            sums = self.part_usd[some] + self.value[level - self.parts[some]]
            best = int(np.argmin(sums)) if len(sums) else -1
            if best < 0 or self.alone[alone] <= sums[best]:
                found.append((int(self.zone[alone]), alone))
                break
            part = int(self.parts[some][best])
            found.append((int(self.zone[part]), part))
            level -= part
        return found


def zones_of(pairs: tuple[tuple[int, int], ...], regions: int) -> Ints:
    """Return the zone of each region: regions that KV caches may travel between are one."""
    zone = np.arange(regions)
    for g, h in pairs:
        zone[zone == zone[h]] = zone[g]
    return np.unique(zone, return_inverse=True)[1].astype(np.int64)


class ServiceOracle:
    """Answers for one service at any prices, by steps of 1/`grid` of its demand."""

    def __init__(
        self, service: ServiceDemand, items: ServiceItems, regions: int, grid: int = GRID
    ) -> None:
        self.items, self.grid = items, grid
        self._steps = np.arange(grid + 1) / grid
        # The share of the demand that a level is more than: levels are rounded up.
        self._share_below = np.maximum(0.0, np.arange(grid + 1) - 1.0) / grid
        # Costs by level of a phase without items: nothing is free, anything else impossible.
        self._serves_nothing = np.where(self._steps > 0.0, np.inf, 0.0)
        self.zone = zones_of(service.pairs, regions)
        self.zones = int(self.zone.max(initial=0)) + 1
        self._up, self._down = round_shares(items.patterns.share, grid)
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
        self._zone_order: _ZoneOrder | None = None
        if self.zones > _FEW_ZONES and self.zones == regions and not items.running:
            self._zone_order = _ZoneOrder(items, regions)
        self._ranked: tuple[Floats, Ints] | None = None

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
        leads = np.arange(self.zones) if self._zone_order is None else self._find_leads(row_price)
        some = np.unique(leads) if lower else self._best_zones(row_price, cost, leads)
        tables = {
            (phase, zone): self._table((phase, zone), cost, lower)
            for zone in some.tolist()
            for phase in PHASES
        }
        legs = self._legs(cost, gain, tables, leads, lower=lower)
        if lower:
            legs = self._raise_to_rate(legs)
            self._rank(row_price, legs)
        return legs

    def _rank(self, row_price: Floats, legs: Legs) -> None:
        """Note in which zones all of it costs least at these prices."""
        if self._zone_order is not None:
            full = np.array([function.at(self.grid) for function in legs.zones])
            self._ranked = row_price.copy(), np.argsort(full, kind="stable")

    def _zone_rates(self, cost: Floats) -> Floats:
        """Return by zone the best price for throughput, as that of all of the demand."""
        # No item runs where this is asked, so they are in order of phase and zone.
        cuts = self.items.cuts(self.zones)
        rate = np.full(len(cuts) - 1, np.inf)
        some = np.flatnonzero(np.diff(cuts))
        if len(some):
            rate[some] = np.minimum.reduceat(cost / self.items.share, cuts[some])
        by_phase = rate.reshape(len(PHASES), self.zones)
        return np.asarray(np.minimum(by_phase[PREFILL] + by_phase[DECODE], by_phase[BOTH]))

    def _raise_to_rate(self, legs: Legs) -> Legs:
        """Return legs that cost no less than what they serve at the best price for throughput of all zones.

        Levels are rounded for each part of a split: where parts are many, their sum says less than this.
        """
        if legs.split is None:
            return legs
        least = self._zone_rates(legs.cost).min()
        if not np.isfinite(least):
            return legs
        value = np.maximum(legs.split.value, float(least) * self._share_below)
        return replace(legs, totals=(steps_of(value, lower=True),))

    def _find_leads(self, row_price: Floats) -> Ints:
        """Return for each zone one that costs no more for anything, itself where there is none."""
        if self._zone_order is None:
            return np.arange(self.zones)
        return self._zone_order.leads(row_price)

    def _best_zones(self, row_price: Floats, cost: Floats, leads: Ints) -> Ints:
        """Return the zones to choose among: where there are many, the few in which all of it costs least."""
        some = np.unique(leads)
        if self._zone_order is None or len(some) <= _FEW_ZONES:
            return some
        if self._ranked is not None and np.array_equal(self._ranked[0], row_price):
            return self._ranked[1][:_FEW_ZONES]
        # Where services are very many, tables of all zones take too long: the best by throughput.
        if self.grid < GRID:
            return some[np.argsort(self._zone_rates(cost)[some], kind="stable")[:_FEW_ZONES]]
        return some

    def lend(self, legs: Legs) -> tuple[Legs, Rents]:
        """Return a lower bound where another service may use a part of single phases, and at which rents.

        Where c is rented and a of it used here, P(c) is paid and the rent of c - a comes back. Any rents give
        a bound if whoever borrows pays them; these are the best prices for throughput there are.
        """
        tables, rents = dict(legs.tables), {}
        lent = np.zeros(len(legs.cost))
        for key in legs.tables:
            items = np.concatenate([self._list_new(key), self._kept[key]])
            items = items[self._share(items) > 0.0]
            if key[0] == BOTH or not len(items):
                continue
            rent = rents[key] = float((legs.cost[items] / self._share(items)).min())
            lent[items] = rent * self.steps_up(items) / self.grid
            back = legs.tables[key] - rent * self._steps
            # Any level from a on may be rented; a itself may be almost a step less.
            least = np.minimum.accumulate(back[::-1])[::-1] + rent * (self._steps - 1.0 / self.grid)
            tables[key] = np.maximum(least, rent * self._share_below)
        legs = self._legs(legs.cost, legs.gain, tables, legs.leads, lower=True)
        return replace(legs, lent=lent), rents

    def borrow(self, legs: Legs, rents: Rents) -> Legs:
        """Return a lower bound where any part of a phase may be had from another service at its rent."""
        tables = dict(legs.tables)
        for key, rent in rents.items():
            own = legs.tables[key]
            some = np.minimum.accumulate(own - rent * self._steps) + rent * self._steps
            # Own instances may cover a step less than all: then what is borrowed is a step less, too.
            tables[key] = np.minimum(own, np.append(0.0, some[:-1]))
        return self._legs(legs.cost, legs.gain, tables, legs.leads, lower=True)

    def _legs(
        self,
        cost: Floats,
        gain: float,
        tables: dict[tuple[int, int], Floats],
        leads: Ints,
        *,
        lower: bool,
    ) -> Legs:
        apart, both, zones = ([EMPTY] * self.zones for _ in range(3))
        for zone in sorted({zone for _, zone in tables}):
            # Apart, prefill and decode of a zone serve the same level.
            sums = tables[PREFILL, zone] + tables[DECODE, zone]
            apart[zone] = steps_of(sums, lower=lower)
            both[zone] = steps_of(tables[BOTH, zone], lower=lower)
            zones[zone] = self._either(apart[zone], both[zone], lower=lower)
        split = None
        totals = [zones[0]]
        # Many zones of which each takes any number of nodes: all splits at once.
        if self._zone_order is not None and self.grid < GRID:
            split = _Split.of(zones, self.grid)
            totals = [steps_of(split.value, lower=lower)]
        else:
            for function in zones[1:]:
                totals.append(self._either(totals[-1], function, lower=lower))
        return Legs(
            cost,
            gain,
            tables,
            tuple(apart),
            tuple(both),
            tuple(zones),
            tuple(totals),
            leads,
            self.grid,
            split,
        )

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
            return self._serves_nothing
        new, kept = self._new[key], self._kept[key]
        # Rounded up, a cover is never dearer than the truth; rounded down, it truly covers.
        weights = self._up if lower else self._down
        best = np.full((1, self.grid + 1), np.inf)
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
                np.minimum(self._upper(some), -(-self.grid // weight)).astype(np.int64),
            )[-1]
            table[0] = 0.0
        else:
            table, _, _ = closure(best[0])
        if lower:
            # Whatever the grid, a share of the demand costs at least that share at the best price for
            # throughput; d steps are more than d - 1 of them.
            rate = min(rate, float((cost[kept] / self._share(kept)).min(initial=np.inf)))
            table = np.maximum(table, rate * self._share_below)
        return np.asarray(table)

    def pick(self, legs: Legs, level: int | None = None) -> dict[int, int] | None:
        """Return items that serve a level (all) at what `legs` (no lower bound) say, None if none do."""
        level = self.grid if level is None else level
        place = int(np.searchsorted(legs.total.level, level))
        if place == len(legs.total.level):
            return None
        chosen: dict[int, int] = {}
        if legs.split is not None:
            for zone, part in legs.split.pick(level):
                point = int(np.searchsorted(legs.zones[zone].level, part))
                if not self._pick_zone(legs, zone, point, chosen):
                    return None
            return chosen
        points = [0] * self.zones
        # Back from the last zone: each total knows the point of the zones before and that of its own.
        for zone in range(self.zones - 1, 0, -1):
            points[zone] = int(legs.totals[zone].second[place])
            place = int(legs.totals[zone].first[place])
        points[0] = place
        for zone, point in enumerate(points):
            if not self._pick_zone(legs, zone, point, chosen):
                return None
        return chosen

    def pick_several(self, legs: Legs, level: int) -> list[dict[int, int]]:
        """Return the items of `pick`; where zones are many, also what serves the level in each alone."""
        found = [self.pick(legs, level)]
        if self._zone_order is not None:
            for zone, function in enumerate(legs.zones):
                point = int(np.searchsorted(function.level, level))
                if point < len(function.level):
                    chosen: dict[int, int] = {}
                    if self._pick_zone(legs, zone, point, chosen):
                        found.append(chosen)
        return [chosen for chosen in found if chosen]

    def _pick_zone(self, legs: Legs, zone: int, point: int, chosen: dict[int, int]) -> bool:
        """Add the items that serve one point of a zone's function, if there are such."""
        a, b = _parts(legs, zone, legs.zones[zone], point)
        return (a == 0 or self._pick_apart(legs, zone, a, chosen)) and (
            b == 0 or self._pick_one(legs, (BOTH, zone), b, chosen)
        )

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
        table, _, _ = closure(cheapest_by_weight(cost[new], down, zeros, 1, self.grid + 1)[0])
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

    def _either(self, a: StepFunction, b: StepFunction, *, lower: bool) -> StepFunction:
        """`combine`, at once where one of the two serves nothing."""
        if a.level[-1] == 0:
            zeros = np.zeros(len(b.level), np.int64)
            return StepFunction(b.level, b.value, zeros, np.arange(len(b.level)))
        if b.level[-1] == 0:
            zeros = np.zeros(len(a.level), np.int64)
            return StepFunction(a.level, a.value, np.arange(len(a.level)), zeros)
        return combine(a, b, lower=lower, grid=self.grid)

    def slacks(self, legs: Legs) -> Floats:
        """Return by how much each item, once used, raises the cost of serving everything, at least."""
        out = np.full(len(self.items), np.inf)
        min_cost = legs.least
        if legs.split is not None:
            # What the rest costs at least, wherever it is served.
            rest = legs.split.value[::-1]
            for zone in np.unique(legs.leads).tolist():
                for phase in PHASES:
                    if self._any(phase, zone):
                        partner = DECODE if phase == PREFILL else PREFILL
                        beside = rest if phase == BOTH else rest + legs.tables[partner, zone]
                        self._slack(out, legs, (phase, zone), beside, min_cost)
            return np.asarray(np.maximum(0.0, self._follow(out, legs)))
        # For each zone the cost of all others: of those before it and of those after it.
        before = [EMPTY]
        for function in legs.zones[:-1]:
            before.append(self._either(before[-1], function, lower=True))
        after = [EMPTY]
        for function in legs.zones[:0:-1]:
            after.append(self._either(after[-1], function, lower=True))
        after.reverse()
        for zone in np.unique(legs.leads).tolist():
            others = self._either(before[zone], after[zone], lower=True)
            if any(self._any(phase, zone) for phase in (PREFILL, DECODE)):
                rest = self._either(legs.both[zone], others, lower=True).dense(self.grid)[::-1]
                for phase, partner in ((PREFILL, DECODE), (DECODE, PREFILL)):
                    if self._any(phase, zone):
                        beside = rest + legs.tables[partner, zone]
                        self._slack(out, legs, (phase, zone), beside, min_cost)
            if self._any(BOTH, zone):
                rest = self._either(legs.apart[zone], others, lower=True).dense(self.grid)[::-1]
                self._slack(out, legs, (BOTH, zone), rest, min_cost)
        return np.asarray(np.maximum(0.0, self._follow(out, legs)))

    def _follow(self, out: Floats, legs: Legs) -> Floats:
        """Write the slacks of zones that others lead; return all.

        All of what a zone has can move to the one that leads it: each item saves what it is dearer here.
        """
        for zone in np.flatnonzero(legs.leads != np.arange(self.zones)).tolist():
            for phase in PHASES:
                here, there = (self._list_new((phase, z)) for z in (zone, int(legs.leads[zone])))
                same = there[np.searchsorted(self.items.pattern[there], self.items.pattern[here])]
                out[here] = out[same] + legs.cost[here] - legs.cost[same]
        return out

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


class _ZoneOrder:
    """Says which zones, each a region, need not be looked at: another one costs no more for anything."""

    def __init__(self, items: ServiceItems, regions: int) -> None:
        rows = items.patterns.rows
        self._kinds = np.unique(rows[rows >= 0]).astype(np.int64)
        cuts = items.cuts(regions).tolist()
        has = np.zeros((regions, len(rows)), np.bool_)
        for at, (begin, end) in enumerate(itertools.pairwise(cuts)):
            has[at % regions, items.pattern[begin:end]] = True
        # Most regions have the same: those are compared once.
        alike, group = np.unique(np.packbits(has, axis=1), axis=0, return_inverse=True)
        group = group.reshape(-1)
        within = np.array([[not np.any(b & ~a) for b in alike] for a in alike], np.bool_)
        self._holds = within[np.ix_(group, group)]
        self._cell = np.arange(regions)[:, None] * items.kinds + self._kinds
        used = np.zeros((len(rows), len(self._kinds)), np.bool_)
        place, column = np.nonzero(rows >= 0)
        used[place, np.searchsorted(self._kinds, rows[place, column])] = True
        self._used = np.array([used[own].any(axis=0) for own in has])

    def leads(self, row_price: Floats) -> Ints:
        """Return for each zone one that has all it has at no higher prices, itself where there is none."""
        price = np.where(self._used, row_price[self._cell], np.inf)
        no_dearer: Bools = np.asarray(
            self._holds & np.all(price[:, None, :] <= price[None, :, :], axis=2)
        )
        each = np.arange(len(price))
        # Of equals the first leads.
        ahead = no_dearer & (~no_dearer.T | (each[:, None] < each[None, :]))
        led: Bools = np.asarray(ahead.any(axis=0))
        first = np.argmax(ahead & ~led[:, None], axis=0)
        return np.where(led, first, each)


def _parts(legs: Legs, zone: int, function: StepFunction, point: int) -> tuple[int, int]:
    """The levels served apart and together at one point of a zone's function."""
    a, b = int(function.first[point]), int(function.second[point])
    return int(legs.apart[zone].level[a]), int(legs.both[zone].level[b])
