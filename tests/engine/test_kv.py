"""Blocks: nobody's block is anybody else's, and what is freed is free."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import UsageError
from atoll.engine.kv import BlockPool, BlockTable, OutOfBlocks, _best_run

SEED = b"0-4"


def filled(pool: BlockPool, tokens: list[int]) -> BlockTable:
    """A table that has run all of `tokens`."""
    table = pool.open(tokens, SEED, len(tokens))
    pool.grow(table, len(tokens))
    pool.commit(table, len(tokens), tokens)
    return table


def test_a_known_beginning_is_shared_and_the_last_token_is_left_to_run() -> None:
    pool = BlockPool(8, 4)
    first = filled(pool, list(range(8)))
    second = pool.open(list(range(8)), SEED, 8)
    assert second.length == 4
    assert second.blocks == first.blocks[:1]
    longer = pool.open([*range(8), 9], SEED, 9)
    assert longer.blocks == first.blocks


def test_what_was_freed_is_still_known_until_the_room_is_needed() -> None:
    pool = BlockPool(3, 4)
    pool.close(filled(pool, [1, 2, 3, 4, 5]))
    assert pool.used == 0
    assert pool.open([1, 2, 3, 4, 5], SEED, 5).length == 4
    pool = BlockPool(2, 4)
    pool.close(filled(pool, [1, 2, 3, 4, 5]))
    pool.close(filled(pool, [6] * 8))
    assert pool.open([1, 2, 3, 4, 5], SEED, 5).length == 0


def test_another_layer_range_does_not_share() -> None:
    pool = BlockPool(4, 4)
    filled(pool, [1, 2, 3, 4, 5])
    assert pool.open([1, 2, 3, 4, 5], b"1-4", 5).length == 0


def test_equal_tokens_after_different_ones_do_not_share() -> None:
    pool = BlockPool(8, 2)
    filled(pool, [1, 1, 5, 5, 9])
    assert pool.open([2, 2, 5, 5, 9], SEED, 5).length == 0


def test_too_little_room_takes_nothing() -> None:
    pool = BlockPool(2, 4)
    table = filled(pool, [1])
    with pytest.raises(OutOfBlocks):
        pool.grow(table, 12)
    assert len(table.blocks) == 1
    assert pool.free == 1


def test_sequences_that_grow_in_turns_keep_neighbouring_blocks() -> None:
    pool = BlockPool(16, 4)
    tables = [pool.open([], SEED, 24) for _ in range(2)]
    for length in range(4, 25, 4):
        for table in tables:
            pool.grow(table, length)
    assert all(table.contiguous for table in tables)


def test_no_caching_means_no_sharing() -> None:
    pool = BlockPool(8, 4, prefix_caching=False)
    filled(pool, list(range(8)))
    assert pool.open(list(range(8)), SEED, 8).length == 0


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(UsageError):
        BlockPool(0, 4)


@given(st.data())
def test_the_books_balance_whatever_happens(data: st.DataObject) -> None:
    pool = BlockPool(data.draw(st.integers(1, 12)), data.draw(st.integers(1, 4)))
    tables: list[tuple[BlockTable, list[int]]] = []
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(("open", "grow", "cut", "close")))
        if action == "open":
            tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=12))
            tables.append((pool.open(tokens, SEED, len(tokens)), tokens))
        elif tables:
            table, tokens = tables[data.draw(st.integers(0, len(tables) - 1))]
            if action == "grow":
                length = data.draw(st.integers(table.length, len(tokens)))
                try:
                    pool.grow(table, length)
                except OutOfBlocks:
                    assert -(-length // pool.block_size) - len(table.blocks) > pool.free
                else:
                    pool.commit(table, length, tokens)
            elif action == "cut":
                whole = data.draw(st.integers(0, table.length // pool.block_size))
                pool.truncate(table, whole * pool.block_size)
            else:
                pool.close(table)
                tables = [entry for entry in tables if entry[0] is not table]
        pool.check()
        held = {block for table, _ in tables for block in table.blocks}
        assert pool.used == len(held)
        for table, tokens in tables:
            # Two tables may share a block only where all tokens up to its end are equal.
            for other, others in tables:
                for index, (mine, theirs) in enumerate(
                    zip(table.blocks, other.blocks, strict=False)
                ):
                    if mine == theirs and table is not other:
                        end = (index + 1) * pool.block_size
                        assert tokens[:end] == others[:end]


def runs_of(free: list[bool]) -> list[tuple[int, int]]:
    """(size, start) of every run of free blocks, by walking them."""
    found: list[tuple[int, int]] = []
    for block, is_free in enumerate(free):
        if is_free and block and free[block - 1]:
            size, start = found[-1]
            found[-1] = (size + 1, start)
        elif is_free:
            found.append((1, block))
    return found


@given(st.lists(st.booleans(), min_size=1, max_size=40).filter(any), st.integers(1, 12))
def test_the_shortest_run_that_fits_is_taken_else_the_longest(free: list[bool], want: int) -> None:
    found = runs_of(free)
    fitting = [run for run in found if run[0] >= want]
    longest = max(size for size, _ in found)
    best = min(fitting) if fitting else min(run for run in found if run[0] == longest)
    assert _best_run(np.array(free), want) == best[1]
