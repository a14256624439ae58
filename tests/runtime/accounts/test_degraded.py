"""Accounts whose disk or database fails while requests go on: what is refused, served, marked, caught up."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import sqlite3
from pathlib import Path

import pytest

from atoll.cli.main import run as run_command
from atoll.core.errors import InputError
from atoll.runtime.accounts import database as database_module
from atoll.runtime.accounts import schema
from atoll.runtime.accounts.accounts import Accounts
from atoll.runtime.accounts.api_keys import NewKey
from atoll.runtime.accounts.database import Database
from atoll.runtime.accounts.gaps import read_gaps
from tests.runtime.accounts.helpers import record, sqlite_url
from tests.runtime.accounts.test_accounts import NOON_S, refusal, world


@pytest.fixture
def lite(tmp_path: Path) -> str:
    return sqlite_url(tmp_path, "a.db")


def no_space(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def test_told_to_serve_a_full_disk_lets_requests_in_and_marks_the_ledger(
    lite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(lite, tmp_path / "j") as it:
        it.accounts.on_full_disk = "serve"
        header, _ = await it.key(tokens_total=1000)
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", no_space)
            for _ in range(40):  # there are 16 slots
                it.request(header)
                await it.accounts.sync()
                it.now_s += 1.0
            stats = it.accounts.stats()
            assert (stats["journal_full"], stats["unwritten"], stats["lost"]) == (True, 40, 0)
            assert stats["gap_requests"] == 24
            # The mark is in the database before it is over.
            (gap,) = await read_gaps(it.database)
            assert (gap.until_s, gap.requests, gap.lost) == (None, 24, 0)
            # What is not in the database yet counts towards a quota all the same.
            for _ in range(27):
                it.request(header)
            assert refusal(lambda: it.accounts.admit(header, "m")).code == "insufficient_quota"
            await it.accounts.sync()
            assert refusal(lambda: it.accounts.admit(header, "m")).code == "insufficient_quota"
        await it.accounts.sync()
        await it.accounts.sync()
        assert len(await it.rows(schema.operations)) == 67
        assert {row["tokens"] for row in await it.rows(schema.counters)} == {67 * 15}
        (gap,) = await read_gaps(it.database)
        assert (gap.until_s, gap.requests, gap.lost) == (NOON_S + 40.0, 51, 0)
        assert gap.since_s == NOON_S + 16.0
        assert it.notes.names().count("accounts.journal_full") == 1
        modes = [f["mode"] for name, f in it.notes.events if name == "accounts.journal_full"]
        assert modes == ["serve"]


async def test_told_to_serve_a_journal_at_its_limit_forgets_and_says_how_many(
    lite: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with world(lite, tmp_path / "j", journal_bytes=2000) as it:
        it.accounts.on_full_disk = "serve"
        header, _ = await it.key()

        async def away(*_: object) -> bool:
            raise OSError("away")

        write, it.accounts._database.write = it.accounts._database.write, away  # type: ignore[assignment,method-assign]
        while not it.accounts.stats()["journal_full"]:
            it.request(header)
            await it.accounts.sync()
        kept = it.accounts.stats()["unwritten"]
        size = it.accounts.stats()["journal_bytes"]
        for _ in range(5):
            it.request(header)
        assert it.accounts.stats()["lost"] == 5
        assert it.accounts.stats()["journal_bytes"] == size
        it.accounts._database.write = write  # type: ignore[method-assign]
        for _ in range(3):
            await it.accounts.sync()
        it.request(header)
        await it.accounts.sync()
        assert len(await it.rows(schema.operations)) == kept + 1  # type: ignore[operator]
        (gap,) = await read_gaps(it.database)
        assert (gap.lost, gap.until_s) == (5, NOON_S)
    assert await asyncio.to_thread(run_command, ["usage", "--db", lite]) == 0
    assert "served on a full disk: 5 requests are missing" in capsys.readouterr().err
    later = ["usage", "--db", lite, "--since", "2027-02-01"]
    assert await asyncio.to_thread(run_command, later) == 0
    assert "full disk" not in capsys.readouterr().err


async def test_refused_requests_say_so_by_a_code(
    lite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(lite, tmp_path / "j") as it:
        header, _ = await it.key()
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", no_space)
            it.request(header)
            await it.accounts.sync()
            error = refusal(lambda: it.accounts.admit(header, "m"))
            assert (error.status, error.code) == (503, "ledger_full")
            it.accounts.on_full_disk = "serve"  # a setting that changes while it runs
            it.accounts.admit(header, "m")
        await it.accounts.sync()


async def test_a_segment_that_cannot_be_removed_is_written_once(
    lite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that became read-only is not a database that went away."""

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    async with world(lite, tmp_path / "j") as it:
        header, _ = await it.key(tokens_total=10**6)
        it.request(header)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", read_only)
            for _ in range(3):
                assert await it.accounts.sync()
            stats = it.accounts.stats()
            assert (stats["written"], stats["unwritten"], stats["database_up"]) == (1, 0, True)
        assert list((tmp_path / "j").rglob("*.done"))
        await it.accounts.sync()
        await it.accounts.sync()
        assert not list((tmp_path / "j").rglob("*.done"))
        assert len(await it.rows(schema.operations)) == 1
        assert not await it.rows(schema.segments)


async def test_a_database_that_another_program_locks_costs_nothing_but_time(
    lite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "_BUSY_S", 0.05)
    async with world(lite, tmp_path / "j") as it:
        header, _ = await it.key(tokens_total=10**6)
        lock = sqlite3.connect(tmp_path / "a.db", isolation_level=None)
        lock.execute("BEGIN EXCLUSIVE")
        for _ in range(3):
            it.request(header)
            assert not await it.accounts.sync()
        assert it.accounts.stats()["unwritten"] == 3
        lock.execute("ROLLBACK")
        lock.close()
        for _ in range(2):
            assert await it.accounts.sync()
        assert len(await it.rows(schema.operations)) == 3
        assert {row["tokens"] for row in await it.rows(schema.counters)} == {45}
        assert it.notes.names().count("accounts.database_away") == 1


def test_a_locked_or_broken_database_is_one_line_at_the_start(
    lite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(database_module, "_BUSY_S", 0.05)
    assert run_command(["keys", "create", "a", "--db", lite]) == 0
    path = tmp_path / "a.db"
    lock = sqlite3.connect(path, isolation_level=None)
    lock.execute("BEGIN EXCLUSIVE")
    capsys.readouterr()
    assert run_command(["keys", "create", "b", "--db", lite]) == 3
    said = capsys.readouterr().err
    assert "database is locked (fix: end the program that holds it" in said
    assert said.count("\n") == 1
    lock.close()

    # What a dead gateway left has to go into the database, which cannot be.
    async def leave() -> None:
        accounts = await Accounts.open(lite, journal=tmp_path / "j", required=False)
        grant = accounts.admit(None, "m")
        accounts.closed(accounts.opened(grant, "r", "m", "e"), grant, record())
        accounts._task.cancel()  # type: ignore[union-attr]
        accounts._journal.release()
        await accounts._database.close()

    asyncio.run(leave())
    lock = sqlite3.connect(path, isolation_level=None)
    lock.execute("BEGIN EXCLUSIVE")
    with pytest.raises(InputError, match="cannot be used: database is locked"):
        asyncio.run(Accounts.open(lite, journal=tmp_path / "j"))
    lock.close()
    path.write_bytes(bytes(range(256)) * 64)
    (tmp_path / "a.db-wal").unlink(missing_ok=True)
    assert run_command(["keys", "list", "--db", lite]) == 3
    assert "not a database (fix: name another file" in capsys.readouterr().err


def test_a_process_that_hangs_while_it_changes_tables_is_not_waited_for_forever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    monkeypatch.setattr(database_module, "_MIGRATING_S", 0.1)
    handle = os.open(tmp_path / "a.db.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(InputError, match=r"locked for 0\.1 s"):
        asyncio.run(Database.open(str(tmp_path / "a.db")))
    os.close(handle)


async def test_a_key_cannot_have_expired_before_it_is_made(
    lite: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for given in ("2020-01-01", "0s", "2025-12-31T23:59:59+01:00"):
        assert run_command(["keys", "create", "late", "--expires", given, "--db", lite]) == 3
        said = capsys.readouterr().err
        assert said.startswith(f"error: --expires: {given} is over already (fix: give a span (30d)")
    assert run_command(["keys", "create", "far", "--expires", "9000000d", "--db", lite]) == 3
    assert "too far ahead" in capsys.readouterr().err

    database = await Database.open(lite)
    with pytest.raises(InputError, match="expires_s: it would have expired already"):
        await database.create_key(NewKey(name="n", expires_s=1.0))
    assert await database.keys() == ()
    await database.close()


def test_keys_that_expired_are_listed_as_such(
    lite: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("old", "good", "gone"):
        assert run_command(["keys", "create", name, "--expires", "30d", "--db", lite]) == 0
    assert run_command(["keys", "revoke", "gone", "--db", lite]) == 0
    with sqlite3.connect(tmp_path / "a.db") as connection:
        connection.execute(
            "UPDATE api_keys SET spec = json_set(spec, '$.expires_s', 1.0) WHERE name = 'old'"
        )
    connection.close()
    capsys.readouterr()
    assert run_command(["keys", "list", "--json", "--db", lite]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(key["name"], key["state"]) for key in listed] == [
        ("old", "expired"),
        ("good", "active"),
    ]
    assert run_command(["keys", "list", "--all", "--db", lite]) == 0
    shown = capsys.readouterr().out
    assert "expired" in shown
    assert "revoked" in shown
