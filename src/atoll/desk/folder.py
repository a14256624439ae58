"""The folder of a desk: what was uploaded lies there, and goes with the desk, even with a killed one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "atoll-desk-"
_LOCK = "lock"


class DeskFolder:
    """A folder that only this user can open; those that killed desks left are removed when one is made."""

    def __init__(self) -> None:
        _remove_left()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        # Held as long as the process is there, however it ends.
        self._lock: int | None = os.open(
            self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def remove(self) -> None:
        """Remove it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _remove_left() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        # What is of another user, or goes meanwhile, is not ours to remove.
        with contextlib.suppress(OSError):
            if path.parent.lstat().st_uid != os.getuid():
                continue
            lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)
            finally:
                os.close(lock)
