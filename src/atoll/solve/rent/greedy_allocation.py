"""A first allocation, quickly: one service after the other takes what is cheapest of what is left.

It serves all it can with whatever can be had, so that there is an answer before the search for the best one
begins. Limits on the whole are not looked at here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from atoll.solve.array_types import Floats
from atoll.solve.rent.allocation_types import BOTH, DECODE, PREFILL
from atoll.solve.rent.items import RentModel, ServiceItems
from atoll.solve.rent.relaxation import market_prices
from atoll.solve.rent.service_oracle import ServiceOracle

_MAX_ROUNDS = 12
"""Rounds in which one service may take some more of what is left."""
_NOT_LEFT = 1e9
"""Price of nodes that nobody can have any more."""
_SHARE_TOLERANCE = 1e-9
"""Share of a demand that counts as nothing."""


class _GpusLeft:
    """GPUs left of each offer. Slices divide each other, so sums are all that matters."""

    def __init__(self, model: RentModel) -> None:
        self._model = model
        self.left = (model.supply.available * model.supply.gpus).astype(np.int64)
        self._sources: dict[int, list[tuple[float, int, int]]] = {}
        for k, sizes in enumerate(model.supply.sizes):
            for gpus, kind in sizes:
                price = float(model.supply.usd[k] * gpus / model.supply.gpus[k])
                self._sources.setdefault(model.cell(k, kind), []).append((price, k, gpus))
        for sources in self._sources.values():
            sources.sort()

    def prices(self, row: Floats) -> Floats:
        """Return prices of rows, out of reach where nothing is left."""
        out = row.copy()
        for cell, sources in self._sources.items():
            if all(self.left[k] < gpus for _, k, gpus in sources):
                out[cell] = _NOT_LEFT
        held = self._model.cells + np.flatnonzero(self.left <= 0)
        out[held] = _NOT_LEFT
        return out

    def take(self, items: ServiceItems, item: int) -> bool:
        """Take the nodes of one item; return whether there were enough."""
        taken: list[tuple[int, int]] = []
        _, rows, amounts = items.list_use(np.array([item]))
        for row, amount in zip(rows, amounts, strict=True):
            if row >= self._model.cells:
                taken.append((int(row) - self._model.cells, int(amount)))
                self.left[taken[-1][0]] -= amount
                continue
            for _ in range(int(amount)):
                source = next((s for s in self._sources[int(row)] if self.left[s[1]] >= s[2]), None)
                if source is None:
                    self._give_back(taken)
                    return False
                taken.append((source[1], source[2]))
                self.left[source[1]] -= source[2]
        if np.any(self.left < 0):
            self._give_back(taken)
            return False
        return True

    def _give_back(self, taken: list[tuple[int, int]]) -> None:
        for k, gpus in taken:
            self.left[k] += gpus


def fill(model: RentModel, oracles: Sequence[ServiceOracle]) -> tuple[dict[int, int], ...] | None:
    """Return items that serve everything, None if this simple way does not find such."""
    room = _GpusLeft(model)
    row = market_prices(model).row
    chosen: list[dict[int, int]] = [{} for _ in oracles]
    order = sorted(range(len(oracles)), key=lambda m: (len(oracles[m].items), m))
    for m in order:
        if not _fill_one(model, oracles[m], room, row, chosen[m]):
            return None
    return tuple(chosen)


def _fill_one(
    model: RentModel, oracle: ServiceOracle, room: _GpusLeft, row: Floats, chosen: dict[int, int]
) -> bool:
    items = oracle.items
    for _ in range(_MAX_ROUNDS):
        rest = 1.0 - served_share(items, chosen, model.regions)
        if rest <= _SHARE_TOLERANCE:
            return True
        legs = oracle.legs(room.prices(row), lower=False)
        level = min(oracle.grid, int(np.ceil(rest * oracle.grid)))
        picked = oracle.pick(legs, level)
        if picked is None or legs.total.at(level) >= _NOT_LEFT:
            return False
        took = False
        for item in sorted(picked, key=lambda i: (-items.share[i], i)):
            for _ in range(picked[item]):
                if chosen.get(item, 0) < items.upper[item] and room.take(items, item):
                    chosen[item] = chosen.get(item, 0) + 1
                    took = True
        if not took:
            return False
    return served_share(items, chosen, model.regions) >= 1.0 - _SHARE_TOLERANCE


def served_share(items: ServiceItems, chosen: dict[int, int], regions: int) -> float:
    """Return the share of a service that items serve, phases paired inside regions only."""
    level = items.levels(chosen, regions)
    return float(np.minimum(level[PREFILL], level[DECODE]).sum() + level[BOTH].sum())
