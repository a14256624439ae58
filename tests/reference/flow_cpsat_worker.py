"""A process that solves one integer program with CP-SAT: JSON on stdin, JSON on stdout."""

from __future__ import annotations

import json
import sys
from typing import Any


def solve(request: dict[str, Any]) -> dict[str, Any]:
    """Maximise the sum of `goal`; return the values (None: none found), the bound and the status."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    columns = [
        model.new_int_var(low, high, "")
        for low, high in zip(request["low"], request["high"], strict=True)
    ]
    for index, value, low, high in request["rows"]:
        total = cp_model.LinearExpr.weighted_sum([columns[i] for i in index], value)
        if low is not None and high is not None:
            model.add_linear_constraint(total, low, high)
        elif low is not None:
            model.add(total >= low)
        elif high is not None:
            model.add(total <= high)
    model.maximize(cp_model.LinearExpr.sum([columns[i] for i in request["goal"]]))
    for column, value in zip(columns, request["hint"] or (), strict=False):
        model.add_hint(column, value)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = request["seconds"]
    solver.parameters.num_workers = request["workers"]
    status = solver.solve(model)
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return {
        "status": solver.status_name(status),
        "values": [solver.value(column) for column in columns] if found else None,
        "bound": solver.best_objective_bound,
        "branches": solver.num_branches,
    }


def main() -> int:
    """Read one program, write one answer; exit code 6 if ortools is not installed."""
    request = json.loads(sys.stdin.read(256 * 2**20))
    try:
        answer = solve(request)
    except ImportError:
        return 6
    sys.stdout.write(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
