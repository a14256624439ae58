"""Error bars are calibrated on others than those they are held against."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.performance.error_bars import Interval, calibrate, coverage, left_out
from tests.benchmarks.test_servers import ROW

GPUS = ("H100", "H200", "B200", "B300")


def off(*errors: float) -> list[Interval]:
    rows = (replace(ROW, gpu=GPUS[at % 4], tp=1 + at // 4) for at in range(len(errors)))
    return [Interval(row, error, 0.0) for row, error in zip(rows, errors, strict=True)]


def test_nine_of_ten_servers_are_covered() -> None:
    intervals = off(*(0.01 * number for number in range(1, 11)))
    term = calibrate(intervals)
    assert coverage(intervals, term) == pytest.approx(0.9)
    assert term == pytest.approx(0.09 / 1.645, abs=0.005)
    # What draws spread by anyway is not needed twice.
    assert calibrate([replace(one, spread=0.1) for one in intervals]) == 0.0


def test_servers_count_once_however_many_rows_they_have() -> None:
    good, bad = off(0.0, 1.0)
    assert coverage([good, good, good, bad], 0.1) == 0.5


def test_those_left_out_have_no_say() -> None:
    # The errors of B200 are ten times those of the others: nothing calibrated on these holds it.
    intervals = off(*([0.1, 0.1, 1.0, 0.1] * 5))
    alike = off(*([0.1] * 20))
    assert left_out(alike) == 1.0
    assert left_out(intervals) < 0.9
