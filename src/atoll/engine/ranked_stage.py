"""A stage that several ranks compute together: the first of them leads, the others follow.

The first rank speaks for the node. Before it computes anything it tells the others what, over a pipe to each;
hidden states and KV that came from elsewhere it broadcasts. Whoever follows computes the same on its own part
of the layers, and throws the result away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atoll.engine.kv import BlockTable
from atoll.engine.model_stage import SequenceRows, StageModel, StageOutput
from atoll.engine.rank_group import RankGroup
from atoll.engine.rows import RowSlice
from atoll.engine.weights.reader import Progress

_MAX_TABLES = 4096
"""Block tables that followers remember; when there are more, all are forgotten and sent anew."""

Shape = tuple[int, ...]


class RankOrder(NamedTuple):
    """What all ranks are to do: a method of `StageModel`, what it is given, and changed block tables.

    `tables` has blocks by number; `forget` says that all numbers before are void. `shape` is that of a tensor
    that the first rank hands out, the last of the method's arguments; of `forward`, hidden states.
    """

    method: str
    arguments: tuple[Any, ...]
    tables: dict[int, list[int]]
    forget: bool
    shape: Shape | None


class RankedStage:
    """The stage of the first rank, with the methods of `StageModel` that a node asks for."""

    def __init__(
        self, stage: StageModel, ranks: RankGroup, tell: Callable[[RankOrder], None]
    ) -> None:
        self._stage, self._ranks, self._tell = stage, ranks, tell
        self.start, self.end, self.total = stage.start, stage.end, stage.total
        self.width, self.vocabulary = stage.width, stage.vocabulary
        self.kv_shape, self.cache = stage.kv_shape, stage.cache
        self._sent: dict[int, list[int]] = {}

    def warm(self, budget: int, max_sequences: int | None, progress: Progress | None) -> None:
        """Have all ranks make themselves ready for steps; see `StageModel.warm`."""
        self._order("warm", (budget, max_sequences), (), None)
        self._stage.warm(budget, max_sequences, progress)

    def forward(self, batch: Sequence[SequenceRows]) -> StageOutput:
        """Run a batch; see `StageModel.forward`."""
        states = [rows.data.cut() for rows in batch if rows.start > 0]
        joined = None if not states else states[0] if len(states) == 1 else torch.cat(states)
        rows = tuple(_describe(each) for each in batch)
        joined = self._order("forward", (rows,), [each.table for each in batch], joined)
        return self._stage.forward(_with_states(batch, joined))

    def logits(self, hidden: Tensor, *, normed: bool = False) -> Tensor:
        """Return logits [rows, vocabulary]; see `StageModel.logits`."""
        hidden = self._given(self._order("logits", (normed,), (), hidden))
        return self._stage.logits(hidden, normed=normed)

    def read_kv(self, layers: Sequence[int], table: BlockTable, start: int, end: int) -> Tensor:
        """Copy KV of some positions; see `StageModel.read_kv`."""
        self._order("read_kv", (tuple(layers), id(table), start, end), (table,), None)
        return self._stage.read_kv(layers, table, start, end)

    def write_kv(self, layers: Sequence[int], table: BlockTable, start: int, data: Tensor) -> None:
        """Put KV back; see `StageModel.write_kv`."""
        data = self._given(
            self._order("write_kv", (tuple(layers), id(table), start), (table,), data)
        )
        self._stage.write_kv(layers, table, start, data)

    def _order(
        self,
        method: str,
        arguments: tuple[Any, ...],
        tables: Sequence[BlockTable],
        data: Tensor | None,
    ) -> Tensor | None:
        """Tell the other ranks, and hand out `data`, which is returned as they have it."""
        forget = len(self._sent) > _MAX_TABLES
        if forget:
            self._sent.clear()
        changed = {}
        for table in tables:
            # Compared, not counted: a table may shrink and grow again, or another take its address.
            if self._sent.get(id(table)) != table.blocks:
                changed[id(table)] = self._sent[id(table)] = list(table.blocks)
        shape = None if data is None else tuple(data.shape)
        self._tell(RankOrder(method, arguments, changed, forget, shape))
        if data is None:
            return None
        with torch.inference_mode():
            data = data.to(device=self._stage.device, dtype=self._stage.dtype)
            return self._ranks.broadcast(data.contiguous())

    @staticmethod
    def _given(data: Tensor | None) -> Tensor:
        assert data is not None
        return data


class Follower:
    """A rank that is not the first: does what the first says."""

    def __init__(self, stage: StageModel, ranks: RankGroup) -> None:
        self._stage, self._ranks = stage, ranks
        self._tables: dict[int, BlockTable] = {}

    @torch.inference_mode()
    def follow(self, order: RankOrder) -> None:
        """Do one order."""
        if order.forget:
            self._tables.clear()
        for number, blocks in order.tables.items():
            # A new table: whoever knows the old one by its identity must not take this for it.
            table = self._tables[number] = BlockTable(seed=b"")
            for block in blocks:
                table.append(block)
        stage, arguments = self._stage, order.arguments
        data: Any = None
        if order.shape is not None:
            empty = torch.empty(order.shape, dtype=stage.dtype, device=stage.device)
            data = self._ranks.broadcast(empty)
        if order.method == "forward":
            batch = [self._rows(each) for each in arguments[0]]
            stage.forward(_with_states(batch, data))
        elif order.method == "warm":
            budget, max_sequences = arguments
            stage.warm(budget, max_sequences, None)
        elif order.method == "logits":
            stage.logits(data, normed=arguments[0])
        elif order.method == "read_kv":
            layers, number, start, end = arguments
            stage.read_kv(layers, self._tables[number], start, end)
        else:
            layers, number, start = arguments
            stage.write_kv(layers, self._tables[number], start, data)

    def _rows(self, told: tuple[Any, ...]) -> SequenceRows:
        number, data, embeds, *rest = told
        start, end, position, count, sample, keep = rest
        if embeds is not None:
            embeds = torch.from_numpy(embeds[0]), torch.from_numpy(embeds[1])
        table = self._tables[number]
        return SequenceRows(start, end, position, count, table, data, sample, embeds, keep)


def _describe(rows: SequenceRows) -> tuple[Any, ...]:
    """Return rows as they are told: their tokens, but no hidden states."""
    embeds = None if rows.embeds is None else (rows.embeds[0].numpy(), rows.embeds[1].numpy())
    data = rows.data if rows.start == 0 else None
    what = (rows.start, rows.end, rows.position, rows.count, rows.sample, rows.keep)
    return (id(rows.table), data, embeds, *what)


def _with_states(batch: Sequence[SequenceRows], joined: Tensor | None) -> Sequence[SequenceRows]:
    """Return the batch with the hidden states that the first rank handed out, one after another."""
    if joined is None:
        return batch
    row = 0
    for rows in batch:
        if rows.start > 0:
            rows.data = RowSlice(joined, row, rows.count)
            row += rows.count
    return batch
