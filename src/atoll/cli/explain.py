"""`atoll explain`: what binds a plan, what would help, and why a node type is used or not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

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
from atoll.core.errors import UsageError
from atoll.core.options import option
from atoll.core.quantities import Duration
from atoll.report.terminal import emit

if TYPE_CHECKING:
    from atoll.api.fleet import Fleet
    from atoll.api.fleet_plan import FleetPlan

app = typer.Typer(add_completion=False)


class ExplainSettings(VerbSettings):
    """Options of `atoll explain`."""

    fleet: Path = option(..., "The fleet file or problem.json it answers.")
    plan: Path | None = argument("A plan.json; without it the cheapest plan is made.", None)
    node: tuple[str, ...] = option((), "Only why this node type is used or not; may be repeated.")
    repairs: bool | None = option(
        None,
        "Look for changes that serve more or cost less; done unless --node is given.",
        "--repairs/--no-repairs",
    )
    deadline: Duration = option("120s", "Stop planning again after this long, in all.")
    plans: int | None = option(
        None, "Plan again at most this often; as fits the fleet unless told.", ge=1
    )
    best_effort: bool = option(False, "On a fixed cluster: ask for no ttft and tpot.")
    running: Path | None = option(None, "The plan that ran before, as in `atoll plan`.")
    no_cache: bool = no_cache_field()
    overlay: tuple[Path, ...] = overlay_field()
    as_json: bool = json_field()


@verb(app, ExplainSettings)
def explain(options: ExplainSettings) -> None:
    """Say what binds a plan, what loosening it is worth, and what would serve more or cost less.

    Figures come from planning again with one thing changed, and compare with the plan given; estimates say
    that they are.
    """
    from atoll.api.fleet import Fleet
    from atoll.report.explanation_report import draw_explanation
    from atoll.solve.registry import require_packages

    require_packages()
    opened_fleet = Fleet.load(options.fleet, overlays=options.overlay, running=options.running)
    fleet_plan = None if options.plan is None else opened_fleet.load_plan(options.plan)
    kinds = _kinds(options.node, opened_fleet) if options.node else None
    notes = [] if fleet_plan is None else _still_holds(fleet_plan)
    with show_progress("planning again") as tell:
        explanation = opened_fleet.explain(
            fleet_plan,
            node_types=kinds,
            repairs=options.repairs,
            deadline_s=options.deadline,
            max_plans=options.plans,
            best_effort=options.best_effort,
            cached=not options.no_cache,
            on_progress=tell,
        )
    data = {**explanation.model_dump(mode="json"), "notes": notes}
    emit(
        data,
        options.as_json,
        lambda: draw_explanation(explanation, notes, only_nodes=kinds is not None),
    )


def _kinds(names: tuple[str, ...], fleet: Fleet) -> tuple[str, ...]:
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
