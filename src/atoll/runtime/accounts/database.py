"""The database of keys and usage: SQLite by default, PostgreSQL by URL, the same tables in both."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.core.errors import InputError, MissingDependencyError, UnknownNameError, UsageError
from atoll.core.paths import state_dir
from atoll.runtime.accounts.api_keys import ApiKey, NewKey, choose_key, make_key
from atoll.runtime.accounts.key_limits import Counted
from atoll.runtime.accounts.ledger import LedgerRows

try:
    import sqlalchemy as sa
    from sqlalchemy.dialects import postgresql, sqlite
    from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

    from atoll.runtime.accounts import schema
except ModuleNotFoundError as missing:
    raise MissingDependencyError(
        missing.name or "sqlalchemy", "accounts", needed_for="a database of keys and usage"
    ) from missing

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection

# Rows, or names, in one statement: what a database takes at once is limited.
_BATCH = 500
_MIGRATING = 0x41544F4C4C
"""The advisory lock of PostgreSQL under which tables are made."""
_DRIVERS = {
    "sqlite": "sqlite+aiosqlite",
    "sqlite+aiosqlite": "sqlite+aiosqlite",
    "postgres": "postgresql+psycopg",
    "postgresql": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
}
_BUSY_S = 5.0
"""How long SQLite waits for whoever writes; less than a gateway waits for an answer."""
_MIGRATING_S = 20.0
"""How long another process may take to change the tables."""
_LOCK_POLL_S = 0.02
_FORMS = "write sqlite:///FILE, postgresql://USER@HOST/NAME, or the path of a file"


def default_url() -> str:
    """Return the URL of the user's own database."""
    return f"sqlite:///{state_dir() / 'accounts.db'}"


def read_url(text: str) -> sa.URL:
    """Return the URL of a database with its driver; a path names a file of SQLite."""
    if "://" not in text:
        if not text:
            raise UsageError("the database has no name", hint=_FORMS)
        return sa.URL.create("sqlite+aiosqlite", database=text)
    try:
        url = sa.make_url(text)
    except (ArgumentError, ValueError):
        # The text may hold a password: it is not repeated.
        raise UsageError("this is no URL of a database", hint=_FORMS) from None
    if url.drivername not in _DRIVERS:
        raise UsageError(f"databases of the kind {url.drivername!r} are not known", hint=_FORMS)
    return url.set(drivername=_DRIVERS[url.drivername])


@dataclass(frozen=True, slots=True)
class KeyChanges:
    """Keys that were made or changed since a version."""

    version: int
    keys: tuple[ApiKey, ...]


class Database:
    """A connection to the tables of keys and usage. Made by `Database.open`."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        insert: Any = postgresql.insert if engine.dialect.name == "postgresql" else sqlite.insert
        self.insert = insert
        """Begins a statement that may say what to do about rows that are there already."""

    @classmethod
    async def open(cls, text: str) -> Database:
        """Connect, and make or change the tables if needed; any number may do so at once."""
        url = read_url(text)
        engine = _engine(url)
        try:
            async with _file_lock(url), engine.connect() as connection:
                await _migrate(connection)
        except (SQLAlchemyError, OSError) as error:
            await engine.dispose()
            raise unusable(text, error) from None
        except BaseException:
            await engine.dispose()
            raise
        return cls(engine)

    async def close(self) -> None:
        """Let go of all connections."""
        await self._engine.dispose()

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        """Give a connection to read with."""
        async with self._engine.connect() as connection:
            yield connection

    @contextlib.asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncConnection]:
        """Give a connection to write with: all that is written counts at its end, or nothing does."""
        async with self._engine.begin() as connection:
            yield connection

    # Keys

    async def create_key(self, spec: NewKey) -> tuple[str, ApiKey]:
        """Make a key; return its text, which nobody can find out later, and the key."""
        _check_expiry(spec)
        text, key_id, digest = make_key()
        async with self._engine.begin() as connection:
            version = await _next_version(connection)
            key = ApiKey(key_id, spec, time.time(), None, version, digest)
            await connection.execute(
                schema.keys.insert().values(
                    id=key.id,
                    digest=digest,
                    name=spec.name,
                    owner=spec.owner,
                    spec=spec.to_json(),
                    created_s=key.created_s,
                    revoked_s=None,
                    version=version,
                )
            )
        return text, key

    async def change_key(self, key_id: str, changes: Mapping[str, object]) -> ApiKey:
        """Give fields of a key (`NewKey`) other values; return it. Its text stays valid.

        InputError where a value cannot be, UnknownNameError without such a key, UsageError if it is revoked.
        """
        table = schema.keys
        async with self._engine.begin() as connection:
            # First: whoever changes a key waits here for others who do, and then reads what they wrote.
            version = await _next_version(connection)
            key = await _find_key(connection, key_id)
            if key.revoked_s is not None:
                raise UsageError("the key is revoked", hint="make another one")
            spec = NewKey.parse(key.spec.model_dump() | dict(changes))
            if "expires_s" in changes:
                _check_expiry(spec)
            await connection.execute(
                table.update()
                .where(table.c.id == key_id)
                .values(name=spec.name, owner=spec.owner, spec=spec.to_json(), version=version)
            )
        return replace(key, spec=spec, version=version)

    async def revoke_key(self, key_id: str) -> ApiKey:
        """Make a key useless for good; return it."""
        table = schema.keys
        async with self._engine.begin() as connection:
            version = await _next_version(connection)
            # A key that is revoked already keeps the time at which it was.
            await connection.execute(
                table.update()
                .where(table.c.id == key_id, table.c.revoked_s.is_(None))
                .values(revoked_s=time.time(), version=version)
            )
            return await _find_key(connection, key_id)

    # Budgets

    async def budgets(self) -> dict[str, str]:
        """Return the budgets that were set, as JSON by their ids."""
        table = schema.budgets
        async with self._engine.connect() as connection:
            rows = await connection.execute(sa.select(table).order_by(table.c.id))
            return {row.id: row.spec for row in rows}

    async def set_budget(self, name: str, spec: str, *, most: int) -> bool:
        """Set a budget, or change it; False where there would be more than `most`."""
        table = schema.budgets
        statement = self.insert(table).values(id=name, spec=spec)
        async with self._engine.begin() as connection:
            known = await connection.scalar(
                sa.select(sa.func.count()).select_from(table).where(table.c.id != name)
            )
            if (known or 0) >= most:
                return False
            await connection.execute(
                statement.on_conflict_do_update(index_elements=["id"], set_={"spec": spec})
            )
        return True

    async def remove_budget(self, name: str) -> bool:
        """Remove a budget; whether there was one."""
        table = schema.budgets
        async with self._engine.begin() as connection:
            done = await connection.execute(table.delete().where(table.c.id == name))
            return bool(done.rowcount)

    async def keys(self) -> tuple[ApiKey, ...]:
        """Return all keys, oldest first."""
        table = schema.keys
        async with self._engine.connect() as connection:
            rows = await connection.execute(sa.select(table).order_by(table.c.created_s))
            return tuple(_key(row._asdict()) for row in rows)

    async def key(self, name: str) -> ApiKey:
        """Return the key with an id, or with a name that only one key has."""
        return choose_key(await self.keys(), name)

    async def key_changes(self, since: int) -> KeyChanges:
        """Return the keys that changed after a version; one cheap query if none did."""
        table = schema.keys
        async with self._engine.connect() as connection:
            version = await connection.scalar(sa.select(schema.versions.c.version))
            if version is None or version <= since:
                return KeyChanges(since, ())
            rows = await connection.execute(
                sa.select(table).where(table.c.version > since).order_by(table.c.version)
            )
            keys = tuple(_key(row._asdict()) for row in rows)
        # By the rows that were read: one may have changed after the version was asked for.
        return KeyChanges(max((key.version for key in keys), default=since), keys)

    async def counters(
        self, keys: Sequence[str], periods: Collection[str]
    ) -> dict[str, dict[str, Counted]]:
        """Return what some keys used in some periods: by key, then by period."""
        table = schema.counters
        used_by_key: dict[str, dict[str, Counted]] = {}
        async with self._engine.connect() as connection:
            for start in range(0, len(keys), _BATCH):
                some = keys[start : start + _BATCH]
                wanted = sa.select(table).where(
                    table.c.key_id.in_(some), table.c.period.in_(periods)
                )
                for row in await connection.execute(wanted):
                    used = Counted(row.tokens, row.audio_ms, row.pixels)
                    used_by_key.setdefault(row.key_id, {})[row.period] = used
        return used_by_key

    # Usage

    async def write(self, segment: str, rows: LedgerRows) -> bool:
        """Write a segment of a journal: all of it, once; return False if it was there already."""
        table = schema.segments
        async with self._engine.begin() as connection:
            # Whoever adds the name writes the rows, in one transaction: a segment counts once, if brought
            # twice.
            added = self.insert(table).values(name=segment).on_conflict_do_nothing()
            if (await connection.execute(added.returning(table.c.name))).first() is None:
                return False
            for target, values in (
                (schema.operations, rows.operations),
                (schema.attempts, rows.attempts),
            ):
                statement = self.insert(target).on_conflict_do_nothing()
                for start in range(0, len(values), _BATCH):
                    await connection.execute(statement, values[start : start + _BATCH])
            if rows.counters:
                await self._count(connection, rows.counters)
        return True

    async def forget(self, segments: Sequence[str]) -> None:
        """Forget segments whose files are gone: nobody will bring them again."""
        table = schema.segments
        async with self._engine.begin() as connection:
            await connection.execute(table.delete().where(table.c.name.in_(segments)))

    async def _count(
        self, connection: AsyncConnection, counted: Mapping[tuple[str, str], Counted]
    ) -> None:
        table = schema.counters
        statement = self.insert(table)
        statement = statement.on_conflict_do_update(
            index_elements=[table.c.key_id, table.c.period],
            set_={
                name: table.c[name] + statement.excluded[name]
                for name in ("tokens", "audio_ms", "pixels")
            },
        )
        # In one order for all gateways: two of them cannot wait for each other.
        values = [
            {"key_id": key_id, "period": period, **asdict(used)}
            for (key_id, period), used in sorted(counted.items(), key=itemgetter(0))
        ]
        await connection.execute(statement, values)


FAULTS = (SQLAlchemyError,)
"""Errors of a database that are no mistake of this program: it is away, locked, full or broken."""
AWAY = (*FAULTS, OSError)
"""Errors of a database that cannot be used now."""

# Words in messages of the drivers, and what helps.
_CAUSES = (
    ("locked", "end the program that holds it, or try again when that is done"),
    ("not a database", "name another file, or restore this one"),
    ("malformed", "restore it from a copy"),
    ("full", "free some space on its disk"),
    ("readonly", "make the file and its folder writable"),
)


def unusable(text: str, error: BaseException) -> InputError:
    """Return what to tell whoever named a database that cannot be used; passwords are left out."""
    url = read_url(text)
    shown = (
        url.render_as_string(hide_password=True).replace("+aiosqlite", "").replace("+psycopg", "")
    )
    cause = getattr(error, "orig", None) or error
    reason = str(cause) or type(cause).__name__
    hints = (hint for word, hint in _CAUSES if word in reason)
    return InputError(
        f"cannot use the database {shown}: {reason}",
        hint=next(hints, "check its address, and that it runs and lets you in"),
    )


def is_refusal(error: Exception) -> bool:
    """Return whether a database will never take some rows, rather than not now."""
    # A value that could not even be sent, or rows that the database does not want.
    if isinstance(error, sa.exc.StatementError):
        return not isinstance(error, DBAPIError) or isinstance(
            error, sa.exc.DataError | sa.exc.IntegrityError
        )
    return isinstance(error, ValueError | OverflowError | TypeError)


def _check_expiry(spec: NewKey) -> None:
    if spec.expires_s is not None and spec.expires_s <= time.time():
        raise InputError(
            "it would have expired already", field="expires_s", hint="name a time to come"
        )


def _key(row: Mapping[str, Any]) -> ApiKey:
    revoked_s = row["revoked_s"]
    try:
        spec = NewKey.from_json(row["spec"])
    except InputError:
        # Made by a newer version: what it must not do is unknown here, so it may do nothing.
        spec = NewKey.model_construct(name=row["name"], owner=row["owner"])
        revoked_s = revoked_s or row["created_s"]
    return ApiKey(row["id"], spec, row["created_s"], revoked_s, row["version"], row["digest"])


async def _find_key(connection: AsyncConnection, key_id: str) -> ApiKey:
    wanted = sa.select(schema.keys).where(schema.keys.c.id == key_id)
    row = (await connection.execute(wanted)).first()
    if row is None:
        raise UnknownNameError("key", key_id, ())
    return _key(row._asdict())


async def _next_version(connection: AsyncConnection) -> int:
    """Raise the version of the keys; others who do so wait until this change is complete."""
    table = schema.versions
    raised = table.update().values(version=table.c.version + 1).returning(table.c.version)
    return int((await connection.execute(raised)).scalar_one())


def _engine(url: sa.URL) -> AsyncEngine:
    try:
        if url.get_backend_name() == "postgresql":
            return create_async_engine(
                url,
                hide_parameters=True,
                pool_size=2,
                # A connection that broke while it was kept is replaced, not reported.
                pool_pre_ping=True,
                connect_args={"connect_timeout": 5, "options": "-c statement_timeout=30000"},
            )
        engine = create_async_engine(url, hide_parameters=True, connect_args={"timeout": _BUSY_S})
    except ModuleNotFoundError as error:
        extra = "postgres" if error.name == "psycopg" else "accounts"
        raise MissingDependencyError(error.name or "", extra) from error
    if url.database and url.database != ":memory:":
        # Made here: SQLite would make it with whatever rights the umask leaves.
        _make_private(Path(url.database))

    @sa.event.listens_for(engine.sync_engine, "connect")
    def _configure(connection: Any, _record: object) -> None:
        cursor = connection.cursor()
        # So that readers do not wait for whoever writes.
        cursor.execute("PRAGMA journal_mode=WAL")
        # A commit is on the disk before the journal forgets what is in it.
        cursor.execute("PRAGMA synchronous=FULL")
        cursor.close()

    return engine


def _make_private(path: Path) -> None:
    """Make the file of a database for its owner's eyes only."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        hint = "name a file in a folder you may write to"
        raise InputError(f"cannot use the database: {reason}", path=path, hint=hint) from error


@contextlib.asynccontextmanager
async def _file_lock(url: sa.URL) -> AsyncIterator[None]:
    """Let one process at a time change the tables of a SQLite file."""
    if url.get_backend_name() != "sqlite" or not url.database or url.database == ":memory:":
        yield
        return
    path = f"{url.database}.lock"
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # Asked for again and again: whoever holds the lock may be another task of this thread.
        for _ in range(int(_MIGRATING_S / _LOCK_POLL_S)):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(_LOCK_POLL_S)
        else:
            raise TimeoutError(f"another process holds {path}: locked for {_MIGRATING_S:g} s")
        yield
    finally:
        os.close(handle)


async def _migrate(connection: AsyncConnection) -> None:
    if connection.dialect.name == "postgresql":
        # Held until the transaction ends.
        await connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_MIGRATING)))
    if await connection.run_sync(_revision) != schema.HEAD:
        await connection.run_sync(_upgrade)
        await connection.commit()


def _revision(connection: Connection) -> str | None:
    if not sa.inspect(connection).has_table("alembic_version"):
        return None
    revision: str | None = connection.scalar(sa.text("SELECT version_num FROM alembic_version"))
    return revision


def _upgrade(connection: Connection) -> None:
    from alembic import command
    from alembic.config import Config
    from alembic.util import CommandError

    config = Config()
    folder = str(Path(__file__).parent / "migrations")
    # A single % would be read as the beginning of a reference.
    config.set_main_option("script_location", folder.replace("%", "%%"))
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        raise InputError(
            f"the database was made by another version of Atoll ({error})",
            hint="use that version or a newer one",
        ) from None
