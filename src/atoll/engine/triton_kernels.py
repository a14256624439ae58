"""Triton kernels; `triton_ops` gives them their shapes and says what they are for."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_norm(
    x,
    residual,
    weight,
    out,
    total,
    eps,
    WIDTH: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * WIDTH
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    value = tl.load(x + row + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row + columns, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / WIDTH + eps)
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + columns, (value * scale * w).to(out.dtype.element_ty), mask=inside)


@triton.jit
def silu_mul(x, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    gate = tl.load(x + row * 2 * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * WIDTH + WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    tl.store(out + row * WIDTH + columns, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def rope_store(
    qkv, cos, sin, slots, q_out, keys, values,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    half = tl.arange(0, SIZE // 2)
    base = qkv + row * (HEADS + 2 * KV_HEADS) * SIZE + head * SIZE
    low = tl.load(base + half)
    high = tl.load(base + SIZE // 2 + half)
    slot = tl.load(slots + row)
    if head < HEADS + KV_HEADS:
        kind = low.dtype
        c = tl.load(cos + row * SIZE + half).to(tl.float32)
        s = tl.load(sin + row * SIZE + half).to(tl.float32)
        a, b = low.to(tl.float32), high.to(tl.float32)
        low = (a * c - b * s).to(kind)
        high = (b * c + a * s).to(kind)
    if head < HEADS:
        target = q_out + (row * HEADS + head) * SIZE
    elif head < HEADS + KV_HEADS:
        target = keys + (slot * KV_HEADS + head - HEADS) * SIZE
    else:
        target = values + (slot * KV_HEADS + head - HEADS - KV_HEADS) * SIZE
    tl.store(target + half, low)
    tl.store(target + SIZE // 2 + half, high)


@triton.jit
def decode(
    q, keys, values, tables, lengths, out, scale, window, table_width,
    partial, maxima, sums,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr,
    GROUP: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths + row)
    first = tl.maximum(length - window, 0)
    tiles = tl.cdiv(length - first, TILE)
    share = tl.cdiv(tiles, SPLITS) * TILE
    begin = first + split * share
    end = tl.minimum(begin + share, length)

    group: tl.constexpr = HEADS // KV_HEADS
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    heads = tl.arange(0, GROUP)
    size = tl.arange(0, SIZE)
    mine = heads < group
    head = kv_head * group + heads
    query = tl.load(
        q + (row * HEADS + head[:, None]) * SIZE + size[None, :], mask=mine[:, None], other=0.0
    )
    best = tl.full((GROUP,), -1.0e30, tl.float32)
    total = tl.zeros((GROUP,), tl.float32)
    acc = tl.zeros((GROUP, SIZE), tl.float32)
    for at in range(begin, end, TILE):
        position = at + tl.arange(0, TILE)
        inside = position < end
        page = tl.load(tables + row * table_width + position // PAGE, mask=inside, other=0)
        slot = page.to(tl.int64) * PAGE + position % PAGE
        where = (slot * KV_HEADS + kv_head) * SIZE
        k = tl.load(keys + where[:, None] + size[None, :], mask=inside[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(k), input_precision=precision).to(tl.float32) * scale
        scores = tl.where(inside[None, :], scores, -1.0e30)
        new_best = tl.maximum(best, tl.max(scores, 1))
        weight = tl.exp(scores - new_best[:, None])
        fade = tl.exp(best - new_best)
        total = total * fade + tl.sum(weight, 1)
        v = tl.load(values + where[:, None] + size[None, :], mask=inside[:, None], other=0.0)
        acc = acc * fade[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=precision)
        best = new_best
    if SPLITS == 1:
        result = acc / total[:, None]
        tl.store(
            out + (row * HEADS + head[:, None]) * SIZE + size[None, :],
            result.to(out.dtype.element_ty),
            mask=mine[:, None],
        )
    else:
        place = (row * HEADS + head) * SPLITS + split
        tl.store(partial + place[:, None] * SIZE + size[None, :], acc, mask=mine[:, None])
        tl.store(maxima + place, best, mask=mine)
        tl.store(sums + place, total, mask=mine)


@triton.jit
def combine(partial, maxima, sums, out, SIZE: tl.constexpr, SPLITS: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, SPLITS)
    size = tl.arange(0, SIZE)
    best = tl.load(maxima + place * SPLITS + splits)
    weight = tl.exp(best - tl.max(best, 0))
    total = tl.sum(tl.load(sums + place * SPLITS + splits) * weight, 0)
    part = tl.load(partial + (place * SPLITS + splits[:, None]) * SIZE + size[None, :])
    value = tl.sum(part * weight[:, None], 0) / total
    tl.store(out + place * SIZE + size, value.to(out.dtype.element_ty))
