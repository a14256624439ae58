"""Column generation over mixes that keep within what there is.

As `rent.mixes`, with oracles that count scarce cells whole.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atoll.solve.rent.capped.oracle import CappedOracle, capped_oracles, fits
from atoll.solve.rent.items import RentModel
from atoll.solve.rent.mixes import Decomposition, Mix, Pace, best_level
from atoll.solve.rent.relaxation import Goal, Prices, row_prices
from atoll.solve.rent.standing import Incumbent
from atoll.solve.rent.steps import GRID

Floats = NDArray[np.float64]

_COUNTED = 4
"""How often in a round cells may be added to those that a service's oracle counts."""
_DEAR = 1.05
_IN_USE = 1e-6


class CappedDecomposition(Decomposition):
    """Finds the best prices where each service keeps within what there is."""

    pace = Pace(rounds=40, stay=0.8, near=0.05, patience=8, spend=0.6)

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
            items, level = None, GRID
            for _ in range(_COUNTED):
                self.standing.work.charge(self._round_work / len(self.capped))
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
        super().converge(start)


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
