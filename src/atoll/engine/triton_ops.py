"""Operations for GPUs: norms with their residual, rotary positions with the KV store, paged decode.

`fused.py` says when they are used. Each has a plain counterpart in `torch_ops.py`;
`benchmarks.engine_h200` checks on a GPU that a model run with them answers as transformers does.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from atoll.engine import triton_kernels as kernels

_TILE = 64
_GROUP_MIN = 16


def add_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return (norm(x + residual), x + residual); without a residual, (norm(x), x)."""
    out = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    width = x.shape[-1]
    block = triton.next_power_of_2(width)
    kernels.add_norm[(x.shape[0],)](
        x,
        x if residual is None else residual,
        weight,
        out,
        total,
        eps,
        WIDTH=width,
        ADD=residual is not None,
        BLOCK=block,
        num_warps=8 if block >= 4096 else 4,
    )
    return out, total


def silu_mul(x: Tensor) -> Tensor:
    """Return silu(left half) * right half of [rows, 2 * width]."""
    rows, double = x.shape
    width = double // 2
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    block = min(1024, triton.next_power_of_2(width))
    kernels.silu_mul[(rows, triton.cdiv(width, block))](x, out, WIDTH=width, BLOCK=block)
    return out


def rope_store(
    qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, keys: Tensor, values: Tensor, heads: int
) -> Tensor:
    """Turn queries and keys to their positions, store keys and values, return the queries.

    qkv is [rows, (heads + 2 kv heads) * size], cos and sin [rows, size] with equal halves; the
    result is [rows, heads, size].
    """
    kv_heads, size = keys.shape[1], keys.shape[2]
    q = torch.empty((qkv.shape[0], heads, size), dtype=qkv.dtype, device=qkv.device)
    kernels.rope_store[(qkv.shape[0], heads + 2 * kv_heads)](
        qkv,
        cos,
        sin,
        slots,
        q,
        keys,
        values,
        HEADS=heads,
        KV_HEADS=kv_heads,
        SIZE=size,
        num_warps=1,
    )
    return q


def splits_for(rows: int, kv_heads: int, longest: int, processors: int) -> int:
    """Return into how many parts each context is cut, so that every processor has work.

    A power of two of at most 16, and no part shorter than two tiles.
    """
    wanted = (2 * processors) // max(1, rows * kv_heads)
    splits = 1
    while splits * 2 <= min(16, wanted) and longest >= splits * 4 * _TILE:
        splits *= 2
    return splits


def paged_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    scale: float,
    page: int,
    window: int | None = None,
    splits: int = 1,
) -> Tensor:
    """Attend with one query a row: q [rows, heads, size] over `lengths` positions of each table.

    keys and values are [slots, kv heads, size]; tables int32 [rows, pages].
    """
    rows, heads, size = q.shape
    kv_heads = keys.shape[1]
    out = torch.empty_like(q)
    shape = (rows, heads, splits) if splits > 1 else (1,)
    partial = torch.empty((*shape, size), dtype=torch.float32, device=q.device)
    maxima = torch.empty(shape, dtype=torch.float32, device=q.device)
    sums = torch.empty(shape, dtype=torch.float32, device=q.device)
    group = max(_GROUP_MIN, triton.next_power_of_2(heads // kv_heads))
    kernels.decode[(rows, kv_heads, splits)](
        q, keys, values, tables, lengths, out, scale, window or 2**30, tables.shape[1],
        partial, maxima, sums,
        HEADS=heads, KV_HEADS=kv_heads, SIZE=size, PAGE=page, GROUP=group, SPLITS=splits,
        TILE=_TILE, EXACT=q.dtype == torch.float32, num_warps=4, num_stages=3,
    )  # fmt: skip
    if splits > 1:
        kernels.combine[(rows * heads,)](partial, maxima, sums, out, SIZE=size, SPLITS=splits)
    return out
