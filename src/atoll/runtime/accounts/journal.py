"""The journal of a gateway: what runs and what is done, on disk before the database knows of it.

A folder holds one file of fixed slots and segments of finished requests:

    slots       a slot for each request that runs: what it is, and what its client has (slots.py)
    RUN-N.done  frames: length, crc, a finished request; appended to, then read into the database

A request takes a slot when it begins; each delivery is one store of 8 bytes; when it ends its frame is
appended first and the slot freed then. So whatever the moment at which the process dies, a request is in
a segment, in a slot, or in both with the same id, and the next start finds it exactly once. What is
written survives the process, not a power cut: nothing is forced to the disk on the way of a request.

A full disk ends no request and not the process. The blocks of the slots are taken before the first request
is let in; a finished request whose frame the disk does not take keeps its slot, and its frame here, until
`retry` writes it. As long as anything waits for that, new requests are refused (503), or let in with a spare
slot, of which the disk knows nothing (`open_spare`): what those used is kept here up to a limit.

A lock on the folder says that a process uses it. Each gateway takes the first free folder under a common
base, and on its start adopts those that dead gateways have left.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import struct
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from atoll.core.errors import AtollError, InputError
from atoll.core.files import atomic_write
from atoll.runtime.accounts.settlements import Settlement, settle
from atoll.runtime.accounts.slots import NO_MEDIA, SLOT_BYTES, MediaCounts, make_slots, read_slots
from atoll.telemetry.usage_record import UsageRecord

SLOTS = 8192
"""Requests that may run at the same time; more are refused, or run in spare slots."""
_TEXT_BYTES = 120
"""Of a name in a slot; longer ones are cut."""
_FOLDERS = 64
"""Gateways that may share a base, each with a folder of its own."""
_SEGMENT_BYTES = 4 * 2**20
"""A segment this large is ended though the database is away, so that it is read in parts."""
_SPARE_BYTES = 64 * 2**20
"""Of frames of spare slots that wait for room on the disk."""
# Length and crc of the request that follows.
_FRAME = struct.Struct("<II")
_NAME = "*.done"


class FinishedRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request that ended: all that the ledger will ever know of it."""

    op: str
    """Unique among all gateways; a client's request id need not be."""
    key_id: str | None
    tokens: int
    """Of prompt and answer."""
    finished_s: float
    """Unix time."""
    record: UsageRecord | None
    """None for a key that is not tracked."""
    audio_ms: int = 0
    """Heard; frames that end before this are read as well."""
    speech_ms: int = 0
    pixels: int = 0
    bytes_in: int = 0
    """Of the body that a service got; frames that end before this are read as well."""
    bytes_out: int = 0


class _OpenRequest(msgspec.Struct, frozen=True, array_like=True):
    op: str
    key_id: str | None
    track: bool
    request_id: str
    model: str
    endpoint: str
    started_s: float
    settled_in: str = ""
    """Folder in which it is settled what this request is billed (`settlements`), if another gateway may go on
    with its stream."""


_encode = msgspec.msgpack.Encoder().encode
_done_decoder = msgspec.msgpack.Decoder(FinishedRequest)
_open_decoder = msgspec.msgpack.Decoder(_OpenRequest)


class JournalFullError(AtollError):
    """A request cannot be written down: all slots are taken, or the disk is full."""


@dataclass(frozen=True, slots=True)
class RecoveredJournal:
    """Findings of a start about gateways that did not end well."""

    finished: int
    """Requests that had ended and were not in the database yet."""
    crashed: int
    """Requests that ran when the gateway died."""


class JournalFolder:
    """A folder of a journal, locked as long as this object is open."""

    def __init__(self, path: Path) -> None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = path
        self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # The kernel lets go of it when the process dies, in whatever way.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise

    def segments(self) -> list[Path]:
        """Return the segments, oldest first as far as one run goes."""
        return sorted(self.path.glob(_NAME))

    def close(self) -> None:
        """Let another have the folder."""
        os.close(self._lock)


class UsageJournal:
    """The journal of this process."""

    def __init__(
        self,
        folder: JournalFolder,
        adopted: tuple[JournalFolder, ...],
        recovered: RecoveredJournal,
        slots: int,
    ) -> None:
        self.recovered = recovered
        self.trouble = ""
        """Why the disk did not take something the last time that it did not."""
        self._folder = folder
        self._adopted = list(adopted)
        self._run = secrets.token_hex(8)
        self._operations = 0
        self._ops: dict[int, str] = {}
        # Taken from the end of the list: the lowest slots are used first.
        self._free = list(range(slots - 1, -1, -1))
        self._slot_count = self._next_spare = slots
        self._spare: dict[int, tuple[int, MediaCounts]] = {}
        """Tokens, sound and pictures of requests in spare slots, whose numbers come after the others."""
        self._spare_bytes = 0
        self._unwritten: deque[tuple[int, bytes]] = deque()
        # The current segment.
        self._segment: Path | None = None
        self._descriptor = -1
        self._size = 0
        self._number = 0
        self._closed_bytes = sum(path.stat().st_size for path in self.segments())
        self._slots = make_slots(folder.path / "slots", slots)

    @classmethod
    def claim(cls, base: Path, *, slots: int = SLOTS) -> UsageJournal:
        """Take a free folder under `base`, and all that dead processes have left there."""
        try:
            return cls._claim(base, slots)
        except OSError as error:
            reason = (error.strerror or type(error).__name__).lower()
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            hint = "free some space" if full else "name a folder you may write to"
            raise InputError(f"cannot keep a journal: {reason}", path=base, hint=hint) from error

    @classmethod
    def _claim(cls, base: Path, slots: int) -> UsageJournal:
        with contextlib.ExitStack() as until_claimed:
            folders: list[JournalFolder] = []
            recovered = RecoveredJournal(0, 0)
            for number in range(_FOLDERS):
                path = base / str(number)
                # The first free folder is this gateway's own; others are only looked at where somebody left
                # them.
                if folders and not path.exists():
                    continue
                try:
                    folder = JournalFolder(path)
                except BlockingIOError:
                    # A living gateway uses it.
                    continue
                # Whoever cannot keep a journal locks none: the next try finds what is in there.
                release = until_claimed.enter_context(contextlib.ExitStack())
                release.callback(folder.close)
                here = recover(path)
                recovered = RecoveredJournal(
                    recovered.finished + here.finished, recovered.crashed + here.crashed
                )
                if folders and not folder.segments():
                    # There is nothing to adopt: another may have it.
                    release.close()
                else:
                    folders.append(folder)
            if not folders:
                raise InputError(
                    f"{_FOLDERS} gateways use it already", path=base, hint="name another journal"
                )
            journal = cls(folders[0], tuple(folders[1:]), recovered, slots)
            # Claimed: from here on the journal closes the folders.
            until_claimed.pop_all()
        return journal

    # On the way of a request

    def open(
        self,
        key_id: str | None,
        request_id: str,
        model: str,
        endpoint: str,
        started_s: float,
        *,
        track: bool = True,
        settled_in: str = "",
    ) -> int:
        """Note that a request begins; return its slot."""
        if not self._free:
            raise JournalFullError("too many requests at once for the journal")
        op = self._name_operation()
        request = _OpenRequest(
            op, key_id, track, request_id, model, endpoint, started_s, settled_in
        )
        blob = _encode(request)
        # Long names are cut, so that every request fits into a slot, and then long paths left out.
        if len(blob) > SLOT_BYTES:
            cut = (_cut(request_id), _cut(model), _cut(endpoint))
            blob = _encode(_OpenRequest(op, key_id, track, *cut, started_s, settled_in))
            if len(blob) > SLOT_BYTES:
                blob = _encode(_OpenRequest(op, key_id, track, *cut, started_s))
        slot = self._free.pop()
        try:
            self._slots.put(slot, blob)
        except OSError as error:
            # The slot comes back by `retry`, once the disk takes it.
            self._note(error)
            raise JournalFullError("usage cannot be written down at the moment") from error
        self._ops[slot] = op
        return slot

    def open_spare(self) -> int:
        """Let a request begin of which the disk knows nothing until it ends; return its slot."""
        slot = self._next_spare
        self._next_spare += 1
        self._spare[slot] = (0, NO_MEDIA)
        self._ops[slot] = self._name_operation()
        return slot

    def _name_operation(self) -> str:
        self._operations += 1
        return f"{self._run}{self._operations:016x}"

    def operation(self, slot: int) -> str:
        """Return by which name the ledger will know a request."""
        return self._ops[slot]

    def delivered(self, slot: int, tokens: int) -> None:
        """Note how many tokens of the answer the client has."""
        if slot < self._slot_count:
            self._slots.deliver(slot, tokens)
        else:
            self._spare[slot] = (tokens, self._spare[slot][1])

    def use_media(self, slot: int, counts: MediaCounts) -> None:
        """Note the sound and pictures of a request by now."""
        if slot < self._slot_count:
            self._slots.use_media(slot, counts)
        else:
            self._spare[slot] = (self._spare[slot][0], counts)

    def media(self, slot: int) -> MediaCounts:
        """Return what `use_media` said last."""
        return self._slots.media(slot) if slot < self._slot_count else self._spare[slot][1]

    def tokens(self, slot: int) -> int:
        """Return what `delivered` said last."""
        return self._slots.tokens(slot) if slot < self._slot_count else self._spare[slot][0]

    def close(
        self,
        slot: int,
        key_id: str | None,
        tokens: int,
        finished_s: float,
        record: UsageRecord | None,
        media: MediaCounts = NO_MEDIA,
    ) -> bool:
        """Note that a request ended, and free its slot; returns False if it had to be forgotten.

        That is possible only for a spare slot, where neither the disk nor the memory for such has room.
        """
        done = FinishedRequest(self._ops.pop(slot), key_id, tokens, finished_s, record, *media)
        frame = _frame(done)
        # The frame first, the slot then: a crash in between leaves both, and the next start counts one.
        if not self._unwritten and self._append(frame):
            self._release(slot)
            return True
        if slot >= self._slot_count:
            if self._spare_bytes + len(frame) > _SPARE_BYTES:
                self._release(slot)
                return False
            self._spare_bytes += len(frame)
        # The slot stays taken, so that what was delivered is not forgotten.
        self._unwritten.append((slot, frame))
        return True

    def drop(self, slot: int) -> None:
        """Free the slot of a request that is not to be written down."""
        del self._ops[slot]
        self._release(slot)

    def _release(self, slot: int) -> None:
        if slot >= self._slot_count:
            del self._spare[slot]
        elif self._slots.clear(slot):
            self._free.append(slot)

    def _note(self, error: OSError) -> None:
        self.trouble = (error.strerror or type(error).__name__).lower()

    def _append(self, frame: bytes) -> bool:
        if self._descriptor < 0 and not self._begin():
            return False
        try:
            if os.write(self._descriptor, frame) == len(frame):
                self._size += len(frame)
                return True
            # A disk that is nearly full takes a part of it.
            self.trouble = "no space left on device"
        except OSError as error:
            self._note(error)
        # Half a frame would hide those after it.
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, self._size)
        return False

    def _begin(self) -> bool:
        self._number += 1
        path = self._folder.path / f"{self._run}-{self._number:08d}.done"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        try:
            self._descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            self._note(error)
            return False
        self._segment, self._size = path, 0
        return True

    # Beside it

    @property
    def bytes(self) -> int:
        """Size of what is not in the database yet."""
        return self._closed_bytes + self._size

    @property
    def running(self) -> int:
        """Requests that have a slot and did not end."""
        return len(self._ops)

    @property
    def unwritten(self) -> int:
        """Records that the disk did not take: finished requests, and slots that are not as they should be."""
        return len(self._unwritten) + self._slots.behind

    def retry(self) -> None:
        """Write what the disk did not take before."""
        self._free += self._slots.retry()
        while self._unwritten:
            # It is taken off only once it is written.
            slot, frame = self._unwritten[0]
            if not self._append(frame):
                return
            self._release(slot)
            if slot >= self._slot_count:
                self._spare_bytes -= len(frame)
            self._unwritten.popleft()

    def rotate(self, *, min_bytes: int = 1) -> None:
        """End the current segment if it has as many bytes, so that it can be read into the database.

        Not as long as the disk may hold a slot of a request that is in it: a start after a crash tells by
        the segment that it has ended.
        """
        if self._descriptor >= 0 and self._size >= min_bytes and not self._slots.behind:
            self._end()

    def _end(self) -> None:
        os.close(self._descriptor)
        self._closed_bytes += self._size
        self._segment, self._descriptor, self._size = None, -1, 0

    def rotate_large(self) -> None:
        """End the current segment if it is large."""
        self.rotate(min_bytes=_SEGMENT_BYTES)

    def segments(self) -> list[Path]:
        """Return the segments that are complete, this process's own last."""
        paths = [path for folder in self._adopted for path in folder.segments()]
        return paths + [path for path in self._folder.segments() if path != self._segment]

    def forget(self, segment: Path, *, keep_as: str | None = None) -> None:
        """Remove a segment that is in the database, or keep it under another ending.

        OSError if the disk does not let go of it.
        """
        size = segment.stat().st_size
        if keep_as is None:
            segment.unlink()
        else:
            segment.replace(segment.with_suffix(keep_as))
        self._closed_bytes -= size
        # Folders of dead gateways from which all was taken are let go.
        for folder in [f for f in self._adopted if not f.segments()]:
            self._adopted.remove(folder)
            folder.close()

    def release(self) -> None:
        """Let go of the folders; what is in them stays for the next start."""
        if self._descriptor >= 0:
            self._end()
        self._slots.close()
        for folder in (self._folder, *self._adopted):
            folder.close()


def _cut(text: str) -> str:
    # The cut may go through a letter: its half is left out.
    return text.encode(errors="replace")[:_TEXT_BYTES].decode(errors="ignore")


def _frame(done: FinishedRequest) -> bytes:
    data = _encode(done)
    return _FRAME.pack(len(data), zlib.crc32(data)) + data


def read_segment(path: Path) -> list[FinishedRequest]:
    """Return the requests in a segment, up to the first frame that is not whole."""
    return list(_frames(path.read_bytes()))


def _frames(data: bytes) -> Iterator[FinishedRequest]:
    at = 0
    while at + _FRAME.size <= len(data):
        length, crc = _FRAME.unpack_from(data, at)
        at += _FRAME.size
        body = data[at : at + length]
        at += length
        if len(body) < length or zlib.crc32(body) != crc:
            # The process died while it wrote this one: there is none after it.
            return
        try:
            yield _done_decoder.decode(body)
        except msgspec.DecodeError:
            return


def recover(folder: Path) -> RecoveredJournal:
    """Turn the slots of a dead process into a segment; return what its folder holds.

    May be cut short at any moment and run again.
    """
    # A start that was cut short left them.
    for half in folder.glob(".*.tmp"):
        half.unlink()
    # What is in a segment has ended, whatever its slot says.
    known = {done.op for path in folder.glob(_NAME) for done in read_segment(path)}
    slots = folder / "slots"
    left = [done for done in _read_crashed(slots) if done.op not in known] if slots.exists() else []
    # Before the slots are emptied: cut short in between, the next run finds these requests in the segment.
    if left:
        frames = b"".join(map(_frame, left))
        atomic_write(folder / f"{secrets.token_hex(8)}-{0:08d}.done", frames)
    if slots.exists():
        os.truncate(slots, 0)
    return RecoveredJournal(finished=len(known), crashed=len(left))


def _read_crashed(slots: Path) -> Iterator[FinishedRequest]:
    """Yield the requests that ran when the owner of a file of slots died, as far as it is whole."""
    # The last change of the file is the best that is known of when it died.
    died_s = slots.stat().st_mtime
    for stored in read_slots(slots):
        with contextlib.suppress(msgspec.DecodeError):
            request = _open_decoder.decode(stored.request)
            yield _close_crashed(request, stored.tokens, stored.media, died_s)


def _close_crashed(
    request: _OpenRequest, tokens: int, media: MediaCounts, died_s: float
) -> FinishedRequest:
    prompt_tokens = 0
    if request.settled_in:
        mine = Settlement(0, tokens)
        prompt_tokens, tokens = msgspec.structs.astuple(
            settle(Path(request.settled_in), request.op, mine)
        )
    # A clock may have been set back: nothing ends before it began.
    finished_s = max(died_s, request.started_s)
    record = UsageRecord(
        request_id=request.request_id,
        model=request.model,
        endpoint=request.endpoint,
        stream=True,
        status=0,
        # Mostly nobody knows the prompt any more; the tokens are those that the client had, so it is an
        # estimate.
        prompt_tokens=prompt_tokens,
        completion_tokens=tokens,
        estimated=True,
        backends=(),
        started_s=request.started_s,
        seconds=finished_s - request.started_s,
        first_token_s=None,
        outcome="crashed",
        key_id=request.key_id,
        audio_seconds=media.audio_ms / 1000,
        speech_seconds=media.speech_ms / 1000,
        image_pixels=media.pixels,
        bytes_in=media.bytes_in,
        bytes_out=media.bytes_out,
    )
    kept = record if request.track else None
    used = prompt_tokens + tokens
    return FinishedRequest(request.op, request.key_id, used, finished_s, kept, *media)
