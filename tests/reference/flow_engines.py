"""Other engines for the integer programs of flow placement, to check HiGHS with: scipy, CP-SAT, Gurobi.

CP-SAT knows integers only: flows are counted in millionths of the largest possible one, and what limits them
is rounded up, so that its bound is one of the program itself. It runs in a process of its own, because
ortools and highspy cannot be loaded together.
"""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from typing import Any

import numpy as np

from atoll.core.errors import InternalError, MissingDependencyError
from atoll.solve.array_types import Floats
from atoll.solve.place.milp.model import HIGHS, EngineOutcome, MipEngine, Program, Status

_STEPS = 1_000_000
_LARGEST_STEP = 1e-9


def scipy(program: Program, seconds: float, hint: Floats | None) -> EngineOutcome:
    """Solve with HiGHS through scipy, which takes no start: `hint` is not used."""
    del hint
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array
    except ImportError as error:
        raise MissingDependencyError("scipy", "reference") from error
    shape = (program.rows, program.columns)
    matrix = coo_array((program.value, (program.row, program.column)), shape=shape).tocsr()
    solved = milp(
        program.cost(),
        constraints=LinearConstraint(matrix, program.row_low, program.row_high),
        integrality=np.array(program.whole, np.int64),
        bounds=Bounds(program.low, program.high),
        options={"time_limit": seconds, "mip_rel_gap": 0.0},
    )
    if solved.status == 2:
        return EngineOutcome("infeasible", None, -np.inf, 0)
    bound = math.inf if solved.mip_dual_bound is None else -float(solved.mip_dual_bound)
    status: Status = "optimal" if solved.status == 0 else "stopped"
    return EngineOutcome(status, solved.x, bound * program.unit, int(solved.mip_node_count or 0))


def cpsat(program: Program, seconds: float, hint: Floats | None) -> EngineOutcome:
    """Solve with CP-SAT in a process of its own, from `hint`."""
    request = whole_numbers(program, hint) | {"seconds": seconds, "workers": 1}
    done = subprocess.run(
        [sys.executable, "-m", "tests.reference.flow_cpsat_worker"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        timeout=seconds + 60.0,
        check=False,
    )
    if done.returncode == 6:
        raise MissingDependencyError("ortools", "reference")
    if done.returncode != 0:
        raise InternalError(f"CP-SAT's process failed: {done.stderr.strip()[-200:]}")
    answer = json.loads(done.stdout)
    if answer["status"] == "INFEASIBLE":
        return EngineOutcome("infeasible", None, -np.inf, int(answer["branches"]))
    values = None
    if answer["values"] is not None:
        scale = np.where(program.whole, 1.0, 1.0 / _STEPS)
        values = np.array(answer["values"], np.float64) * scale
    status: Status = "optimal" if answer["status"] == "OPTIMAL" else "stopped"
    bound = float(answer["bound"]) / _STEPS * program.unit
    return EngineOutcome(status, values, bound, int(answer["branches"]))


def whole_numbers(program: Program, hint: Floats | None) -> dict[str, Any]:
    """Return the program with flows in steps of a millionth of `unit`, every limit on them loosened."""
    scale = np.where(program.whole, 1.0, float(_STEPS))
    mixed = np.zeros(program.rows, bool)
    row, column = np.array(program.row), np.array(program.column)
    flow = ~np.array(program.whole)
    np.logical_or.at(mixed, row, flow[column])
    rows: list[tuple[list[int], list[int], int | None, int | None]] = []
    order = np.argsort(row, kind="stable")
    ends = np.cumsum(np.bincount(row, minlength=program.rows))
    for number, own in enumerate(np.split(order, ends[:-1])):
        low, high = program.row_low[number], program.row_high[number]
        index = column[own]
        value = np.array(program.value)[own]
        if mixed[number]:
            rounded = _floor if math.isfinite(high) else _ceil
            value = np.where(flow[index], value, [rounded(v * _STEPS) for v in value])
            low, high = low * _STEPS, high * _STEPS
        least = _floor(low) if math.isfinite(low) else None
        most = _ceil(high) if math.isfinite(high) else None
        rows.append((index.tolist(), [round(v) for v in value.tolist()], least, most))
    return {
        "low": [_floor(v) for v in np.array(program.low) * scale],
        "high": [_ceil(v) for v in np.array(program.high) * scale],
        "rows": rows,
        "goal": program.goal,
        "hint": None if hint is None else [round(v) for v in (hint * scale).tolist()],
    }


def _floor(value: float) -> int:
    return math.floor(value + _LARGEST_STEP)


def _ceil(value: float) -> int:
    return math.ceil(value - _LARGEST_STEP)


def gurobi(program: Program, seconds: float, hint: Floats | None) -> EngineOutcome:
    """Solve with Gurobi from `hint`; the licence inside the package allows 2,000 columns and rows."""
    try:
        # Through importlib: its annotations know fewer index types than its methods take.
        gp: Any = importlib.import_module("gurobipy")
    except ImportError as error:
        raise MissingDependencyError("gurobipy", "reference") from error
    from scipy.sparse import coo_array

    shape = (program.rows, program.columns)
    matrix = coo_array((program.value, (program.row, program.column)), shape=shape).tocsr()
    low, high = np.array(program.row_low), np.array(program.row_high)
    with gp.Env(empty=True) as environment:
        environment.setParam("OutputFlag", 0)
        environment.start()
        with gp.Model(env=environment) as model:
            model.Params.TimeLimit = seconds
            model.Params.MIPGap = 0.0
            model.Params.Threads = 1
            model.Params.IntFeasTol = 1e-9
            model.Params.FeasibilityTol = 1e-9
            kinds = np.where(program.whole, "I", "C")
            x = model.addMVar(program.columns, lb=program.low, ub=program.high, vtype=kinds)
            for side, sign in ((low, 1.0), (high, -1.0)):
                rows = np.flatnonzero(np.isfinite(side))
                model.addConstr(sign * matrix[rows] @ x >= sign * side[rows])
            model.setObjective(-program.cost() @ x, gp.GRB.MAXIMIZE)
            if hint is not None:
                x.Start = hint
            model.optimize()
            if model.Status == gp.GRB.INFEASIBLE:
                return EngineOutcome("infeasible", None, -np.inf, int(model.NodeCount))
            values = np.array(x.X) if model.SolCount else None
            status: Status = "optimal" if model.Status == gp.GRB.OPTIMAL else "stopped"
            bound = float(model.ObjBound) * program.unit
            return EngineOutcome(status, values, bound, int(model.NodeCount))


ENGINES = {
    "highs": HIGHS,
    "scipy": MipEngine(scipy, takes_start=False),
    "cpsat": MipEngine(cpsat),
    "gurobi": MipEngine(gurobi),
}
