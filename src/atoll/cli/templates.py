"""`atoll templates`: the best layouts of a model over mixed nodes, and the spectrum they span."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from atoll.catalog.overlay import apply_overlay
from atoll.cli.options import (
    VerbSettings,
    argument,
    json_field,
    no_cache_field,
    overlay_field,
    verb,
)
from atoll.cli.progress import bar
from atoll.core.errors import AtollError, UnknownNameError, UsageError
from atoll.core.files import check_target
from atoll.core.ids import Phase, parse_node_type
from atoll.core.options import option
from atoll.core.units import format_duration, parse_duration
from atoll.report.terminal import console, emit

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.plan.problem import Problem, Service
    from atoll.solve.templates.generate import TemplateLibrary

app = typer.Typer(add_completion=False)

_NODES = ",".join(
    f"{gpu}:{count}" for gpu in ("L4", "A10G", "L40S", "A100-80", "H100") for count in (1, 2, 4, 8)
)
_SERVICE = "model"
_PHASES = ("prefill", "decode", "both")
_MAX_MULTISETS = 5_000_000
_UNSOLD = "unsold"
"""The region of node types that nobody sells: their templates have no price."""


class TemplateSettings(VerbSettings):
    """Options of `atoll templates`."""

    model: str = argument("A model of the catalog (qwen3-32b, phi-4-14b@fp8) or config.json.")
    phase: str | None = option(
        None, "prefill, decode, or both on the same nodes; prefill and decode apart if left out."
    )
    ttft: str = option("1500ms", "Promised time to the first token.")
    tpot: str = option("80ms", "Promised time per further token.")
    lengths: str = option("azure-conv", "azure-code, azure-conv, ... or PROMPTxANSWER.")
    nodes: str = option(_NODES, "Node types to lay it over, comma-separated.")
    regions: str | None = option(None, "Prices of these regions only, comma-separated.")
    spot: bool = option(False, "Spot prices instead of on-demand.")
    max_nodes: int = option(6, "Most nodes of a template.", ge=1, le=8)
    memory_ratio: float = option(12.0, "Most memory of a template over the model's.")
    top: int = option(20, "How many to list.", ge=1)
    uses: str | None = option(None, "Only templates with this GPU or node type.")
    engine: str = option("vllm", "Whose host time per step counts.")
    out: tuple[Path, ...] = option((), "Also write the spectrum as .png or .html; repeatable.")
    no_cache: bool = no_cache_field()
    overlay: tuple[Path, ...] = overlay_field()
    as_json: bool = json_field()


@verb(app, TemplateSettings)
def templates(options: TemplateSettings) -> None:
    """List the best layouts of a model over mixed nodes by throughput per dollar, and draw their spectrum."""
    from atoll.catalog.load import load_catalog

    out, phase, max_nodes = options.out, options.phase, options.max_nodes
    for path in out:
        check_target(path, (".png", ".html"))
    from atoll.report.serving_templates import choose_best, describe_phases, draw_templates
    from atoll.solve.registry import require_packages

    require_packages()

    catalog, name = _model(load_catalog(options.overlay), options.model)
    service = _service(name, phase, options.ttft, options.tpot, options.lengths)
    kinds = _kinds(catalog, options.nodes, max_nodes)
    places = _places(catalog, options.regions)
    prices = _prices(catalog, kinds, places, spot=options.spot)
    problem = _problem(service, kinds, prices, max_nodes, options.memory_ratio, options.engine)
    wanted = None if options.uses is None else _uses(catalog, options.uses, kinds)
    best = [
        choose_best(library, role_phase, places, prices, wanted, options.top)
        for role_phase, library in _libraries(problem, catalog, phase, cached=not options.no_cache)
    ]
    # Other components of a model are planned as executors (`atoll plan` with classes of requests).
    alone = " (its llm alone)" if len(catalog.model(name).graph.components) > 1 else ""
    title = f"{name}{alone}: {_promise(service)}; up to {max_nodes} nodes of {len(kinds)} types"
    for path in out:
        from atoll.report.charts import save

        pictures = [each.spectrum for each in best if each.spectrum is not None]
        save(path, pictures, title=title, facts=describe_phases(best))
    data = {"model": name, "node_types": kinds, "phases": best}
    emit(data, options.as_json, lambda: draw_templates(title, best, wanted))
    for path in out:
        console(stderr=True).print(f"wrote {path}", markup=False)


# What is asked


def _model(catalog: Catalog, name: str) -> tuple[Catalog, str]:
    """The catalog and the model's name in it; a config.json is added to the catalog first."""
    try:
        return catalog, catalog.model(name).name
    except AtollError:
        folder = bool(name.strip()) and os.path.isfile(os.path.join(name, "config.json"))
        if not (folder or name.endswith(".json")):
            raise
    import json

    from atoll.catalog.hf_config import model_from_config
    from atoll.core.files import read_text_limited

    path = Path(name) / "config.json" if folder else Path(name)
    model_name = model_from_config(path).name
    config = json.loads(read_text_limited(path))
    return apply_overlay(catalog, {"models": {model_name: {"hf_config": config}}}), model_name


def _service(name: str, phase: str | None, ttft: str, tpot: str, lengths: str) -> Service:
    from atoll.plan.problem import Lengths, Service
    from atoll.workload.lengths import length_mix

    if phase not in (None, *_PHASES):
        raise UnknownNameError("phase", str(phase), _PHASES)
    return Service.parse(
        {
            "name": _SERVICE,
            "model": name,
            "ttft_s": parse_duration(ttft, field="ttft"),
            "tpot_s": parse_duration(tpot, field="tpot"),
            "rate_per_s": 1.0,
            "lengths": Lengths.of(length_mix(lengths)),
            "phases": "together" if phase == "both" else "apart",
        }
    )


def _kinds(catalog: Catalog, nodes: str, max_nodes: int) -> tuple[str, ...]:
    from atoll.solve.templates.generate import multiset_count

    named = [name.strip() for name in nodes.split(",") if name.strip()]
    kinds = tuple(sorted({catalog.node(name).id for name in named}))
    if not kinds:
        raise UsageError("--nodes names no node type", hint="write --nodes L4:1,H100:8")
    number = multiset_count(len(kinds), max_nodes)
    if number > _MAX_MULTISETS:
        raise UsageError(
            f"{len(kinds)} node types give {number:,} sets of up to {max_nodes} nodes",
            hint="name fewer --nodes, or a smaller --max-nodes",
        )
    return kinds


def _places(catalog: Catalog, regions: str | None) -> tuple[str, ...]:
    if regions is None:
        return catalog.prices.regions
    from atoll.cli.catalog import check_region

    places: list[str] = []
    for region in (name.strip() for name in regions.split(",") if name.strip()):
        check_region(catalog, region)
        places += sorted({row.place for row in catalog.prices if row.is_in(region)})
    if not places:
        raise UsageError("--regions names no region", hint="write --regions aws/us-east-2,gcp")
    return tuple(dict.fromkeys(places))


def _prices(
    catalog: Catalog, kinds: tuple[str, ...], places: tuple[str, ...], *, spot: bool
) -> dict[tuple[str, str], float]:
    usd_per_hour: dict[tuple[str, str], float] = {}
    for place in places:
        for kind in kinds:
            price = catalog.prices.cheapest(place, kind, spot=spot, include_imputed=True)
            usd = None if price is None else price.cost(spot=spot)
            if usd is not None:
                usd_per_hour[place, kind] = usd
    return usd_per_hour


def _problem(
    service: Service,
    kinds: tuple[str, ...],
    prices: dict[tuple[str, str], float],
    max_nodes: int,
    memory_ratio: float,
    engine: str,
) -> Problem:
    from atoll.engines.table import profile_engine
    from atoll.plan.problem import Offer, Problem

    profile_engine(engine)
    sold = {kind for _, kind in prices}
    # Layouts over the nodes that were named; slices of them have names of their own.
    offers = [
        Offer(region=place, node_type=kind, available=max_nodes, usd_per_hour=usd, whole=True)
        for (place, kind), usd in prices.items()
    ]
    offers += [
        Offer(region=_UNSOLD, node_type=kind, available=max_nodes, usd_per_hour=0.0, whole=True)
        for kind in kinds
        if kind not in sold
    ]
    return Problem.parse(
        {
            "name": _SERVICE,
            "services": (service,),
            "offers": tuple(offers),
            "settings": {
                "max_nodes_per_instance": max_nodes,
                "memory_ratio": memory_ratio,
                "engine": engine,
            },
        }
    )


def _uses(catalog: Catalog, name: str, kinds: tuple[str, ...]) -> tuple[str, ...]:
    """The node types meant by a GPU type or a node type."""
    kind = catalog.node(name).id if ":" in name else None
    gpu = None if kind is not None else catalog.gpu(name).name
    matching = tuple(
        node_type
        for node_type in kinds
        if kind == node_type or parse_node_type(node_type).gpu == gpu
    )
    if not matching:
        raise UsageError(f"--uses {name} is not among the --nodes", hint=f"add {name} to --nodes")
    return matching


# What is found


def _libraries(
    problem: Problem, catalog: Catalog, phase: str | None, *, cached: bool
) -> list[tuple[Phase, TemplateLibrary]]:
    """The templates of the phases asked for, with a bar on stderr while they are computed."""
    from atoll.solve.templates.generate import generate
    from atoll.solve.templates.library import engine_tables, role_library
    from atoll.solve.templates.template_cache import TemplateCache

    roles = [role for role in problem.roles if phase in (None, role.phase)]
    most = problem.settings.max_nodes_per_instance
    libraries = []
    with bar("templates", len(roles)) as step:
        for at, role in enumerate(roles):
            step(at, role.phase)

            def progress(done: int, total: int, at: int = at, name: str = role.phase) -> None:
                step(at + done / max(1, total), name)

            library = role_library(
                problem,
                engine_tables(problem, catalog, role),
                most,
                make=TemplateCache().library if cached else generate,
                progress=progress,
            )
            libraries.append((role.phase, library))
    return libraries


def _promise(service: Service) -> str:
    latencies = f"TTFT {format_duration(service.ttft_s)}, TPOT {format_duration(service.tpot_s)}"
    lengths = service.lengths
    return f"{latencies}, prompts of {lengths.input_mean:,.0f} and answers of {lengths.output_mean:,.0f}"
