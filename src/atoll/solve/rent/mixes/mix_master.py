"""The master problem over mixes: one mix per role, nodes for all of them (see `decomposition`).

Columns beside those of `rental`: z_r of each role left unserved, mixes p, and for roles with too many
mixes to list ("loose" ones) single items i as well. Rows, all of the form >=:

    demand r    sum_p share_p lambda_p + sum_i share_i n_i + z_r >= 1     share_p = 1 unless `partial`
    single r    - sum_p lambda_p >= -1
    cut r       sum_p lambda_p + sum_i F(w_i) n_i + z_r >= 1              for loose r, F as in `cover`
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll.solve.lp import LpResult, Sparse
from atoll.solve.rent.columns import RentModel
from atoll.solve.rent.mixes.mixes import MixItems
from atoll.solve.rent.mixes.pool import Mix
from atoll.solve.rent.pairs.rental import RentalProgramme
from atoll.solve.rent.standing import Target

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

Chosen = dict[int, int]
"""Items of one role by source, and how many of each."""


@dataclass(frozen=True)
class MixAnswer:
    """An integer solve: objective, bound over what is in, the items of each role, nodes rented."""

    objective: float
    bound: float
    chosen: list[Chosen] | None
    rented: Ints


@dataclass(frozen=True)
class _Column:
    role: int
    items: tuple[tuple[int, int], ...]
    share: float
    loose: bool
    mix: Mix | None = None


class MixMaster(RentalProgramme):
    """Grows by mixes and by items of loose roles."""

    def __init__(
        self, model: RentModel, unserved: Floats, *, rent: float, partial: bool, seed: int
    ) -> None:
        super().__init__(model, rent=rent, seed=seed)
        roles = len(model.pairs)
        self._partial = partial
        self._demand_row = self.add_empty_rows(np.ones(roles))
        self._single_row = self.add_empty_rows(np.full(roles, -1.0))
        each = np.arange(roles)
        entries = Sparse.of(each, self._demand_row + each, np.ones(roles), roles)
        first = self.lp.add_columns(unserved, np.zeros(roles), np.ones(roles), entries)
        self._unserved = first + each
        self._first = self.lp.columns
        self._columns: list[_Column] = []
        self._loose: dict[int, tuple[int, Floats, set[int]]] = {}

    @property
    def number(self) -> int:
        """How many mixes and items are in."""
        return len(self._columns)

    def set_unserved(self, unserved: Floats) -> None:
        """Change the price of leaving roles unserved."""
        self.lp.set_costs(self._unserved, unserved)

    def unserved_shares(self, result: LpResult) -> Floats:
        """Return how much of each role a relaxed solution leaves unserved."""
        return np.asarray(result.values[self._unserved])

    def add(self, role: int, mixes: list[Mix]) -> None:
        """Add mixes of a role."""
        if not mixes:
            return
        number = len(mixes)
        use = np.array([m.use for m in mixes])
        share = [m.share if self._partial else 1.0 for m in mixes]
        rows = [
            (self._demand_row + role, np.array(share)),
            (self._single_row + role, -np.ones(number)),
        ]
        if role in self._loose:
            rows.append((self._loose[role][0], np.ones(number)))
        init = np.array([m.init for m in mixes])
        self._append(use, init, np.ones(number), rows)
        self._columns += [
            _Column(role, m.items, s, False, m) for m, s in zip(mixes, share, strict=True)
        ]

    def fix(self, column: int) -> None:
        """Take a mix for good until `release`."""
        self.lp.set_bounds(np.array([self._first + column]), np.ones(1), np.ones(1))

    def release(self, columns: list[int]) -> None:
        """Undo `fix`."""
        which = self._first + np.array(columns, np.int64)
        self.lp.set_bounds(which, np.zeros(len(which)), np.ones(len(which)))

    def list_liked(self, result: LpResult, least: float) -> list[tuple[float, int, int, Mix]]:
        """Return (value, role, column, mix) of mixes a relaxed solution takes `least` of, most first."""
        values = result.values[self._first :]
        return sorted(
            (
                (float(values[i]), self._columns[i].role, int(i), mix)
                for i in np.flatnonzero(values >= least)
                if (mix := self._columns[i].mix) is not None
            ),
            key=lambda entry: (-entry[0], entry[1], entry[2]),
        )

    def add_items(self, role: int, items: MixItems, cut: Floats) -> None:
        """Add single items of a role, whose mixes are too many to list, and its cut."""
        if role not in self._loose:
            role_columns = [self._first + i for i, c in enumerate(self._columns) if c.role == role]
            columns = np.array([*role_columns, self._unserved[role]], np.int64)
            entries = Sparse.of(np.zeros(len(columns), np.int64), columns, np.ones(len(columns)), 1)
            row = self.lp.add_rows(np.ones(1), np.full(1, np.inf), entries)
            self._loose[role] = row, cut / cut[-1], set()
        row, function, known = self._loose[role]
        fresh = [i for i, source in enumerate(items.source) if int(source) not in known]
        some = items.take(np.array(fresh, np.int64))
        known |= {int(source) for source in some.source}
        if not len(some):
            return
        cells = self.model.cells
        use = np.array([some.use(np.array([i]))[:cells] for i in range(len(some))])
        upper = np.full(len(some), np.inf)
        kept = some.source < 0
        upper[kept] = some.room[cells - 1 - some.source[kept]]
        rows = [(self._demand_row + role, some.share), (row, function[some.weight])]
        self._append(use, some.init, upper, rows)
        self._columns += [
            _Column(role, ((int(source), 1),), float(share), True)
            for source, share in zip(some.source, some.share, strict=True)
        ]

    def _append(
        self, use: Ints, init: Floats, upper: Floats, rows: list[tuple[int, Floats]]
    ) -> None:
        number = len(init)
        owner, cell = np.nonzero(use)
        each = np.arange(number)
        entries = Sparse.of(
            np.concatenate([owner, *(each for _ in rows)]),
            np.concatenate([cell, *(np.full(number, row) for row, _ in rows)]),
            np.concatenate([-use[owner, cell].astype(np.float64), *(value for _, value in rows)]),
            number,
        )
        self.lp.add_columns(init, np.zeros(number), upper, entries)

    def solve_mixes(
        self,
        *,
        serve_all: bool,
        start: tuple[list[Mix | None], Ints] | None,
        time_limit_s: float,
        target: Target,
        node_limit: int | None,
    ) -> MixAnswer:
        """Choose whole mixes; `start` is a choice to improve on and the nodes it rents."""
        roles = len(self.model.pairs)
        if serve_all:
            self.lp.set_bounds(self._unserved, np.zeros(roles), np.zeros(roles))
        result = self.solve_integer(
            np.arange(self._first, self.lp.columns),
            time_limit_s=time_limit_s,
            gap=0.5 * target.gap,
            absolute_gap=0.5 * target.absolute,
            start=None if start is None else self._values(*start),
            node_limit=node_limit,
        )
        if serve_all:
            self.lp.set_bounds(self._unserved, np.zeros(roles), np.ones(roles))
        bound = np.inf if result.status == "infeasible" else result.bound
        if result.values is None:
            return MixAnswer(np.inf, bound, None, np.zeros(0, np.int64))
        chosen: list[Chosen] = [{} for _ in range(roles)]
        values = result.values[self._first :]
        for i in np.flatnonzero(values > 0.5):
            column = self._columns[i]
            for source, number in column.items:
                picks = chosen[column.role]
                picks[source] = picks.get(source, 0) + number * round(float(values[i]))
        rented = np.rint(result.values[: len(self.model.supply.usd)]).astype(np.int64)
        return MixAnswer(result.objective, bound, chosen, rented)

    def _values(self, start: list[Mix | None], rented: Ints) -> Floats:
        values = np.zeros(self.lp.columns)
        values[self._unserved] = [
            1.0 if mix is None else (1.0 - mix.share if self._partial else 0.0) for mix in start
        ]
        for i, column in enumerate(self._columns):
            mix = start[column.role]
            if mix is not None and not column.loose and column.items == mix.items:
                values[self._first + i] = 1.0
        values[: len(rented)] = rented
        return values
