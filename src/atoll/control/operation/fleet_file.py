"""The file of a fleet that is operated, as programs read and replace it; earlier ones are kept.

Who replaces it says which version it is based on, so that nobody's change is lost. The controller reads the
file again by itself (`operated.FleetSource`).

    files/TIME-VERSION.yaml     what the file was, in the fleet's home, the newest last
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from atoll.control.operation.fleet_home import FleetHome, FleetRecord
from atoll.core.errors import AtollError, UnknownNameError
from atoll.core.files import atomic_write, read_text_limited

MAX_KEPT = 50
_LETTERS = 12


class FileChangedError(AtollError):
    """The file is another one than whoever replaces it has read."""


@dataclass(frozen=True, slots=True)
class FileVersion:
    """A version of the file: the name of its content, and when it was replaced (Unix time), None: never."""

    name: str
    replaced_s: float | None = None


class FleetFile:
    """See the module."""

    def __init__(self, home: FleetHome, record: FleetRecord) -> None:
        self.path = Path(record.source)
        self._folder = home.folder / "files"

    def read(self) -> tuple[str, str]:
        """Return the text of the file and the name of this version."""
        text = read_text_limited(self.path)
        return text, name_version(text)

    def replace(self, text: str, based_on: str, now_s: float) -> str:
        """Put another text in its place, in one step; return its version.

        Raises FileChangedError where the file is not the version any more that the text is based on.
        """
        with self._lock():
            before, version = self.read()
            if version != based_on:
                raise FileChangedError(
                    "somebody has changed the fleet file meanwhile", hint="look again"
                )
            if text == before:
                return version
            atomic_write(self._folder / f"{now_s:017.6f}-{version}.yaml", before)
            atomic_write(self.path, text)
            for path in self._kept()[:-MAX_KEPT]:
                path.unlink(missing_ok=True)
            return name_version(text)

    def list_earlier(self) -> tuple[FileVersion, ...]:
        """Return the versions that were replaced, the newest first."""
        return tuple(
            FileVersion(path.stem.partition("-")[2], float(path.stem.partition("-")[0]))
            for path in reversed(self._kept())
        )

    def read_earlier(self, name: str) -> str:
        """Return the text of a version that was replaced."""
        for path in self._kept():
            if path.stem.partition("-")[2] == name:
                return read_text_limited(path)
        raise UnknownNameError("version", name, [each.name for each in self.list_earlier()])

    def _kept(self) -> list[Path]:
        return sorted(self._folder.glob("*-*.yaml"))

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def name_version(text: str) -> str:
    """Return the name of a version: the beginning of its SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:_LETTERS]
