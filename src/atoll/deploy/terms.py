"""Terms: of two controllers the later one is obeyed, and the earlier one is told that it is over.

A target that keeps a folder of its own writes the newest term whose orders it followed there (`fence_term`);
one that can ask elsewhere (a Lease, the labels of what stands) compares with that (`refuse_old_term`). The
refusal is of kind "superseded": whoever gets it must not act any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from atoll.core.errors import InputError
from atoll.core.files import atomic_write, read_text_limited
from atoll.core.frozen import Frozen
from atoll.deploy.target import DeployError

_FILE = "term.json"
_MAX_BYTES = 4096
_POLL_S = 0.02


class TermRecord(Frozen):
    """The newest term whose orders were followed."""

    term: int


def refuse_old_term(fleet: str, term: int, newest: int, *, written: Path | None = None) -> None:
    """Raise DeployError where orders of a later term than this one have been followed.

    `written` is the file that says so, where there is one: a person may know that there is no other.
    """
    if term < newest:
        lost = "" if written is None else f", or remove {written} if no other runs"
        raise DeployError(
            f"an order of term {term} for {fleet}, which a controller of term {newest} keeps",
            kind="superseded",
            hint=f"only one controller acts at a time; end this one{lost}",
        )


@contextlib.contextmanager
def fence_term(
    folder: Path, fleet: str, term: int, *, lock: Path, deadline_s: float
) -> Iterator[None]:
    """Work alone under a lock; refuse a term older than the newest that is written in a fleet's folder."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise DeployError(
            f"cannot write {folder}: {(error.strerror or str(error)).lower()}",
            kind="settings",
            hint="name a folder you may write to",
        ) from error
    try:
        _take(descriptor, time.monotonic() + deadline_s, fleet)
        known = read_term(folder)
        newest = 0 if known is None else known
        refuse_old_term(fleet, term, newest, written=folder / _FILE)
        if known is None or term > known:
            atomic_write(folder / _FILE, TermRecord(term=term).to_json())
        yield
    finally:
        os.close(descriptor)


def read_term(folder: Path) -> int | None:
    """Return the newest term whose orders were followed in a fleet's folder; None where there is none."""
    path = folder / _FILE
    if not path.exists():
        return None
    try:
        return TermRecord.from_json(read_text_limited(path, _MAX_BYTES), path=path).term
    except InputError as error:
        raise DeployError(
            f"{path} holds no term", kind="settings", hint="remove it if no controller runs"
        ) from error


def _take(descriptor: int, until_s: float, fleet: str) -> None:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until_s:
                raise DeployError(
                    f"another controller is at work on {fleet}", kind="unreachable"
                ) from None
            time.sleep(_POLL_S)
        else:
            return
