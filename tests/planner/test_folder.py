"""The folder of a planner: whose it is, and what becomes of it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
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


def leave(folder: Path) -> Path:
    """Leave a folder as a planner does that was killed: its lock is given back by the kernel."""
    killed = PlannerFolder()
    assert killed.path.parent == folder
    (killed.path / "u-1.sent").write_text("a prompt")
    assert killed._lock is not None
    os.close(killed._lock)
    return killed.path


def leave_by_process(folder: Path) -> Path:
    """Leave a folder by killing the process of its planner."""
    killed = subprocess.run(
        [sys.executable, "-c", _KILLED], check=False, stdout=subprocess.PIPE, text=True
    )
    assert Path(killed.stdout.strip()).parent == folder
    return Path(killed.stdout.strip())


@pytest.mark.parametrize(
    "leave_folder", [leave, pytest.param(leave_by_process, marks=pytest.mark.slow)]
)
def test_what_a_killed_planner_left_goes_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leave_folder: Callable[[Path], Path]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    first = PlannerFolder()
    assert first.path.stat().st_mode & 0o777 == 0o700
    left = leave_folder(tmp_path)
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
