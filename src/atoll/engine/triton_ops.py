"""Operations for GPUs: norms with their residual, rotary positions with the KV store, attention, experts.

`fused.py` says when they are used. Each has a plain counterpart in `torch_ops.py`;
`benchmarks.engine_h200` checks on a GPU that a model run with them answers as transformers does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from atoll.engine import triton_kernels as kernels
from atoll.engine.matrix_tiles import MatrixTiles
from atoll.engine.torch_ops import FP8

_TILE, _WIDE_TILE, _WIDE_BYTES, _WIDE_ROWS = 64, 128, 256, 32
"""Positions that attention takes at a time; more on Hopper and later, where keys have at most so many bytes.

Others have less memory beside their processors. With more rows, two programs on a processor are quicker than
one that takes more.
"""
_GROUP_MIN = 16
_STREAMED_ROWS = 64
"""Rows up to which reading the weights is all the time a linear layer takes."""
_BLOCK = 64
"""Outputs that one program of the linear kernel computes."""
_STEP = 128
"""Depth that it reads at a time."""
_WIDE_OUTPUTS = 2**15
"""Outputs from which on one program computes two blocks."""
_MANY_HEADS = 8
_PART, _CUT_ROWS = 128, 512
"""Parts of contexts are multiples of this many positions; rows that are cut at a time."""
_FIELDS = 8
"""Numbers from one part to the next in the list of them."""
_PROGRAMS = 6
"""Parts of contexts for each processor: as many as it works on at a time (the best of 1 to 16 on an H200)."""
_CHUNK_LINES = 128
"""Queries, rows times heads of a group, that one program of `paged_chunks` works on."""


_ROUTER_PARTS = 8
"""Parts of a router's product: it has few outputs, and each of them is read by one processor."""


@lru_cache(maxsize=16)
def overlaps(device: torch.device) -> bool:
    """Whether a kernel can be made ready while the one before still runs (Hopper and later)."""
    return torch.cuda.get_device_capability(device)[0] >= 9


def parts_of(x: Tensor) -> int:
    """Return of how many addends a result is the sum: those of `RowLinear` may come in parts."""
    return x.shape[0] if x.dim() == 3 else 1


class RowLinear:
    """A linear layer whose weights stream by once for a few rows; many rows are cuBLAS's.

    With `parts`, the most there may be, whoever reads the result of a few rows adds up its parts, float32
    [parts, rows, outputs].
    With `gated`, the result is silu(first half of the outputs) * second half.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, *, parts: int = 1, gated: bool = False
    ) -> None:
        self._weight, self._bias = weight, bias
        self._gated = gated
        outputs, depth = weight.shape
        self._outputs = outputs // 2 if gated else outputs
        # The depth is cut only where all parts are whole steps.
        self._parts = math.gcd(parts, depth // _STEP) if depth % _STEP == 0 else 1
        even = self._outputs % _BLOCK == 0 and depth % _STEP == 0
        self._streams = even and bias is None and weight.dtype != torch.float32
        processors = torch.cuda.get_device_properties(weight.device).multi_processor_count
        wide = outputs >= _WIDE_OUTPUTS and self._outputs % (2 * _BLOCK) == 0 and not gated
        self._block = 2 * _BLOCK if wide else _BLOCK
        blocks = self._outputs // self._block * self._parts
        # One block on a processor may hold more of the weights in flight than two can.
        self._stages = 4 if wide or gated else 6 if blocks <= processors else 3

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the outputs of [rows, depth]."""
        count, depth = rows.shape
        if not self._streams or count > _STREAMED_ROWS:
            out = torch.nn.functional.linear(rows, self._weight, self._bias)
            return silu_mul(out) if self._gated else out
        shape: tuple[int, ...] = (count, self._outputs)
        kind = rows.dtype
        if self._parts > 1:
            shape, kind = (self._parts, *shape), torch.float32
        out = torch.empty(shape, dtype=kind, device=rows.device)
        kernel: Any = kernels.gated_linear if self._gated else kernels.linear
        grid = (self._outputs // self._block, self._parts)
        pdl = overlaps(rows.device)
        split = {} if self._gated else {"PARTS": self._parts}
        kernel[grid](
            rows, self._weight, out, count, self._outputs,
            DEPTH=depth, ROWS=max(16, triton.next_power_of_2(count)), BLOCK=self._block,
            STEP=_STEP, PDL=pdl, num_warps=4, num_stages=self._stages, launch_pdl=pdl, **split,
        )  # fmt: skip
        return out


def stream_tiles(x: Tensor, tiles: MatrixTiles) -> Tensor:
    """Return the product of a few rows [..., depth] with a matrix in 8 or 4 bits.

    The weights stream by once and are expanded tile by tile.
    """
    codes, scales, zeros, order = tiles.codes, tiles.scales, tiles.zeros, tiles.group_of
    outputs, depth = codes.shape[0], x.shape[-1]
    flat = x.reshape(-1, depth).contiguous()
    rows = flat.shape[0]
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    # Half as many outputs where else processors would have nothing to do.
    block = _BLOCK if outputs >= _WIDE_OUTPUTS else _BLOCK // 2
    kernels.expanded_linear[(triton.cdiv(outputs, block),)](
        flat, codes, scales, codes if zeros is None else zeros, codes if order is None else order,
        out, rows, outputs, depth,
        codes.stride(0), scales.stride(0), 0 if zeros is None else zeros.stride(0), *tiles.skipped,
        KIND=tiles.kind, BITS=tiles.bits, SIDE=tiles.side, GROUP=tiles.group, SHIFT=tiles.shift,
        HAS_ZEROS=zeros is not None, INDEXED=order is not None,
        ROWS=max(16, triton.next_power_of_2(rows)), BLOCK=block, STEP=_STEP,
        EXACT=x.dtype == torch.float32, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out.view(*x.shape[:-1], outputs)


def add_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return (norm(x + residual), x + residual); without a residual, (norm(x), x).

    With a residual, x may come in parts.
    """
    rows, width = x.shape[-2:]
    out = torch.empty((rows, width), dtype=weight.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(out)
    block = triton.next_power_of_2(width)
    pdl = overlaps(x.device)
    kernels.add_norm[(rows,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        total,
        rows,
        eps,
        WIDTH=width,
        ADD=residual is not None,
        BLOCK=block,
        PARTS=parts_of(x),
        PDL=pdl,
        launch_pdl=pdl,
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

    qkv is [rows, (heads + 2 kv heads) * size] or parts of it, cos and sin [rows, size] with equal halves; the
    result is [rows, heads, size].
    """
    rows, kv_heads, size = qkv.shape[-2], keys.shape[1], keys.shape[2]
    fp8 = keys.dtype == FP8
    q = torch.empty((rows, heads, size), dtype=cos.dtype if fp8 else keys.dtype, device=qkv.device)
    many = math.gcd(_MANY_HEADS if rows > _STREAMED_ROWS else 2, heads, kv_heads)
    pdl = overlaps(qkv.device)
    kernels.rope_store[(rows, (heads + 2 * kv_heads) // many)](
        qkv,
        cos,
        sin,
        slots,
        q,
        keys.view(torch.uint8) if fp8 else keys,
        values.view(torch.uint8) if fp8 else values,
        rows,
        HEADS=heads,
        KV_HEADS=kv_heads,
        SIZE=size,
        MANY=many,
        PARTS=parts_of(qkv),
        FP8=fp8,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=many // 4 or 1,
    )
    return q


@lru_cache(maxsize=16)
def parts_wanted(device: torch.device, kv_heads: int) -> int:
    """Return into how many parts all contexts of a step are cut together: every processor has work."""
    return max(
        1, _PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count // kv_heads
    )


class ContextParts:
    """How the contexts of up to `rows` decodes are cut, so that a step does not wait for the longest.

    They are cut into equal parts, `wanted` in all, but for rounding: never more than that and one for each
    row.
    """

    def __init__(self, rows: int, kv_heads: int, wanted: int, device: torch.device) -> None:
        self.wanted = wanted
        self.items = torch.zeros((rows + wanted, _FIELDS), dtype=torch.int32, device=device)
        self.done = torch.zeros(rows * kv_heads, dtype=torch.int32, device=device)
        """How many parts of each context and KV head are done; all zeros again when all are."""

    def cut(self, lengths: Tensor) -> None:
        """Cut contexts of so many positions; a row of none has one part."""
        rows = lengths.shape[0]
        kernels.cut_contexts[(1,)](
            lengths, self.items, rows, self.wanted, rows + self.wanted,
            ROWS=_CUT_ROWS, MULTIPLE=_PART, FIELDS=_FIELDS,
        )  # fmt: skip


def paged_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    parts: ContextParts,
    scale: float,
    page: int,
    window: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend with one query a row: q [rows, heads, size] over the context of each table, cut into `parts`.

    keys and values are [slots, kv heads, size]; tables int32 [rows, pages]. A row of no context gives zeros.
    """
    rows, heads, size = q.shape
    kv_heads, fp8 = keys.shape[1], keys.dtype == FP8
    if fp8:
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    out = torch.empty_like(q) if out is None else out
    items = rows + parts.wanted
    partial = torch.empty((items, heads, size), dtype=torch.float32, device=q.device)
    maxima = torch.empty((items, heads), dtype=torch.float32, device=q.device)
    sums = torch.empty((items, heads), dtype=torch.float32, device=q.device)
    pdl = overlaps(q.device)
    # A window that no context reaches stands for none.
    window = window or 2**30
    wide = pdl and rows <= _WIDE_ROWS and size * q.element_size() <= _WIDE_BYTES
    lanes = triton.next_power_of_2(heads // kv_heads)
    kernels.decode[(kv_heads, items)](
        q, keys, values, tables, parts.items, out, scale, window, tables.shape[1],
        partial, maxima, sums, parts.done,
        HEADS=heads, KV_HEADS=kv_heads, SIZE=size, PAGE=page, GROUP=max(_GROUP_MIN, lanes),
        LANES=lanes, FIELDS=_FIELDS, TILE=_WIDE_TILE if wide else _TILE,
        EXACT=q.dtype == torch.float32, FP8=fp8, PDL=pdl, launch_pdl=pdl, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


def tile_rows(heads: int, kv_heads: int, kind: torch.dtype) -> int:
    """Return how many rows of a prompt one program of `paged_chunks` works on."""
    group: int = triton.next_power_of_2(heads // kv_heads)
    # Twice as wide, they take twice the room.
    return max(1, _CHUNK_LINES // (2 if kind == torch.float32 else 1) // group)


def paged_chunks(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    tiles: Tensor,
    scale: float,
    page: int,
    window: int | None,
    out: Tensor,
) -> None:
    """Attend with rows of prompts, [rows, heads, size], and write the results into `out`.

    tiles is int64 [tiles, 4]: the first row, how many rows (0: none), the position of the first, and the row
    of its table; no tile has more than `tile_rows` rows. The rest is as in `paged_decode`.
    """
    heads, size = q.shape[1:]
    kv_heads, fp8, exact = keys.shape[1], keys.dtype == FP8, q.dtype == torch.float32
    if fp8:
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    given = tiles.shape[0]
    kernels.chunks[(given, kv_heads)](
        q, keys, values, tables, tiles, out, scale, window or 2**30, tables.shape[1], given,
        HEADS=heads, KV_HEADS=kv_heads, SIZE=size, PAGE=page,
        GROUP=triton.next_power_of_2(heads // kv_heads), ROWS=tile_rows(heads, kv_heads, q.dtype),
        TILE=64 if exact else 128, EXACT=exact, WINDOWED=window is not None, FP8=fp8,
        num_warps=8, num_stages=1 if exact else 3,
    )  # fmt: skip


class Experts:
    """The experts of a layer: [experts, 2 * inner, width] of gates and ups, [experts, width, inner] of downs.

    Nothing depends on what is chosen but where kernels read and write: a step is the same launches whatever
    its rows are. With `parts` whoever reads the result adds up its parts, [top, rows, width].
    """

    def __init__(self, block: Any, *, parts: bool = False) -> None:
        router, experts = block.gate, block.experts
        self._router = RowLinear(router.weight.data, None, parts=_ROUTER_PARTS)
        self._top: int = router.top_k
        # Mixtral's shares always add up to one.
        self._normed = bool(getattr(router, "norm_topk_prob", True))
        self._gate_up, self._down = experts.gate_up_proj.data, experts.down_proj.data
        self._parts = parts

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the weighted sum of the experts that each of [rows, width] is sent to."""
        chosen, shares = choose_experts(self._router(rows), self._top, normed=self._normed)
        found = run_experts(rows, chosen, shares, self._gate_up, self._down)
        return found if self._parts else found.sum(0)


def choose_experts(logits: Tensor, top: int, *, normed: bool) -> tuple[Tensor, Tensor]:
    """Return which experts each row is sent to, int32 [rows, top], and the share of each, float32.

    logits is [rows, experts] or parts of it. Shares add up to one if `normed`, else with those of the experts
    that are not chosen.
    """
    rows, experts = logits.shape[-2:]
    chosen = torch.empty((rows, top), dtype=torch.int32, device=logits.device)
    shares = torch.empty((rows, top), dtype=torch.float32, device=logits.device)
    pdl = overlaps(logits.device)
    kernels.choose_experts[(rows,)](
        logits, chosen, shares, rows,
        EXPERTS=experts, TOP=top, BLOCK=triton.next_power_of_2(experts),
        LIST=triton.next_power_of_2(top), PARTS=parts_of(logits), NORMED=normed,
        PDL=pdl, launch_pdl=pdl, num_warps=1,
    )  # fmt: skip
    return chosen, shares


@dataclass(frozen=True, slots=True)
class _ExpertTiles:
    """How the products of experts are cut: `rows` of one expert by `block` outputs, `step` deep at a time."""

    rows: int
    block: int
    step: int
    warps: int
    stages: int


_EXPERT_TILES = (
    # Few pairs for each expert: its weights are read once, and that is all the time it takes.
    (8, _ExpertTiles(16, 64, 128, 4, 3)),
    (96, _ExpertTiles(64, 64, 64, 4, 4)),
    (math.inf, _ExpertTiles(128, 128, 64, 8, 3)),
)
"""By how many pairs of a row and an expert there are for each expert, at most."""


def run_experts(x: Tensor, chosen: Tensor, shares: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Return what the chosen experts make of rows [rows, width], times their shares: [top, rows, width].

    chosen and shares are as of `choose_experts`, gate_up and down as of `Experts`.
    """
    rows, top = chosen.shape
    experts, width, inner = down.shape
    pairs = rows * top
    exact = x.dtype == torch.float32
    cut = next(each for most, each in _EXPERT_TILES if pairs <= most * experts)
    # All but the last tile of an expert are full, and none is empty.
    given = min(pairs, (pairs + experts * (cut.rows - 1)) // cut.rows)
    order = torch.empty(pairs, dtype=torch.int32, device=x.device)
    tiles = torch.empty((given, 3), dtype=torch.int32, device=x.device)
    pdl = overlaps(x.device)
    kernels.sort_pairs[(experts,)](
        chosen, order, tiles, pairs, given,
        EXPERTS=experts, BINS=triton.next_power_of_2(experts), ROWS=cut.rows,
        CHUNK=512 if cut.rows == 16 else 2048, PDL=pdl, launch_pdl=pdl, num_warps=4,
    )  # fmt: skip
    inside = torch.empty((pairs, inner), dtype=x.dtype, device=x.device)
    out = torch.empty((top, rows, width), dtype=x.dtype, device=x.device)
    for source, weight, target, gated in ((x, gate_up, inside, True), (inside, down, out, False)):
        outputs = target.shape[-1]
        kernels.expert_linear[(triton.cdiv(outputs, cut.block), given)](
            source, weight, order, tiles, shares, target, rows,
            WIDTH=outputs, DEPTH=source.shape[-1], TOP=top, GATED=gated,
            # Numbers of 32 bits take twice the room.
            ROWS=cut.rows, BLOCK=cut.block, STEP=cut.step // (2 if exact else 1), EXACT=exact,
            PDL=pdl, launch_pdl=pdl, num_warps=cut.warps, num_stages=cut.stages,
        )  # fmt: skip
    return out
