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
from atoll.catalog.media import EncoderSpec
from atoll.catalog.models import ComponentSpec, ModelSpec
from atoll.catalog.names import printable
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
    """What an architecture fixes in code rather than in its config.

    `text_part`: the class is of a multimodal model of which only the language model is read; the note says what
    is left out. `defaults` are what its text section may leave out.
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
    layers = text.required("num_hidden_layers", most=4096)
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
        kv_heads=1 if mla else text.whole("num_key_value_heads", default=heads, least=1),
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
# Layers of linear attention keep none: `_delta_qwen` reads them.
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
    if all(size is None for size in sizes.values()):
        return ()
    return tuple(sizes[kind] for kind in types)


def _window_everywhere(text: ConfigFields, layers: int) -> tuple[int | None, ...]:
    return (text.optional("sliding_window"),) * layers


def _window_above(text: ConfigFields, layers: int) -> tuple[int | None, ...]:
    """Qwen: windows only if switched on, from `max_window_layers` up."""
    if not text.flag("use_sliding_window"):
        return ()
    size, first = text.optional("sliding_window"), text.whole("max_window_layers", default=0)
    return tuple(size if i >= first else None for i in range(layers))


def _window_alternating(text: ConfigFields, layers: int) -> tuple[int | None, ...]:
    """Even layers slide (Gemma 2, gpt-oss)."""
    size = text.optional("sliding_window")
    return tuple(size if i % 2 == 0 else None for i in range(layers))


def _window_but_every(text: ConfigFields, layers: int) -> tuple[int | None, ...]:
    """Gemma 3: every n-th layer attends to everything, the others slide."""
    size, period = (
        text.optional("sliding_window"),
        text.whole("sliding_window_pattern", default=6, least=1),
    )
    return tuple(None if (i + 1) % period == 0 else size for i in range(layers))


def _chunks_but_every(text: ConfigFields, layers: int) -> tuple[int | None, ...]:
    """Llama 4: layers with rotary positions attend within chunks, those without to everything."""
    size = text.optional("attention_chunk_size")
    rotary = text.wholes("no_rope_layers", least=0)
    if not rotary:
        period = text.whole("no_rope_layer_interval", default=4, least=1)
        rotary = tuple(int((i + 1) % period != 0) for i in range(layers))
    if len(rotary) != layers:
        raise text.error(f"{len(rotary)} entries for {layers} layers", "no_rope_layers")
    return tuple(size if flag else None for flag in rotary)


def _mla(text: ConfigFields) -> MlaSpec:
    return MlaSpec(
        q_rank=text.whole("q_lora_rank", default=0),
        kv_rank=text.required("kv_lora_rank"),
        nope_dim=text.required("qk_nope_head_dim"),
        rope_dim=text.required("qk_rope_head_dim"),
        v_dim=text.required("v_head_dim"),
    )


def _delta_qwen(text: ConfigFields, layers: int) -> DeltaSpec | None:
    """Qwen3-Next: every n-th layer has attention, the others follow the gated delta rule."""
    kinds = text.texts("layer_types")
    if not kinds:
        period = text.whole("full_attention_interval", default=4, least=1)
        kinds = tuple(
            "full_attention" if (i + 1) % period == 0 else "linear_attention" for i in range(layers)
        )
    linear = frozenset(i for i, kind in enumerate(kinds) if kind == "linear_attention")
    if not linear:
        return None
    return DeltaSpec(
        layers=linear,
        key_heads=text.required("linear_num_key_heads"),
        value_heads=text.required("linear_num_value_heads"),
        key_dim=text.required("linear_key_head_dim"),
        value_dim=text.required("linear_value_head_dim"),
        conv=text.whole("linear_conv_kernel_dim", default=4, least=1),
    )


def _moe_deepseek(text: ConfigFields, layers: int) -> MoeSpec | None:
    """DeepSeek, Kimi K2, GLM-4.5: dense layers first, then experts beside shared ones."""
    if not text.has("n_routed_experts"):
        return None
    first = text.whole("first_k_dense_replace", default=0)
    step = text.whole("moe_layer_freq", default=1, least=1)
    width = text.required("moe_intermediate_size")
    return MoeSpec(
        experts=text.required("n_routed_experts"),
        top_k=text.required("num_experts_per_tok"),
        intermediate=width,
        shared_intermediate=width * text.whole("n_shared_experts", default=0),
        dense_layers=frozenset(i for i in range(layers) if i < first or i % step),
        # One number per expert that steers the choice, where the scores are sigmoids.
        router_bias=text.text("topk_method") in (None, "noaux_tc"),
    )


def _moe_llama4(text: ConfigFields, layers: int) -> MoeSpec:
    step = text.whole("interleave_moe_layer_step", default=1, least=1)
    mixed = text.wholes("moe_layers", least=0) or tuple(range(step - 1, layers, step))
    width = text.required("intermediate_size")
    return MoeSpec(
        experts=text.required("num_local_experts"),
        top_k=text.required("num_experts_per_tok"),
        intermediate=width,
        shared_intermediate=width,
        dense_layers=frozenset(range(layers)) - frozenset(mixed),
    )


def _moe_mixtral(text: ConfigFields, _layers: int) -> MoeSpec:
    return MoeSpec(
        experts=text.required("num_local_experts"),
        top_k=text.required("num_experts_per_tok"),
        intermediate=text.required("intermediate_size"),
    )


def _moe_gpt_oss(text: ConfigFields, _layers: int) -> MoeSpec:
    experts = text.optional("num_local_experts") or text.required("num_experts")
    top_k = text.optional("num_experts_per_tok") or text.required("experts_per_token")
    return MoeSpec(experts, top_k, text.required("intermediate_size"), router_bias=True)


def _moe_qwen(text: ConfigFields, layers: int) -> MoeSpec | None:
    step = text.whole("decoder_sparse_step", default=1, least=1)
    plain = frozenset(text.wholes("mlp_only_layers", least=0))
    dense = frozenset(i for i in range(layers) if i in plain or (i + 1) % step)
    experts = text.required("num_experts")
    shared = text.whole("shared_expert_intermediate_size", default=0)
    if len(dense) == layers:
        return None
    return MoeSpec(
        experts=experts,
        top_k=text.required("num_experts_per_tok"),
        intermediate=text.required("moe_intermediate_size"),
        shared_intermediate=shared,
        shared_gate=shared > 0,
        dense_layers=dense,
    )


def _vision_qwen25(vision: ConfigFields) -> EncoderSpec:
    hidden, merge = (
        vision.required("hidden_size"),
        vision.whole("spatial_merge_size", default=2, least=1),
    )
    output = vision.required("out_hidden_size")
    wide = hidden * merge**2
    return EncoderSpec(
        kind="vision",
        layers=vision.required("depth", most=4096),
        hidden=hidden,
        intermediate=vision.required("intermediate_size"),
        heads=vision.required("num_heads"),
        output_dim=output,
        rule="grid",
        gated_mlp=True,
        patch_size=vision.whole("patch_size", default=14, least=1),
        temporal_patch=vision.whole("temporal_patch_size", default=2, least=1),
        merge=merge,
        window_px=vision.optional("window_size"),
        full_attention_layers=vision.wholes("fullatt_block_indexes", least=0) or None,
        projector=(wide, wide, output),
        projector_norm=hidden,
    )


_TRAITS: dict[str, _Traits] = {
    "LlamaForCausalLM": _Traits("llama"),
    "MistralForCausalLM": _Traits("mistral", windows=_window_everywhere),
    "MixtralForCausalLM": _Traits("mixtral", windows=_window_everywhere, moe=_moe_mixtral),
    "Qwen2ForCausalLM": _Traits("qwen2", qkv_bias=True, windows=_window_above),
    "Qwen2MoeForCausalLM": _Traits(
        "qwen2_moe", qkv_bias=True, windows=_window_above, moe=_moe_qwen
    ),
    "Qwen2_5_VLForConditionalGeneration": _Traits(
        "qwen2_5_vl", qkv_bias=True, windows=_window_above, vision=_vision_qwen25
    ),
    "Qwen3ForCausalLM": _Traits("qwen3", qk_norm=True, windows=_window_above),
    "Qwen3MoeForCausalLM": _Traits("qwen3_moe", qk_norm=True, windows=_window_above, moe=_moe_qwen),
    "Phi3ForCausalLM": _Traits("phi3", qkv_bias=False, windows=_window_everywhere),
    "GemmaForCausalLM": _Traits("gemma", tied=True),
    "Gemma2ForCausalLM": _Traits(
        "gemma2", tied=True, norms_per_layer=4, windows=_window_alternating
    ),
    "Gemma3ForCausalLM": _Traits(
        "gemma3_text", tied=True, norms_per_layer=4, qk_norm=True, windows=_window_but_every
    ),
    # What its text section leaves out in the published configs of the smaller sizes.
    "Gemma3ForConditionalGeneration": _Traits(
        "gemma3",
        tied=True,
        norms_per_layer=4,
        qk_norm=True,
        windows=_window_but_every,
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
        "mistral3", windows=_window_everywhere, text_part=True
    ),
    "Llama4ForCausalLM": _Traits(
        "llama4_text",
        dense_width="intermediate_size_mlp",
        moe=_moe_llama4,
        windows=_chunks_but_every,
    ),
    "Llama4ForConditionalGeneration": _Traits(
        "llama4",
        dense_width="intermediate_size_mlp",
        moe=_moe_llama4,
        windows=_chunks_but_every,
        text_part=True,
    ),
    "DeepseekV2ForCausalLM": _Traits("deepseek_v2", mla=_mla, moe=_moe_deepseek),
    "DeepseekV3ForCausalLM": _Traits("deepseek_v3", mla=_mla, moe=_moe_deepseek),
    "Glm4MoeForCausalLM": _Traits(
        "glm4_moe", o_bias=False, qk_norm="use_qk_norm", moe=_moe_deepseek
    ),
    "Qwen3NextForCausalLM": _Traits(
        "qwen3_next", qk_norm=True, attention_gate=True, moe=_moe_qwen, delta=_delta_qwen
    ),
    "GptOssForCausalLM": _Traits(
        "gpt_oss", sinks=True, moe=_moe_gpt_oss, windows=_window_alternating
    ),
    "GraniteForCausalLM": _Traits("granite"),
    "Olmo2ForCausalLM": _Traits("olmo2", qk_norm_full=True),
    "Starcoder2ForCausalLM": _Traits(
        "starcoder2", tied=True, layer_norm=True, windows=_window_everywhere
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

    def not_json(constant: str) -> NoReturn:
        raise InputError(f"{constant} is not a JSON number", path=path)

    try:
        data = json.loads(text, object_pairs_hook=unique, parse_constant=not_json)
    except json.JSONDecodeError as error:
        raise InputError(f"not valid JSON: {error.msg}", path=path, line=error.lineno) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"not valid JSON: {error}", path=path) from None
    if not isinstance(data, dict):
        raise InputError("a config must be a mapping", path=path)
    return data
