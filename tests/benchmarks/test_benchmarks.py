"""Every benchmark runs, and ends with the line of JSON that others read."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.report import DATA, ROOT, Figure, finish

Figures = dict[str, float | None]

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
NEEDS_AIC = {key for key in ACCURACY_BARS if "step" in key}
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
def test_perf_speed() -> None:
    figures = last_line(python("-m", "benchmarks.perf_speed", "--quick"))
    for key in ("tables_cpu_s", "scalar_query_us"):
        assert number(figures, key) > 0.0


# That starting loads little is tested in tests/cli.
@pytest.mark.slow
def test_startup() -> None:
    figures = last_line(python("-m", "benchmarks.startup", "--quick"))
    for key in ("help_cpu_s", "help_to_typer", "import_cpu_s"):
        assert number(figures, key) > 0.0


def test_h200_fidelity(tmp_path: Path) -> None:
    plot = tmp_path / "layers.png"
    printed = python("-m", "benchmarks.h200_fidelity", "--quick", "--plot", plot)
    figures = last_line(printed)
    # Far above what is reported: only a broken model or file comes near.
    limits = {
        "layer_median": 15.0,
        "layer_p95": 30.0,
        "layer_prefill_median": 20.0,
        "layer_decode_median": 20.0,
        "gemm_median": 15.0,
        "attention_prefill_median": 60.0,
        "attention_decode_median": 80.0,
    }
    for key, limit in limits.items():
        assert 0.0 < number(figures, key) < limit, key
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_h200_energy() -> None:
    figures = last_line(python("-m", "benchmarks.h200_energy", "--quick"))
    assert number(figures, "energy_points") >= 30
    # Far above what is reported: only a broken model or file comes near.
    for key, limit in {
        "joules_per_token_median_err": 15.0,
        "joules_per_token_p90_err": 30.0,
        "watts_median_err": 15.0,
        "partly_loaded_watts_median_err": 15.0,
        "idle_watts_err": 10.0,
    }.items():
        assert 0.0 < number(figures, key) < limit, key


def test_h200_components_fidelity() -> None:
    printed = python("-m", "benchmarks.h200_components_fidelity", "--quick")
    figures = last_line(printed)
    # Far above what is reported: only a broken model or file comes near.
    limits = {
        "vit_median": 25.0,
        "vit_p95": 50.0,
        "internvit_median": 20.0,
        "dit_median": 40.0,
        "whisper_median": 25.0,
        "all_median": 30.0,
        "own_all_median": 30.0,
    }
    for key, limit in limits.items():
        assert 0.0 < number(figures, key) < limit, key
    assert printed.count("qwen-image ") == 16


def test_perf_accuracy_says_what_it_skipped(tmp_path: Path) -> None:
    printed = python("-c", BLOCKED, "--quick", "--data", tmp_path / "absent")
    figures = last_line(printed)
    assert set(ACCURACY_BARS) <= set(figures)
    # The ratio of two predictions needs no data.
    assert 0.0 < number(figures, "fp4_ratio_error") < 15.0
    assert {value for key, value in figures.items() if key != "fp4_ratio_error"} == {None}
    skipped = [line for line in printed.splitlines() if line.startswith("skipped: ")]
    assert len(skipped) == 2
    assert "absent" in skipped[0]
    assert "atoll[aic]" in skipped[1]


@pytest.mark.skipif(not (DATA / "perf").is_dir(), reason="needs the public data in ../shared/data")
def test_perf_accuracy_without_the_extra_still_compares_operators() -> None:
    figures = last_line(python("-c", BLOCKED, "--quick"))
    for key, bar in ACCURACY_BARS.items():
        if key in NEEDS_AIC:
            assert figures[key] is None
        else:
            assert 0.0 < number(figures, key) <= bar, key


@pytest.mark.aic
@pytest.mark.slow
@pytest.mark.skipif(not (DATA / "perf").is_dir(), reason="needs the public data in ../shared/data")
def test_perf_accuracy_meets_every_bar() -> None:
    pytest.importorskip("aiconfigurator_core", reason="needs the extra 'aic'")
    figures = last_line(python("-m", "benchmarks.perf_accuracy", "--quick"))
    missed = {k: figures[k] for k, bar in ACCURACY_BARS.items() if not number(figures, k) <= bar}
    assert missed == {}


@pytest.mark.aic
@pytest.mark.slow
def test_perf_accuracy_without_data_still_compares_steps(tmp_path: Path) -> None:
    pytest.importorskip("aiconfigurator_core", reason="needs the extra 'aic'")
    printed = python("-m", "benchmarks.perf_accuracy", "--quick", "--data", tmp_path / "absent")
    figures = last_line(printed)
    for key in ACCURACY_BARS:
        assert (figures[key] is None) == (key not in NEEDS_AIC), key


def test_figures_are_held_against_their_bars(capsys: pytest.CaptureFixture[str]) -> None:
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
    }  # fmt: skip


@pytest.mark.slow
def test_first_run() -> None:
    printed = python("-m", "benchmarks.first_run", "--quick")
    figures = last_line(printed)
    for key in ("plan_compile_cpu_s", "simulate_compile_cpu_s"):
        value = figures[key]
        assert value is not None, key
        assert value > 0.0, key
    assert figures["demo_cold_s"] is figures["demo_warm_s"] is None
    assert "left out by --quick" in printed
