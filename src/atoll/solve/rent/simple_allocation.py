"""The simplest allocation that costs little more than the cheapest one: a second program, after the cost's.

Pieces are machines, hops, slices, shapes and services with phases apart (`simplicity`); where something runs
already, so is every instance that is started anew. Two programs over instances, one after the other:

    few      minimise pieces                              cost <= `max_usd`; of equal ones the cheapest
    spread   minimise sum_m f(z_m) + simplicity * pieces  no more machines that cost anything than in `few`,
                                                          no larger instances and no other phases

z_m is what instances carry of service m, in multiples of its demand, and f how much longer requests then take
than without a queue. The second is for machines that cost nothing: each one more must shorten requests by the
share `simplicity`. It may add instances, but no hops to any, nor part phases: both make requests take longer.
Columns beside those of `instance_master`: y_{m,p} whether shape p of service m is in use
(many_p y_{m,p} >= its instances), u_m whether phases of m run apart (u_m >= a_{m,g,h}), t_m = f(z_m) over its
tangents. Both programs are exact for the items let in: all of a small problem, the cheapest and those of the
fewest pieces of a large one. What they find is a solution like any other, so bounds on the cost hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from atoll.solve.array_types import Floats, Ints
from atoll.solve.deadline import Deadline
from atoll.solve.lp import Sparse
from atoll.solve.rent.allocation_types import RunningColumn
from atoll.solve.rent.incumbent import MipLimits, Work
from atoll.solve.rent.instance_master import InstanceMaster
from atoll.solve.rent.items import RentModel, ServiceItems, Solution
from atoll.solve.rent.relaxation import Prices
from atoll.solve.rent.rent_search import with_used
from atoll.solve.rent.rental_program import costs
from atoll.solve.simplicity import tangents

Shape = tuple[int, tuple[tuple[int, int], ...]]
"""A phase, and how many nodes of each kind."""
MOST = 20.0
"""Multiple of its demand beyond which more capacity of a service counts for nothing."""
WORK = 40_000
"""Effort of both programs together, in simplex iterations."""
MAX_ITEMS = 1200
"""Items of all services that the programs choose among, about."""
_GAP = 0.02
"""Pieces by which an answer may miss the best one: what is less than a whole one decides between equals."""
_CHEAPER = 0.5
"""Pieces that all that simplicity may cost counts as."""
_FASTER = 0.05
"""Pieces that the slowest instance counts for more than the fastest, where machines cost nothing."""
_ROUNDING = 1e-7


@dataclass(frozen=True)
class SimpleGoal:
    """The price of simplicity: a share, and what the whole may cost in USD per hour, starts included."""

    simplicity: float
    max_usd: float


def find_simplest(
    model: RentModel,
    wide: RentModel,
    cheapest: Solution | None,
    running: Sequence[RunningColumn],
    prices: Prices,
    goal: SimpleGoal,
    *,
    deadline: Deadline,
    work: Work,
    seed: int,
) -> Solution | None:
    """Return the simplest solution found, `cheapest` where nothing is simpler; None if there is none.

    `wide` is the model with `MOST` times the demand, so that items count with more than is asked. Where
    there are too many items, `prices` say which are cheap.
    """
    found = cheapest
    let_in = _choose(model, prices, running)
    if cheapest is not None:
        let_in = with_used(let_in, cheapest)
    usd = 0.0 if cheapest is None else sum(costs(model, cheapest))
    max_usd = max(goal.max_usd, usd)
    few = _FewPieces(model, let_in, running, max_usd, goal.simplicity, work, seed)
    found = few.better(found, deadline, work.part(0.5))
    free = (model.supply.usd <= 0.0) & (model.supply.available > 0)
    if found is not None and free.any():
        let_in = [
            _no_larger(items, some, number, running)
            for items, some, number in zip(model.items, let_in, found.items, strict=True)
        ]
        usd = sum(costs(model, found))
        spread = _SpreadPieces(
            wide, let_in, running, usd, found.machines, goal.simplicity, work, seed
        )
        found = spread.better(found, deadline, work.part(1.0))
    return found


def _choose(model: RentModel, prices: Prices, running: Sequence[RunningColumn]) -> list[Ints]:
    """The items of each service to choose among: all, or the cheapest and those of the fewest nodes."""
    total = sum(len(items) for items in model.items)
    if total <= MAX_ITEMS:
        return [np.arange(len(items)) for items in model.items]
    row, chosen = prices.row, []
    for items in model.items:
        usd = items.prices(row)
        each = max(8, MAX_ITEMS // (2 * len(model.items) * len(np.unique(items.phase))))
        nodes = _nodes(items, running)
        kept: list[Ints] = [np.flatnonzero(items.kept)]
        for phase in np.unique(items.phase):
            own = np.flatnonzero((items.phase == phase) & (items.share > 0.0))
            for rated in (usd[own], nodes[own]):
                # By what an item takes for what it carries; of equal ones those of fewer nodes.
                order = np.lexsort((own, nodes[own], rated / items.share[own]))
                kept.append(own[order[:each]])
        chosen.append(np.unique(np.concatenate(kept)))
    return chosen


def _no_larger(
    items: ServiceItems, some: Ints, number: dict[int, int], running: Sequence[RunningColumn]
) -> Ints:
    """Those of some items that have no more nodes than the largest that is in use, in phases that are."""
    nodes, used = _nodes(items, running), np.array(sorted(number), np.int64)
    phases = np.isin(items.phase[some], np.unique(items.phase[used]))
    fair = phases & (nodes[some] <= nodes[used].max(initial=0))
    return np.asarray(some[fair], np.int64)


def _nodes(items: ServiceItems, running: Sequence[RunningColumn]) -> Ints:
    """How many nodes each item has."""
    nodes = items.taken()
    for item in np.flatnonzero(items.kept).tolist():
        nodes[item] = max(1, sum(n for _, n in running[int(items.source[item])].nodes))
    return nodes


def _shape(items: ServiceItems, item: int, running: Sequence[RunningColumn]) -> Shape:
    """The phase of an item, and how many nodes it has of each kind."""
    phase, pattern = int(items.phase[item]), items.pattern[item]
    if item >= len(items) - items.running:
        return phase, running[int(items.source[item])].nodes
    rows, amount = items.patterns.rows[pattern], items.patterns.amount[pattern]
    here = rows >= 0
    return phase, tuple(zip(rows[here].tolist(), amount[here].tolist(), strict=True))


class _PieceProgram(InstanceMaster):
    """The program over instances with pieces for its objective, and no more cost than `max_usd`."""

    def __init__(
        self,
        model: RentModel,
        let_in: Sequence[Ints],
        running: Sequence[RunningColumn],
        unserved: Floats,
        max_usd: float,
        work: Work,
        seed: int,
    ) -> None:
        super().__init__(model, "cost", unserved, let_in, work, seed)
        self._running = running
        self._ends = self.lp.columns
        self._paid = np.zeros(self.supply_columns)
        self._paid[: len(model.supply.usd)] = model.supply.usd
        k, gpus = (np.array([one[at] for one in self.slices], np.int64) for at in (0, 1))
        self._paid[len(model.supply.usd) :] = model.start[k] * gpus
        cost = np.zeros(self.lp.columns)
        cost[: len(model.supply.usd)] = 1.0
        cost[len(model.supply.usd) : self.supply_columns] = gpus < model.supply.gpus[k]
        runs = any(items.running for items in model.items)
        for m, (items, some) in enumerate(zip(model.items, self._let_in, strict=True)):
            own = self._offset(m) + np.arange(len(some))
            cost[own] = _nodes(items, running)[some] - 1
            # Starting anew is work, too: what runs is rebuilt only where that spares more.
            cost[own] += runs & ~items.kept[some]
        self._add_row(dict(enumerate(-self._paid)), -max_usd * (1.0 + _ROUNDING) - _ROUNDING)
        self._shape = [self._add_shapes(m) for m in range(len(model.services))]
        self._apart = self._add_apart()
        self.pieces = np.ones(self.lp.columns)
        self.pieces[: len(cost)] = cost
        self.tie = np.zeros(self.lp.columns)

    def _add_row(self, entries: dict[int, float], lower: float) -> None:
        columns = np.array([c for c, value in entries.items() if value], np.int64)
        values = np.array([value for value in entries.values() if value])
        one = Sparse.of(np.zeros(len(columns), np.int64), columns, values, 1)
        self.lp.add_rows(np.full(1, lower), np.full(1, np.inf), one)

    def _add_column(self, lower: float, upper: float) -> int:
        nothing = np.zeros(0, np.int64)
        none = Sparse.of(nothing, nothing, np.zeros(0), 1)
        return self.lp.add_columns(np.zeros(1), np.full(1, lower), np.full(1, upper), none)

    def _add_shapes(self, m: int) -> tuple[Ints, dict[int, int]]:
        """A column for each shape of a service; returns which shape each item let in has, and the columns."""
        items, some = self.model.items[m], self._let_in[m]
        keys = [_shape(items, item, self._running) for item in some.tolist()]
        number = {key: at for at, key in enumerate(sorted(set(keys)))}
        shape = np.array([number[key] for key in keys], np.int64)
        columns = {at: self._add_column(0.0, 1.0) for at in number.values()}
        for at, column in columns.items():
            own = np.flatnonzero(shape == at)
            share = float(items.share[some[own]].min())
            # More of them than carry everything are of no use, but for a last one in every region.
            many = float(np.ceil(1.0 / max(share, 1e-5)) + self.model.regions)
            row = {int(self._offset(m) + place): -1.0 for place in own} | {column: many}
            self._add_row(row, 0.0)
        return shape, columns

    def _add_apart(self) -> dict[int, int]:
        """A column for each service whose phases may run apart, no less than any of its flows."""
        columns: dict[int, int] = {}
        for at, (m, _, _) in enumerate(self._flows):
            if m not in columns:
                columns[m] = self._add_column(0.0, 1.0)
            self._add_row({columns[m]: 1.0, self._flow_first + at: -1.0}, 0.0)
        return columns

    def values_of(self, solution: Solution) -> Floats | None:
        """Return the columns of a solution; None where it uses items that are not in."""
        values = self._values(solution)
        if values is None:
            return None
        for m, (shape, columns) in enumerate(self._shape):
            first = self._offset(m)
            used = np.unique(shape[values[first : first + len(shape)] > 0.5])
            values[[columns[int(at)] for at in used]] = 1.0
        flows = values[self._flow_first : self._flow_first + len(self._flows)]
        for (m, _, _), flow in zip(self._flows, flows, strict=True):
            values[self._apart[m]] = max(values[self._apart[m]], float(flow > 0.0))
        return values

    def better(
        self, start: Solution | None, deadline: Deadline, iterations: int
    ) -> Solution | None:
        """Return the best solution found, `start` where none is better."""
        cost = self.pieces + self.tie
        self.lp.set_costs(np.arange(self.lp.columns), cost)
        values = None if start is None else self.values_of(start)
        now = np.inf if values is None else float(cost @ values)
        whole = [np.arange(self._first, self._ends), self._whole_columns()]
        result = self.solve_integer(
            np.concatenate(whole).astype(np.int64),
            MipLimits(deadline.limit(), 0.0, _GAP, iterations),
            values,
            exact=True,
        )
        if result.values is None or (start is not None and result.objective >= now - _GAP):
            return start
        return self._solution(result.values)

    def _whole_columns(self) -> Ints:
        """Columns beside items that are whole numbers."""
        presence = [*self._presence.values(), *self._stands.values()]
        shapes = [column for _, columns in self._shape for column in columns.values()]
        return np.array(sorted([*presence, *shapes, *self._apart.values()]), np.int64)


class _FewPieces(_PieceProgram):
    """The fewest pieces, and the least cost of equally many."""

    def __init__(
        self,
        model: RentModel,
        let_in: Sequence[Ints],
        running: Sequence[RunningColumn],
        max_usd: float,
        simplicity: float,
        work: Work,
        seed: int,
    ) -> None:
        super().__init__(model, let_in, running, np.zeros(0), max_usd, work, seed)
        # Over what simplicity may cost at most, so that it never outweighs a piece.
        room = max_usd * simplicity / (1.0 + simplicity)
        if room > 0.0:
            self.tie[: self.supply_columns] = _CHEAPER * self._paid / room


class _SpreadPieces(_PieceProgram):
    """The least penalised time, with no more machines that cost anything than there are."""

    def __init__(
        self,
        wide: RentModel,
        let_in: Sequence[Ints],
        running: Sequence[RunningColumn],
        max_usd: float,
        machines: Ints,
        simplicity: float,
        work: Work,
        seed: int,
    ) -> None:
        number = len(wide.services)
        super().__init__(wide, let_in, running, np.zeros(number), max_usd, work, seed)
        paid = np.flatnonzero(wide.supply.usd > 0.0)
        self.lp.set_bounds(paid, np.zeros(len(paid)), machines[paid].astype(np.float64))
        # All demand is served, and a hair more for rounding.
        self.lp.set_bounds(
            self._unserved, np.zeros(number), np.full(number, 1.0 - (1.0 + _ROUNDING) / MOST)
        )
        self._slow = np.array([self._add_column(0.0, np.inf) for _ in range(number)], np.int64)
        for slow, left in zip(self._slow.tolist(), self._unserved.tolist(), strict=True):
            for base, slope in tangents():
                # What is left of `MOST` times the demand says what is carried.
                self._add_row({slow: 1.0, left: slope * MOST}, base + slope * MOST)
        self.pieces = np.append(self.pieces, np.full(number, 1.0 / simplicity))
        self.tie = np.append(self.tie, np.zeros(number))
        for m, (items, some) in enumerate(zip(wide.items, self._let_in, strict=True)):
            share = items.share[some]
            slower = 1.0 - share / max(float(share.max(initial=0.0)), 1e-12)
            self.tie[self._offset(m) + np.arange(len(some))] = _FASTER * slower

    def values_of(self, solution: Solution) -> Floats | None:
        """Return the columns of a solution; None where it uses items that are not in."""
        values = super().values_of(solution)
        if values is not None:
            z = MOST * (1.0 - values[self._unserved])
            lines = np.array(tangents())
            values[self._slow] = (lines[:, :1] + np.outer(lines[:, 1], z)).max(axis=0)
        return values
