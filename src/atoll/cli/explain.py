"""`atoll explain`: what binds a plan, what would help, and why a node type is used or not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.progress import show_progress
from atoll.cli.shared_options import AsJson, NoCache, Overlays
from atoll.core.errors import UsageError
from atoll.core.units import parse_duration
from atoll.report.terminal import emit

if TYPE_CHECKING:
    from atoll.api.fleet import Fleet
    from atoll.api.fleet_plan import FleetPlan

app = typer.Typer(add_completion=False)


@app.command()
def explain(
    fleet: Annotated[
        Path, typer.Option("--fleet", help="The fleet file or problem.json it answers.")
    ],
    plan: Annotated[
        Path | None, typer.Argument(help="A plan.json; without it the cheapest plan is made.")
    ] = None,
    node: Annotated[
        list[str] | None,
        typer.Option("--node", help="Only why this node type is used or not; may be repeated."),
    ] = None,
    repairs: Annotated[
        bool | None,
        typer.Option(
            "--repairs/--no-repairs",
            help="Look for changes that serve more or cost less; done unless --node is given.",
        ),
    ] = None,
    deadline: Annotated[
        str, typer.Option("--deadline", help="Stop planning again after this long, in all.")
    ] = "120s",
    plans: Annotated[
        int | None,
        typer.Option(
            "--plans", min=1, help="Plan again at most this often; as fits the fleet unless told."
        ),
    ] = None,
    best_effort: Annotated[
        bool,
        typer.Option("--best-effort", help="On a fixed cluster: ask for no ttft and tpot."),
    ] = False,
    running: Annotated[
        Path | None, typer.Option("--running", help="The plan that ran before, as in `atoll plan`.")
    ] = None,
    no_cache: NoCache = False,
    overlay: Overlays = None,
    as_json: AsJson = False,
) -> None:
    """Say what binds a plan, what loosening it is worth, and what would serve more or cost less.

    Figures come from planning again with one thing changed, and compare with the plan given; estimates say
    that they are.
    """
    seconds = parse_duration(deadline, field="deadline")
    from atoll.api.fleet import Fleet
    from atoll.report.explanation_report import draw_explanation
    from atoll.solve.registry import require_packages

    require_packages()
    opened_fleet = Fleet.load(fleet, overlays=overlay or (), running=running)
    fleet_plan = None if plan is None else opened_fleet.load_plan(plan)
    kinds = None if node is None else _kinds(node, opened_fleet)
    notes = [] if fleet_plan is None else _still_holds(fleet_plan)
    with show_progress("planning again") as tell:
        explanation = opened_fleet.explain(
            fleet_plan,
            node_types=kinds,
            repairs=repairs,
            deadline_s=seconds,
            max_plans=plans,
            best_effort=best_effort,
            cached=not no_cache,
            on_progress=tell,
        )
    data = {**explanation.model_dump(mode="json"), "notes": notes}
    emit(
        data,
        as_json,
        lambda: draw_explanation(explanation, notes, only_nodes=kinds is not None),
    )


def _kinds(names: list[str], fleet: Fleet) -> tuple[str, ...]:
    """Canonical node types, each on offer; a GPU type stands for all its sizes on offer."""
    from atoll.core.errors import UnknownNameError
    from atoll.core.ids import parse_node_type

    problem, catalog = fleet.problem, fleet.catalog
    kinds: list[str] = []
    for name in names:
        if ":" in name:
            kind = catalog.node(name).id
            if kind not in problem.node_types:
                raise UnknownNameError("node type on offer", kind, problem.node_types)
            kinds.append(kind)
            continue
        gpu = catalog.gpu(name).name
        sizes = [kind for kind in problem.node_types if parse_node_type(kind).gpu == gpu]
        if not sizes:
            raise UnknownNameError("GPU type on offer", gpu, problem.node_types)
        kinds += sizes
    return tuple(dict.fromkeys(kinds))


def _still_holds(plan: FleetPlan) -> list[str]:
    """Refuse a plan that does not hold for this problem; note one made for another."""
    from atoll.plan.validate.check import validate

    if plan.problem_hash == plan.problem.content_hash():
        return []
    violations = validate(plan, plan.problem, same_problem=False)
    if violations:
        raise UsageError(
            f"the plan does not hold for this fleet: {violations[0]}",
            hint="make it again: `atoll plan`",
        )
    return ["the fleet file has changed since this plan was made; it still holds"]
