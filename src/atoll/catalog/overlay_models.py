"""The models section of an overlay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from atoll.catalog.catalog import Catalog
from atoll.catalog.checkpoints import Checkpoint, read_checkpoint
from atoll.catalog.document import Document
from atoll.catalog.facts import Fact
from atoll.catalog.frozenmap import FrozenMap
from atoll.catalog.hf_config import model_from_config
from atoll.catalog.models import ModelSpec
from atoll.catalog.name_lookup import fold, index_names
from atoll.catalog.transformer import DType, MoeSpec, TransformerSpec, dtype_of
from atoll.core.errors import InputError, UnknownNameError
from atoll.core.graph import ComponentGraph
from atoll.core.ids import slug

if TYPE_CHECKING:
    from atoll.catalog.overlay_schema import ModelEntry

_OTHER = ("windows", "moe", "mla", "delta", "wide_layers")
_SHAPES = tuple(
    f.name
    for f in fields(TransformerSpec)
    if f.init and f.name not in _OTHER and not f.name.endswith("dtype")
)
_DTYPES = tuple(f.name for f in fields(TransformerSpec) if f.init and f.name.endswith("dtype"))
_REQUIRED = ("layers", "hidden", "heads", "intermediate", "vocab", "max_context")


def overlay_models(catalog: Catalog, document: Document) -> dict[str, ModelSpec]:
    """The catalog's models with the overlay's added or changed."""
    models = dict(catalog.models)
    for name, entry in (document.overlay.models or {}).items():
        index = index_names((model.name, model.aliases) for model in models.values())
        known = models.get(index.get(fold(name), ""))
        with document.at("models", name):
            canonical = slug(name) if known is None else known.name
            base = _base(canonical, entry, known, models, document)
            models[canonical] = _model(canonical, entry, base, known, document)
    return models


def _base(
    name: str,
    entry: ModelEntry,
    known: ModelSpec | None,
    models: Mapping[str, ModelSpec],
    document: Document,
) -> ModelSpec | None:
    """The model that the entry starts from: a config file, another model, or the one of the same name."""
    if entry.like is not None and entry.hf_config is not None:
        raise document.error(
            "give 'like' or 'hf_config', not both", "models", name, hint="remove one of them"
        )
    if entry.hf_config is not None:
        with document.at("models", name, "hf_config"):
            if isinstance(entry.hf_config, str):
                return model_from_config(document.folder / entry.hf_config, name)
            return model_from_config(entry.hf_config, name)
    if entry.like is not None:
        with document.at("models", name, "like"):
            return Catalog(models=models).model(entry.like)
    return known


def _model(
    name: str,
    entry: ModelEntry,
    base: ModelSpec | None,
    known: ModelSpec | None,
    document: Document,
) -> ModelSpec:
    fields_set = entry.model_fields_set
    if base is None:
        missing = [key for key in _REQUIRED if getattr(entry, key) is None]
        if missing:
            raise document.error(
                f"a new model needs {', '.join(missing)}",
                "models",
                name,
                hint="give them, or 'hf_config: PATH', or 'like: NAME' of a known model",
            )
        base = ModelSpec(
            name=name,
            aliases=(),
            hf_id=None,
            architecture="custom",
            graph=ComponentGraph.single_llm(),
            components={"llm": _new_llm(entry)},
            source=document.name,
            confidence="medium",
        )
    llm = _apply_to_llm(base, entry)
    facts = dict(base.facts)
    components = dict(base.components)
    if llm is not None:
        components[base.llm_name] = llm
        if llm != base.llm:
            # The published totals were those of the shapes as they were.
            facts = {key: fact for key, fact in facts.items() if not key.startswith("reference.")}
            facts |= _changes(base, llm, entry, document)
    aliases = known.aliases if known is not None else ()
    same = known is not None and base is known
    return ModelSpec(
        name=name,
        aliases=tuple(entry.aliases) if entry.aliases is not None else aliases,
        hf_id=entry.hf_id if "hf_id" in fields_set else base.hf_id,
        architecture=entry.architecture or base.architecture,
        graph=base.graph,
        components=components,
        source=base.source if same or entry.source is None else entry.source,
        confidence=entry.confidence or base.confidence,
        note=entry.note if "note" in fields_set else base.note,
        facts=FrozenMap(facts),
        checkpoints={**base.checkpoints, **_checkpoints(entry)},
        revision=entry.revision if {"hf_id", "revision"} & fields_set else base.revision,
        tool_parser=entry.tool_parser or base.tool_parser,
        reasoning_parser=entry.reasoning_parser or base.reasoning_parser,
    )


def _checkpoints(entry: ModelEntry) -> dict[str, Checkpoint]:
    return {
        precision: read_checkpoint(precision, given.model_dump(exclude_defaults=True))
        for precision, given in (entry.checkpoints or {}).items()
    }


def _changes(
    base: ModelSpec, llm: TransformerSpec, entry: ModelEntry, document: Document
) -> dict[str, Fact]:
    """A fact for every shape of the llm that the overlay changed."""
    source, trust = entry.source or document.name, entry.confidence or "medium"
    changed: dict[str, Fact] = {}
    for key in (*_SHAPES, *_DTYPES, "moe", "windows"):
        value = getattr(llm, key)
        if value != getattr(base.llm, key):
            shown = value if isinstance(value, int | bool) else getattr(value, "name", str(value))
            changed[f"{base.llm_name}.{key}"] = Fact(shown, source, trust)
    return changed


def _new_llm(entry: ModelEntry) -> TransformerSpec:
    values = {key: getattr(entry, key) for key in _SHAPES if getattr(entry, key) is not None}
    heads, hidden = values["heads"], values["hidden"]
    values.setdefault("kv_heads", heads)
    values.setdefault("head_dim", max(1, hidden // heads))
    return TransformerSpec(**values)


def _apply_to_llm(base: ModelSpec, entry: ModelEntry) -> TransformerSpec | None:
    """The llm with the entry's shapes and dtypes; None for a model without one."""
    keys = (*_SHAPES, *_DTYPES, "moe", "windows", "sliding", "weights")
    llm_fields = [key for key in keys if key in entry.model_fields_set]
    if not base.has_llm and not llm_fields:
        return None
    llm = base.llm
    values: dict[str, object] = {
        key: getattr(entry, key) for key in _SHAPES if getattr(entry, key) is not None
    }
    layers = entry.layers or llm.layers
    if entry.windows is not None:
        values["windows"] = tuple(entry.windows)
    elif entry.sliding is not None:
        rule = entry.sliding
        values["windows"] = tuple(
            rule.size if i % rule.every == rule.offset % rule.every else None for i in range(layers)
        )
    elif layers != llm.layers and set(llm.windows) == {None}:
        values["windows"] = ()
    if entry.moe is not None:
        values["moe"] = _moe(llm.moe, entry)
    if entry.weights is not None:
        weights = _dtype("weights", entry.weights)
        values |= {f"{group}_dtype": weights for group in ("attention", "mlp", "expert")}
    for key in _DTYPES:
        name = getattr(entry, key)
        if name is not None:
            values[key] = _dtype(key, name)
    changed = replace(llm, **values)  # type: ignore[arg-type]
    if entry.kv_dtype is None:
        return changed
    try:
        return changed.with_kv_dtype(entry.kv_dtype)
    except UnknownNameError as error:
        raise InputError(error.message, field="kv_dtype", hint="use a known dtype") from None


def _dtype(field: str, name: str) -> DType:
    try:
        return dtype_of(name)
    except UnknownNameError as error:
        raise InputError(error.message, field=field, hint="use a known dtype") from None


def _moe(base: MoeSpec | None, entry: ModelEntry) -> MoeSpec:
    assert entry.moe is not None
    moe_fields = {key: value for key, value in entry.moe.model_dump().items() if value is not None}
    if "dense_layers" in moe_fields:
        moe_fields["dense_layers"] = frozenset(moe_fields["dense_layers"])
    if base is not None:
        return replace(base, **moe_fields)
    missing = [key for key in ("experts", "top_k", "intermediate") if key not in moe_fields]
    if missing:
        raise InputError(f"new experts need {', '.join(missing)}", field="moe", hint="add them")
    return MoeSpec(**moe_fields)
