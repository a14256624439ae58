"""The same behaviour on SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa

from atoll.core.errors import InputError, UnknownNameError, UsageError
from atoll.runtime.accounts import schema
from atoll.runtime.accounts.api_keys import NewKey
from atoll.runtime.accounts.database import Database, is_refusal, read_url
from atoll.runtime.accounts.journal import FinishedRequest
from atoll.runtime.accounts.key_limits import Counted
from atoll.runtime.accounts.ledger import rows_of
from atoll.runtime.pool.policy import Policy
from atoll.telemetry.usage_record import Attempt
from tests.runtime.accounts.conftest import empty_database
from tests.runtime.accounts.helpers import fresh_database, record


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database, of each kind in every run."""
    return empty_database(request.param, request, tmp_path)


async def count(database: Database, table: sa.Table) -> int:
    async with database.reading() as connection:
        return int(await connection.scalar(sa.select(sa.func.count()).select_from(table)) or 0)


async def test_keys_are_made_found_and_revoked(url: str) -> None:
    database = await Database.open(url)
    spec = NewKey(name="one", owner="me", models=("llama-*",), policy=Policy(providers=("ethz",)))
    text, key = await database.create_key(spec)
    assert await database.keys() == (key,)
    assert await database.key(key.id) == key == await database.key("one")
    assert key.spec == spec
    async with database.reading() as connection:
        row = (await connection.execute(sa.select(schema.keys))).one()
    secret = text.split("-")[2]
    assert all(secret not in str(value) for value in row)

    revoked = await database.revoke_key(key.id)
    assert revoked.state(0.0) == "revoked"
    again = await database.revoke_key(key.id)
    assert again.revoked_s == revoked.revoked_s
    await database.create_key(NewKey(name="one"))
    with pytest.raises(UsageError, match="2 keys are called"):
        await database.key("one")
    with pytest.raises(UnknownNameError):
        await database.key("two")
    await database.close()


async def test_a_key_is_changed(url: str) -> None:
    database = await Database.open(url)
    other = await Database.open(url)
    text, key = await database.create_key(NewKey(name="one", owner="me", tokens_per_day=5))
    seen = (await other.key_changes(0)).version
    changed = await database.change_key(key.id, {"name": "two", "role": "admin"})
    assert (changed.spec.name, changed.spec.role) == ("two", "admin")
    assert (changed.spec.owner, changed.spec.tokens_per_day) == ("me", 5)
    # Others see it, under the same secret.
    changes = await other.key_changes(seen)
    assert changes.keys == (changed,)
    assert (changed.digest, changed.created_s) == (key.digest, key.created_s)
    assert text.split("-")[1] == changed.id
    # Names are found, and summed up by, as they are now.
    assert await other.key("two") == changed
    with pytest.raises(UnknownNameError):
        await other.key("one")

    for bad in ({"name": ""}, {"role": "root"}, {"digest": "x"}, {"expires_s": 1.0}):
        with pytest.raises(InputError):
            await database.change_key(key.id, bad)
    with pytest.raises(UnknownNameError):
        await database.change_key("two", {"name": "three"})
    assert await database.key(key.id) == changed
    await asyncio.gather(
        *(d.change_key(key.id, {f: 7}) for d in (database, other) for f in _LIMITS[d is other])
    )
    spec = (await database.key(key.id)).spec
    assert all(getattr(spec, name) == 7 for names in _LIMITS for name in names)
    await database.revoke_key(key.id)
    with pytest.raises(UsageError, match="revoked"):
        await database.change_key(key.id, {"name": "four"})
    await database.close()
    await other.close()


_LIMITS = (
    ("tokens_per_min", "tokens_per_month", "concurrent"),
    ("tokens_total", "pixels_total", "requests_per_min"),
)


async def test_changes_since_a_version(url: str) -> None:
    database = await Database.open(url)
    assert await database.key_changes(0) == await database.key_changes(0)
    _, one = await database.create_key(NewKey(name="one"))
    _, two = await database.create_key(NewKey(name="two"))
    changes = await database.key_changes(0)
    assert changes.keys == (one, two)
    assert (await database.key_changes(changes.version)).keys == ()
    await database.revoke_key(one.id)
    later = await database.key_changes(changes.version)
    assert [key.id for key in later.keys] == [one.id]
    assert later.version > changes.version
    await database.close()


def test_changes_made_at_once_are_all_seen(url: str) -> None:
    async def main() -> None:
        one, two = await Database.open(url), await Database.open(url)
        seen: set[str] = set()
        version = 0

        async def make(database: Database, number: int) -> None:
            for i in range(3):
                await database.create_key(NewKey(name=f"{number}-{i}"))

        async def watch() -> None:
            nonlocal version
            while len(seen) < 12:
                changes = await one.key_changes(version)
                version = changes.version
                seen.update(key.spec.name for key in changes.keys)
                await asyncio.sleep(0.005)

        tasks = [make(one, 0), make(two, 1), make(one, 2), make(two, 3)]
        await asyncio.wait_for(asyncio.gather(watch(), *tasks), 240)
        await one.close()
        await two.close()

    asyncio.run(main())


async def test_a_segment_is_written_once(url: str) -> None:
    database = await Database.open(url)
    attempts = (Attempt("b", "node", "ethz", 2), Attempt("c", None, None, 3))
    rows = rows_of(
        [FinishedRequest("op1", "k", 15, 1_800_000_000.0, record("a\0b", attempts=attempts))]
    )
    assert await database.write("s1", rows)
    assert not await database.write("s1", rows)
    assert await count(database, schema.operations) == 1
    assert await count(database, schema.attempts) == 2
    used = await database.counters(["k"], ["2027-01-15", "total"])
    assert used == {"k": {"2027-01-15": Counted(15), "total": Counted(15)}}
    # The same operation in another segment: its rows stay as they are.
    assert await database.write("s2", rows_of([FinishedRequest("op1", None, 0, 0.0, record())]))
    assert await count(database, schema.operations) == 1
    await database.forget(["s1", "s2"])
    assert await count(database, schema.segments) == 0
    await database.close()


async def test_half_a_segment_is_none(url: str) -> None:
    database = await Database.open(url)
    rows = rows_of([FinishedRequest("op1", "k", 15, 1_800_000_000.0, record())])
    rows.operations.append(rows.operations[0] | {"id": "op2", "model": None})
    with pytest.raises(sa.exc.IntegrityError) as refused:
        await database.write("s1", rows)
    assert is_refusal(refused.value)
    for table in (schema.operations, schema.attempts, schema.counters, schema.segments):
        assert await count(database, table) == 0
    await database.close()


async def test_many_gateways_count_together(url: str) -> None:
    them = [await Database.open(url) for _ in range(3)]

    async def work(database: Database, gateway: int) -> None:
        for number in range(6):
            done = [
                FinishedRequest(f"{gateway}-{number}-{key}", f"k{key}", 10, 1_800_000_000.0, None)
                for key in (range(5) if gateway % 2 else range(4, -1, -1))
            ]
            await database.write(f"{gateway}-{number}", rows_of(done))

    await asyncio.gather(*(work(database, i) for i, database in enumerate(them)))
    used = await them[0].counters([f"k{i}" for i in range(5)], ["total"])
    assert used == {f"k{i}": {"total": Counted(180)} for i in range(5)}
    for database in them:
        await database.close()


async def test_many_may_open_an_empty_database_at_once(empty_url: str) -> None:
    them = await asyncio.gather(*(Database.open(empty_url) for _ in range(5)))
    await them[0].create_key(NewKey(name="one"))
    for database in them:
        assert len(await database.keys()) == 1
        await database.close()


@pytest.mark.slow
def test_processes_may_open_an_empty_database_at_once(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys\n"
        "from atoll.runtime.accounts.database import Database\n"
        "async def main():\n"
        "    await (await Database.open(sys.argv[1])).close()\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "x.db")]
    started = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(60) for process in started] == [0, 0]


async def test_migrations_make_the_tables_that_the_code_uses(empty_url: str) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    database = await Database.open(empty_url)
    async with database.reading() as connection:
        differences = await connection.run_sync(
            lambda sync: compare_metadata(MigrationContext.configure(sync), schema.metadata)
        )
        version = await connection.scalar(sa.text("SELECT version_num FROM alembic_version"))
    assert differences == []
    assert version == schema.HEAD
    await database.close()


async def test_a_database_of_a_newer_version_is_left_alone(empty_url: str) -> None:
    database = await Database.open(empty_url)
    async with database._engine.begin() as connection:
        await connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    await database.close()
    with pytest.raises(InputError, match="another version"):
        await Database.open(empty_url)


async def test_a_key_with_unknown_rules_may_do_nothing(url: str) -> None:
    database = await Database.open(url)
    _, key = await database.create_key(NewKey(name="one"))
    async with database._engine.begin() as connection:
        await connection.execute(schema.keys.update().values(spec='{"name":"one","new":1}'))
    assert (await database.key(key.id)).state(0.0) == "revoked"
    await database.close()


def test_a_database_that_is_not_there_is_one_line_without_its_password() -> None:
    with pytest.raises(InputError) as error:
        asyncio.run(Database.open("postgresql://me:verysecret@127.0.0.1:1/none"))
    assert "verysecret" not in str(error.value)
    assert "127.0.0.1" in str(error.value)
    with pytest.raises(UsageError) as refused:
        read_url("mysql://me:verysecret@host/none")
    assert "verysecret" not in str(refused.value)


def test_the_file_of_a_database_is_private(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "x.db"
    asyncio.run(_open_and_close(str(path)))
    assert path.stat().st_mode & 0o077 == 0
    with pytest.raises(InputError):
        asyncio.run(_open_and_close(str(path / "file-below-a-file")))


async def _open_and_close(url: str) -> None:
    await (await Database.open(url)).close()


@pytest.mark.parametrize("text", ["postgres://u@h/d", "postgresql://u@h/d"])
def test_urls_of_postgresql_have_two_spellings(text: str) -> None:
    assert read_url(text).drivername == "postgresql+psycopg"


def test_it_works_on_uvloop(postgres: str) -> None:
    import uvloop

    uvloop.run(_open_and_close(fresh_database(postgres)))
