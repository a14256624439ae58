"""Asks for one service: which items cover a share of its demand at given prices."""

from __future__ import annotations

import numpy as np

from atoll.solve.array_types import Floats, Ints
from atoll.solve.rent.allocation_types import BOTH, DECODE, PREFILL
from atoll.solve.rent.fast.fast_kernel import pick_items
from atoll.solve.rent.items import RentModel, ServiceItems

_STEPS = 512
_MAX_STEPS = 16384
_MIN_WEIGHT = 24
"""Steps that the items with the best rate should have at least: what rounding may lose is one of them."""


_MAX_KNOWN = 3


class PickerRoom:
    """Arrays that pickers of one model work in, one after the other."""

    def __init__(self, model: RentModel) -> None:
        groups, width = 3 * model.regions, _STEPS + 1
        max_items = max((len(items) for items in model.items), default=0)
        running = max((items.running for items in model.items), default=0)
        self.cost = np.empty(max_items)
        self.kept = np.empty(running, np.int64)
        self.base_level, self.base_cost = np.empty(groups, np.int64), np.empty(groups)
        self.min_cost = np.empty(groups)
        self.legs = np.empty(8, np.int64)
        self.covered = np.empty(2)
        self._groups, self._running = groups, running
        self.widen(width)

    def widen(self, width: int) -> None:
        """Make room for so many levels."""
        self.width = width
        self.best, self.best_item = np.empty(width), np.empty(width, np.int32)
        self.weight = np.empty(width, np.int64)
        self.table = np.empty((self._groups, width))
        self.choice = np.empty((self._groups, width), np.int32)
        self.out_item = np.empty(4 * width + 2 * self._running, np.int64)
        self.out_count = np.empty(len(self.out_item), np.int64)


class ServicePicker:
    """The items of one service, and how many steps its demand is best counted in."""

    def __init__(self, model: RentModel, index: int, room: PickerRoom) -> None:
        self.items: ServiceItems = model.items[index]
        self._regions, self._room = model.regions, room
        self._begin = self.items.cuts(model.regions)
        self._new = len(self.items) - self.items.running
        largest = [
            self.items.share[self.items.phase == phase].max(initial=0.0)
            for phase in (PREFILL, DECODE, BOTH)
        ]
        # The phase whose largest item is smallest needs the finest steps.
        min_share = min((share for share in largest if share > 0.0), default=1.0)
        self._fine = _MIN_WEIGHT / min_share
        self.cost = 0.0
        self._known: list[tuple[Floats, float, dict[int, int] | None, float]] = []

    def pick(
        self, row_price: Floats, target: float = 1.0, chosen: dict[int, int] | None = None
    ) -> dict[int, int] | None:
        """Return items that cover `target` of the demand at the least price, beside those chosen already.

        None where nothing does. What it costs at these prices is in `cost` then. Prices once asked with are
        not to be changed: the last answers are known.
        """
        if chosen:
            return self._work_out(row_price, target, chosen)
        # Known by identity: this is why prices must not change.
        for price, share, found, cost in self._known:
            if price is row_price and share == target:
                self.cost = cost
                return None if found is None else dict(found)
        found = self._work_out(row_price, target, {})
        self._known = [(row_price, target, found, self.cost), *self._known[:_MAX_KNOWN]]
        return None if found is None else dict(found)

    def _work_out(
        self, row_price: Floats, target: float, chosen: dict[int, int]
    ) -> dict[int, int] | None:
        items, room = self.items, self._room
        steps = int(min(_MAX_STEPS, max(_STEPS, self._fine * target)))
        # Shared by all services, so it only ever grows.
        if room.width <= steps:
            room.widen(steps + 1)
        left = items.upper[self._new :].astype(np.int64)
        for item, number in chosen.items():
            # Running items that are chosen already cannot be kept once more.
            if item >= self._new:
                left[item - self._new] -= number
        number = pick_items(
            items.phase, items.region, items.pattern, items.patterns.rows, items.patterns.amount,
            items.patterns.share, self._begin, items.kinds, self._new, self._regions, row_price, left,
            target, steps, room.cost[: len(items)], room.best, room.best_item, room.weight, room.table,
            room.choice, room.base_level, room.base_cost, room.min_cost, room.kept[: items.running],
            room.legs, room.out_item, room.out_count, room.covered,
        )  # fmt: skip
        self.cost = float(room.covered[1])
        if number < 0:
            return None
        found: dict[int, int] = {}
        for item, count in zip(
            room.out_item[:number].tolist(), room.out_count[:number].tolist(), strict=True
        ):
            found[item] = found.get(item, 0) + count
        return found

    def served(self, chosen: dict[int, int]) -> float:
        """Return the share of the demand that items serve, phases paired inside regions only."""
        items = self.items
        level: dict[tuple[int, int], float] = {}
        for item, count in chosen.items():
            key = (int(items.phase[item]), int(items.region[item]))
            level[key] = level.get(key, 0.0) + float(items.share[item]) * count
        return sum(
            share if phase == BOTH else min(share, level.get((DECODE, region), 0.0))
            for (phase, region), share in level.items()
            if phase != DECODE
        )

    def group(self, item: int) -> Ints:
        """Return the items of the same phase and region as one of them."""
        items = self.items
        same = (items.phase == items.phase[item]) & (items.region == items.region[item])
        return np.flatnonzero(same)

    def needed(self, chosen: dict[int, int], item: int, target: float) -> float:
        """Return the share that an item of the phase and region of `item` must have beside those chosen."""
        items = self.items
        phase, region = int(items.phase[item]), int(items.region[item])
        if phase == BOTH:
            return target - self.served(chosen)
        here = {
            each: number
            for each, number in chosen.items()
            if int(items.region[each]) == region and items.phase[each] != BOTH
        }
        others = {each: number for each, number in chosen.items() if each not in here}
        own = sum(
            float(items.share[each]) * number
            for each, number in here.items()
            if items.phase[each] == phase
        )
        return target - self.served(others) - own

    def groups(self) -> list[Ints]:
        """Return the items of each phase and region that has any."""
        items = self.items
        key = items.phase.astype(np.int64) * self._regions + items.region
        return [np.flatnonzero(key == each) for each in np.unique(key)]
