"""`atoll init`: a commented fleet file to start from."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.render import console, to_json
from atoll.core.errors import UsageError

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
        from atoll.plan.fleet import fleet_schema

        sys.stdout.write(to_json(fleet_schema()) + "\n")
        return
    from importlib.resources import files

    from atoll.core.files import atomic_write

    if path.exists() and not force:
        raise UsageError(f"{path} exists already", hint="name another file, or add --force")
    if not path.parent.is_dir():
        raise UsageError(f"the folder {path.parent} does not exist", hint="create it first")
    if path.is_dir():
        raise UsageError(f"{path} is a folder", hint=f"write {path / 'fleet.yaml'}")
    text = files("atoll.plan").joinpath("data", "fleet.yaml").read_text(encoding="utf-8")
    atomic_write(path, text.replace("atoll plan FILE", f"atoll plan {path}"))
    console(stderr=True).print(f"wrote {path}; next: atoll plan {path}")
