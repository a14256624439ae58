"""The relaxation over parts of instances, where services are very many: a linear program that is soon solved.

Services of the same templates are one group: parts of instances carry any of them. With x >= 0 of each item
of a group and levels a_{g,z} served by phases apart in a zone,

    demand g         sum_z a_{g,z} + sum_i share_i x_i (both phases) >= demand (1 - unserved)
    phase p in z     sum_i share_i x_i (of that phase and zone) - a_{g,z} >= 0

beside the rows of `rental_program`. Its prices are near those at which whole instances cost most at least,
since services that are large take many instances. What is proven is L(y) at these prices (`relaxation`).
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from atoll.solve.array_types import Ints
from atoll.solve.deadline import Deadline
from atoll.solve.lp import LpResult, Sparse
from atoll.solve.rent.allocation_types import BOTH, ServiceDemand
from atoll.solve.rent.incumbent import Work
from atoll.solve.rent.items import PHASES, RentModel, ServiceItems
from atoll.solve.rent.relaxation import Prices, lift, market_prices, price_of_all
from atoll.solve.rent.rental_program import RentalProgram
from atoll.solve.rent.service_oracle import zones_of

_ROUNDS = 40
"""Rounds of adding items at most."""
_TOLERANCE = 1e-3
"""Share of an item's price by which it must cost less than what it carries is worth, to be added."""
_UNSERVED_PRICE = 4.0
"""Price of serving nobody, as a multiple of what everything on offer costs."""


class FluidProgram(RentalProgram):
    """Grows by items; without rent it finds the largest share, with it the least cost of serving all."""

    def __init__(self, model: RentModel, *, rent: float, seed: int, work: Work) -> None:
        super().__init__(model, rent=rent, seed=seed, work=work)
        self.groups = group_services(model)
        largest = [max(some, key=lambda m: _demand(model.services[m])) for some in self.groups]
        self._largest = largest
        self._items: list[ServiceItems] = [model.items[m] for m in largest]
        self._zones = [zones_of(model.services[m].pairs, model.regions) for m in largest]
        asked = [
            sum(_demand(model.services[m]) for m in some) / _demand(model.services[first])
            for some, first in zip(self.groups, largest, strict=True)
        ]
        number = len(self.groups)
        self._demand_row = self.add_empty_rows(np.array(asked))
        each = np.arange(number)
        price = _UNSERVED_PRICE * price_of_all(model) if rent else 1.0
        left = Sparse.of(np.zeros(number, np.int64), self._demand_row + each, np.array(asked), 1)
        self.lp.add_columns(np.array([price]), np.zeros(1), np.ones(1), left)
        # Rows of a group: prefill, then decode, by zone.
        self._phase_row = self.add_empty_rows(np.zeros(number * 2 * model.regions))
        self._add_levels()
        self._columns: list[tuple[int, int]] = []
        self._known: list[set[int]] = [set() for _ in self.groups]

    def widen(self, model: RentModel) -> None:
        """Go on with a model that differs only by having more templates."""
        old, self._items = self._items, [model.items[m] for m in self._largest]
        self.model = model
        found = [
            _find_again(before, now, model.regions)
            for before, now in zip(old, self._items, strict=True)
        ]
        self._columns = [(group, int(found[group][item])) for group, item in self._columns]
        self._known = [set() for _ in self.groups]
        for group, item in self._columns:
            self._known[group].add(item)

    def _row_of(self, group: int, phase: Ints, zone: Ints) -> Ints:
        """Rows that items of these phases and zones carry."""
        apart = self._phase_row + (2 * group + phase) * self.model.regions + zone
        return np.where(phase == BOTH, self._demand_row + group, apart).astype(np.int64)

    def _add_levels(self) -> None:
        for group, zone in enumerate(self._zones):
            zones = np.unique(zone)
            some = np.arange(len(zones))
            row = [np.full(len(zones), self._demand_row + group)]
            row += [self._row_of(group, np.full(len(zones), p), zones) for p in PHASES if p != BOTH]
            value = np.repeat([1.0, -1.0, -1.0], len(zones))
            entries = Sparse.of(np.tile(some, 3), np.concatenate(row), value, len(zones))
            nothing = np.zeros(len(zones))
            self.lp.add_columns(nothing, nothing, np.full(len(zones), np.inf), entries)

    def converge(self, deadline: Deadline) -> Prices:
        """Return the prices of the relaxation, as good as they are when time is up."""
        prices = market_prices(self.model, self.rent)
        if not self._columns:
            self._add_best(market_prices(self.model), None)
        for _ in range(_ROUNDS):
            result = self.relax(deadline.limit())
            if result.status != "optimal":
                break
            prices = lift(self.model, self.prices(result))
            if not self._add_best(prices, result):
                break
        return prices

    def _add_best(self, prices: Prices, result: LpResult | None) -> bool:
        """Add of each phase and region the item that gains most; return whether any is new."""
        added = False
        for group, items in enumerate(self._items):
            cost = np.maximum(0.0, items.prices(prices.row))
            zone = self._zones[group][items.region]
            row = self._row_of(group, items.phase.astype(np.int64), zone)
            if result is None:
                # The best for what it carries, so that every row has one.
                value = cost / np.maximum(items.share, 1e-12)
            else:
                worth = np.maximum(0.0, result.duals[row]) * items.share
                value = cost * (1.0 + _TOLERANCE) - worth
            self.work.charge(1e-4 * len(items))
            cuts = items.cuts(self.model.regions)
            found = [
                begin + int(np.argmin(value[begin:end]))
                for begin, end in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)
                if end > begin
            ]
            new = [
                i
                for i in found
                if (result is None or value[i] < -1e-9) and i not in self._known[group]
            ]
            if new:
                added = True
                self._known[group].update(new)
                self._columns += [(group, item) for item in new]
                which = np.array(new, np.int64)
                owner, at, amount = self.use_entries(items, which)
                entries = Sparse.of(
                    np.concatenate([owner, np.arange(len(new))]),
                    np.concatenate([at, row[which]]),
                    np.concatenate([amount, items.share[which]]),
                    len(new),
                )
                nothing = np.zeros(len(new))
                self.lp.add_columns(nothing, nothing, np.full(len(new), np.inf), entries)
        return added


def _find_again(before: ServiceItems, now: ServiceItems, regions: int) -> Ints:
    """Return the number that each item has among those of more templates."""
    old, new = before.cuts(regions), now.cuts(regions)
    found = np.arange(len(before)) - len(before) + len(now)
    for begin, end, first, last in zip(old[:-1], old[1:], new[:-1], new[1:], strict=True):
        # Templates come in their order in each phase and region.
        found[begin:end] = first + np.searchsorted(now.source[first:last], before.source[begin:end])
    return found


def _demand(service: ServiceDemand) -> float:
    return service.roles[0].demand


def group_services(model: RentModel) -> list[list[int]]:
    """Return services by templates: those of a group share them, and ask of all phases in one proportion."""
    groups: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for m, (service, items) in enumerate(zip(model.services, model.items, strict=True)):
        roles = tuple(
            (role.phase, id(role.counts), id(role.throughput), id(role.among))
            for role in service.roles
        )
        ratio = tuple(round(role.demand / _demand(service), 9) for role in service.roles)
        own = m if items.running else -1
        groups[roles, ratio, service.allowed.tobytes(), service.pairs, own].append(m)
    return list(groups.values())
