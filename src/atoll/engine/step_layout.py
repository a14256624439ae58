"""How a step is laid out for a graph: padded to a rung of a fixed ladder, decodes first, then prompts.

A graph works on tensors of one size at one address. All numbers of a step, whatever they are for, lie in one
array, so that they reach the device in one copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.engine.kv import BlockTable

DECODES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
"""Rows of a step of decodes alone."""
MAX_CHUNKS = 64
"""Prompts in one step; a step with more of them runs without a graph."""
_FEW = 128
"""Decodes beside prompts for which there are rungs of all sizes."""
_FINE, _MIDDLE = 1024, 2048
"""Rows up to which rungs are 64, and 128, apart; beyond, 512."""


@dataclass(frozen=True, slots=True)
class StepRung:
    """A size of steps: `rows` in all, of which the first `decodes` may be decodes.

    The others are those of prompts, in `tiles` of them at most, 0 in a step of decodes alone.
    """

    rows: int
    decodes: int
    tiles: int

    @property
    def numbers(self) -> int:
        """How many numbers a step of this size has."""
        return 4 * self.rows + self.decodes + self.samples + 4 * self.tiles

    @property
    def samples(self) -> int:
        """Rows that may ask for a token; in a step of decodes alone all do."""
        return min(self.rows, self.decodes + MAX_CHUNKS) if self.tiles else 0

    def split(self, numbers: Any) -> StepNumbers:
        """Return the parts of a NumPy array or a tensor that holds a step."""
        rows, lengths = self.rows, 4 * self.rows
        samples = lengths + self.decodes
        tiles = samples + self.samples
        return StepNumbers(
            positions=numbers[:rows],
            slots=numbers[rows : 2 * rows],
            tokens=numbers[2 * rows : 3 * rows],
            sources=numbers[3 * rows : lengths],
            lengths=numbers[lengths:samples],
            samples=numbers[samples:tiles],
            tiles=numbers[tiles : self.numbers].reshape(self.tiles, 4),
        )


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """The numbers of a step: of each row its position, its slot in the cache, its token or its source.

    A source is the row of `StageModel.chosen` that has the token, -1 where the token is known. Then how many
    positions each decode sees (0: none, the row pads the step), the rows that ask for a token, and tiles as
    `triton_ops.paged_chunks` reads them.
    """

    positions: Any
    slots: Any
    tokens: Any
    sources: Any
    lengths: Any
    samples: Any
    tiles: Any


def list_rungs(budget: int, max_sequences: int | None, tile_rows: int) -> list[StepRung]:
    """Return the ladder for steps of at most `budget` rows, from the smallest on; decodes alone come first.

    `max_sequences` are in a step at most; a tile has `tile_rows` rows of a prompt.
    """
    most = min(budget, max_sequences or budget, DECODES[-1])
    rungs = [StepRung(rows, rows, 0) for rows in DECODES[: 1 + sum(n < most for n in DECODES)]]
    sizes = [16, 32, *range(64, _FINE, 64), *range(_FINE, _MIDDLE, 128)]
    sizes += range(_MIDDLE, budget + 512, 512)
    sizes = sizes[: 1 + sum(n < budget for n in sizes)]
    # Attention is launched for all the decodes there may be: few in most steps with prompts.
    shapes = {(rows, min(rows, _FEW)) for rows in sizes}
    if most > _FEW:
        shapes |= {
            (rows, min(rows, DECODES[-1])) for rows in sizes if rows % 512 == 0 or rows >= budget
        }
    for rows, decodes in sorted(shapes):
        chunks = min(rows // 2, MAX_CHUNKS)
        rungs.append(StepRung(rows, decodes, rows // tile_rows + chunks))
    return rungs


class BlockTables:
    """Block tables of a step, a row each, as the device has them."""

    def __init__(self, rows: int, width: int) -> None:
        self.rows = np.zeros((rows, width), np.int32)
        self._held: list[BlockTable | None] = [None] * rows
        self._counts = [0] * rows
        self.used = 0
        """Columns that this step reads."""
        self.changed = False
        """Whether the device has to be told."""

    def put(self, first: int, tables: Sequence[BlockTable]) -> None:
        """Write some, from a row on; told by identity and length, not block by block: this must be quick."""
        held, used = self._held, self.used
        for row, table in enumerate(tables, first):
            count = len(table.blocks)
            if count > used:
                used = count
            if held[row] is not table or self._counts[row] != count:
                self.rows[row, :count] = table.blocks
                held[row], self._counts[row] = table, count
                self.changed = True
        self.used = used


@dataclass(frozen=True, slots=True)
class StepOrder:
    """In which order a batch is laid out: numbers of its decodes, then of its prompts; and its rung."""

    decodes: list[int]
    chunks: list[int]
    rows: int
    rung: StepRung


def order_step(batch: Sequence[Any], rungs: Sequence[StepRung]) -> StepOrder | None:
    """Lay out a batch of `SequenceRows`; None if it is larger than any rung."""
    decodes: list[int] = []
    chunks: list[int] = []
    rows = 0
    for number, each in enumerate(batch):
        rows += each.count
        (decodes if each.count == 1 else chunks).append(number)
    if len(chunks) > MAX_CHUNKS:
        return None
    for rung in rungs:
        if rung.rows >= rows and rung.decodes >= len(decodes) and bool(rung.tiles) == bool(chunks):
            return StepOrder(decodes, chunks, rows, rung)
    return None


def fill_step(
    numbers: NDArray[np.int64],
    tables: BlockTables,
    batch: Sequence[Any],
    order: StepOrder,
    page: int,
    spare: int,
    tile_rows: int,
) -> int:
    """Write the numbers and tables of a step; returns how many rows ask for a token.

    `page` is the size of a block, `spare` a slot that belongs to nobody: what pads a step is stored there.
    """
    step = order.rung.split(numbers)
    tables.used, tables.changed = 0, False
    # Decodes without a loop over all that is known of one: the device may be waiting.
    lines = [batch[number] for number in order.decodes]
    decodes = len(lines)
    tables.put(0, [rows.table for rows in lines])
    at = step.positions[:decodes]
    at[:] = [rows.position for rows in lines]
    pages, offsets = np.divmod(at, page)
    step.slots[:decodes] = tables.rows[np.arange(decodes), pages] * np.int64(page) + offsets
    if batch[0].start == 0:
        step.tokens[:decodes] = [rows.data[0] for rows in lines]
        step.sources[:decodes] = [-1 if rows.source is None else rows.source for rows in lines]
    step.lengths[:decodes] = at + 1
    step.lengths[decodes:] = 0
    row, tile = decodes, 0
    for number, sequence in zip(order.chunks, range(decodes, len(batch)), strict=True):
        rows = batch[number]
        end = row + rows.count
        at = np.arange(rows.position, rows.position + rows.count)
        step.positions[row:end] = at
        blocks = np.array(rows.table.blocks, dtype=np.int64)
        step.slots[row:end] = blocks[at // page] * page + at % page
        if rows.start == 0:
            step.tokens[row:end] = rows.data
        tables.put(sequence, [rows.table])
        for cut in cut_tiles(row, rows.count, rows.position, sequence, tile_rows):
            step.tiles[tile] = cut
            tile += 1
        row = end
    step.positions[row:], step.slots[row:], step.tokens[row:] = 0, spare, 0
    step.sources[decodes:] = -1
    step.tiles[tile:] = 0
    if not order.chunks:
        return decodes
    sampled = list_samples(batch, order)
    step.samples[: len(sampled)] = [row for _, row in sampled]
    return len(sampled)


def cut_tiles(
    row: int, count: int, position: int, sequence: int, tile_rows: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yield the tiles of a prompt's rows as `triton_ops.paged_chunks` reads them."""
    for first in range(0, count, tile_rows):
        yield row + first, min(tile_rows, count - first), position + first, sequence


def list_samples(batch: Sequence[Any], order: StepOrder) -> list[tuple[int, int]]:
    """Return who asks for a token: its number in the batch, and its last row in the step."""
    row = -1
    found = []
    for number in (*order.decodes, *order.chunks):
        row += batch[number].count
        if batch[number].sample:
            found.append((number, row))
    return found
