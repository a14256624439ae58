"""Structured logs: one JSON object a line, with a time, an event and whatever fields belong to it.

Lines are collected and written in one go, so that a busy server does not pay a system call a line; the
owner calls `flush` a few times a second and once at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import Protocol

_BUFFER_BYTES = 64 * 2**10
_LOST_AT_BYTES = 16 * 2**20


class Log(Protocol):
    """Where events go."""

    def event(self, name: str, /, **fields: object) -> None:
        """Note that something happened."""
        ...

    def flush(self) -> None:
        """Write what was collected."""
        ...


class JsonLog:
    """Writes events as JSON lines to a file descriptor (2: stderr).

    A reader that is gone or does not keep up loses lines (their number is logged later); it never stops
    or slows the writer.
    """

    def __init__(self, descriptor: int = 2, **common: object) -> None:
        self._descriptor = descriptor
        self._common = common
        self._tail = b""
        """End of a line that others wrote: the common fields."""
        if common:
            written = json.dumps(common, separators=(",", ":"), default=str).encode()
            self._tail = b"," + written[1:] + b"\n"
        self._lines: list[bytes] = []
        self._size = 0
        self._lost = 0

    def event(self, name: str, /, **fields: object) -> None:
        """Note that something happened; values that JSON does not know are written as text."""
        record = {"time": round(time.time(), 3), "event": name, **self._common, **fields}
        line = json.dumps(record, separators=(",", ":"), default=str).encode() + b"\n"
        self._add(line)

    def line(self, line: bytes) -> None:
        """Add a line that is a JSON object with fields already; the common ones are added to it."""
        self._add(line[:-2] + self._tail if self._tail else line)

    def _add(self, line: bytes) -> None:
        if self._size > _LOST_AT_BYTES:
            self._lost += 1
            return
        self._lines.append(line)
        self._size += len(line)
        if self._size > _BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what was collected as far as the descriptor takes it."""
        if not self._lines:
            return
        if self._lost:
            lost, self._lost = self._lost, 0
            self._lines.append(b'{"event":"log.lost","lines":%d}\n' % lost)
        data = b"".join(self._lines)
        written = 0
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
        rest = data[written:]
        self._lines = [rest] if rest else []
        self._size = len(rest)


class SilentLog:
    """Forgets everything."""

    def event(self, name: str, /, **fields: object) -> None:
        """Do nothing with an event."""

    def flush(self) -> None:
        """Do nothing: no event was kept."""
