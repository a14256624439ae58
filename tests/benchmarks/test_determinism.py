"""The benchmark of equal plans compares like with like."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from atoll.plan.files.fleet_file import load_fleet
from benchmarks.report import ROOT
from tests.benchmarks.test_benchmarks import last_line
from tests.slow.plans.determinism import FleetCase, fleets, permute


@pytest.mark.parametrize("case", fleets(), ids=lambda case: case.name)
def test_another_order_is_the_same_fleet(case: FleetCase, tmp_path: Path) -> None:
    tree = yaml.safe_load(case.text)
    other = permute(tree)
    texts = [yaml.safe_dump(t, sort_keys=False) for t in (tree, other)]
    assert texts[0] != texts[1]
    hashes = []
    for index, text in enumerate(texts):
        folder = tmp_path / str(index)
        folder.mkdir()
        (folder / "fleet.yaml").write_text(text, encoding="utf-8")
        hashes.append(load_fleet(folder / "fleet.yaml").content_hash())
    assert hashes[0] == hashes[1]


@pytest.mark.slow
def test_determinism() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.determinism", "--quick", "--fleet", "scarce"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    figures = last_line(done.stdout)
    assert figures["runs"] == 4
    assert figures["different"] == 0, done.stdout
