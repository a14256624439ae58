"""The one door to the LP and MIP engine (HiGHS): incremental columns and rows, duals, integer solves.

Every run is single-threaded with a fixed seed, and its limits count work (simplex iterations, nodes), so
equal inputs give equal answers on an idle and on a loaded machine. A time limit is a safety net; a result
that it ended says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

import highspy
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

INFINITY = math.inf
_TOLERANCE = 1e-8
"""How far from whole, and from its rows, a solution of an integer solve may be.

At 1e-9 HiGHS 1.15 calls one of 25 small programs with equal instances solved at a value that is not the best,
some of them by a fifth; at 1e-8 one of 4,000, as it does at its own 1e-6.
"""
# The largest value of HiGHS's integer options, its default for no limit.
_NO_LIMIT = 2**31 - 1
_TRIALS = 8
"""HiGHS's own number of trial branchings."""
_ROOT_LOADS = 5
"""How many times as many iterations an integer solve does between two checks at its root as in its tree."""


@dataclass(frozen=True, slots=True)
class Sparse:
    """Vectors by compressed storage: entry i of `index`/`value` belongs to the vector whose span holds i."""

    start: NDArray[np.int32]
    index: NDArray[np.int32]
    value: Floats

    @property
    def number(self) -> int:
        """How many vectors there are."""
        return len(self.start) - 1

    @classmethod
    def of(cls, owner: Ints, index: Ints, value: Floats, number: int) -> Sparse:
        """Collect entries by the vector that owns them; `owner` in 0..number-1, in any order."""
        # Stable: the entries of a vector stay in the order given.
        order = np.argsort(owner, kind="stable")
        start = np.zeros(number + 1, np.int32)
        np.cumsum(np.bincount(owner, minlength=number), out=start[1:])
        return cls(start, index[order].astype(np.int32), value[order].astype(np.float64))


@dataclass(frozen=True, slots=True)
class LpResult:
    """Optimum of a linear program: values of columns, duals of rows (>= 0 for >= rows).

    `iterations` are those of the simplex method; `timed_out` says that the clock ended it, not the work.
    """

    status: Literal["optimal", "infeasible", "stopped"]
    objective: float
    values: Floats
    duals: Floats
    reduced: Floats
    iterations: int = 0
    timed_out: bool = False


@dataclass(frozen=True, slots=True)
class MipResult:
    """Result of an integer solve: best values (None: none found) and a proven lower bound.

    `iterations` are those of all linear programs solved on the way; `timed_out` says that the clock ended
    the solve, not its gap or its limits on work.
    """

    status: Literal["optimal", "infeasible", "stopped"]
    objective: float
    bound: float
    values: Floats | None
    nodes: int
    iterations: int = 0
    timed_out: bool = False


class LinearProgram:
    """A minimisation that grows by columns and rows and keeps its basis between solves."""

    def __init__(self, seed: int = 0) -> None:
        self._engine = highspy.Highs()
        for key, value in (
            ("output_flag", False),
            ("threads", 1),
            ("parallel", "off"),
            ("random_seed", seed),
        ):
            self._engine.setOptionValue(key, value)
        self._seed = seed

    @property
    def columns(self) -> int:
        """How many columns there are."""
        return int(self._engine.getNumCol())

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return int(self._engine.getNumRow())

    def add_columns(self, cost: Floats, lower: Floats, upper: Floats, entries: Sparse) -> int:
        """Add columns with their entries by row; return the index of the first."""
        first = self.columns
        # HiGHS takes where vectors begin; the number of entries ends the last one.
        self._engine.addCols(
            len(cost),
            np.ascontiguousarray(cost, np.float64),
            np.ascontiguousarray(lower, np.float64),
            np.ascontiguousarray(upper, np.float64),
            len(entries.index),
            entries.start[:-1],
            entries.index,
            entries.value,
        )
        return first

    def add_rows(self, lower: Floats, upper: Floats, entries: Sparse) -> int:
        """Add rows with their entries by column; return the index of the first."""
        first = self.rows
        self._engine.addRows(
            len(lower),
            np.ascontiguousarray(lower, np.float64),
            np.ascontiguousarray(upper, np.float64),
            len(entries.index),
            entries.start[:-1],
            entries.index,
            entries.value,
        )
        return first

    def set_costs(self, columns: Ints, cost: Floats) -> None:
        """Change objective coefficients."""
        self._engine.changeColsCost(
            len(columns), columns.astype(np.int32), np.ascontiguousarray(cost, np.float64)
        )

    def set_bounds(self, columns: Ints, lower: Floats, upper: Floats) -> None:
        """Change column bounds."""
        self._engine.changeColsBounds(
            len(columns),
            columns.astype(np.int32),
            np.ascontiguousarray(lower, np.float64),
            np.ascontiguousarray(upper, np.float64),
        )

    def set_row_bounds(self, rows: Ints, lower: float, upper: float) -> None:
        """Change the bounds of rows."""
        for row in rows:
            self._engine.changeRowBounds(int(row), lower, upper)

    def set_integer(self, columns: Ints) -> None:
        """Make columns integer for `solve_mip`; `solve` goes on ignoring it."""
        kinds = np.full(len(columns), int(highspy.HighsVarType.kInteger), np.uint8)
        self._engine.changeColsIntegrality(len(columns), columns.astype(np.int32), kinds)

    def solve(self, time_limit_s: float = INFINITY, iteration_limit: int | None = None) -> LpResult:
        """Solve the linear relaxation from the last basis, in at most that many simplex iterations."""
        engine = self._engine
        engine.setOptionValue("solve_relaxation", True)
        engine.setOptionValue("time_limit", max(0.0, time_limit_s))
        engine.setOptionValue(
            "simplex_iteration_limit", _NO_LIMIT if iteration_limit is None else iteration_limit
        )
        engine.run()
        # An integer solve sets no such limit, and must not inherit this one.
        engine.setOptionValue("simplex_iteration_limit", _NO_LIMIT)
        info = engine.getInfo()
        solution = engine.getSolution()
        return LpResult(
            _status(engine),
            float(info.objective_function_value),
            np.array(solution.col_value),
            np.array(solution.row_dual),
            np.array(solution.col_dual),
            max(0, int(info.simplex_iteration_count)),
            engine.getModelStatus() == highspy.HighsModelStatus.kTimeLimit,
        )

    def solve_mip(
        self,
        *,
        time_limit_s: float,
        gap: float,
        absolute_gap: float = 1e-9,
        start: Floats | None = None,
        node_limit: int | None = None,
        iteration_limit: int | None = None,
        tolerance: float = _TOLERANCE,
        trials: int = _TRIALS,
        dive: bool = True,
    ) -> MipResult:
        """Solve with integrality, from `start` if given, to a relative or absolute gap.

        `tolerance` is how far from whole, and from its rows, a solution may be. `trials` is how often a
        column is branched on by way of trial before its past effect is trusted: each costs iterations.
        Without `dive` it solves no smaller integer programs around its relaxations (RINS, RENS): they find
        good answers early, and cost half of the work where the start is one.

        `node_limit` and `iteration_limit` stop it after so many nodes and about so many simplex iterations
        in all, at the same point each time, with the best values so far and the bound proven so far.
        """
        engine = self._engine
        # Nothing can be found in no time, and nothing is proven then.
        if time_limit_s <= 0.0:
            return MipResult("stopped", INFINITY, -INFINITY, None, 0, 0, timed_out=True)
        options: list[tuple[str, float | int | bool]] = [
            ("solve_relaxation", False),
            ("time_limit", time_limit_s),
            ("mip_rel_gap", gap),
            ("mip_abs_gap", absolute_gap),
            ("mip_feasibility_tolerance", tolerance),
            ("primal_feasibility_tolerance", tolerance),
            ("dual_feasibility_tolerance", tolerance),
            ("mip_max_nodes", _NO_LIMIT if node_limit is None else node_limit),
            ("mip_pscost_minreliable", trials),
            ("mip_heuristic_run_rins", dive),
            ("mip_heuristic_run_rens", dive),
        ]
        for key, value in options:
            engine.setOptionValue(key, value)
        if start is not None:
            hint = highspy.HighsSolution()
            hint.col_value = list(start)
            engine.setSolution(hint)
        meter = _Meter(self.rows, iteration_limit, perf_counter() + time_limit_s)
        engine.cbMipInterrupt += meter.read
        try:
            engine.run()
        # The engine lives on: a meter that stays would count in the next solve.
        finally:
            engine.cbMipInterrupt -= meter.read
        # Kept until here: it cannot pass through the engine, which called back.
        if meter.error is not None:
            raise meter.error
        info = engine.getInfo()
        found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        values = np.array(engine.getSolution().col_value) if found else None
        return MipResult(
            _status(engine),
            float(info.objective_function_value) if found else INFINITY,
            float(info.mip_dual_bound),
            values,
            max(0, int(info.mip_node_count)),
            max(0, int(info.simplex_iteration_count)),
            meter.late or engine.getModelStatus() == highspy.HighsModelStatus.kTimeLimit,
        )


class _Meter:
    """Ends an integer solve after a number of simplex iterations.

    HiGHS tells Python no iterations while it runs, but it asks whether to go on after each of its steps, in
    an order that depends on nothing but the input. Each such check is taken as the square root of the
    number of rows in iterations, at the root as `_ROOT_LOADS` times that: within a factor of three of the
    true number on covering and flow programs of 20 to 1,900 rows.
    """

    def __init__(self, rows: int, iteration_limit: int | None, end: float) -> None:
        self._step = max(1, math.isqrt(rows))
        self._left = INFINITY if iteration_limit is None else float(iteration_limit)
        self._end = end
        self.late = False
        self.error: BaseException | None = None

    def read(self, event: highspy.HighsCallbackEvent) -> None:
        """Count a check; ask for the end where the work or, as a safety net, the time is spent."""
        try:
            self._left -= self._step * (1 if event.data_out.mip_node_count else _ROOT_LOADS)
            if self._left < 0.0:
                event.interrupt()
            elif perf_counter() > self._end:
                self.late = True
                event.interrupt()
        except BaseException as error:  # noqa: BLE001  (an interrupt from the keyboard may come here)
            self.error = error
            event.interrupt()


def _status(engine: highspy.Highs) -> Literal["optimal", "infeasible", "stopped"]:
    status = engine.getModelStatus()
    if status == highspy.HighsModelStatus.kOptimal:
        return "optimal"
    if status in (
        highspy.HighsModelStatus.kInfeasible,
        highspy.HighsModelStatus.kUnboundedOrInfeasible,
    ):
        return "infeasible"
    return "stopped"
