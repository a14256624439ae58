"""Triton kernels; `triton_ops` gives them their shapes and says what they are for.

Numbers that change from step to step are not specialised: a kernel is compiled once for all of them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _await_inputs(PDL: tl.constexpr):
    """Let the next kernel be made ready now, and go on once the one before has written everything."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def _from_fp8(code):
    """Numbers in float32 of E4M3 in bytes, taken apart by hand: not all GPUs have the format."""
    code = code.to(tl.int32)
    # In the place of a half's exponent and mantissa they are too small by 2 ** 8.
    half = (((code & 128) << 8) | ((code & 127) << 7)).to(tl.uint16)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def _to_fp8(value):
    """E4M3 in bytes of numbers, rounded to even; what it cannot hold becomes its largest number."""
    small = tl.minimum(tl.maximum(value.to(tl.float32), -448.0), 448.0) * 0.00390625
    half = small.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.int32)
    size = half & 0x7FFF
    size = (size + 63 + ((size >> 7) & 1)) >> 7
    return (size | ((half >> 8) & 128)).to(tl.uint8)


@triton.jit(do_not_specialize=["rows"])
def add_norm(
    x, residual, weight, out, total, rows, eps,
    WIDTH: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * WIDTH
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    _await_inputs(PDL)
    value = tl.load(x + row + columns, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        there = x + part * rows * WIDTH + row
        value += tl.load(there + columns, mask=inside, other=0.0)
    if ADD:
        if PARTS > 1:
            value = value.to(total.dtype.element_ty).to(tl.float32)
        value += tl.load(residual + row + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row + columns, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / WIDTH + eps)
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


@triton.jit(do_not_specialize=["rows"])
def rope_store(
    qkv, cos, sin, slots, q_out, keys, values, rows,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, MANY: tl.constexpr,
    PARTS: tl.constexpr, PDL: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Turn and store MANY heads of a row, all of the same kind: queries, keys or values."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * MANY
    heads = tl.arange(0, MANY)[:, None]
    half = tl.arange(0, SIZE // 2)[None, :]
    width: tl.constexpr = (HEADS + 2 * KV_HEADS) * SIZE
    base = qkv + row * width + (first + heads) * SIZE + half
    kind = q_out.dtype.element_ty
    _await_inputs(PDL)
    low = tl.load(base)
    high = tl.load(base + SIZE // 2)
    for part in tl.static_range(1, PARTS):
        there = base + part * rows * width
        low += tl.load(there)
        high += tl.load(there + SIZE // 2)
    low, high = low.to(kind), high.to(kind)
    slot = tl.load(slots + row)
    if first < HEADS + KV_HEADS:
        c = tl.load(cos + row * SIZE + half).to(tl.float32)
        s = tl.load(sin + row * SIZE + half).to(tl.float32)
        a, b = low.to(tl.float32), high.to(tl.float32)
        low = (a * c - b * s).to(kind)
        high = (b * c + a * s).to(kind)
    where = heads * SIZE + half
    if first < HEADS:
        target = q_out + (row * HEADS + first) * SIZE
        tl.store(target + where, low)
        tl.store(target + where + SIZE // 2, high)
    else:
        if first < HEADS + KV_HEADS:
            kept = keys + (slot * KV_HEADS + first - HEADS) * SIZE
        else:
            kept = values + (slot * KV_HEADS + first - HEADS - KV_HEADS) * SIZE
        if FP8:
            tl.store(kept + where, _to_fp8(low))
            tl.store(kept + where + SIZE // 2, _to_fp8(high))
        else:
            tl.store(kept + where, low)
            tl.store(kept + where + SIZE // 2, high)


@triton.jit(do_not_specialize=["rows"])
def linear(
    x, weight, out, rows, width,
    DEPTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK outputs of all rows, over one of PARTS parts of the depth; the weights stream by once."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.program_id(1)
    depth: tl.constexpr = DEPTH // PARTS
    step = tl.arange(0, STEP)
    row = tl.arange(0, ROWS)
    there = row < rows
    w = weight + column[:, None].to(tl.int64) * DEPTH + part * depth + step[None, :]
    a = x + row[None, :] * DEPTH + part * depth + step[:, None]
    acc = tl.zeros((BLOCK, ROWS), tl.float32)
    _await_inputs(PDL)
    for _ in range(0, depth, STEP):
        acc = tl.dot(
            tl.load(w, eviction_policy="evict_first"),
            tl.load(a, mask=there[None, :], other=0.0),
            acc,
        )
        w += STEP
        a += STEP
    target = out + (part * rows + row[None, :]).to(tl.int64) * width + column[:, None]
    tl.store(target, acc.to(out.dtype.element_ty), mask=there[None, :])


@triton.jit(do_not_specialize=["rows"])
def gated_linear(
    x, weight, out, rows, width,
    DEPTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK outputs silu(gate) * up of all rows; gates are the first `width` rows of the weight."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    step = tl.arange(0, STEP)
    row = tl.arange(0, ROWS)
    there = row < rows
    gate_w = weight + column[:, None].to(tl.int64) * DEPTH + step[None, :]
    up_w = gate_w + width.to(tl.int64) * DEPTH
    a = x + row[None, :] * DEPTH + step[:, None]
    gate = tl.zeros((BLOCK, ROWS), tl.float32)
    up = tl.zeros((BLOCK, ROWS), tl.float32)
    _await_inputs(PDL)
    for _ in range(0, DEPTH, STEP):
        inputs = tl.load(a, mask=there[None, :], other=0.0)
        gate = tl.dot(tl.load(gate_w, eviction_policy="evict_first"), inputs, gate)
        up = tl.dot(tl.load(up_w, eviction_policy="evict_first"), inputs, up)
        gate_w += STEP
        up_w += STEP
        a += STEP
    kind = out.dtype.element_ty
    gate, up = gate.to(kind).to(tl.float32), up.to(kind).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    target = out + row[None, :].to(tl.int64) * width + column[:, None]
    tl.store(target, value.to(kind), mask=there[None, :])


@triton.jit(do_not_specialize=["rows"])
def choose_experts(
    logits, chosen, shares, rows,
    EXPERTS: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr, LIST: tl.constexpr,
    PARTS: tl.constexpr, NORMED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The TOP experts of a row and their shares: of the chosen alone if NORMED, else of all."""
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    real = expert < EXPERTS
    _await_inputs(PDL)
    at = logits + row * EXPERTS + expert
    score = tl.load(at, mask=real, other=float("-inf")).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        score += tl.load(at + part * rows * EXPERTS, mask=real, other=0.0)
    best = tl.max(score, 0)
    total = tl.sum(tl.exp(score - best), 0)
    place = tl.arange(0, LIST)
    found = tl.zeros((LIST,), tl.int32)
    share = tl.zeros((LIST,), tl.float32)
    for number in tl.static_range(TOP):
        value, index = tl.max(score, 0, return_indices=True)
        # Of scores that are no numbers any may be called the best; there must be such an expert.
        index = tl.minimum(index, EXPERTS - 1)
        found = tl.where(place == number, index, found)
        share = tl.where(place == number, tl.exp(value - best), share)
        score = tl.where(expert == index, float("-inf"), score)
    if NORMED:
        total = tl.sum(share, 0)
    tl.store(chosen + row * TOP + place, found, mask=place < TOP)
    tl.store(shares + row * TOP + place, share / total, mask=place < TOP)


@triton.jit(do_not_specialize=["pairs", "tiles_given"])
def sort_pairs(
    chosen, order, tiles, pairs, tiles_given,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Put the pairs of one expert in order, and cut them into tiles of up to ROWS."""
    own = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    bins = tl.arange(0, BINS)
    _await_inputs(PDL)
    counts = tl.zeros((BINS,), tl.int32)
    for at in range(0, pairs, CHUNK):
        counts += tl.histogram(tl.load(chosen + at + lane, mask=at + lane < pairs, other=0), BINS)
    # What was read beyond the last pair has been counted as expert 0.
    counts -= tl.where(bins == 0, tl.cdiv(pairs, CHUNK) * CHUNK - pairs, 0)
    cut = (counts + ROWS - 1) // ROWS
    first = tl.sum(tl.where(bins < own, counts, 0), 0)
    count = tl.sum(tl.where(bins == own, counts, 0), 0)
    tile = tl.sum(tl.where(bins < own, cut, 0), 0)
    for done in range(0, count, ROWS):
        target = tiles + (tile + done // ROWS) * 3
        tl.store(target, own)
        tl.store(target + 1, first + done)
        tl.store(target + 2, tl.minimum(count - done, ROWS))
    # Tiles that are left over have no pairs; all programs together mark them.
    for spare in range(tl.sum(cut, 0) + own, tiles_given, EXPERTS):
        tl.store(tiles + spare * 3 + 2, 0)
    if count > 0:
        for at in range(0, pairs, CHUNK):
            pair = at + lane
            mine = tl.load(chosen + pair, mask=pair < pairs, other=-1) == own
            place = first + tl.cumsum(mine.to(tl.int32), 0) - 1
            tl.store(order + place, pair, mask=mine)
            first += tl.sum(mine.to(tl.int32), 0)


@triton.jit(do_not_specialize=["rows"])
def expert_linear(
    x, weight, order, tiles, shares, out, rows,
    WIDTH: tl.constexpr, DEPTH: tl.constexpr, TOP: tl.constexpr, GATED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, EXACT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK outputs of a tile of pairs, all of one expert.

    GATED: rows of x to silu(gate) * up of each pair, in their order; else from these to [TOP, rows, WIDTH],
    times their shares.
    """
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tile = tiles + tl.program_id(1) * 3
    step = tl.arange(0, STEP)
    line = tl.arange(0, ROWS)
    _await_inputs(PDL)
    count = tl.load(tile + 2)
    # A tile of no pairs pads the step.
    if count <= 0:
        return
    there = line < count
    place = tl.load(tile + 1) + line
    pair = tl.load(order + place, mask=there, other=0)
    source = pair // TOP if GATED else place
    # Outputs beyond the last are computed as the last is, and not stored.
    wide = tl.minimum(column, WIDTH - 1)
    sides: tl.constexpr = 2 if GATED else 1
    w = (
        weight
        + (tl.load(tile).to(tl.int64) * sides * WIDTH + wide[:, None]) * DEPTH
        + step[None, :]
    )
    a = x + source[None, :].to(tl.int64) * DEPTH + step[:, None]
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    acc = tl.zeros((BLOCK, ROWS), tl.float32)
    up = tl.zeros((BLOCK, ROWS), tl.float32)
    for at in range(0, DEPTH, STEP):
        deep = step < DEPTH - at
        if DEPTH % STEP == 0:
            inputs = tl.load(a, mask=there[None, :], other=0.0)
            acc = tl.dot(tl.load(w), inputs, acc, input_precision=precision)
            if GATED:
                up = tl.dot(tl.load(w + WIDTH * DEPTH), inputs, up, input_precision=precision)
        else:
            inputs = tl.load(a, mask=there[None, :] & deep[:, None], other=0.0)
            weights = tl.load(w, mask=deep[None, :], other=0.0)
            acc = tl.dot(weights, inputs, acc, input_precision=precision)
            if GATED:
                weights = tl.load(w + WIDTH * DEPTH, mask=deep[None, :], other=0.0)
                up = tl.dot(weights, inputs, up, input_precision=precision)
        w += STEP
        a += STEP
    kind = out.dtype.element_ty
    value = acc.to(kind).to(tl.float32)
    if GATED:
        value = value * tl.sigmoid(value) * up.to(kind).to(tl.float32)
        target = place
    else:
        value *= tl.load(shares + pair, mask=there, other=0.0)[None, :]
        target = pair % TOP * rows + pair // TOP
    where = out + target[None, :].to(tl.int64) * WIDTH + column[:, None]
    tl.store(where, value.to(kind), mask=there[None, :] & (column < WIDTH)[:, None])


@triton.jit
def _expand(
    codes, scales, zeros, group_of, column, deep, wide, depth,
    code_stride, scale_stride, zero_stride, skipped_rows, skipped_columns,
    KIND: tl.constexpr, BITS: tl.constexpr, SIDE: tl.constexpr, GROUP: tl.constexpr,
    SHIFT: tl.constexpr, HAS_ZEROS: tl.constexpr, INDEXED: tl.constexpr,
):  # fmt: skip
    """Weights [columns, depth] of a tile in float32; `column` are rows of the matrix, `deep` its columns.

    Bytes are taken apart by hand: not all GPUs that run this have the format.
    """
    inside = wide[:, None] & (deep < depth)[None, :]
    if INDEXED:
        group = tl.load(group_of + deep, mask=deep < depth, other=0)
    else:
        group = (deep + skipped_columns) // GROUP
    where = ((column + skipped_rows) // SIDE).to(tl.int64)[:, None] * scale_stride + group[None, :]
    scale = tl.load(scales + where, mask=inside, other=0)
    line = column.to(tl.int64)[:, None] * code_stride
    if BITS == 4:
        byte = tl.load(codes + line + deep[None, :] // 2, mask=inside, other=0).to(tl.int32)
        code = (byte >> ((deep[None, :] % 2) * 4)) & 15
    else:
        code = tl.load(codes + line + deep[None, :], mask=inside, other=0).to(tl.int32)
    if KIND == "int":
        if HAS_ZEROS:
            many: tl.constexpr = 8 // BITS
            at = (column // many).to(tl.int64)[:, None] * zero_stride + group[None, :]
            zero = tl.load(zeros + at, mask=inside, other=0).to(tl.int32)
            if BITS == 4:
                zero = (zero >> ((column[:, None] % 2) * 4)) & 15
            zero += SHIFT
        else:
            zero = 1 << (BITS - 1)
        weight = (code - zero).to(tl.float32) * scale.to(tl.float32)
    elif KIND == "fp8":
        weight = _from_fp8(code) * scale.to(tl.float32)
    else:
        exponent, mantissa = (code >> 1) & 3, code & 1
        normal = (2 + mantissa) << tl.maximum(exponent - 1, 0)
        twice = tl.where(exponent == 0, mantissa, normal)
        value = tl.where(code >= 8, -twice, twice).to(tl.float32) * 0.5
        weight = value * tl.exp2(scale.to(tl.float32) - 127.0)
    return weight


@triton.jit(do_not_specialize=["rows"])
def expanded_linear(
    x, codes, scales, zeros, group_of, out, rows, width, depth,
    code_stride, scale_stride, zero_stride, skipped_rows, skipped_columns,
    KIND: tl.constexpr, BITS: tl.constexpr, SIDE: tl.constexpr, GROUP: tl.constexpr,
    SHIFT: tl.constexpr, HAS_ZEROS: tl.constexpr, INDEXED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """BLOCK outputs of all rows; weights in 8 or 4 bits stream by once and are expanded tile by tile."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wide = column < width
    row = tl.arange(0, ROWS)
    there = row < rows
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    acc = tl.zeros((BLOCK, ROWS), tl.float32)
    for at in range(0, depth, STEP):
        deep = at + tl.arange(0, STEP)
        weight = _expand(
            codes, scales, zeros, group_of, column, deep, wide, depth,
            code_stride, scale_stride, zero_stride, skipped_rows, skipped_columns,
            KIND, BITS, SIDE, GROUP, SHIFT, HAS_ZEROS, INDEXED,
        )  # fmt: skip
        given = there[None, :] & (deep < depth)[:, None]
        a = tl.load(x + row[None, :] * depth + deep[:, None], mask=given, other=0.0)
        acc = tl.dot(weight.to(a.dtype), a, acc, input_precision=precision)
    target = out + row[None, :].to(tl.int64) * width + column[:, None]
    tl.store(target, acc.to(out.dtype.element_ty), mask=there[None, :] & wide[:, None])


@triton.jit(do_not_specialize=["rows", "wanted", "room"])
def cut_contexts(
    lengths, items, rows, wanted, room,
    ROWS: tl.constexpr, MULTIPLE: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """List the parts of all contexts, the longest of three kinds first, that no long one is begun last.

    Of each part: its row, its number in it, the length of parts and of all, where its row's first part is
    kept, and how many there are. Row -1 stands for none. A row of no context has one part, of nothing.
    """
    total = 0
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)
        total += tl.sum(tl.load(lengths + row, mask=row < rows, other=0).to(tl.int32))
    usual = tl.maximum(tl.cdiv(total, wanted * MULTIPLE), 1) * MULTIPLE
    listed = 0
    for kind in tl.static_range(3):
        begun = 0
        for first in range(0, rows, ROWS):
            row = first + tl.arange(0, ROWS)
            length = tl.load(lengths + row, mask=row < rows, other=0).to(tl.int32)
            # Equal parts of a context, about as long as usual: none is a short rest.
            cut = tl.maximum((2 * length + usual) // (2 * usual), 1)
            share = tl.maximum(tl.cdiv(tl.cdiv(length, MULTIPLE), cut), 1) * MULTIPLE
            count = tl.where(row < rows, tl.maximum(tl.cdiv(length, share), 1), 0)
            kept = begun + tl.cumsum(count) - count
            begun += tl.sum(count)
            size = tl.minimum(share, length)
            rank = (size < usual).to(tl.int32) + (2 * size < usual).to(tl.int32)
            here = tl.where(rank == kind, count, 0)
            place = listed + tl.cumsum(here) - here
            listed += tl.sum(here)
            for number in range(tl.max(here)):
                item = items + (place + number) * FIELDS
                given = number < here
                tl.store(item, row, mask=given)
                tl.store(item + 1, number, mask=given)
                tl.store(item + 2, share, mask=given)
                tl.store(item + 3, length, mask=given)
                tl.store(item + 4, kept, mask=given)
                tl.store(item + 5, count, mask=given)
    for first in range(listed, room, ROWS):
        place = first + tl.arange(0, ROWS)
        tl.store(items + place * FIELDS, -1, mask=place < room)


@triton.jit(do_not_specialize=["table_width"])
def decode(
    q, keys, values, tables, items, out, scale, window, table_width, partial, maxima, sums, done,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr,
    GROUP: tl.constexpr, LANES: tl.constexpr, TILE: tl.constexpr, FIELDS: tl.constexpr,
    EXACT: tl.constexpr, PDL: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    # KV heads of one context side by side: their keys lie beside each other.
    kv_head = tl.program_id(0)
    item = items + tl.program_id(1) * FIELDS
    row = tl.load(item).to(tl.int64)
    number = tl.load(item + 1)
    share = tl.load(item + 2)
    length = tl.load(item + 3)
    kept = tl.load(item + 4)
    count = tl.load(item + 5)
    first = tl.maximum(length - window, 0)
    # Parts before the window are none.
    skipped = first // share
    begin = tl.maximum(number * share, first)
    end = tl.minimum((number + 1) * share, length)
    if (row >= 0) & (number >= skipped):
        group: tl.constexpr = HEADS // KV_HEADS
        precision: tl.constexpr = "ieee" if EXACT else "tf32"
        heads = tl.arange(0, GROUP)
        size = tl.arange(0, SIZE)
        mine = heads < group
        head = kv_head * group + heads
        _await_inputs(PDL)
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
            k = tl.load(keys + where[:, None] + size[None, :], mask=inside[:, None], other=0)
            if FP8:
                k = _from_fp8(k).to(query.dtype)
            scores = tl.dot(query, tl.trans(k), input_precision=precision).to(tl.float32) * scale
            scores = tl.where(inside[None, :], scores, -1.0e30)
            new_best = tl.maximum(best, tl.max(scores, 1))
            weight = tl.exp(scores - new_best[:, None])
            fade = tl.exp(best - new_best)
            total = total * fade + tl.sum(weight, 1)
            v = tl.load(values + where[:, None] + size[None, :], mask=inside[:, None], other=0)
            if FP8:
                v = _from_fp8(v).to(query.dtype)
            acc = acc * fade[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=precision)
            best = new_best
        if count - skipped == 1:
            # The only part: nothing is put together afterwards. A row of no length has nothing to add up.
            result = acc / tl.maximum(total, 1.0e-30)[:, None]
            tl.store(
                out + (row * HEADS + head[:, None]) * SIZE + size[None, :],
                result.to(out.dtype.element_ty),
                mask=mine[:, None],
            )
        else:
            here = (kept + number) * HEADS + head
            tl.store(partial + here[:, None] * SIZE + size[None, :], acc, mask=mine[:, None])
            tl.store(maxima + here, best, mask=mine)
            tl.store(sums + here, total, mask=mine)
            # All threads have written before one of them says so.
            tl.debug_barrier()
            counter = done + row * KV_HEADS + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel") == count - skipped - 1:
                # The last of a context puts its parts together, and leaves the count as it was.
                tl.store(counter, 0)
                _join_parts(
                    partial, maxima, sums, out, kept, skipped, count, row, kv_head * group,
                    group, HEADS, SIZE, LANES,
                )  # fmt: skip


@triton.jit
def _join_parts(
    partial, maxima, sums, out, kept, skipped, count, row, first_head,
    MINE: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Put the parts of a context together, of MINE heads from one on, padded to LANES."""
    size = tl.arange(0, SIZE)
    lane = tl.arange(0, LANES)
    mine = lane < MINE
    best = tl.full((LANES,), -1.0e30, tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    acc = tl.zeros((LANES, SIZE), tl.float32)
    for number in range(skipped, count):
        there = (kept + number) * HEADS + first_head + lane
        largest = tl.load(maxima + there, mask=mine, other=-1.0e30, cache_modifier=".cg")
        added = tl.load(sums + there, mask=mine, other=0.0, cache_modifier=".cg")
        value = tl.load(
            partial + there[:, None] * SIZE + size[None, :],
            mask=mine[:, None], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        new_best = tl.maximum(best, largest)
        fade, weight = tl.exp(best - new_best), tl.exp(largest - new_best)
        total = total * fade + added * weight
        acc = acc * fade[:, None] + value * weight[:, None]
        best = new_best
    result = acc / tl.maximum(total, 1.0e-30)[:, None]
    tl.store(
        out + (row * HEADS + first_head + lane[:, None]) * SIZE + size[None, :],
        result.to(out.dtype.element_ty),
        mask=mine[:, None],
    )


@triton.jit
def _attend_tile(
    query, best, total, acc, keys, values, table, at, end, own, kv_head, window, scaled,
    KV_HEADS: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Take in TILE positions from `at` on; `own` are the positions of the queries."""
    size = tl.arange(0, SIZE)
    there = at + tl.arange(0, TILE)
    inside = there < end
    page = tl.load(table + there // PAGE, mask=inside, other=0)
    slot = page.to(tl.int64) * PAGE + there % PAGE
    where = (slot * KV_HEADS + kv_head) * SIZE
    k = tl.load(keys + where[:, None] + size[None, :], mask=inside[:, None], other=0)
    if FP8:
        k = _from_fp8(k).to(query.dtype)
    scores = tl.dot(query, tl.trans(k), input_precision=PRECISION).to(tl.float32) * scaled
    if MASKED:
        seen = there[None, :] <= own[:, None]
        if WINDOWED:
            seen = seen & (there[None, :] > own[:, None] - window)
        scores = tl.where(seen, scores, -1.0e30)
    new_best = tl.maximum(best, tl.max(scores, 1))
    weight = tl.exp2(scores - new_best[:, None])
    if WINDOWED:
        # Before its window begins a row has seen nothing, and all is as large as the largest.
        weight = tl.where(new_best[:, None] > -1.0e29, weight, 0.0)
    fade = tl.exp2(best - new_best)
    total = total * fade + tl.sum(weight, 1)
    v = tl.load(values + where[:, None] + size[None, :], mask=inside[:, None], other=0)
    if FP8:
        v = _from_fp8(v).to(query.dtype)
    acc = tl.dot(weight.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
    return new_best, total, acc


@triton.jit(do_not_specialize=["table_width", "tiles_given"])
def chunks(
    q, keys, values, tables, tiles, out, scale, window, table_width, tiles_given,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, EXACT: tl.constexpr,
    WINDOWED: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Attention of up to ROWS rows of one prompt, with the query heads that share a KV head side by side."""
    # The last first: the later in a prompt, the more there is to read.
    tile = tiles + (tiles_given - 1 - tl.program_id(0)) * 4
    kv_head = tl.program_id(1)
    first_row = tl.load(tile)
    count = tl.load(tile + 1).to(tl.int32)
    position = tl.load(tile + 2).to(tl.int32)
    table = tables + tl.load(tile + 3) * table_width
    # A tile of no rows pads the batch.
    if count <= 0:
        return
    group: tl.constexpr = HEADS // KV_HEADS
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    line = tl.arange(0, ROWS * GROUP)
    row, head = line // GROUP, line % GROUP
    size = tl.arange(0, SIZE)
    mine = (row < count) & (head < group)
    place = (first_row + row) * HEADS + kv_head * group + head
    query = tl.load(q + place[:, None] * SIZE + size[None, :], mask=mine[:, None], other=0.0)
    # Powers of two are quicker than those of e.
    scaled = scale * 1.44269504
    best = tl.full((ROWS * GROUP,), -1.0e30, tl.float32)
    total = tl.zeros((ROWS * GROUP,), tl.float32)
    acc = tl.zeros((ROWS * GROUP, SIZE), tl.float32)
    end = position + count
    begin = 0
    if WINDOWED:
        begin = tl.maximum(position - window + 1, 0) // TILE * TILE
    # Only in the last tiles, and at the beginning of a window, are there positions that not all rows see.
    border = tl.maximum(position // TILE * TILE, begin)
    for at in range(begin, border, TILE):
        best, total, acc = _attend_tile(
            query, best, total, acc, keys, values, table, at, end, position + row, kv_head, window,
            scaled, KV_HEADS, SIZE, PAGE, TILE, precision, WINDOWED, WINDOWED, FP8,
        )  # fmt: skip
    for at in range(border, end, TILE):
        best, total, acc = _attend_tile(
            query, best, total, acc, keys, values, table, at, end, position + row, kv_head, window,
            scaled, KV_HEADS, SIZE, PAGE, TILE, precision, True, WINDOWED, FP8,
        )  # fmt: skip
    result = acc / tl.maximum(total, 1.0e-30)[:, None]
    target = out + place[:, None] * SIZE + size[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=mine[:, None])
