"""A process that chooses entries with CP-SAT: a JSON question a line on stdin, a JSON answer on stdout.

ortools and highspy each bring their own HiGHS and cannot share a process, so nothing else imports ortools.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

_LONGEST = 256 * 2**20
"""Characters of a question at most."""


def choose(question: dict[str, Any]) -> list[int] | None:
    """Return one entry per service with the least cost within the stock, None if there is none."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    picks = [
        [model.new_bool_var("") for _ in costs]  # which row of a service's table holds
        for costs in question["costs"]
    ]
    for pick in picks:
        model.add_exactly_one(pick)
    for n, held in enumerate(question["stock"]):
        used = [
            (variable, use[n])
            for pick, uses in zip(picks, question["uses"], strict=True)
            for variable, use in zip(pick, uses, strict=True)
            if use[n]
        ]
        if used:
            variables, counts = zip(*used, strict=True)
            model.add(cp_model.LinearExpr.weighted_sum(variables, counts) <= held)
    model.minimize(
        cp_model.LinearExpr.weighted_sum(
            [variable for pick in picks for variable in pick],
            [cost for costs in question["costs"] for cost in costs],
        )
    )
    solver = cp_model.CpSolver()
    # One thread, a fixed seed and counted time: the same question has the same answer on any machine.
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = question["seed"]
    solver.parameters.max_deterministic_time = question["deterministic_time"]
    # Rows of a table imply nothing that probing or symmetries could find: without them it takes half as long.
    solver.parameters.cp_model_probing_level = 0
    solver.parameters.symmetry_level = 0
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    return [next(k for k, v in enumerate(pick) if solver.boolean_value(v)) for pick in picks]


def main() -> int:
    """Answer questions until there are no more, or nobody is left to hear."""
    while line := sys.stdin.readline(_LONGEST):
        try:
            # Written to the descriptor itself: nothing stays in a buffer while the other side waits for the
            # line.
            os.write(1, (json.dumps({"chosen": choose(json.loads(line))}) + "\n").encode())
        except BrokenPipeError:
            break
    return 0


if __name__ == "__main__":
    sys.exit(main())
