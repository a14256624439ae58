"""Cost of serving a service that keeps within the nodes there are, prefill and decode together.

The functions of `service_oracle` let a service take any number of nodes; prices hold it back only on average,
as if a half of a mix that takes twice what there is were a plan. Here what phases apart cost in a region
counts the scarce cells whole (`capped_cover`): A_g(d) is the least over prefill and decode instances that
serve d there and together take no more of them than there are. Cells are scarce if mixes took more than
there is; each mix that is picked may add some, as long as states stay few. Whatever cells are counted, the
functions are lower bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from atoll.solve.array_types import Floats, Ints
from atoll.solve.rent.allocation_types import DECODE, PREFILL
from atoll.solve.rent.capped.capped_cover import LEVELS, CappedTable, cover_capped
from atoll.solve.rent.incumbent import Incumbent, Work
from atoll.solve.rent.items import RentModel, available_nodes
from atoll.solve.rent.mix_master import Decomposition, Mix, Pace, best_level
from atoll.solve.rent.relaxation import Goal, Prices
from atoll.solve.rent.service_oracle import Legs, ServiceOracle
from atoll.solve.rent.step_functions import steps_of

STATES = 1500
"""States of a region up to which cells are counted."""
_STEP_TOLERANCE = 1e-9
"""Levels that rounding may add to or take from a share."""
_TABLE_WORK = 2e-6
"""Work of one step of a table, in simplex iterations."""
_COUNTED = 4
"""How often in a round cells may be added to those that a service's oracle counts."""
_UNSERVED_PRICE = 1.4
"""Price of leaving a service unserved, as a multiple of what serving it costs."""
_MIN_SHARE_USED = 1e-6
"""Share of a mix from which on the relaxation counts as using it."""


class CappedOracle(ServiceOracle):
    """Answers for one service within what there is; not for regions that KV travels between."""

    def __init__(self, model: RentModel, service: int, work: Work) -> None:
        super().__init__(model.services[service], model.items[service], model.regions)
        self._work = work
        # The level that a step of the finer grid needs at least.
        self._level_of_step = -(-np.arange(self.grid + 1) // (self.grid // LEVELS))
        self._rows = model.rows
        self._kinds = len(model.supply.kinds)
        self._room = available_nodes(model.supply).ravel()
        # Tables are by region and know new items only.
        self.possible = self.zones == model.regions and not model.items[service].running
        self.scarce: list[list[int]] = [[] for _ in range(self.zones)]
        self._tables: dict[int, tuple[CappedTable, CappedTable, Ints]] = {}
        self._taken: dict[tuple[int, int], Ints] = {}

    def _find_leads(self, row_price: Floats) -> Ints:
        # A cheaper region is no better where it has not as many nodes.
        if any(self.scarce):
            return np.arange(self.zones)
        return super()._find_leads(row_price)

    def legs(self, row_price: Floats, *, lower: bool = True) -> Legs:
        """Return the functions at these prices, phases apart within the scarce cells of each region."""
        legs = super().legs(row_price, lower=lower)
        if not any(self.scarce):
            return legs
        # What is picked follows the tables of these prices only.
        if not lower:
            self._tables.clear()
        apart, zones = list(legs.apart), list(legs.zones)
        for zone, cells in enumerate(self.scarce):
            # Nothing to do where no cell is scarce, or the zone is not among those looked at.
            if not cells or not legs.apart[zone].level[-1]:
                continue
            found = self._apart(zone, legs.cost, lower)[self._level_of_step]
            # Levels are coarser than steps, so the plain functions may be the better bound.
            if lower:
                found = np.maximum(found, legs.tables[PREFILL, zone] + legs.tables[DECODE, zone])
            apart[zone] = steps_of(found, lower=lower)
            zones[zone] = self._either(apart[zone], legs.both[zone], lower=lower)
        # Within what there is, two parts in one zone are not as one: zone after zone.
        totals = [zones[0]]
        for function in zones[1:]:
            totals.append(self._either(totals[-1], function, lower=lower))
        legs = replace(
            legs, apart=tuple(apart), zones=tuple(zones), totals=tuple(totals), split=None
        )
        if lower:
            self._rank(row_price, legs)
        return legs

    def _apart(self, zone: int, cost: Floats, lower: bool) -> Floats:
        """Return the cost of covering each level with both phases within the scarce cells."""
        caps = self._room[self.scarce[zone]]
        tables = []
        for phase in (PREFILL, DECODE):
            which = self._list_new((phase, zone))
            share = self._share(which) * LEVELS
            steps = np.ceil(share - _STEP_TOLERANCE) if lower else np.floor(share + _STEP_TOLERANCE)
            steps = np.minimum(steps, LEVELS).astype(np.int64)
            table, work = cover_capped(self._take(phase, zone), steps, cost[which], caps)
            self._work.charge(_TABLE_WORK * work)
            tables.append(replace(table, item=which[table.item]))
        # A lower bound is nothing to pick from.
        if not lower:
            self._tables[zone] = tables[0], tables[1], caps
        # Counted from the end, the second phase has what the first one leaves.
        return np.asarray((tables[0].value + tables[1].value[::-1]).min(axis=0))

    def _take(self, phase: int, zone: int) -> Ints:
        """Return how many nodes of each scarce cell the items take."""
        cells = self.scarce[zone]
        known = self._taken.get((phase, zone))
        # Cells are only ever added: as many columns are the same cells.
        if known is None or known.shape[1] != len(cells):
            which = self._list_new((phase, zone))
            place, row, amount = self.items.list_use(which)
            known = np.zeros((len(which), len(cells)), np.int64)
            for column, cell in enumerate(cells):
                here = row == cell
                np.add.at(known[:, column], place[here], amount[here])
            self._taken[phase, zone] = known
        return known

    def _pick_apart(self, legs: Legs, zone: int, level: int, chosen: dict[int, int]) -> bool:
        if zone not in self._tables:
            return super()._pick_apart(legs, zone, level, chosen)
        prefill, decode, caps = self._tables[zone]
        level = int(self._level_of_step[level])
        sums = prefill.value[:, level] + decode.value[::-1, level]
        state = int(np.argmin(sums))
        if not np.isfinite(sums[state]):
            return False
        last = len(sums) - 1
        for table, max_state in ((prefill, state), (decode, last - state)):
            for item in table.pick(max_state, level, caps):
                chosen[item] = chosen.get(item, 0) + 1
        return True

    def note(self, chosen: dict[int, int]) -> bool:
        """Count the cells that a mix takes too much of from now on; return whether there were such."""
        if not self.possible:
            return False
        used = self.items.use(chosen, self._rows)[: len(self._room)]
        added = False
        # Those with the most too much, for their size, first.
        over = [int(cell) for cell in np.flatnonzero(used > self._room)]
        for cell in sorted(over, key=lambda c: (-float(used[c]) / max(1, int(self._room[c])), c)):
            cells = self.scarce[cell // self._kinds]
            if cell in cells:
                continue
            # Tables have a row for every state.
            states = np.prod(self._room[[*cells, cell]] + 1)
            if states <= STATES:
                cells.append(cell)
                added = True
        return added


def fits(model: RentModel, service: int, chosen: dict[int, int]) -> bool:
    """Return whether a mix takes no more of any cell than there is."""
    used = model.items[service].use(chosen, model.rows)[: model.cells]
    return bool((used <= available_nodes(model.supply).ravel()).all())


def capped_oracles(
    model: RentModel, mixes: Sequence[tuple[int, dict[int, int]]], work: Work
) -> list[CappedOracle]:
    """Return an oracle for each service that counts the cells these mixes take too much of."""
    oracles = [CappedOracle(model, m, work) for m in range(len(model.services))]
    for service, chosen in mixes:
        oracles[service].note(chosen)
    return oracles


class CappedDecomposition(Decomposition):
    """Finds the best prices where each service keeps within what there is."""

    pace = Pace(
        rounds=40, stay=0.8, near=0.05, patience=4, spend=0.6, dearer=1.3, dear=0.02, step=0.05
    )

    def __init__(
        self,
        model: RentModel,
        capped: list[CappedOracle],
        goal: Goal,
        unserved: Floats,
        standing: Incumbent,
        seed: int,
    ) -> None:
        super().__init__(model, list(capped), goal, unserved, standing, seed)
        self.capped = capped

    def gather(self, prices: Prices, duals: Floats, services: Sequence[int] | None = None) -> bool:
        """Add the best mix of each service, or of some, at these prices; return whether any is new."""
        row = prices.row
        added = False
        for service in range(len(self.capped)) if services is None else services:
            oracle = self.capped[service]
            items, level = None, oracle.grid
            for _ in range(_COUNTED):
                self.standing.work.charge(self._round_work / len(self.capped))
                legs = oracle.legs(row, lower=False)
                if self.goal != "cost":
                    level = best_level(legs, float(duals[service]))
                items = oracle.pick(legs, level) if level else None
                # Nothing is taken too much of, or nothing more can be counted: this mix it is.
                if not items or not oracle.note(items):
                    break
            if items:
                mix = Mix(tuple(sorted(items.items())), level / oracle.grid)
                added |= self.master.add(service, mix)
        return added

    def converge(self, prices: Prices | None = None) -> None:
        """Improve the bound from prices of a bound without caps until it meets the relaxation."""
        start = prices or self.root.prices
        self.rate(start)
        if self.goal == "cost" and np.isfinite(self.root.value):
            # Dear enough to be served, and so little dearer that prices stay where they were.
            self.unserved = _UNSERVED_PRICE * np.maximum(
                1.0, [legs.least for legs in self.root.legs]
            )
            self.master.set_unserved(self.unserved)
        super().converge(start)


def tighten(mixes: Decomposition, seed: int) -> Decomposition:
    """Return a decomposition whose services keep within what there is, if those of `mixes` did not.

    `mixes` has converged; without anything taken too much of it is returned as it is.
    """
    model, standing = mixes.model, mixes.standing
    result = mixes.master.relax(standing.deadline.limit())
    if result.status != "optimal":
        return mixes
    known = [(service, mix, dict(mix.items)) for service, mix in mixes.master.mixes]
    shares = mixes.master.mix_values(result)
    used = [
        (service, items)
        for (service, _, items), share in zip(known, shares, strict=True)
        if share > _MIN_SHARE_USED
    ]
    if all(fits(model, service, items) for service, items in used):
        return mixes
    oracles = capped_oracles(model, used, standing.work)
    if not any(cells for oracle in oracles for cells in oracle.scarce):
        return mixes
    capped = CappedDecomposition(model, oracles, mixes.goal, mixes.unserved, standing, seed)
    # Mixes that fit are good here, too, and need not be found again.
    for service, mix, items in known:
        if fits(model, service, items):
            capped.master.add(service, mix)
    capped.converge(mixes.root.prices)
    return capped
