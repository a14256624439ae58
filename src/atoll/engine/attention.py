"""Attention over a paged KV cache, plugged into transformers' model classes.

A batch is ragged: every sequence brings its own number of new positions (a prefill chunk or a
single decode token) and they lie one after another without padding. `PagedBatch` says which rows
are whose and where their keys and values live; the model classes hand it through to `attend`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.engine.device_copy import to_device
from atoll.engine.kv import BlockTable
from atoll.engine.step_layout import cut_tiles
from atoll.engine.torch_ops import read_rows, store_rows

IMPLEMENTATION = "atoll_paged"


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Rows `[row, row + count)` of a batch are positions `[position, position + count)` of one table."""

    row: int
    count: int
    position: int
    table: BlockTable


class KvCache:
    """Keys and values of a range of layers: per layer two tensors [slots, kv heads, head size].

    In FP8 they have no scales: keys and values of models are far from 448, the largest number.
    """

    def __init__(
        self,
        layers: Sequence[tuple[int, int, int]],
        blocks: int,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Allocate `blocks` blocks for each (layer index, kv heads, head size)."""
        self.block_size = block_size
        self.blocks = blocks
        self.layers = tuple(index for index, _, _ in layers)
        # One block more than is handed out: rows that pad a batch work there.
        slots = (blocks + 1) * block_size
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        for index, heads, size in layers:
            self.keys[index] = torch.zeros(slots, heads, size, device=device, dtype=dtype)
            self.values[index] = torch.zeros(slots, heads, size, device=device, dtype=dtype)

    def read(self, layers: Sequence[int], table: BlockTable, start: int, end: int) -> Tensor:
        """Copy positions [start, end) of some layers: [layers, 2, positions, kv heads, head size]."""
        where = slots_of(table, start, end, self.block_size, self.keys[layers[0]].device)
        return torch.stack(
            [
                torch.stack((read_rows(self.keys[i], where), read_rows(self.values[i], where)))
                for i in layers
            ]
        )

    def write(self, layers: Sequence[int], table: BlockTable, start: int, data: Tensor) -> None:
        """Put back what `read` of another cache returned, from position `start` on."""
        device = self.keys[layers[0]].device
        where = slots_of(table, start, start + data.shape[2], self.block_size, device)
        for number, index in enumerate(layers):
            store_rows(self.keys[index], where, data[number, 0].to(device))
            store_rows(self.values[index], where, data[number, 1].to(device))


def slots_of(
    table: BlockTable, start: int, end: int, block_size: int, device: torch.device
) -> Tensor:
    """Return the cache slots of positions [start, end) as an int64 tensor."""
    positions = torch.arange(start, end)
    blocks = torch.tensor(table.blocks, dtype=torch.int64)
    slots = blocks[positions // block_size] * block_size + positions % block_size
    return to_device(slots, device)


class PagedBatch:
    """Inputs of attention for one ragged batch, computed once for all layers."""

    def __init__(self, spans: Sequence[RowSpan], cache: KvCache, device: torch.device) -> None:
        self.spans = tuple(spans)
        self.cache = cache
        self.rows = sum(span.count for span in spans)
        where = [_span_rows(span, cache.block_size) for span in self.spans]
        positions, slots = (np.concatenate(each) for each in zip(*where, strict=True))
        self.positions = to_device(torch.from_numpy(positions[None]), device)
        self.slots = to_device(torch.from_numpy(slots), device)
        self._gather: dict[int, Tensor] = {}
        self._masks: dict[tuple[int, int | None], Tensor] = {}
        self._tables: tuple[Tensor, Tensor, Tensor] | None = None
        self._tiles: tuple[Tensor, Tensor] | None = None

    def context(self, number: int, stored: Tensor, window: int | None) -> Tensor:
        """Return [1, kv heads, positions, head size] of the span's keys or values.

        With a window, only the positions the first row of the span can still see.
        """
        span = self.spans[number]
        first = first_seen(span.position, window)
        end = span.position + span.count
        # Neighbouring blocks are read in place; others are gathered, by an index that all layers share.
        if span.table.contiguous:
            at = span.table.blocks[0] * self.cache.block_size
            part = stored[at + first : at + end]
        else:
            index = self._gather.get(number)
            if index is None:
                size = self.cache.block_size
                index = slots_of(span.table, 0, end, size, stored.device)
                self._gather[number] = index
            part = read_rows(stored, index[first:])
        return part.transpose(0, 1).unsqueeze(0)

    def mask(self, number: int, window: int | None, heads: int) -> Tensor:
        """Return the additive mask of a span's rows, repeated for `heads` query heads of a group."""
        key = (number, window)
        if key not in self._masks:
            span = self.spans[number]
            first = first_seen(span.position, window)
            device = self.positions.device
            rows = torch.arange(span.position, span.position + span.count, device=device)
            columns = torch.arange(first, span.position + span.count, device=device)
            distance = rows[:, None] - columns[None, :]
            visible = distance >= 0
            if window is not None:
                visible &= distance < window
            self._masks[key] = visible.repeat(heads, 1)
        return self._masks[key]

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend with [rows, heads, size] queries over what the cache holds; same shape out."""
        plain = softcap is None and sinks is None
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        spans = list(range(len(self.spans)))
        if plain and query.is_cuda:
            if window is None and self._alike():
                return self._attend_alike(query, keys, values, scaling)
            self._attend_on_gpu(query.contiguous(), keys, values, scaling, window, output)
            return output
        kv_heads = keys.shape[1]
        group = query.shape[1] // kv_heads
        for number in spans:
            span = self.spans[number]
            k = self.context(number, keys, window).to(query.dtype)
            v = self.context(number, values, window).to(query.dtype)
            q = query[span.row : span.row + span.count]
            # A whole prompt needs no mask of its own: the kernel's causal one is right from position 0.
            if plain and span.position == 0 and window is None and span.count > 1:
                out = torch.nn.functional.scaled_dot_product_attention(
                    q.transpose(0, 1).unsqueeze(0),
                    k,
                    v,
                    is_causal=True,
                    scale=scaling,
                    enable_gqa=group > 1,
                )
                output[span.row : span.row + span.count] = out[0].transpose(0, 1)
                continue
            # Query heads of one group stand beside each other as rows, so keys need no repeating.
            q = q.transpose(0, 1).reshape(1, kv_heads, group * span.count, -1)
            # A single row sees everything before it, so it needs no mask.
            mask = None if span.count == 1 else self.mask(number, window, group)
            if plain:
                out = torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, scale=scaling
                )
            else:
                out = _eager(q, k, v, mask, scaling, softcap, sinks)
            out = out.reshape(query.shape[1], span.count, -1)
            output[span.row : span.row + span.count] = out.transpose(0, 1)
        return output

    def _alike(self) -> bool:
        """Whether all are whole prompts of one length."""
        first = self.spans[0]
        return first.count > 1 and all(
            span.position == 0 and span.count == first.count for span in self.spans
        )

    def _attend_alike(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """Run whole prompts of one length together; PyTorch's kernel is a third quicker there than ours."""
        shape = (len(self.spans), self.spans[0].count, -1, query.shape[2])
        k, v = (
            read_rows(stored, self.slots).to(query.dtype).view(shape) for stored in (keys, values)
        )
        out = torch.nn.functional.scaled_dot_product_attention(
            query.view(shape).transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            scale=scaling,
            enable_gqa=query.shape[1] > keys.shape[1],
        )
        return out.transpose(1, 2).reshape(query.shape)

    def _attend_on_gpu(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scaling: float,
        window: int | None,
        output: Tensor,
    ) -> None:
        """Run all single rows in one kernel, and all rows of prompts in another."""
        from atoll.engine import triton_ops

        page, heads, kv_heads = self.cache.block_size, query.shape[1], keys.shape[1]
        single = [span for span in self.spans if span.count == 1]
        several = [span for span in self.spans if span.count > 1]
        if single:
            if self._tables is None:
                self._tables = _block_tables(single, query.device)
            rows, tables, lengths = self._tables
            wanted = triton_ops.parts_wanted(query.device, kv_heads)
            parts = triton_ops.ContextParts(len(single), kv_heads, wanted, query.device)
            parts.cut(lengths)
            output[rows] = triton_ops.paged_decode(
                query[rows], keys, values, tables, parts, scaling, page, window
            )
        if several:
            if self._tiles is None:
                each = triton_ops.tile_rows(heads, kv_heads, query.dtype)
                tiles = [
                    tile
                    for number, span in enumerate(several)
                    for tile in cut_tiles(span.row, span.count, span.position, number, each)
                ]
                tables = _block_tables(several, query.device)[1]
                self._tiles = to_device(torch.tensor(tiles), query.device), tables
            tiles_there, tables = self._tiles
            triton_ops.paged_chunks(
                query, keys, values, tables, tiles_there, scaling, page, window, output
            )


def _span_rows(span: RowSpan, block_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the positions of a span and their slots in the cache."""
    if span.count == 1:
        at, block = span.position, span.table.blocks[span.position // block_size]
        return np.array([at]), np.array([block * block_size + at % block_size])
    positions = np.arange(span.position, span.position + span.count)
    blocks = np.array(span.table.blocks, dtype=np.int64)
    return positions, blocks[positions // block_size] * block_size + positions % block_size


def first_seen(position: int, window: int | None) -> int:
    """Return the first position that the row at `position` can see."""
    return 0 if window is None else max(0, position - window + 1)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    paged: PagedBatch,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Store this layer's new keys and values and attend over all of them.

    query [1, heads, rows, size], key and value [1, kv heads, rows, size]; the result is
    [1, rows, heads, size].
    """
    del attention_mask
    # New keys are written first: a row attends to itself as well.
    cache = paged.cache
    keys, values = cache.keys[module.layer_idx], cache.values[module.layer_idx]
    store_rows(keys, paged.slots, key[0].transpose(0, 1))
    store_rows(values, paged.slots, value[0].transpose(0, 1))
    rows = query[0].transpose(0, 1)
    output = paged.attend(rows, keys, values, scaling, sliding_window, softcap, s_aux)
    return output.unsqueeze(0), None


def _eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention with capped scores (Gemma 2) or a learnt sink per head (GPT-OSS)."""
    scores = (q @ k.transpose(2, 3)) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        # The smallest number, not -inf: a row that sees nothing would become NaN.
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is None:
        return torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v
    kv_heads, rows = q.shape[1], q.shape[2]
    column = sinks.view(kv_heads, -1, 1).expand(kv_heads, -1, rows // (sinks.numel() // kv_heads))
    column = column.reshape(1, kv_heads, rows, 1).to(scores.dtype)
    # The sink takes part in the softmax and is then left out: it has no value.
    joined = torch.cat((scores, column), dim=-1)
    joined = joined - joined.max(dim=-1, keepdim=True).values
    weights = torch.softmax(joined, dim=-1, dtype=torch.float32)[..., :-1]
    return weights.to(q.dtype) @ v


def _block_tables(spans: Sequence[RowSpan], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows, block tables and context lengths; the lengths are of single rows."""
    width = max(len(span.table.blocks) for span in spans)
    # Filled up with block 0, which lengths keep from being read.
    tables = [span.table.blocks + [0] * (width - len(span.table.blocks)) for span in spans]
    return (
        to_device(torch.tensor([span.row for span in spans]), device),
        to_device(torch.tensor(tables, dtype=torch.int32), device),
        to_device(torch.tensor([s.position + 1 for s in spans], dtype=torch.int32), device),
    )


def register() -> None:
    """Make the implementation known to transformers (idempotent)."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, attend)
