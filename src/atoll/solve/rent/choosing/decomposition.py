"""Prices for levels: the bound at some prices over all levels, and column generation that betters them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from atoll.solve.rent.choosing.bound import GroupBound, bound_group, slacks_of
from atoll.solve.rent.choosing.level_rows import LevelRows
from atoll.solve.rent.choosing.masters import LevelMixMaster
from atoll.solve.rent.incumbent import Incumbent
from atoll.solve.rent.items import RentModel
from atoll.solve.rent.mix_master import Decomposition, Mix
from atoll.solve.rent.relaxation import Evaluation, Prices, offers_part
from atoll.solve.rent.service_oracle import Legs, ServiceOracle
from atoll.solve.rent.step_functions import GRID

Floats = NDArray[np.float64]

_GRID_TOLERANCE = 1e-9
"""Steps of the grid by which a level may be off by rounding."""
_BOUND_WORK = 60.0
"""Work of the bound of a group, in simplex iterations."""


@dataclass(frozen=True)
class LevelEvaluation(Evaluation):
    """The bound at some prices, over all levels; `groups` as `LevelRows.groups`."""

    groups: tuple[GroupBound, ...] = ()


def evaluate_levels(
    model: RentModel, oracles: Sequence[ServiceOracle], rows: LevelRows, prices: Prices
) -> LevelEvaluation:
    """Return the bound at these prices over all levels that the conditions allow."""
    row = prices.row
    each = [oracle.legs(row) for oracle in oracles]
    for borrower, lender in model.lenders.items():
        each[lender], rents = oracles[lender].lend(each[lender])
        each[borrower] = oracles[borrower].borrow(each[borrower], rents)
    legs = tuple(each)
    ways = set(rows.ways)
    groups = tuple(
        bound_group(rows, group, {way: legs[way] for way in group.ways}) for group in rows.groups
    )
    value = offers_part(model, prices) + sum(leg.gain for leg in legs)
    value += sum(leg.least for m, leg in enumerate(legs) if m not in ways)
    value += sum(group.value for group in groups)
    return LevelEvaluation("cost", prices, value, legs, groups)


def level_slacks(
    oracles: Sequence[ServiceOracle], rows: LevelRows, at: LevelEvaluation
) -> list[Floats]:
    """Return per service by how much each item, once used, raises the bound at least."""
    group_of = {way: g for g, group in enumerate(rows.groups) for way in group.ways}
    out = []
    for m, (oracle, legs) in enumerate(zip(oracles, at.legs, strict=True)):
        if m not in group_of:
            out.append(oracle.slacks(legs))
        elif m in rows.closed:
            out.append(np.full(len(oracle.items), np.inf))
        else:
            out.append(slacks_of(oracle, legs, m, at.groups[group_of[m]], rows.ranges[m]))
    return out


class LevelDecomposition(Decomposition):
    """Finds the best prices by column generation over mixes of instances at all levels."""

    def __init__(
        self,
        model: RentModel,
        oracles: list[ServiceOracle],
        rows: LevelRows,
        standing: Incumbent,
        seed: int,
    ) -> None:
        super().__init__(model, oracles, "cost", np.zeros(len(oracles)), standing, seed)
        self.rows = rows
        self.level_master = LevelMixMaster(model, rows, self.unserved, standing, seed)
        self.master = self.level_master
        self.level_root: LevelEvaluation | None = None
        self._last: LevelEvaluation | None = None
        self._ways = set(rows.ways)

    def rate(self, prices: Prices) -> Evaluation:
        """Evaluate the bound at some prices."""
        self.standing.work.charge(self._round_work + _BOUND_WORK * len(self.rows.groups))
        found = evaluate_levels(self.model, self.oracles, self.rows, prices)
        self._last = found
        if self.level_root is None or found.value > self.level_root.value:
            self.level_root = found
        # The relaxation over mixes meets the convex bounds of groups, which others may be well above.
        convex = found.value - sum(group.value - group.convex for group in found.groups)
        if self._root is None or convex > self._root.value:
            self._root = replace(found, value=convex)
        self.standing.prove(found.value)
        return found

    def gather(self, prices: Prices, duals: Floats, services: Sequence[int] | None = None) -> bool:
        """Add mixes of each service at these prices: all of it, or the levels that are worth most."""
        self.standing.work.charge(self._round_work)
        row = prices.row
        added = False
        for service in range(len(self.oracles)) if services is None else services:
            oracle = self.oracles[service]
            legs = oracle.legs(row, lower=False)
            steps = {GRID}
            if service in self._ways:
                steps = self._steps(service, legs, float(duals[service]))
            for level in sorted(steps):
                items = oracle.pick(legs, level) if level > 0 else None
                if items:
                    mix = Mix(tuple(sorted(items.items())), level / GRID)
                    added |= self.level_master.add(service, mix)
        return added

    def _steps(self, way: int, legs: Legs, worth: float) -> set[int]:
        """Levels of a way to have instances for, in steps of the grid."""
        if way in self.rows.closed:
            return set()
        low, high = self.rows.ranges[way]
        first, last = (
            int(np.ceil(low * GRID - _GRID_TOLERANCE)),
            int(np.ceil(high * GRID - _GRID_TOLERANCE)),
        )
        inside = (legs.total.level <= last) & (legs.total.level >= first)
        if not inside.any():
            return {last}
        gain = np.where(inside, worth * legs.total.level / GRID - legs.total.value, -np.inf)
        best = int(legs.total.level[int(np.argmax(gain))])
        steps = {best}
        if self._last is not None:
            for group in self._last.groups:
                if way in group.levels:
                    step = int(np.ceil(group.levels[way] * GRID - _GRID_TOLERANCE))
                    steps.add(max(first, min(last, step)))
        return steps
