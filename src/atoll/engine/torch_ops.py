"""The same operations as `triton_ops`, in plain PyTorch, for CPUs."""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


def store_rows(into: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Put rows into slots of a tensor; what FP8 cannot hold becomes its largest number."""
    if into.dtype == FP8 and rows.dtype != FP8:
        rows = rows.clamp(-FP8_MAX, FP8_MAX)
    _as_bytes(into).index_copy_(0, slots, _as_bytes(rows.to(into.dtype)))


def read_rows(stored: Tensor, slots: Tensor) -> Tensor:
    """Return the rows in slots of a tensor, in its format."""
    return _as_bytes(stored).index_select(0, slots).view(stored.dtype)


def _as_bytes(tensor: Tensor) -> Tensor:
    """A tensor in FP8 as bytes: most operations do not know the format."""
    return tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor


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
    store_rows(keys, slots, turned[:, heads:])
    store_rows(values, slots, split[:, heads + kv_heads :])
    return turned[:, :heads]
