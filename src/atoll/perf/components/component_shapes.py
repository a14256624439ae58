"""Parts of a model as the performance model sees them: transformers, and bytes of weights."""

from __future__ import annotations

from functools import lru_cache

from atoll.catalog.media import EncoderSpec, GeneratorSpec
from atoll.catalog.models import ModelSpec
from atoll.catalog.transformer import TransformerSpec
from atoll.core.errors import InputError
from atoll.perf.components.class_loads import component_of

_TALKER_CONTEXT = 32_768
"""Tokens that a talker can look back on where its configuration does not say."""


def autoregressive_spec(model: ModelSpec, part: str) -> TransformerSpec | None:
    """Return the transformer that makes tokens (or codes) one by one at a part; None where none does."""
    name = component_of(part)
    spec = model.components[name]
    if isinstance(spec, TransformerSpec):
        return spec if model.has_llm and name == model.llm_name else None
    if isinstance(spec, GeneratorSpec) and spec.kind == "autoregressive":
        return talker_spec(model, name)
    return None


@lru_cache(maxsize=64)
def talker_spec(model: ModelSpec, name: str) -> TransformerSpec:
    """Return a talker as a transformer: shapes as published, `head_dim` the hidden size over heads if absent.

    A talker has one code per step in its vocabulary; what projects the llm's hidden states into it counts as
    no more than its input embedding.
    """
    spec = model.components[name]
    assert isinstance(spec, GeneratorSpec)
    missing = [
        field
        for field in ("layers", "hidden", "heads", "intermediate", "vocab")
        if getattr(spec, field) is None
    ]
    if missing:
        raise InputError(
            f"the shapes of {name} of model {model.name} are not public: {', '.join(missing)}",
            field="model",
            hint="give a measured rate for it",
        )
    assert spec.layers is not None
    assert spec.hidden is not None
    assert spec.heads is not None
    assert spec.intermediate is not None
    assert spec.vocab is not None
    return TransformerSpec(
        layers=spec.layers,
        hidden=spec.hidden,
        heads=spec.heads,
        kv_heads=spec.kv_heads or spec.heads,
        head_dim=spec.head_dim or max(1, spec.hidden // spec.heads),
        intermediate=spec.intermediate,
        vocab=spec.vocab,
        max_context=max(spec.max_context or 0, _TALKER_CONTEXT),
        moe=spec.moe,
        attention_dtype=spec.dtype,
        mlp_dtype=spec.dtype,
        expert_dtype=spec.dtype,
        embedding_dtype=spec.dtype,
    )


def predictor_spec(spec: GeneratorSpec) -> TransformerSpec | None:
    """Return the small transformer that makes a frame's further codebooks; None where there is only one."""
    if not spec.predictor_layers or not spec.codebooks or spec.codebooks < 2:
        return None
    assert spec.hidden is not None
    assert spec.heads is not None
    return TransformerSpec(
        layers=spec.predictor_layers,
        hidden=spec.hidden,
        heads=spec.heads,
        kv_heads=spec.predictor_kv_heads or spec.heads,
        head_dim=spec.head_dim or max(1, spec.hidden // spec.heads),
        intermediate=spec.predictor_intermediate or 3 * spec.hidden,
        vocab=spec.codebook_size or spec.vocab or 2048,
        max_context=max(2, spec.codebooks),
        attention_dtype=spec.dtype,
        mlp_dtype=spec.dtype,
        embedding_dtype=spec.dtype,
    )


def component_weight_bytes(model: ModelSpec, name: str) -> float:
    """Return the bytes of the weights of one component, counted from its shapes where no total is public.

    Where a projector's widths are not public it is taken to be one matrix.
    """
    spec = model.components[name]
    if isinstance(spec, TransformerSpec):
        return spec.weight_bytes
    if isinstance(spec, EncoderSpec):
        if spec.weight_bytes is not None:
            return spec.weight_bytes
        projector = spec.projector_params
        if projector is None:
            projector = spec.hidden * spec.merge**2 * spec.output_dim
        return (
            spec.layers_weight_bytes + (spec.stem_params + projector) * spec.dtype.bytes_per_weight
        )
    if spec.kind == "autoregressive":
        size = talker_spec(model, name).weight_bytes
        predictor = predictor_spec(spec)
        if predictor is not None and spec.codebooks:
            # Every further codebook has its own embedding and output matrix.
            outer = predictor.embedding_bytes + predictor.head_bytes
            size += predictor.weight_bytes + (spec.codebooks - 2) * outer
        return size
    if spec.weight_bytes is not None:
        return spec.weight_bytes
    if spec.layers and spec.hidden:
        width = spec.intermediate or 4 * spec.hidden
        return (
            spec.layers
            * (10 * spec.hidden**2 + 2 * spec.hidden * width)
            * spec.dtype.bytes_per_weight
        )
    return 0.0
