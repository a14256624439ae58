"""Whether a process that starts gets anywhere: what it has read and said, and how long it waited for a core.

A start has a limit on the time in which nothing happens, not on all of it: large weights on a slow disk, or a
machine that has other things to do, take as long as they take.
"""

from __future__ import annotations

from pathlib import Path

_READ_BYTES = 2**20
"""Read since the last look: less is not loading."""


class StartWatch:
    """Looks at one process from its start on; on systems without /proc only at its log."""

    def __init__(self, pid: int, log: Path | None = None) -> None:
        self._folder = Path(f"/proc/{pid}")
        self._log = log
        self._read, self._said = self._reads(), self._log_bytes()
        self._delay_s = self._delays_s()

    def advances(self) -> bool:
        """Whether it has read or said anything since the last look."""
        read, said = self._reads(), self._log_bytes()
        if read - self._read < _READ_BYTES and said == self._said:
            return False
        self._read, self._said = read, said
        return True

    def take_delay_s(self) -> float:
        """Return how long it has waited for a core since this was asked last."""
        before, self._delay_s = self._delay_s, self._delays_s()
        return max(0.0, self._delay_s - before)

    def _reads(self) -> int:
        """Bytes that it has read, of files and by faults of memory that maps them."""
        try:
            lines = (self._folder / "io").read_text().splitlines()
        except OSError:
            return 0
        figures = dict(line.split(": ") for line in lines)
        return int(figures.get("rchar", 0)) + int(figures.get("read_bytes", 0))

    def _delays_s(self) -> float:
        try:
            return int((self._folder / "schedstat").read_text().split()[1]) / 1e9
        except (OSError, IndexError, ValueError):
            return 0.0

    def _log_bytes(self) -> int:
        try:
            return 0 if self._log is None else self._log.stat().st_size
        except OSError:
            return 0
