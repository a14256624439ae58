"""`atoll plan` for a fixed cluster: the placement through which the most tokens flow."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.cli.planning import live_line
from atoll.core.errors import InfeasibleError, MissingDependencyError, UnknownNameError, UsageError
from atoll.core.units import format_share
from atoll.prove.rank import Simulated
from atoll.report.terminal import console, emit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from atoll.catalog.catalog import Catalog
    from atoll.plan.plan import Plan
    from atoll.plan.problem import Problem
    from atoll.solve.comparison import ComparedFlow


@dataclass(frozen=True)
class Wanted:
    """What the command line asks for."""

    solver: str
    seconds: float
    objective: str | None
    partial: bool
    promise: bool
    compare: bool
    strict: bool
    rank: bool
    out: Path | None
    report: Path | None
    as_json: bool


def plan_cluster(
    problem: Problem, catalog: Catalog, wanted: Wanted, *, verify: bool = False
) -> None:
    """Plan, print and write; fails with code 5 where nothing flows."""
    if verify:
        raise UsageError("--verify is for rented fleets", hint="run `atoll simulate` on the plan")
    if find_spec("scipy") is None:
        raise MissingDependencyError("scipy", "plan", needed_for="planning fixed clusters")
    made = _solve(wanted.solver, problem, catalog, wanted)
    compared = _compare(made, problem, catalog, wanted) if wanted.compare else []
    strict = wanted.strict or problem.settings.on_shortage == "fail"
    useful = made.status != "infeasible" and not (strict and made.status == "partial")
    if useful:
        _write(made, problem, catalog, compared, wanted)
    if wanted.as_json or made.status != "infeasible":
        from atoll.report.plan.show import draw_plan

        data = {"plan": made.model_dump(mode="json"), "compare": compared}
        emit(data, wanted.as_json, lambda: draw_plan(made, problem, compared, catalog=catalog))
    if useful:
        for path in (wanted.out, wanted.report):
            if path is not None:
                console(stderr=True).print(f"wrote {path}", markup=False)
    _finish(made, strict)


def _solve(solver: str, problem: Problem, catalog: Catalog, wanted: Wanted) -> Plan:
    """Plan, with what is found and proven so far on stderr. The plan has passed the validator."""
    from atoll.solve.place.solver import OBJECTIVES
    from atoll.solve.registry import Effort, solve

    if wanted.objective is not None and wanted.objective not in OBJECTIVES:
        raise UnknownNameError("objective", wanted.objective, OBJECTIVES)
    with live_line("placing") as say:

        def log(seconds: float, value: float, bound: float) -> None:
            best = f"best {value:,.1f} tokens/s" if value > 0 else "no placement yet"
            if math.isfinite(bound) and bound > 0:
                best += f", gap {format_share(max(0.0, 1 - value / bound))}, proven {bound:,.1f}"
            say(f"placing {seconds:.1f}s: {best}")

        effort = Effort(
            wanted.seconds,
            log=log,
            objective=wanted.objective,
            partial=wanted.partial,
            promise=wanted.promise,
            rank=Simulated(problem, catalog, say) if wanted.rank else None,
        )
        return solve(solver, problem, catalog, None, effort)


def _compare(made: Plan, problem: Problem, catalog: Catalog, wanted: Wanted) -> list[ComparedFlow]:
    from atoll.solve.comparison import compare_flow
    from atoll.solve.place.solver import RULES

    found = []
    for name in RULES:
        if name == made.solver:
            continue
        found.append(compare_flow(_solve(name, problem, catalog, wanted)))
    return found


def _write(
    made: Plan,
    problem: Problem,
    catalog: Catalog,
    compared: Sequence[ComparedFlow],
    wanted: Wanted,
) -> None:
    from atoll.core.files import atomic_write

    if wanted.out is not None:
        atomic_write(wanted.out, made.to_json(indent=2) + "\n")
    if wanted.report is None:
        return
    from atoll.report.plan.show import render_plan_page, render_plan_svg

    if wanted.report.suffix.lower() == ".svg":
        text = render_plan_svg(made, problem, catalog=catalog)
    else:
        text = render_plan_page(made, problem, compared, catalog=catalog)
    atomic_write(wanted.report, text)


def _finish(made: Plan, strict: bool) -> None:
    why = "; ".join(made.reasons[:3])
    if made.status == "infeasible":
        raise InfeasibleError(
            f"{made.problem_name} has no placement: {why}",
            hint="add machines or links, or choose a smaller model or precision",
        )
    if made.status == "partial" and strict:
        least = min(made.served_fraction.values())
        raise InfeasibleError(
            f"only {format_share(least)} of the demand can be met: {why}",
            hint="accept that (no --strict, no 'on_shortage: fail'), or add machines",
        )
