"""How many batches a pipeline has under way, against a pipeline played out step by step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.routing.decisions import free_slot
from atoll.routing.pacing import PacedNode, batches_in_flight, round_seconds

Line = tuple[float, float]
"""Seconds of a step: fixed, and per sequence."""

LINES = st.tuples(st.floats(0.001, 0.1), st.floats(0.0, 0.01))
STAGES = st.lists(LINES, min_size=1, max_size=5)
HOPS = st.floats(0.0, 0.05)
EDGES = np.array([0.0, 512.0])


def node(
    line: Line, *, turns: float = 1.0, on_way: bool = True, device: int | None = None
) -> PacedNode:
    fixed, each = line
    return PacedNode(EDGES, fixed + each * EDGES, turns, on_way, device)


def best(stages: Sequence[PacedNode], sequences: float, hops_s: float = 0.0) -> int:
    return int(batches_in_flight(stages, np.array([float(sequences)]), hops_s)[0])


def play(stages: Sequence[Line], sequences: int, batches: int, hops_s: float) -> float:
    """Seconds of a round of so many equal batches that circle for a long time, first come first served."""
    step_s = [fixed + each * sequences / batches for fixed, each in stages]
    free_s = [0.0] * len(stages)
    ready_s = [0.0] * batches
    middle_s = 0.0
    rounds = 80
    for number in range(rounds):
        if number == rounds // 2:
            middle_s = ready_s[0]
        # Equal batches never overtake each other, so each can be followed all the way round in turn.
        for batch in range(batches):
            now_s = ready_s[batch]
            for stage, took_s in enumerate(step_s):
                now_s = max(now_s, free_s[stage]) + took_s
                free_s[stage] = now_s
            ready_s[batch] = now_s + hops_s
    return (ready_s[0] - middle_s) / (rounds - rounds // 2)


@given(stages=STAGES, dozens=st.integers(1, 20), hops_s=HOPS)
def test_the_choice_is_as_good_as_the_best_of_all_that_are_played_out(
    stages: list[Line], dozens: int, hops_s: float
) -> None:
    sequences = 60 * dozens
    rounds = {k: play(stages, sequences, k, hops_s) for k in range(1, len(stages) + 1)}
    chosen = best([node(line) for line in stages], sequences, hops_s)
    assert rounds[chosen] <= 1.01 * min(rounds.values())


@given(stages=STAGES, batches=st.integers(1, 6), hops_s=HOPS)
def test_the_round_is_what_playing_it_out_gives(
    stages: list[Line], batches: int, hops_s: float
) -> None:
    sequences = 60
    said = round_seconds([node(line) for line in stages], np.array([60.0]), batches, hops_s)
    assert float(said[0]) == pytest.approx(play(stages, sequences, batches, hops_s), rel=1e-9)


@given(stages=STAGES, sequences=st.integers(0, 600), hops_s=HOPS)
def test_there_are_never_more_batches_than_stages_or_sequences(
    stages: list[Line], sequences: int, hops_s: float
) -> None:
    chosen = best([node(line) for line in stages], sequences, hops_s)
    assert 1 <= chosen <= min(len(stages), max(1, sequences))


@given(line=LINES, count=st.integers(1, 6), sequences=st.integers(1, 600), hops_s=HOPS)
def test_equal_stages_have_a_batch_each(
    line: Line, count: int, sequences: int, hops_s: float
) -> None:
    assert best([node(line)] * count, sequences, hops_s) == min(count, sequences)


@given(stages=STAGES, sequences=st.integers(1, 600), hops_s=HOPS)
def test_neither_order_nor_unit_of_time_matters(
    stages: list[Line], sequences: int, hops_s: float
) -> None:
    chosen = best([node(line) for line in stages], sequences, hops_s)
    others = [(64.0 * fixed, 64.0 * each) for fixed, each in stages]
    assert best([node(line) for line in others], sequences, 64.0 * hops_s) == chosen
    assert best([node(line) for line in sorted(stages)], sequences, hops_s) == chosen


@given(stages=STAGES, hops_s=HOPS, batches=st.integers(1, 5))
def test_more_sequences_never_make_a_round_shorter(
    stages: list[Line], hops_s: float, batches: int
) -> None:
    rounds = round_seconds([node(line) for line in stages], np.arange(1.0, 200.0), batches, hops_s)
    assert bool((np.diff(rounds) >= -1e-12).all())


@given(stages=STAGES, hops_s=HOPS, sequences=st.integers(1, 600), turns=st.floats(1.0, 5.0))
def test_a_stage_that_serves_others_too_never_wants_more_batches(
    stages: list[Line], hops_s: float, sequences: int, turns: float
) -> None:
    alone = [node(line) for line in stages]
    shared = [*alone[:-1], node(stages[-1], turns=turns)]
    asked = np.array([float(sequences)])
    most = best(alone, sequences, hops_s)
    chosen = best(shared, sequences, hops_s)
    # Rounds within a thousandth are a tie, which goes to more batches.
    tie = round_seconds(shared, asked, chosen, hops_s) * 1.002
    assert chosen <= most or float(round_seconds(shared, asked, most, hops_s)[0]) <= float(tie[0])


@given(stages=STAGES, sequences=st.integers(1, 600))
def test_stages_on_one_device_have_one_batch(stages: list[Line], sequences: int) -> None:
    assert best([node(line, device=7) for line in stages], sequences) == 1


def test_stages_that_share_a_device_count_as_one_that_does_the_work_of_both() -> None:
    # Two on one core and one on another: as two stages of 40 and 20 ms plus 2 and 1 ms a sequence.
    line = (0.02, 0.001)
    shared = [node(line, device=1), node(line, device=2), node(line, device=2)]
    rounds = round_seconds(shared, np.array([24.0]), 2)
    assert float(rounds[0]) == pytest.approx(2 * 2 * (0.02 + 0.012))


def test_uneven_stages_with_few_sequences_have_one_batch_and_with_many_two() -> None:
    # In ms, one batch takes 100 + 10 n and two 2 x (90 + 9 n / 2) = 180 + 9 n, which is less from n = 80 on.
    stages = [node((0.010, 0.001)), node((0.090, 0.009))]
    assert best(stages, 40) == 1
    assert best(stages, 120) == 2


def test_a_node_beside_the_way_counts_only_by_its_work() -> None:
    stages = [node((0.02, 0.0)), node((0.02, 0.0)), node((0.5, 0.0), on_way=False)]
    assert float(round_seconds(stages, np.array([8.0]), 1)[0]) == pytest.approx(0.5)
    assert best(stages, 8) == 1


@given(flying=st.lists(st.integers(0, 3), min_size=1, max_size=8), limit=st.integers(0, 9))
def test_a_free_slot_is_one_of_those_below_the_limit(flying: list[int], limit: int) -> None:
    slot = free_slot(np.array(flying, np.int64), limit)
    out = sum(count > 0 for count in flying)
    if out >= limit or out == len(flying):
        assert slot == -1
    else:
        assert flying[slot] == 0
        assert 0 not in flying[:slot]
