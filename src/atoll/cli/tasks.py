"""`atoll tasks`: what tasks there are and what flows in them; measuring, serving and tracing them."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli.shared_options import AsJson
from atoll.cli.tasks_serve import add_serve
from atoll.cli.tasks_trace import add_trace
from atoll.core.errors import InputError, UnknownNameError
from atoll.report.terminal import emit, note, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from atoll.runtime.task_fleet.core_fit import CoreSpeed
    from atoll.runtime.task_fleet.measure import PartRate
    from atoll.tasks.task import Task

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Show what tasks there are and what flows between their components; measure, serve and trace.",
)
add_serve(app)
add_trace(app)

LIBRARY: dict[str, str] = {
    "SpeakingAssistant": "atoll.tasks.library.assistant:SpeakingAssistant",
    "Transcription": "atoll.tasks.library.transcription:Transcription",
    "Speech": "atoll.tasks.library.speech:Speech",
    "Drawing": "atoll.tasks.library.drawing:Drawing",
    "Painting": "atoll.tasks.library.drawing:Painting",
    "Embedding": "atoll.tasks.library.embedding:Embedding",
}
"""The composite tasks that come with Atoll, by name."""


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
        from atoll.tasks.flow_text import draw_svg

        atomic_write(svg, draw_svg(flow))
    emit(flow_data(flow), as_json, lambda: draw_flow(flow))
    if svg is not None:
        note(f"wrote {svg}")


@app.command()
def measure(
    part: Annotated[
        list[str] | None,
        typer.Option("--part", help="Measure this part only; may be repeated."),
    ] = None,
    parts: Annotated[
        Path | None,
        typer.Option("--parts", help="File that names components for the parts, as for `serve`."),
    ] = None,
    on: Annotated[
        str, typer.Option("--on", help="What the fleet file calls a core of this machine.")
    ] = "CORE",
    runs: Annotated[int, typer.Option("--runs", min=1, max=1000, help="Runs of each part.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Measure how fast components run on one core here, and print the rates for a fleet file.

    The rates are units per CPU second, what an idle core gives; beside them stands what the clock said.
    Without --parts it is the components of the model that Atoll brings along.
    """
    from dataclasses import asdict

    from atoll.cli.progress import live_line
    from atoll.core.extras import require_extras
    from atoll.runtime.task_fleet.measure import measure_parts

    chosen = _parts(part or [], parts)
    names = {name for components in chosen.values() for name in components}
    if parts is None:
        require_extras("components")
        if "smollm2" in names:
            require_extras("engine")
    with live_line("measuring components") as say:
        rates = measure_parts(chosen, runs=runs, on_progress=say)
    speed = None if parts is not None else _core_speed(rates)
    data = {
        "on": on,
        "parts": [asdict(rate) for rate in rates],
        "core": None if speed is None else asdict(speed),
    }
    emit(data, as_json, lambda: rates_yaml(rates, on, speed))


def rates_yaml(rates: Sequence[PartRate], on: str, speed: CoreSpeed | None = None) -> str:
    """Return rates as a fleet file has them, and the core as its catalog does."""
    lines = ["# units per CPU second of one core", "rates:"]
    lines += [
        f"  {rate.part}: {{{on}: {{{rate.unit}: {rate.cpu_per_s:.3g}/s}}}}  "
        f"# {', '.join(rate.components)}; {rate.per_s:.3g}/s by the clock"
        for rate in rates
    ]
    if speed is not None:
        core = f"like: T4, bandwidth: {speed.bandwidth_gbs:.3g}GB/s, fp16_tflops: {speed.fp16_tflops:.3g}"
        lines += [
            "# a core on which a simulated llm answers as it did here",
            "catalog:",
            "  gpus:",
            f'    {on}: {{{core}, source: "measured"}}',
        ]
    return "\n".join(lines)


def _core_speed(rates: Sequence[PartRate]) -> CoreSpeed | None:
    """How fast a core is by the pace of the llm of our own model, None where it was not measured."""
    from atoll.catalog.catalog import Catalog
    from atoll.catalog.transformer import TransformerSpec
    from atoll.runtime.task_fleet.core_fit import fit_core
    from atoll.runtime.task_fleet.parts import OWN_MODEL

    catalog = Catalog.default()
    specs = catalog.model(OWN_MODEL).components
    for rate in rates:
        spec = specs.get(rate.part)
        if rate.pace is not None and isinstance(spec, TransformerSpec):
            return fit_core(spec, catalog.node("T4:1"), rate.pace)
    return None


def _parts(wanted: list[str], path: Path | None) -> dict[str, tuple[str, ...]]:
    """The components of parts: our own, or those of all services of a file."""
    from atoll.runtime.task_fleet.parts import own_parts
    from atoll.runtime.task_fleet.parts_file import read_parts_file

    known: dict[str, tuple[str, ...]] = {}
    for served in [own_parts()] if path is None else read_parts_file(path).values():
        for name, components in served.parts.items():
            if known.setdefault(name, components) != components:
                raise InputError(
                    f"services have different components for {name}",
                    field="--parts",
                    hint="measure one service at a time",
                )
    for name in wanted:
        if name not in known:
            raise UnknownNameError("part", name, known, field="--part")
    return {name: found for name, found in known.items() if not wanted or name in wanted}


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
