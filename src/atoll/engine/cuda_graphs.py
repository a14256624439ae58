"""Steps as CUDA graphs: one launch a step instead of some four hundred.

A graph is captured for every rung of a ladder of sizes before the node is ready (`step_layout`), and serves
every step up to that size; spare rows work on a block that belongs to nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll.engine import triton_ops
from atoll.engine.attention import KvCache
from atoll.engine.compile_count import note_compiled, watch_triton
from atoll.engine.rows import RowSlice
from atoll.engine.step_layout import (
    DECODES,
    MAX_CHUNKS,
    BlockTables,
    StepNumbers,
    StepOrder,
    StepRung,
    fill_step,
    list_rungs,
    order_step,
)
from atoll.engine.weights.reader import Progress

_MAX_SEQUENCES = DECODES[-1] + MAX_CHUNKS


class StepBatch:
    """Inputs of attention in a step, in tensors that stay at one address."""

    def __init__(
        self,
        rung: StepRung,
        numbers: StepNumbers,
        tables: Tensor,
        cache: KvCache,
        parts: triton_ops.ContextParts,
    ) -> None:
        self.cache = cache
        self._rung, self._numbers, self._tables, self._parts = rung, numbers, tables, parts
        self.positions, self.slots = numbers.positions[None], numbers.slots

    def cut(self) -> None:
        """Cut the contexts of this step's decodes, once for all layers."""
        self._parts.cut(self._numbers.lengths)

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, scaling: float, window: int | None = None
    ) -> Tensor:
        """Attend with one query a row in decodes, and with the rows of prompts in tiles."""
        page, decodes = self.cache.block_size, self._rung.decodes
        # Rows that pad the step stay as they are; they must be numbers.
        out = torch.zeros_like(query) if self._rung.tiles else torch.empty_like(query)
        triton_ops.paged_decode(
            *(query[:decodes], keys, values, self._tables, self._parts),
            *(scaling, page, window, out[:decodes]),
        )
        if self._rung.tiles:
            tiles = self._numbers.tiles
            triton_ops.paged_chunks(
                query, keys, values, self._tables, tiles, scaling, page, window, out
            )
        return out


class _HostSide:
    """What a step brings to the device, in memory that it reads by itself.

    There are two, in turn: while one is read the other can be written.
    """

    def __init__(
        self, numbers: int, width: int, states: tuple[int, int], kind: torch.dtype
    ) -> None:
        self.numbers = torch.zeros(numbers, dtype=torch.int64).pin_memory()
        self.tables = torch.zeros((_MAX_SEQUENCES, width), dtype=torch.int32).pin_memory()
        self.hidden = torch.zeros(states, dtype=kind).pin_memory()
        self.read = torch.cuda.Event()


class StepGraphs:
    """The graphs of one stage."""

    def __init__(self, stage: Any, longest: int) -> None:
        watch_triton()
        self._stage = stage
        page = stage.cache.block_size
        self._width = min(stage.cache.blocks, -(-longest // page)) + 1
        self._kv_heads = next(iter(stage.cache.keys.values())).shape[1]
        heads = next(iter(stage.fused.values())).heads
        self._tile_rows = triton_ops.tile_rows(heads, self._kv_heads, stage.dtype)
        self._rungs: list[StepRung] = []
        self._graphs: dict[StepRung, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool: Any = None
        self._turn = 0

    def capture(self, budget: int, max_sequences: int | None, progress: Progress | None) -> None:
        """Capture the ladder for steps of at most `budget` rows and `max_sequences` sequences."""
        stage, device = self._stage, self._stage.device
        self._rungs = list_rungs(budget, max_sequences, self._tile_rows)
        largest = max(rung.rows for rung in self._rungs)
        numbers = max(rung.numbers for rung in self._rungs)
        # Of hidden states there are none to bring where tokens come.
        states = (0 if stage.embed is not None else largest, stage.width)
        self._numbers = torch.zeros(numbers, dtype=torch.int64, device=device)
        self._tables = torch.zeros((_MAX_SEQUENCES, self._width), dtype=torch.int32, device=device)
        self._inputs = torch.zeros(states, dtype=stage.dtype, device=device)
        wanted = triton_ops.parts_wanted(device, self._kv_heads)
        self._parts = triton_ops.ContextParts(DECODES[-1], self._kv_heads, wanted, device)
        self._host_tables = BlockTables(_MAX_SEQUENCES, self._width)
        self._sides = [_HostSide(numbers, self._width, states, stage.dtype) for _ in range(2)]
        # The largest first: the smaller ones find room in the memory that it has let go.
        ladder = sorted(self._rungs, key=lambda rung: -rung.rows)
        for number, rung in enumerate(ladder, 1):
            self._graphs[rung] = self._capture(rung)
            if progress is not None:
                kind = "prompts and decodes" if rung.tiles else "decodes"
                progress(number, len(ladder), f"{rung.rows} rows of {kind}")

    def fit(self, batch: Sequence[Any]) -> StepOrder | None:
        """Return how a batch is run as a graph; None if it cannot be."""
        start, end, width = self._stage.start, self._stage.end, self._width
        for rows in batch:
            if (
                rows.embeds is not None
                or rows.start != start
                or rows.end != end
                or len(rows.table.blocks) > width
            ):
                return None
        order = order_step(batch, self._rungs)
        # A graph of decodes ends with the logits of all of them.
        if order is not None and not order.chunks:
            sampling = self._stage.head is not None
            if any(rows.keep or (sampling and not rows.sample) for rows in batch):
                return None
        return order

    def run(self, batch: Sequence[Any], order: StepOrder) -> tuple[Tensor, Tensor]:
        """Run a step; returns its result, and the rows of it that ask for a token.

        The result of decodes alone is logits where the stage has the head, else hidden states, in the order
        of the batch; with prompts it is hidden states in the step's order. The next step overwrites it.
        """
        stage, rung = self._stage, order.rung
        self._turn = 1 - self._turn
        side = self._sides[self._turn]
        side.read.synchronize()
        page = stage.cache.block_size
        spare = stage.cache.blocks * page
        count = rung.numbers
        tables = self._host_tables
        sampled = fill_step(
            *(side.numbers.numpy()[:count], tables, batch, order),
            *(page, spare, self._tile_rows),
        )
        self._numbers[:count].copy_(side.numbers[:count], non_blocking=True)
        # Tables are sent only when one has changed.
        if tables.changed:
            part = (slice(len(batch)), slice(tables.used))
            np.copyto(side.tables.numpy()[part], tables.rows[part])
            self._tables[part].copy_(side.tables[part], non_blocking=True)
        if stage.embed is None:
            self._fill_hidden(side, [batch[n].data for n in (*order.decodes, *order.chunks)])
        side.read.record()
        graph, output = self._graphs[rung]
        graph.replay()
        return output[: order.rows], rung.split(self._numbers).samples[:sampled]

    def _capture(self, rung: StepRung) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        device = self._stage.device
        numbers = rung.split(self._numbers)
        # Nothing but rows that pad it: whatever is captured writes where nobody reads.
        self._numbers.zero_()
        numbers.slots.fill_(self._stage.cache.blocks * self._stage.cache.block_size)
        numbers.sources.fill_(-1)
        batch = StepBatch(rung, numbers, self._tables, self._stage.cache, self._parts)
        # Run it before, on a stream of its own: what happens only the first time must not be captured.
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._body(rung, numbers, batch)
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads (heartbeats, those of NCCL) may call the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = self._body(rung, numbers, batch)
        # One pool of memory for all graphs: no two of them run at the same time.
        self._pool = self._pool or graph.pool()
        note_compiled()
        return graph, output

    def _body(self, rung: StepRung, numbers: StepNumbers, batch: StepBatch) -> Tensor:
        stage = self._stage
        if stage.embed is None:
            hidden: Tensor = self._inputs[: rung.rows]
        else:
            chosen = stage.chosen[numbers.sources.clamp_min(0)]
            hidden = stage.embed(torch.where(numbers.sources < 0, numbers.tokens, chosen))
        batch.cut()
        hidden = stage.run_layers(hidden, stage.start, stage.end, batch)
        if stage.head is not None and not rung.tiles:
            hidden = stage.logits(hidden)
        return hidden

    def _fill_hidden(self, side: _HostSide, slices: list[RowSlice]) -> None:
        """Bring hidden states to the device, by way of memory that it can read by itself."""
        source, first, _ = slices[0]
        rows, side_by_side = 0, True
        for each in slices:
            side_by_side = side_by_side and each.source is source and each.row == first + rows
            rows += each.length
        # Usually they stand side by side, as they came from the stage before.
        cut = [source[first : first + rows]] if side_by_side else [each.cut() for each in slices]
        joined = cut[0] if len(cut) == 1 else torch.cat(cut)
        joined = joined.to(self._inputs.dtype)
        if not joined.is_cuda and not joined.is_pinned():
            staged = side.hidden[:rows]
            # NumPy copies on this thread; torch would wake others for it.
            np.copyto(staged.view(torch.uint8).numpy(), joined.view(torch.uint8).numpy())
            joined = staged
        self._inputs[:rows].copy_(joined, non_blocking=True)
