"""Benchmarks say what they measured, hold it against their bars, and say what they left out."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import DATA, LEFT_OUT, ROOT, Figure, finish, leave_out

Figures = dict[str, Any]

ACCURACY_BARS = {
    "gemm_median_max": 7.0,
    "gemm_p95_max": 30.0,
    "decode_attn_median_max": 8.0,
    "prefill_attn_median_max": 12.0,
    "allreduce_median_max": 15.0,
    "step_decode_median": 5.0,
    "step_decode_p95": 15.0,
    "step_prefill_median": 5.0,
    "step_prefill_p95": 15.0,
    "helix_prefill_median_max": 6.0,
    "helix_decode_median_max": 15.0,
    "moe_step_median": 12.0,
}
BLOCKED = (
    "import runpy, sys\n"
    "sys.modules['aiconfigurator_core'] = None\n"
    "sys.argv = ['perf_accuracy', *sys.argv[1:]]\n"
    "runpy.run_module('benchmarks.perf_accuracy', run_name='__main__')\n"
)


def python(*args: str | Path) -> str:
    """Run Python in the repository root; returns what it printed."""
    done = subprocess.run(
        [sys.executable, *map(str, args)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def last_line(printed: str) -> Figures:
    """The figures on the last line; NaN and infinities are no JSON."""
    lines = printed.splitlines()
    assert len(lines) > 1, "no table for people above the JSON"
    figures = json.loads(lines[-1], parse_constant=pytest.fail)
    assert isinstance(figures, dict)
    return figures


def number(figures: Figures, key: str) -> float:
    value = figures[key]
    assert isinstance(value, int | float)
    assert math.isfinite(value)
    return float(value)


@pytest.mark.slow
def test_perf_accuracy_says_what_it_skipped(tmp_path: Path) -> None:
    printed = python("-c", BLOCKED, "--quick", "--data", tmp_path / "absent")
    figures = last_line(printed)
    assert {figures[key] for key in ACCURACY_BARS} == {None}
    # The ratio of two predictions needs no data.
    assert 0.0 < number(figures, "fp4_ratio_error") < 15.0
    data, package = figures[LEFT_OUT]
    assert "absent" in data
    assert "atoll[aic]" in package


@pytest.mark.slow
@pytest.mark.skipif(not (DATA / "perf").is_dir(), reason="needs the public data in ../shared/data")
def test_perf_accuracy_without_the_extra_still_compares_operators() -> None:
    figures = last_line(python("-c", BLOCKED, "--quick"))
    for key, bar in ACCURACY_BARS.items():
        if "step" in key:
            assert figures[key] is None
        else:
            assert 0.0 < number(figures, key) <= bar, key


@pytest.mark.aic
@pytest.mark.slow
def test_perf_accuracy_without_data_still_compares_steps(tmp_path: Path) -> None:
    pytest.importorskip("aiconfigurator_core", reason="needs the extra 'aic'")
    printed = python("-m", "benchmarks.perf_accuracy", "--quick", "--data", tmp_path / "absent")
    figures = last_line(printed)
    for key, bar in ACCURACY_BARS.items():
        if "step" in key:
            assert 0.0 < number(figures, key) <= bar, key
        else:
            assert figures[key] is None


def test_figures_are_held_against_their_bars(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        leave_out("the rest: no data")
    finish(
        [
            Figure("good", 4.0, 5),
            Figure("equal", 5.0, 5),
            Figure("bad", 6.0, 5, "why"),
            Figure("told", 7.0),
            Figure("absent", None, 5),
        ],
        extra=3,
    )
    *table, last = capsys.readouterr().out.splitlines()
    verdicts = {line.split()[0]: line for line in table if line}
    assert "met" in verdicts["good"]
    assert "met" in verdicts["equal"]
    assert "MISSED" in verdicts["bad"]
    assert verdicts["bad"].endswith("why")
    assert "reported" in verdicts["told"]
    assert "not run" in verdicts["absent"]
    assert json.loads(last) == {
        "good": 4.0, "equal": 5.0, "bad": 6.0, "told": 7.0, "absent": None, "extra": 3,
        "missed": ["bad"], "left_out": ["the rest: no data"],
    }  # fmt: skip
    finish([Figure("good", 4.0, 5)])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"good": 4.0}
