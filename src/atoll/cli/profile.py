"""`atoll profile`: how fast this machine runs layers or a component of a model, or a server its steps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from atoll.cli.operating import TerminalListener
from atoll.cli.options import verb
from atoll.cli.profile_components import show_component, show_executors
from atoll.cli.profile_operators import profile_operators
from atoll.cli.profile_server import profile_server
from atoll.cli.profile_settings import ProfileSettings
from atoll.cli.progress import live_line
from atoll.core.errors import InputError, UsageError
from atoll.core.extras import require_extras
from atoll.core.files import check_target
from atoll.core.ids import parse_node_type
from atoll.core.units import format_duration
from atoll.report.terminal import console, emit, table

if TYPE_CHECKING:
    from rich.console import ConsoleRenderable

    from atoll.plan.cluster import NodeProfile

app = typer.Typer(add_completion=False)


@verb(app, ProfileSettings)
def profile(options: ProfileSettings) -> None:
    """Measure the stage engine on this machine, for plans and simulations of it.

    The file written is what `cluster.profiles` of a fleet file names: the planner and the simulator then
    use what was measured instead of the performance model.

    With --server, measure a server that runs, from outside, under a short load of our own: first prompts
    alone, then clients at a time. What explains its times is an overlay (--out FILE.yaml), with which plans
    and simulations predict this model on such GPUs; a profile for clusters with --out FILE.json. Nothing else
    may use it meanwhile.

    With --operators, measure matrix products and attention on this machine's GPU: an overlay with its
    constants, for all models (--out FILE.yaml).

    With --component, measure an encoder or a generator of an any-to-any model, on a GPU where there is one:
    rates for the `rates` of its service in a fleet file.
    """
    if options.from_executors is not None:
        if options.component is not None or options.server is not None:
            raise UsageError("--from-executors measures nothing", hint="give it alone")
        show_executors(options, options.from_executors)
        return
    if options.component is not None:
        if options.server is not None or options.operators:
            raise UsageError(
                "--component, --server and --operators measure apart", hint="give one of them"
            )
        show_component(options, options.component)
        return
    if options.operators:
        if options.server is not None:
            raise UsageError("--operators and --server measure apart", hint="give one of them")
        profile_operators(options)
        return
    name, out = options.name or "smollm2-135m", options.out
    if options.server is not None:
        if out is not None and out.suffix == ".json":
            _profile_curves(options, options.server, name, out)
        else:
            profile_server(options, options.server, name)
        return
    require_extras("engine")
    from atoll.engine.weights.sources import DEFAULT_MODEL
    from atoll.runtime.local.layer_profile import ProfileOptions, profile_range
    from atoll.runtime.local.serving import fetch_models
    from atoll.runtime.local.weights import WeightSource

    if out is not None:
        check_target(out, (".json",))
    kind = str(parse_node_type(options.node_type, field="--as"))
    source = {name: WeightSource(options.model or DEFAULT_MODEL)}
    local_model = fetch_models(source, TerminalListener(yes=True))[name]
    assert local_model.folder is not None
    start, end = _range(options.layers, local_model.layers)
    with live_line("loading") as say:
        measured = profile_range(
            local_model.folder,
            start,
            end,
            int(options.kv),
            ProfileOptions(threads=options.threads),
            say,
        )
    data = {name: {kind: measured.model_dump(mode="json", exclude_none=True)}}
    if out is not None:
        _add_to(out, name, data)
    title = f"{name}, layers [{start}, {end}) as {kind}"
    caption = f"A step takes {format_duration(measured.step_s)} beside its layers."
    emit(data, options.as_json, lambda: _draw(measured, end - start, title, caption))
    if out is not None:
        console(stderr=True).print(f"wrote {out}", markup=False)


def _profile_curves(options: ProfileSettings, url: str, name: str, out: Path) -> None:
    """Measure the steps of a server from outside, and write them as a profile."""
    import asyncio

    from atoll.catalog.catalog import Catalog
    from atoll.runtime.local.server_profile import ServerProbes, completions_client, measure_server

    check_target(out, (".json",))
    kind = str(parse_node_type(options.node_type, field="--as"))
    spec = Catalog.default().model(name).llm
    held = spec.kv_bytes_per_token_layer * spec.layers
    ask = completions_client(url, options.model or name)
    with live_line("asking the server"):
        found = asyncio.run(measure_server(ask, spec.layers, ServerProbes()))
    measured = found.profile(options.kv / held)
    data = {name: {kind: measured.model_dump(mode="json", exclude_none=True)}}
    _add_to(out, name, data)
    beside = format_duration(found.beside_s)
    title = f"{name} at {url} as {kind}"
    caption = f"A request takes {beside} beside its steps."
    emit(data, options.as_json, lambda: _draw(measured, spec.layers, title, caption))
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
