"""The file in which a journal keeps the requests that run, and what a full disk does to it.

    header | tokens delivered, 8 bytes a slot | slots of 512 bytes: (length, crc), request

A store into mapped memory for which the file system finds no block ends the process (SIGBUS); no handler
can turn that into an error. So a file is mapped only where its blocks are certain: all of them are taken
before it is mapped, on a file system that then writes in place, and the file never grows. Everywhere else
(copy-on-write, network and unknown file systems, or where blocks cannot be taken beforehand) the same
memory is kept in the process and every store is also written with `pwrite`, about a microsecond more;
there a full disk is an `OSError`.

What was promised stays: a request that a slot could not be written for is refused before it begins
(503 to its client), and a slot whose later words the disk did not take remembers them here, is not used
again, and is written by `retry` as soon as there is room.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_MAGIC = b"ATOLLJ01"
_HEADER = 16
_SLOT = 512
SLOT_BYTES = _SLOT - 8
"""The longest request that a slot holds."""
_WRITES_IN_PLACE = frozenset({"ext2", "ext3", "ext4", "tmpfs", "xfs"})
_NOT_SUPPORTED = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
_MOUNTS = Path("/proc/self/mounts")


class StoredSlot(NamedTuple):
    """A slot in use, as a dead process left it."""

    request: bytes
    tokens: int


class MappedSlots:
    """Slots in a file whose blocks are all taken, mapped into memory: a store is one of 8 bytes."""

    def __init__(self, memory: mmap.mmap, slots: int) -> None:
        self._memory = memory
        self._base = _HEADER + 8 * slots
        self._words = memoryview(memory).cast("Q")
        self._tokens = self._words[_HEADER // 8 : self._base // 8]
        self._memory[:_HEADER] = _header(slots)

    @property
    def behind(self) -> int:
        """How many slots the disk did not take as they are."""
        return 0

    def put(self, slot: int, request: bytes) -> None:
        """Write a request of up to `SLOT_BYTES` into a free slot; OSError if the disk does not take it."""
        start = self._base + slot * _SLOT
        self._tokens[slot] = 0
        self._memory[start + 8 : start + 8 + len(request)] = request
        # The last store makes it count.
        self._words[start >> 3] = len(request) | zlib.crc32(request) << 32

    def deliver(self, slot: int, tokens: int) -> None:
        """Note how many tokens of the answer the client has."""
        self._tokens[slot] = tokens

    def tokens(self, slot: int) -> int:
        """Return what `deliver` said last."""
        return self._tokens[slot]

    def clear(self, slot: int) -> bool:
        """Free a slot; returns whether the disk knows, and with it whether the slot may be used again."""
        self._words[(self._base + slot * _SLOT) >> 3] = 0
        return True

    def retry(self) -> list[int]:
        """Write what the disk did not take before; returns the slots that became free by it."""
        return []

    def close(self) -> None:
        """Let go of the file."""
        self._tokens.release()
        self._words.release()
        self._memory.close()


class WrittenSlots(MappedSlots):
    """Slots in the memory of the process, each store of which is also written to the file."""

    def __init__(self, handle: int, slots: int) -> None:
        self._handle = handle
        super().__init__(mmap.mmap(-1, _size(slots)), slots)
        self._behind: set[int] = set()
        os.pwrite(handle, _header(slots), 0)

    @property
    def behind(self) -> int:
        """How many slots the disk did not take as they are."""
        return len(self._behind)

    def put(self, slot: int, request: bytes) -> None:
        """Write a request of up to `SLOT_BYTES` into a free slot; OSError if the disk does not take it."""
        super().put(slot, request)
        start = self._base + slot * _SLOT
        try:
            self._write(_HEADER + 8 * slot, 8)
            self._write(start, 8 + len(request))
        except OSError:
            super().clear(slot)
            self._behind.add(slot)
            raise

    def deliver(self, slot: int, tokens: int) -> None:
        """Note how many tokens of the answer the client has."""
        self._tokens[slot] = tokens
        try:
            self._write(_HEADER + 8 * slot, 8)
        except OSError:
            self._behind.add(slot)

    def clear(self, slot: int) -> bool:
        """Free a slot; returns whether the disk knows, and with it whether the slot may be used again."""
        super().clear(slot)
        try:
            self._write(self._base + slot * _SLOT, 8)
        except OSError:
            self._behind.add(slot)
            return False
        # A count that the disk lacks does not matter in a free slot.
        self._behind.discard(slot)
        return True

    def retry(self) -> list[int]:
        """Write what the disk did not take before; returns the slots that became free by it."""
        freed = []
        for slot in sorted(self._behind):
            start = self._base + slot * _SLOT
            try:
                self._write(_HEADER + 8 * slot, 8)
                self._write(start, 8)
            except OSError:
                break
            self._behind.discard(slot)
            if not self._words[start >> 3]:
                freed.append(slot)
        return freed

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._handle)
        super().close()

    def _write(self, start: int, size: int) -> None:
        if os.pwrite(self._handle, self._memory[start : start + size], start) != size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def make_slots(path: Path, slots: int) -> MappedSlots:
    """Make the file anew, all slots free; OSError if the disk has no room for all of them."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        if _allocate(handle, _size(slots)) and _file_system(path) in _WRITES_IN_PLACE:
            mapped = MappedSlots(mmap.mmap(handle, 0), slots)
            os.close(handle)
            return mapped
        os.ftruncate(handle, _size(slots))
        return WrittenSlots(handle, slots)
    except BaseException:
        os.close(handle)
        raise


def read_slots(path: Path) -> Iterator[StoredSlot]:
    """Yield the slots in use of a file whose owner died, as far as it is whole."""
    data = path.read_bytes()
    if len(data) < _HEADER or data[:8] != _MAGIC:
        return
    (count,) = struct.unpack_from("<Q", data, 8)
    base = _HEADER + 8 * count
    for slot in range(count):
        start = base + slot * _SLOT
        if start + _SLOT > len(data):
            return
        (word,) = struct.unpack_from("<Q", data, start)
        length, crc = word & 0xFFFFFFFF, word >> 32
        request = data[start + 8 : start + 8 + length]
        if not 0 < length <= SLOT_BYTES or zlib.crc32(request) != crc:
            continue
        (tokens,) = struct.unpack_from("<Q", data, _HEADER + 8 * slot)
        yield StoredSlot(request, tokens)


def _size(slots: int) -> int:
    return _HEADER + slots * (8 + _SLOT)


def _header(slots: int) -> bytes:
    return _MAGIC + struct.pack("<Q", slots)


def _allocate(handle: int, size: int) -> bool:
    """Take all blocks of a file; returns False where the system cannot, raises if there is no room."""
    if not hasattr(os, "posix_fallocate"):
        return False
    try:
        os.posix_fallocate(handle, 0, size)
    except OSError as error:
        if error.errno in _NOT_SUPPORTED:
            return False
        raise
    return True


def _file_system(path: Path) -> str:
    """Return the kind of file system that a path lies on, as Linux names it; "" if unknown."""
    where = os.path.realpath(path)
    kind, longest = "", -1
    with contextlib.suppress(OSError):
        for line in _MOUNTS.read_text(errors="surrogateescape").splitlines():
            point, name = line.split(" ")[1:3]
            # Blanks and such stand there as \040.
            point = point.encode("latin-1", "replace").decode("unicode_escape").rstrip("/")
            if len(point) >= longest and (where + "/").startswith(point + "/"):
                kind, longest = name, len(point)
    return kind
