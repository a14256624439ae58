"""Other engines for the integer programmes of flow placement, to check HiGHS with: scipy, CP-SAT, Gurobi.

CP-SAT knows integers only: flows are counted in millionths of the largest possible one, and what limits them
is rounded up, so that its bound is one of the programme itself. It runs in a process of its own, because
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
from atoll.solve.place.instance import Floats
from atoll.solve.place.milp.engines import HIGHS, Engine, EngineOutcome, Status
from atoll.solve.place.milp.model import Programme

_STEPS = 1_000_000
_LARGEST_STEP = 1e-9


def scipy(programme: Programme, seconds: float, hint: Floats | None) -> EngineOutcome:
    """Solve with HiGHS through scipy, which takes no start: `hint` is not used."""
    del hint
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array
    except ImportError as error:
        raise MissingDependencyError("scipy", "reference") from error
    shape = (programme.rows, programme.columns)
    matrix = coo_array((programme.value, (programme.row, programme.column)), shape=shape).tocsr()
    solved = milp(
        programme.cost(),
        constraints=LinearConstraint(matrix, programme.row_low, programme.row_high),
        integrality=np.array(programme.whole, np.int64),
        bounds=Bounds(programme.low, programme.high),
        options={"time_limit": seconds, "mip_rel_gap": 0.0},
    )
    if solved.status == 2:
        return EngineOutcome("infeasible", None, -np.inf, 0)
    bound = math.inf if solved.mip_dual_bound is None else -float(solved.mip_dual_bound)
    status: Status = "optimal" if solved.status == 0 else "stopped"
    return EngineOutcome(status, solved.x, bound * programme.unit, int(solved.mip_node_count or 0))


def cpsat(programme: Programme, seconds: float, hint: Floats | None) -> EngineOutcome:
    """Solve with CP-SAT in a process of its own, from `hint`."""
    request = whole_numbers(programme, hint) | {"seconds": seconds, "workers": 1}
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
        scale = np.where(programme.whole, 1.0, 1.0 / _STEPS)
        values = np.array(answer["values"], np.float64) * scale
    status: Status = "optimal" if answer["status"] == "OPTIMAL" else "stopped"
    bound = float(answer["bound"]) / _STEPS * programme.unit
    return EngineOutcome(status, values, bound, int(answer["branches"]))


def whole_numbers(programme: Programme, hint: Floats | None) -> dict[str, Any]:
    """Return the programme with flows in steps of a millionth of `unit`, every limit on them loosened."""
    scale = np.where(programme.whole, 1.0, float(_STEPS))
    mixed = np.zeros(programme.rows, bool)
    row, column = np.array(programme.row), np.array(programme.column)
    flow = ~np.array(programme.whole)
    np.logical_or.at(mixed, row, flow[column])
    rows: list[tuple[list[int], list[int], int | None, int | None]] = []
    order = np.argsort(row, kind="stable")
    ends = np.cumsum(np.bincount(row, minlength=programme.rows))
    for number, own in enumerate(np.split(order, ends[:-1])):
        low, high = programme.row_low[number], programme.row_high[number]
        index = column[own]
        value = np.array(programme.value)[own]
        if mixed[number]:
            rounded = _floor if math.isfinite(high) else _ceil
            value = np.where(flow[index], value, [rounded(v * _STEPS) for v in value])
            low, high = low * _STEPS, high * _STEPS
        least = _floor(low) if math.isfinite(low) else None
        most = _ceil(high) if math.isfinite(high) else None
        rows.append((index.tolist(), [round(v) for v in value.tolist()], least, most))
    return {
        "low": [_floor(v) for v in np.array(programme.low) * scale],
        "high": [_ceil(v) for v in np.array(programme.high) * scale],
        "rows": rows,
        "goal": programme.goal,
        "hint": None if hint is None else [round(v) for v in (hint * scale).tolist()],
    }


def _floor(value: float) -> int:
    return math.floor(value + _LARGEST_STEP)


def _ceil(value: float) -> int:
    return math.ceil(value - _LARGEST_STEP)


def gurobi(programme: Programme, seconds: float, hint: Floats | None) -> EngineOutcome:
    """Solve with Gurobi from `hint`; the licence inside the package allows 2,000 columns and rows."""
    try:
        # Through importlib: its annotations know fewer index types than its methods take.
        gp: Any = importlib.import_module("gurobipy")
    except ImportError as error:
        raise MissingDependencyError("gurobipy", "reference") from error
    from scipy.sparse import coo_array

    shape = (programme.rows, programme.columns)
    matrix = coo_array((programme.value, (programme.row, programme.column)), shape=shape).tocsr()
    low, high = np.array(programme.row_low), np.array(programme.row_high)
    with gp.Env(empty=True) as environment:
        environment.setParam("OutputFlag", 0)
        environment.start()
        with gp.Model(env=environment) as model:
            model.Params.TimeLimit = seconds
            model.Params.MIPGap = 0.0
            model.Params.Threads = 1
            model.Params.IntFeasTol = 1e-9
            model.Params.FeasibilityTol = 1e-9
            kinds = np.where(programme.whole, "I", "C")
            x = model.addMVar(programme.columns, lb=programme.low, ub=programme.high, vtype=kinds)
            for side, sign in ((low, 1.0), (high, -1.0)):
                rows = np.flatnonzero(np.isfinite(side))
                model.addConstr(sign * matrix[rows] @ x >= sign * side[rows])
            model.setObjective(-programme.cost() @ x, gp.GRB.MAXIMIZE)
            if hint is not None:
                x.Start = hint
            model.optimize()
            if model.Status == gp.GRB.INFEASIBLE:
                return EngineOutcome("infeasible", None, -np.inf, int(model.NodeCount))
            values = np.array(x.X) if model.SolCount else None
            status: Status = "optimal" if model.Status == gp.GRB.OPTIMAL else "stopped"
            bound = float(model.ObjBound) * programme.unit
            return EngineOutcome(status, values, bound, int(model.NodeCount))


ENGINES = {
    "highs": HIGHS,
    "scipy": Engine(scipy, takes_start=False),
    "cpsat": Engine(cpsat),
    "gurobi": Engine(gurobi),
}
