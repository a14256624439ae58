"""`atoll init`: a fleet file to start from: commented, of this machine, or one of the examples."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from atoll.core.errors import UsageError, shorten
from atoll.report.terminal import emit, note, table, to_json

app = typer.Typer(add_completion=False)


@dataclass(frozen=True, slots=True)
class ExampleRow:
    """An example as `--list` shows it."""

    name: str
    file: str
    about: str


@app.command()
def init(
    path: Annotated[
        Path | None, typer.Argument(help="The file to write; fleet.yaml, or named as the example.")
    ] = None,
    example: Annotated[
        str | None, typer.Option("--example", help="Write this example instead; see --list.")
    ] = None,
    here: Annotated[
        bool,
        typer.Option("--here", help="Write this machine's GPUs and memory, as its driver says."),
    ] = False,
    list_: Annotated[bool, typer.Option("--list", help="Show the examples.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of fleet files instead.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """Write a commented fleet file to start from, or print the schema editors can check it with."""
    if schema:
        from atoll.plan.files.fleet_file import fleet_schema

        sys.stdout.write(to_json(fleet_schema()) + "\n")
    elif list_:
        rows = _rows()
        cells = [(row.name, row.file, row.about) for row in rows]
        emit(rows, as_json, lambda: table(("example", "file", "what it shows"), cells))
    elif here:
        if example is not None:
            raise UsageError(
                "an example is not this machine", hint="give --here or --example, not both"
            )
        _write_here(path or Path("fleet.yaml"), force=force)
    elif example is not None:
        from atoll.plan.files.examples import find_example

        source = find_example(example)
        target = path or Path(source.name)
        text = source.read_text(encoding="utf-8")
        _write(target, text.replace(f"examples/{source.name}", str(target)), force=force)
    else:
        from importlib.resources import files

        target = path or Path("fleet.yaml")
        start = files("atoll.plan.files").joinpath("data", "fleet.yaml")
        text = start.read_text(encoding="utf-8")
        _write(target, text.replace("atoll plan FILE", f"atoll plan {target}"), force=force)


def _write_here(target: Path, *, force: bool) -> None:
    from atoll.api.this_machine import FILL_IN, read_machine, write_fleet
    from atoll.catalog.load import load_catalog

    _check_target(target, force=force)
    file = write_fleet(read_machine(), load_catalog())
    _write(target, file.text.replace("atoll plan FILE", f"atoll plan {target}"), force=force)
    if file.missing:
        names = ", ".join(file.missing)
        note(f"the catalog does not know {names}: write its bandwidth over {FILL_IN} in {target}")


def _rows() -> list[ExampleRow]:
    from atoll.plan.files.examples import describe_example, list_examples

    return [
        ExampleRow(name, path.name, describe_example(path))
        for name, path in list_examples().items()
    ]


def _check_target(path: Path, *, force: bool) -> None:
    # Not the methods of Path, which raise where a name is too long to be one.
    if os.path.isdir(path):
        raise UsageError(f"{path} is a folder", hint=f"write {path / 'fleet.yaml'}")
    if os.path.exists(path) and not force:
        raise UsageError(f"{path} exists already", hint="name another file, or add --force")
    if not os.path.isdir(path.parent):
        folder = shorten(str(path.parent))
        raise UsageError(f"the folder {folder} does not exist", hint="create it first")


def _write(path: Path, text: str, *, force: bool) -> None:
    from atoll.core.files import atomic_write

    _check_target(path, force=force)
    atomic_write(path, text)
    verb = "serve" if path.suffix == ".json" else "plan"
    note(f"wrote {path}; next: atoll {verb} {path}")
