"""Overlays: one YAML file that adds facts to a catalog or changes them; see `overlay_schema`.

An entry whose name is known changes the fields it gives and leaves the others; a later overlay wins
over an earlier one, field by field. A new name needs every field, or `like: NAME` to start from.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from atoll.catalog.catalog import Catalog
from atoll.catalog.document import Document
from atoll.catalog.facts import Confidence, Fact
from atoll.catalog.frozenmap import FrozenMap
from atoll.catalog.gpus import GpuType
from atoll.catalog.link_table import GpuGroups, Link, LinkTable
from atoll.catalog.measured_servers import MeasuredServer
from atoll.catalog.name_lookup import fold, index_names
from atoll.catalog.nodes import AllReduceCost, Interconnect, NodeRule
from atoll.catalog.overlay_models import overlay_models
from atoll.catalog.prices import Price, SpotPrice
from atoll.catalog.relatives import find_relatives
from atoll.core.errors import UnknownNameError
from atoll.core.ids import parse_node_type, slug

if TYPE_CHECKING:
    from atoll.catalog.overlay_schema import (
        GpuEntry,
        InterconnectEntry,
        LinkEntry,
        LinksEntry,
        PairEntry,
        PriceEntry,
        ServerEntry,
    )

# Key in the overlay -> attribute of GpuType.
_GPU_FIELDS = {
    "architecture": "architecture",
    "compute_capability": "compute_capability",
    "fp16_tflops": "fp16_tflops",
    "fp8_tflops": "fp8_tflops",
    "fp4_tflops": "fp4_tflops",
    "bf16": "bf16",
    "memory": "memory_bytes",
    "bandwidth": "bandwidth_bytes_per_s",
    "tdp_w": "tdp_w",
    "sms": "sms",
    "l2": "l2_bytes",
    "nvlink": "nvlink_bytes_per_s",
    "pcie": "pcie_bytes_per_s",
}
_GPU_OPTIONAL = {"fp8_tflops", "fp4_tflops", "nvlink", "pcie"}
_WHOLE_BYTES = {"memory", "l2"}


def apply_overlay(
    catalog: Catalog, overlay: str | os.PathLike[str] | Mapping[str, object]
) -> Catalog:
    """The catalog with an overlay's facts; the overlay is a YAML file or its content."""
    document = Document(overlay)
    entries = document.overlay
    gpus, rules = _gpus(catalog, document)
    interconnects = _interconnects(catalog, document)
    # Nodes, models, prices and links below may name the GPUs and interconnects of this overlay.
    sized = Catalog(
        gpus=gpus,
        interconnects=interconnects,
        node_rules=rules,
        node_overrides=catalog.node_overrides,
        models=catalog.models,
        prices=catalog.prices,
        links=catalog.links,
    )
    overrides = dict(catalog.node_overrides)
    for node, entry in (entries.nodes or {}).items():
        with document.at("nodes", node):
            gpu, count = parse_node_type(node)
            canonical = f"{sized.gpu(gpu).name}:{count}"
        with document.at("nodes", node, "interconnect"):
            overrides[canonical] = sized.interconnect(entry.interconnect).name
    models = overlay_models(sized, document) if entries.models else catalog.models
    if entries.servers:
        named = Catalog(gpus=gpus, interconnects=interconnects, node_rules=rules, models=models)
        for i, measured in enumerate(entries.servers):
            server = _server(named, document, i, measured)
            known = gpus[server.gpu]
            gpus[server.gpu] = replace(known, servers=(*known.servers, server))
    prices = catalog.prices
    if entries.prices:
        prices = prices.with_rows(
            _price(sized, document, i, row) for i, row in enumerate(entries.prices)
        )
    return Catalog(
        gpus=gpus,
        interconnects=interconnects,
        node_rules=rules,
        node_overrides=overrides,
        models=models,
        prices=prices,
        links=_links(sized, document),
    )


# GPUs and nodes


def _gpus(catalog: Catalog, document: Document) -> tuple[dict[str, GpuType], dict[str, NodeRule]]:
    gpus, rules = dict(catalog.gpus), dict(catalog.node_rules)
    for name, entry in (document.overlay.gpus or {}).items():
        # Anew for every entry: one may be like another that came before it.
        index = index_names((gpu.name, gpu.aliases) for gpu in gpus.values())
        known = gpus.get(index.get(fold(name), ""))
        base = known
        if entry.like is not None:
            base = _base_gpu(name, entry, gpus, document)
        canonical = name if known is None else known.name
        if known is None:
            with document.at("gpus", name):
                # Its name must be one that node types can be written with.
                parse_node_type(f"{name}:1")
        gpus[canonical] = _gpu(canonical, entry, base, document)
        if canonical not in rules:
            inherited = None if base is None else rules.get(base.name)
            rules[canonical] = inherited or NodeRule((1,), "none")
    return gpus, rules


def _base_gpu(
    name: str, entry: GpuEntry, gpus: Mapping[str, GpuType], document: Document
) -> GpuType:
    """The GPU type that another one is `like`; where it is not known, the hint is one that is."""
    like = entry.like or ""
    try:
        return Catalog(gpus=gpus).gpu(like)
    except UnknownNameError as error:
        near = find_relatives(like, gpus, entry.memory).gpus or find_relatives(name, gpus).gpus
        hint = f"write 'like: {near[0].name}'" if near else "use a known name"
        raise document.error(error.message, "gpus", name, "like", hint=hint) from None


def _gpu(name: str, entry: GpuEntry, base: GpuType | None, document: Document) -> GpuType:
    fields_set = entry.model_fields_set
    values: dict[str, object] = {}
    facts: dict[str, Fact] = {}
    if base is not None:
        facts |= base.facts if base.name == name else _as_of(base)
    for key, attribute in _GPU_FIELDS.items():
        if key not in fields_set:
            continue
        value = getattr(entry, key)
        if value is None and key not in _GPU_OPTIONAL:
            raise document.error(
                "this field cannot be null", "gpus", name, key, hint="leave it out"
            )
        value = round(value) if key in _WHOLE_BYTES else value
        values[attribute] = value
        facts[attribute] = _fact(value, entry.source, entry.confidence, document)
    if base is None:
        missing = [key for key in _GPU_FIELDS if key not in fields_set and key not in _GPU_OPTIONAL]
        if missing:
            near = find_relatives(name, Catalog.default().gpus, entry.memory).gpus
            start = near[0].name if near else "L40S"
            raise document.error(
                f"a new GPU type needs {', '.join(missing)}",
                "gpus",
                name,
                hint=f"give them, or start from a known type with 'like: {start}'",
            )
        values = dict.fromkeys(_GPU_FIELDS.values()) | values
    same = base is not None and base.name == name
    aliases: tuple[str, ...] = base.aliases if base is not None and same else ()
    values |= {
        "name": name,
        "aliases": tuple(entry.aliases) if entry.aliases is not None else aliases,
        "facts": FrozenMap(facts),
        # What was measured of one GPU is a guess of another, which relatives make.
        "operators": FrozenMap(
            {**(base.operators if base is not None and same else {}), **(entry.operators or {})}
        ),
    }
    if base is not None and not same:
        values["like"] = base.like or base.name
    return replace(base, **values) if base is not None else GpuType(**values)  # type: ignore[arg-type]


def _as_of(base: GpuType) -> dict[str, Fact]:
    """The facts of another GPU as those of one like it: nobody has checked that they hold."""
    return {
        field: Fact(
            fact.value,
            f"as {base.name}: {fact.source}",
            "medium" if fact.confidence == "high" else fact.confidence,
        )
        for field, fact in base.facts.items()
    }


def _fact(
    value: object, source: str | None, confidence: Confidence | None, document: Document
) -> Fact:
    shown = value if isinstance(value, int | float | str | bool | None) else str(value)
    return Fact(shown, source or document.name, confidence or "medium")


def _interconnects(catalog: Catalog, document: Document) -> dict[str, Interconnect]:
    joints = dict(catalog.interconnects)
    for name, entry in (document.overlay.interconnects or {}).items():
        base = joints.get(name)
        if entry.like is not None:
            with document.at("interconnects", name, "like"):
                base = Catalog(interconnects=joints).interconnect(entry.like)
        with document.at("interconnects", name):
            slug(name)
        joints[name] = _interconnect(name, entry, base, document)
    return joints


def _interconnect(
    name: str, entry: InterconnectEntry, base: Interconnect | None, document: Document
) -> Interconnect:
    if base is None and entry.kind is None:
        raise document.error(
            "a new interconnect needs its kind",
            "interconnects",
            name,
            hint="add 'kind: nvlink' or 'kind: pcie', or start from a known one with 'like: pcie4'",
        )
    start = base or Interconnect(entry.kind or "none", None)
    costs, facts = dict(start.allreduce), dict(start.facts)
    for count, row in (entry.allreduce or {}).items():
        if count < 2:
            raise document.error(
                "an all-reduce needs two GPUs or more", "interconnects", name, "allreduce", count
            )
        before = start.allreduce.get(count)
        # A row without p keeps the one it had.
        p = row.p if row.p is not None else 1.0 if before is None else before.p
        costs[count] = AllReduceCost(row.alpha_us, row.bus_bandwidth, p)
        parameters = ["alpha_us", "bus_bandwidth_bytes_per_s"]
        if before is None or row.p is not None:  # else it keeps its source with its value
            parameters.append("p")
        for key in parameters:
            value = getattr(costs[count], key)
            facts[f"allreduce.{count}.{key}"] = _fact(
                value, row.source or entry.source, row.confidence or entry.confidence, document
            )
    fields_set = entry.model_fields_set
    p2p: dict[str, float | None] = {}
    for key, attribute in (
        ("p2p_bandwidth", "p2p_bandwidth_bytes_per_s"),
        ("p2p_latency", "p2p_latency_s"),
    ):
        p2p[attribute] = getattr(entry, key) if key in fields_set else getattr(start, attribute)
        if key in fields_set:
            facts[attribute] = _fact(p2p[attribute], entry.source, entry.confidence, document)
    return Interconnect(
        kind=entry.kind or start.kind,
        generation=entry.generation if "generation" in fields_set else start.generation,
        allreduce=costs,
        name=name,
        p2p_bandwidth_bytes_per_s=p2p["p2p_bandwidth_bytes_per_s"],
        p2p_latency_s=p2p["p2p_latency_s"],
        facts=FrozenMap(facts),
    )


# Servers


def _server(catalog: Catalog, document: Document, i: int, entry: ServerEntry) -> MeasuredServer:
    with document.at("servers", i, "node"):
        gpu, tp = parse_node_type(entry.node)
        kind = catalog.gpu(gpu)
    if kind.part_of is not None:
        raise document.error(
            "a server on a share of a GPU says nothing of others",
            "servers",
            i,
            "node",
            hint=f"measure it on a whole {kind.whole.name}",
        )
    with document.at("servers", i, "model"):
        model = catalog.model(entry.model)
    engine, _, version = entry.engine.partition("@")
    return MeasuredServer(
        model=model.name,
        spec=model.llm,
        gpu=kind.name,
        tp=tp,
        engine=engine,
        version=version or None,
        date=entry.date,
        compute=entry.compute,
        memory=entry.memory,
        launch=entry.launch,
        step_s=entry.step,
        sequence_s=entry.sequence,
        request_s=entry.request,
        tokenize_s=entry.tokenize,
        stream_s=entry.stream,
        error=entry.error,
        first_token_error=entry.first_token_error,
    )


# Prices and links


def _price(catalog: Catalog, document: Document, i: int, entry: PriceEntry) -> Price:
    with document.at("prices", i, "node"):
        gpu, count = parse_node_type(entry.node)
        node_type = f"{catalog.gpu(gpu).name}:{count}"
    # One that is not on offer only takes a machine off the list.
    if entry.offered and entry.usd_per_hour is None and entry.spot is None:
        raise document.error(
            "a machine on offer needs a price",
            "prices",
            i,
            hint="add 'usd_per_hour: $1.2/h' or 'spot:'",
        )
    return Price(
        cloud=entry.cloud,
        region=entry.region,
        node_type=node_type,
        instance=entry.instance,
        usd_per_hour=entry.usd_per_hour,
        spot_usd_per_hour=None
        if entry.spot is None
        else SpotPrice(entry.spot, entry.spot, entry.spot),
        zones=entry.zones,
        offered=entry.offered,
        retired=not entry.offered,
        snapshot=entry.snapshot,
        vcpus=entry.vcpus,
        memory_gib=entry.memory_gib,
        note=entry.note,
    )


def _links(catalog: Catalog, document: Document) -> LinkTable:
    table, entry = catalog.links, document.overlay.links
    if entry is None:
        return table
    facts = dict(table.facts)
    nics, region_nics = dict(table.nics), dict(table.region_nics)
    if entry.in_region is not None and entry.in_region.bandwidth is not None:
        # A network someone describes is theirs: the interfaces of cloud machines no longer apply.
        nics, region_nics = {}, {}
    for node, bandwidth in (entry.nics or {}).items():
        with document.at("links", "nics", node):
            gpu, count = parse_node_type(node)
            canonical = f"{catalog.gpu(gpu).name}:{count}"
        nics[canonical] = bandwidth
        # It holds everywhere, whatever the catalog says of one region.
        for at in [at for at in region_nics if at[1] == canonical]:
            del region_nics[at]
            facts.pop(f"nics.{at[0]}.{canonical}", None)
        facts[f"nics.{canonical}"] = _fact(bandwidth, None, None, document)
    in_region = _apply_entry(table.in_region, entry.in_region)
    between = _apply_entry(table.between_regions, entry.between_regions)
    for name, link, change in (
        ("in_region", in_region, entry.in_region),
        ("between_regions", between, entry.between_regions),
    ):
        if change is not None and change.bandwidth is not None:
            value = link.bandwidth_bytes_per_s
            facts[f"{name}.bandwidth_bytes_per_s"] = _fact(value, None, None, document)
        if change is not None and change.latency is not None:
            facts[f"{name}.latency_s"] = _fact(link.latency_s, None, None, document)
    table = replace(
        table,
        in_region=in_region,
        between_regions=between,
        nics=nics,
        region_nics=region_nics,
        groups={**table.groups, **_groups(catalog, entry, document)},
        facts=facts,
    )
    return table.with_pairs(
        regions=_pairs(entry.regions or [], table, document, "regions"),
        nodes=_pairs(entry.nodes or [], table, document, "nodes"),
    )


def _groups(catalog: Catalog, entry: LinksEntry, document: Document) -> dict[str, GpuGroups]:
    found = {}
    for node, row in (entry.groups or {}).items():
        with document.at("links", "groups", node):
            gpu, count = parse_node_type(node)
            canonical = f"{catalog.gpu(gpu).name}:{count}"
        # Slices are laid at multiples of their size: only then does none reach over the end of a group.
        if count % row.gpus or row.gpus & (row.gpus - 1) or row.gpus == count:
            raise document.error(
                f"{node} has no groups of {row.gpus} GPUs",
                "links",
                "groups",
                node,
                hint="1, 2, 4, ... GPUs each, and two groups or more",
            )
        found[canonical] = GpuGroups(row.gpus, Link(row.bandwidth, row.latency))
    return found


def _pairs(
    rows: list[PairEntry], table: LinkTable, document: Document, kind: str
) -> dict[tuple[str, str], Link]:
    links: dict[tuple[str, str], Link] = {}
    for i, row in enumerate(rows):
        a, b = row.between
        if kind == "nodes" and (row.bandwidth is None or row.latency is None):
            raise document.error(
                "a link between two nodes needs bandwidth and latency", "links", kind, i
            )
        # Pairs of regions begin with what was known of them, so that a row may give one value only.
        base = table.between(a, b) if kind == "regions" else table.in_region
        links[a, b] = _apply_entry(base, row)
        if not row.one_way:
            links[b, a] = _apply_entry(base, row)
    return links


def _apply_entry(base: Link, entry: LinkEntry | None) -> Link:
    if entry is None:
        return base
    return Link(
        base.bandwidth_bytes_per_s if entry.bandwidth is None else entry.bandwidth,
        base.latency_s if entry.latency is None else entry.latency,
    )
