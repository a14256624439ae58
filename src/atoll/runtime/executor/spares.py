"""Files of arrays, and those that nobody needs any more, kept to be written again.

Most of the time it takes to write a new file in memory goes into finding pages for it. A file is taken only
if no process has it mapped: readers hold a shared lock on what they have mapped (`arrays.map_file`), and one
that comes too late finds that the name it knew is gone. In shared memory a file that is written again is
written through a mapping, which stays for the next time: one copy, and no pages to find.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections import OrderedDict
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Each one is an open descriptor, so there are few.
_MAX_FILES = 32
_MIN_FIT = 0.5
"""A spare file is used for an array of at least this share of its size."""
# All pages are mapped at once, not one by one when they are first touched.
_MAP_FLAGS = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)


class StoredFile:
    """A file that this process writes, open; at first under a name that nobody knows."""

    __slots__ = ("_pages", "descriptor", "nbytes", "path", "since_s")

    def __init__(self, path: str, descriptor: int, nbytes: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self.nbytes = nbytes
        self.since_s = 0.0
        """Since when nobody needs it."""
        self._pages: NDArray[np.uint8] | None = None

    @classmethod
    def create(cls, path: str) -> StoredFile:
        """Return a new file of no bytes."""
        # Never a file or a link that somebody else has put there.
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return cls(path, os.open(path, flags, 0o600), 0)

    def write(self, array: NDArray[Any], *, in_memory: bool) -> None:
        """Make an array the content of the file; OSError where there is no room for it."""
        # What is empty cannot be mapped.
        if in_memory and 0 < array.nbytes <= self.nbytes:
            self._copy(array)
            return
        # Written, not mapped: where the disk is full this fails; a mapping would kill us.
        self._pages = None
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        if self.nbytes > len(data):
            os.ftruncate(self.descriptor, len(data))
        at = 0
        while at < len(data):
            at += os.pwrite(self.descriptor, data[at:], at)
        self.nbytes = len(data)

    def _copy(self, array: NDArray[Any]) -> None:
        """Write over what is there: all of its pages exist, so there is nothing that could be missing."""
        if self.nbytes != array.nbytes:
            self._pages = None
            os.ftruncate(self.descriptor, array.nbytes)
            self.nbytes = array.nbytes
        if self._pages is None:
            mapped = mmap.mmap(self.descriptor, self.nbytes, flags=_MAP_FLAGS)
            self._pages = np.frombuffer(mapped, np.uint8)
        # Whatever the order of its numbers in memory, they are copied once. Other threads go on meanwhile.
        np.copyto(self._pages.view(array.dtype).reshape(array.shape), array)

    def lock(self) -> None:
        """Have it alone; BlockingIOError if a reader has it mapped."""
        fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def unlock(self) -> None:
        """Let others read it. The mapping shares the descriptor's lock, so this frees both."""
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let go of it; its content stays."""
        self._pages = None
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class SpareFiles:
    """Files to be written again, the most recent first; and the open ones of those that are in use.

    in_memory: whether they lie in shared memory.
    """

    def __init__(self, *, in_memory: bool = False) -> None:
        self.in_memory = in_memory
        self._files: list[StoredFile] = []
        self._open: OrderedDict[str, StoredFile] = OrderedDict()

    @property
    def total_bytes(self) -> int:
        """Bytes of all files that may be written again."""
        return sum(file.nbytes for file in self._files)

    def note(self, number: str, file: StoredFile) -> None:
        """Keep a file open that has come into use, instead of the one in use longest."""
        if (before := self._open.pop(number, None)) is not None:
            before.close()
        while len(self._open) >= _MAX_FILES:
            self._open.popitem(last=False)[1].close()
        self._open[number] = file

    def keep(self, number: str, path: str, name: str, nbytes: int, now_s: float) -> None:
        """Keep a file that nobody needs, under another name; it is removed where a reader has it."""
        while len(self._files) >= _MAX_FILES:
            _remove(self._files.pop(0))
        file = self._open.pop(number, None)
        try:
            if file is None:
                descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                file = StoredFile(path, descriptor, nbytes)
            # Locked before it loses its name: a reader that has it keeps it, one that comes later does not
            # find it.
            file.lock()
            os.rename(path, name)
        except OSError:
            if file is not None:
                file.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            return
        file.path = name
        file.since_s = now_s
        self._files.append(file)

    def take(self, nbytes: int) -> StoredFile | None:
        """Return a file to be written with so many bytes, if there is one that fits."""
        # Of those that fit, the latest.
        for at in reversed(range(len(self._files))):
            if _MIN_FIT * self._files[at].nbytes <= nbytes <= self._files[at].nbytes:
                return self._files.pop(at)
        return None

    def shrink(self, max_bytes: int, before_s: float) -> None:
        """Remove the oldest until they are at most so many bytes and none is from before `before_s`."""
        total = self.total_bytes
        while self._files and (total > max_bytes or self._files[0].since_s < before_s):
            total -= self._files[0].nbytes
            _remove(self._files.pop(0))


def _remove(file: StoredFile) -> None:
    file.close()
    with contextlib.suppress(OSError):
        os.unlink(file.path)
