"""The master problem over (template, region) pairs: relaxation, pricing of absent pairs, integer solve.

Columns beside those of `rental`: z_r share of role r's demand left unserved; y_{r,g} whether role r
stands in region g and s_r whether it is served at all (s_r + z_r >= 1; both only with a spread above
1); n_i instances of pair i. Rows, all of the form >=:

    demand r        sum_i share_i n_i + z_r >= 1
    presence r, g   sum_{i in r, g} n_i - y_{r,g} >= 0,      sum_g y_{r,g} - spread s_r >= 0
    cut of role r   sum_i F(w_i) n_i + F(G) z_r >= F(G)      F non-decreasing and subadditive (`cover`)

The goal is the cost, with z_r dear (and absent from integer solves), or the share left unserved: the
largest over the roles (then all z_r are one column) or a weighted mean.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll.solve.lp import LpResult, Sparse
from atoll.solve.rent.columns import GRID, Pairs, RentModel, Solution
from atoll.solve.rent.pairs.rental import RentalProgramme
from atoll.solve.rent.relaxation import Goal

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_PRICED_OUT = 1e-7


@dataclass(frozen=True)
class MasterResult:
    """What an integer solve over the master's pairs reached; `bound` holds for these pairs only."""

    complete: bool
    objective: float
    bound: float
    solution: Solution | None


@dataclass(frozen=True)
class _Cut:
    role: int
    row: int
    values: Floats


class Master(RentalProgramme):
    """Grows by pairs and cuts; pair i of role r is known by its index into `model.pairs[r]`."""

    def __init__(self, model: RentModel, goal: Goal, unserved: Floats, seed: int) -> None:
        super().__init__(model, rent=1.0 if goal == "cost" else 0.0, seed=seed)
        self.goal = goal
        self.rounds = 0
        self._cuts: list[_Cut] = []
        self._present = [np.zeros(len(p), np.bool_) for p in model.pairs]
        self._role = np.zeros(0, np.int64)
        self._pair = np.zeros(0, np.int64)
        self._demand_row = self.add_empty_rows(np.ones(len(model.pairs)))
        self._add_unserved(unserved)
        self._add_presence()
        self._kept_columns = []
        for role, kept in enumerate(model.kept):
            first = self._append(role, kept.pairs, kept.number.astype(np.float64), new=False)
            self._kept_columns.append(first + np.arange(len(kept.pairs)))
        self._first = self.lp.columns

    @property
    def columns(self) -> int:
        """How many pairs are in."""
        return len(self._pair)

    @property
    def cuts(self) -> int:
        """How many cuts are in."""
        return len(self._cuts)

    def _add_unserved(self, unserved: Floats) -> None:
        roles = len(self.model.pairs)
        each = np.arange(roles)
        rows = self._demand_row + each
        if self.goal == "common":
            self._unserved = np.full(roles, self.lp.columns)
            entries = Sparse.of(np.zeros(roles, np.int64), rows, np.ones(roles), 1)
            self.lp.add_columns(np.ones(1), np.zeros(1), np.ones(1), entries)
            return
        self._unserved = self.lp.columns + each
        entries = Sparse.of(each, rows, np.ones(roles), roles)
        self.lp.add_columns(unserved, np.zeros(roles), np.ones(roles), entries)

    def _add_presence(self) -> None:
        self._presence = np.zeros(0, np.int64)
        roles, regions = len(self.model.pairs), self.model.regions
        if self.model.limits.spread == 1:
            return
        number = roles * regions
        each, role = np.arange(number), np.arange(roles)
        self._presence_row = self.add_empty_rows(np.repeat([0.0, 1.0], [number + roles, roles]))
        self._presence = self.lp.columns + np.arange(number + roles)
        rows = (each, number + each // regions, number + role, number + roles + role)
        entries = Sparse.of(
            np.concatenate([each, each, number + role, number + role]),
            self._presence_row + np.concatenate(rows),
            np.repeat(
                [-1.0, 1.0, -float(self.model.limits.spread), 1.0], [number, number, roles, roles]
            ),
            number + roles,
        )
        served = np.repeat([0.0, 1.0 if self.goal == "cost" else 0.0], [number, roles])
        self.lp.add_columns(np.zeros(number + roles), served, np.ones(number + roles), entries)
        columns = np.unique(self._unserved)
        for column in columns:
            self.lp.add_entries(
                int(column),
                self._presence_row + number + roles + np.flatnonzero(self._unserved == column),
            )

    def _append(self, role: int, pairs: Pairs, upper: Floats, *, new: bool) -> int:
        number, cells = len(pairs), self.model.cells
        each = np.arange(number)
        real = pairs.cells < cells
        key, count = np.unique(np.nonzero(real)[0] * cells + pairs.cells[real], return_counts=True)
        owners = [each, key // cells]
        rows = [np.full(number, self._demand_row + role), key % cells]
        values = [pairs.share, -count.astype(np.float64)]
        if self.model.limits.spread > 1:
            owners.append(each)
            rows.append(self._presence_row + role * self.model.regions + pairs.region)
            values.append(np.ones(number))
        for cut in self._cuts:
            if cut.role == role:
                owners.append(each)
                rows.append(np.full(number, cut.row))
                values.append(cut.values[pairs.weight])
        cost = np.zeros(number)
        if new and self.goal == "cost":
            cost = pairs.prices(self.model.penalty)
        entries = Sparse.of(
            np.concatenate(owners), np.concatenate(rows), np.concatenate(values), number
        )
        return self.lp.add_columns(cost, np.zeros(number), upper, entries)

    def add(self, role: int, pairs: Ints) -> int:
        """Add pairs that are not in yet; return how many that were."""
        pairs = pairs[~self._present[role][pairs]]
        if len(pairs):
            self._present[role][pairs] = True
            self._role = np.append(self._role, np.full(len(pairs), role))
            self._pair = np.append(self._pair, pairs)
            taken = self.model.pairs[role].take(pairs)
            self._append(role, taken, np.full(len(pairs), np.inf), new=True)
        return len(pairs)

    def admit(self, admitted: Sequence[NDArray[np.bool_]]) -> None:
        """Let only these pairs of each role be used; the others stay in, unused."""
        columns = self._first + np.arange(len(self._pair))
        upper = np.zeros(len(columns))
        for role, allowed in enumerate(admitted):
            here = self._role == role
            upper[here] = np.where(allowed[self._pair[here]], np.inf, 0.0)
        self.lp.set_bounds(columns, np.zeros(len(columns)), upper)

    def add_cut(self, role: int, values: Floats) -> None:
        """Add the cut of a subadditive function over weights 0..GRID."""
        scaled = values / values[GRID]
        indices = np.flatnonzero(self._role == role)
        kept = self._kept_columns[role]
        columns = np.concatenate([self._first + indices, kept, self._unserved[role : role + 1]])
        weight = self.model.pairs[role].weight[self._pair[indices]]
        entries = np.concatenate(
            [scaled[weight], scaled[self.model.kept[role].pairs.weight], np.ones(1)]
        )
        sparse = Sparse.of(np.zeros(len(columns), np.int64), columns, entries, 1)
        row = self.lp.add_rows(np.ones(1), np.full(1, np.inf), sparse)
        self._cuts.append(_Cut(role, row, scaled))

    def solve(self, time_limit_s: float) -> LpResult:
        """Solve the linear relaxation over the pairs that are in."""
        self.rounds += 1
        return self.lp.solve(time_limit_s)

    def unserved_shares(self, result: LpResult) -> Floats:
        """Return the share of each role's demand a relaxed solution leaves unserved."""
        return np.asarray(result.values[self._unserved])

    def demand_duals(self, result: LpResult) -> Floats:
        """Return what each role's whole demand is worth in the relaxation, cuts apart."""
        return result.duals[self._demand_row : self._demand_row + len(self.model.pairs)].copy()

    def role_value(self, result: LpResult, role: int) -> float:
        """Return what the relaxation pays for covering a role: its demand dual and those of its cuts."""
        return float(result.duals[self._demand_row + role]) + sum(
            float(result.duals[cut.row]) for cut in self._cuts if cut.role == role
        )

    def reduced_costs(self, result: LpResult, role: int) -> Floats:
        """Return the reduced cost of every pair of a role, in the master or not."""
        model, pairs = self.model, self.model.pairs[role]
        cell = result.duals[: model.cells]
        if self.goal == "cost":
            cell = cell + model.penalty
        reduced = pairs.prices(cell) - result.duals[self._demand_row + role] * pairs.share
        gain = np.zeros(GRID + 1)
        for cut in self._cuts:
            if cut.role == role and result.duals[cut.row] > 0.0:
                gain += result.duals[cut.row] * cut.values
        reduced -= gain[pairs.weight]
        if model.limits.spread > 1:
            first = self._presence_row + role * model.regions
            reduced -= result.duals[first : first + model.regions][pairs.region]
        return np.asarray(reduced)

    def price(self, result: LpResult, most: int) -> int:
        """Add up to `most` pairs per role of negative reduced cost; return how many (0: LP optimum)."""
        added = 0
        for role in range(len(self.model.pairs)):
            reduced = self.reduced_costs(result, role)
            worth = np.flatnonzero((reduced < -_PRICED_OUT) & ~self._present[role])
            if len(worth) > most:
                worth = worth[np.argsort(reduced[worth], kind="stable")[:most]]
            added += self.add(role, np.sort(worth))
        return added

    def generate(self, time_limit_s: float, most: int = 30) -> LpResult:
        """Solve and price until no pair anywhere has negative reduced cost, or time is up."""
        end = time.perf_counter() + time_limit_s
        while True:
            result = self.solve(max(0.0, end - time.perf_counter()))
            if result.status != "optimal" or not self.price(result, most):
                return result

    def solve_pairs(
        self,
        *,
        time_limit_s: float,
        gap: float,
        absolute_gap: float = 1e-9,
        start: Solution | None = None,
        node_limit: int | None = None,
    ) -> MasterResult:
        """Solve with whole nodes and instances over the pairs that are in."""
        values = None if start is None else self._values(start)
        served = np.zeros(len(self.model.pairs))
        if self.goal == "cost":
            self.lp.set_bounds(self._unserved, served, served)
        result = self.solve_integer(
            np.concatenate(
                [self._presence, *self._kept_columns, np.arange(self._first, self.lp.columns)]
            ),
            time_limit_s=time_limit_s,
            gap=gap,
            absolute_gap=absolute_gap,
            start=values,
            node_limit=node_limit,
        )
        if self.goal == "cost":
            self.lp.set_bounds(self._unserved, served, served + 1.0)
        solution = None if result.values is None else self._solution(result.values)
        bound = np.inf if result.status == "infeasible" else result.bound
        return MasterResult(result.status != "stopped", result.objective, bound, solution)

    def _values(self, solution: Solution) -> Floats:
        model = self.model
        index = [
            model.pairs[role].find(started.keys(), model.regions)
            for role, started in enumerate(solution.started)
        ]
        for role, pairs in enumerate(index):
            self.add(role, np.sort(pairs))
        values = np.zeros(self.lp.columns)
        values[: len(solution.rented)] = solution.rented
        served = np.zeros(len(model.pairs))
        for role, started in enumerate(solution.started):
            role_pairs, kept = model.pairs[role], model.kept[role].pairs
            number = np.array(list(started.values()), np.int64)
            indices = np.flatnonzero(self._role == role)
            order = np.argsort(self._pair[indices])
            place = indices[order[np.searchsorted(self._pair[indices], index[role], sorter=order)]]
            values[self._first + place] = number
            values[self._kept_columns[role]] = solution.kept[role]
            served[role] = number @ role_pairs.share[index[role]] + solution.kept[role] @ kept.share
            for region in (*role_pairs.region[index[role]], *kept.region[solution.kept[role] > 0]):
                self._mark(values, role, int(region))
        if self.goal != "cost":
            np.maximum.at(values, self._unserved, np.maximum(0.0, 1.0 - served))
        return values

    def _mark(self, values: Floats, role: int, region: int) -> None:
        if len(self._presence):
            values[self._presence[role * self.model.regions + region]] = 1.0
            values[self._presence[len(self.model.pairs) * self.model.regions + role]] = 1.0

    def _solution(self, values: Floats) -> Solution:
        whole = np.rint(values).astype(np.int64)
        numbers = whole[self._first : self._first + len(self._pair)]
        started: tuple[dict[int, int], ...] = tuple({} for _ in self.model.pairs)
        for i in np.flatnonzero(numbers):
            role, pair = int(self._role[i]), self._pair[i]
            key = self.model.pairs[role].keys(self.model.regions)[pair]
            started[role][int(key)] = int(numbers[i])
        return Solution(
            whole[: len(self.model.supply.usd)],
            started,
            tuple(whole[columns] for columns in self._kept_columns),
        )
