"""Ledger of what is taken of the market: nodes by cell, GPUs by offer, and their cost.

A *family* is a GPU type in a region: cells and offers that can share machines. Families do not touch each
other, so what they cost is counted one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from atoll.solve.array_types import Floats, Ints
from atoll.solve.rent.fast.fast_kernel import deal_slices, price_one_more
from atoll.solve.rent.items import RentModel, ServiceItems, Solution

_LIMIT_TOLERANCE = 1e-9
"""Share of a limit that sums may exceed by rounding."""


@dataclass(frozen=True)
class Families:
    """Which cells and offers share machines, as arrays that the kernel reads.

    `of_cell` and `of_offer` say which family each is of, -1 where it is of none. A *source* is an offer that
    gives nodes of a cell; those of cell c of the list are `source_begin[c]` to `source_begin[c + 1]`.
    """

    of_cell: Ints
    of_offer: Ints
    cell_begin: Ints
    cell_of: Ints
    cell_gpus: Ints
    source_begin: Ints
    source_offer: Ints
    offer_begin: Ints
    offer_of: Ints

    def __len__(self) -> int:
        return len(self.cell_begin) - 1

    @property
    def each(self) -> Ints:
        """The numbers of all families."""
        return np.arange(len(self))

    @classmethod
    def of(cls, model: RentModel) -> Families:
        """Return the families of a market."""
        supply = model.supply
        family = np.full(model.cells, -1, np.int64)
        of_offer = np.full(len(supply.usd), -1, np.int64)
        number = 0
        # Offers that give nodes of one cell are one family, and so are all that this joins.
        for k, sizes in enumerate(supply.sizes):
            cells = [model.cell(k, kind) for _, kind in sizes]
            known = {int(family[cell]) for cell in cells} - {-1}
            # The smallest number stays, so that families come in the order of their first offers.
            joined = min(known, default=number)
            if not known:
                number += 1
            for other in known - {joined}:
                family[family == other] = joined
                of_offer[of_offer == other] = joined
            family[cells] = joined
            of_offer[k] = joined
        # Joining leaves gaps in the numbers: close them.
        order = {f: n for n, f in enumerate(sorted({*map(int, of_offer)}))}
        of_offer = np.array([order[int(f)] for f in of_offer], np.int64)
        family = np.array([order.get(int(f), -1) for f in family], np.int64)
        sources: dict[int, list[int]] = {}
        size_of: dict[int, int] = {}
        for k, sizes in enumerate(supply.sizes):
            for gpus, kind in sizes:
                cell = model.cell(k, kind)
                size_of[cell] = gpus
                sources.setdefault(cell, []).append(k)
        # Large slices first in each family, as dealing expects them.
        cells = sorted(sources, key=lambda cell: (int(family[cell]), -size_of[cell], cell))
        offers = sorted(range(len(of_offer)), key=lambda k: (int(of_offer[k]), k))
        each = np.arange(len(order) + 1)
        return cls(
            family,
            of_offer,
            np.searchsorted([family[cell] for cell in cells], each).astype(np.int64),
            np.array(cells, np.int64),
            np.array([size_of[cell] for cell in cells], np.int64),
            np.concatenate([[0], np.cumsum([len(sources[cell]) for cell in cells])]).astype(
                np.int64
            ),
            np.array([k for cell in cells for k in sources[cell]], np.int64),
            np.searchsorted([of_offer[k] for k in offers], each).astype(np.int64),
            np.array(offers, np.int64),
        )


@dataclass(frozen=True)
class Books:
    """A copy of what a ledger holds, to go back to."""

    need: Ints
    held: Ints
    used: Ints
    slices: Ints
    total: Floats
    unsound: Ints


def within_limits(model: RentModel, machines: Ints) -> bool:
    """Return whether so many machines of each offer keep the limits on the whole: machines and budget."""
    limits = model.limits
    if limits.max_nodes is not None and int(machines.sum()) > limits.max_nodes:
        return False
    rent = float(model.supply.budgeted @ machines)
    return limits.budget is None or rent <= limits.budget * (1.0 + _LIMIT_TOLERANCE)


class MarketLedger:
    """Nodes and GPUs taken, and their cost; `take` says no where the market does.

    Giving back always works, though what is left may then have no machines: it is not `sound` until
    something else is given back.
    """

    def __init__(self, model: RentModel, families: Families) -> None:
        supply = model.supply
        self.model, self.families = model, families
        self.need = np.zeros(model.cells, np.int64)
        self.held = np.zeros(len(supply.usd), np.int64)
        self.used = np.zeros(len(supply.usd), np.int64)
        self.slices = np.zeros(len(families.source_offer), np.int64)
        self.total = np.zeros(len(families))
        self.paid = supply.usd.copy()
        self.available = supply.available.copy()
        cell = np.repeat(np.arange(len(families.cell_of)), np.diff(families.source_begin))
        self.gpus_of = np.zeros(model.cells, np.int64)
        self.gpus_of[families.cell_of] = families.cell_gpus
        self.source_gpus = families.cell_gpus[cell]
        self.source_cell = families.cell_of[cell]
        self._unsound = np.zeros(0, np.int64)

    def copy(self) -> Books:
        """Return what is taken now."""
        return Books(
            self.need.copy(), self.held.copy(), self.used.copy(), self.slices.copy(),
            self.total.copy(), self._unsound,
        )  # fmt: skip

    def go_back(self, books: Books) -> None:
        """Make everything as it was."""
        self.need[:], self.held[:], self.used[:] = books.need, books.held, books.used
        self.slices[:], self.total[:] = books.slices, books.total
        self._unsound = books.unsound

    def clear(self) -> None:
        """Give everything back."""
        for counts in (self.need, self.held, self.used, self.slices):
            counts[:] = 0
        self.total[:] = 0.0
        self._unsound = self._unsound[:0]

    @property
    def machines(self) -> Ints:
        """Machines of each offer that are rented."""
        return -(-self.used // self.model.supply.gpus)

    @property
    def cost(self) -> float:
        """Rent and what starting costs, in USD per hour; inf where not all has its machines."""
        return float(self.total.sum()) if self.sound else np.inf

    @property
    def within(self) -> bool:
        """Whether the limits on the whole hold: machines and budget."""
        return within_limits(self.model, self.machines)

    def take(self, items: ServiceItems, item: int, number: int) -> bool:
        """Take the nodes of so many of an item, or give them back (below 0); False where that cannot be."""
        return self.take_all(items, {item: abs(number)}, 1 if number > 0 else -1)

    def take_all(self, items: ServiceItems, chosen: dict[int, int], sign: int = 1) -> bool:
        """Take the nodes of all these items, or with `sign` -1 give them back; all of them or none."""
        if not chosen:
            return True
        which = np.fromiter(chosen, np.int64, len(chosen))
        number = np.fromiter(chosen.values(), np.int64, len(chosen)) * sign
        place, row, amount = items.list_use(which)
        amount = amount * number[place]
        cells = self.model.cells
        new = row < cells
        self._move(row[new], amount[new], row[~new] - cells, amount[~new])
        touched = self._touched(row[new], row[~new] - cells)
        if self._deal(touched) or sign < 0:
            return True
        self._move(row[new], -amount[new], row[~new] - cells, -amount[~new])
        self._deal(touched)
        return False

    def can_move(self, cells: Ints, nodes: Ints, offers: Ints, gpus: Ints) -> bool:
        """Return whether so many nodes of cells and GPUs of offers more could be had; takes nothing."""
        self._move(cells, nodes, offers, gpus)
        touched = self._touched(cells, offers)
        fits = self._deal(touched)
        self._move(cells, -nodes, offers, -gpus)
        self._deal(touched)
        return fits

    def _move(self, cells: Ints, nodes: Ints, offers: Ints, gpus: Ints) -> None:
        np.add.at(self.need, cells, nodes)
        np.add.at(self.held, offers, gpus)

    def _touched(self, cells: Ints, offers: Ints) -> Ints:
        families = self.families
        both = np.concatenate([families.of_cell[cells], families.of_offer[offers]])
        return np.unique(both)

    def _deal(self, which: Ints) -> bool:
        if len(self._unsound):
            which = np.union1d(which, self._unsound)
        families, supply = self.families, self.model.supply
        failed = deal_slices(
            which, families.cell_begin, families.cell_of, families.cell_gpus, families.source_begin,
            families.source_offer, families.offer_begin, families.offer_of, supply.gpus,
            self.available, self.need, self.held, supply.usd, self.paid, self.model.start, self.used,
            self.slices, self.total,
        )  # fmt: skip
        self._unsound = self._unsound[:0] if failed < 0 else which
        return bool(failed < 0)

    def sum_up(self) -> None:
        """Count GPUs and what they cost anew, of what is held and of slices as they are dealt."""
        families, supply = self.families, self.model.supply
        gpus = self.slices * self.source_gpus
        self.used[:] = self.held
        np.add.at(self.used, families.source_offer, gpus)
        self.total[:] = 0.0
        np.add.at(self.total, families.of_offer, supply.usd * self.machines)
        offers = families.source_offer
        np.add.at(self.total, families.of_offer[offers], self.model.start[offers] * gpus)

    def marginal(self, price: Floats) -> Floats:
        """Return prices at which one more node of each cell costs what it would cost now."""
        families, supply = self.families, self.model.supply
        out = price.copy()
        price_one_more(
            families.cell_begin, families.cell_of, families.cell_gpus, families.source_begin,
            families.source_offer, families.offer_begin, families.offer_of, supply.gpus, self.available,
            self.need, self.held, supply.usd, self.paid, self.model.start, np.empty_like(self.used),
            np.empty_like(self.slices), np.empty_like(self.total), np.empty(1, np.int64), out,
        )  # fmt: skip
        return out

    @property
    def sound(self) -> bool:
        """Whether all that is taken has its machines."""
        return not len(self._unsound)

    def solution(self, items: tuple[dict[int, int], ...]) -> Solution:
        """Return what stands now as a solution of the model, with these items."""
        slices = {
            (
                int(self.families.source_offer[s]),
                int(self.source_gpus[s]),
                int(self.source_cell[s]) % len(self.model.supply.kinds),
            ): int(self.slices[s])
            for s in np.flatnonzero(self.slices)
        }
        return Solution(self.machines.copy(), slices, items)
