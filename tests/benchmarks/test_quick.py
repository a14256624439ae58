"""Every benchmark runs at its smallest, and ends with the line of JSON that others read."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from benchmarks.names import BENCHMARKS, Benchmark
from benchmarks.report import ROOT

PACKAGES = {"components": ("hibari", "onnxruntime"), "SmolLM2": ("torch", "transformers")}
"""What a benchmark cannot begin without, by what it needs; without the rest it leaves something out."""


@pytest.mark.slow
@pytest.mark.parametrize("one", BENCHMARKS, ids=lambda one: one.name)
def test_a_benchmark_runs(one: Benchmark) -> None:
    for package in PACKAGES.get(one.needs, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{one.name}", "--quick"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    *table, last = done.stdout.splitlines()
    assert table, "no table for people above the JSON"
    figures = json.loads(last, parse_constant=pytest.fail)
    assert set(one.keys.split()) <= set(figures)
