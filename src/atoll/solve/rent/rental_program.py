"""The part of every master problem that rents machines: offers, slices, rows, limits on the whole.

Columns come first: b_k machines of offer k, and w_{k,s} slices of each size taken of them anew. Rows, all of
the form >= 0 unless said otherwise:

    cell (g, c)     sum of w of that kind - new nodes in use
    GPUs of k       gpus_k b_k - sum_s s w_{k,s} - GPUs that kept instances hold
    limits          budget, number of machines

What uses nodes is added by those who build on it.
"""

from __future__ import annotations

import numpy as np

from atoll.solve.array_types import Floats, Ints
from atoll.solve.lp import LinearProgram, LpResult, MipResult, Sparse
from atoll.solve.rent.incumbent import MipLimits, Work
from atoll.solve.rent.items import RentModel, ServiceItems, Solution
from atoll.solve.rent.relaxation import Prices

_COLUMNS = 1000.0
"""Columns up to which an iteration of an integer solve counts as one."""


_SUPPLY_LIMITS = MipLimits(np.inf, 1e-9, 1e-9, iterations=200_000)
"""Of the cheapest machines for given items: a small program, solved to its end."""


class RentalProgram:
    """A linear program with offers, rows and limits; `rent` = 0 makes machines free of charge."""

    def __init__(self, model: RentModel, *, rent: float, seed: int, work: Work) -> None:
        self.model = model
        self.lp = LinearProgram(seed)
        self.rent = rent
        self.work = work
        self.limit_rows: dict[str, int] = {}
        self.slices = tuple(
            (k, gpus, kind)
            for k, sizes in enumerate(model.supply.sizes)
            for gpus, kind in sizes
            if model.supply.available[k] > 0
        )
        self._add_rows()
        self._add_offers()

    def _add_rows(self) -> None:
        limits = self.model.limits
        lower = [0.0] * self.model.rows
        for name, least in (
            ("budget", None if limits.budget is None else -limits.budget),
            ("max_nodes", None if limits.max_nodes is None else -float(limits.max_nodes)),
        ):
            if least is not None:
                self.limit_rows[name] = len(lower)
                lower.append(least)
        self.add_empty_rows(np.array(lower))

    def add_empty_rows(self, lower: Floats) -> int:
        """Add rows >= `lower` to be filled by columns; return the first."""
        nothing = np.zeros(0, np.int64)
        entries = Sparse.of(nothing, nothing, np.zeros(0), len(lower))
        return self.lp.add_rows(lower, np.full(len(lower), np.inf), entries)

    def _add_offers(self) -> None:
        model, supply = self.model, self.model.supply
        number = len(supply.usd)
        offers = np.arange(number)
        owner, row, value = [offers], [model.cells + offers], [supply.gpus.astype(np.float64)]
        for name, column in (("budget", supply.budgeted), ("max_nodes", np.ones(number))):
            if name in self.limit_rows:
                owner.append(offers)
                row.append(np.full(number, self.limit_rows[name]))
                value.append(-column)
        self.lp.add_columns(
            self.rent * supply.usd,
            np.zeros(number),
            supply.available.astype(np.float64),
            Sparse.of(np.concatenate(owner), np.concatenate(row), np.concatenate(value), number),
        )
        each = np.arange(len(self.slices))
        k = np.array([s[0] for s in self.slices], np.int64)
        gpus = np.array([s[1] for s in self.slices], np.float64)
        cell = np.array([model.cell(s[0], s[2]) for s in self.slices], np.int64)
        owner, row, value = [each, each], [cell, model.cells + k], [np.ones(len(each)), -gpus]
        self.lp.add_columns(
            self.rent * model.start[k] * gpus,
            np.zeros(len(each)),
            # No more than the machines of the offer can be cut into.
            np.floor(supply.available[k] * supply.gpus[k] / gpus),
            Sparse.of(np.concatenate(owner), np.concatenate(row), np.concatenate(value), len(each)),
        )
        self.supply_columns = number + len(each)

    def use_entries(self, items: ServiceItems, which: Ints) -> tuple[Ints, Ints, Floats]:
        """Return (owner, row, value) of what items take, for columns that count them."""
        owner, at, amount = items.list_use(which)
        return owner, at, -amount.astype(np.float64)

    def prices(self, result: LpResult) -> Prices:
        """Return the duals that a Lagrangian bound is made of."""
        # All rows are >=: duals below 0 are rounding.
        duals = np.maximum(0.0, result.duals)
        limit = {name: float(duals[row]) for name, row in self.limit_rows.items()}
        return Prices(
            duals[: self.model.rows].copy(),
            limit.get("budget", 0.0),
            limit.get("max_nodes", 0.0),
            self.rent,
        )

    def supply_of(self, values: Floats) -> tuple[Ints, dict[tuple[int, int, int], int]]:
        """Return machines and new slices of a solution."""
        number = len(self.model.supply.usd)
        whole = np.rint(values[: self.supply_columns]).astype(np.int64)
        slices = {
            one: int(count) for one, count in zip(self.slices, whole[number:], strict=True) if count
        }
        return whole[:number], slices

    def supply_values(self, solution: Solution) -> Floats:
        """Return the columns of a solution's machines and slices."""
        slices = [solution.slices.get(one, 0) for one in self.slices]
        return np.concatenate([solution.machines, slices]).astype(np.float64)

    def relax(self, time_limit_s: float) -> LpResult:
        """Solve the linear relaxation, counting its work."""
        result = self.lp.solve(time_limit_s)
        self.work.iterations += result.iterations
        # A solve without iterations takes some time as well.
        self.work.charge(result.iterations + 5)
        return result

    def solve_integer(
        self,
        integer: Ints,
        limits: MipLimits,
        start: Floats | None = None,
        *,
        exact: bool = False,
    ) -> MipResult:
        """Solve with whole machines and slices and these further columns whole.

        `exact`: no more slices are taken than are in use, also where that costs nothing.
        """
        supply = np.arange(self.supply_columns)
        self.lp.set_integer(np.concatenate([supply, integer]).astype(np.int64))
        cells = np.arange(self.model.cells if exact else 0)
        self.lp.set_row_bounds(cells, 0.0, 0.0)
        # What an iteration takes grows with the columns.
        dear = max(1.0, self.lp.columns / _COLUMNS)
        result = self.lp.solve_mip(
            time_limit_s=limits.seconds,
            gap=limits.gap,
            absolute_gap=limits.absolute_gap,
            start=start,
            node_limit=limits.nodes,
            iteration_limit=max(1, int(limits.iterations / dear)),
        )
        # For this solve only: the relaxation may leave nodes idle.
        self.lp.set_row_bounds(cells, 0.0, np.inf)
        self.work.mips += 1
        self.work.nodes += result.nodes
        self.work.iterations += result.iterations
        self.work.charge(dear * result.iterations + 20)
        return result


def cheapest_supply(
    model: RentModel, items: tuple[dict[int, int], ...], seed: int
) -> Solution | None:
    """Return a solution of these items with the machines that cost least, None if limits do not allow it.

    A small integer program: a few offers for each cell in use.
    """
    work = Work(np.inf)
    program = RentalProgram(model, rent=1.0, seed=seed, work=work)
    used = np.zeros(model.rows, np.int64)
    entries: list[tuple[int, float]] = []
    for some, number in zip(model.items, items, strict=True):
        used += some.use(number, model.rows)
    entries += [(int(row), -float(used[row])) for row in np.flatnonzero(used)]
    rows = np.array([row for row, _ in entries], np.int64)
    values = np.array([value for _, value in entries])
    one = Sparse.of(np.zeros(len(rows), np.int64), rows, values, 1)
    # All items are one column, fixed at 1: only machines and slices are chosen.
    program.lp.add_columns(np.zeros(1), np.ones(1), np.ones(1), one)
    result = program.solve_integer(np.zeros(0, np.int64), _SUPPLY_LIMITS, exact=True)
    if result.values is None:
        return None
    machines, slices = program.supply_of(result.values)
    return Solution(machines, slices, items)


def costs(model: RentModel, solution: Solution) -> tuple[float, float]:
    """Return rent and what starting costs per hour."""
    init = sum(model.start[k] * gpus * n for (k, gpus, _), n in solution.slices.items())
    return float(model.supply.usd @ solution.machines), float(init)
