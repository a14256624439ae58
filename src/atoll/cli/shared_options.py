"""Options that several verbs have, with their help, written down once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, in base units.")]
Overlays = Annotated[
    list[Path] | None,
    typer.Option("--overlay", help="A YAML file that adds or changes facts; may be repeated."),
]
