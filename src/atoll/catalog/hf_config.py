"""Models from the `config.json` that lies beside every Hugging Face checkpoint.

Nothing is downloaded: give a file, a folder with a config.json in it, or the parsed mapping.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from atoll.catalog.fields import ConfigFields
from atoll.catalog.hf_parts import (
    read_chunks_but_every,
    read_delta_qwen,
    read_latent,
    read_moe_deepseek,
    read_moe_gpt_oss,
    read_moe_llama4,
    read_moe_mixtral,
    read_moe_qwen,
    read_vision_qwen25,
    read_window_above,
    read_window_alternating,
    read_window_but_every,
    read_window_everywhere,
)
from atoll.catalog.media import EncoderSpec
from atoll.catalog.models import ComponentSpec, ModelSpec
from atoll.catalog.name_lookup import printable
from atoll.catalog.quantization import read_quantization
from atoll.catalog.transformer import (
    BF16,
    FP16,
    FP32,
    DeltaSpec,
    DType,
    MlaSpec,
    MoeSpec,
    TransformerSpec,
)
from atoll.core.errors import InputError, UnknownNameError
from atoll.core.files import read_text_limited
from atoll.core.graph import Component, ComponentGraph, ComponentKind, Edge
from atoll.core.ids import slug

_DTYPES = {"bfloat16": BF16, "float16": FP16, "float32": FP32, "half": FP16, "float": FP32}


@dataclass(frozen=True, slots=True)
class _Traits:
    """Properties that an architecture fixes in code rather than in its config.

    `text_part`: the class is of a multimodal model of which only the language model is read; the note says
    what is left out. `defaults` are what its text section may leave out.
    """

    model_type: str
    qkv_bias: bool | None = None  # None: the config's attention_bias says, for o as well
    o_bias: bool | None = None  # None: as attention_bias says where qkv_bias is None, else no
    qk_norm: bool | str = False  # a text: the field that says
    attention_gate: bool = False
    dense_width: str = "intermediate_size"
    qk_norm_full: bool = False
    norms_per_layer: int = 2
    tied: bool = False
    layer_norm: bool = False
    sinks: bool = False
    moe: Callable[[ConfigFields, int], MoeSpec | None] | None = None
    windows: Callable[[ConfigFields, int], tuple[int | None, ...]] | None = None
    vision: Callable[[ConfigFields], EncoderSpec] | None = None
    mla: Callable[[ConfigFields], MlaSpec] | None = None
    delta: Callable[[ConfigFields, int], DeltaSpec | None] | None = None
    text_part: bool = False
    defaults: Mapping[str, object] = field(default_factory=dict)


def model_from_config(
    config: str | os.PathLike[str] | Mapping[str, object], name: str | None = None
) -> ModelSpec:
    """Read a model from a config.json, the folder it lies in, or its content as a mapping.

    `name` is the catalog name; without it the folder's name or the model type is taken.
    """
    if isinstance(config, Mapping):
        data, path = config, None
    else:
        path = Path(config)
        # Not Path.is_dir(), which raises for a name longer than the system allows.
        path = path / "config.json" if os.path.isdir(path) else path
        data = _read_json(path)
    if not all(isinstance(key, str) for key in data):
        raise InputError("every key of a config must be text", path=path)
    fields = ConfigFields(data, path=path)
    architecture = _architecture(fields)
    traits = _TRAITS[architecture]
    try:
        return _build(fields, architecture, traits, _name(name, path, traits), path)
    except InputError as error:
        raise error.locate(path=path) from None


def supported_architectures() -> tuple[str, ...]:
    """The architectures `model_from_config` knows, sorted."""
    return tuple(sorted(_TRAITS))


def _build(
    fields: ConfigFields, architecture: str, traits: _Traits, name: str, path: Path | None
) -> ModelSpec:
    # Newer multimodal configs keep the language model's fields in a section of their own.
    nested = traits.vision is not None or traits.text_part
    text = (fields.section("text_config") if nested else None) or fields
    text = text.with_defaults(traits.defaults)
    llm = _transformer(text, fields, traits)
    components: dict[str, ComponentSpec] = {}
    parts, edges = [Component("llm", ComponentKind.LLM)], []
    if traits.vision is not None:
        vision = fields.section("vision_config")
        if vision is None:
            raise fields.error("this field is required", "vision_config")
        components["vision"] = traits.vision(vision)
        parts.insert(0, Component("vision", ComponentKind.ENCODER))
        edges.append(Edge("vision", "llm"))
    components["llm"] = llm
    note = None if path is None else f"read from {path}"
    if traits.text_part and fields.section("vision_config") is not None:
        beside = "the language model alone; the vision tower beside it is not counted"
        note = beside if note is None else f"{beside}; {note}"
    return ModelSpec(
        name=name,
        aliases=(),
        hf_id=None,
        architecture=architecture,
        graph=ComponentGraph(tuple(parts), tuple(edges)),
        components=components,
        source="Hugging Face config.json given by the user",
        confidence="high",
        note=note,
    )


def _transformer(text: ConfigFields, root: ConfigFields, traits: _Traits) -> TransformerSpec:
    layers = text.required("num_hidden_layers", max_value=4096)
    hidden = text.required("hidden_size")
    heads = text.required("num_attention_heads")
    dtype = _dtype(text, root)
    quantized = read_quantization(root, layers)
    bias = (
        text.flag("use_bias", default=True)
        if traits.layer_norm
        else text.flag("attention_bias", default=traits.sinks)
    )
    mlp_bias = bias if traits.layer_norm else text.flag("mlp_bias") or traits.sinks
    windows = traits.windows(text, layers) if traits.windows is not None else ()
    mla = None if traits.mla is None else traits.mla(text)
    o_bias = bias if traits.qkv_bias is None else False
    return TransformerSpec(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=1 if mla else text.whole("num_key_value_heads", default=heads, min_value=1),
        head_dim=mla.query_dim if mla else _head_dim(text, hidden, heads),
        intermediate=text.required(traits.dense_width),
        vocab=text.required("vocab_size"),
        max_context=text.required("max_position_embeddings"),
        tied_embeddings=_is_tied(text, root, traits),
        windows=_layer_types(text, layers) or windows,
        qkv_bias=bias if traits.qkv_bias is None else traits.qkv_bias,
        o_bias=o_bias if traits.o_bias is None else traits.o_bias,
        mlp_bias=mlp_bias,
        qk_norm=text.flag(traits.qk_norm) if isinstance(traits.qk_norm, str) else traits.qk_norm,
        qk_norm_full=traits.qk_norm_full,
        norms_per_layer=traits.norms_per_layer,
        norm_bias=traits.layer_norm,
        gated_mlp=not traits.layer_norm,
        sinks=traits.sinks,
        attention_gate=traits.attention_gate,
        moe=traits.moe(text, layers) if traits.moe is not None else None,
        mla=mla,
        delta=None if traits.delta is None else traits.delta(text, layers),
        attention_dtype=quantized.attention or dtype,
        mlp_dtype=quantized.mlp or dtype,
        expert_dtype=quantized.expert or dtype,
        embedding_dtype=dtype,
        kv_dtype=quantized.kv or dtype,
        activation_dtype=dtype,
    )


# Fields


def _head_dim(text: ConfigFields, hidden: int, heads: int) -> int:
    head_dim = text.optional("head_dim")
    if head_dim is not None:
        return head_dim
    if hidden % heads:
        raise text.error(
            f"{heads} heads do not divide hidden_size {hidden}",
            "num_attention_heads",
            hint="give head_dim",
        )
    return hidden // heads


def _is_tied(text: ConfigFields, root: ConfigFields, traits: _Traits) -> bool:
    # The text section goes before the root, and that before what the architecture does.
    default = root.flag("tie_word_embeddings", default=traits.tied)
    return text.flag("tie_word_embeddings", default=default)


def _dtype(text: ConfigFields, root: ConfigFields) -> DType:
    name = text.text("torch_dtype") or text.text("dtype")
    name = name or root.text("torch_dtype") or root.text("dtype") or "bfloat16"
    name = name.removeprefix("torch.")
    if name not in _DTYPES:
        raise UnknownNameError("torch dtype", name, _DTYPES, field="torch_dtype")
    return _DTYPES[name]


# Kinds of `layer_types`, and the field that says how many tokens such a layer keeps at most.
# Layers of linear attention keep none: `read_delta_qwen` reads them.
_LAYER_KINDS: dict[str, str | None] = {
    "full_attention": None,
    "sliding_attention": "sliding_window",
    "chunked_attention": "attention_chunk_size",
    "linear_attention": None,
}


def _layer_types(text: ConfigFields, layers: int) -> tuple[int | None, ...]:
    types = text.texts("layer_types")
    if not types:
        return ()
    if len(types) != layers:
        raise text.error(f"{len(types)} entries for {layers} layers", "layer_types")
    sizes: dict[str, int | None] = {}
    for kind in types:
        if kind not in _LAYER_KINDS:
            raise text.error(
                f"unknown kind {kind!r}", "layer_types", hint=f"use {' or '.join(_LAYER_KINDS)}"
            )
        length = _LAYER_KINDS[kind]
        if kind not in sizes:
            sizes[kind] = None if length is None else text.required(length)
    # No layer has a window: that is the same as no list.
    if all(size is None for size in sizes.values()):
        return ()
    return tuple(sizes[kind] for kind in types)


_TRAITS: dict[str, _Traits] = {
    "LlamaForCausalLM": _Traits("llama"),
    "MistralForCausalLM": _Traits("mistral", windows=read_window_everywhere),
    "MixtralForCausalLM": _Traits("mixtral", windows=read_window_everywhere, moe=read_moe_mixtral),
    "Qwen2ForCausalLM": _Traits("qwen2", qkv_bias=True, windows=read_window_above),
    "Qwen2MoeForCausalLM": _Traits(
        "qwen2_moe", qkv_bias=True, windows=read_window_above, moe=read_moe_qwen
    ),
    "Qwen2_5_VLForConditionalGeneration": _Traits(
        "qwen2_5_vl", qkv_bias=True, windows=read_window_above, vision=read_vision_qwen25
    ),
    "Qwen3ForCausalLM": _Traits("qwen3", qk_norm=True, windows=read_window_above),
    "Qwen3MoeForCausalLM": _Traits(
        "qwen3_moe", qk_norm=True, windows=read_window_above, moe=read_moe_qwen
    ),
    "Phi3ForCausalLM": _Traits("phi3", qkv_bias=False, windows=read_window_everywhere),
    "GemmaForCausalLM": _Traits("gemma", tied=True),
    "Gemma2ForCausalLM": _Traits(
        "gemma2", tied=True, norms_per_layer=4, windows=read_window_alternating
    ),
    "Gemma3ForCausalLM": _Traits(
        "gemma3_text", tied=True, norms_per_layer=4, qk_norm=True, windows=read_window_but_every
    ),
    # What its text section leaves out in the published configs of the smaller sizes.
    "Gemma3ForConditionalGeneration": _Traits(
        "gemma3",
        tied=True,
        norms_per_layer=4,
        qk_norm=True,
        windows=read_window_but_every,
        text_part=True,
        defaults={
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
        },
    ),
    "Mistral3ForConditionalGeneration": _Traits(
        "mistral3", windows=read_window_everywhere, text_part=True
    ),
    "Llama4ForCausalLM": _Traits(
        "llama4_text",
        dense_width="intermediate_size_mlp",
        moe=read_moe_llama4,
        windows=read_chunks_but_every,
    ),
    "Llama4ForConditionalGeneration": _Traits(
        "llama4",
        dense_width="intermediate_size_mlp",
        moe=read_moe_llama4,
        windows=read_chunks_but_every,
        text_part=True,
    ),
    "DeepseekV2ForCausalLM": _Traits("deepseek_v2", mla=read_latent, moe=read_moe_deepseek),
    "DeepseekV3ForCausalLM": _Traits("deepseek_v3", mla=read_latent, moe=read_moe_deepseek),
    "Glm4MoeForCausalLM": _Traits(
        "glm4_moe", o_bias=False, qk_norm="use_qk_norm", moe=read_moe_deepseek
    ),
    "Qwen3NextForCausalLM": _Traits(
        "qwen3_next", qk_norm=True, attention_gate=True, moe=read_moe_qwen, delta=read_delta_qwen
    ),
    "GptOssForCausalLM": _Traits(
        "gpt_oss", sinks=True, moe=read_moe_gpt_oss, windows=read_window_alternating
    ),
    "GraniteForCausalLM": _Traits("granite"),
    "Olmo2ForCausalLM": _Traits("olmo2", qk_norm_full=True),
    "Starcoder2ForCausalLM": _Traits(
        "starcoder2", tied=True, layer_norm=True, windows=read_window_everywhere
    ),
}


# Files and names


def _architecture(fields: ConfigFields) -> str:
    named = fields.texts("architectures")
    for name in named:
        if name in _TRAITS:
            return name
    if named:
        raise UnknownNameError("architecture", named[0], _TRAITS, field="architectures")
    model_type = fields.text("model_type")
    by_type = {traits.model_type: name for name, traits in _TRAITS.items()}
    if model_type is None:
        raise fields.error(
            "this field is required", "architectures", hint='for example ["LlamaForCausalLM"]'
        )
    if model_type not in by_type:
        raise UnknownNameError("model type", model_type, by_type, field="model_type")
    return by_type[model_type]


def _name(name: str | None, path: Path | None, traits: _Traits) -> str:
    if name is not None:
        return slug(name, field="name")
    if path is not None:
        stem = path.resolve().parent.name if path.name == "config.json" else path.stem
        try:
            return slug(stem)
        except InputError:
            pass  # a folder may be called anything; the model type is always a valid name
    return traits.model_type


def _read_json(path: Path) -> dict[str, object]:
    text = read_text_limited(path)

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        fields: dict[str, object] = {}
        for key, value in pairs:
            if key in fields:
                raise InputError("this key is given twice", path=path, field=printable(key))
            fields[key] = value
        return fields

    # Python would take NaN and Infinity, which are not JSON.
    def not_json(constant: str) -> NoReturn:
        raise InputError(f"{constant} is not a JSON number", path=path)

    try:
        data = json.loads(text, object_pairs_hook=unique, parse_constant=not_json)
    except json.JSONDecodeError as error:
        raise InputError(f"not valid JSON: {error.msg}", path=path, line=error.lineno) from None
    except (ValueError, RecursionError) as error:
        # A number with more digits than Python reads, or brackets nested too deeply.
        raise InputError(f"not valid JSON: {error}", path=path) from None
    if not isinstance(data, dict):
        raise InputError("a config must be a mapping", path=path)
    return data
