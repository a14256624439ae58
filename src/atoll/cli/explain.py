"""`atoll explain`: what binds a plan, what would help, and why a node type is used or not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.planning import bar, need_solvers, read_plan, read_problem, template_libraries
from atoll.core.errors import UsageError
from atoll.core.units import format_price, format_share, format_throughput, parse_duration
from atoll.report.terminal import emit, table

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from atoll.catalog.catalog import Catalog
    from atoll.plan.plan import Plan
    from atoll.plan.problem import Problem
    from atoll.solve.explain.explanation import Explanation
    from atoll.solve.templates.library import Libraries

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
            help="Look for changes that let all demand be met; done where it is not, unless told.",
        ),
    ] = None,
    deadline: Annotated[
        str, typer.Option("--deadline", help="Stop planning again after this long, in all.")
    ] = "60s",
    running: Annotated[
        Path | None, typer.Option("--running", help="The plan that ran before, as in `atoll plan`.")
    ] = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Compute all templates anew and keep none.")
    ] = False,
    overlay: Annotated[
        list[Path] | None,
        typer.Option("--overlay", help="A YAML file that adds or changes facts; may be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, in base units.")] = False,
) -> None:
    """Say what binds a plan, what loosening it is worth, and what would let all demand be met.

    Every figure comes from planning again with one thing changed.
    """
    seconds = parse_duration(deadline, field="deadline")
    need_solvers()
    problem = read_problem(fleet, overlays=overlay, running=running)
    if problem.cluster is not None:
        raise UsageError(
            f"{problem.name} is a fixed cluster", hint="its plan says what binds: run `atoll plan`"
        )
    catalog = problem.catalog()
    given = None if plan is None else read_plan(plan)
    kinds = None if node is None else _kinds(node, problem, catalog)
    notes = [] if given is None else _still_holds(given, problem, catalog)
    libraries = template_libraries(problem, catalog, cached=not no_cache)
    found = _explain_plan(
        given, problem, catalog, libraries, seconds, kinds, repairs, cached=not no_cache
    )
    if repairs and found.repairs is None:
        notes.append("all demand can be met: there is nothing to repair")
    data = {**found.model_dump(mode="json"), "notes": notes}
    emit(data, as_json, lambda: _draw(found, notes, only_nodes=kinds is not None))


def _kinds(names: list[str], problem: Problem, catalog: Catalog) -> tuple[str, ...]:
    """Canonical node types, each on offer; a GPU type stands for all its sizes on offer."""
    from atoll.core.errors import UnknownNameError
    from atoll.core.ids import parse_node_type

    found: list[str] = []
    for name in names:
        if ":" in name:
            kind = catalog.node(name).id
            if kind not in problem.node_types:
                raise UnknownNameError("node type on offer", kind, problem.node_types)
            found.append(kind)
            continue
        gpu = catalog.gpu(name).name
        sizes = [kind for kind in problem.node_types if parse_node_type(kind).gpu == gpu]
        if not sizes:
            raise UnknownNameError("GPU type on offer", gpu, problem.node_types)
        found += sizes
    return tuple(dict.fromkeys(found))


def _still_holds(plan: Plan, problem: Problem, catalog: Catalog) -> list[str]:
    """Refuse a plan that does not hold for this problem; note one made for another."""
    from atoll.plan.validate.check import validate

    if plan.problem_hash == problem.content_hash():
        return []
    found = validate(plan, problem, catalog, same_problem=False)
    if found:
        raise UsageError(
            f"the plan does not hold for this fleet: {found[0]}", hint="make it again: `atoll plan`"
        )
    return ["the fleet file has changed since this plan was made; it still holds"]


def _explain_plan(
    given: Plan | None,
    problem: Problem,
    catalog: Catalog,
    libraries: Libraries,
    seconds: float,
    kinds: tuple[str, ...] | None,
    repairs: bool | None,
    *,
    cached: bool,
) -> Explanation:
    from atoll.solve.explain.explain import expected_plans
    from atoll.solve.explain.explain import explain as explain_plan
    from atoll.solve.explain.whatif import Planner
    from atoll.solve.registry import DEFAULT, Effort, solve
    from atoll.solve.templates.cache import TemplateCache

    with bar("planning again", 1) as step:
        step(0, "the plan itself")
        plan = given or solve(DEFAULT, problem, catalog, libraries, Effort(min(30.0, seconds)))
    total = expected_plans(plan, problem, kinds)
    with bar("planning again", total) as step:
        planner = Planner(
            problem,
            catalog,
            libraries,
            TemplateCache() if cached else None,
            most_seconds=seconds,
            progress=step,
        )
        return explain_plan(
            plan,
            planner,
            node_types=kinds,
            constraints=kinds is None,
            repairs=kinds is None if repairs is None else repairs,
        )


def _draw(found: Explanation, notes: list[str], *, only_nodes: bool) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text(_summary(found), style="bold")]
    parts += [Text(note) for note in notes]
    if not only_nodes:
        parts += [_constraints(found), Text(""), _slacks(found)]
    if found.repairs:
        parts.append(_list("Any one of these meets all demand", [r.text for r in found.repairs]))
    elif found.repairs is not None:
        parts.append(_list("Repairs", ["no single change was found that meets all demand"]))
    if found.node_types:
        parts += [Text(""), _nodes(found)]
    if found.left_out:
        parts.append(
            _list("Left out for lack of time (give a longer --deadline)", list(found.left_out))
        )
    return Group(*parts)


def _summary(found: Explanation) -> str:
    said = f"{found.problem_name}: {found.status}"
    if found.status == "infeasible":
        said += f"; {format_share(found.served)} of the demand could be served, for"
    said += f"{'' if found.status == 'infeasible' else ','} {format_price(found.usd_per_hour)}"
    if found.status == "partial":
        said += f", serves {format_share(found.served)} of the demand"
    best = found.best_usd_per_hour
    if found.status in ("optimal", "feasible") and best is not None and found.objective is not None:
        saved = found.objective - best
        if saved > 1e-4 * max(1.0, best):
            said += f"; another plan costs {format_price(best)}, {format_share(saved / found.objective)} less"
    return f"{said}. Planned again {found.plans} times."


def _constraints(found: Explanation) -> RenderableType:
    if not found.constraints:
        return _list("What binds", ["nothing: no offer is used up and no limit is set"])
    order = sorted(
        found.constraints,
        key=lambda c: (c.worth is None or c.worth.nothing, c.kind == "availability", c.where),
    )
    lines = [constraint.text for constraint in order]
    return _list("What binds", lines)


def _slacks(found: Explanation) -> Table:
    rows = [
        (
            slack.role,
            format_throughput(slack.demand_per_s),
            format_throughput(slack.capacity_per_s),
            format_share(slack.served),
            format_share(slack.spare) if slack.spare > 0 else None,
        )
        for slack in found.demand
    ]
    columns = ("role", "demand", "capacity", "served", "to spare")
    return table(columns, rows, title="Demand", right=columns[1:])


def _nodes(found: Explanation) -> Table:
    rows = [(use.node_type, use.text) for use in found.node_types]
    drawn = table(("node type", "why"), rows, title="Node types")
    drawn.columns[0].no_wrap = True
    return drawn


def _list(title: str, lines: list[str]) -> RenderableType:
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    body = (Padding(Text(line), (0, 0, 0, 2), expand=False) for line in lines)
    return Group(Text(f"\n{title}", style="italic"), *body)
