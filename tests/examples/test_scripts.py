"""The example scripts run, and say what they are about."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SAID = {
    "build_fleet.py": ("Instances in here", "L4:1"),
    "plan_fleet.py": (
        "chat keeps its promises for",
        "quickstart: $22.85/h",
        "A10G:8      not used",
    ),
    "what_if.py": ("homogeneous", "If every L40S cost twice as much", "return "),
    "place_cluster.py": ("layers  0 to", "no placement carries more than", "kept their promises"),
}


def test_every_script_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SAID)


def test_the_shortest_script_runs_in_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # One tells whether scripts run at all; mypy reads the others, and tests/api calls what they call.
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / "build_fleet.py"), run_name="__main__")
    printed = capsys.readouterr().out
    for words in SAID["build_fleet.py"]:
        assert words in printed


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SAID))
def test_a_script_runs(name: str, tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, EXAMPLES / name],
        cwd=tmp_path,  # wherever it is started
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    for words in SAID[name]:
        assert words in ran.stdout
    assert not list(tmp_path.iterdir())
