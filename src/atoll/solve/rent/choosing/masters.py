"""The programs of the allocator with levels in front: columns u_w = 1 - y_w in the rows of demands.

A row of demand asks for 1 of everything that serves way w. With u_w beside it, it asks for y_w. Where what
counts is the common fraction 1 - z that is served, y_w stands for what way w serves of it, and z relaxes the
rows of choices instead of those of their ways:

    choice        sum u - z             = n - 1
    error         sum error u - E z    >= sum error - E
    floor f       f z - sum u          >= f - n
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll.solve.lp import LpResult, Sparse
from atoll.solve.rent.allocation_types import BOTH
from atoll.solve.rent.choosing.level_rows import NONE, LevelRows
from atoll.solve.rent.incumbent import Incumbent, Work
from atoll.solve.rent.instance_master import InstanceAnswer, InstanceGoal, InstanceMaster
from atoll.solve.rent.items import RentModel, Solution
from atoll.solve.rent.mix_master import Mix, MixMaster
from atoll.solve.rent.rental_program import RentalProgram
from atoll.solve.rent.service_oracle import ServiceOracle
from atoll.solve.rent.step_functions import GRID

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_MAX_CUTS = 12
"""Pieces of a way's convex cost that are made cuts."""


class LevelColumns:
    """Columns of levels in a program, and the rows that they keep."""

    def __init__(
        self,
        program: RentalProgram,
        demand_row: int,
        rows: LevelRows,
        plain: Ints | None = None,
    ) -> None:
        """Add them; with `plain` rows, those and the rows of choices are relaxed by a share unserved."""
        self.rows = rows
        self._lp = program.lp
        self._usd: dict[int, float] = {}
        self.unserved: int | None = None
        self.error_row: dict[int, int] = {}
        entries: dict[int, list[tuple[int, float]]] = {way: [] for way in rows.ways}
        lower, upper, kinds = [], [], []
        # Columns are 1 less a level, so that they cover demand as what is unserved does. -1 names
        # the share unserved of everything.
        for c, choice in enumerate(rows.by_choice):
            number = len(choice.ways)
            lower.append(number - 1.0)
            upper.append(number - 1.0)
            kinds.append([*((way, 1.0) for way in choice.ways), (-1, -1.0)])
            if choice.max_error is not None:
                self.error_row[c] = len(lower)
                lower.append(sum(choice.errors) - choice.max_error)
                upper.append(np.inf)
                own = list(zip(choice.ways, choice.errors, strict=True))
                kinds.append([*own, (-1, -choice.max_error)])
            for ways, floor in choice.floors:
                lower.append(floor - len(ways))
                upper.append(np.inf)
                kinds.append([*((way, -1.0) for way in ways), (-1, floor)])
            for off, on, share in choice.spot:
                # share y_off >= (1 - share) y_on, in 1 less a level.
                lower.append(1.0 - 2.0 * share)
                upper.append(np.inf)
                kinds.append([(off, -share), (on, 1.0 - share)])
        nothing = np.zeros(0, np.int64)
        first = program.lp.add_rows(
            np.array(lower),
            np.array(upper),
            Sparse.of(nothing, nothing, np.zeros(0), len(lower)),
        )
        self.error_row = {c: first + row for c, row in self.error_row.items()}
        relaxed: list[tuple[int, float]] = []
        for row, terms in enumerate(kinds):
            for way, value in terms:
                if way >= 0:
                    entries[way].append((first + row, value))
                else:
                    relaxed.append((first + row, value))
        bounds = rows.ranges
        # Of a part of the demand, levels may be below their ranges.
        if plain is not None:
            bounds = dict.fromkeys(rows.ways, (0.0, 1.0))
            relaxed += [(int(row), 1.0) for row in plain]
            at_rows = np.array([row for row, _ in relaxed], np.int64)
            worth = np.array([value for _, value in relaxed])
            self.unserved = program.lp.add_columns(
                np.ones(1),
                np.zeros(1),
                np.ones(1),
                Sparse.of(np.zeros(len(at_rows), np.int64), at_rows, worth, 1),
            )
        owner, at, values = [], [], []
        for place, way in enumerate(rows.ways):
            for row, value in [*entries[way], (demand_row + way, 1.0)]:
                owner.append(place)
                at.append(row)
                values.append(value)
        self._column = {way: place for place, way in enumerate(rows.ways)}
        closed = rows.closed
        begin = program.lp.add_columns(
            np.zeros(len(rows.ways)),
            np.array([1.0 if w in closed else 1.0 - bounds[w][1] for w in rows.ways]),
            np.array([1.0 if w in closed else 1.0 - bounds[w][0] for w in rows.ways]),
            Sparse.of(
                np.array(owner, np.int64), np.array(at, np.int64), np.array(values), len(rows.ways)
            ),
        )
        self._column = {way: begin + place for way, place in self._column.items()}

    def column(self, way: int) -> int:
        """Return the column of 1 less the level of a way."""
        return self._column[way]

    def add_cost(self, way: int, usd: float) -> None:
        """Let all of a way cost more, less a constant, USD per hour."""
        at = self._column[way]
        self._usd[way] = self._usd.get(way, 0.0) - usd
        self._lp.set_costs(np.array([at]), np.array([self._usd[way]]))

    def read(self, values: Floats) -> dict[int, float]:
        """Return the levels of a solution."""
        return {
            way: min(1.0, max(0.0, 1.0 - float(values[at]))) for way, at in self._column.items()
        }

    def write(self, values: Floats, levels: dict[int, float]) -> None:
        """Put levels into the columns of a solution."""
        for way, at in self._column.items():
            values[at] = 1.0 - levels.get(way, 0.0)

    def set_wide(self, wide: bool) -> None:
        """Let levels be anywhere from 0 to 1, or where the conditions allow them to be, which is the same.

        Duals of errors are those of wide levels: ranges may say all that the error allows.
        """
        for way, at in self._column.items():
            low, high = (0.0, 1.0) if wide else self.rows.ranges[way]
            if way in self.rows.closed:
                low = high = 0.0
            self._lp.set_bounds(np.array([at]), np.array([1.0 - high]), np.array([1.0 - low]))

    def error_duals(self, result: LpResult) -> dict[int, float]:
        """Return by choice what one more unit of mean error saves, USD per hour."""
        return {c: max(0.0, float(result.duals[row])) for c, row in self.error_row.items()}


@dataclass(frozen=True)
class LevelAnswer:
    """Result of an integer solve with levels; `served` is the common fraction, 1 for goal cost."""

    answer: InstanceAnswer
    levels: dict[int, float]
    served: float = 1.0


class LevelInstanceMaster(InstanceMaster):
    """Single instances with levels in front: exact for the items that are let in."""

    levels: LevelColumns

    def __init__(
        self,
        model: RentModel,
        goal: InstanceGoal,
        rows: LevelRows,
        let_in: Sequence[Ints],
        work: Work,
        seed: int,
    ) -> None:
        self._rows = rows
        super().__init__(model, goal, np.zeros(0), let_in, work, seed)
        # A way that answers nothing need not stand anywhere.
        optional = [at for (m, _), at in self._stands.items() if m in rows.ways]
        if optional:
            every = np.array(optional, np.int64)
            self.lp.set_bounds(every, np.zeros(len(every)), np.ones(len(every)))
        self._start: dict[int, float] = {}
        self._values_found: Floats | None = None

    def _add_unserved(self, unserved: Floats) -> None:
        """Add the columns of levels in place of those of what is left unserved, which have no prices."""
        del unserved
        plain = None
        if self.goal == "common":
            every = [m for m in range(len(self.model.services)) if m not in self._rows.ways]
            plain = self._demand_row + np.array(every, np.int64)
        self.levels = LevelColumns(self, self._demand_row, self._rows, plain)
        column = self.levels.unserved
        self._unserved = np.zeros(0, np.int64) if column is None else np.array([column])

    def _values(self, solution: Solution) -> Floats | None:
        values = super()._values(solution)
        if values is not None:
            self.levels.write(values, self._start)
            self._lend(values, solution)
        return values

    def _lend(self, values: Floats, solution: Solution) -> None:
        """Put into the columns what is borrowed: all that a level does not need, region by region."""
        model = self.model
        flow = {(m, g): at for at, (m, g, h) in enumerate(self._flows) if g == h}
        for borrower, lender in model.lenders.items():
            own = [
                model.items[m].levels(solution.items[m], model.regions) for m in (lender, borrower)
            ]
            needed = max(0.0, self._start.get(lender, 0.0) - float(own[0][BOTH].sum()))
            for g in range(model.regions):
                single = own[0][:BOTH, g]
                here = min(needed, float(single.min()))
                needed -= here
                at_most = own[1][:BOTH, g] + single - here
                for m, level in ((lender, here), (borrower, min(1.0, float(at_most.min())))):
                    if (m, g) in flow:
                        values[self._flow_first + flow[m, g]] = level
                for at, (m, phase, region) in enumerate(self._loans):
                    if (m, region) == (borrower, g):
                        values[self._loan_first + at] = min(1.0, float(single[phase]) - here)

    def _solution(self, values: Floats) -> Solution:
        self._values_found = values
        return super()._solution(values)

    def solve_levels(
        self,
        standing: Incumbent,
        start: Solution | None,
        levels: dict[int, float],
        iteration_limit: int,
    ) -> LevelAnswer:
        """Solve with whole numbers, from a solution at some levels if given."""
        self._start = levels
        self._values_found = None
        answer = self.solve(standing.limits(iteration_limit), start)
        values = self._found()
        if values is None:
            return LevelAnswer(answer, {}, 0.0)
        served = 1.0 if not len(self._unserved) else 1.0 - float(values[self._unserved[0]])
        return LevelAnswer(answer, self.levels.read(values), served)

    def _found(self) -> Floats | None:
        return self._values_found

    def add_level_cuts(self, oracles: Sequence[ServiceOracle], costs: Sequence[Floats]) -> None:
        """Add cuts: plain services as `add_cuts` has them, ways at what their level must cost.

        With F subadditive, sum_i F(w_i) n_i >= F(y) >= a + b y for each piece of its convex envelope.
        """
        for service, scaled, columns, values in self._cover_cuts(oracles, costs):
            for begin, slope in self._pieces(service, scaled):
                own, value, least = columns, values, begin
                if slope is not None:
                    # begin + slope y, with y = 1 - u.
                    own = np.append(columns, self.levels.column(service))
                    value, least = np.append(values, slope), begin + slope
                entries = Sparse.of(np.zeros(len(own), np.int64), own, value, 1)
                self.lp.add_rows(np.full(1, least), np.full(1, np.inf), entries)

    def _pieces(self, service: int, scaled: Floats) -> list[tuple[float, float | None]]:
        """Return the least cost of a level as lines (at 0, slope); a plain service must be served whole."""
        if service not in self._rows.ways:
            return [(1.0, None)]
        low, high = self._rows.ranges[service]
        x, y = hull_points(scaled, low, high)
        slopes = np.diff(y) / np.diff(x)
        lines: list[tuple[float, float | None]]
        lines = [(float(y[i] - s * x[i]), float(s)) for i, s in enumerate(slopes)]
        # Each line is a valid cut by itself: some may be left out.
        step = max(1, -(-len(lines) // _MAX_CUTS))
        return lines[::step]


class LevelMixMaster(MixMaster):
    """Whole mixes of instances of each service with levels in front."""

    def __init__(
        self, model: RentModel, rows: LevelRows, unserved: Floats, standing: Incumbent, seed: int
    ) -> None:
        super().__init__(model, "cost", unserved, standing, seed)
        self.levels = LevelColumns(self, self._demand_row, rows)
        self._first = self.lp.columns
        self._needed = {way for way in rows.ways if rows.ranges[way][0] > NONE}

    def add(self, service: int, mix: Mix) -> bool:
        """Add a mix; return whether it is new. A way that must answer has one, whatever its level."""
        if service in self._needed:
            self._needed.remove(service)
            self.lp.set_row_bounds(np.array([self._single_row + service]), -1.0, -1.0)
        return super().add(service, mix)


def hull_points(dense: Floats, low: float = 0.0, high: float = 1.0) -> tuple[Floats, Floats]:
    """Return the corners of the convex envelope of a rising function of the level, between two levels.

    `dense[d]` is what serving more than d - 1 and at most d steps costs.
    """
    first, last = int(np.floor(low * GRID + 1e-9)), int(np.ceil(high * GRID - 1e-9))
    level = np.arange(first, last + 1)
    value = dense[first : last + 1]
    known = np.isfinite(value)
    # Right ends of steps: the others lie above the line between them.
    ends = known & np.append(value[1:] > value[:-1], True)
    if len(ends):
        ends[0] = known[0]
    level, value = level[ends], value[ends]
    corners: list[int] = []
    for i in range(len(level)):
        while len(corners) >= 2:
            a, b = corners[-2], corners[-1]
            # Corners on or above the line past them are none.
            if (value[b] - value[a]) * (level[i] - level[a]) < (value[i] - value[a]) * (
                level[b] - level[a]
            ):
                break
            corners.pop()
        corners.append(i)
    return level[corners] / GRID, value[corners]
