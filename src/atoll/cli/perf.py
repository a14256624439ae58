"""`atoll perf`: how fast a model runs on a node, and fitting the model behind the answer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from atoll.cli.options import VerbSettings, argument, json_field, overlay_field, verb
from atoll.core.options import option
from atoll.core.units import format_duration, format_usd, parse_duration
from atoll.report.terminal import emit, note, table, tighten

if TYPE_CHECKING:
    from rich.console import RenderableType

    from atoll.catalog.catalog import Catalog
    from atoll.catalog.models import ModelSpec
    from atoll.perf.compare import NodeChoice, PhaseCopy
    from atoll.perf.step import StepModel
    from atoll.perf.step_curves import Picture

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Predict how fast a model runs on a node, compare nodes, and fit the prediction.",
)

_MODEL = "A model of the catalog (qwen3-32b, llama-3-70b@fp8) or a config.json."


class PerfSettings(VerbSettings):
    """Options of `atoll perf show` and `compare`."""

    lengths: str = option("azure-conv", "azure-code, azure-conv, reasoning, ... or PROMPTxANSWER.")
    ttft: str = option("1500ms", "Promised time to the first token.")
    tpot: str = option("80ms", "Promised time per further token.")
    engine: str = option("vllm", "Whose host time per step counts: vllm, sglang, ...; none.")
    overlay: tuple[Path, ...] = overlay_field()
    as_json: bool = json_field()


class ShowSettings(PerfSettings):
    """Options of `atoll perf show`."""

    model: str = argument(_MODEL)
    node: str = argument("A node type, GPU:COUNT, such as L40S:2.")
    tp: int | None = option(None, "GPUs per copy; all of the node.")
    backend: str = option("analytic", "analytic, aic, or a file of measured tables.")
    out: tuple[Path, ...] = option((), "Also write a .png or .html; repeatable.", "-o", "--out")


class CompareSettings(PerfSettings):
    """Options of `atoll perf compare`."""

    model: str = argument(_MODEL, "llama-3-70b")
    nodes: str = option(
        "L4:1,L4:4,L4:8,A10G:4,A10G:8,L40S:1,L40S:4,L40S:8,A100-40:8,A100-80:1,A100-80:4,A100-80:8,"
        "H100:1,H100:4,H100:8,H200:8,B200:8",
        "Node types, comma-separated; 'all' for the catalog.",
    )
    region: tuple[str, ...] = option((), "Only prices of this region; repeatable.")
    spot: bool = option(False, "Spot prices instead of on-demand.")


class CalibrateSettings(VerbSettings):
    """Options of `atoll perf calibrate`."""

    data: tuple[Path, ...] = argument(
        "CSV files of measured operators, or JSON of vLLM's bench, GuideLLM or aiperf."
    )
    gpu: str | None = option(None, "The GPU measured, if the file does not name it.")
    model: str | None = option(None, "The model that the server had; for JSON files.")
    node: str | None = option(None, "What the server ran on, as H200:1; for JSON files.")
    tp: int | None = option(None, "GPUs that split a layer there; default: all that can.")
    engine: str = option("vllm", "The engine of the server, also with a version: vllm@0.12.")
    out: Path | None = option(None, "Add constants, or a server, to this overlay.", "-o", "--out")
    all_points: bool = option(False, "Fit on every point instead of holding half out.")
    source: str | None = option(None, "Where the numbers come from, for reports.")
    overlay: tuple[Path, ...] = overlay_field()
    as_json: bool = json_field()


def _catalog(overlays: tuple[Path, ...]) -> Catalog:
    from atoll.catalog.load import load_catalog

    return load_catalog(overlays)


def _model(catalog: Catalog, name: str) -> ModelSpec:
    """The model of the catalog called `name`, else the one whose config.json it is the path of."""
    from atoll.core.errors import AtollError

    try:
        return catalog.model(name)
    except AtollError:
        # Not Path.is_file(), which raises where the name is too long to be one.
        is_folder = bool(name.strip()) and os.path.isfile(os.path.join(name, "config.json"))
        if not (is_folder or name.endswith(".json")):
            raise
    from atoll.catalog.hf_config import model_from_config

    return model_from_config(Path(name))


def _step_model(model: ModelSpec, catalog: Catalog, options: ShowSettings) -> StepModel:
    from atoll.core.errors import UnknownNameError
    from atoll.engines.table import profile_engine

    kind, tp, engine = catalog.node(options.node), options.tp, options.engine
    backend = options.backend
    is_table = Path(backend).suffix in (".csv", ".parquet")
    if backend not in ("analytic", "aic") and not is_table:
        known = ("analytic", "aic", "a measured .csv or .parquet")
        raise UnknownNameError("backend", backend, known)
    if backend == "analytic":
        from atoll.perf.step import analytic

        return analytic(model.llm, kind, tp=tp, engine=engine)
    if backend == "aic":
        from atoll.perf.aic import aic

        return aic(model, kind, tp=tp, engine=engine)
    from atoll.perf.step_tables import TableFile

    return TableFile(backend).step_model(
        model.name, model.llm, kind, tp=tp, engine=profile_engine(engine, kind.gpu)
    )


def _parse_promise(text: str, field: str) -> float:
    """Seconds of a promise; there is no keeping one of no time at all."""
    from atoll.core.errors import InputError

    seconds = parse_duration(text, field=field)
    if seconds == 0.0:
        raise InputError(f"{text!r} is not a latency above 0", field=field)
    return seconds


@verb(app, ShowSettings)
def show(options: ShowSettings) -> None:
    """Draw step time and throughput of a model on a node, against batch and layers."""
    from atoll.cli.perf_facts import facts_of, host_times, words_of
    from atoll.core.ids import Phase
    from atoll.perf.capacity import RoleLoad
    from atoll.perf.memory_model import MemoryModel
    from atoll.perf.step_curves import (
        decode_steps,
        layer_steps,
        prefill_steps,
        throughput_by_layers,
    )
    from atoll.workload.lengths import length_mix

    catalog = _catalog(options.overlay)
    spec = _model(catalog, options.model)
    steps = _step_model(spec, catalog, options)
    mix = length_mix(options.lengths)
    memory = MemoryModel.of(steps.spec, steps.node, tp=steps.tp, engine=steps.engine)
    most = memory.max_layers(mix.decode_context)
    drawn = layer_steps(steps.spec.layers, most or steps.spec.layers)
    roles = {
        phase: RoleLoad(phase.value, steps.spec, phase, _parse_promise(slo, name), mix)
        for phase, slo, name in (
            (Phase.PREFILL, options.ttft, "ttft"),
            (Phase.DECODE, options.tpot, "tpot"),
        )
    }
    # Stages hand over through the node's own network interface, as in `compare`.
    link = catalog.links.between("", "", steps.node.id, steps.node.id)
    stages = (1, 2, 4) if steps.spec.layers >= 4 else (1,)
    pictures = [
        prefill_steps(steps, drawn, 8192),
        decode_steps(steps, drawn, mix.decode_context, 256),
        *(throughput_by_layers(role, steps, stages, link) for role in roles.values()),
    ]
    hosts = host_times(steps, mix.decode_context)
    facts = facts_of(steps, memory, hosts)
    words = words_of(steps, memory, most, hosts)
    title = f"{spec.name} on {steps.node.id}"
    if options.out:
        from atoll.report.charts import save_all

        save_all(options.out, pictures, title=title, facts=words)
    data = {"model": spec.name, "node": steps.node.id, "facts": facts, "pictures": pictures}
    emit(data, options.as_json, lambda: _draw(title, words, pictures))
    for path in options.out:
        note(f"wrote {path}")


def _draw(title: str, facts: dict[str, str], pictures: list[Picture]) -> RenderableType:
    from rich.console import Group

    from atoll.report.charts import draw_facts, draw_pictures

    return Group(draw_facts(title, facts), "", draw_pictures(pictures))


@verb(app, CompareSettings)
def compare(options: CompareSettings) -> None:
    """Compare real GPUs for a model: what fits, how fast, and what a million tokens cost."""
    from atoll.cli.catalog import check_region
    from atoll.core.errors import UsageError
    from atoll.perf.compare import Promise, compare
    from atoll.workload.lengths import length_mix

    catalog, nodes = _catalog(options.overlay), options.nodes
    spec = _model(catalog, options.model)
    names = list(catalog.nodes) if nodes == "all" else [n for n in nodes.split(",") if n.strip()]
    if not names:
        raise UsageError("--nodes names no node type", hint="write --nodes L4:1,H100:8, or all")
    for place in options.region:
        check_region(catalog, place)
    promise = Promise(_parse_promise(options.ttft, "ttft"), _parse_promise(options.tpot, "tpot"))
    mix = length_mix(options.lengths)
    choices = compare(
        spec.llm,
        promise,
        mix,
        [catalog.node(name) for name in names],
        catalog,
        engine=options.engine,
        regions=options.region or None,
        spot=options.spot,
    )
    title = (
        f"{spec.name}: first token within {format_duration(promise.ttft_s)}, then "
        f"{format_duration(promise.tpot_s)} per token; prompts of {mix.input_mean:,.0f} and answers of "
        f"{mix.output_mean:,.0f} tokens on average"
    )
    emit(
        choices,
        options.as_json,
        lambda: _comparison(title, choices, spec.llm.layers, options.spot),
    )


def _comparison(title: str, choices: list[NodeChoice], layers: int, spot: bool) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    rows = [
        (
            choice.node,
            _usd(choice.usd_per_hour),
            min(choice.max_layers, layers),
            *_copy(choice.prefill),
            *_copy(choice.decode),
            _usd(None if choice.request_usd is None else choice.request_usd * 1000),
            choice.provenance.partition(" ")[0].replace("layer-fitted", "layers"),
        )
        for choice in choices
    ]
    columns = (
        "node", "$/h", "fits", "prefill/s", "$/M in", "decode/s", "$/M out", "$/1k", "times",
    )  # fmt: skip
    kind = "spot" if spot else "on-demand"
    pipelines = (copy for c in choices for copy in (c.prefill, c.decode) if copy is not None)
    shown = next((copy for copy in pipelines if copy.nodes > 1), None)
    count, rate, split = (
        (4, 21_728.0, 2) if shown is None else (shown.nodes, shown.tokens_per_s, shown.tp)
    )
    notes = (
        f"$/h is the cheapest {kind} price over the regions asked for; 'fits' is how many of the {layers} "
        "layers fit on a node. "
        f"'{count}x {rate:,.0f}/{split}': a pipeline of {count} such nodes carries that many tokens/s, each "
        f"layer split over {split} of a node's GPUs (tensor parallel), with as many copies as a node has "
        "room for; it is the best split of up to 8 equal stages. '-': none keeps the promise, or nobody "
        "sells the node. 'times' says what the prediction rests on: measured operators, measured layers, or "
        "a proxy GPU. $/1k: per 1,000 requests."
    )
    drawn = table(columns, rows, title=title, right=columns[1:-1])
    tighten(drawn)
    for column in drawn.columns:
        column.no_wrap = True
    best = next((c for c in choices if c.request_usd is not None), None)
    verdict = ""
    if best is not None and best.request_usd is not None:
        dearest = max(c.request_usd for c in choices if c.request_usd is not None)
        verdict = (
            f"Cheapest per request: {best.node} ({best.region}), "
            f"{dearest / best.request_usd:.1f}x cheaper than the dearest node shown.\n"
        )
    return Group(drawn, Text(verdict, style="bold"), Text(notes, style="dim"))


def _copy(copy: PhaseCopy | None) -> tuple[str | None, str | None]:
    if copy is None:
        return None, None
    rate = f"{copy.nodes}x {copy.tokens_per_s:,.0f}/{copy.tp}"
    return rate, _usd(copy.usd_per_million_tokens)


def _usd(usd: float | None) -> str | None:
    return None if usd is None else format_usd(usd, sign=False)


@verb(app, CalibrateSettings)
def calibrate(options: CalibrateSettings) -> None:
    """Fit the constants of GPUs to measured matrix products, attention or experts, or to a server under load.

    What several files hold of one operator of one GPU is fitted together. Results of load generators (JSON)
    are those of one server, and make an entry of an overlay as `atoll profile --server` does; give --model
    and --node.
    """
    from atoll.cli.calibrate import check_constants, fit_files, show_fits, write_constants

    out, catalog = options.out, _catalog(options.overlay)
    if any(path.suffix == ".json" for path in options.data):
        _calibrate_server(options, catalog)
        return
    if out is not None:
        check_constants(out)
    fits = fit_files(
        options.data,
        catalog,
        gpu=options.gpu,
        hold_out=not options.all_points,
        source=options.source,
    )
    if out is not None:
        write_constants(out, fits)
    emit(fits, options.as_json, lambda: show_fits(fits, out))


def _calibrate_server(options: CalibrateSettings, catalog: Catalog) -> None:
    """Fit a server to results of load generators."""
    from datetime import UTC, datetime

    from atoll.cli.profile_server import show_fit
    from atoll.core.errors import UsageError
    from atoll.perf.server_fit import fit_server
    from atoll.perf.server_logs import read_server_logs

    if options.model is None or options.node is None:
        raise UsageError(
            "results of a load generator do not say what served",
            hint="give --model and --node, such as --model llama-3.1-8b --node H200:1",
        )
    model = catalog.model(options.model)
    fit = fit_server(
        read_server_logs(options.data),
        model.llm,
        catalog.node(options.node),
        tp=options.tp,
        engine=options.engine,
        model=model.name,
        date=datetime.now(UTC).date().isoformat(),
    )
    show_fit(fit, options.out, as_json=options.as_json)
