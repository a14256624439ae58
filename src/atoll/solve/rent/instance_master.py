"""The master problem over single instances: exact, for the items that are let in.

Columns beside those of `rental_program`: n_i of each item; a_{m,g,h} share of service m prefilled in region g
and decoded in h; z_m left unserved; with a spread above 1, y_{r,g} whether role r stands in region g and s_r
whether it stands at all. Rows, all of the form >= 0 unless said otherwise:

    demand m       sum_i share_i n_i (both phases) + sum_{g,h} a_{m,g,h} + z_m >= 1
    prefill m, g   sum_i share_i n_i - sum_h a_{m,g,h}            decode m, h likewise
    link g, h      - sum_m bytes_m a_{m,g,h} >= - bandwidth
    presence r, g  sum_{i in r, g} n_i - y_{r,g},  sum_g y_{r,g} - spread s_r,  many s_r - sum_i n_i
    cut            sum_i F(w_i) n_i >= F(1)    over the items that cover a phase, F subadditive (`cover`)

The goal is the cost (where `unserved` has prices, with those of what is left unserved), or the share left
unserved: the largest over the services, a weighted mean, or how many are not served at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from atoll.solve.array_types import Floats, Ints
from atoll.solve.cover import cheapest_by_weight, closure
from atoll.solve.lp import LpResult, Sparse
from atoll.solve.rent.allocation_types import BOTH, DECODE, PREFILL
from atoll.solve.rent.incumbent import MipLimits, Work
from atoll.solve.rent.items import MANY, RentModel, Solution
from atoll.solve.rent.rental_program import RentalProgram
from atoll.solve.rent.service_oracle import ServiceOracle

InstanceGoal = Literal["cost", "common", "weighted", "stand"]


@dataclass(frozen=True)
class InstanceAnswer:
    """Result of an integer solve, with the share served of each service; `bound` is for items let in."""

    objective: float
    bound: float
    solution: Solution | None
    served: Floats


class InstanceMaster(RentalProgram):
    """Built for some items of each service (`let_in`, by index)."""

    def __init__(
        self,
        model: RentModel,
        goal: InstanceGoal,
        unserved: Floats,
        let_in: Sequence[Ints],
        work: Work,
        seed: int,
    ) -> None:
        super().__init__(model, rent=1.0 if goal == "cost" else 0.0, seed=seed, work=work)
        self.goal = goal
        # Sorted and unique: `_values` finds items by bisection.
        self._let_in = [np.unique(np.asarray(some, np.int64)) for some in let_in]
        self._demand_row = self.add_empty_rows(np.ones(len(model.services)))
        self._level_row: dict[tuple[int, int, int], int] = {}
        self._flows: list[tuple[int, int, int]] = []
        self._flow_first = 0
        self._presence: dict[tuple[int, int, int], int] = {}
        self._stands: dict[tuple[int, int], int] = {}
        self._presence_row: dict[tuple[int, int, int], int] = {}
        self._many_row: dict[tuple[int, int], int] = {}
        self._add_levels()
        self._add_unserved(unserved)
        if model.limits.spread > 1:
            self._add_presence()
        # Items are the last columns, service by service: `_offset` counts on it.
        self._first = self.lp.columns
        for service in range(len(model.services)):
            self._add_items(service)

    def _phases(self, service: int) -> set[int]:
        return {int(p) for p in np.unique(self.model.items[service].phase[self._let_in[service]])}

    def _add_levels(self) -> None:
        """Rows of phases by region, and the flows between them."""
        model = self.model
        for m in range(len(model.services)):
            own = {m, model.lenders.get(m, m)}
            for phase in (PREFILL, DECODE):
                for g in sorted(set().union(*(self._regions(some, phase) for some in own))):
                    self._level_row[m, phase, g] = self.add_empty_rows(np.zeros(1))
        links: dict[tuple[int, int], int] = {}
        entries: list[tuple[int, int, float]] = []
        for m, service in enumerate(model.services):
            ways = [(g, g) for g in range(model.regions)] + sorted(service.pairs)
            for g, h in ways:
                a = self._level_row.get((m, PREFILL, g))
                b = self._level_row.get((m, DECODE, h))
                if a is None or b is None:
                    continue
                column = len(self._flows)
                self._flows.append((m, g, h))
                entries += [(column, a, -1.0), (column, b, -1.0)]
                entries.append((column, self._demand_row + m, 1.0))
                if g != h:
                    if (g, h) not in links:
                        # In shares of the link, so that coefficients stay near 1.
                        links[g, h] = self.add_empty_rows(np.full(1, -1.0))
                    load = service.kv_bytes_per_s / float(model.supply.link[g, h])
                    entries.append((column, links[g, h], -load))
        number = len(self._flows)
        self._flow_first = self.lp.add_columns(
            np.zeros(number), np.zeros(number), np.ones(number), _sparse(entries, number)
        )
        self._add_loans()

    def _add_loans(self) -> None:
        """Columns of what one service uses of the single phases of another, in shares of the demand."""
        self._loans = [
            (borrower, phase, g)
            for borrower, lender in self.model.lenders.items()
            for m, phase, g in self._level_row
            if m == lender
        ]
        entries = []
        for at, (borrower, phase, g) in enumerate(self._loans):
            lender = self.model.lenders[borrower]
            entries.append((at, self._level_row[lender, phase, g], -1.0))
            entries.append((at, self._level_row[borrower, phase, g], 1.0))
        number = len(self._loans)
        self._loan_first = self.lp.add_columns(
            np.zeros(number), np.zeros(number), np.ones(number), _sparse(entries, number)
        )

    def _add_unserved(self, unserved: Floats) -> None:
        number = len(self.model.services)
        self._unserved = np.zeros(0, np.int64)
        # Where everything must be served there is nothing to leave out.
        if self.goal == "cost" and not len(unserved):
            return
        each = np.arange(number)
        if self.goal == "common":
            entries = [(0, self._demand_row + m, 1.0) for m in range(number)]
            first = self.lp.add_columns(np.ones(1), np.zeros(1), np.ones(1), _sparse(entries, 1))
            self._unserved = np.array([first])
            return
        entries = [(m, self._demand_row + m, 1.0) for m in range(number)]
        first = self.lp.add_columns(
            unserved, np.zeros(number), np.ones(number), _sparse(entries, number)
        )
        self._unserved = first + each

    def _max_instances(self) -> float:
        """How many instances there can be at all: each has a GPU of its own."""
        supply, max_nodes = self.model.supply, self.model.limits.max_nodes
        gpus = int(supply.gpus @ supply.available)
        if max_nodes is not None:
            gpus = min(gpus, max_nodes * int(supply.gpus.max(initial=0)))
        return float(max(1, gpus))

    def _regions(self, service: int, phase: int) -> set[int]:
        items, some = self.model.items[service], self._let_in[service]
        return {int(g) for g in np.unique(items.region[some[items.phase[some] == phase]])}

    def _add_presence(self) -> None:
        model, spread, max_instances = self.model, self.model.limits.spread, self._max_instances()
        # Ways of one service, which have its name, stand in regions together.
        kin: dict[str, list[int]] = {}
        for m, service in enumerate(model.services):
            kin.setdefault(service.name, []).append(m)
        for ways in kin.values():
            phases = set().union(*map(self._phases, ways))
            # Phases together may serve all by themselves, or not be needed.
            optional = len(self._unserved) > 0 or (BOTH in phases and len(phases) > 1)
            for phase in sorted(phases):
                regions = sorted(set().union(*(self._regions(m, phase) for m in ways)))
                spread_row = self.add_empty_rows(np.zeros(1))
                many_row = self.add_empty_rows(np.zeros(1))
                stands = self.lp.add_columns(
                    np.zeros(1),
                    np.full(1, 0.0 if optional else 1.0),
                    np.ones(1),
                    _sparse([(0, spread_row, -float(spread)), (0, many_row, max_instances)], 1),
                )
                self._many_row |= {(m, phase): many_row for m in ways}
                self._stands |= {(m, phase): stands for m in ways}
                for g in regions:
                    row = self.add_empty_rows(np.zeros(1))
                    there = self.lp.add_columns(
                        np.zeros(1), np.zeros(1), np.ones(1),
                        _sparse([(0, row, -1.0), (0, spread_row, 1.0)], 1),
                    )  # fmt: skip
                    self._presence_row |= {(m, phase, g): row for m in ways}
                    self._presence |= {(m, phase, g): there for m in ways}

    def _add_items(self, service: int) -> None:
        items, some = self.model.items[service], self._let_in[service]
        number = len(some)
        owner, row, value = self.use_entries(items, some)
        each = np.arange(number)
        levels = np.array(
            [
                self._demand_row + service
                if phase == BOTH
                else self._level_row[service, int(phase), int(g)]
                for phase, g in zip(items.phase[some], items.region[some], strict=True)
            ],
            np.int64,
        )
        owners, rows, values = [owner, each], [row, levels], [value, items.share[some]]
        if self._presence_row:
            keys = [
                (service, int(p), int(g))
                for p, g in zip(items.phase[some], items.region[some], strict=True)
            ]
            owners += [each, each]
            rows.append(np.array([self._presence_row[key] for key in keys], np.int64))
            rows.append(np.array([self._many_row[key[:2]] for key in keys], np.int64))
            values += [np.ones(number), -np.ones(number)]
        entries = Sparse.of(
            np.concatenate(owners), np.concatenate(rows), np.concatenate(values), number
        )
        upper = np.where(items.upper[some] >= MANY, np.inf, items.upper[some].astype(np.float64))
        self.lp.add_columns(np.zeros(number), np.zeros(number), upper, entries)

    def fix(self, service: int, number: dict[int, int]) -> None:
        """Let a service have these items and no others."""
        some = self._let_in[service]
        count = np.array([number.get(int(item), 0) for item in some], np.float64)
        self.lp.set_bounds(self._offset(service) + np.arange(len(some)), count, count)

    def add_cuts(self, oracles: Sequence[ServiceOracle], costs: Sequence[Floats]) -> None:
        """Add a cut for each phase that must be covered, made at some costs of the items."""
        for _, _, columns, values in self._cover_cuts(oracles, costs):
            entries = Sparse.of(np.zeros(len(columns), np.int64), columns, values, 1)
            self.lp.add_rows(np.ones(1), np.full(1, np.inf), entries)

    def _cover_cuts(
        self, oracles: Sequence[ServiceOracle], costs: Sequence[Floats]
    ) -> Iterator[tuple[int, Floats, Ints, Floats]]:
        """Yield what covering a phase costs by level, 1 for all of it: service, function, columns, values."""
        for service, (oracle, cost) in enumerate(zip(oracles, costs, strict=True)):
            items, phases = oracle.items, set(np.unique(oracle.items.phase).tolist())
            # What is borrowed covers a phase as well.
            if service in self.model.lenders:
                continue
            groups = [{PREFILL, BOTH}, {DECODE, BOTH}] if PREFILL in phases else [{BOTH}]
            for group in groups:
                every = np.flatnonzero(np.isin(items.phase, sorted(group)) & (items.share > 0.0))
                if not len(every):
                    continue
                zeros = np.zeros(len(every), np.int32)
                # Running items may cost less than nothing; a cut needs costs of 0 or more.
                paid = np.maximum(cost[every], 0.0)
                best = cheapest_by_weight(paid, oracle.steps_up(every), zeros, 1, oracle.grid + 1)
                function, _, _ = closure(best[0])
                # Weights are rounded up, which makes items look cheaper: the best price for
                # throughput holds anyway.
                rate = float((paid / items.share[every]).min())
                function = np.maximum(function, rate * np.arange(oracle.grid + 1) / oracle.grid)
                if not np.isfinite(function[-1]) or function[-1] <= 0.0:
                    continue
                # All of it is 1, so that coefficients stay near 1.
                scaled = function / function[-1]
                some = self._let_in[service]
                inside = np.flatnonzero(np.isin(items.phase[some], sorted(group)))
                columns = (self._offset(service) + inside).astype(np.int64)
                yield service, scaled, columns, scaled[oracle.steps_up(some[inside])]

    def _offset(self, service: int) -> int:
        return self._first + sum(len(some) for some in self._let_in[:service])

    def demand_duals(self, result: LpResult) -> Floats:
        """Return what all of each service's demand is worth."""
        number = len(self.model.services)
        return np.maximum(0.0, result.duals[self._demand_row : self._demand_row + number])

    def solve(self, limits: MipLimits, start: Solution | None = None) -> InstanceAnswer:
        """Solve with whole numbers, from a solution if given."""
        integer = [np.arange(self._first, self.lp.columns)]
        integer.append(np.array(sorted(set(self._presence.values())), np.int64))
        integer.append(np.array(sorted(set(self._stands.values())), np.int64))
        # A service stands or it does not: a part of one does not count.
        if self.goal == "stand":
            integer.append(self._unserved)
        values = None if start is None else self._values(start)
        result = self.solve_integer(np.concatenate(integer), limits, values)
        bound = np.inf if result.status == "infeasible" else result.bound
        if result.values is None:
            return InstanceAnswer(np.inf, bound, None, np.zeros(len(self.model.services)))
        served = 1.0 - self._unserved_of(result.values)
        return InstanceAnswer(result.objective, bound, self._solution(result.values), served)

    def _values(self, solution: Solution) -> Floats | None:
        """The columns of a solution; None where it uses items that are not in."""
        model = self.model
        values = np.zeros(self.lp.columns)
        values[: self.supply_columns] = self.supply_values(solution)
        served = np.zeros(len(model.services))
        for m, number in enumerate(solution.items):
            some, items = self._let_in[m], model.items[m]
            level = np.zeros((3, model.regions))
            for item, count in number.items():
                place = int(np.searchsorted(some, item))
                if place == len(some) or some[place] != item:
                    return None
                values[self._offset(m) + place] = count
                phase, g = int(items.phase[item]), int(items.region[item])
                level[phase, g] += items.share[item] * count
                if (m, phase) in self._stands:
                    values[self._stands[m, phase]] = 1.0
                    values[self._presence[m, phase, g]] = 1.0
            served[m] = level[BOTH].sum()
            for at, (service, g, h) in enumerate(self._flows):
                if service == m and g == h:
                    flow = min(level[PREFILL, g], level[DECODE, h], 1.0)
                    values[self._flow_first + at] = flow
                    served[m] += flow
        if len(self._unserved):
            np.maximum.at(
                values,
                self._unserved
                if len(self._unserved) > 1
                else np.repeat(self._unserved, len(served)),
                np.maximum(0.0, 1.0 - served),
            )
            if self.goal == "stand":
                values[self._unserved] = np.ceil(values[self._unserved] - 1e-6)
        return values

    def _solution(self, values: Floats) -> Solution:
        machines, slices = self.supply_of(values)
        chosen = []
        for m, some in enumerate(self._let_in):
            first = self._offset(m)
            number = np.rint(values[first : first + len(some)]).astype(np.int64)
            chosen.append({int(some[i]): int(number[i]) for i in np.flatnonzero(number)})
        return Solution(machines, slices, tuple(chosen))

    def _unserved_of(self, values: Floats) -> Floats:
        """Return the share of each service left unserved."""
        if not len(self._unserved):
            return np.zeros(len(self.model.services))
        shares = values[self._unserved]
        return np.broadcast_to(shares, (len(self.model.services),)).copy()


def _sparse(entries: list[tuple[int, int, float]], number: int) -> Sparse:
    owner = np.array([e[0] for e in entries], np.int64)
    row = np.array([e[1] for e in entries], np.int64)
    value = np.array([e[2] for e in entries], np.float64)
    return Sparse.of(owner, row, value, number)
