"""Triton kernels for one GPU measurement run: decode attention and the fused elementwise steps.

Kept simple on purpose: each kernel does what a serving engine's fused kernel does, and nothing
else. ``h200_measure.py`` checks each one against an fp32 reference before it times anything.
Shapes in docstrings: B sequences, S tokens per sequence, T = B * S tokens, H query heads,
KV key/value heads, D head dimension (power of two), C cache length in tokens.
"""

# Triton kernels are traced, not typed: their parameters carry no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,import-untyped,import-not-found"
# mypy: disable-error-code="no-untyped-call"
# Compile-time constants are in capitals, as Triton code has them.
# ruff: noqa: N803

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

MAX_SPLITS = 128


class DecodePlan(NamedTuple):
    """How decode attention is cut up: KV parts per sequence and head, and the tile shape."""

    splits: int
    split_len: int
    block_n: int
    num_warps: int
    num_stages: int


def make_plan(ctx: int, splits: int, block_n: int, num_warps: int, num_stages: int) -> DecodePlan:
    """Plan for ``ctx`` tokens in about ``splits`` parts, none empty, whole tiles each."""
    splits = max(1, min(splits, MAX_SPLITS, triton.cdiv(ctx, block_n)))
    split_len = triton.cdiv(triton.cdiv(ctx, splits), block_n) * block_n
    return DecodePlan(triton.cdiv(ctx, split_len), split_len, block_n, num_warps, num_stages)


def candidate_plans(pairs: int, ctx: int, sms: int) -> list[DecodePlan]:
    """Distinct plans worth timing for ``pairs`` = B * KV programs per split on ``sms`` cores."""
    plans: dict[DecodePlan, None] = {}
    for block_n, num_warps, num_stages in ((64, 4, 3), (128, 4, 2)):
        for programs_per_sm in (3, 6, 12):  # three of these programs fit on one core at a time
            splits = programs_per_sm * sms // pairs
            plans[make_plan(ctx, splits, block_n, num_warps, num_stages)] = None
    return list(plans)


@triton.jit
def noop_kernel(_x_ptr):
    """Do nothing: its launch is the overhead being timed."""


@triton.jit
def _rmsnorm_kernel(
    delta_ptr, res_ptr, weight_ptr, out_ptr, res_out_ptr, n_cols, eps, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    offs = row * n_cols + cols
    x = tl.load(delta_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    x += tl.load(res_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(res_out_ptr + offs, x.to(res_out_ptr.dtype.element_ty), mask=mask)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / n_cols + eps)
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + offs, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rope_kv_kernel(
    qkv_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr, seq_len, pos0, cache_len,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, HALF)
    seq = token // seq_len
    pos = pos0 + token % seq_len
    dim: tl.constexpr = 2 * HALF
    total: tl.constexpr = HEADS + 2 * KV_HEADS

    src = (token * total + head)[:, None] * dim + d[None, :]
    valid = (head < total)[:, None] & (d < HALF)[None, :]
    x1 = tl.load(qkv_ptr + src, mask=valid, other=0.0).to(tl.float32)
    x2 = tl.load(qkv_ptr + src + HALF, mask=valid, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + pos * HALF + d)[None, :]
    sin = tl.load(sin_ptr + pos * HALF + d)[None, :]
    rotate = (head < HEADS + KV_HEADS)[:, None]
    y1 = tl.where(rotate, x1 * cos - x2 * sin, x1).to(q_ptr.dtype.element_ty)
    y2 = tl.where(rotate, x2 * cos + x1 * sin, x2).to(q_ptr.dtype.element_ty)

    is_q = (head < HEADS)[:, None] & (d < HALF)[None, :]
    q_dst = (token * HEADS + head)[:, None] * dim + d[None, :]
    tl.store(q_ptr + q_dst, y1, mask=is_q)
    tl.store(q_ptr + q_dst + HALF, y2, mask=is_q)

    is_k = ((head >= HEADS) & (head < HEADS + KV_HEADS))[:, None] & (d < HALF)[None, :]
    k_row = (seq * KV_HEADS + (head - HEADS)) * cache_len + pos
    k_dst = k_row[:, None] * dim + d[None, :]
    tl.store(k_ptr + k_dst, y1, mask=is_k)
    tl.store(k_ptr + k_dst + HALF, y2, mask=is_k)

    is_v = ((head >= HEADS + KV_HEADS) & (head < total))[:, None] & (d < HALF)[None, :]
    v_row = (seq * KV_HEADS + (head - HEADS - KV_HEADS)) * cache_len + pos
    v_dst = v_row[:, None] * dim + d[None, :]
    tl.store(v_ptr + v_dst, y1, mask=is_v)
    tl.store(v_ptr + v_dst + HALF, y2, mask=is_v)


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n_cols
    gate = tl.load(gate_up_ptr + row * 2 * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * n_cols + n_cols + cols, mask=mask, other=0.0)
    y = gate / (1.0 + tl.exp(-gate)) * up.to(tl.float32)
    tl.store(out_ptr + row * n_cols + cols, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _decode_split_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, part_ptr, max_ptr, sum_ptr,
    ctx, cache_len, split_len, scale_log2,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr,
    SINGLE: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0)  # sequence * KV + kv head
    split = tl.program_id(1)
    num_splits = tl.num_programs(1)
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, HEAD_DIM)
    g_mask = g < GROUP
    row = pair * GROUP + g  # sequence * H + query head
    q = tl.load(q_ptr + row[:, None] * HEAD_DIM + d[None, :], mask=g_mask[:, None], other=0.0)
    base = pair.to(tl.int64) * cache_len * HEAD_DIM
    start = split * split_len
    end = tl.minimum(start + split_len, ctx)

    running_max = tl.full([BLOCK_G], float("-inf"), dtype=tl.float32)
    running_sum = tl.zeros([BLOCK_G], dtype=tl.float32)
    acc = tl.zeros([BLOCK_G, HEAD_DIM], dtype=tl.float32)
    for n0 in range(start, end, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        n_mask = n < end
        offs = n[:, None] * HEAD_DIM + d[None, :]
        k = tl.load(k_ptr + base + offs, mask=n_mask[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale_log2
        scores = tl.where(n_mask[None, :], scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, axis=1))
        alpha = tl.exp2(running_max - new_max)
        p = tl.exp2(scores - new_max[:, None])
        running_sum = running_sum * alpha + tl.sum(p, axis=1)
        v = tl.load(v_ptr + base + offs, mask=n_mask[:, None], other=0.0)
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v)
        running_max = new_max

    if SINGLE:
        result = acc / running_sum[:, None]
        dst = row[:, None] * HEAD_DIM + d[None, :]
        tl.store(out_ptr + dst, result.to(out_ptr.dtype.element_ty), mask=g_mask[:, None])
    else:
        slot = row * num_splits + split
        tl.store(part_ptr + slot[:, None] * HEAD_DIM + d[None, :], acc, mask=g_mask[:, None])
        tl.store(max_ptr + slot, running_max, mask=g_mask)
        tl.store(sum_ptr + slot, running_sum, mask=g_mask)


@triton.jit
def _decode_reduce_kernel(
    part_ptr, max_ptr, sum_ptr, out_ptr, num_splits, HEAD_DIM: tl.constexpr, BLOCK_S: tl.constexpr
):
    row = tl.program_id(0)
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, HEAD_DIM)
    mask = s < num_splits
    slot = row * num_splits + s
    part_max = tl.load(max_ptr + slot, mask=mask, other=float("-inf"))
    part_sum = tl.load(sum_ptr + slot, mask=mask, other=0.0)
    part = tl.load(part_ptr + slot[:, None] * HEAD_DIM + d[None, :], mask=mask[:, None], other=0.0)
    weight = tl.exp2(part_max - tl.max(part_max, axis=0))
    result = tl.sum(part * weight[:, None], axis=0) / tl.sum(part_sum * weight, axis=0)
    tl.store(out_ptr + row * HEAD_DIM + d, result.to(out_ptr.dtype.element_ty))


def rmsnorm(delta: Any, residual: Any, weight: Any, eps: float = 1e-5) -> tuple[Any, Any]:
    """Return (norm(delta + residual) * weight, delta + residual); all (T, hidden)."""
    out, res_out = delta.new_empty(delta.shape), delta.new_empty(delta.shape)
    rows, cols = delta.shape
    warps = 8 if cols <= 4096 else 16
    _rmsnorm_kernel[(rows,)](
        delta, residual, weight, out, res_out, cols, eps,
        BLOCK=triton.next_power_of_2(cols), num_warps=warps,
    )  # fmt: skip
    return out, res_out


def rope_kv(qkv: Any, cos: Any, sin: Any, k_cache: Any, v_cache: Any, heads: int, pos0: int) -> Any:
    """Rotate Q and K of qkv (B, S, (H+2KV)*D), write K, V to caches (B, KV, C, D) at pos0...

    Returns Q as (B, S, H, D). cos, sin: fp32 (positions, D/2).
    """
    batch, seq_len, _ = qkv.shape
    kv_heads, cache_len, dim = k_cache.shape[1:]
    q = qkv.new_empty((batch, seq_len, heads, dim))
    block_h = 8
    grid = (batch * seq_len, triton.cdiv(heads + 2 * kv_heads, block_h))
    _rope_kv_kernel[grid](
        qkv, cos, sin, q, k_cache, v_cache, seq_len, pos0, cache_len,
        HEADS=heads, KV_HEADS=kv_heads, HALF=dim // 2, BLOCK_H=block_h, num_warps=2,
    )  # fmt: skip
    return q


def silu_mul(gate_up: Any) -> Any:
    """Return silu(gate) * up for gate_up (T, 2I) as (T, I)."""
    rows, cols = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, cols))
    block = 2048
    _silu_mul_kernel[(rows, triton.cdiv(cols, block))](gate_up, out, cols, BLOCK=block, num_warps=4)
    return out


def decode_attention(q: Any, k: Any, v: Any, plan: DecodePlan) -> Any:
    """One query per sequence: q (B, H, D) over caches k, v (B, KV, C, D), all C tokens."""
    batch, heads, dim = q.shape
    kv_heads, ctx = k.shape[1], k.shape[2]
    group = heads // kv_heads
    out = q.new_empty(q.shape)
    single = plan.splits == 1
    part = part_max = part_sum = out  # unused when there is one split
    if not single:
        slots = batch * heads * plan.splits
        part = q.new_empty((slots, dim), dtype=torch.float32)
        part_max, part_sum = q.new_empty((2, slots), dtype=torch.float32)
    _decode_split_kernel[(batch * kv_heads, plan.splits)](
        q, k, v, out, part, part_max, part_sum,
        ctx, ctx, plan.split_len, dim**-0.5 * 1.4426950408889634,
        GROUP=group, HEAD_DIM=dim, BLOCK_G=max(16, triton.next_power_of_2(group)),
        BLOCK_N=plan.block_n, SINGLE=single,
        num_warps=plan.num_warps, num_stages=plan.num_stages,
    )  # fmt: skip
    if not single:
        _decode_reduce_kernel[(batch * heads,)](
            part, part_max, part_sum, out, plan.splits,
            HEAD_DIM=dim, BLOCK_S=triton.next_power_of_2(plan.splits), num_warps=4,
        )  # fmt: skip
    return out
