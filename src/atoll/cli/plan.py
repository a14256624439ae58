"""`atoll plan`: the cheapest fleet that keeps every promise."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.planning import (
    live_line,
    need_solvers,
    parse_share,
    read_problem,
    template_libraries,
)
from atoll.core.errors import InfeasibleError, UsageError
from atoll.core.files import check_target
from atoll.core.units import format_price, format_share, parse_duration
from atoll.report.terminal import console, emit

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.plan.plan import Plan
    from atoll.plan.problem import Problem
    from atoll.solve.comparison import Compared
    from atoll.solve.templates.library import Libraries

app = typer.Typer(add_completion=False)

_LATE = "a longer --deadline may find a plan that serves more"


@app.command()
def plan(
    fleet: Annotated[Path, typer.Argument(help="A fleet file (see `atoll init`) or problem.json.")],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Write the plan here, as JSON.")
    ] = None,
    solver: Annotated[
        str | None,
        typer.Option(
            "--solver",
            help="optimal (the default), homogeneous, cauchy, ...; on a fixed cluster flow.search, "
            "flow.milp, swarm, petals, ...",
        ),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also say what each baseline would cost.")
    ] = False,
    deadline: Annotated[
        str, typer.Option("--deadline", "--time", help="Stop searching after this long.")
    ] = "30s",
    gap: Annotated[
        str, typer.Option("--gap", help="Stop when the plan is proven this close to the cheapest.")
    ] = "0.1%",
    objective: Annotated[
        str | None,
        typer.Option(
            "--objective", help="On a fixed cluster: sustained (the default) or max-flow."
        ),
    ] = None,
    partial: Annotated[
        bool,
        typer.Option(
            "--partial", help="On a fixed cluster, let nodes run only some of their layers."
        ),
    ] = False,
    promise: Annotated[
        bool,
        typer.Option(
            "--promise", help="On a fixed cluster, no pipeline slower than ttft and tpot."
        ),
    ] = False,
    rank: Annotated[
        bool,
        typer.Option(
            "--rank-by-simulation/--no-rank-by-simulation",
            help="On a fixed cluster, simulate the best few plans and take the one that generates most.",
        ),
    ] = True,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Simulate the plan, and plan with more headroom until the promises are kept.",
        ),
    ] = False,
    attainment: Annotated[
        str,
        typer.Option("--attainment", help="Share of requests that must keep both promises."),
    ] = "95%",
    report: Annotated[
        Path | None,
        typer.Option("--report", help="Write a report as one .html file; of a cluster also .svg."),
    ] = None,
    running: Annotated[
        Path | None,
        typer.Option("--running", help="The plan that runs now; what can stay is kept."),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail where not all demand can be met.")
    ] = False,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Compute all templates anew and keep none.")
    ] = False,
    overlay: Annotated[
        list[Path] | None,
        typer.Option("--overlay", help="A YAML file that adds or changes facts; may be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, in base units.")] = False,
) -> None:
    """Find the cheapest nodes and layouts that keep every promise, and prove how good they are.

    On a fixed cluster: find the placement through which the most tokens flow, network and all. Ends with
    code 5 if there is no plan (or, with --strict, none that meets all demand).
    """
    seconds = parse_duration(deadline, field="deadline")
    share = parse_share(gap, field="gap")
    kept = parse_share(attainment, field="attainment")
    if seconds <= 0:
        raise UsageError("--deadline is 0", hint="give it some time, as in 30s")
    for path, endings in ((out, ()), (report, (".html", ".svg"))):
        if path is not None:
            check_target(path, endings)
    need_solvers()
    problem = read_problem(fleet, overlays=overlay, running=running)
    catalog = problem.catalog()
    from atoll.solve.registry import default_for, fits

    name = solver or default_for(problem)
    fits(name, problem)
    if problem.cluster is not None:
        from atoll.cli.plan_flow import Wanted, plan_cluster

        ways = (partial, promise, compare, strict, rank)
        wanted = Wanted(name, seconds, objective, *ways, out, report, as_json)
        plan_cluster(problem, catalog, wanted, verify=verify)
        return
    _for_clusters({"--objective": objective, "--partial": partial, "--promise": promise}, report)
    # Baselines serve what they can; where the fleet says that is no answer, it is none.
    strict = strict or problem.settings.on_shortage == "fail"
    libraries = template_libraries(problem, catalog, cached=not no_cache)
    made = _solve(name, problem, catalog, libraries, seconds, share)
    if verify:
        from atoll.prove import verify as proof

        with live_line("verifying") as say:
            made = proof.verify(
                made,
                problem,
                catalog,
                lambda raised: _solve(name, raised, catalog, libraries, seconds, share),
                kept,
                say=say,
            )
    baselines = _baselines(made, problem, catalog, libraries) if compare else ()
    useful = made.status != "infeasible" and not (strict and made.status == "partial")
    if useful:
        _write(made, problem, baselines, out, report)
    from atoll.plan.cost import cost_report

    data = {
        "plan": made.model_dump(mode="json"),
        "cost": cost_report(made, problem),
        "compare": baselines,
        "templates": {
            role: {"templates": len(own), "multisets": own.multisets}
            for role, own in libraries.roles.items()
        },
    }
    if as_json or made.status != "infeasible":
        from atoll.report.plan.show import draw_plan

        emit(data, as_json, lambda: draw_plan(made, problem, baselines))
    if useful:
        for path in (out, report):
            if path is not None:
                console(stderr=True).print(f"wrote {path}", markup=False)
    late = made.seconds >= seconds and made.status in ("partial", "infeasible")
    if late and useful:
        console(stderr=True).print(f"note: the deadline came first; {_LATE}", markup=False)
    _finish(made, strict, late=late)


def _for_clusters(given: dict[str, object], report: Path | None) -> None:
    """Refuse what only a plan on a fixed cluster knows."""
    for option, value in given.items():
        if value:
            raise UsageError(f"{option} is for fixed clusters", hint="leave it away")
    if report is not None:
        check_target(report, (".html",))


def _solve(
    solver: str,
    problem: Problem,
    catalog: Catalog,
    libraries: Libraries,
    deadline_s: float,
    gap: float,
) -> Plan:
    """Plan, with what is found and proven so far on stderr. The plan has passed the validator."""
    from atoll.solve.registry import Effort, solve

    with live_line("allocating") as say:

        def log(seconds: float, objective: float, bound: float) -> None:
            if math.isfinite(objective) and objective > 0:
                best = f"best {format_price(objective)}, gap {format_share(max(0, 1 - bound / objective))}"
            else:
                best = "no plan yet"
            say(f"allocating {seconds:.1f}s: {best}, proven {format_price(max(0.0, bound))}")

        return solve(solver, problem, catalog, libraries, Effort(deadline_s, gap, log))


def _baselines(
    made: Plan, problem: Problem, catalog: Catalog, libraries: Libraries
) -> tuple[Compared, ...]:
    from atoll.plan.validate.violation import InvalidPlanError
    from atoll.solve.comparison import broken, compare
    from atoll.solve.registry import BASELINES, solve

    found = []
    with live_line("baselines") as say:
        for name in BASELINES:
            if name == made.solver:
                continue
            say(f"baseline {name}")
            try:
                other = solve(name, problem, catalog, libraries)
            except InvalidPlanError as error:
                # Baselines know no limits of the whole; the validator says which they break.
                found.append(broken(name, error))
            else:
                found.append(compare(other, made, problem))
    return tuple(found)


def _write(
    made: Plan,
    problem: Problem,
    baselines: tuple[Compared, ...],
    out: Path | None,
    report: Path | None,
) -> None:
    from atoll.core.files import atomic_write

    if out is not None:
        atomic_write(out, made.to_json(indent=2) + "\n")
    if report is not None:
        from atoll.report.plan.show import render_plan_page

        atomic_write(report, render_plan_page(made, problem, baselines))


def _finish(made: Plan, strict: bool, *, late: bool) -> None:
    """Fail where there is no plan, or none that is good enough."""
    why = "; ".join(made.reasons[:3])
    if late:
        why = "the deadline came first"
    if made.status == "infeasible":
        raise InfeasibleError(
            f"no plan meets the demand of {made.problem_name}" + (f": {why}" if why else ""),
            hint=_LATE if late else "`atoll explain --fleet FLEET` finds what would help",
        )
    if made.status == "partial" and strict:
        least = min(made.served_fraction.values())
        accept = "accept that (no --strict, no 'on_shortage: fail'), or ask `atoll explain`"
        raise InfeasibleError(
            f"only {format_share(least)} of the demand can be met" + (f": {why}" if why else ""),
            hint=_LATE if late else accept,
        )
