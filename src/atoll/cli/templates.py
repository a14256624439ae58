"""`atoll templates`: the best layouts of a model over mixed nodes, and the spectrum they span."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.catalog.overlay import apply_overlay
from atoll.cli.progress import bar
from atoll.cli.shared_options import AsJson, NoCache, Overlays, Spot
from atoll.core.errors import AtollError, UnknownNameError, UsageError
from atoll.core.files import check_target
from atoll.core.ids import Phase, parse_node_type
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


@app.command()
def templates(
    model: Annotated[
        str,
        typer.Argument(help="A model of the catalog (qwen3-32b, phi-4-14b@fp8) or config.json."),
    ],
    phase: Annotated[
        str | None,
        typer.Option(
            "--phase",
            help="prefill, decode, or both on the same nodes; prefill and decode apart if left out.",
        ),
    ] = None,
    ttft: Annotated[
        str, typer.Option("--ttft", help="Promised time to the first token.")
    ] = "1500ms",
    tpot: Annotated[str, typer.Option("--tpot", help="Promised time per further token.")] = "80ms",
    lengths: Annotated[
        str, typer.Option("--lengths", help="azure-code, azure-conv, ... or PROMPTxANSWER.")
    ] = "azure-conv",
    nodes: Annotated[
        str, typer.Option("--nodes", help="Node types to lay it over, comma-separated.")
    ] = _NODES,
    regions: Annotated[
        str | None,
        typer.Option("--regions", help="Prices of these regions only, comma-separated."),
    ] = None,
    spot: Spot = False,
    max_nodes: Annotated[
        int, typer.Option("--max-nodes", min=1, max=8, help="Most nodes of a template.")
    ] = 6,
    memory_ratio: Annotated[
        float, typer.Option("--memory-ratio", help="Most memory of a template over the model's.")
    ] = 12.0,
    top: Annotated[int, typer.Option("--top", min=1, help="How many to list.")] = 20,
    uses: Annotated[
        str | None, typer.Option("--uses", help="Only templates with this GPU or node type.")
    ] = None,
    engine: Annotated[
        str, typer.Option("--engine", help="Whose host time per step counts.")
    ] = "vllm",
    out: Annotated[
        list[Path] | None,
        typer.Option("--out", help="Also write the spectrum as .png or .html; repeatable."),
    ] = None,
    no_cache: NoCache = False,
    overlay: Overlays = None,
    as_json: AsJson = False,
) -> None:
    """List the best layouts of a model over mixed nodes by throughput per dollar, and draw their spectrum."""
    from atoll.catalog.load import load_catalog

    for path in out or ():
        check_target(path, (".png", ".html"))
    from atoll.report.serving_templates import choose_best, describe_phases, draw_templates
    from atoll.solve.registry import require_packages

    require_packages()

    catalog, name = _model(load_catalog(overlay or ()), model)
    service = _service(name, phase, ttft, tpot, lengths)
    kinds = _kinds(catalog, nodes, max_nodes)
    places = _places(catalog, regions)
    prices = _prices(catalog, kinds, places, spot=spot)
    problem = _problem(service, kinds, prices, max_nodes, memory_ratio, engine)
    wanted = None if uses is None else _uses(catalog, uses, kinds)
    best = [
        choose_best(library, role_phase, places, prices, wanted, top)
        for role_phase, library in _libraries(problem, catalog, phase, cached=not no_cache)
    ]
    # Other components of a model are planned as executors (`atoll plan` with classes of requests).
    alone = " (its llm alone)" if len(catalog.model(name).graph.components) > 1 else ""
    title = f"{name}{alone}: {_promise(service)}; up to {max_nodes} nodes of {len(kinds)} types"
    for path in out or ():
        from atoll.report.charts import save

        pictures = [each.spectrum for each in best if each.spectrum is not None]
        save(path, pictures, title=title, facts=describe_phases(best))
    data = {"model": name, "node_types": kinds, "phases": best}
    emit(data, as_json, lambda: draw_templates(title, best, wanted))
    for path in out or ():
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
