"""A process that keeps a journal on a disk of its own that becomes full, and is not to die of it.

    unshare --mount -- python -m tests.runtime.accounts.full_disk FOLDER KIND

FOLDER becomes a small tmpfs that nobody else sees. KIND is `mapped`, or `written` for a file system that
cannot take blocks beforehand. Exit code 0: nothing was lost; SIGBUS would end it with -7; 77: no tmpfs.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

from atoll.runtime.accounts.journal import JournalFullError, UsageJournal, read_segment
from tests.runtime.accounts.helpers import record

NO_TMPFS = 77
_SLOTS = 512


def fill(path: Path) -> None:
    """Write until the disk takes nothing more."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        while True:
            os.write(handle, bytes(4096))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
    finally:
        os.close(handle)


def refuse_allocation(*_: object) -> None:
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def main(folder: Path, kind: str) -> int:
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False).returncode:
        return NO_TMPFS
    if kind == "written":
        os.posix_fallocate = refuse_allocation
    journal = UsageJournal.claim(folder / "journal", slots=_SLOTS)
    taken = {"before": journal.open("k", "before", "m", "e", 0.0)}
    fill(folder / "filler")
    refused = []
    for number in range(_SLOTS - 2):
        try:
            taken[f"r{number}"] = journal.open("k", f"r{number}", "m", "e", 0.0)
        except JournalFullError:
            refused.append(number)
    # Blocks of a map are there already; without them whoever cannot be written down is not let in.
    assert not refused if kind == "mapped" else len(refused) > _SLOTS // 2, len(refused)
    for name, slot in taken.items():
        journal.delivered(slot, 3)
        journal.close(slot, "k", 4, 1.0, record(name))
    assert journal.unwritten >= len(taken) - 1
    assert journal.trouble == "no space left on device"
    journal.retry()
    assert journal.unwritten
    (folder / "filler").unlink()
    journal.retry()
    assert journal.unwritten == 0
    journal.rotate()
    found = [d.record.request_id for p in journal.segments() for d in read_segment(p) if d.record]
    assert sorted(found) == sorted(taken), (len(found), len(taken))
    assert len({journal.open("k", f"new{i}", "m", "e", 0.0) for i in range(_SLOTS)}) == _SLOTS
    journal.release()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
