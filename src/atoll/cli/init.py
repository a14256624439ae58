"""`atoll init`: a commented fleet file to start from."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from atoll.core.errors import UsageError, shorten
from atoll.report.terminal import note, to_json

app = typer.Typer(add_completion=False)


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="The file to write.")] = Path("fleet.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of fleet files instead.")
    ] = False,
) -> None:
    """Write a commented fleet file to start from, or print the schema editors can check it with."""
    if schema:
        from atoll.plan.files.fleet import fleet_schema

        sys.stdout.write(to_json(fleet_schema()) + "\n")
        return
    from importlib.resources import files

    from atoll.core.files import atomic_write

    # Not the methods of Path, which raise where a name is too long to be one.
    if os.path.isdir(path):
        raise UsageError(f"{path} is a folder", hint=f"write {path / 'fleet.yaml'}")
    if os.path.exists(path) and not force:
        raise UsageError(f"{path} exists already", hint="name another file, or add --force")
    if not os.path.isdir(path.parent):
        folder = shorten(str(path.parent))
        raise UsageError(f"the folder {folder} does not exist", hint="create it first")
    text = files("atoll.plan.files").joinpath("data", "fleet.yaml").read_text(encoding="utf-8")
    atomic_write(path, text.replace("atoll plan FILE", f"atoll plan {path}"))
    note(f"wrote {path}; next: atoll plan {path}")
