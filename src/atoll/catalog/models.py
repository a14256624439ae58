"""Models: a graph of components, each with its shapes, and where the shapes come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import cast

from atoll.catalog.checkpoints import METHODS, Checkpoint, read_checkpoint
from atoll.catalog.dtypes import GGUF, GGUF_OUTER
from atoll.catalog.facts import Confidence, Fact, Scalar
from atoll.catalog.frozenmap import FrozenMap
from atoll.catalog.media import EncoderSpec, GeneratorSpec
from atoll.catalog.resources import Table, data_yaml, section
from atoll.catalog.transformer import (
    DeltaSpec,
    DType,
    MlaSpec,
    MoeSpec,
    TransformerSpec,
    dtype_of,
)
from atoll.core.errors import InputError, shorten
from atoll.core.graph import Component, ComponentGraph, ComponentKind, Edge

__all__ = [
    "Checkpoint",
    "ComponentSpec",
    "DType",
    "DeltaSpec",
    "EncoderSpec",
    "GeneratorSpec",
    "MlaSpec",
    "ModelSpec",
    "MoeSpec",
    "TransformerSpec",
    "apply_variant",
    "default_models",
    "dtype_of",
]

ComponentSpec = TransformerSpec | EncoderSpec | GeneratorSpec
_SHAPES: dict[ComponentKind, type[ComponentSpec]] = {
    ComponentKind.ENCODER: EncoderSpec,
    ComponentKind.LLM: TransformerSpec,
    ComponentKind.GENERATOR: GeneratorSpec,
}
"""Shape of every kind of component; `models.yaml` lists components under the kind's plural."""


_AT_LOAD = ("fp8",)
"""Formats that engines turn weights of 16 bits into as they load them, layer by layer (vLLM from 2026 on)."""


@dataclass(frozen=True)
class ModelSpec:
    """A model as the planner sees it: what feeds what, and the shapes of every part.

    `source` and `confidence` hold for every shape that `facts` does not list; `facts` also has the
    totals, computed elsewhere, that the shapes are checked against. `hf_id` is the repository of the weights
    in the model's own precision, at `revision` where one is known; `checkpoints` are those in others by the
    format's name, and `precision` is the one that a variant asks for. `tool_parser` and `reasoning_parser`
    read its answers, by vLLM's names.
    """

    name: str
    aliases: tuple[str, ...]
    hf_id: str | None
    architecture: str
    graph: ComponentGraph
    components: Mapping[str, ComponentSpec]
    source: str = "unstated"
    confidence: Confidence = "low"
    note: str | None = None
    facts: Mapping[str, Fact] = field(default_factory=FrozenMap, compare=False, repr=False)
    checkpoints: Mapping[str, Checkpoint] = field(default_factory=FrozenMap)
    precision: str | None = None
    revision: str | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "components", FrozenMap(self.components))
        object.__setattr__(self, "checkpoints", FrozenMap(self.checkpoints))
        named = {component.name for component in self.graph.components}
        if named != set(self.components):
            raise InputError(
                f"the graph names {sorted(named)}, the shapes {sorted(self.components)}",
                field=f"models.{self.name}.components",
            )

    @property
    def checkpoint(self) -> Checkpoint | None:
        """Weights of the model in its precision; None where no source is known.

        Weights of 16 bits become fp8 as engines load them, where nobody published them so.
        """
        published = self.checkpoints.get(self.precision or "")
        if published is not None:
            return published
        at_load = self.precision if self.precision in _AT_LOAD else None
        if self.hf_id is None or self.precision != at_load:
            return None
        method = at_load or self.own_format
        return Checkpoint(self.hf_id, self.revision, method, quantization=at_load)

    @property
    def own_format(self) -> str | None:
        """Format of most of the weights; None where there is no llm."""
        if not self.has_llm:
            return None
        return (self.llm.expert_dtype if self.llm.moe else self.llm.mlp_dtype).name

    @property
    def gguf(self) -> Checkpoint | None:
        """GGUF files of the model in its precision, as `llama-server -hf` names them; None: none are known.

        Those of its own precision are among `checkpoints` as "gguf".
        """
        is_gguf = self.precision is None or self.precision in GGUF_OUTER
        return self.checkpoints.get(self.precision or GGUF) if is_gguf else None

    @property
    def has_llm(self) -> bool:
        """Whether an llm is among the components (a text-to-image model has none)."""
        return any(c.kind is ComponentKind.LLM for c in self.graph.components)

    @property
    def llm_name(self) -> str:
        """The name of the main llm component."""
        for component in self.graph.components:
            if component.kind is ComponentKind.LLM:
                return component.name
        parts = ", ".join(component.name for component in self.graph.components)
        raise InputError(f"model {self.name} has no llm, its components are {parts}")

    @property
    def llm(self) -> TransformerSpec:
        """The shapes of the main llm component."""
        spec = self.components[self.llm_name]
        assert isinstance(spec, TransformerSpec)
        return spec

    @property
    def total_params(self) -> int | None:
        """Parameters of all components, None where a component's count is not public."""
        counts = [
            spec.params if isinstance(spec, GeneratorSpec) else spec.total_params
            for spec in self.components.values()
        ]
        return None if None in counts else sum(cast("list[int]", counts))

    @property
    def active_params(self) -> int | None:
        """Parameters one token uses with every component counted, None where not public."""
        total = self.total_params
        if total is None or not self.has_llm:
            return total
        return total - self.llm.total_params + self.llm.active_params

    @property
    def weight_bytes(self) -> float | None:
        """Bytes of the weights of all components, None where a component's count is not public."""
        sizes = [spec.weight_bytes for spec in self.components.values()]
        return None if None in sizes else sum(cast("list[float]", sizes))

    def with_weights(self, dtype: str | DType) -> ModelSpec:
        """The model with its llm's matrices stored in `dtype`; other components stay."""
        return self._with_llm(self.llm.with_weights(dtype))

    def with_kv_dtype(self, dtype: str | DType) -> ModelSpec:
        """The model with its llm's KV cache stored in `dtype`."""
        return self._with_llm(self.llm.with_kv_dtype(dtype))

    def _with_llm(self, spec: TransformerSpec) -> ModelSpec:
        return replace(self, components={**self.components, self.llm_name: spec})


def apply_variant(model: ModelSpec, variant: str) -> ModelSpec:
    """The model in another precision: "fp8", "int4,kv=fp8", "kv=fp8"; named MODEL@variant."""
    changed = model
    for part in variant.split(","):
        key, equals, value = part.strip().partition("=")
        if equals and key == "kv":
            changed = changed.with_kv_dtype(value)
        elif not equals or key == "weights":
            changed = _with_precision(changed, value if equals else key)
        else:
            raise InputError(
                f"{shorten(part.strip())!r} is no variant of a model",
                field=f"{model.name}@{variant}",
                hint="write MODEL@fp8, MODEL@int4,kv=fp8 or MODEL@kv=fp8",
            )
    clean = ",".join(part.strip() for part in variant.split(","))
    facts = {k: f for k, f in model.facts.items() if not k.startswith("reference.weight_bytes")}
    for group in ("attention", "mlp", "expert", "embedding", "kv"):
        dtype: DType = getattr(changed.llm, f"{group}_dtype")
        if dtype != getattr(model.llm, f"{group}_dtype"):
            source = f"asked for by the name {model.name}@{clean}"
            facts[f"{model.llm_name}.{group}_dtype"] = Fact(dtype.name, source, "high")
    return replace(
        changed,
        name=f"{model.name}@{clean}",
        aliases=(),
        note=f"{model.name} in another precision",
        facts=FrozenMap(facts),
    )


def _with_precision(model: ModelSpec, dtype: str) -> ModelSpec:
    """The model with its weights in another format; experts alone may be in it as they were published."""
    if dtype == model.own_format:
        return model
    if dtype in model.checkpoints:
        stored = model.checkpoints[dtype].stored(model.llm, dtype)
        return replace(model._with_llm(stored), precision=dtype)
    # Only weights of 16 bits are turned into others as they are loaded.
    own = model.llm.mlp_dtype.name in ("bf16", "fp16")
    changed = model.with_weights(dtype)
    return replace(changed, precision=dtype, hf_id=model.hf_id if own else None)


@cache
def default_models() -> FrozenMap[str, ModelSpec]:
    """The models that ship with Atoll, by canonical name."""
    data = data_yaml("models.yaml")
    sources, models = section(data, "sources"), section(data, "models")
    return FrozenMap({name: _model(name, section(models, name), sources) for name in models})


def _model(name: str, entry: Table, sources: Table) -> ModelSpec:
    components: dict[str, ComponentSpec] = {}
    kinds: list[Component] = []
    for kind in _SHAPES:
        table = section(entry, f"{kind}s")
        for label in table:
            components[label] = _component(kind, section(table, label))
            kinds.append(Component(label, kind))
    edges = cast("list[list[str]]", entry.get("edges", []))
    source_key = str(entry["source"])
    source, confidence = (
        str(sources.get(source_key, source_key)),
        cast(Confidence, entry["confidence"]),
    )
    facts: dict[str, Fact] = {}
    for key, value in section(entry, "reference").items():
        facts[f"reference.{key}"] = Fact(cast(Scalar, value), _COMPUTED, confidence)
    for key, value in section(entry, "facts").items():
        fact_source, trust = cast("list[str]", value)
        facts[key] = Fact(
            _scalar(components, key),
            str(sources.get(fact_source, fact_source)),
            cast(Confidence, trust),
        )
    note = entry.get("note")
    return ModelSpec(
        name=name,
        aliases=tuple(str(alias) for alias in cast("list[object]", entry.get("aliases", []))),
        hf_id=cast("str | None", entry.get("hf_id")),
        architecture=str(entry["architecture"]),
        graph=ComponentGraph(tuple(kinds), tuple(Edge(src, dst) for src, dst in edges)),
        components=components,
        source=source,
        confidence=confidence,
        note=None if note is None else str(note),
        facts=FrozenMap(facts),
        checkpoints={
            precision: read_checkpoint(
                precision, given if isinstance(given, Mapping) else {"repository": given}
            )
            for precision, given in section(entry, "checkpoints").items()
        },
        revision=cast("str | None", entry.get("revision")),
        tool_parser=cast("str | None", entry.get("tool_parser")),
        reasoning_parser=cast("str | None", entry.get("reasoning_parser")),
    )


_COMPUTED = "computed from the published config by an independent script"


def _scalar(components: Mapping[str, ComponentSpec], key: str) -> Scalar:
    component, _, attribute = key.partition(".")
    value = getattr(components[component], attribute)
    return value if isinstance(value, int | float | str | bool | None) else str(value)


def _component(kind: ComponentKind, entry: Table) -> ComponentSpec:
    shape_of = entry.get("like")
    if isinstance(shape_of, str):
        models = section(data_yaml("models.yaml"), "models")
        entry = section(section(section(models, shape_of), "llms"), "llm")
        return _component(ComponentKind.LLM, entry)
    values: dict[str, object] = dict(entry)
    cls = _SHAPES[kind]
    if cls is TransformerSpec:
        _expand_windows(values)
        shared = values.pop("dtype", None)
        if shared is not None:
            for group in ("attention", "mlp", "expert", "embedding", "kv", "activation"):
                values.setdefault(f"{group}_dtype", shared)
    for item in fields(cls):
        value = values.get(item.name)
        if isinstance(value, list):
            values[item.name] = tuple(value)
        if item.name.endswith("dtype") and isinstance(value, str):
            values[item.name] = METHODS[value].dtype() if value in METHODS else dtype_of(value)
    moe, mla = values.get("moe"), values.get("mla")
    if isinstance(moe, dict):
        dense = frozenset(moe.get("dense_layers", ()))
        values["moe"] = MoeSpec(**{**moe, "dense_layers": dense})
    if isinstance(mla, dict):
        values["mla"] = MlaSpec(**mla)
    return cls(**values)  # type: ignore[arg-type]


def _expand_windows(values: dict[str, object]) -> None:
    """`windows: {size: 128, every: [2, 0]}` becomes one entry per layer, `delta` a set of layers."""
    layers = cast(int, values.get("layers", 0))
    windows, delta = values.get("windows"), values.get("delta")
    if isinstance(windows, dict):
        marked, size = _mark_layers(windows, layers), cast(int, windows["size"])
        values["windows"] = tuple(size if i in marked else None for i in range(layers))
    if isinstance(delta, dict):
        shapes = {key: value for key, value in delta.items() if key not in ("every", "but")}
        values["delta"] = DeltaSpec(layers=_mark_layers(delta, layers), **shapes)


def _mark_layers(rule: Table, layers: int) -> frozenset[int]:
    """The layers of `every: [period, first]`, or all but those of `but: [period, at]`."""
    left_out = "but" in rule
    period, at = cast("list[int]", rule["but" if left_out else "every"])
    return frozenset(i for i in range(layers) if (i % period == at) != left_out)
