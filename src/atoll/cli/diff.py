"""`atoll diff`: what changes from one plan to another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.report.terminal import emit

app = typer.Typer(add_completion=False)


@app.command()
def diff(
    before: Annotated[Path, typer.Argument(help="A plan.json.")],
    after: Annotated[Path, typer.Argument(help="Another plan.json.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what changes from one plan to another: instances, nodes, cost, capacity."""
    from rich.text import Text

    from atoll.core.files import read_text_limited
    from atoll.plan.diff import diff as compare
    from atoll.plan.plan import Plan

    old, new = (Plan.from_json(read_text_limited(path), path=path) for path in (before, after))
    change = compare(old, new)
    data = {**change.model_dump(mode="json"), "empty": change.empty}
    emit(data, as_json, lambda: Text(change.text()))
