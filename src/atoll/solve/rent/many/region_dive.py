"""Whole instances from a relaxation over parts of them, region by region, where services are very many.

The relaxation (`fluid_program`) says what each group of services is served in each region, and what that is
worth. One region after the other is solved with whole instances: at most the machines that there are, and as
much of each group as the relaxation wants there, more than that being worth less. What the region serves is
then taken from what is asked, its machines are closed, and the others are relaxed anew, so what one region
leaves is made up for in the next. Inside a group services come in turn, those of little demand first: few of
them share a region, so that prefill and decode of each can meet there.

Who is left short is seen to by `region_repair`.
"""

from __future__ import annotations

import numpy as np

from atoll.solve.array_types import Floats
from atoll.solve.rent.fast.fast_search import FastSearch, Fitted
from atoll.solve.rent.incumbent import Incumbent, MipLimits
from atoll.solve.rent.items import RentModel
from atoll.solve.rent.many.fluid_program import FluidProgram
from atoll.solve.rent.many.region_program import RegionProgram, Wanted, find_near
from atoll.solve.rent.many.region_repair import RegionRepair
from atoll.solve.rent.relaxation import Prices, lift

_MORE = 1.3
"""How much more than the relaxation wants a region may serve of a service."""
_MORE_WORTH = 0.9
"""What that is worth, as a share of what the relaxation says."""
_WANT_WORTH = 2.0
"""And what is wanted: at what it says, whole instances that cost a little more would be left to others."""
_REST = 0.15
"""Share of what a region serves of a service that is not left over for another region."""
_GAP = 3e-2
"""Share of what is served to which a region is solved."""
_ITERATIONS = 4000
"""Simplex iterations of the program of a region."""
_MIN_SHARE = 1e-6
"""Share of a demand that is worth serving."""


class RegionDive:
    """Solves regions in turn; `search` keeps what they take."""

    def __init__(
        self,
        model: RentModel,
        guide: FluidProgram,
        search: FastSearch,
        standing: Incumbent,
        seed: int,
    ) -> None:
        self.model, self.guide, self.search = model, guide, search
        self.standing, self._seed = standing, seed
        self._left = np.ones(len(model.services))
        demand = np.array([service.roles[0].demand for service in model.services])
        self._scale = np.ones(len(model.services))
        self._order: list[list[int]] = []
        for group in guide.groups:
            self._scale[group] = demand[group] / demand[group].max()
            self._order.append(sorted(group, key=lambda m: (demand[m], m)))

    def run(self) -> Fitted | None:
        """Return whole instances with their machines, and the share that each serves; None if time was up."""
        self.search.clear()
        repair: RegionRepair | None = None
        for region in range(self.model.regions):
            result = self.guide.relax(self.standing.deadline.limit())
            if result.status != "optimal" or self.standing.deadline.is_over():
                return None
            prices = lift(self.model, self.guide.prices(result))
            carried, duals = self.guide.carried(result)[:, region], self.guide.demand_duals(result)
            if repair is None:
                # What is worth how much before anything is settled holds for all regions alike.
                worth = self._scale.copy()
                for group, dual in zip(self.guide.groups, duals, strict=True):
                    worth[group] *= dual
                repair = RegionRepair(self.search, worth, prices, self.standing, self._seed)
            served = self._solve(region, carried, duals, prices)
            self.guide.close(region, served, self.search.ledger.machines)
        if repair is not None:
            repair.run()
        ledger = self.search.ledger
        return self.search.fitted() if ledger.sound and ledger.within else None

    def _solve(self, region: int, carried: Floats, duals: Floats, prices: Prices) -> Floats:
        """Solve a region; return what it serves of each group."""
        wanted: list[Wanted] = []
        owner: list[int] = []
        value = 0.0
        for group, order in enumerate(self._order):
            amount = float(carried[group])
            for m in order:
                if amount <= _MIN_SHARE:
                    break
                left = float(self._left[m])
                if left <= _MIN_SHARE:
                    continue
                want = min(left, amount / self._scale[m])
                amount -= want * self._scale[m]
                more = left - want if left - want < _REST * want else min(left, _MORE * want) - want
                worth = float(duals[group] * self._scale[m])
                pieces = ((want, _WANT_WORTH * worth), (max(0.0, more), _MORE_WORTH * worth))
                near, _ = find_near(self.model, m, region, left, prices)
                wanted.append(Wanted(m, pieces, near))
                owner.append(group)
                value += worth * want
        served = np.zeros(len(self._order))
        if not wanted:
            return served
        program = RegionProgram(
            self.model, region, wanted, rent=1.0, seed=self._seed, work=self.standing.work
        )
        limits = MipLimits(self.standing.deadline.limit(), 0.0, _GAP * value, _ITERATIONS)
        for one, group, chosen in zip(wanted, owner, program.run(limits), strict=True):
            m, picker = one.service, self.search.pickers[one.service]
            if not self.search.ledger.take_all(picker.items, chosen):
                continue
            self.search.chosen[m] |= chosen
            now = min(picker.served(chosen), float(self._left[m]))
            self._left[m] -= now
            served[group] += now * self._scale[m]
        return served
