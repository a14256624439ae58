"""A folder of arrays that one process made and others hold leases on.

Nothing is kept that nobody holds: a lease runs out unless it is renewed, so a holder that died leaks nothing.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from atoll.core.errors import AtollError, InputError
from atoll.core.paths import runtime_dir
from atoll.runtime.executor.arrays import (
    ENDING,
    ID,
    INLINE_BYTES,
    Array,
    LostHandleError,
    identify_host,
    inline,
    map_file,
    name_dtype,
)
from atoll.runtime.executor.spares import SpareFiles, StoredFile
from atoll.tasks.array_leases import LeaseBook
from atoll.tasks.values import NOT_SUMMED, Handle

SHARED_MEMORY = Path("/dev/shm")
CACHE = "(cache)"
"""Who holds copies of others' arrays; no caller may have this name."""
_PART = ".part"
_OURS = re.compile(rf"[0-9a-f]{{32}}({re.escape(ENDING)}|{re.escape(_PART)})")
# Memory that must be free for each byte that a store may take.
_ROOM = 1.1
# Attempts to take a folder, and the pause between them.
_TRIES = 5
_TRY_S = 0.02
_FOLDERS = "atoll-*"
# Of fleets that `atoll serve` runs: an empty one so young may be of executors that are being started.
_FLEETS = "atoll-run-"
_YOUNG_S = 60.0
_LOG = logging.getLogger(__name__)
_SPARE_S = 10.0
"""How long files are kept to be written again."""


class StoreFullError(AtollError):
    """There is no room for another array; some must be freed first."""


def default_store_root(fallback: Path, needed_bytes: int) -> Path:
    """Return where stores should lie: in memory if there is room for so many bytes, else in `fallback`."""
    try:
        status = os.statvfs(SHARED_MEMORY)
    except OSError:
        return fallback
    free = status.f_bavail * status.f_frsize
    writable = os.access(SHARED_MEMORY, os.W_OK | os.X_OK)
    return SHARED_MEMORY if writable and free >= _ROOM * needed_bytes else fallback


def choose_store_folder(needed_bytes: int) -> Path:
    """Return a folder for the store of a process that stands alone; stores of killed ones are removed.

    It is not made yet; once the process has ended nothing but `remove_stale_stores` has to be done beside it.
    """
    root = default_store_root(runtime_dir(), needed_bytes)
    remove_stale_stores(root)
    return root / f"atoll-store-{secrets.token_hex(8)}"


class ArrayStore:
    """Arrays of one process, at most `max_bytes` of them; may be used from several threads.

    folder: its own, emptied when it opens and when it closes. owner, address: who handles say keeps them, and
    where they are fetched from. clock: seconds, in which leases are counted.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        *,
        owner: str,
        address: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self.owner = owner
        self.address = address
        self.used_bytes = 0
        self._clock = clock
        self._leases = LeaseBook()
        self._held: dict[str, Handle] = {}
        self._closed = False
        self._lock = threading.Lock()
        self._folder_lock = _take(folder)
        self._spares = SpareFiles(in_memory=_is_in_memory(folder))
        _empty(folder)

    def __len__(self) -> int:
        """How many arrays there are."""
        return len(self._held)

    def put(self, array: Array, holder: str, lease_s: float) -> Handle:
        """Keep an array for a holder; small ones need no keeping. `StoreFullError` if there is no room."""
        if array.nbytes <= INLINE_BYTES:
            return inline(array)
        dtype = name_dtype(array)
        # Random, never used twice: a reader that finds a file of this name has the right bytes.
        number = secrets.token_hex(16)
        path = f"{self.folder}/{number}{ENDING}"
        file = self._write(path, array)
        handle = Handle(
            *(number, self.owner, self.address, identify_host(), path, dtype),
            tuple(array.shape),
            NOT_SUMMED,
        )
        self._note(handle, file, holder, lease_s)
        return handle

    def adopt(self, handle: Handle, data: bytes | bytearray | memoryview, lease_s: float) -> None:
        """Keep a copy of another's array for a while, under its own id; its bytes are known to be right."""
        if not ID.fullmatch(handle.id):
            raise LostHandleError(handle.id, "no array is called so")
        if handle.id in self._held:
            return
        path = f"{self.folder}/{handle.id}{ENDING}"
        file = self._write(path, np.frombuffer(data, np.uint8))
        self._note(replace(handle, path=path), file, CACHE, lease_s)

    def open(self, number: str) -> Array:
        """Return an array that is here, mapped; `LostHandleError` if it is not."""
        handle = self._held.get(number)
        if handle is None:
            raise LostHandleError(number, "its lease has run out")
        return map_file(handle)

    def get(self, number: str) -> Handle | None:
        """Return the handle of an array that is here."""
        return self._held.get(number)

    def renew(self, numbers: Sequence[str], holder: str, lease_s: float) -> int:
        """Keep arrays for a holder longer, as the first of those who hold it or beside them.

        Returns how many of them are here.
        """
        until_s = self._clock() + lease_s
        found = 0
        with self._lock:
            for number in numbers:
                handle = self._held.get(number)
                if handle is not None:
                    found += 1
                    # One whose lease ran out, or who had none, gets a new one as long as the array is here.
                    if not self._leases.renew(number, holder, until_s):
                        self._leases.grant(number, handle.nbytes, holder, until_s)
        return found

    def release(self, numbers: Sequence[str], holder: str) -> None:
        """Give arrays up for a holder; those nobody holds are freed."""
        with self._lock:
            for number in numbers:
                if self._leases.release(number, holder):
                    self._free([number])

    def expire(self) -> None:
        """Free what nobody holds any more; to be called every second or so."""
        with self._lock:
            self._free(self._leases.expire(self._clock()))
            # Spare files take only the room that arrays leave.
            self._spares.shrink(self.max_bytes - self.used_bytes, self._clock() - _SPARE_S)

    def close(self) -> None:
        """Free everything, and the folder."""
        with self._lock:
            self._closed = True
            self._leases = LeaseBook()
            self._free(list(self._held))
            self._spares.shrink(0, float("inf"))
        _empty(self.folder)
        try:
            self.folder.rmdir()
        except OSError as error:
            if error.errno not in {errno.ENOTEMPTY, errno.ENOENT}:
                raise
        finally:
            os.close(self._folder_lock)

    def _reserve(self, nbytes: int) -> StoredFile | None:
        """Count bytes as taken, and return a file for them if there is one to write again."""
        with self._lock:
            if self._closed:
                raise StoreFullError("the store is closed")
            if self.used_bytes + nbytes > self.max_bytes:
                # Copies can be fetched again.
                self._free(self._leases.drop_holder(CACHE))
            if self.used_bytes + nbytes > self.max_bytes:
                raise StoreFullError(
                    f"{nbytes} bytes do not fit: {self.used_bytes} of {self.max_bytes} are taken"
                )
            # Before the spares are made fewer, so that the one that fits is not removed.
            spare = self._spares.take(nbytes)
            self.used_bytes += nbytes
            self._spares.shrink(self.max_bytes - self.used_bytes, float("-inf"))
            return spare

    def _give_back(self, nbytes: int) -> None:
        with self._lock:
            self.used_bytes -= nbytes

    def _note(self, handle: Handle, file: StoredFile, holder: str, lease_s: float) -> None:
        with self._lock:
            if self._closed:
                # A batch outlived the store: nobody will come for this.
                file.close()
                Path(handle.path).unlink(missing_ok=True)
                raise StoreFullError("the store is closed")
            if handle.id in self._held:
                # Two threads fetched it: the later file took the name of the first, its bytes count once.
                self.used_bytes -= handle.nbytes
            self._held[handle.id] = handle
            self._spares.note(handle.id, file)
            self._leases.grant(handle.id, handle.nbytes, holder, self._clock() + lease_s)

    def _free(self, numbers: Iterable[str]) -> None:
        for number in list(numbers):
            handle = self._held.pop(number, None)
            if handle is not None:
                self.used_bytes -= handle.nbytes
                # Under a name that no reader knows, like a file that is not written yet.
                name = f"{self.folder}/{secrets.token_hex(16)}{_PART}"
                self._spares.keep(number, handle.path, name, handle.nbytes, self._clock())

    def _write(self, path: str, array: Array) -> StoredFile:
        """Write a file that appears when it is whole, and return it."""
        spare = self._reserve(array.nbytes)
        file = spare
        part = path.removesuffix(ENDING) + _PART if spare is None else spare.path
        try:
            if file is None:
                file = StoredFile.create(part)
            file.write(array, in_memory=self._spares.in_memory)
            # Locked no more: only now may readers find it.
            file.unlock()
            os.rename(part, path)
        except BaseException as error:
            self._give_back(array.nbytes)
            if file is not None:
                file.close()
                Path(part).unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
                raise StoreFullError(f"no room in {self.folder}: {error.strerror}") from error
            raise
        file.path = path
        return file


def _is_in_memory(folder: Path) -> bool:
    """Return whether a folder lies in shared memory, where pages that a file has stay its own."""
    try:
        same = folder.stat().st_dev == SHARED_MEMORY.stat().st_dev
        return same and SHARED_MEMORY.is_mount()
    except OSError:
        return False


def _take(folder: Path) -> int:
    """Make the folder one's own, and return what holds it."""
    for _ in range(_TRIES):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if (descriptor := _lock(folder)) is not None:
                return descriptor
        except FileNotFoundError:
            pass
        except OSError as error:
            raise InputError(f"{folder}: {error.strerror}", field="store") from error
        # It may have been removed as nobody's, between being made and being locked.
        time.sleep(_TRY_S)
    raise InputError(
        f"{folder} is another executor's", field="store", hint="give each its own folder"
    )


def _lock(folder: Path) -> int | None:
    """Return what holds a folder, or None if another process holds it or it is there no more."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The folder may have been removed and made again between opening and locking: then another is locked.
        if os.stat(folder).st_ino == os.fstat(descriptor).st_ino:
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def remove_stale_stores(root: Path) -> list[str]:
    """Remove the stores of processes that were killed, and return the names of their folders.

    Looked at are folders of ours named "atoll-...", which are stores or hold stores. One is removed if no
    process holds the lock of it or of any folder in it. Nothing but arrays is removed, and folders that are
    empty then. Who is about to open a store there makes its folder again.
    """
    return [path.name for path in sorted(root.glob(_FOLDERS)) if _remove_stale(path)]


def _remove_stale(folder: Path) -> bool:
    locks: list[int] = []
    try:
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            return False
        inner = sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
        is_young = time.time() - status.st_mtime < _YOUNG_S
        if folder.name.startswith(_FLEETS) and is_young and not any(folder.iterdir()):
            return False
        # All locks before anything is removed: a store in use anywhere below keeps all of it.
        for path in (folder, *inner):
            lock = _lock(path)
            if lock is None:
                return False
            locks.append(lock)
        # From the inside out: a folder must be empty to be removed.
        for path in (*inner, folder):
            _empty(path)
            path.rmdir()
    except OSError as error:
        _LOG.info("%s is left: %s", folder, error.strerror)
        return False
    finally:
        for lock in locks:
            os.close(lock)
    return True


def _empty(folder: Path) -> None:
    """Remove every array, and nothing else, from a folder."""
    for path in folder.iterdir():
        if _OURS.fullmatch(path.name):
            path.unlink(missing_ok=True)
