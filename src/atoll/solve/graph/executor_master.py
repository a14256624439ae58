"""The linear program of executors, machines and flows; it grows by executor types as they pay.

Columns: shares f (one for all classes, or one each), x of entries, machines b, slices u taken anew, kept
executors; and for each unit that is in it, new executors n with the flows z. Rows, ">= 0" where not said:

    class      sum of x - f                                        = 0
    need       sum of z - sum of x                                 = 0
    cell       sum of u - slices of n                    (= 0 where the share of spot is limited)
    offer      GPUs of b - GPUs of u - GPUs of kept executors
    limits     budget, spot share, number of machines
    level      sum of weight f                                     >= level
    unit       n + kept - sum of load z
    chain, v   z of the second part at budget - v or less - z of the first part at v or more

Prices of rows make every unit outside comparable: one executor is worth the best of (worth of a need / load),
and costs its slices. What it costs more than it is worth is by how much the bound rises if it is used.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from atoll.solve.array_types import Floats, Ints
from atoll.solve.deadline import Deadline
from atoll.solve.graph.program_table import Table, tied_shares
from atoll.solve.lp import LinearProgram, LpResult, MipResult, Sparse

_SAME_S = 1e-9
"""Latency beyond a chain's budget that counts as rounding, in s."""
_NEGATIVE = 1e-7
"""Reduced cost below which a unit is worth adding."""
_BATCH = 40
"""Units added at once."""
_TOLERANCE = 1e-7
"""Of integer solves. At 1e-9 HiGHS 1.15 has cut off best solutions of small programs in its presolve; flows
are made exact afterwards, with the whole numbers fixed."""
_COLUMNS = 6000.0
"""Columns up to which an iteration of an integer solve counts as one."""
# Values of the relaxation below this are rounding.
_USED = 1e-9
_STEP_COST = 5
"""Iterations that one solve of the linear program counts beside its own."""


@dataclass
class Counter:
    """Work done, and the work that may be done: simplex iterations."""

    allowance: float
    nodes: int = 0
    iterations: int = 0
    spent: float = 0.0

    @property
    def left(self) -> float:
        """Iterations left."""
        return self.allowance - self.spent

    def charge(self, iterations: int, nodes: int = 0, dear: float = 1.0) -> None:
        """Count a solve, an iteration as `dear`."""
        self.iterations += iterations
        self.nodes += nodes
        self.spent += dear * iterations + _STEP_COST


@dataclass
class _ChainRows:
    """Rows of a chain by the latency v of the first part, and their columns so far."""

    latency: list[float] = field(default_factory=list)
    row: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Relaxed:
    """The optimum of the relaxation over all units.

    The bound, what an executor of each unit costs beyond its worth, and which units it uses.
    """

    feasible: bool
    objective: float
    excess: Floats
    used: NDArray[np.bool_]
    complete: bool


class Master:
    """See above. Money is counted in `money` USD/h, so that numbers are near 1."""

    def __init__(self, table: Table, *, weights: Floats | None, cap: float, work: Counter) -> None:
        """`weights`: of the shares of classes, None where all classes have the same; `cap`: the largest."""
        self.table = table
        self.lp = LinearProgram(0)
        self.work = work
        self.weights = np.ones(1) if weights is None else weights
        program = table.program
        prices = [m.usd_per_hour for m in program.machines if m.usd_per_hour > 0.0]
        self.money = max(prices, default=1.0)
        self._common = weights is None
        self._cap = cap
        self._limits: dict[str, int] = {}
        self.unit_row = np.full(table.units, -1, np.int64)
        self.unit_column = np.full(table.units, -1, np.int64)
        self.z_column = np.full(len(table.z_unit), -1, np.int64)
        self._chains = [_ChainRows() for _ in table.chains]
        self._chained = self._index_chains()
        self._add_rows()
        self._add_shares(cap)
        self._tie_shares()
        self._add_machines()
        # Units of what runs go first: the columns of what is kept stand in their rows.
        standing = np.unique(np.array([k.unit for k in table.kept], np.int64))
        self.add_units(standing)
        self._add_kept()

    # ---------------------------------------------------------------- rows and columns

    def _add_rows(self) -> None:
        table, program = self.table, self.table.program
        # What is served and what is needed are balances: both sides of their rows are 0.
        lower = [0.0] * (len(table.classes) + len(table.needs))
        upper = [0.0] * len(lower)
        self._cell_row = len(lower)
        lower += [0.0] * len(table.cells)
        # Idle slices off spot would count as GPUs in use, and loosen the limit on spot.
        exact = program.spot_share is not None
        upper += [0.0 if exact else np.inf] * len(table.cells)
        self._offer_row = len(lower)
        lower += [0.0] * len(program.machines)
        upper += [np.inf] * len(program.machines)
        budget, max_machines = program.budget_usd_per_hour, program.max_machines
        for name, least in (
            ("budget", None if budget is None else -budget / self.money),
            ("spot", None if program.spot_share is None else 0.0),
            ("machines", None if max_machines is None else -float(max_machines)),
        ):
            if least is not None:
                self._limits[name] = len(lower)
                lower.append(least)
                upper.append(np.inf)
        # A free row until `seek_cost` gives it the level to reach.
        self._level_row = len(lower)
        lower.append(-np.inf)
        upper.append(np.inf)
        self.lp.add_rows(np.array(lower), np.array(upper), _nothing(len(lower)))

    def _add_shares(self, cap: float) -> None:
        table = self.table
        number = len(self.weights)
        classes = np.arange(len(table.classes))
        # One share for all classes, or one of each.
        owner = [np.zeros(len(classes), np.int64) if self._common else classes, np.arange(number)]
        row = [classes, np.full(number, self._level_row)]
        value = [np.full(len(classes), -1.0), self.weights]
        self.share_columns = np.arange(number)
        self._add(np.zeros(number), np.full(number, cap), owner, row, value)
        place = {t: i for i, t in enumerate(table.classes)}
        first = len(table.classes)
        pairs = [(i, place[entry.klass], 1.0) for i, entry in enumerate(table.entries)]
        pairs += [(i, first + d, -1.0) for i, e in enumerate(table.entries) for d in e.needs]
        self.entry_columns = number + np.arange(len(table.entries))
        zero = np.zeros(len(table.entries))
        self._add(zero, np.full(len(table.entries), np.inf), *_columns(pairs))

    def _tie_shares(self) -> None:
        """Classes of one service have the same share where they are served alike."""
        pairs = [] if self._common else tied_shares(self.table.program, self.table.classes)
        if pairs:
            row = np.repeat(np.arange(len(pairs)), 2)
            value = np.tile([1.0, -1.0], len(pairs))
            entries = Sparse.of(row, self.share_columns[np.array(pairs).ravel()], value, len(pairs))
            self.lp.add_rows(np.zeros(len(pairs)), np.zeros(len(pairs)), entries)

    def _add_machines(self) -> None:
        table, machines = self.table, self.table.program.machines
        start = self.table.program.init_penalty
        usd = np.array([m.usd_per_hour for m in machines]) / self.money
        pairs: list[tuple[int, int, float]] = []
        for o, machine in enumerate(machines):
            pairs.append((o, self._offer_row + o, float(machine.gpus)))
            if "budget" in self._limits:
                pairs.append((o, self._limits["budget"], -float(usd[o])))
            if "machines" in self._limits:
                pairs.append((o, self._limits["machines"], -1.0))
        self.machine_columns = self.lp.columns + np.arange(len(machines))
        self.rent = usd
        upper = np.array([float(m.available) for m in machines])
        self._add(np.zeros(len(machines)), upper, *_columns(pairs))
        pairs, cost, max_each = [], [], []
        for i, (cell, o, size) in enumerate(table.slices):
            pairs += [(i, self._cell_row + cell, 1.0), (i, self._offer_row + o, -float(size))]
            pairs += self._spot_entry(i, o, size)
            cost.append(start * usd[o] * size / machines[o].gpus)
            max_each.append(float(machines[o].available * (machines[o].gpus // size)))
        self.slice_columns = self.lp.columns + np.arange(len(table.slices))
        self.slice_cost = np.array(cost)
        self._add(np.zeros(len(cost)), np.array(max_each), *_columns(pairs))

    def _spot_entry(self, column: int, offer: int, gpus: float) -> list[tuple[int, int, float]]:
        share = self.table.program.spot_share
        if share is None:
            return []
        spot = self.table.program.machines[offer].spot
        # Each GPU brings the share that is allowed; one on spot takes a whole one.
        return [(column, self._limits["spot"], gpus * (share - float(spot)))]

    def _add_kept(self) -> None:
        kept = self.table.kept
        pairs: list[tuple[int, int, float]] = []
        for i, item in enumerate(kept):
            pairs.append((i, int(self.unit_row[item.unit]), 1.0))
            total = 0.0
            for o, gpus in item.gpus:
                pairs.append((i, self._offer_row + o, -float(gpus)))
                total += sum(value for _, _, value in self._spot_entry(i, o, gpus))
            if "spot" in self._limits:
                pairs.append((i, self._limits["spot"], total))
        self.kept_columns = self.lp.columns + np.arange(len(kept))
        upper = np.array([float(k.count) for k in kept])
        self._add(np.zeros(len(kept)), upper, *_columns(pairs))

    def _add(
        self,
        lower: Floats,
        upper: Floats,
        owner: list[Ints],
        row: list[Ints],
        value: list[Floats],
    ) -> None:
        if not len(lower):
            return
        entries = Sparse.of(
            np.concatenate(owner), np.concatenate(row), np.concatenate(value), len(lower)
        )
        self.lp.add_columns(np.zeros(len(lower)), lower, upper, entries)

    def add_units(self, units: Ints) -> None:
        """Take units into the program; those that are in it already are passed over."""
        table = self.table
        units = units[self.unit_row[units] < 0]
        if not len(units):
            return
        # Rows before columns, which have entries in them.
        first = self.lp.add_rows(
            np.zeros(len(units)), np.full(len(units), np.inf), _nothing(len(units))
        )
        self.unit_row[units] = first + np.arange(len(units))
        count = np.diff(table.use_start)[units]
        use = np.concatenate([np.arange(*table.use_start[[j, j + 1]]) for j in units])
        each = np.arange(len(units))
        owner = [np.repeat(each, count), each]
        row = [self._cell_row + table.use_cell[use], self.unit_row[units]]
        value = [-table.use_count[use], np.ones(len(units))]
        self.unit_column[units] = self.lp.columns + each
        max_each = np.where(table.fresh[units], table.max_executors[units], 0.0)
        self._add(np.zeros(len(units)), max_each, owner, row, value)
        z = np.concatenate([np.arange(*table.z_start[[j, j + 1]]) for j in units])
        each = np.arange(len(z))
        owner = [each, each]
        row = [len(table.classes) + table.z_need[z], self.unit_row[table.z_unit[z]]]
        value = [np.ones(len(z)), -table.z_load[z]]
        # New entries join the rows of chains that there are; rows of new latencies come after that.
        for c, (firsts, seconds) in enumerate(self._chained):
            for which, sign in ((firsts, -1.0), (seconds, 1.0)):
                mine = np.flatnonzero(np.isin(z, which, assume_unique=True))
                low = self._reach(c, z[mine], sign)
                for v, at in zip(self._chains[c].latency, self._chains[c].row, strict=True):
                    hit = mine[v <= low]
                    owner.append(hit)
                    row.append(np.full(len(hit), at))
                    value.append(np.full(len(hit), sign))
        self.z_column[z] = self.lp.columns + each
        self._add(np.zeros(len(z)), np.full(len(z), np.inf), owner, row, value)
        self._add_chain_rows(z)

    # ---------------------------------------------------------------- chains

    def _index_chains(self) -> list[tuple[Ints, Ints]]:
        """Return by chain the entries z of its first and of its second part."""
        table = self.table
        by_need: dict[int, Ints] = {}
        for d in {d for chain in table.chains for d in (chain.first, chain.second)}:
            by_need[d] = np.flatnonzero(table.z_need == d)
        return [(by_need[c.first], by_need[c.second]) for c in table.chains]

    def _reach(self, chain: int, z: Ints, sign: float) -> Floats:
        """Return the largest v in whose rows entries of the first (-1) or second part (+1) stand."""
        late = self.table.z_latency[z]
        return late if sign < 0 else self.table.chains[chain].budget_s + _SAME_S - late

    def _add_chain_rows(self, z: Ints) -> None:
        """Add rows for latencies of the first parts among new entries."""
        for c, (firsts, seconds) in enumerate(self._chained):
            rows = self._chains[c]
            new = np.unique(self.table.z_latency[np.intersect1d(z, firsts, assume_unique=True)])
            for v in new:
                if float(v) in rows.latency:
                    continue
                pairs = []
                for which, sign in ((firsts, -1.0), (seconds, 1.0)):
                    inside = which[self.z_column[which] >= 0]
                    hit = inside[v <= self._reach(c, inside, sign)]
                    pairs.append((self.z_column[hit], np.full(len(hit), sign)))
                index = np.concatenate([columns for columns, _ in pairs])
                value = np.concatenate([values for _, values in pairs])
                entries = Sparse.of(np.zeros(len(index), np.int64), index, value, 1)
                at = self.lp.add_rows(np.zeros(1), np.full(1, np.inf), entries)
                rows.latency.append(float(v))
                rows.row.append(at)

    # ---------------------------------------------------------------- goals

    def seek_share(self) -> None:
        """Maximise the weighed share: minimise its negative."""
        self._set_money(0.0)
        self.lp.set_costs(self.share_columns, -self.weights)
        self.lp.set_row_bounds(np.array([self._level_row]), -np.inf, np.inf)

    def seek_cost(self, level: float) -> None:
        """Minimise money with a weighed share of at least `level`."""
        self._set_money(1.0)
        self.lp.set_costs(self.share_columns, np.zeros(len(self.weights)))
        self.lp.set_row_bounds(np.array([self._level_row]), level, np.inf)

    def bound_shares(self, lower: float, upper: float) -> None:
        """Bound the shares of all classes."""
        number = len(self.share_columns)
        self.lp.set_bounds(self.share_columns, np.full(number, lower), np.full(number, upper))

    def _set_money(self, factor: float) -> None:
        self.lp.set_costs(self.machine_columns, factor * self.rent)
        self.lp.set_costs(self.slice_columns, factor * self.slice_cost)

    # ---------------------------------------------------------------- solving

    @property
    def inside(self) -> Ints:
        """Units that are in the program."""
        return np.flatnonzero(self.unit_row >= 0)

    def excess(self, result: LpResult) -> Floats:
        """Return what one executor of each unit costs more than it is worth."""
        table = self.table
        duals = result.duals
        worth = duals[len(table.classes) + table.z_need].copy()
        for c, rows in enumerate(self._chains):
            if not rows.latency:
                continue
            order = np.argsort(rows.latency, kind="stable")
            latency = np.array(rows.latency)[order]
            # An entry stands in the rows of all latencies up to its reach: a sum over a prefix.
            total = np.concatenate([[0.0], np.cumsum(duals[np.array(rows.row)[order]])])
            for which, sign in zip(self._chained[c], (-1.0, 1.0), strict=True):
                reach = self._reach(c, which, sign)
                worth[which] += sign * total[np.searchsorted(latency, reach, side="right")]
        cell = duals[self._cell_row : self._cell_row + len(table.cells)]
        return table.slice_prices(cell) - table.best_ratio(worth)

    def relax(self, time_limit_s: float) -> Relaxed:
        """Solve the relaxation over all units, taking in those that pay, until none does."""
        end = Deadline(time_limit_s)
        while True:
            result = self.lp.solve(end.left)
            self.work.charge(result.iterations)
            if result.status != "optimal":
                # Infeasible proves something only where no unit was left out.
                complete = result.status == "infeasible" and not len(self._outside())
                none = np.zeros(self.table.units)
                return Relaxed(False, np.inf, none, none > 0.0, complete)
            excess = self.excess(result)
            outside = self._outside()
            paying = outside[excess[outside] < -_NEGATIVE]
            complete = not len(paying)
            if complete or end.passed:
                used = np.zeros(self.table.units, np.bool_)
                inside = self.inside
                used[inside] = result.values[self.unit_column[inside]] > _USED
                return Relaxed(True, result.objective, excess, used, complete)
            best = np.argsort(excess[paying], kind="stable")[:_BATCH]
            self.add_units(np.sort(paying[best]))

    def _outside(self) -> Ints:
        """Return units that could be taken in."""
        return np.flatnonzero((self.unit_row < 0) & self.table.fresh)

    def _add_links(self) -> None:
        """Add n >= z where one executor could do more than the whole demand: it is there or it is not.

        The relaxation would take the fraction of an executor that the flow needs.
        """
        table = self.table
        z = np.flatnonzero((self.z_column >= 0) & (table.z_load < 1.0))
        if not len(z):
            return
        each = np.arange(len(z))
        row, column = [each, each], [self.unit_column[table.z_unit[z]], self.z_column[z]]
        value = [np.ones(len(z)), np.full(len(z), -1.0)]
        for item, kept in zip(table.kept, self.kept_columns, strict=True):
            mine = np.flatnonzero(table.z_unit[z] == item.unit)
            row.append(mine)
            column.append(np.full(len(mine), kept))
            value.append(np.ones(len(mine)))
        entries = Sparse.of(
            np.concatenate(row), np.concatenate(column), np.concatenate(value), len(z)
        )
        self.lp.add_rows(np.zeros(len(z)), np.full(len(z), np.inf), entries)

    def solve_integer(
        self, *, gap: float, start: Floats | None, time_limit_s: float, iterations: int
    ) -> MipResult:
        """Solve over the units inside with whole executors, slices and machines; for one solve only."""
        # With shares above 1 an executor may do more than the whole demand, and n >= z would not hold.
        if self._cap <= 1.0:
            self._add_links()
        whole = np.concatenate(
            [
                self.machine_columns,
                self.slice_columns,
                self.kept_columns,
                self.unit_column[self.inside],
            ]
        )
        self.lp.set_integer(whole.astype(np.int64))
        # What an iteration takes grows with the columns.
        dear = max(1.0, self.lp.columns / _COLUMNS)
        result = self.lp.solve_mip(
            time_limit_s=time_limit_s,
            gap=gap,
            absolute_gap=1e-9,
            start=start,
            iteration_limit=max(1, int(iterations / dear)),
            tolerance=_TOLERANCE,
            dive=start is None,
        )
        self.work.charge(result.iterations, result.nodes, dear)
        return result


def _nothing(number: int) -> Sparse:
    none = np.zeros(0, np.int64)
    return Sparse.of(none, none, np.zeros(0), number)


def _columns(
    pairs: list[tuple[int, int, float]],
) -> tuple[list[Ints], list[Ints], list[Floats]]:
    return (
        [np.array([p[0] for p in pairs], np.int64)],
        [np.array([p[1] for p in pairs], np.int64)],
        [np.array([p[2] for p in pairs], np.float64)],
    )
