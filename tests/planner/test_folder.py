"""The folder of a planner: whose it is, and what becomes of it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from atoll.planner.planner_service import PlannerFolder

_KILLED = """
import os, signal
from atoll.planner.planner_service import PlannerFolder
folder = PlannerFolder()
(folder.path / "u-1.sent").write_text("a prompt")
print(folder.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_planner_left_goes_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    first = PlannerFolder()
    assert first.path.stat().st_mode & 0o777 == 0o700
    killed = subprocess.run(
        [sys.executable, "-c", _KILLED], check=False, stdout=subprocess.PIPE, text=True
    )
    left = Path(killed.stdout.strip())
    assert (left / "u-1.sent").exists()
    (tmp_path / "atoll-planner-other").mkdir()
    second = PlannerFolder()
    assert not left.exists()
    assert first.path.is_dir()
    assert (tmp_path / "atoll-planner-other").is_dir()
    for folder in (first, second):
        folder.remove()
        folder.remove()
        assert not folder.path.exists()
