"""The file in which a journal keeps the requests that run, and what a full disk does to it.

    header | tokens delivered, 8 bytes a slot | sound heard, speech delivered (both in milliseconds), pixels,
    bytes to and from a service, 40 bytes a slot | slots of 512 bytes: (length, crc), request

The header names the version of this order. Files of the first, which had tokens only, and of the second,
which had no bytes, are read as well; those of a later one are refused, as they are not understood here.

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

from atoll.core.errors import InputError

_FAMILY = b"ATOLLJ"
_MAGIC = _FAMILY + b"03"
_WORDS = 5
_MEDIA_WORDS = {_FAMILY + b"01": 0, _FAMILY + b"02": 3, _MAGIC: _WORDS}
"""Words a slot has beside its tokens, by version."""
# The magic and the number of slots, 8 bytes each.
_HEADER = 16
_SLOT = 512
SLOT_BYTES = _SLOT - 8
"""The longest request that a slot holds."""
# Where a block that is taken once is written in place, so that a store always finds it.
_WRITES_IN_PLACE = frozenset({"ext2", "ext3", "ext4", "tmpfs", "xfs"})
# How a file system says that it cannot take blocks beforehand, not that it has none.
_NOT_SUPPORTED = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
_MOUNTS = Path("/proc/self/mounts")


class MediaCounts(NamedTuple):
    """Sound and pictures of a request, and bytes of one to a service, in whole units."""

    audio_ms: int = 0
    """Of sound that was heard."""
    speech_ms: int = 0
    """Of speech that the client has."""
    pixels: int = 0
    """Seen or drawn."""
    bytes_in: int = 0
    """Of the bodies that a service got from the client."""
    bytes_out: int = 0
    """And of those that the client got from it."""


NO_MEDIA = MediaCounts()


class StoredSlot(NamedTuple):
    """A slot in use, as a dead process left it."""

    request: bytes
    tokens: int
    media: MediaCounts


class MappedSlots:
    """Slots in a file whose blocks are all taken, mapped into memory: a store is one of 8 bytes."""

    def __init__(self, memory: mmap.mmap, slots: int) -> None:
        self._memory = memory
        self._base = _HEADER + 8 * (1 + _WORDS) * slots
        self._media_base = _HEADER + 8 * slots
        self._words = memoryview(memory).cast("Q")
        self._tokens = self._words[_HEADER // 8 : self._media_base // 8]
        self._media = self._words[self._media_base // 8 : self._base // 8]
        self._with_media: set[int] = set()
        """Slots whose sound and pictures are not 0."""
        self._memory[:_HEADER] = _header(slots)

    @property
    def behind(self) -> int:
        """How many slots the disk did not take as they are."""
        return 0

    def put(self, slot: int, request: bytes) -> None:
        """Write a request of up to `SLOT_BYTES` into a free slot; OSError if the disk does not take it."""
        start = self._base + slot * _SLOT
        # The counts of the request before go first: as long as the slot is free they do not matter.
        self._tokens[slot] = 0
        if slot in self._with_media:
            self._with_media.discard(slot)
            for word in range(_WORDS * slot, _WORDS * slot + _WORDS):
                self._media[word] = 0
        self._memory[start + 8 : start + 8 + len(request)] = request
        # The last store makes it count.
        self._words[start >> 3] = len(request) | zlib.crc32(request) << 32

    def deliver(self, slot: int, tokens: int) -> None:
        """Note how many tokens of the answer the client has."""
        self._tokens[slot] = tokens

    def tokens(self, slot: int) -> int:
        """Return what `deliver` said last."""
        return self._tokens[slot]

    def use_media(self, slot: int, counts: MediaCounts) -> None:
        """Note the sound and pictures of a request by now."""
        self._with_media.add(slot)
        for word, count in enumerate(counts, _WORDS * slot):
            self._media[word] = count

    def media(self, slot: int) -> MediaCounts:
        """Return what `use_media` said last."""
        if slot not in self._with_media:
            return NO_MEDIA
        return MediaCounts(*self._media[_WORDS * slot : _WORDS * (slot + 1)])

    def clear(self, slot: int) -> bool:
        """Free a slot; returns whether the disk knows, and with it whether the slot may be used again."""
        self._words[(self._base + slot * _SLOT) >> 3] = 0
        return True

    def retry(self) -> list[int]:
        """Write what the disk did not take before; returns the slots that became free by it."""
        return []

    def close(self) -> None:
        """Let go of the file."""
        # The views first: a mapping that has any cannot be closed.
        self._tokens.release()
        self._media.release()
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
        had_media = slot in self._with_media
        super().put(slot, request)
        start = self._base + slot * _SLOT
        try:
            # In the same order as in memory: what makes the slot count comes last.
            self._write(_HEADER + 8 * slot, 8)
            if had_media:
                self._write(self._media_base + 8 * _WORDS * slot, 8 * _WORDS)
            self._write(start, 8 + len(request))
        except OSError:
            super().clear(slot)
            self._behind.add(slot)
            if had_media:
                # The file may hold them still: they are zeroed again before the slot is used.
                self._with_media.add(slot)
            raise

    def deliver(self, slot: int, tokens: int) -> None:
        """Note how many tokens of the answer the client has."""
        self._tokens[slot] = tokens
        try:
            self._write(_HEADER + 8 * slot, 8)
        except OSError:
            self._behind.add(slot)

    def use_media(self, slot: int, counts: MediaCounts) -> None:
        """Note the sound and pictures of a request by now."""
        super().use_media(slot, counts)
        try:
            self._write(self._media_base + 8 * _WORDS * slot, 8 * _WORDS)
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
                self._write(self._media_base + 8 * _WORDS * slot, 8 * _WORDS)
                # Its first word is enough: the request was written when it began, or the slot is free.
                self._write(start, 8)
            except OSError:
                # No room for this one: the others wait for the next time.
                break
            self._behind.discard(slot)
            # 0: the slot is free.
            if not self._words[start >> 3]:
                freed.append(slot)
        return freed

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._handle)
        super().close()

    def _write(self, start: int, size: int) -> None:
        # A disk that is nearly full takes a part of it.
        if os.pwrite(self._handle, self._memory[start : start + size], start) != size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def make_slots(path: Path, slots: int) -> MappedSlots:
    """Make the file anew, all slots free; OSError if the disk has no room for all of them."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        if _allocate(handle, _size(slots)) and _file_system(path) in _WRITES_IN_PLACE:
            mapped = MappedSlots(mmap.mmap(handle, 0), slots)
            # The mapping keeps the file open by itself.
            os.close(handle)
            return mapped
        # Without blocks: they are found as slots are written, and a full disk is an error then.
        os.ftruncate(handle, _size(slots))
        return WrittenSlots(handle, slots)
    except BaseException:
        os.close(handle)
        raise


def read_slots(path: Path) -> Iterator[StoredSlot]:
    """Yield the slots in use of a file whose owner died, as far as it is whole.

    A file of a version that is not known here is an InputError.
    """
    data = path.read_bytes()
    words = _MEDIA_WORDS.get(data[:8])
    if words is None and data[:6] == _FAMILY:
        raise InputError(
            f"the journal is of another version ({data[6:8].decode('latin-1')!r})",
            path=path,
            hint="start the version of Atoll once that wrote it, so that it empties the journal",
        )
    if words is None or len(data) < _HEADER:
        return
    (count,) = struct.unpack_from("<Q", data, 8)
    media_base = _HEADER + 8 * count
    base = media_base + 8 * words * count
    for slot in range(count):
        start = base + slot * _SLOT
        if start + _SLOT > len(data):
            return
        (word,) = struct.unpack_from("<Q", data, start)
        length, crc = word & 0xFFFFFFFF, word >> 32
        request = data[start + 8 : start + 8 + length]
        if not 0 < length <= SLOT_BYTES or zlib.crc32(request) != crc:
            # It is free, or its owner died while it wrote the request.
            continue
        (tokens,) = struct.unpack_from("<Q", data, _HEADER + 8 * slot)
        media = struct.unpack_from(f"<{words}Q", data, media_base + 8 * words * slot)
        # Files of earlier versions have fewer words: the others are 0.
        yield StoredSlot(request, tokens, MediaCounts(*media))


def _size(slots: int) -> int:
    return _HEADER + slots * (8 * (1 + _WORDS) + _SLOT)


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
            # The deepest mount point counts, and of several at one place the last.
            if len(point) >= longest and (where + "/").startswith(point + "/"):
                kind, longest = name, len(point)
    return kind
