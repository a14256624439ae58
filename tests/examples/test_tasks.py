"""The example tasks run, and say what they are about."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "tasks"
SAID = {
    "research_agent.py": (
        "The bridge was built in 1894. (pages [0, 1], 2 thoughts)",
        "9 invocations in 4 rounds",
    )
}


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SAID)


@pytest.mark.parametrize("name", sorted(SAID))
def test_an_example_runs(name: str) -> None:
    ran = subprocess.run(
        [sys.executable, EXAMPLES / name], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert tuple(ran.stdout.splitlines()) == SAID[name]
