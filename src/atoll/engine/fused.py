"""Decoder layers of the Llama family with their small operations joined.

transformers' layers are kept as they are for every model; where a layer has the plain shape (RMS
norm, rotary attention, gated MLP with SiLU or experts of that kind) its weights are laid together here, so
that a layer is four matrix products and a handful of small steps instead of some forty.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from atoll.engine.matrix import join
from atoll.engine.matrix_layers import MatrixLinear, matrix_of
from atoll.engine.weight_packing import PackedLinear, can_pack

# Layers of exactly the plain shape. Others differ in a norm, an extra norm or the MLP.
PLAIN_LAYERS = frozenset(
    {
        "LlamaDecoderLayer",
        "MistralDecoderLayer",
        "MixtralDecoderLayer",
        "Qwen2DecoderLayer",
        "Qwen3DecoderLayer",
        "Qwen3MoeDecoderLayer",
    }
)


class FusedLayer:
    """One decoder layer; takes and returns (hidden states, residual), both [rows, width].

    `total` adds up what the ranks of a node have found, where they are several.
    """

    def __init__(
        self,
        layer: Any,
        ops: Any,
        *,
        keep: bool = False,
        total: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._ops = ops
        self._total = total
        attention, mlp = layer.self_attn, layer.mlp
        self.index: int = attention.layer_idx
        self._size: int = attention.head_dim
        self._scale: float = attention.scaling
        self._window = _window(attention)
        self.heads = attention.q_proj.out_features // self._size
        # Heads that are normed need their sums; whatever else reads a result in parts adds them up.
        normed = hasattr(attention, "q_norm")
        self._qkv = _join_linears(
            ops, attention.q_proj, attention.k_proj, attention.v_proj, parts=not normed, keep=keep
        )
        # What other ranks add to must be a sum already.
        parts = total is None
        self._out = _join_linears(ops, attention.o_proj, parts=parts, keep=keep)
        self._mlp: list[Any] = []
        if hasattr(mlp, "experts"):
            self._mlp.append(_join_experts(ops, mlp, parts=parts))
        else:
            joined = partial(_join_linears, ops, keep=keep)
            self._mlp.append(joined(mlp.gate_proj, mlp.up_proj, gated=True))
            self._mlp.append(joined(mlp.down_proj, parts=parts))
        self._norms = (layer.input_layernorm, layer.post_attention_layernorm)
        self._head_norms = (attention.q_norm, attention.k_norm) if normed else None

    def __call__(
        self, x: Tensor, residual: Tensor | None, rope: tuple[Tensor, Tensor], paged: Any
    ) -> tuple[Tensor, Tensor]:
        """Run the layer over a ragged batch."""
        ops, cache = self._ops, paged.cache
        before, after = self._norms
        x, residual = ops.add_norm(x, residual, before.weight, before.variance_epsilon)
        qkv = self._qkv(x)
        keys, values = cache.keys[self.index], cache.values[self.index]
        if self._head_norms is not None:
            self._norm_heads(qkv, keys.shape[1])
        q = ops.rope_store(qkv, rope[0], rope[1], paged.slots, keys, values, self.heads)
        attended = paged.attend(q, keys, values, self._scale, self._window)
        x = self._out(attended.reshape(attended.shape[0], -1))
        if self._total is not None:
            x = self._total(x)
        x, residual = ops.add_norm(x, residual, after.weight, after.variance_epsilon)
        for step in self._mlp:
            x = step(x)
        return x if self._total is None else self._total(x), residual

    def _norm_heads(self, qkv: Tensor, kv_heads: int) -> None:
        """Norm every query and key head in place (Qwen 3)."""
        split = qkv.view(qkv.shape[0], -1, self._size)
        ends = (self.heads, self.heads + kv_heads)
        for norm, start, end in zip(self._head_norms or (), (0, ends[0]), ends, strict=True):
            part = split[:, start:end]
            part.copy_(torch.rms_norm(part, (self._size,), norm.weight, norm.variance_epsilon))


def _window(attention: Any) -> int | None:
    if hasattr(attention, "sliding_window"):
        window = attention.sliding_window
    else:
        window = getattr(attention.config, "sliding_window", None)
    return None if window is None else int(window)


def _join_linears(
    ops: Any, *linears: Any, parts: bool = False, gated: bool = False, keep: bool = False
) -> Any:
    """Return one linear layer that gives the outputs of several, one after another.

    With `parts` the result may come in parts, which never leave a layer but to the next norm; `gated` as in
    `RowLinear`, `keep` as in `PackedLinear`.
    """
    bias = None
    if any(linear.bias is not None for linear in linears):
        like = next(linear.bias.data for linear in linears if linear.bias is not None)
        bias = torch.cat(
            [
                like.new_zeros(linear.out_features) if linear.bias is None else linear.bias.data
                for linear in linears
            ]
        )
    if any(isinstance(linear, MatrixLinear) for linear in linears):
        joined: Any = MatrixLinear(
            join([matrix_of(linear) for linear in linears]),
            None if bias is None else torch.nn.Parameter(bias, requires_grad=False),
        )
        return (lambda rows: ops.silu_mul(joined(rows))) if gated else joined
    weight = torch.cat([linear.weight.data for linear in linears])
    if weight.is_cuda:
        return ops.RowLinear(weight, bias, parts=2 if parts else 1, gated=gated)
    if can_pack(weight.device, weight.dtype):
        joined = PackedLinear(weight, bias, keep=keep)
    else:
        joined = partial(torch.nn.functional.linear, weight=weight, bias=bias)
    return (lambda rows: ops.silu_mul(joined(rows))) if gated else joined


def _join_experts(ops: Any, block: Any, *, parts: bool) -> Any:
    """Return the experts of a layer; on cores they are run as transformers does."""
    if block.gate.weight.is_cuda:
        return ops.Experts(block, parts=parts)
    return lambda rows: block(rows.unsqueeze(0)).squeeze(0)


def fuse(
    layers: dict[int, Any],
    device: torch.device,
    *,
    keep: bool = False,
    total: Callable[[Tensor], Tensor] | None = None,
) -> dict[int, FusedLayer] | None:
    """Return fused layers where every layer has the plain shape, else None; `total` as in `FusedLayer`.

    The layers' own weights are let go, so that they are not held twice.
    """
    if not all(_is_plain(layer) for layer in layers.values()):
        return None
    if device.type == "cuda":
        from atoll.engine import triton_ops as ops
    else:
        from atoll.engine import torch_ops as ops  # type: ignore[no-redef]
    fused = {}
    for index, layer in layers.items():
        fused[index] = FusedLayer(layer, ops, keep=keep, total=total)
        for module in (layer.self_attn, layer.mlp):
            for name, child in list(module.named_children()):
                if isinstance(child, torch.nn.Linear | MatrixLinear):
                    delattr(module, name)
    return fused


def _is_plain(layer: Any) -> bool:
    # Experts over matrices in 8 and 4 bits have no activation of their own, and are not plain.
    gated = getattr(layer.mlp, "experts", layer.mlp)
    activation = type(getattr(gated, "act_fn", None)).__name__
    return type(layer).__name__ in PLAIN_LAYERS and activation in ("SiLU", "SiLUActivation")
