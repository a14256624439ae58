"""`atoll tasks`: what tasks there are, what they use, what flows between them; and serving them."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli.tasks_serve import add_serve
from atoll.core.errors import InputError, UnknownNameError
from atoll.report.terminal import emit, note, table

if TYPE_CHECKING:
    from atoll.tasks.task import Task

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Show what tasks there are and what flows between their components, and serve them.",
)
add_serve(app)

LIBRARY: dict[str, str] = {
    "SpeakingAssistant": "atoll.tasks.library.assistant:SpeakingAssistant",
    "Transcription": "atoll.tasks.library.transcription:Transcription",
    "Speech": "atoll.tasks.library.speech:Speech",
    "Drawing": "atoll.tasks.library.drawing:Drawing",
    "Embedding": "atoll.tasks.library.embedding:Embedding",
}
"""The composite tasks that come with Atoll, by name."""
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_tasks(as_json: AsJson = False) -> None:
    """List the tasks that come with Atoll, and the components they use."""
    from atoll.tasks.flow import find_flow

    rows: list[dict[str, Any]] = []
    for name, where in LIBRARY.items():
        flow = find_flow(_load(where, {}))
        rows.append(
            {
                "name": name,
                "task": where,
                "request": flow.request,
                "reply": flow.reply,
                "components": sorted({step.component for step in flow.steps}),
            }
        )
    emit(
        rows,
        as_json,
        lambda: table(
            ("task", "takes", "gives", "components", "as a service names it"),
            [
                (
                    row["name"],
                    row["request"],
                    row["reply"],
                    ", ".join(row["components"]),
                    row["task"],
                )
                for row in rows
            ],
        ),
    )


@app.command()
def show(
    task: Annotated[
        str,
        typer.Argument(help="MODULE:CLASS of a task, or the name of one that comes with Atoll."),
    ],
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option", help="NAME=VALUE for its setup, as voice_activity=true; may be repeated."
        ),
    ] = None,
    svg: Annotated[Path | None, typer.Option("--svg", help="Write a picture to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Draw the components of a task and what flows between them.

    Its code is run on values of which nothing is known, down all its ways; no component is run.
    """
    from atoll.tasks.flow import find_flow
    from atoll.tasks.flow_text import draw_flow, flow_data

    flow = find_flow(_load(LIBRARY.get(task, task), _options(option or [])))
    if svg is not None:
        from atoll.core.files import atomic_write
        from atoll.tasks.flow_svg import draw_svg

        atomic_write(svg, draw_svg(flow))
    emit(flow_data(flow), as_json, lambda: draw_flow(flow))
    if svg is not None:
        note(f"wrote {svg}")


def _options(given: list[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for each in given:
        name, sign, value = each.partition("=")
        if not (sign and name):
            raise InputError(f"{each!r} says no value", field="--option", hint="write NAME=VALUE")
        options[name] = {"true": True, "false": False}.get(value.lower(), value)
    return options


def _load(where: str, options: dict[str, Any]) -> Task[Any, Any]:
    """Import and make a task; modules of the current folder are found too."""
    from atoll.tasks.task import Task

    module, sign, name = where.partition(":")
    if not (sign and module and name):
        raise UnknownNameError("task", where, LIBRARY, hint="a name of these, or MODULE:CLASS")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = getattr(import_module(module), name, None)
    except ImportError as error:
        raise InputError(f"cannot import {module!r}: {error}", field="task") from error
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise InputError(
            f"{module!r} has no task {name!r}", field="task", hint="name a subclass of atoll's Task"
        )
    return found(options)
