"""Decode groups by measured steps: reports, lines through them, and whole pipelines in virtual time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.engine.batch_pacing import ENOUGH, RoutePacer, StepReporter, fit_line, node_key
from atoll.engine.engine_messages import MAX_REPORTS, REPORT_COLUMNS, StepReport, table_of
from tests.seeds import examples, slow_except

A, B, C = (node_key(f"mem://{name}") for name in "abc")
SPEEDS = st.tuples(st.floats(0.005, 0.05), st.floats(0.0, 0.005))


def tell(pacer: RoutePacer, node: int, line: tuple[float, float], place: int, rows: int = 0) -> int:
    """Report a step of 2, 3, 4 ... sequences of a node each, as its line says."""
    fixed, each = line
    for sequences in range(2, 2 + ENOUGH):
        rows += sequences
        nanoseconds = round(1e9 * (fixed + each * sequences))
        pacer.hear(StepReport(node, place, rows, sequences, nanoseconds))
    return rows


# Lines


@given(line=SPEEDS, sizes=st.lists(st.integers(1, 64), min_size=8, max_size=60))
def test_a_line_is_found_where_steps_differ_and_leans_on_a_guess_where_they_do_not(
    line: tuple[float, float], sizes: list[int]
) -> None:
    fixed, each = line
    found_fixed, found_each = fit_line((n, fixed + each * n) for n in sizes)
    assert found_fixed >= -1e-12
    assert found_each >= 0.0
    mean = sum(sizes) / len(sizes)
    # The mean of what was seen is always met.
    assert found_fixed + found_each * mean == pytest.approx(fixed + each * mean, rel=1e-9)
    if len(set(sizes)) == 1:
        assert found_each == pytest.approx(found_fixed / 8.0, rel=1e-6)


def test_with_steps_of_many_sizes_the_guess_hardly_matters() -> None:
    fixed, each = fit_line((n, 0.03 + 0.0005 * n) for n in (1, 8, 16, 32, 64))
    assert fixed == pytest.approx(0.03, rel=0.03)
    assert each == pytest.approx(0.0005, rel=0.05)


def test_steps_that_something_else_held_up_do_not_count() -> None:
    steps = [(n, 0.03 + 0.001 * n) for n in (2, 4, 8) for _ in range(9)]
    late = [(n, 2.0) for n in (2, 4, 8) for _ in range(3)]
    assert fit_line(steps + late) == pytest.approx(fit_line(steps), rel=1e-6)


# Reports


def test_a_node_reports_its_latest_step_after_those_of_the_hops_before_it() -> None:
    reporter = StepReporter("mem://b", place=5)
    assert reporter.table(is_start=True).shape == (0, REPORT_COLUMNS)
    assert reporter.table().tolist() == [[B, 5, 0, 0, 0]]
    reporter.measure([(1, True), (1, True)], 0.25)
    reporter.pass_on(table_of([(A, 3, 9, 2, 70)], REPORT_COLUMNS))
    assert reporter.table().tolist() == [[A, 3, 9, 2, 70], [B, 5, 2, 2, 250_000_000]]


def test_a_step_with_parts_of_prompts_counts_its_decodes_but_not_its_time() -> None:
    reporter = StepReporter("mem://b", place=5)
    assert reporter.measure([(7, False), (12, True)], 0.5) is None
    assert reporter.measure([(1, True), (12, True)], 0.5) == (B, 5, 1, 0, 0)


def test_what_comes_back_about_oneself_is_not_passed_on_and_there_is_a_limit() -> None:
    reporter = StepReporter("mem://b")
    reporter.pass_on(table_of([(B, 1, 1, 1, 1)], REPORT_COLUMNS))
    assert len(reporter.table()) == 1
    many = [(number, 1, 1, 1, 1) for number in range(1, 200)]
    reporter.pass_on(table_of(many, REPORT_COLUMNS))
    table = reporter.table()
    assert len(table) == MAX_REPORTS
    assert table[-2:, 0].tolist() == [199, B]


# Deciding


def test_until_enough_is_known_it_is_as_many_as_places() -> None:
    pacer = RoutePacer()
    pacer.note_way((A, B, C))
    assert pacer.stale
    pacer.rebuild([(A, B, C)])
    assert [pacer.batches(n) for n in (1, 2, 3, 8)] == [1, 2, 3, 3]
    for node in (B, C):
        pacer.hear(StepReport(node, 7, 0, 0, 0))
    assert pacer.stale
    pacer.rebuild([(A, B, C)])
    assert pacer.batches(8) == 2


def test_equal_stages_get_a_group_each_and_uneven_ones_one() -> None:
    for other, expected in (((0.02, 0.001), 2), ((0.2, 0.001), 1)):
        pacer = RoutePacer()
        tell(pacer, A, (0.02, 0.001), place=1)
        tell(pacer, B, other, place=2)
        pacer.rebuild([(A, B)] * 8)
        assert pacer.batches(8) == expected


def test_stages_on_the_same_cores_get_one_group() -> None:
    pacer = RoutePacer()
    for node in (A, B):
        tell(pacer, node, (0.02, 0.001), place=9)
    pacer.rebuild([(A, B)] * 8)
    assert pacer.batches(8) == 1


def test_a_node_that_does_as_much_for_others_counts_twice() -> None:
    """B runs two rows for each one from here, so a second group would wait for it."""

    def asked(rows_of_others: int) -> int:
        pacer = RoutePacer()
        pacer.rebuild([(A, B)] * 8)
        rows = {A: 0, B: 0}
        for _ in range(4 * ENOUGH):
            pacer.note_group([(A, B)] * 4)
            for node in (A, B):
                rows[node] += 4 + (rows_of_others if node == B else 0)
                pacer.hear(StepReport(node, node, rows[node], 4, 20_000_000))
        pacer.rebuild([(A, B)] * 8)
        return pacer.batches(8)

    assert asked(0) == 2
    assert asked(4) == 1


def test_long_hops_make_a_second_group_worth_it() -> None:
    """One group takes 10 + 40 ms of steps, two take 2 x 40; with 60 ms of hops one takes 110 and two 110."""
    pacer = RoutePacer()
    tell(pacer, A, (0.010, 0.0), place=1)
    tell(pacer, B, (0.040, 0.0), place=2)
    pacer.rebuild([(A, B)] * 8)
    assert pacer.batches(8) == 1
    for _ in range(40):
        pacer.note_return(8, 0.100)
    pacer.rebuild([(A, B)] * 8)
    assert pacer.batches(8) == 2


def test_one_report_counts_once_however_often_it_comes() -> None:
    pacer = RoutePacer()
    for node in (A, B):
        for _ in range(3 * ENOUGH):
            pacer.hear(StepReport(node, node, 2, 2, 10_000_000))
    tell(pacer, A, (0.02, 0.0), place=A, rows=2)
    pacer.rebuild([(A, B)] * 8)
    assert pacer.batches(8) == 2
    tell(pacer, B, (0.9, 0.0), place=B, rows=2)
    pacer.rebuild([(A, B)] * 8)
    assert pacer.batches(8) == 1


def test_groups_never_hold_more_than_fit_a_batch() -> None:
    pacer = RoutePacer(max_sequences=4)
    for node in (A, B):
        tell(pacer, node, (0.02, 0.001), place=9)
    pacer.rebuild([(A, B)] * 16)
    assert pacer.batches(16) == 4


# Whole pipelines


@pytest.mark.engine
class TestPipelines:
    """Real node cores in virtual time."""

    EQUAL = ((0.034, 0.00035), (0.033, 0.00037), (0.0335, 0.00036), (0.034, 0.00035))

    @pytest.fixture(autouse=True)
    def _needs_torch(self) -> None:
        pytest.importorskip("torch", reason="needs the extra 'engine'")

    @pytest.mark.parametrize("stages", slow_except((2,), (2, 3, 4)))
    def test_paced_groups_beat_free_ones_on_equal_stages(self, stages: int) -> None:
        from tests.engine.virtual_pipeline import VirtualStage, measure_tpot

        line = [VirtualStage(*speed) for speed in self.EQUAL[:stages]]
        free_s, paced_s = measure_tpot(line, 8, "free"), measure_tpot(line, 8)
        assert paced_s <= 0.85 * free_s
        # Nothing waits for anything but the slowest stage.
        slowest_s = max(s.fixed_s + s.row_s * 8 / stages for s in line)
        assert paced_s <= 1.02 * stages * slowest_s

    @pytest.mark.slow
    @examples(6)
    @given(
        speeds=st.lists(SPEEDS, min_size=2, max_size=3),
        sequences=st.sampled_from((2, 6, 12)),
        shared=st.booleans(),
    )
    def test_the_measured_choice_is_about_the_best_fixed_number(
        self, speeds: list[tuple[float, float]], sequences: int, shared: bool
    ) -> None:
        from tests.engine.virtual_pipeline import VirtualStage, measure_tpot

        place = 9 if shared else 0
        line = [VirtualStage(fixed, each, place) for fixed, each in speeds]
        fixed_s = [measure_tpot(line, sequences, k, rounds=40) for k in range(1, len(line) + 1)]
        assert measure_tpot(line, sequences, rounds=80) <= 1.05 * min(fixed_s)

    def test_zero_is_free(self) -> None:
        from tests.engine.virtual_pipeline import VirtualStage, measure_tpot

        line = [VirtualStage(*speed) for speed in self.EQUAL[:2]]
        assert measure_tpot(line, 6, 0) == measure_tpot(line, 6, "free")


def test_ways_of_different_lengths_are_not_paced() -> None:
    pacer = RoutePacer()
    for node in (A, B, C):
        tell(pacer, node, (0.02, 0.001), place=node)
    pacer.rebuild([(A, B)] * 8)
    assert pacer.batches(8) == 2
    pacer.rebuild([*[(A, B)] * 8, (A, B, C)])
    assert pacer.batches(8) == 8
