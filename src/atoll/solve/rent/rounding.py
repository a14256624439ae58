"""From a relaxation over mixes to whole mixes that fit together, where services are very many: by diving.

The relaxation takes some mixes nearly whole. Those are fixed, with the machines that they take, and the
others are relaxed anew, with more mixes at the prices that are left, until all services have theirs. Who has
no mix that fits gets what is cheapest of what is left at these prices.
"""

from __future__ import annotations

import numpy as np

from atoll.solve.array_types import Floats
from atoll.solve.rent.fast.fast_search import FastSearch, Fitted
from atoll.solve.rent.mix_master import Decomposition
from atoll.solve.rent.relaxation import Prices, lift

_STEPS = 12
"""How often the rest is relaxed anew at most: so many parts of all services are fixed one after the other."""
_WHOLE = 0.9
"""Share of a mix from which on it is fixed at once."""
_MIN_SHARE_USED = 1e-6
"""Share of a mix from which on the relaxation counts as using it."""


class Dive:
    """Fixes mixes of a relaxation one after the other; `search` keeps what they take."""

    def __init__(self, mixes: Decomposition, search: FastSearch) -> None:
        self.mixes, self.search = mixes, search
        self._free = set(range(len(mixes.oracles)))

    def run(self) -> Fitted | None:
        """Return whole mixes for all services with their machines, None where some found nothing."""
        master, standing = self.mixes.master, self.mixes.standing
        self.search.clear()
        fewest = -(-len(self._free) // _STEPS)
        while self._free:
            result = master.relax(standing.deadline.limit())
            if result.status != "optimal" or standing.deadline.is_over():
                break
            prices = lift(self.mixes.model, master.prices(result))
            duals = master.demand_duals(result)
            if self.mixes.gather(prices, duals, sorted(self._free)):
                result = master.relax(standing.deadline.limit())
                if result.status != "optimal":
                    break
                prices = lift(self.mixes.model, master.prices(result))
            self._fix(master.mix_values(result), prices, fewest)
        master.free_all()
        return None if self._free or self.search.failed else self.search.fitted()

    def _fix(self, taken: Floats, prices: Prices, fewest: int) -> None:
        """Fix the mixes taken most: all that are nearly whole, and a few at least."""
        master, search = self.mixes.master, self.search
        used: dict[int, list[tuple[float, int]]] = {m: [] for m in self._free}
        for at in np.flatnonzero(taken > _MIN_SHARE_USED).tolist():
            service, mix = master.mixes[at]
            if service in used and mix.share >= 1.0:
                used[service].append((-float(taken[at]), at))
        cost = [legs.least for legs in self.mixes.root.legs]
        # Of those taken equally the dearer first: they are harder to place later.
        order = sorted(used, key=lambda m: (min(used[m], default=(0.0, 0))[0], -cost[m], m))
        for number, m in enumerate(order):
            best = -min(used[m], default=(0.0, 0))[0]
            if number >= fewest and best < _WHOLE:
                return
            for _, at in sorted(used[m]):
                chosen = dict(master.mixes[at][1].items)
                if search.take(m, chosen):
                    master.fix(at)
                    break
            else:
                # What is left at these prices; where there is not enough, someone else's is too much.
                if search.fill(m, 1.0, prices.row):
                    master.fix(self.mixes.include(m, search.chosen[m]))
                else:
                    search.failed.add(m)
                    master.give_up(m)
            self._free.discard(m)
