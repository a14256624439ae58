"""`atoll catalog`: the facts Atoll plans with, and where they come from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.shared_options import AsJson
from atoll.core.units import (
    format_bandwidth,
    format_bytes,
    format_count,
    format_duration,
    format_usd,
)
from atoll.report.terminal import emit
from atoll.report.terminal import table as plain_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Group
    from rich.table import Table

    from atoll.catalog.catalog import Catalog
    from atoll.catalog.describe import Description
    from atoll.catalog.link_table import Link, LinkTable
    from atoll.catalog.models import ModelSpec
    from atoll.catalog.prices import Price

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Look up GPUs, nodes, models, prices and links, and where the numbers come from.",
)

Overlays = Annotated[
    list[Path] | None,
    typer.Option(
        "--overlay",
        help="A YAML file that adds or changes facts; may be given again. Also ATOLL_CATALOG.",
    ),
]


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    title: str | None = None,
    caption: str | None = None,
    right: Iterable[str] = (),
    whole: Iterable[str] = (),
) -> Table:
    """A table whose columns named in `whole` are never folded: names must stay copyable."""
    drawn = plain_table(columns, rows, title=title, caption=caption, right=right)
    for column, name in zip(drawn.columns, columns, strict=True):
        column.no_wrap = name in frozenset(whole)
    return drawn


def _catalog(overlays: list[Path] | None) -> Catalog:
    from atoll.catalog.load import load_catalog

    return load_catalog(overlays or ())


@app.command()
def gpus(as_json: AsJson = False, overlay: Overlays = None) -> None:
    """List GPU types: memory, bandwidth, dense TFLOPS, power."""
    known = _catalog(overlay).gpus
    emit(
        [_public(gpu) for gpu in known.values()] if as_json else None,
        as_json,
        lambda: table(
            ("gpu", "memory", "bandwidth", "fp16", "fp8", "power", "SMs", "L2", "arch"),
            [
                (
                    gpu.name,
                    format_bytes(gpu.memory_bytes),
                    format_bandwidth(gpu.bandwidth_bytes_per_s),
                    f"{gpu.fp16_tflops:g}",
                    None if gpu.fp8_tflops is None else f"{gpu.fp8_tflops:g}",
                    f"{gpu.tdp_w:g}W",
                    gpu.sms,
                    f"{gpu.l2_bytes / 2**20:g}MiB",
                    gpu.architecture,
                )
                for gpu in known.values()
            ],
            caption="TFLOPS are dense, with FP32 accumulation. Sources: atoll catalog show GPU",
            right=("memory", "bandwidth", "fp16", "fp8", "power", "SMs", "L2"),
        ),
    )


@app.command()
def nodes(as_json: AsJson = False, overlay: Overlays = None) -> None:
    """List node types: GPUs of one machine and what joins them."""
    known = _catalog(overlay).nodes
    rows = []
    for node in known.values():
        joint = node.interconnect
        cost = joint.allreduce_for(node.count) if node.count > 1 and joint.allreduce else None
        rows.append(
            {
                "node": node.id,
                "gpu": node.gpu.name,
                "count": node.count,
                "memory_bytes": node.memory_bytes,
                "fp16_tflops": node.fp16_tflops,
                "interconnect": node.interconnect.name,
                "allreduce_alpha_us": None if cost is None else cost.alpha_us,
                "allreduce_bus_bytes_per_s": None
                if cost is None
                else cost.bus_bandwidth_bytes_per_s,
                "allreduce_p": None if cost is None else cost.p,
            }
        )
    emit(
        rows,
        as_json,
        lambda: table(
            ("node", "memory", "fp16", "joined by", "all-reduce", "bus"),
            [
                (
                    node.id,
                    format_bytes(node.memory_bytes),
                    f"{node.fp16_tflops:g}",
                    node.interconnect.name if node.count > 1 else None,
                    _alpha(row["allreduce_alpha_us"]),
                    _bus(row["allreduce_bus_bytes_per_s"]),
                )
                for node, row in zip(known.values(), rows, strict=True)
            ],
            caption="all-reduce among n GPUs: (alpha^p + (2(n-1)/n bytes / bus)^p)^(1/p); alpha, an "
            "empty one, and bus are shown here, p by: atoll catalog show NODE",
            right=("memory", "fp16", "all-reduce", "bus"),
        ),
    )


def _alpha(value: object) -> str | None:
    return f"{value:g}us" if isinstance(value, int | float) else None


def _bus(value: object) -> str | None:
    return format_bandwidth(value) if isinstance(value, int | float) else None


@app.command()
def models(as_json: AsJson = False, overlay: Overlays = None) -> None:
    """List models: parameters, bytes of weights, KV cache per token, context."""
    known = _catalog(overlay).models
    emit(
        [_model_record(model) for model in known.values()] if as_json else None,
        as_json,
        lambda: table(
            ("model", "parts", "params", "active", "weights", "KV/token", "context"),
            [_model_row(model) for model in known.values()],
            caption="A precision is part of the name: llama-3-70b@fp8, qwen3-32b@int4,kv=fp8. "
            "'-' is not public.",
            right=("params", "active", "weights", "KV/token", "context"),
            whole=("model",),
        ),
    )


def _model_row(model: ModelSpec) -> tuple[object, ...]:
    llm = model.llm if model.has_llm else None
    total, active, weights = model.total_params, model.active_params, model.weight_bytes
    return (
        model.name,
        " ".join(component.name for component in model.graph.components),
        None if total is None else format_count(total),
        None if active is None else format_count(active),
        None if weights is None else format_bytes(weights),
        None if llm is None else format_bytes(llm.kv_bytes_per_token),
        None if llm is None else llm.max_context,
    )


def _model_record(model: ModelSpec) -> dict[str, object]:
    from atoll.catalog.describe import counts, shapes

    return {
        "name": model.name,
        "aliases": model.aliases,
        "hf_id": model.hf_id,
        "revision": model.revision,
        "checkpoints": {name: each.given for name, each in model.checkpoints.items()},
        "tool_parser": model.tool_parser,
        "reasoning_parser": model.reasoning_parser,
        "architecture": model.architecture,
        "edges": [[edge.src, edge.dst] for edge in model.graph.edges],
        "total_params": model.total_params,
        "active_params": model.active_params,
        "weight_bytes": model.weight_bytes,
        "components": {
            name: {"part": model.graph.component(name).kind, **shapes(spec), **counts(spec)}
            for name, spec in model.components.items()
        },
        "source": model.source,
        "confidence": model.confidence,
        "note": model.note,
    }


@app.command()
def prices(
    region: Annotated[
        str | None, typer.Option(help="A region, cloud or both: us-east-2, gcp, aws/us-east-2.")
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="A GPU type.")] = None,
    count: Annotated[int | None, typer.Option(min=1, help="GPUs in the node.")] = None,
    spot: Annotated[bool, typer.Option("--spot", help="Only with a spot price.")] = False,
    imputed: Annotated[
        bool, typer.Option("--imputed", help="Also sizes nobody sells, priced pro rata.")
    ] = False,
    cheapest: Annotated[
        bool, typer.Option("--cheapest", help="Only the cheapest machine of every size.")
    ] = False,
    as_json: AsJson = False,
    overlay: Overlays = None,
) -> None:
    """List what clouds ask per hour, on demand and on spot (median, least and most over zones)."""
    catalog = _catalog(overlay)
    rows = catalog.prices.query(
        region=region,
        gpu=None if gpu is None else catalog.gpu(gpu).name,
        count=count,
        spot=spot,
        include_imputed=imputed,
    )
    if region is not None:
        check_region(catalog, region)
    if cheapest:
        keep = {
            (row.place, row.node_type): catalog.prices.cheapest(
                row.place, row.node_type, spot=spot, include_imputed=imputed
            )
            for row in rows
        }
        rows = tuple(row for row in rows if row == keep[row.place, row.node_type])
    emit(
        [_public(row) for row in rows] if as_json else None,
        as_json,
        lambda: table(
            ("where", "node", "machine", "$/h", "spot", "least", "most"),
            [_price_row(row) for row in rows],
            caption=_price_caption(rows),
            right=("$/h", "spot", "least", "most"),
        ),
    )


def check_region(catalog: Catalog, region: str) -> None:
    """Raise UnknownNameError unless some price is in `region`: a region, a cloud, or both."""
    if not any(row.is_in(region) for row in catalog.prices):
        from atoll.core.errors import UnknownNameError

        places = [part for place in catalog.prices.regions for part in (place, *place.split("/"))]
        raise UnknownNameError("region", region, {p for p in places if p != "any"})


def _price_row(row: Price) -> tuple[object, ...]:
    spot = row.spot_usd_per_hour
    return (
        row.place,
        row.node_type,
        row.instance or ("(imputed)" if row.imputed else None),
        _usd(row.usd_per_hour),
        None if spot is None else _usd(spot.median),
        None if spot is None else _usd(spot.min),
        None if spot is None else _usd(spot.max),
    )


def _usd(usd_per_hour: float | None) -> str | None:
    return None if usd_per_hour is None else format_usd(usd_per_hour, sign=False)


def _price_caption(rows: tuple[Price, ...]) -> str:
    if not rows:
        return "No machine matches."
    dates = sorted({row.snapshot for row in rows if row.snapshot is not None})
    when = f" as of {dates[0]}" + (f" to {dates[-1]}" if len(dates) > 1 else "") if dates else ""
    return f"{len(rows)} machines, list prices in USD per hour of the whole node{when}."


@app.command()
def links(as_json: AsJson = False, overlay: Overlays = None) -> None:
    """List links: inside a region, between regions, network interfaces of node types."""
    known = _catalog(overlay).links
    emit(
        _links_record(known) if as_json else None,
        as_json,
        lambda: table(
            ("link", "bandwidth", "latency", "confidence"),
            _link_rows(known),
            caption="Latency is one way; two nodes of a region get the slower of their interfaces. "
            "Sources: atoll catalog show links",
            right=("bandwidth", "latency"),
        ),
    )


def _link_rows(known: LinkTable) -> list[tuple[object, ...]]:
    def row(name: str, key: str, link: Link) -> tuple[object, ...]:
        fact = known.facts.get(key)
        return (
            name,
            format_bandwidth(link.bandwidth_bytes_per_s),
            format_duration(link.latency_s),
            None if fact is None else fact.confidence,
        )

    rows = [
        row("inside a region", "in_region.bandwidth_bytes_per_s", known.in_region),
        row("between regions", "between_regions.bandwidth_bytes_per_s", known.between_regions),
    ]
    for pairs in (known.region_pairs, known.node_pairs):
        for (a, b), link in pairs.items():
            if pairs.get((b, a)) != link:
                rows.append(row(f"{a} -> {b}", f"{a}..{b}.latency_s", link))
            elif a <= b or (b, a) not in pairs:
                key = f"{a}..{b}.latency_s"
                key = key if key in known.facts else f"{b}..{a}.latency_s"
                rows.append(row(f"{a} - {b}", key, link))
    interfaces = [(node, f"nics.{node}", bandwidth) for node, bandwidth in known.nics.items()]
    interfaces += [
        (f"{node} in {region}", f"nics.{region}.{node}", bandwidth)
        for (region, node), bandwidth in known.region_nics.items()
    ]
    for name, key, bandwidth in interfaces:
        fact = known.facts.get(key)
        confidence = None if fact is None else fact.confidence
        rows.append((f"interface of {name}", format_bandwidth(bandwidth), None, confidence))
    return rows


def _links_record(known: LinkTable) -> dict[str, object]:
    def pairs(entries: object) -> list[dict[str, object]]:
        assert hasattr(entries, "items")
        return [
            {
                "from": a,
                "to": b,
                "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s,
                "latency_s": link.latency_s,
            }
            for (a, b), link in entries.items()
        ]

    return {
        "in_region": known.in_region,
        "between_regions": known.between_regions,
        "region_pairs": pairs(known.region_pairs),
        "node_pairs": pairs(known.node_pairs),
        "nics_bytes_per_s": known.nics,
        "region_nics": [
            {"region": region, "node": node, "bandwidth_bytes_per_s": bandwidth}
            for (region, node), bandwidth in known.region_nics.items()
        ],
        "facts": known.facts,
    }


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="A GPU, node type, model or interconnect; or links.")],
    as_json: AsJson = False,
    overlay: Overlays = None,
) -> None:
    """Show every fact about one name with its source and the confidence in it."""
    from atoll.catalog.describe import describe

    description = describe(_catalog(overlay), name)
    emit(
        description,
        as_json,
        lambda: _description(description),
    )


def _description(description: Description) -> Group:
    """The facts as a table with numbered sources, and the sources below it."""
    from rich.console import Group

    sources = list(dict.fromkeys(row.source for row in description.rows if row.source is not None))
    facts = table(
        ("field", "value", "confidence", "source"),
        [
            (
                row.field,
                _format_value(row.field, row.value),
                row.confidence,
                None if row.source is None else f"[{sources.index(row.source) + 1}]",
            )
            for row in description.rows
        ],
        title=f"{description.kind} {description.name}",
        whole=("field", "confidence", "source"),
    )
    return Group(facts, table(("", "source"), [(f"[{i}]", s) for i, s in enumerate(sources, 1)]))


def _format_value(field: str, value: object) -> object:
    """A value as people read it, by the unit at the end of its field's name."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return value
    if field == "l2_bytes":
        return f"{value / 2**20:g}MiB"
    if field.endswith("bytes_per_s") or field.startswith("nics."):
        return format_bandwidth(value)
    if (
        field.endswith(("_bytes", "bytes_per_token", "bytes_per_sequence", "bytes_native"))
        or "weight_bytes" in field
    ):
        return f"{format_bytes(value)} ({value:.0f})"
    if field.endswith("_s"):
        return format_duration(value)
    if "params" in field and value >= 1000:
        return f"{format_count(value)} ({value})"
    return f"{value:g}" if isinstance(value, float) else value


def _public(entry: object) -> dict[str, object]:
    """The fields of a catalog entry for JSON."""
    from dataclasses import fields, is_dataclass

    assert is_dataclass(entry)
    return {f.name: getattr(entry, f.name) for f in fields(entry) if not f.name.startswith("_")}
