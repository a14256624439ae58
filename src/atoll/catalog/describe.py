"""Every fact of a catalog entry as rows of field, value, source and confidence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from atoll.catalog.catalog import Catalog
from atoll.catalog.facts import Confidence, Fact, Scalar
from atoll.catalog.gpus import GpuType
from atoll.catalog.media import EncoderSpec
from atoll.catalog.models import ComponentSpec, ModelSpec
from atoll.catalog.nodes import Interconnect, NodeType
from atoll.catalog.relatives import find_relatives
from atoll.catalog.transformer import DeltaSpec, DType, MlaSpec, MoeSpec, TransformerSpec
from atoll.core.errors import UnknownNameError

COMPUTED = "computed from the shapes"
_NO_FACTS = (
    "name",
    "aliases",
    "facts",
    "like",
    "note",
    "part_of",
    "shares",
    "servers",
    "operators",
)
UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class FactRow:
    """One line of a description; `source` and `confidence` are None for names and the like."""

    field: str
    value: Scalar
    source: str | None = None
    confidence: Confidence | None = None


@dataclass(frozen=True, slots=True)
class Description:
    """Everything the catalog knows about one name."""

    kind: str
    name: str
    rows: tuple[FactRow, ...]


def describe(catalog: Catalog, name: str) -> Description:
    """Everything known about a GPU type, node type, model, interconnect, or "links"."""
    if name == "links":
        facts = catalog.links.facts.items()
        rows = (FactRow(key, fact.value, fact.source, fact.confidence) for key, fact in facts)
        return Description("links", name, tuple(rows))
    if ":" in name:
        node = catalog.node(name)
        return Description("node", node.id, tuple(_node_rows(node)))
    for kind, find in (
        ("gpu", catalog.gpu),
        ("model", catalog.model),
        ("interconnect", catalog.interconnect),
    ):
        try:
            thing = find(name)
        except UnknownNameError as error:
            if error.kind != kind:  # the model exists, its "@precision" does not
                raise
            continue
        return Description(kind, thing.name, tuple(_rows(thing)))
    known = [*catalog.gpus, *catalog.models, *catalog.interconnects, "links"]
    near = tuple(gpu.name for gpu in find_relatives(name, catalog.gpus).gpus)
    raise UnknownNameError("name in the catalog", name, known, nearest=near)


def _rows(entry: GpuType | ModelSpec | Interconnect) -> Iterator[FactRow]:
    if isinstance(entry, GpuType):
        return _gpu_rows(entry)
    return _model_rows(entry) if isinstance(entry, ModelSpec) else _interconnect_rows(entry)


def _gpu_rows(gpu: GpuType) -> Iterator[FactRow]:
    yield FactRow("aliases", ", ".join(gpu.aliases) or None)
    if gpu.like is not None:
        yield FactRow("like", gpu.like)
    if gpu.note is not None:
        yield FactRow("note", gpu.note)
    for field in fields(gpu):
        if field.name in _NO_FACTS:
            continue
        if field.name == "compute_share" and field.name not in gpu.facts:
            continue
        value: Scalar = getattr(gpu, field.name)
        yield _with_source(field.name, value, gpu.facts)


def _node_rows(node: NodeType) -> Iterator[FactRow]:
    total = f"{node.count} x {node.gpu.name}"
    yield FactRow("gpu", node.gpu.name)
    yield FactRow("count", node.count)
    yield FactRow("memory_bytes", node.memory_bytes, total)
    yield FactRow("bandwidth_bytes_per_s", node.bandwidth_bytes_per_s, total)
    yield FactRow("fp16_tflops", node.fp16_tflops, total)
    yield FactRow("fp8_tflops", node.fp8_tflops, total)
    yield FactRow("fp4_tflops", node.fp4_tflops, total)
    yield FactRow("tdp_w", node.tdp_w, total)
    yield FactRow("interconnect", node.interconnect.name)
    joint = node.interconnect
    if node.count > 1 and joint.allreduce:
        facts = joint.facts
        count = joint.measured_count(node.count)
        cost = joint.allreduce[count]
        for key, value in (
            ("alpha_us", cost.alpha_us),
            ("bus_bandwidth_bytes_per_s", cost.bus_bandwidth_bytes_per_s),
            ("p", cost.p),
        ):
            row = _with_source(f"allreduce.{count}.{key}", value, facts)
            yield FactRow(f"allreduce_{key}", row.value, row.source, row.confidence)
        yield _with_source("p2p_bandwidth_bytes_per_s", joint.p2p_bandwidth_bytes_per_s, facts)
        yield _with_source("p2p_latency_s", joint.p2p_latency_s, facts)


def _interconnect_rows(joint: Interconnect) -> Iterator[FactRow]:
    yield FactRow("kind", joint.kind)
    yield FactRow("generation", joint.generation)
    for key, fact in joint.facts.items():
        yield FactRow(key, fact.value, fact.source, fact.confidence)


def _serving_rows(model: ModelSpec) -> Iterator[FactRow]:
    """Weights in other precisions, and what reads the model's answers."""
    for key, each in model.checkpoints.items():
        yield FactRow(
            f"checkpoints.{key}", each.describe(), "repository on Hugging Face's hub", "medium"
        )
    for key in ("tool_parser", "reasoning_parser"):
        value: str | None = getattr(model, key)
        if value is not None:
            yield FactRow(key, value, "vLLM's documentation", "medium")


def _model_rows(model: ModelSpec) -> Iterator[FactRow]:
    yield FactRow("aliases", ", ".join(model.aliases) or None)
    yield FactRow("hf_id", model.hf_id)
    if model.revision is not None:
        yield FactRow(
            "revision", model.revision, "several public copies of the repository", "medium"
        )
    yield from _serving_rows(model)
    yield FactRow("architecture", model.architecture, model.source, model.confidence)
    yield FactRow("note", model.note)
    edges = ", ".join(f"{edge.src} -> {edge.dst}" for edge in model.graph.edges)
    yield FactRow("graph", edges or model.graph.components[0].name)
    for key in ("total_params", "active_params", "weight_bytes"):
        value: int | float | None = getattr(model, key)
        if value is None:
            yield FactRow(key, UNKNOWN, "no public source")
        else:
            yield FactRow(key, value, COMPUTED, model.confidence)
    for key, fact in model.facts.items():
        if key.startswith("reference."):
            yield FactRow(key, fact.value, fact.source, fact.confidence)
    for name, spec in model.components.items():
        for key, shape in shapes(spec).items():
            row = _with_source(f"{name}.{key}", shape, model.facts)
            if row.source is None:
                row = FactRow(row.field, row.value, model.source, model.confidence)
            yield row
        for key, derived in counts(spec).items():
            yield FactRow(f"{name}.{key}", derived, COMPUTED, model.confidence)
        if not isinstance(spec, TransformerSpec):
            for key in spec.unknown:
                yield FactRow(f"{name}.{key}", UNKNOWN, "no public source")


def _with_source(name: str, value: Scalar, facts: Mapping[str, Fact]) -> FactRow:
    fact = facts.get(name)
    if fact is None:
        return FactRow(name, value)
    return FactRow(name, value, fact.source, fact.confidence)


def shapes(spec: ComponentSpec) -> dict[str, Scalar]:
    """The public fields of a component that are set, as plain values."""
    out: dict[str, Scalar] = {}
    for field in fields(spec):
        value = getattr(spec, field.name)
        if value is None or field.name.startswith("_") or field.name == "extra_params":
            continue
        if isinstance(value, MoeSpec | MlaSpec | DeltaSpec):
            parts = (f.name for f in fields(value) if f.name != "copies")
            out |= {f"{field.name}.{part}": _plain(getattr(value, part)) for part in parts}
        elif field.name == "windows":
            out["windows"] = _windows(value)
        else:
            out[field.name] = _plain(value)
    return out


def counts(spec: ComponentSpec) -> dict[str, Scalar]:
    """Figures computed from the shapes: parameters, bytes of weights, bytes of KV cache."""
    if isinstance(spec, TransformerSpec):
        found = {
            "total_params": spec.total_params,
            "active_params": spec.active_params,
            "weight_bytes": spec.weight_bytes,
            "kv_bytes_per_token": spec.kv_bytes_per_token,
        }
        state = spec.state_bytes_per_sequence
        return {**found, "state_bytes_per_sequence": state} if state else {**found}
    if isinstance(spec, EncoderSpec):
        totals = {"total_params": spec.total_params, "weight_bytes": spec.weight_bytes}
    else:
        totals = {"weight_bytes": spec.weight_bytes}
    return {key: value for key, value in totals.items() if value is not None}


def _plain(value: object) -> Scalar:
    if isinstance(value, DType):
        return f"{value.name} ({value.bits_per_weight:g} bit)"
    if isinstance(value, tuple | frozenset):
        return (
            ", ".join(map(str, sorted(value) if isinstance(value, frozenset) else value)) or "none"
        )
    return value if isinstance(value, int | float | str | bool | None) else str(value)


def _windows(windows: tuple[int | None, ...]) -> str:
    sliding = [i for i, window in enumerate(windows) if window]
    if not sliding:
        states = windows.count(0)
        rest = f"{len(windows) - states} of {len(windows)} layers, a state in {states}"
        return f"full attention in {rest}" if states else "full attention in every layer"
    sizes = sorted({window for window in windows if window})
    layers = ", ".join(map(str, sliding[:4])) + (", ..." if len(sliding) > 4 else "")
    size = "/".join(map(str, sizes))
    return f"{size} tokens in {len(sliding)} of {len(windows)} layers ({layers})"
