"""The same operations as `triton_ops`, in plain PyTorch, for CPUs."""

from __future__ import annotations

import torch
from torch import Tensor


def add_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return (norm(x + residual), x + residual); without a residual, (norm(x), x)."""
    total = x if residual is None else x + residual
    return torch.rms_norm(total, (total.shape[-1],), weight, eps), total


def silu_mul(x: Tensor) -> Tensor:
    """Return silu(left half) * right half of [rows, 2 * width]."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)


def rope_store(
    qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, keys: Tensor, values: Tensor, heads: int
) -> Tensor:
    """Turn queries and keys to their positions, store keys and values, return the queries."""
    kv_heads, size = keys.shape[1], keys.shape[2]
    rows = qkv.shape[0]
    split = qkv.view(rows, heads + 2 * kv_heads, size)
    turning = split[:, : heads + kv_heads]
    low, high = turning.chunk(2, dim=-1)
    turned = turning * cos.unsqueeze(1)
    turned += torch.cat((-high, low), dim=-1) * sin.unsqueeze(1)
    keys.index_copy_(0, slots, turned[:, heads:])
    values.index_copy_(0, slots, split[:, heads + kv_heads :])
    return turned[:, :heads]
