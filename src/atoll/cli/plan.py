"""`atoll plan`: the cheapest fleet that keeps every promise."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.progress import show_progress
from atoll.core.errors import UnknownNameError, UsageError
from atoll.core.files import atomic_write, check_target
from atoll.core.units import parse_duration, parse_share
from atoll.report.terminal import console, emit

if TYPE_CHECKING:
    from atoll.api.fleet import Fleet
    from atoll.api.plan import FleetPlan
    from atoll.plan.plan import Goal
    from atoll.solve.comparison import Compared

app = typer.Typer(add_completion=False)


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
            _refuse_overwriting(path, [fleet, *(overlay or ())])
    from atoll.api.fleet import Fleet
    from atoll.solve.effort import Effort
    from atoll.solve.registry import LATE, require, require_packages

    require_packages()
    opened_fleet = Fleet.load(fleet, overlays=overlay or (), running=running)
    if report is not None:
        from atoll.report.plan.show import list_endings

        check_target(report, list_endings(opened_fleet.problem))
    effort = Effort(share, not no_cache, _goal(objective), partial, promise)
    with show_progress("planning") as tell:
        if verify:
            fleet_plan = opened_fleet.verify(
                attainment=kept,
                solver=solver,
                effort=effort,
                deadline_s=seconds,
                on_progress=tell,
            )
        else:
            fleet_plan = opened_fleet.plan(
                solver=solver, effort=effort, deadline_s=seconds, on_progress=tell, rank=rank
            )
    compared: tuple[Compared, ...] = ()
    if compare:
        with show_progress("baselines") as tell:
            compared = opened_fleet.compare(
                fleet_plan, effort=effort, deadline_s=seconds, on_progress=tell
            )
    late = fleet_plan.seconds >= seconds and fleet_plan.status in ("partial", "infeasible")
    refused = require(fleet_plan, opened_fleet.problem, strict=strict, late=late)
    targets = [path for path in (out, report) if path is not None and refused is None]
    for path in targets:
        _write(path, fleet_plan, compared, as_report=path is report)
    if as_json or fleet_plan.status != "infeasible":
        _show(fleet_plan, opened_fleet, compared, as_json=as_json, cached=not no_cache)
    for path in targets:
        console(stderr=True).print(f"wrote {path}", markup=False)
    if refused is not None:
        raise refused
    if late:
        console(stderr=True).print(f"note: the deadline came first; {LATE}", markup=False)


def _refuse_overwriting(path: Path, given: list[Path]) -> None:
    """Raise UsageError if a file to be written is one that a person wrote for this plan."""
    if any(path.resolve() == other.resolve() for other in given):
        raise UsageError(f"{path} is read for this plan", hint="name another file to write")


def _goal(objective: str | None) -> Goal | None:
    from atoll.solve.place.service import OBJECTIVES

    for goal in OBJECTIVES:
        if goal == objective:
            return goal
    if objective is not None:
        raise UnknownNameError("objective", objective, OBJECTIVES)
    return None


def _write(path: Path, plan: FleetPlan, compared: tuple[Compared, ...], *, as_report: bool) -> None:
    if not as_report:
        plan.save(path)
        return
    from atoll.report.plan.show import render_plan_page, render_plan_svg

    if path.suffix.lower() == ".svg":
        atomic_write(path, render_plan_svg(plan, plan.problem))
    else:
        atomic_write(path, render_plan_page(plan, plan.problem, compared))


def _show(
    plan: FleetPlan, fleet: Fleet, compared: tuple[Compared, ...], *, as_json: bool, cached: bool
) -> None:
    from atoll.plan.cost import cost_report
    from atoll.report.plan.show import draw_plan

    if not as_json:
        emit(None, False, lambda: draw_plan(plan, plan.problem, compared, width=console().width))
        return
    from atoll.solve.registry import count_templates

    data = {
        "plan": plan.model_dump(mode="json"),
        "cost": cost_report(plan, fleet.problem),
        "compare": compared,
        "templates": count_templates(fleet.problem, catalog=fleet.catalog, cached=cached),
    }
    emit(data, True)
