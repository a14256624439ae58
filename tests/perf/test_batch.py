from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import UsageError
from atoll.perf.batch import Batch
from atoll.perf.operators import Array

lengths = st.integers(1, 400)
contexts = st.integers(0, 600)
windows = st.none() | st.integers(1, 500)
sequences = st.integers(1, 9)


def keys_in_reach(position: int, window: int | None) -> int:
    """Keys that the query at this position (from 0) sees, itself included."""
    return position + 1 if window is None else min(position + 1, window)


def counted_pairs(length: int, context: int, window: int | None) -> int:
    return sum(keys_in_reach(context + i, window) for i in range(length))


@given(lengths, contexts, windows, sequences)
def test_pairs_are_the_area_under_the_keys_in_reach(
    length: int, context: int, window: int | None, count: int
) -> None:
    # The kink of min(position, window) is at a whole position, where trapezoids meet it exactly.
    reach = [
        float(c) if window is None else min(float(c), float(window))
        for c in range(context, context + length + 1)
    ]
    area = sum((a + b) / 2 for a, b in itertools.pairwise(reach))
    batch = Batch.prefill(length * count, count, context)
    assert batch.pairs(window) == pytest.approx(count * area, rel=1e-12)


@given(lengths, contexts, windows)
def test_pairs_against_counting_every_query(length: int, context: int, window: int | None) -> None:
    exact = counted_pairs(length, context, window)
    pairs = Batch.prefill(length, 1, context).pairs(window)
    # A query's own key counts as half on the ramp and as a whole at the window.
    assert exact - length / 2 - 1e-6 <= pairs <= exact + 1e-6


@given(lengths, contexts, st.integers(1000, 5000))
def test_a_window_that_nothing_reaches_changes_nothing(
    length: int, context: int, window: int
) -> None:
    batch = Batch.prefill(length, 1, context)
    assert batch.pairs(window) == pytest.approx(batch.pairs(None), rel=1e-12)


@given(lengths, contexts, st.integers(1, 500))
def test_a_window_only_takes_work_away(length: int, context: int, window: int) -> None:
    batch = Batch.prefill(length, 1, context)
    assert batch.pairs(window) <= batch.pairs(None) * (1 + 1e-12)
    assert batch.pairs(window) <= batch.pairs(window + 1) * (1 + 1e-12)


@given(st.lists(lengths, min_size=1, max_size=8), contexts)
def test_the_spread_of_lengths_counts_for_full_attention(own: list[int], context: int) -> None:
    mean = sum(own) / len(own)
    spread = sum(n * n for n in own) / len(own) / mean**2
    batch = Batch.prefill(sum(own), len(own), context, spread)
    assert batch.pairs(None) == pytest.approx(sum(n * context + n * n / 2 for n in own), rel=1e-9)


def test_the_spread_of_lengths_counts_below_the_window_too() -> None:
    batch = Batch.prefill(400, 2, 0, length_spread=1.25)  # prompts of 100 and 300
    assert batch.pairs(100_000) == pytest.approx(batch.pairs(None))


@given(st.lists(lengths, min_size=1, max_size=8), contexts, st.integers(1, 2000))
def test_uneven_prompts_and_a_window(own: list[int], context: int, window: int) -> None:
    mean = sum(own) / len(own)
    spread = sum(n * n for n in own) / len(own) / mean**2
    batch = Batch.prefill(sum(own), len(own), context, spread)
    pairs = batch.pairs(window)
    # Between equal prompts and no window at all, and never more than the window for each query.
    assert pairs >= Batch.prefill(sum(own), len(own), context).pairs(window) * (1 - 1e-12)
    assert pairs <= batch.pairs(None) * (1 + 1e-12)
    assert pairs <= sum(own) * window * (1 + 1e-12)
    assert pairs <= batch.pairs(window + 1) * (1 + 1e-12)
    # No jump anywhere.
    assert batch.pairs(window + 1e-6) - pairs <= sum(own) * 1e-6 * (1 + 2 * spread) + 1e-6 * pairs


@given(st.integers(2, 400), st.floats(1.0, 6.0), contexts)
def test_a_window_meets_the_mean_prompt_without_a_jump(
    length: int, spread: float, context: int
) -> None:
    at = float(context + length)
    before, after = (
        Batch.prefill(length, 1, context, spread).pairs(at + step) for step in (-1e-7, 1e-7)
    )
    assert before == pytest.approx(after, rel=1e-6)


@given(lengths, contexts, windows, sequences)
def test_keys_that_prefill_reads(length: int, context: int, window: int | None, count: int) -> None:
    reach = context if window is None else min(context, window)
    batch = Batch.prefill(length * count, count, context)
    assert batch.prefill_keys(window) == count * (length + reach)


@given(st.integers(1, 100), contexts, windows)
def test_keys_that_decode_reads(count: int, context: int, window: int | None) -> None:
    batch = Batch.decode(count, context)
    assert batch.decode_keys(window) == (context if window is None else min(context, window))


@given(
    st.lists(st.tuples(lengths, sequences, contexts, st.integers(0, 64), contexts), min_size=1),
    windows,
    st.floats(1.0, 4.0),
)
def test_floats_and_arrays_agree(
    rows: list[tuple[int, int, int, int, int]], window: int | None, spread: float
) -> None:
    columns: list[Array] = [
        np.array(column, dtype=np.float64) for column in zip(*rows, strict=True)
    ]
    tokens, prompts, before, running, cached = columns
    many: Batch[Array] = Batch(tokens, prompts, before, running, cached, spread)
    for i, row in enumerate(rows):
        a, b, c, d, e = map(float, row)
        one = Batch(a, b, c, d, e, spread)
        assert many.pairs(window)[i] == pytest.approx(one.pairs(window), rel=1e-12)
        assert many.prefill_keys(window)[i] == one.prefill_keys(window)
        assert many.tokens[i] == one.tokens == row[0] + row[3]
        assert many.outputs[i] == one.outputs == row[1] + row[3]
        assert many.prompt_length[i] == pytest.approx(row[0] / row[1])
        decode = many.decode_keys(window)
        assert decode[i] == one.decode_keys(window)


def test_no_prompts_no_pairs() -> None:
    empty = Batch.decode(4, 100)
    assert empty.prompt_length == 0.0
    assert empty.pairs(None) == empty.pairs(64) == empty.prefill_keys(None) == 0.0
    assert (empty.tokens, empty.outputs) == (4.0, 4.0)


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf])
def test_steps_that_are_none(value: float) -> None:
    with pytest.raises(UsageError, match="tokens"):
        Batch.prefill(value)
    with pytest.raises(UsageError, match="sequences"):
        Batch.prefill(8, value)
    with pytest.raises(UsageError, match="length_spread"):
        Batch.prefill(8, 1, 0, value)
    with pytest.raises(UsageError, match="sequences"):
        Batch.decode(value, 8)
    if value != 0:
        with pytest.raises(UsageError, match="context"):
            Batch.prefill(8, 1, value)
        with pytest.raises(UsageError, match="context"):
            Batch.decode(8, value)


@given(lengths, contexts, windows)
def test_the_keys_of_the_last_query(length: int, context: int, window: int | None) -> None:
    last = keys_in_reach(context + length - 1, window)
    assert Batch.prefill(length * 3, 3, context).longest(window) == last


def test_fields_are_floats_whatever_is_given() -> None:
    batch = Batch.prefill(1024, 4, 16)
    for value in (batch.prefill_tokens, batch.prefill_sequences, batch.prefill_context):
        assert type(value) is float
    assert (batch.decode_sequences, batch.decode_context) == (0.0, 0.0)
    assert batch.prompt_length == 256.0
    assert (batch.tokens, batch.outputs) == (1024.0, 4.0)
