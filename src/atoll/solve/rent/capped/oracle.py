"""What serving a service costs if it keeps within what there is, prefill and decode together.

The functions of `rent.oracle` let a service take any number of nodes; prices hold it back only on average,
as if a half of a mix that takes twice what there is were a plan. Here what phases apart cost in a region
counts the scarce cells whole (`capped.cover`): A_g(d) is the least over prefill and decode instances that
serve d there and together take no more of them than there are. Cells are scarce if mixes took more than
there is; each mix that is picked may add some, as long as states stay few. Whatever cells are counted, the
functions are lower bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from atoll.solve.rent.capped.cover import LEVELS, CappedTable, cover_capped
from atoll.solve.rent.items import RentModel, available_nodes
from atoll.solve.rent.oracle import Legs, ServiceOracle, _either
from atoll.solve.rent.standing import Work
from atoll.solve.rent.steps import GRID, steps_of
from atoll.solve.rent.types import DECODE, PREFILL

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

STATES = 1500
"""States of a region up to which cells are counted."""
_HAIR = 1e-9
_TABLE_WORK = 5e-6
"""What a step of a table takes, in simplex iterations."""
_FINE = -(-np.arange(GRID + 1) // (GRID // LEVELS))
"""The level that a step of the fine grid needs at least."""


class CappedOracle(ServiceOracle):
    """Answers for one service within what there is; not for regions that KV travels between."""

    def __init__(self, model: RentModel, service: int, work: Work) -> None:
        super().__init__(model.services[service], model.items[service], model.regions)
        self._work = work
        self._rows = model.rows
        self._kinds = len(model.supply.kinds)
        self._room = available_nodes(model.supply).ravel()
        self.possible = self.zones == model.regions and not model.items[service].running
        self.scarce: list[list[int]] = [[] for _ in range(self.zones)]
        self._tables: dict[int, tuple[CappedTable, CappedTable, Ints]] = {}
        self._taken: dict[tuple[int, int], Ints] = {}

    def legs(self, row_price: Floats, *, lower: bool = True) -> Legs:
        """Return the functions at these prices, phases apart within the scarce cells of each region."""
        legs = super().legs(row_price, lower=lower)
        if not any(self.scarce):
            return legs
        if not lower:
            self._tables.clear()
        apart, zones = list(legs.apart), list(legs.zones)
        for zone, cells in enumerate(self.scarce):
            if not cells:
                continue
            found = self._apart(zone, legs.cost, lower)[_FINE]
            if lower:
                found = np.maximum(found, legs.tables[PREFILL, zone] + legs.tables[DECODE, zone])
            apart[zone] = steps_of(found, lower=lower)
            zones[zone] = _either(apart[zone], legs.both[zone], lower=lower)
        totals = [zones[0]]
        for function in zones[1:]:
            totals.append(_either(totals[-1], function, lower=lower))
        return replace(legs, apart=tuple(apart), zones=tuple(zones), totals=tuple(totals))

    def _apart(self, zone: int, cost: Floats, lower: bool) -> Floats:
        """What covering each level with both phases costs within the scarce cells."""
        caps = self._room[self.scarce[zone]]
        tables = []
        for phase in (PREFILL, DECODE):
            which = self._list_new((phase, zone))
            share = self._share(which) * LEVELS
            steps = np.ceil(share - _HAIR) if lower else np.floor(share + _HAIR)
            steps = np.minimum(steps, LEVELS).astype(np.int64)
            table, work = cover_capped(self._take(phase, zone), steps, cost[which], caps)
            self._work.charge(_TABLE_WORK * work)
            tables.append(replace(table, item=which[table.item]))
        if not lower:
            self._tables[zone] = tables[0], tables[1], caps
        return np.asarray((tables[0].value + tables[1].value[::-1]).min(axis=0))

    def _take(self, phase: int, zone: int) -> Ints:
        """What items take of each scarce cell."""
        cells = self.scarce[zone]
        known = self._taken.get((phase, zone))
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
        level = int(_FINE[level])
        sums = prefill.value[:, level] + decode.value[::-1, level]
        state = int(np.argmin(sums))
        if not np.isfinite(sums[state]):
            return False
        last = len(sums) - 1
        for table, most in ((prefill, state), (decode, last - state)):
            for item in table.pick(most, level, caps):
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
