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
_PART = 128
"""Parts of contexts are multiples of this many positions."""


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
        return 4 * self.rows + self.decodes + self.samples + 4 * self.tiles + 1

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
            tiles=numbers[tiles : self.numbers - 1].reshape(self.tiles, 4),
            part=numbers[self.numbers - 1 : self.numbers],
        )


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """The numbers of a step: of each row its position, its slot in the cache, its token or its source.

    A source is the row of `StageModel.chosen` that has the token, -1 where the token is known. Then how many
    positions each decode sees (0: none, the row pads the step), the rows that ask for a token, and tiles as
    `triton_ops.paged_chunks` reads them. `part` is one number, see `part_length`.
    """

    positions: Any
    slots: Any
    tokens: Any
    sources: Any
    lengths: Any
    samples: Any
    tiles: Any
    part: Any


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
        self._held: list[tuple[BlockTable | None, int]] = [(None, 0)] * rows
        self.used = 0
        """Columns that this step reads."""
        self.changed = False
        """Whether the device has to be told."""

    def put(self, row: int, table: BlockTable) -> None:
        """Write one; told by identity and length, not block by block: this must be quick."""
        blocks = table.blocks
        count = len(blocks)
        if count > self.used:
            self.used = count
        if self._held[row][0] is not table or self._held[row][1] != count:
            self.rows[row, :count] = blocks
            self._held[row] = (table, count)
            self.changed = True


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
    parts: int,
) -> int:
    """Write the numbers and tables of a step; returns how many rows ask for a token.

    `page` is the size of a block, `spare` a slot that belongs to nobody: what pads a step is stored there.
    Contexts are cut into some `parts` parts in all.
    """
    step = order.rung.split(numbers)
    tables.used, tables.changed = 0, False
    positions, slots, tokens, sources = [], [], [], []
    # The only loop over decodes: it runs while the device may be waiting.
    for row, number in enumerate(order.decodes):
        rows = batch[number]
        at, table = rows.position, rows.table
        positions.append(at)
        slots.append(table.blocks[at // page] * page + at % page)
        if rows.start == 0:
            tokens.append(rows.data[0])
            sources.append(-1 if rows.source is None else rows.source)
        tables.put(row, table)
    decodes = len(positions)
    for part, values in ((step.positions, positions), (step.slots, slots)):
        part[:decodes] = values
    if tokens:
        step.tokens[:decodes], step.sources[:decodes] = tokens, sources
    step.lengths[:decodes] = step.positions[:decodes] + 1
    step.lengths[decodes:] = 0
    step.part[0] = part_length(sum(positions), parts)
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
        tables.put(sequence, rows.table)
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


def part_length(positions: int, parts: int) -> int:
    """Return of how many positions a part of a context is, of all contexts together.

    As long as their mean where each gives work to one processor: the step does not wait for the longest.
    """
    return _PART * max(1, -(-positions // (parts * _PART)))


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
