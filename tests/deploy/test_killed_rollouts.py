"""A controller killed at every action of a rollout, on the real local target."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def run(folder: Path, replaced: int) -> list[dict[str, Any]]:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tests.deploy.killed_rollouts", str(folder), str(replaced)],
        env=dict(os.environ) | {"PYTHONPATH": str(root)},
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("replaced", [1, 2])
def test_whenever_the_controller_is_killed_nothing_is_lost_or_started_twice(
    tmp_path: Path, replaced: int
) -> None:
    *changes, last = run(tmp_path, replaced)
    # Before and after each start, drain and word to gateways, and inside of each start.
    assert len(changes) >= 8 * replaced
    assert [change["code"] == -9 for change in changes] == [True] * (len(changes) - 1) + [False]
    for change in changes:
        assert change["ready"] == 2, change
        assert change["others"] == 0, change
        assert change["started"] == replaced, change
        assert change["half"] == [], change
        # The old plan serves all the time.
        assert change["min_ready"] >= 2, change
    assert last == {"left": 0}
