"""The folder of a desk: whose it is, and what becomes of it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from atoll.desk.folder import DeskFolder

_KILLED = """
import os, signal
from atoll.desk.folder import DeskFolder
folder = DeskFolder()
(folder.path / "u-1.sent").write_text("a prompt")
print(folder.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_desk_left_goes_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    first = DeskFolder()
    assert first.path.stat().st_mode & 0o777 == 0o700
    killed = subprocess.run(
        [sys.executable, "-c", _KILLED], check=False, stdout=subprocess.PIPE, text=True
    )
    left = Path(killed.stdout.strip())
    assert (left / "u-1.sent").exists()
    (tmp_path / "atoll-desk-other").mkdir()
    second = DeskFolder()
    assert not left.exists()
    assert first.path.is_dir()
    assert (tmp_path / "atoll-desk-other").is_dir()
    for folder in (first, second):
        folder.remove()
        folder.remove()
        assert not folder.path.exists()
