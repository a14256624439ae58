"""What solves the integer programmes of flow placement: a programme in, an outcome out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from atoll.solve.place.instance import Floats
from atoll.solve.place.milp.model import Programme

ITERATIONS = 2_000_000
"""Simplex iterations of a proof: a minute or two."""
Status = Literal["optimal", "infeasible", "stopped"]


@dataclass(frozen=True)
class EngineOutcome:
    """What an engine reached: values of the columns (None: none found) and the bound, tokens/s.

    `iterations` are those of the simplex method; `timed_out` says that the clock ended it, not its work.
    """

    status: Status
    values: Floats | None
    bound: float
    nodes: int
    iterations: int = 0
    timed_out: bool = False


@dataclass(frozen=True)
class Engine:
    """A solver of integer programmes: `solve(programme, seconds, hint)`; the clock is a safety net.

    One that `takes_start` begins at the hint; the others are only asked for something better.
    """

    solve: Callable[[Programme, float, Floats | None], EngineOutcome]
    takes_start: bool = True


def highs(
    programme: Programme, seconds: float, hint: Floats | None, iterations: int = ITERATIONS
) -> EngineOutcome:
    """Solve with HiGHS, from `hint`, in at most about so many simplex iterations."""
    from atoll.solve.lp import LinearProgram, Sparse

    engine = LinearProgram()
    none = np.zeros(0, np.int64)
    low, high = np.array(programme.low), np.array(programme.high)
    engine.add_columns(
        programme.cost(), low, high, Sparse.of(none, none, np.zeros(0), programme.columns)
    )
    entries = Sparse.of(
        np.array(programme.row),
        np.array(programme.column),
        np.array(programme.value),
        programme.rows,
    )
    engine.add_rows(np.array(programme.row_low), np.array(programme.row_high), entries)
    engine.set_integer(np.flatnonzero(programme.whole))
    solved = engine.solve_mip(
        time_limit_s=seconds, gap=0.0, start=hint, iteration_limit=max(0, iterations)
    )
    return EngineOutcome(
        solved.status,
        solved.values,
        -solved.bound * programme.unit,
        solved.nodes,
        solved.iterations,
        solved.timed_out,
    )


HIGHS = Engine(highs)
