"""Decode steps as CUDA graphs: one launch a step instead of some four hundred.

A graph is captured for a number of rows the first time a batch of that size comes, and serves every
batch up to that size; spare rows work on a block that belongs to nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll.engine import triton_ops
from atoll.engine.attention import KvCache
from atoll.engine.kv import BlockTable
from atoll.engine.rows import RowSlice

SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256)
# Positions for which attention is divided: the division is fixed in a graph, whatever lengths come.
_SPLIT_FOR = 2048


class DecodeBatch:
    """Inputs of attention in a decode step, in tensors that stay at one address."""

    def __init__(
        self, rows: int, width: int, cache: KvCache, device: torch.device, splits: int
    ) -> None:
        self.cache = cache
        self._splits = splits
        # Past all blocks that are handed out: spare rows write there and disturb nobody.
        spare = cache.blocks * cache.block_size
        self.numbers = torch.zeros((4, rows), dtype=torch.int64, device=device)
        """Positions, slots, lengths and tokens, one under another: they come to the device at once."""
        self.positions = self.numbers[:1]
        self.slots, self.lengths, self.tokens = self.numbers[1:]
        self.slots.fill_(spare)
        self.lengths.fill_(1)
        self.tables = torch.full((rows, width), cache.blocks, dtype=torch.int32, device=device)

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, scaling: float, window: int | None = None
    ) -> Tensor:
        """Attend with one query a row."""
        page = self.cache.block_size
        return triton_ops.paged_decode(
            query, keys, values, self.tables, self.lengths, scaling, page, window, self._splits
        )


@dataclass(slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    batch: DecodeBatch
    inputs: Tensor
    output: Tensor
    host: dict[str, Tensor]
    held: list[tuple[BlockTable | None, int]] = field(default_factory=list)
    filled: int = 0


class DecodeGraphs:
    """The graphs of one stage, captured as sizes are met."""

    def __init__(self, stage: Any, longest: int) -> None:
        self._stage = stage
        page = stage.cache.block_size
        self._width = min(stage.cache.blocks, -(-longest // page)) + 1
        self._captured: dict[int, _Captured] = {}
        self._pool: Any = None

    def takes(self, batch: Sequence[Any]) -> bool:
        """Whether a batch is a plain decode step through the whole stage."""
        if len(batch) > SIZES[-1]:
            return False
        start, end, width = self._stage.start, self._stage.end, self._width
        sampling = self._stage.head is not None
        for rows in batch:
            if (
                rows.count != 1
                or rows.embeds is not None
                or rows.keep
                or rows.start != start
                or rows.end != end
                or (sampling and not rows.sample)
                or len(rows.table.blocks) > width
            ):
                return False
        return True

    def run(self, batch: Sequence[Any]) -> Tensor:
        """Run the step; returns logits where the stage has the head, else hidden states.

        The result is overwritten by the next step of the same size.
        """
        size = next(s for s in SIZES if s >= len(batch))
        if size not in self._captured:
            self._captured[size] = self._capture(size)
        captured = self._captured[size]
        self._fill(captured, batch)
        captured.graph.replay()
        return captured.output[: len(batch)]

    def _capture(self, size: int) -> _Captured:
        stage, device = self._stage, self._stage.device
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        kv_heads = next(iter(stage.cache.keys.values())).shape[1]
        splits = triton_ops.splits_for(size, kv_heads, _SPLIT_FOR, processors)
        batch = DecodeBatch(size, self._width, stage.cache, device, splits)
        if stage.embed is not None:
            inputs = batch.tokens
        else:
            inputs = torch.zeros(size, stage.width, dtype=stage.dtype, device=device)
        # Run it before, on a stream of its own: what happens only the first time must not be captured.
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._body(inputs, batch)
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = self._body(inputs, batch)
        # One pool of memory for all graphs: no two of them run at the same time.
        self._pool = self._pool or graph.pool()
        # Pinned, so that the copies to the device need not be waited for.
        host = {
            "ids": torch.zeros((4, size), dtype=torch.int64).pin_memory(),
            "tables": torch.full(
                (size, self._width), stage.cache.blocks, dtype=torch.int32
            ).pin_memory(),
        }
        if stage.embed is None:
            host["hidden"] = torch.zeros((size, stage.width), dtype=stage.dtype).pin_memory()
        return _Captured(graph, batch, inputs, output, host, [(None, 0)] * size)

    def _body(self, inputs: Tensor, batch: DecodeBatch) -> Tensor:
        stage = self._stage
        hidden: Tensor = stage.embed(inputs) if stage.embed is not None else inputs
        hidden = stage.run_layers(hidden, stage.start, stage.end, batch)
        if stage.head is not None:
            hidden = stage.logits(hidden)
        return hidden

    def _fill(self, captured: _Captured, batch: Sequence[Any]) -> None:
        """Bring positions, slots, tables and inputs of this step to the device.

        Block tables are sent only when one has changed.
        """
        stage, rows = self._stage, len(batch)
        page = stage.cache.block_size
        tables = captured.host["tables"].numpy()
        held = captured.held
        positions, slots = [], []
        used, changed = 1, False
        # The only loop over rows: it runs while the device waits.
        for row, sequence in enumerate(batch):
            at, table = sequence.position, sequence.table
            blocks = table.blocks
            count = len(blocks)
            positions.append(at)
            slots.append(blocks[at // page] * page + at % page)
            if count > used:
                used = count
            # Told by identity and length, not block by block: this loop must be short.
            if held[row][0] is not table or held[row][1] != count:
                tables[row, :count] = blocks
                held[row] = (table, count)
                changed = True
        ids = captured.host["ids"].numpy()
        ids[0, :rows], ids[1, :rows] = positions, slots
        ids[0, rows:], ids[1, rows:] = 0, stage.cache.blocks * page
        ids[2] = ids[0] + 1
        if stage.embed is not None:
            ids[3, :rows] = [sequence.data[0] for sequence in batch]
        else:
            self._fill_hidden(captured, [sequence.data for sequence in batch])
        captured.batch.numbers.copy_(captured.host["ids"], non_blocking=True)
        # Rows that the step before used and this one does not are spare again.
        if captured.filled > rows:
            tables[rows : captured.filled] = stage.cache.blocks
            held[rows:] = [(None, 0)] * (len(held) - rows)
            used, changed = self._width, True
        captured.filled = rows
        if changed:
            captured.batch.tables[:, :used].copy_(
                captured.host["tables"][:, :used], non_blocking=True
            )

    def _fill_hidden(self, captured: _Captured, slices: list[RowSlice]) -> None:
        """Bring hidden states to the device, by way of memory that it can read by itself."""
        rows, inputs = len(slices), captured.inputs
        source, first, _ = slices[0]
        # Usually they stand side by side, as they came from the stage before.
        if all(each.source is source and each.row == first + i for i, each in enumerate(slices)):
            joined = source[first : first + rows]
        else:
            joined = torch.cat([each.cut() for each in slices])
        joined = joined.to(inputs.dtype)
        if not joined.is_cuda and not joined.is_pinned():
            staged = captured.host["hidden"][:rows]
            # NumPy copies on this thread; torch would wake others for it.
            np.copyto(staged.view(torch.uint8).numpy(), joined.view(torch.uint8).numpy())
            joined = staged
        inputs[:rows].copy_(joined, non_blocking=True)
