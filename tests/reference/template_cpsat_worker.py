"""A process that solves one `template_ilp.StageProgram` with CP-SAT: JSON on stdin, JSON on stdout."""

from __future__ import annotations

import json
import sys


def solve(rates: list[list[list[int]]], time_limit_s: float) -> tuple[int | None, float]:
    """Return the best throughput (None without a proof in time) and the solver's CPU seconds."""
    from ortools.sat.python import cp_model

    stages, nodes, layers = len(rates), len(rates[0]), len(rates[0][0]) - 1
    model = cp_model.CpModel()
    every = range(1, layers + 1)
    x = {(s, j): model.new_bool_var("") for s in range(stages) for j in every}
    y = {(s, k): model.new_bool_var("") for s in range(stages) for k in range(nodes)}
    top = max(sum(max(node) for node in stage) for stage in rates)
    rate = model.new_int_var(0, max(1, top), "rate")
    for s in range(stages):
        model.add_exactly_one(x[s, j] for j in every)
        terms = []
        for j in every:
            for k in range(nodes):
                z = model.new_bool_var("")
                model.add_implication(z, x[s, j])
                model.add_implication(z, y[s, k])
                terms.append(rates[s][k][j] * z)
        model.add(rate <= sum(terms))
    for k in range(nodes):
        model.add_exactly_one(y[s, k] for s in range(stages))
    model.add(sum(j * var for (_, j), var in x.items()) == layers)
    model.maximize(rate)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return 0, solver.wall_time
    if status != cp_model.OPTIMAL:
        return None, solver.wall_time
    return round(solver.objective_value), solver.wall_time


def main() -> int:
    """Read one problem, write one answer; exit code 6 if ortools is not installed."""
    request = json.loads(sys.stdin.read(64 * 2**20))
    try:
        rate, seconds = solve(request["rates"], float(request["time_limit_s"]))
    except ImportError:
        return 6
    sys.stdout.write(json.dumps({"rate": rate, "seconds": seconds}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
