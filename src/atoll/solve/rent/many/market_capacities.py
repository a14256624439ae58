"""What there is of a market as sums that must not be exceeded, where machines are cut in halves and quarters.

Slices of at least s GPUs come from machines that give such: together they take no more GPUs than those have.
Where each size divides the next, that is also enough; where it is not, the market's ledger says no later.
Limits on the whole are sums, too: a node counts at the dearest price, a slice as a part of a machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from atoll.solve.array_types import Floats, Ints
from atoll.solve.rent.fast.market_ledger import Families
from atoll.solve.rent.items import RentModel, available_nodes

EVERYWHERE = -1
"""Region of a capacity that all regions share."""


@dataclass(frozen=True)
class MarketCapacities:
    """How much there is of each capacity, and in which region.

    One of row i of a model takes `amount[n]` of capacity `use[n]`, n from `begin[i]` up to `begin[i + 1]`.
    """

    free: Floats
    region: Ints
    begin: Ints
    use: Ints
    amount: Floats

    @classmethod
    def of(cls, model: RentModel, families: Families) -> MarketCapacities:
        """Return the capacities of a market."""
        found = _Sums([], [], [[] for _ in range(model.rows)])
        nodes = available_nodes(model.supply).ravel()
        for f in families.each:
            _add_family(found, model, families, int(f), nodes)
        for limit, price in _limits(model):
            _add_limit(found, model, families, limit, price)
        takes = found.takes
        return cls(
            np.array(found.free),
            np.array(found.region, np.int64),
            np.concatenate([[0], np.cumsum([len(some) for some in takes])]).astype(np.int64),
            np.array([use for some in takes for use, _ in some], np.int64),
            np.array([amount for some in takes for _, amount in some], np.float64),
        )


@dataclass
class _Sums:
    """Capacities as they are found, and by row what it takes of which."""

    free: list[float]
    region: list[int]
    takes: list[list[tuple[int, float]]]

    def add(self, free: float, region: int, takes: Iterable[tuple[int, float]]) -> None:
        for row, amount in takes:
            self.takes[row].append((len(self.free), amount))
        self.free.append(free)
        self.region.append(region)


def _add_family(found: _Sums, model: RentModel, families: Families, f: int, nodes: Ints) -> None:
    """Add the sums of what shares machines."""
    supply = model.supply
    at = slice(families.cell_begin[f], families.cell_begin[f + 1])
    cells = families.cell_of[at].tolist()
    gpus = dict(zip(cells, families.cell_gpus[at].tolist(), strict=True))
    offers = families.offer_of[families.offer_begin[f] : families.offer_begin[f + 1]].tolist()
    where = int(supply.region[offers[0]])
    largest = {k: max(size for size, _ in supply.sizes[k]) for k in offers}
    known: dict[int, float] = {}
    for size in sorted(set(gpus.values())):
        able = [k for k in offers if largest[k] >= size]
        there = float((supply.gpus[able] * supply.available[able]).sum())
        # The same GPUs bound fewer slices: nothing new.
        if there in known.values():
            continue
        known[size] = there
        new = [(cell, float(each)) for cell, each in gpus.items() if each >= size]
        found.add(there, where, [*new, *((model.cells + k, 1.0) for k in able)])
    for cell, each in gpus.items():
        own = float(nodes[cell])
        if own * each < min(there for size, there in known.items() if size <= each):
            found.add(own, where, [(cell, 1.0)])


def _add_limit(
    found: _Sums, model: RentModel, families: Families, limit: float, price: Floats
) -> None:
    """Add a limit on the whole: what all GPUs together count at these prices."""
    new: list[tuple[int, float]] = []
    for at, cell in enumerate(families.cell_of.tolist()):
        sources = families.source_offer[families.source_begin[at] : families.source_begin[at + 1]]
        new.append((cell, float(price[sources].max() * families.cell_gpus[at])))
    held = [(model.cells + k, each) for k, each in enumerate(price.tolist())]
    found.add(limit, EVERYWHERE, [*new, *held])


def _limits(model: RentModel) -> list[tuple[float, Floats]]:
    """Limits on the whole, and what a GPU of each offer counts there."""
    supply, limits = model.supply, model.limits
    found: list[tuple[float, Floats]] = []
    if limits.budget is not None:
        found.append((limits.budget, np.asarray(supply.budgeted / supply.gpus)))
    if limits.max_nodes is not None:
        found.append((float(limits.max_nodes), 1.0 / supply.gpus))
    return found
