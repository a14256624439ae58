"""Column generation over mixes that keep within what there is.

As `rent.mixes`, with oracles that count scarce cells whole. New mixes are sought at prices between those of
the best bound and those of the relaxation, which jump about while few mixes are known.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atoll.solve.rent.capped.oracle import CappedOracle, capped_oracles, fits
from atoll.solve.rent.items import RentModel
from atoll.solve.rent.mixes import Decomposition, Mix, best_level, blend
from atoll.solve.rent.relaxation import Goal, Prices, row_prices
from atoll.solve.rent.standing import Incumbent
from atoll.solve.rent.steps import GRID

Floats = NDArray[np.float64]

_ROUNDS = 40
_STAY = 0.8
"""How near new prices stay to the best."""
_NEAR = 0.05
_COUNTED = 4
"""How often in a round cells may be added to those that a service's oracle counts."""
_DEAR = 1.05
_IN_USE = 1e-6
_GAIN = 1e-6
_STALLED = 8
_SPEND = 0.6
"""Share of the work left that may go into better prices."""


class CappedDecomposition(Decomposition):
    """Finds the best prices where each service keeps within what there is."""

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

    def gather(self, prices: Prices, duals: Floats) -> bool:
        """Add the best mix of each service at these prices; return whether any is new."""
        row = row_prices(self.model, prices)
        added = False
        for service, oracle in enumerate(self.capped):
            self.standing.work.charge(self._round_work / len(self.capped))
            items, level = None, GRID
            for _ in range(_COUNTED):
                legs = oracle.legs(row, lower=False)
                if self.goal != "cost":
                    level = best_level(legs, float(duals[service]))
                items = oracle.pick(legs, level) if level else None
                if not items or not oracle.note(items):
                    break
            if items:
                mix = Mix(tuple(sorted(items.items())), level / GRID)
                added |= self.master.add(service, mix)
        return added

    def converge(self, prices: Prices | None = None) -> None:
        """Improve the bound from prices of a bound without caps until it meets the relaxation."""
        start = prices or self.root.prices
        self.rate(start)
        if self.goal == "cost" and np.isfinite(self.root.value):
            # Dear enough to be served, and so little dearer that prices stay where they were.
            self.unserved = _DEAR * np.maximum(1.0, [legs.least for legs in self.root.legs])
            self.master.set_unserved(self.unserved)
        self.gather(start, np.ones(len(self.capped)))
        stalled, enough = 0, (1.0 - _SPEND) * self.standing.work.left
        while self.rounds < _ROUNDS and not self.standing.done and stalled < _STALLED:
            if self.standing.work.left < enough:
                return
            self.rounds += 1
            self.standing.work.rounds += 1
            result = self.master.relax(self.standing.deadline.left)
            if result.status != "optimal":
                return
            there, duals = self.master.prices(result), self.master.demand_duals(result)
            self.relaxed = there, duals
            near = _NEAR * self.standing.target.spare(result.objective)
            if result.objective - self.root.value <= near:
                if not self._raise_unserved(result):
                    return
                continue
            before = self.root.value
            between = blend(self.root.prices, there, _STAY)
            self.rate(between)
            added = self.gather(between, duals)
            if not added:
                self.rate(there)
                added = self.gather(there, duals)
            better = self.root.value > before + _GAIN * abs(before)
            stalled = 0 if better else stalled + 1
            if not added and not better:
                return


def tighten(mixes: Decomposition, seed: int) -> Decomposition:
    """Return a decomposition whose services keep within what there is, if those of `mixes` did not.

    `mixes` has converged; without anything taken too much of it is returned as it is.
    """
    model, standing = mixes.model, mixes.standing
    result = mixes.master.relax(standing.deadline.left)
    if result.status != "optimal":
        return mixes
    known = [(service, mix, dict(mix.items)) for service, mix in mixes.master.mixes]
    shares = mixes.master.mix_values(result)
    used = [
        (service, items)
        for (service, _, items), share in zip(known, shares, strict=True)
        if share > _IN_USE
    ]
    if all(fits(model, service, items) for service, items in used):
        return mixes
    oracles = capped_oracles(model, used, standing.work)
    if not any(cells for oracle in oracles for cells in oracle.scarce):
        return mixes
    capped = CappedDecomposition(model, oracles, mixes.goal, mixes.unserved, standing, seed)
    for service, mix, items in known:
        if fits(model, service, items):
            capped.master.add(service, mix)
    capped.converge(mixes.root.prices)
    return capped
