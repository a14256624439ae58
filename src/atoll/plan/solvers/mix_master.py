"""The master problem over mixes: one mix per role, nodes for all of them (see `decomposition`)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll.plan.solvers.columns import Model
from atoll.plan.solvers.lp import Sparse
from atoll.plan.solvers.pool import Mix
from atoll.plan.solvers.rental import Rental
from atoll.plan.solvers.standing import Target

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class MixAnswer:
    """An integer solve: objective, bound over the mixes that are in, the mix of each role, nodes rented."""

    objective: float
    bound: float
    chosen: list[Mix | None] | None
    rented: Ints


class MixMaster(Rental):
    """Columns beside those of `rental`: z_r of each role left unserved, and the mixes.

    demand r: sum share_p lambda_p + z_r >= 1; with `partial` mixes also one mix per role at most.
    """

    def __init__(
        self, model: Model, unserved: Floats, *, rent: float, partial: bool, seed: int
    ) -> None:
        super().__init__(model, rent=rent, seed=seed)
        roles = len(model.pairs)
        self._partial = partial
        self._demand_row = self.add_empty_rows(np.ones(roles))
        self._single_row = self.add_empty_rows(np.full(roles if partial else 0, -1.0))
        each = np.arange(roles)
        self._unserved = self.lp.add_columns(
            unserved,
            np.zeros(roles),
            np.ones(roles),
            Sparse.of(each, self._demand_row + each, np.ones(roles), roles),
        )
        self._first = self.lp.columns
        self._known: list[tuple[int, Mix]] = []

    @property
    def number(self) -> int:
        """How many mixes are in."""
        return len(self._known)

    def set_unserved(self, unserved: Floats) -> None:
        """Change the price of leaving roles unserved."""
        self.lp.set_costs(self._unserved + np.arange(len(unserved)), unserved)

    def add(self, role: int, mixes: list[Mix]) -> None:
        """Add mixes of a role."""
        if not mixes:
            return
        use = np.array([m.use for m in mixes])
        owner, cell = np.nonzero(use)
        each = np.arange(len(mixes))
        share = np.array([m.share if self._partial else 1.0 for m in mixes])
        owners = [owner, each]
        rows = [cell, np.full(len(mixes), self._demand_row + role)]
        values = [-use[owner, cell].astype(np.float64), share]
        if self._partial:
            owners.append(each)
            rows.append(np.full(len(mixes), self._single_row + role))
            values.append(np.full(len(mixes), -1.0))
        self.lp.add_columns(
            np.array([m.init for m in mixes]),
            np.zeros(len(mixes)),
            np.ones(len(mixes)),
            Sparse.of(
                np.concatenate(owners), np.concatenate(rows), np.concatenate(values), len(mixes)
            ),
        )
        self._known += [(role, mix) for mix in mixes]

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
        columns = self._unserved + np.arange(roles)
        if serve_all:
            self.lp.set_bounds(columns, np.zeros(roles), np.zeros(roles))
        found = self.solve_integer(
            np.arange(self._first, self.lp.columns),
            time_limit_s=time_limit_s,
            gap=0.5 * target.gap,
            absolute_gap=0.5 * target.absolute,
            start=None if start is None else self._values(*start),
            node_limit=node_limit,
        )
        if serve_all:
            self.lp.set_bounds(columns, np.zeros(roles), np.ones(roles))
        bound = np.inf if found.status == "infeasible" else found.bound
        if found.values is None:
            return MixAnswer(np.inf, bound, None, np.zeros(0, np.int64))
        chosen: list[Mix | None] = [None] * roles
        for i in np.flatnonzero(found.values[self._first :] > 0.5):
            role, mix = self._known[i]
            chosen[role] = mix
        rented = np.rint(found.values[: len(self.model.supply.usd)]).astype(np.int64)
        return MixAnswer(found.objective, bound, chosen, rented)

    def _values(self, start: list[Mix | None], rented: Ints) -> Floats:
        values = np.zeros(self.lp.columns)
        values[self._unserved : self._unserved + len(start)] = [
            1.0 if mix is None else (1.0 - mix.share if self._partial else 0.0) for mix in start
        ]
        for i, (role, mix) in enumerate(self._known):
            if mix is start[role]:
                values[self._first + i] = 1.0
        values[: len(rented)] = rented
        return values
