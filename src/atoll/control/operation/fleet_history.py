"""History of decisions with reasons: a log that only grows, one JSON line for each event.

A line is written whole, flushed to disk before what it tells of is done, and never changed. A controller that
is killed while writing leaves at most one torn line at the end, which the next ends and readers leave out.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from atoll.core.errors import InputError
from atoll.core.frozen import Frozen

EventKind = Literal["controller", "plan", "start", "drain", "stop", "reweight", "failure", "note"]
_MAX_LINE_BYTES = 64 * 2**10
_CHUNK_BYTES = 2**16


class HistoryEvent(Frozen):
    """One thing that happened, at `at_s` seconds of Unix time, and why, in words.

    `term` is the controller's, `instance` and `plan` what it is about, `usd_per_hour` what the fleet costs
    from then on where that changes.
    """

    at_s: float
    kind: EventKind
    text: str = Field(max_length=4000)
    term: int = 0
    instance: str | None = None
    plan: str | None = None
    usd_per_hour: float | None = None


class History:
    """The log of a fleet, in a file of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, *events: HistoryEvent) -> None:
        """Write events down, all of them or, where the disk is full, none that a reader would see."""
        if not events:
            return
        lines = [event.to_json().encode() for event in events]
        for line in lines:
            if len(line) > _MAX_LINE_BYTES:
                raise InputError("an event is too long for the history", path=self.path)
        data = b"".join(line + b"\n" for line in lines)
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            size = os.fstat(handle).st_size
            if size and os.pread(handle, 1, size - 1) != b"\n":
                data = b"\n" + data
            try:
                if os.write(handle, data) != len(data):
                    raise OSError("the disk is full")
                os.fsync(handle)
            except OSError as error:
                os.ftruncate(handle, size)
                raise InputError(
                    f"cannot write: {error}", path=self.path, hint="free some space"
                ) from error
        finally:
            os.close(handle)

    def read(
        self, *, instance: str | None = None, since_s: float | None = None, last: int | None = None
    ) -> list[HistoryEvent]:
        """Return events in order: of one instance, since a time, the last so many."""
        found: list[HistoryEvent] = []
        for event in self._backwards():
            if instance is not None and event.instance != instance:
                continue
            # Clocks may step back, so an older event does not end the search.
            if since_s is not None and event.at_s < since_s:
                continue
            found.append(event)
            if last is not None and len(found) >= last:
                break
        return found[::-1]

    def _backwards(self) -> Iterator[HistoryEvent]:
        """Events from the last to the first; lines that are torn, or of a later version, are left out."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            at = file.seek(0, os.SEEK_END)
            rest = b""
            while at > 0:
                begin = max(0, at - _CHUNK_BYTES)
                file.seek(begin)
                rest = file.read(at - begin) + rest
                at = begin
                *lines, ending = reversed(rest.split(b"\n"))
                for line in lines:
                    event = _event(line)
                    if event is not None:
                        yield event
                rest = ending if len(ending) <= _MAX_LINE_BYTES else b""
            event = _event(rest)
            if event is not None:
                yield event


def _event(line: bytes) -> HistoryEvent | None:
    if not line or len(line) > _MAX_LINE_BYTES:
        return None
    try:
        return HistoryEvent.parse(json.loads(line))
    except (ValueError, InputError):
        return None
