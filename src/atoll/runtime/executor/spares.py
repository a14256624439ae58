"""Files of arrays that nobody needs any more, kept to be written again.

Most of the time it takes to write a new file in memory goes into finding pages for it. A file is taken only
if no process has it mapped: readers hold a shared lock on what they have mapped (`arrays.map_file`), and one
that comes too late finds that the name it knew is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

_MOST_FILES = 32
_LEAST_FIT = 0.5
"""A spare file is used for an array of at least this share of its size."""


@dataclass(frozen=True, slots=True)
class SpareFile:
    """A file that is ours alone: locked, under a name that nobody knows."""

    path: Path
    descriptor: int
    nbytes: int
    since_s: float


class SpareFiles:
    """Files to be written again; the most recent is used first."""

    def __init__(self) -> None:
        self._files: list[SpareFile] = []

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self._files)

    def keep(self, path: Path, name: Path, nbytes: int, now_s: float) -> None:
        """Keep a file under another name; it is removed instead where a reader has it."""
        while len(self._files) >= _MOST_FILES:
            _remove(self._files.pop(0))
        descriptor = -1
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.rename(name)
        except OSError:
            if descriptor >= 0:
                os.close(descriptor)
            path.unlink(missing_ok=True)
            return
        self._files.append(SpareFile(name, descriptor, nbytes, now_s))

    def take(self, nbytes: int) -> SpareFile | None:
        """Return a file to be written with so many bytes, if there is one that fits."""
        for at in reversed(range(len(self._files))):
            if _LEAST_FIT * self._files[at].nbytes <= nbytes <= self._files[at].nbytes:
                return self._files.pop(at)
        return None

    def shrink(self, most_bytes: int, before_s: float) -> None:
        """Remove the oldest until they are at most so many bytes and none is from before `before_s`."""
        total = self.total_bytes
        while self._files and (total > most_bytes or self._files[0].since_s < before_s):
            total -= self._files[0].nbytes
            _remove(self._files.pop(0))


def _remove(file: SpareFile) -> None:
    os.close(file.descriptor)
    with contextlib.suppress(OSError):
        file.path.unlink(missing_ok=True)
