"""Logs, trace context and metrics."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from atoll.telemetry.logs import JsonLog, SilentLog
from atoll.telemetry.metrics import Count, Family, Gauge, Histogram, exposition
from atoll.telemetry.trace import child_of

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


def test_exposition() -> None:
    counts = Family("a_total", "Things.", Count, ("name",))
    counts.child('say "hi"\\\n').add(2)
    times = Family("t_seconds", "Times.", lambda: Histogram((0.1, 1.0)))
    for value in (0.1, 0.5, 3.0):
        times.child().observe(value)
    gauge = Gauge("g", "Now.", ("x",), lambda: [(("1",), 2.5)])
    assert exposition((counts, times, gauge)).decode() == (
        "# HELP a_total Things.\n# TYPE a_total counter\n"
        'a_total{name="say \\"hi\\"\\\\\\n"} 2\n'
        "# HELP t_seconds Times.\n# TYPE t_seconds histogram\n"
        't_seconds_bucket{le="0.1"} 1\nt_seconds_bucket{le="1"} 2\nt_seconds_bucket{le="+Inf"} 3\n'
        "t_seconds_sum 3.6\nt_seconds_count 3\n"
        '# HELP g Now.\n# TYPE g gauge\ng{x="1"} 2.5\n'
    )


def test_labels_are_bounded() -> None:
    counts = Family("a_total", "Things.", Count, ("name",), limit=3)
    for number in range(100):
        counts.child(str(number)).add()
    lines = [line for line in counts.lines() if not line.startswith("#")]
    assert len(lines) == 4
    assert 'a_total{name="other"} 97' in lines
