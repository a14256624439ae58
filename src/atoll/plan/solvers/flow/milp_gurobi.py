"""Integer programmes of flow placement through Gurobi, where it is installed and licensed."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from atoll.core.errors import MissingDependencyError
from atoll.plan.solvers.flow.instance import Floats
from atoll.plan.solvers.flow.milp_model import Programme
from atoll.plan.solvers.flow.milp_solvers import Outcome, Status


def gurobi(programme: Programme, seconds: float, hint: Floats | None) -> Outcome:
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
                return Outcome("infeasible", None, -np.inf, int(model.NodeCount))
            values = np.array(x.X) if model.SolCount else None
            status: Status = "optimal" if model.Status == gp.GRB.OPTIMAL else "stopped"
            bound = float(model.ObjBound) * programme.unit
            return Outcome(status, values, bound, int(model.NodeCount))
