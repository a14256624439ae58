"""A process that keeps a journal on a disk of its own that becomes full, and is not to die of it.

    unshare --mount -- python -m tests.runtime.accounts.full_disk FOLDER KIND

FOLDER becomes a small tmpfs that nobody else sees. KIND is `mapped`, or `written` for a file system that
cannot take blocks beforehand; `database`: the disk of the database is full, the journal's is not; `serve`:
both are, and the gateway goes on. Exit code 0: nothing was lost; SIGBUS would end it with -7; 77: no tmpfs.
"""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
from pathlib import Path

import sqlalchemy as sa

from atoll.runtime.accounts import schema
from atoll.runtime.accounts.accounts import Accounts, OnFullDisk
from atoll.runtime.accounts.api_keys import NewKey
from atoll.runtime.accounts.database import Database
from atoll.runtime.accounts.gaps import read_gaps
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


async def keep_accounts(folder: Path, journal: Path, on_full_disk: OnFullDisk) -> None:
    """Serve on a full disk, and look at the ledger when there is room again."""
    url = str(folder / "x.db")
    database = await Database.open(url)
    text, _ = await database.create_key(NewKey(name="n", tokens_total=10**9))
    accounts = await Accounts.open(url, journal=journal, slots=16, refresh_s=60.0)
    accounts.on_full_disk = on_full_disk
    header = f"Bearer {text}".encode()

    def serve(name: str) -> None:
        grant = accounts.admit(header, "m")
        slot = accounts.opened(grant, name, "m", "e")
        accounts.delivered(slot, 3)
        accounts.closed(slot, grant, record(name, prompt=1, completion=4))

    serve("before")
    assert await accounts.sync()
    fill(folder / "filler")
    for number in range(100):
        serve(f"r{number}")
        if number % 10 == 0:
            await accounts.sync()
    stats = accounts.stats()
    assert not stats["database_up"], stats
    assert stats["unwritten"] == 100, stats
    assert stats["journal_full"] == (journal.parent == folder), stats
    (folder / "filler").unlink()
    for _ in range(3):
        await accounts.sync()
    stats = accounts.stats()
    assert (stats["database_up"], stats["unwritten"], stats["journal_full"]) == (True, 0, False)
    async with database.reading() as connection:
        rows = [r.request_id for r in await connection.execute(sa.select(schema.operations))]
        counted = (await connection.execute(sa.select(schema.counters))).all()
    assert sorted(rows) == sorted(["before", *(f"r{n}" for n in range(100))]), len(rows)
    assert {row.tokens for row in counted} == {101 * 5}
    gaps = await read_gaps(database)
    # All 16 slots were taken by requests that the disk did not take the end of.
    assert [(g.requests, g.lost, g.until_s is None) for g in gaps] == (
        [(stats["gap_requests"], 0, False)] if journal.parent == folder else []
    ), gaps
    assert bool(gaps) == bool(stats["gap_requests"])
    await accounts.close()
    await database.close()


def main(folder: Path, kind: str) -> int:
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False).returncode:
        return NO_TMPFS
    if kind in ("database", "serve"):
        elsewhere = folder.with_name("elsewhere") / "journal"
        asyncio.run(
            keep_accounts(
                folder,
                elsewhere if kind == "database" else folder / "journal",
                "refuse" if kind == "database" else "serve",
            )
        )
        return 0
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
