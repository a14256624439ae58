"""Arrays as files: written once, read in place by every process of the host.

A file holds nothing but the numbers. It is named after its handle's id, 128 random bits, and appears under
that name only when it is whole. So a reader on the same host that finds a file of the right name, owner and
size has the right bytes, and they are not summed up: that would cost more than everything else. Every frame
of a wire has a checksum of its own, and every chunk of an array says where it belongs. A handle that names a
checksum all the same is held to it where bytes came over a wire, and by `verify`. A file is removed or used
for another array only when nobody has it mapped: readers lock what they map, so map files by `open_handle`
alone.

numpy has no bfloat16: such arrays are opened as uint16, each number the upper half of a float32's bits.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import re
import stat
import uuid
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import AtollError, InputError
from atoll.tasks.values import ITEM_BYTES, NOT_SUMMED, Handle, handles_in

Array: TypeAlias = NDArray[Any]
INLINE_BYTES = 4096
"""Arrays up to this size travel inside their handle."""
ENDING = ".array"
ID = re.compile(r"[0-9a-f]{32}")
"""Form of handles; nothing else becomes the name of a file."""
_OPENED_AS = {"bfloat16": "uint16"}
"""Number formats that numpy does not have, and how their bits are shown."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MAP_FLAGS = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)


class LostHandleError(AtollError):
    """The array of a handle is gone, or is not what the handle says; whoever made it must do so again."""

    def __init__(self, handle: str, message: str) -> None:
        super().__init__(f"array {handle[:32]} is lost: {message}")
        self.handle = handle


@cache
def identify_host() -> str:
    """Return what tells this running system from all others, its restarts included."""
    # Another one after each start of the system: what was in memory is gone then.
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return f"node-{uuid.getnode():x}"


def inline(array: Array) -> Handle:
    """Return a handle that carries its array with it; the same for the same numbers."""
    contiguous = np.ascontiguousarray(array)
    data = contiguous.tobytes()
    dtype = name_dtype(array)
    digest = hashlib.blake2b(f"{dtype}{array.shape}".encode() + data, digest_size=16)
    return Handle(
        digest.hexdigest(), "", "", "", "", dtype, tuple(array.shape), zlib.crc32(data), data
    )


def name_dtype(array: Array) -> str:
    """Return the name of an array's number format; one that handles do not have is refused."""
    name = array.dtype.name
    if name not in ITEM_BYTES or not array.dtype.isnative:
        raise InputError(f"arrays of {array.dtype} cannot be handed over", field="dtype")
    return name


def flat_bytes(array: Array) -> memoryview:
    """Return the bytes of an array, in order; copied only where they do not lie so."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def read_bytes(handle: Handle, data: bytes | bytearray | memoryview, *, verify: bool) -> Array:
    """Return the array whose bytes these are, not to be written to; others are a `LostHandleError`.

    verify: sum them up, if the handle says what they come to.
    """
    if len(data) != handle.nbytes:
        raise LostHandleError(handle.id, f"{len(data)} bytes came of {handle.nbytes}")
    if verify and handle.crc32 != NOT_SUMMED and zlib.crc32(data) != handle.crc32:
        raise LostHandleError(handle.id, "its bytes are damaged")
    dtype = np.dtype(_OPENED_AS.get(handle.dtype, handle.dtype))
    array: Array = np.frombuffer(data, dtype).reshape(handle.shape)
    array.flags.writeable = False
    return array


class ArrayParts:
    """The bytes of an array as they come over a wire; any that is missing or out of place is found."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._data = bytearray()

    def add(self, at: int, data: bytes) -> None:
        """Take the bytes that begin at byte `at`; `LostHandleError` if they do not follow the others."""
        if at != len(self._data):
            words = f"bytes from {at} came after {len(self._data)}"
            raise LostHandleError(self._handle.id, words)
        if at + len(data) > self._handle.nbytes:
            raise LostHandleError(self._handle.id, f"more came than {self._handle.nbytes} bytes")
        self._data += data

    def finish(self) -> Array:
        """Return the array; `LostHandleError` if it is not whole."""
        return read_bytes(self._handle, self._data, verify=True)


def open_handle(handle: Handle, *, verify: bool = False) -> Array:
    """Return the array of a handle that is inline or on this host, mapped and not to be written to.

    `LostHandleError` if it is not here. Only files that a store may have written are opened, whatever path
    a handle names.
    """
    if handle.is_inline:
        return read_bytes(handle, handle.data, verify=True)
    if handle.host != identify_host() or not handle.path:
        raise LostHandleError(handle.id, "it is on another host")
    # The name must be that of the id: a handle from outside may not point at any other file.
    if not ID.fullmatch(handle.id) or os.path.basename(handle.path) != handle.id + ENDING:
        raise LostHandleError(handle.id, "its path is not that of an array")
    return map_file(handle, verify=verify)


def map_file(handle: Handle, *, verify: bool = False) -> Array:
    """Return the array in the file of a handle that is trusted, mapped and not to be written to."""
    path = handle.path
    try:
        # Neither a link nor a pipe of that name may mislead the reader or hold it up.
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise LostHandleError(handle.id, error.strerror or "its file is gone") from error
    try:
        # Held as long as it is mapped, so that the file is not written again meanwhile.
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        status = os.fstat(file)
        # It may have lost its name between opening and locking, to be written again.
        if os.stat(path, follow_symlinks=False).st_ino != status.st_ino:
            raise LostHandleError(handle.id, "its file is gone")
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise LostHandleError(handle.id, "its file is not one of ours")
        if status.st_size != handle.nbytes:
            raise LostHandleError(
                handle.id, f"its file has {status.st_size} bytes of {handle.nbytes}"
            )
        mapped = mmap.mmap(file, status.st_size, flags=_MAP_FLAGS, prot=mmap.PROT_READ)
    except OSError as error:
        raise LostHandleError(handle.id, error.strerror or "its file is gone") from error
    finally:
        # The mapping has a descriptor of its own, and with it the lock.
        os.close(file)
    return read_bytes(handle, memoryview(mapped), verify=verify)


def replace_handles(value: Any, open_: Callable[[Handle], Array]) -> Any:
    """Return a value with an array for every handle."""
    if isinstance(value, Handle):
        return open_(value)
    if isinstance(value, dict):
        return {key: replace_handles(item, open_) for key, item in value.items()}
    if isinstance(value, list):
        return [replace_handles(item, open_) for item in value]
    return value


def list_handles(value: Any) -> list[Handle]:
    """Return every handle in a value, each once."""
    return list({handle.id: handle for handle in handles_in(value)}.values())


def replace_arrays(value: Any, put: Callable[[Array], Handle]) -> Any:
    """Return a component's output as a value: a handle for every array, plain numbers for numpy's."""
    if isinstance(value, np.ndarray):
        return inline(value) if value.nbytes <= INLINE_BYTES else put(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: replace_arrays(item, put) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [replace_arrays(item, put) for item in value]
    return value
