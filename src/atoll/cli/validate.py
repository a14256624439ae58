"""`atoll validate`: whether a plan keeps what it says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.shared_options import AsJson, Overlays
from atoll.report.terminal import emit, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from atoll.plan.plan import Plan
    from atoll.plan.validate.check import Violation

app = typer.Typer(add_completion=False)


@app.command()
def validate(
    plan: Annotated[Path, typer.Argument(help="The plan, a plan.json.")],
    fleet: Annotated[
        Path | None,
        typer.Option(
            "--fleet", help="The fleet file it answers; without it only its own structure."
        ),
    ] = None,
    overlay: Overlays = None,
    as_json: AsJson = False,
) -> None:
    """Check a plan: memory, layers, flows, capacity, availability, demand, limits, cost.

    Ends with code 7 if anything is wrong. With a fleet file that has changed since, it says whether the
    plan would still hold.
    """
    from atoll.plan.files.read import read_plan, read_problem
    from atoll.plan.validate.check import InvalidPlanError, validate_structure
    from atoll.plan.validate.check import validate as validate_plan

    checked = read_plan(plan)
    same: bool | None = None
    if fleet is None:
        violations = validate_structure(checked)
    else:
        problem = read_problem(fleet, overlays=overlay or ())
        # A plan is for what its mixes leave of choices between models.
        known = {service.name for service in problem.services}
        mixed = {name for mix in checked.mixes for name in mix.shares}
        asked = problem.settled(checked.mixes) if mixed and mixed <= known else problem
        same = checked.problem_hash == asked.content_hash()
        violations = validate_plan(checked, problem, same_problem=False)
    data = {
        "plan": plan,
        "fleet": fleet,
        "same_problem": same,
        "valid": not violations,
        "violations": violations,
    }
    emit(data, as_json, lambda: _draw(checked, violations, same))
    if violations:
        raise InvalidPlanError(checked.problem_name, violations)


def _draw(plan: Plan, violations: list[Violation], same: bool | None) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    notes: list[RenderableType] = []
    if same is None:
        notes.append(Text("structure only: give --fleet FILE to check it against its problem"))
    elif not same:
        notes.append(Text("the fleet file has changed since this plan was made"))
    if not violations:
        size = f"{len(plan.instances)} instances on {plan.nodes} nodes"
        return Group(*notes, Text(f"valid: {plan.problem_name}, {size}"))
    rows = [(v.rule, v.where, v.message, f"{v.field}: {v.fix}") for v in violations]
    return Group(*notes, table(("rule", "where", "what", "fix"), rows))
