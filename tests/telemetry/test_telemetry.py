"""Logs, trace context and metrics."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from atoll.telemetry.logs import JsonLog, SilentLog
from atoll.telemetry.metrics import (
    CONTENT_TYPE,
    CounterFamily,
    Histogram,
    HistogramFamily,
    make_gauge,
    render_page,
)
from atoll.telemetry.spans import child_of

GIVEN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_log_lines_are_json(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "log", os.O_CREAT | os.O_WRONLY)
    log = JsonLog(descriptor, node="n1")
    log.event("started", port=80, text='line\n"two"', other=Path("x"))
    assert (tmp_path / "log").read_text() == ""
    log.flush()
    os.close(descriptor)
    (line,) = (tmp_path / "log").read_text().splitlines()
    read = json.loads(line)
    assert (read["event"], read["node"], read["port"], read["text"], read["other"]) == (
        "started",
        "n1",
        80,
        'line\n"two"',
        "x",
    )


def test_lines_of_others_get_the_common_fields(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "log", os.O_CREAT | os.O_WRONLY)
    log = JsonLog(descriptor, stand_in={"chat": "small instead of large"})
    log.line(b'{"event":"request","id":"1"}\n')
    log.flush()
    os.close(descriptor)
    (line,) = (tmp_path / "log").read_text().splitlines()
    stand_in = {"chat": "small instead of large"}
    assert json.loads(line) == {"event": "request", "id": "1", "stand_in": stand_in}


def test_log_survives_a_reader_that_does_not_read() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    log = JsonLog(writing)
    for _ in range(3000):
        log.event("x", text="a" * 100)
    log.flush()
    os.close(reading)
    log.event("x")
    log.flush()
    os.close(writing)


def test_silent_log_takes_everything() -> None:
    SilentLog().event("x", a=1)
    SilentLog().flush()


def test_trace_goes_on_with_a_new_span() -> None:
    child = child_of(GIVEN)
    assert child[:36] == GIVEN[:36]
    assert child[36:52] != GIVEN[36:52]
    assert child.endswith("-01")
    # A later version may say more.
    assert child_of("01" + GIVEN[2:] + "-more")[3:35] == GIVEN[3:35]


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "00-" + "0" * 32 + "-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-" + "0" * 16 + "-01",
        "ff" + GIVEN[2:],
        GIVEN + "-more",
        GIVEN.upper(),
        GIVEN + "\n",
    ],
)
def test_bad_trace_begins_a_new_one(bad: str) -> None:
    made = child_of(bad)
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-00", made)
    assert made[3:35] != GIVEN[3:35]
    assert made != child_of(bad)


def test_the_page_is_what_prometheus_reads() -> None:
    counts = CounterFamily("a_total", "Things.", ("name",))
    counts.child('say "hi"\\\n').add(2)
    times = HistogramFamily("t_seconds", "Times.", bounds=(0.1, 1))
    for value in (0.1, 0.5, 3.0):
        times.child().observe(value)
    gauge = make_gauge("g", "Now.", ("x", "a"), [(("1", "b"), 2.5)])
    page = render_page((counts.read(), times.read(), gauge)).decode()
    assert page == (
        "# HELP a_total Things.\n# TYPE a_total counter\n"
        'a_total{name="say \\"hi\\"\\\\\\n"} 2.0\n'
        "# HELP t_seconds Times.\n# TYPE t_seconds histogram\n"
        't_seconds_bucket{le="0.1"} 1.0\nt_seconds_bucket{le="1.0"} 2.0\n'
        't_seconds_bucket{le="+Inf"} 3.0\nt_seconds_count 3.0\nt_seconds_sum 3.6\n'
        '# HELP g Now.\n# TYPE g gauge\ng{a="b",x="1"} 2.5\n'
    )
    read = {family.name: family for family in text_string_to_metric_families(page)}
    assert read["a"].samples[0].labels == {"name": 'say "hi"\\\n'}
    assert CONTENT_TYPE == "text/plain; version=0.0.4; charset=utf-8"


@pytest.mark.parametrize(
    ("number", "shown"),
    [(math.nan, "NaN"), (math.inf, "+Inf"), (-math.inf, "-Inf"), (1e21, "1e+21")],
)
def test_no_number_ends_the_page(number: float, shown: str) -> None:
    counts = CounterFamily("c_total", "Counted.")
    counts.child().add(number)
    times = HistogramFamily("t_seconds", "Times.")
    times.child().observe(number)
    gauge = make_gauge("g", "Now.", (), [((), number)])
    page = render_page((gauge, counts.read(), times.read(), make_gauge("last", "", (), [((), 1)])))
    lines = page.decode().splitlines()
    assert f"g {shown}" in lines
    assert f"c_total {shown}" in lines
    assert lines[-1] == "last 1.0"


def test_labels_are_bounded() -> None:
    counts = CounterFamily("a_total", "Things.", ("name",), limit=3)
    for number in range(100):
        counts.child(str(number)).add()
    samples = {sample.labels["name"]: sample.value for sample in counts.read().samples}
    assert samples == {"0": 1, "1": 1, "2": 1, "other": 97}


@given(st.lists(st.floats(0, 1000), max_size=50))
def test_buckets_hold_all_values_up_to_their_bound(values: list[float]) -> None:
    histogram = Histogram()
    for value in values:
        histogram.observe(value)
    for bound, count in histogram.buckets():
        assert count == sum(value <= float(bound) for value in values)
