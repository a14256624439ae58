"""Parts of `config.json` that differ by family: windows, experts, latents, states, vision towers.

Each function reads one part of a config for the architectures that `hf_config` lists beside it.
"""

from __future__ import annotations

from atoll.catalog.fields import ConfigFields
from atoll.catalog.media import EncoderSpec
from atoll.catalog.transformer import DeltaSpec, MlaSpec, MoeSpec


def read_window_everywhere(text: ConfigFields, layers: int) -> tuple[int | None, ...]:
    """Mistral, Phi-3: every layer slides, where there is a window at all."""
    return (text.optional("sliding_window"),) * layers


def read_window_above(text: ConfigFields, layers: int) -> tuple[int | None, ...]:
    """Qwen: windows only if switched on, from `max_window_layers` up."""
    if not text.flag("use_sliding_window"):
        return ()
    size, first = text.optional("sliding_window"), text.whole("max_window_layers", default=0)
    return tuple(size if i >= first else None for i in range(layers))


def read_window_alternating(text: ConfigFields, layers: int) -> tuple[int | None, ...]:
    """Even layers slide (Gemma 2, gpt-oss)."""
    size = text.optional("sliding_window")
    return tuple(size if i % 2 == 0 else None for i in range(layers))


def read_window_but_every(text: ConfigFields, layers: int) -> tuple[int | None, ...]:
    """Gemma 3: every n-th layer attends to everything, the others slide."""
    size, period = (
        text.optional("sliding_window"),
        text.whole("sliding_window_pattern", default=6, min_value=1),
    )
    return tuple(None if (i + 1) % period == 0 else size for i in range(layers))


def read_chunks_but_every(text: ConfigFields, layers: int) -> tuple[int | None, ...]:
    """Llama 4: layers with rotary positions attend within chunks, those without to everything."""
    size = text.optional("attention_chunk_size")
    rotary = text.wholes("no_rope_layers", min_value=0)
    if not rotary:
        period = text.whole("no_rope_layer_interval", default=4, min_value=1)
        rotary = tuple(int((i + 1) % period != 0) for i in range(layers))
    if len(rotary) != layers:
        raise text.error(f"{len(rotary)} entries for {layers} layers", "no_rope_layers")
    return tuple(size if flag else None for flag in rotary)


def read_latent(text: ConfigFields) -> MlaSpec:
    """DeepSeek, Kimi K2: the ranks and widths of latent attention."""
    return MlaSpec(
        q_rank=text.whole("q_lora_rank", default=0),
        kv_rank=text.required("kv_lora_rank"),
        nope_dim=text.required("qk_nope_head_dim"),
        rope_dim=text.required("qk_rope_head_dim"),
        v_dim=text.required("v_head_dim"),
    )


def read_delta_qwen(text: ConfigFields, layers: int) -> DeltaSpec | None:
    """Qwen3-Next: every n-th layer has attention, the others follow the gated delta rule."""
    kinds = text.texts("layer_types")
    if not kinds:
        period = text.whole("full_attention_interval", default=4, min_value=1)
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
        conv=text.whole("linear_conv_kernel_dim", default=4, min_value=1),
    )


def read_moe_deepseek(text: ConfigFields, layers: int) -> MoeSpec | None:
    """DeepSeek, Kimi K2, GLM-4.5: dense layers first, then experts beside shared ones."""
    if not text.has("n_routed_experts"):
        return None
    first = text.whole("first_k_dense_replace", default=0)
    step = text.whole("moe_layer_freq", default=1, min_value=1)
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


def read_moe_llama4(text: ConfigFields, layers: int) -> MoeSpec:
    """Llama 4: every n-th layer has experts, as wide as the one shared by all tokens."""
    step = text.whole("interleave_moe_layer_step", default=1, min_value=1)
    mixed = text.wholes("moe_layers", min_value=0) or tuple(range(step - 1, layers, step))
    width = text.required("intermediate_size")
    return MoeSpec(
        experts=text.required("num_local_experts"),
        top_k=text.required("num_experts_per_tok"),
        intermediate=width,
        shared_intermediate=width,
        dense_layers=frozenset(range(layers)) - frozenset(mixed),
    )


def read_moe_mixtral(text: ConfigFields, _layers: int) -> MoeSpec:
    """Mixtral: experts as wide as the MLP they replace."""
    return MoeSpec(
        experts=text.required("num_local_experts"),
        top_k=text.required("num_experts_per_tok"),
        intermediate=text.required("intermediate_size"),
    )


def read_moe_gpt_oss(text: ConfigFields, _layers: int) -> MoeSpec:
    """gpt-oss: the same, with a bias on the router; two spellings are about."""
    experts = text.optional("num_local_experts") or text.required("num_experts")
    top_k = text.optional("num_experts_per_tok") or text.required("experts_per_token")
    return MoeSpec(experts, top_k, text.required("intermediate_size"), router_bias=True)


def read_moe_qwen(text: ConfigFields, layers: int) -> MoeSpec | None:
    """Qwen: experts in every n-th layer but those listed; None where no layer has any."""
    step = text.whole("decoder_sparse_step", default=1, min_value=1)
    plain = frozenset(text.wholes("mlp_only_layers", min_value=0))
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


def read_vision_qwen25(vision: ConfigFields) -> EncoderSpec:
    """The vision tower of Qwen2.5-VL."""
    hidden, merge = (
        vision.required("hidden_size"),
        vision.whole("spatial_merge_size", default=2, min_value=1),
    )
    output = vision.required("out_hidden_size")
    wide = hidden * merge**2
    return EncoderSpec(
        kind="vision",
        layers=vision.required("depth", max_value=4096),
        hidden=hidden,
        intermediate=vision.required("intermediate_size"),
        heads=vision.required("num_heads"),
        output_dim=output,
        rule="grid",
        gated_mlp=True,
        patch_size=vision.whole("patch_size", default=14, min_value=1),
        temporal_patch=vision.whole("temporal_patch_size", default=2, min_value=1),
        merge=merge,
        window_px=vision.optional("window_size"),
        full_attention_layers=vision.wholes("fullatt_block_indexes", min_value=0) or None,
        projector=(wide, wide, output),
        projector_norm=hidden,
    )
