"""A process that solves small problems of levels and machines with CP-SAT: JSON on stdin, JSON on stdout.

Written from the question alone. Levels are whole numbers of 1 / `GRID`; rates and demands are whole numbers
as they come, so that nothing is rounded but the levels.
"""

from __future__ import annotations

import json
import sys
from typing import Any

GRID = 100_000


def solve(case: dict[str, Any], work: float) -> float | None:  # noqa: C901 - one program
    """Return the least cost, inf where nothing is possible, None without a proof with so much work."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    cost = []
    machines: list[Any] = []
    gpus_used: list[list[Any]] = []
    slices_of: dict[tuple[int, int], list[Any]] = {}
    for offer in case["offers"]:
        b = model.new_int_var(0, offer["available"], "")
        machines.append(b)
        cost.append(offer["usd"] * b)
        taken = []
        for gpus, kind in offer["sizes"]:
            w = model.new_int_var(0, offer["available"] * offer["gpus"] // gpus, "")
            slices_of.setdefault((offer["region"], kind), []).append(w)
            taken.append(gpus * w)
            start = case["init_penalty"] * offer["usd"] * gpus / offer["gpus"]
            if start:
                cost.append(start * w)
        gpus_used.append(taken)
    levels = {}
    for choice in case["choices"]:
        for way in choice["ways"]:
            if way not in levels:
                levels[way] = model.new_int_var(0, GRID, "")
        ys = [levels[way] for way in choice["ways"]]
        model.add(sum(ys) == GRID)
        if choice["max_error"] is not None:
            # Errors and their limit are whole numbers of a millionth.
            errors = sum(e * y for e, y in zip(choice["errors"], ys, strict=True))
            model.add(errors <= choice["max_error"] * GRID)
        for ways, least in choice["floors"]:
            model.add(sum(levels[way] for way in ways) * 1_000_000 >= least * GRID)
    nodes: dict[tuple[int, int], list[Any]] = {key: [] for key in slices_of}
    for m, service in enumerate(case["services"]):
        level = levels.get(m, GRID)
        demand = service["demand"]
        served = []
        rate: dict[tuple[int, int], list[Any]] = {}
        number: dict[tuple[int, int], list[Any]] = {}
        for role in service["roles"]:
            for counts, per_s in role["templates"]:
                for g in range(case["regions"]):
                    if any((g, kind) not in slices_of for kind, _ in counts):
                        continue
                    n = model.new_int_var(0, 200, "")
                    rate.setdefault((role["phase"], g), []).append(per_s * n)
                    number.setdefault((role["phase"], g), []).append(n)
                    for kind, count in counts:
                        nodes[g, kind].append(count * n)
            for kept in case["running"]:
                if kept["service"] == m and kept["phase"] == role["phase"]:
                    n = model.new_int_var(0, kept["number"], "")
                    rate.setdefault((role["phase"], kept["region"]), []).append(kept["rate"] * n)
                    number.setdefault((role["phase"], kept["region"]), []).append(n)
                    for k, gpus in kept["gpus"]:
                        gpus_used[k].append(gpus * n)
        for g in range(case["regions"]):
            # What is served here, in 1 / GRID of the demand.
            together = model.new_int_var(0, GRID, "")
            apart = model.new_int_var(0, GRID, "")
            model.add(sum(rate.get((2, g), [])) * GRID >= demand * together)
            for phase in (0, 1):
                model.add(sum(rate.get((phase, g), [])) * GRID >= demand * apart)
            served += [together, apart]
        model.add(sum(served) >= level)
        if case["spread"] > 1:
            for phase in (0, 1, 2):
                here = [some for (p, _), some in number.items() if p == phase]
                stands = model.new_bool_var("")
                regions = [model.new_bool_var("") for _ in here]
                for region, some in zip(regions, here, strict=True):
                    model.add(sum(some) >= region)
                    model.add(sum(some) <= 10_000 * stands)
                model.add(sum(regions) >= case["spread"] * stands)
    for key, some in slices_of.items():
        model.add(sum(some) == sum(nodes[key]))
    for k, offer in enumerate(case["offers"]):
        model.add(offer["gpus"] * machines[k] >= sum(gpus_used[k]))
    if case["max_nodes"] is not None:
        model.add(sum(machines) <= case["max_nodes"])
    if case["budget"] is not None:
        paid = [round(o["usd"] * 10_000) * b for o, b in zip(case["offers"], machines, strict=True)]
        model.add(sum(paid) <= round(case["budget"] * 10_000))
    model.minimize(sum(cost))
    solver = cp_model.CpSolver()
    # Counted work: the same answer on a loaded machine.
    solver.parameters.max_deterministic_time = work
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return float("inf")
    if status != cp_model.OPTIMAL:
        return None
    return float(solver.objective_value)


def main() -> int:
    """Read cases, write their optima; exit code 6 if ortools is not installed."""
    request = json.loads(sys.stdin.read(64 * 2**20))
    try:
        found = [solve(case, float(request["work"])) for case in request["cases"]]
    except ImportError:
        return 6
    sys.stdout.write(json.dumps({"optima": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
