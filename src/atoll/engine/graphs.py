"""Decode steps as CUDA graphs: one launch a step instead of some four hundred.

A graph is captured for a number of rows the first time a batch of that size comes, and serves every
batch up to that size; spare rows work on a block that belongs to nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from atoll.engine import triton_ops
from atoll.engine.attention import KvCache
from atoll.engine.kv import BlockTable

SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256)
_SPLIT_FOR = 2048


class DecodeBatch:
    """What attention needs to know of a decode step, in tensors that stay where they are."""

    def __init__(
        self, rows: int, width: int, cache: KvCache, device: torch.device, splits: int
    ) -> None:
        self.cache = cache
        self._splits = splits
        spare = cache.blocks * cache.block_size
        self.positions = torch.zeros((1, rows), dtype=torch.int64, device=device)
        self.slots = torch.full((rows,), spare, dtype=torch.int64, device=device)
        self.lengths = torch.ones((rows,), dtype=torch.int32, device=device)
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
        stage = self._stage
        return len(batch) <= SIZES[-1] and all(
            rows.count == 1
            and rows.embeds is None
            and not rows.keep
            and rows.start == stage.start
            and rows.end == stage.end
            and (rows.sample or stage.head is None)
            and len(rows.table.blocks) <= self._width
            for rows in batch
        )

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
            inputs = torch.zeros(size, dtype=torch.int64, device=device)
        else:
            inputs = torch.zeros(size, stage.width, dtype=stage.dtype, device=device)
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._body(inputs, batch)
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = self._body(inputs, batch)
        self._pool = self._pool or graph.pool()
        host = {
            "ids": torch.zeros((4, size), dtype=torch.int64).pin_memory(),
            "tables": torch.full(
                (size, self._width), stage.cache.blocks, dtype=torch.int32
            ).pin_memory(),
        }
        return _Captured(graph, batch, inputs, output, host, [(None, 0)] * size)

    def _body(self, inputs: Tensor, batch: DecodeBatch) -> Tensor:
        stage = self._stage
        hidden: Tensor = stage.embed(inputs) if stage.embed is not None else inputs
        hidden = stage.run_layers(hidden, stage.start, stage.end, batch)
        if stage.head is not None:
            hidden = stage.logits(hidden)
        return hidden

    def _fill(self, captured: _Captured, batch: Sequence[Any]) -> None:
        """Bring positions, slots, tables and inputs of this step to the device."""
        stage, rows = self._stage, len(batch)
        page = stage.cache.block_size
        ids = captured.host["ids"].numpy()
        size = ids.shape[1]
        ids[0, :rows] = [r.position for r in batch]
        ids[1, :rows] = [
            r.table.blocks[r.position // page] * page + r.position % page for r in batch
        ]
        ids[0, rows:], ids[1, rows:] = 0, stage.cache.blocks * page
        ids[2] = ids[0] + 1
        if stage.embed is not None:
            ids[3, :rows] = [int(r.data) for r in batch]
        device_ids = captured.host["ids"].to(stage.device, non_blocking=True)
        captured.batch.positions[0].copy_(device_ids[0])
        captured.batch.slots.copy_(device_ids[1])
        captured.batch.lengths.copy_(device_ids[2])
        if stage.embed is not None:
            captured.inputs.copy_(device_ids[3])
        else:
            captured.inputs[:rows].copy_(torch.cat([r.data for r in batch]))
        self._fill_tables(captured, batch, size)

    def _fill_tables(self, captured: _Captured, batch: Sequence[Any], size: int) -> None:
        """Send block tables only when one has changed."""
        tables = captured.host["tables"]
        array = tables.numpy()
        used, changed = 1, False
        for row, rows in enumerate(batch):
            blocks = rows.table.blocks
            mark = (rows.table, len(blocks))
            used = max(used, len(blocks))
            held = captured.held[row]
            if held[0] is not mark[0] or held[1] != mark[1]:
                array[row, : len(blocks)] = blocks
                captured.held[row] = mark
                changed = True
        if captured.filled > len(batch):
            array[len(batch) : captured.filled] = self._stage.cache.blocks
            captured.held[len(batch) :] = [(None, 0)] * (size - len(batch))
            used, changed = self._width, True
        captured.filled = len(batch)
        if changed:
            captured.batch.tables[:, :used].copy_(tables[:, :used], non_blocking=True)
