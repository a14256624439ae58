"""`atoll diff`: what changes from one plan to another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.shared_options import AsJson
from atoll.report.terminal import emit

app = typer.Typer(add_completion=False)


@app.command()
def diff(
    before: Annotated[Path, typer.Argument(help="A plan.json.")],
    after: Annotated[Path, typer.Argument(help="Another plan.json.")],
    as_json: AsJson = False,
) -> None:
    """Show what changes from one plan to another: instances, nodes, cost, capacity."""
    from atoll.plan.files.read import read_plan
    from atoll.plan.plan_diff import diff as compare
    from atoll.report.diff_report import draw_diff

    change = compare(read_plan(before), read_plan(after))
    data = {**change.model_dump(mode="json"), "empty": change.empty}
    emit(data, as_json, lambda: draw_diff(change))
