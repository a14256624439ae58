"""`atoll plan`: the cheapest fleet that keeps every promise."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from atoll.cli.options import (
    VerbSettings,
    argument,
    json_field,
    no_cache_field,
    overlay_field,
    verb,
)
from atoll.cli.progress import show_progress
from atoll.cli.risk import parse_risk, parse_robust
from atoll.core.errors import InfeasibleError, NoCommandError, UnknownNameError, UsageError
from atoll.core.files import atomic_write, check_target
from atoll.core.options import option
from atoll.core.quantities import Duration, Share
from atoll.core.units import format_duration
from atoll.report.terminal import console, emit, note, to_json

if TYPE_CHECKING:
    from atoll.api.fleet import Fleet
    from atoll.api.fleet_plan import FleetPlan
    from atoll.catalog.catalog import Catalog
    from atoll.cli.plan_commands import InstanceCommands
    from atoll.plan.footprint import Drawn, ObjectiveWeights
    from atoll.plan.plan import Goal, KeptPromise, Plan
    from atoll.solve.comparison import Compared
    from atoll.solve.effort import Effort

_LONG_S = 1.0
"""Seconds of compiling that are worth a note."""
app = typer.Typer(add_completion=False)


class PlanSettings(VerbSettings):
    """Options of `atoll plan`."""

    fleet: Path = argument(
        "A fleet file (see `atoll init`) or problem.json; with --commands also a plan.json."
    )
    out: Path | None = option(None, "Write the plan here, as JSON.", "-o", "--out")
    solver: str | None = option(
        None,
        "optimal (the default), fast, homogeneous, cauchy, gh, agh, ...; on a fixed cluster flow.search, "
        "flow.milp, swarm, petals, ...; with classes of requests exact, monolith, E/P/D, cells, ...",
    )
    compare: bool = option(False, "Also say what each baseline would cost.")
    effort: str = option(
        "normal", "How much work to spend: low, normal, high, or a number of times the usual."
    )
    deadline: Duration = option(
        "300s",
        "Take the best plan so far after this long, all in all; the usual effort needs less. With "
        "--best-effort on a fixed cluster, more than 300s is used for as many times the work.",
        "--deadline",
        "--time",
    )
    gap: Share = option("0.1%", "Stop when the plan is proven this close to the cheapest.")
    objective: str | None = option(
        None,
        "Of rented nodes: cost (the default), energy or carbon; on a fixed cluster: sustained (the default), "
        "max-flow or latency.",
    )
    engines: str | None = option(
        None,
        "Engines that may run instances, the preferred first, as vllm,atoll; free: any layout, also one that "
        "no engine runs. The fleet file's if left out.",
    )
    energy_price: str | None = option(None, "Count energy beside rent, as $0.2/kWh.")
    carbon_price: str | None = option(None, "Count CO2 beside rent, as $100/t; needs `grid`.")
    partial: bool = option(False, "On a fixed cluster, let nodes run only some of their layers.")
    best_effort: bool = option(
        False, "On a fixed cluster, let pipelines be slower than ttft and tpot."
    )
    rank: bool = option(
        True,
        "On a fixed cluster, simulate the best few plans and take the one that generates most.",
        "--rank-by-simulation/--no-rank-by-simulation",
    )
    router: Literal["atoll", "plain"] | None = option(
        None,
        "On a fixed cluster, what chooses pipelines in the runtime: atoll (looks ahead) or plain (round "
        "robin over the plan's flows); the worse of the two if neither this nor the fleet file says.",
    )
    attainment: Share | None = option(
        None, "Share of requests that must keep both promises, instead of the fleet file's."
    )
    capacity_only: bool = option(
        False, "Plan for half of all requests to keep their promises, without simulating."
    )
    error_bars: bool = option(
        True,
        "Say how likely promises are kept, over what the performance model may be off by.",
        "--error-bars/--no-error-bars",
    )
    robust: bool = option(
        False,
        "Keep all promises where demand, spot prices, spot machines and the performance model turn out "
        "otherwise, and show what certainty costs.",
    )
    certainty: str | None = option(
        None,
        "As --robust, in this share of scenarios; 95% unless --unserved-usd says what is best.",
    )
    risk: tuple[str, ...] = option(
        (),
        "With --robust: how far things may be off, instead of the fleet file's `risk`: demand=30%, "
        "demand.SERVICE=50%, demand_correlation=0.5, spot_price=20%, spot_loss=10%, performance=off; may be "
        "repeated.",
        metavar="NAME=VALUE",
    )
    unserved_usd: float | None = option(
        None,
        "With --robust: what 1,000 requests that do not keep their promises cost, in USD. The level with the "
        "least expected total is marked, and taken unless --certainty says otherwise.",
    )
    report: Path | None = option(
        None, "Write a report as one .html file; of a cluster or executors also .svg."
    )
    running: Path | None = option(None, "The plan that runs now; what can stay is kept.")
    known: tuple[Path, ...] = option(
        (),
        "On a fixed cluster, a placement to begin from, so that none worse is taken: a plan.json, or a "
        "placement of Helix's (.ini); may be repeated.",
    )
    strict: bool = option(False, "Fail where not all demand can be met.")
    no_cache: bool = no_cache_field()
    overlay: tuple[Path, ...] = overlay_field()
    commands: bool = option(
        False, "Also print a line for each instance that a person can paste there."
    )
    executors: str | None = option(
        None,
        "With --commands: an engine whose server is all executors of an any-to-any service: vllm-omni.",
    )
    parts: Path | None = option(
        None, "With --commands: a file with components for the parts of any-to-any services."
    )
    stand_in: bool = option(
        False, "With --commands: small components stand for parts that no file names."
    )
    stats: bool = option(False, "Say on stderr what it took: time and counted work.")
    stats_out: Path | None = option(None, "Write what it took here, as JSON.")
    as_json: bool = json_field()


@verb(app, PlanSettings)
def plan(options: PlanSettings) -> None:
    """Find the cheapest nodes and layouts that keep every promise, and prove how good they are.

    Promises are kept by a share of each service's requests (95 % unless the fleet file says otherwise), in
    simulation, with arrivals at random. On a fixed cluster: find the placement through which the most tokens
    flow within the promises, network and all. The same fleet gets the same plan, bit for bit, unless the
    deadline comes first: then it is the best plan so far, and says so. Ends with code 5 if there is no plan
    (or, with --strict, none that meets all demand), or if the plan, which is written, keeps too few promises.
    """
    if options.commands and _show_plan_commands(options):
        return
    unrun: NoCommandError | None = None
    sure = _check_options(options)
    weights = read_weights(
        options.objective, {"energy": options.energy_price, "carbon": options.carbon_price}
    )
    _check_targets(options)
    from atoll.api.fleet import Fleet
    from atoll.plan.files.read import read_placement
    from atoll.plan.proof import proof_of
    from atoll.solve.effort import Effort, parse_work
    from atoll.solve.registry import require, require_packages

    work = parse_work(options.effort)
    require_packages()
    fleet = Fleet.load(options.fleet, overlays=options.overlay, running=options.running)
    if options.report is not None:
        from atoll.report.plan.show import list_endings

        check_target(options.report, list_endings(fleet.problem))
    goal = _goal(options.objective)
    if options.objective is not None and goal is None and fleet.problem.cluster is not None:
        raise UsageError(
            f"--objective {options.objective} is for rented nodes, and this is a fixed cluster",
            hint="use sustained or max-flow",
        )
    chosen = Effort(
        gap=options.gap,
        cached=not options.no_cache,
        objective=goal,
        partial=options.partial,
        promise=not options.best_effort,
        placements=tuple(read_placement(path, fleet.problem) for path in options.known),
        work=work,
    )
    began_s = time.monotonic()
    with show_progress("planning", options.deadline) as tell:
        fleet_plan = fleet.plan(
            solver=options.solver,
            effort=chosen,
            deadline_s=options.deadline,
            on_progress=tell,
            rank=options.rank,
            attainment=options.attainment,
            capacity_only=options.capacity_only,
            error_bars=options.error_bars,
            weights=weights,
            robust=sure,
            risk=parse_risk(options.risk, fleet.problem),
            unserved_usd=options.unserved_usd,
            router=options.router,
            engines=None
            if options.engines is None
            else options.engines.replace(" ", "").split(","),
        )
    compared: tuple[Compared, ...] = ()
    if options.compare:
        left_s = options.deadline - (time.monotonic() - began_s)
        compared = _compare(fleet, fleet_plan, chosen, left_s)
    unmet = require(fleet_plan, fleet.problem, strict=options.strict)
    # A plan that keeps too few promises is written all the same: it has the capacity.
    written = (options.out, options.report)
    targets = [path for path in written if path is not None and unmet is None]
    for path in targets:
        _write(path, fleet_plan, compared, as_report=path is options.report)
    if options.as_json or fleet_plan.status != "infeasible":
        unrun = _show(fleet_plan, fleet, compared, options)
    for path in targets:
        note(f"wrote {path}")
    _tell_stats(fleet_plan, options.stats, options.stats_out)
    refused = unmet or _broken(fleet_plan) or unrun
    if refused is not None:
        raise refused
    known = proof_of(fleet_plan)
    if known.may_improve:
        note(f"note: {known.late} Give it a longer --deadline.")


def _check_options(options: PlanSettings) -> float | Literal["curve"] | None:
    """Return how robust the plan must be; UsageError for options that exclude each other."""
    if options.attainment is not None and options.capacity_only:
        raise UsageError("--attainment with --capacity-only", hint="leave one of them out")
    if options.deadline <= 0:
        raise UsageError("--deadline is 0", hint="give it some time, as in 30s")
    sure = parse_robust(options.robust, options.certainty)
    if sure is None:
        for name, given in (("--risk", options.risk), ("--unserved-usd", options.unserved_usd)):
            if given:
                raise UsageError(f"{name} without --robust", hint="add --robust")
    elif options.capacity_only or options.solver is not None:
        name = "--capacity-only" if options.capacity_only else "--solver"
        raise UsageError(f"--robust with {name}", hint="leave one of them out")
    return sure


def _warn_unsimulated(plan: FleetPlan, *, as_json: bool) -> None:
    """Say that nobody knows what requests keep: on stderr beside JSON, else as the first line."""
    why = "there was no time for it" if plan.cut_short else f"{plan.solver} plans for capacity"
    text = f"promises were not simulated: {why}; requests may keep fewer than are asked for"
    if as_json:
        note(f"note: {text}")
    else:
        from rich.text import Text

        emit(None, False, Text(text, style="bold red"))


def _broken(plan: FleetPlan) -> InfeasibleError | None:
    """Return the message where too few requests keep their promises; the plan is written all the same."""
    short = [promise for promise in plan.promises if not promise.is_kept]
    if not short:
        return None
    from atoll.plan import proof

    worst = min(short, key=lambda promise: promise.margin)
    kept, target, of = worst.kept, worst.target, ""
    if worst.short_groups:
        group = worst.short_groups[0]
        kept, target, of = group.kept or 0.0, group.target, f" of {group.name}"
    # A search that was cut short shows no promise to be too hard.
    late = plan.cut_short
    return InfeasibleError(
        f"{worst.service} keeps its promises for {kept:.1%} of requests{of}, {target:.0%} asked for: "
        f"{proof.LATE if late else worst.cause}",
        hint="give it a longer --deadline" if late else _help(worst),
    )


def _help(promise: KeptPromise) -> str:
    first, later = promise.kept_ttft, promise.kept_tpot
    if promise.short_groups:
        each = promise.short_groups[0].each
        first, later = each.get("ttft", 1.0), min(each.get("tpot", 1.0), each.get("ahead", 1.0))
    if first < later:
        return "loosen ttft, lower `attainment`, or offer faster GPUs or interfaces"
    return "loosen tpot, lower `attainment`, or make more nodes available"


def _compare(fleet: Fleet, plan: FleetPlan, effort: Effort, seconds: float) -> tuple[Compared, ...]:
    """Compare with baselines in the time left, and say where there is none."""
    compared: tuple[Compared, ...] = ()
    if seconds > 0:
        with show_progress("baselines", seconds) as tell:
            compared = fleet.compare(plan, effort=effort, deadline_s=seconds, on_progress=tell)
    missing = [
        name
        for name in fleet.baselines
        if name != plan.solver and name not in {row.solver for row in compared}
    ]
    if missing:
        note(f"note: no time was left to compare with {', '.join(missing)}")
    return compared


def _tell_stats(plan: FleetPlan, shown: bool, path: Path | None) -> None:
    """Say what a plan took; never on stdout, where equal fleets give equal text."""
    if plan.stats.compile_seconds >= _LONG_S:
        took = format_duration(plan.stats.compile_seconds)
        note(f"note: compiling took {took}, once on this machine, before the deadline began")
    if shown:
        note(f"took {plan.stats.text}")
    if path is not None:
        atomic_write(path, to_json(plan.stats) + "\n")


def _check_targets(options: PlanSettings) -> None:
    """Raise UsageError where a file to be written cannot be, or is read or written already."""
    taken = [options.fleet, *options.overlay]
    report = (options.report, (".html", ".svg"))
    for path, endings in ((options.out, ()), report, (options.stats_out, (".json",))):
        if path is None:
            continue
        check_target(path, endings)
        if any(path.resolve() == other.resolve() for other in taken):
            raise UsageError(
                f"{path} is read or written for this plan already",
                hint="name another file to write",
            )
        taken.append(path)


def _goal(objective: str | None) -> Goal | None:
    from atoll.solve.place.place_service import OBJECTIVES

    check_objective(objective, OBJECTIVES)
    return next((goal for goal in OBJECTIVES if goal == objective), None)


def _write(path: Path, plan: FleetPlan, compared: tuple[Compared, ...], *, as_report: bool) -> None:
    if not as_report:
        plan.save(path)
        return
    from atoll.report.plan.show import render_plan_page, render_plan_svg

    if path.suffix.lower() == ".svg":
        atomic_write(path, render_plan_svg(plan, plan.problem))
    else:
        atomic_write(path, render_plan_page(plan, plan.problem, compared))


def _write_commands(
    plan: Plan, catalog: Catalog, options: PlanSettings
) -> tuple[InstanceCommands, ...]:
    """Return the commands of a plan's instances, with the components that are asked for."""
    from atoll.cli.plan_commands import write_commands
    from atoll.runtime.task_fleet.parts_file import read_parts_file

    given = {} if options.parts is None else read_parts_file(options.parts)
    return write_commands(
        plan, catalog, given, stand_in=options.stand_in, executors=options.executors
    )


def _show_plan_commands(options: PlanSettings) -> bool:
    """Print the commands of a plan.json; False where the file is none."""
    from atoll.catalog.catalog import Catalog
    from atoll.cli.plan_commands import refuse_missing, show_commands
    from atoll.plan.files.read import is_plan, read_plan

    if not is_plan(options.fleet):
        return False
    found = _write_commands(read_plan(options.fleet), Catalog.default(), options)
    if options.as_json:
        emit(found, True)
    else:
        _print_lines(show_commands(found))
    unrun = refuse_missing(found)
    if unrun is not None:
        raise unrun
    return True


def _print_lines(lines: list[str]) -> None:
    """Print lines as they are, however wide the terminal: they are to be pasted."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def _show(
    plan: FleetPlan, fleet: Fleet, compared: tuple[Compared, ...], options: PlanSettings
) -> NoCommandError | None:
    """Print the plan; return an error if commands are asked for and an instance has none."""
    from atoll.cli.plan_commands import refuse_missing, show_commands
    from atoll.plan.cost import cost_report
    from atoll.plan.proof import proof_of
    from atoll.report.plan.show import draw_plan

    if not options.capacity_only and plan.instances and not plan.promises:
        # Before all else: such a plan may keep far fewer promises than it was asked for.
        _warn_unsimulated(plan, as_json=options.as_json)
    written = _write_commands(plan, fleet.catalog, options) if options.commands else ()
    if not options.as_json:
        emit(None, False, lambda: draw_plan(plan, plan.problem, compared, width=console().width))
        _print_lines(show_commands(written))
        return refuse_missing(written)
    from atoll.solve.effort import Effort
    from atoll.solve.plan_request import PlanRequest
    from atoll.solve.registry import count_templates

    data: dict[str, object] = {
        "plan": plan.model_dump(mode="json"),
        "proof": proof_of(plan).in_words,
        "cost": cost_report(plan, fleet.problem),
        "compare": compared,
        "templates": count_templates(
            fleet.problem,
            PlanRequest(catalog=fleet.catalog, effort=Effort(cached=not options.no_cache)),
        ),
    }
    if options.commands:
        data["commands"] = written
    if fleet.problem.graph_services:
        data |= {
            "executors": plan.executors,
            "classes": plan.classes,
            "handovers": plan.handovers,
        }
    emit(data, True)
    return refuse_missing(written)


def read_weights(
    objective: str | None, prices: Mapping[Drawn, str | None]
) -> ObjectiveWeights | None:
    """Return what counts, None where the fleet file says.

    Prices are for what is paid beside rent: they go with the objective cost, or none.
    """
    from atoll.plan.footprint import DRAWN, RENT_OBJECTIVES, ObjectiveWeights

    given = {name: price for name, price in prices.items() if price}
    priced = [f"--{name}-price" for name in given]
    weights = RENT_OBJECTIVES.get(objective or "")
    if objective is not None and weights is None:
        if priced:
            raise UsageError(f"{priced[0]} with --objective {objective}", hint="leave one out")
        return None
    if weights is not None and not weights.rent_only:
        if priced:
            raise UsageError(
                f"{priced[0]} with --objective {objective}",
                hint=f"leave one out: with {objective} nothing else counts",
            )
        return weights
    if objective is None and not priced:
        return None
    return ObjectiveWeights.model_validate(
        {
            DRAWN[name].weight: DRAWN[name].parse_price(price, field=f"--{name}-price")
            for name, price in given.items()
        }
    )


def check_objective(objective: str | None, placing: tuple[str, ...]) -> None:
    """Raise UnknownNameError for an objective that no kind of fleet has."""
    from atoll.plan.footprint import RENT_OBJECTIVES

    known = (*RENT_OBJECTIVES, *placing)
    if objective is not None and objective not in known:
        raise UnknownNameError("objective", objective, known)
