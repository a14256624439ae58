"""Steps laid out for graphs, against a plain walk over the rows of a batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.engine.kv import BlockTable
from atoll.engine.step_layout import (
    DECODES,
    MAX_CHUNKS,
    BlockTables,
    fill_step,
    list_rungs,
    list_samples,
    order_step,
)

PAGE, TILE, BLOCKS = 4, 8, 1000
SPARE = BLOCKS * PAGE


def make_rows(position: int, count: int, first: int, *, sample: bool) -> Any:
    pages = -(-(position + count) // PAGE)
    table = BlockTable(b"", blocks=[(first + 7 * n) % BLOCKS for n in range(pages)])
    tokens = [1000 * first + position + n for n in range(count)]
    source = first if count == 1 and first % 2 else None
    return SimpleNamespace(
        start=0,
        position=position,
        count=count,
        table=table,
        data=tokens,
        sample=sample,
        source=source,
    )


rows_of_sequences = st.lists(
    st.tuples(
        st.integers(0, 60),
        st.sampled_from([1, 1, 1, 2, 7, 8, 9, 30]),
        st.integers(0, 999),
        st.booleans(),
    ),
    min_size=1,
    max_size=20,
)


@given(st.lists(rows_of_sequences, min_size=1, max_size=3))
def test_a_step_says_what_every_row_is(steps: list[list[tuple[int, int, int, bool]]]) -> None:
    rungs = list_rungs(1024, None, TILE)
    tables = BlockTables(DECODES[-1] + MAX_CHUNKS, 64)
    # What the device has: tables are sent only when they have changed.
    there = np.zeros_like(tables.rows)
    for each in steps:
        batch = [make_rows(at, count, first, sample=sample) for at, count, first, sample in each]
        order = order_step(batch, rungs)
        assert order is not None
        numbers = np.full(order.rung.numbers, -77, np.int64)
        sampled = fill_step(numbers, tables, batch, order, PAGE, SPARE, TILE)
        if tables.changed:
            there[: len(batch), : tables.used] = tables.rows[: len(batch), : tables.used]
        step = order.rung.split(numbers)
        assert order.rung.rows >= order.rows == sum(rows.count for rows in batch)
        row = 0
        in_tiles: dict[int, tuple[int, int]] = {}
        for first, count, position, sequence in step.tiles.tolist():
            assert count <= TILE
            in_tiles |= {first + n: (position + n, sequence) for n in range(count)}
        for sequence, number in enumerate((*order.decodes, *order.chunks)):
            rows = batch[number]
            for n in range(rows.count):
                at = rows.position + n
                assert step.positions[row] == at
                assert step.slots[row] == rows.table.blocks[at // PAGE] * PAGE + at % PAGE
                assert step.tokens[row] == rows.data[n]
                assert step.sources[row] == (-1 if rows.source is None else rows.source)
                if rows.count == 1:
                    assert row == sequence
                    assert step.lengths[row] == at + 1
                else:
                    assert in_tiles.pop(row) == (at, sequence)
                row += 1
            assert there[sequence, : len(rows.table.blocks)].tolist() == rows.table.blocks
        assert not in_tiles
        assert not step.lengths[len(order.decodes) :].any()
        assert (step.slots[row:] == SPARE).all()
        assert (step.sources[row:] == -1).all()
        if order.chunks:
            found = list_samples(batch, order)
            assert step.samples[:sampled].tolist() == [at for _, at in found]
            assert {number for number, _ in found} == {n for n, r in enumerate(batch) if r.sample}
        else:
            assert sampled == len(batch)


LIMITS = [(1, None), (20, None), (512, 40), (2048, 256), (8192, 1000)]


@pytest.mark.parametrize(("budget", "sequences"), LIMITS)
def test_the_ladder_takes_every_step_up_to_the_budget(budget: int, sequences: int | None) -> None:
    rungs = list_rungs(budget, sequences, TILE)
    decode = make_rows(0, 1, 1, sample=True)
    for decodes in range(1, min(budget, sequences or budget, DECODES[-1]) + 1):
        assert order_step([decode] * decodes, rungs) is not None
    for rows in {*range(2, budget + 1, 31), budget} - {1}:
        order = order_step([make_rows(0, rows, 1, sample=True)], rungs)
        assert order is not None
        # Little is padded: less than a quarter of a step that is not small.
        assert order.rung.rows - rows < max(64, rows // 4)
    many = min(budget - 2, sequences or budget, DECODES[-1])
    if many > 0:
        order = order_step([make_rows(0, 2, 1, sample=True), *[decode] * many], rungs)
        assert order is not None
    assert len(rungs) < 80


def test_what_is_larger_than_the_ladder_has_no_rung() -> None:
    short, rungs = make_rows(0, 2, 1, sample=True), list_rungs(512, None, TILE)
    assert order_step([make_rows(0, 513, 1, sample=True)], rungs) is None
    assert order_step([short] * MAX_CHUNKS, rungs) is not None
    assert order_step([short] * (MAX_CHUNKS + 1), rungs) is None
