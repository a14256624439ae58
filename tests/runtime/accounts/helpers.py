"""Builders and stand-ins for the tests of accounts."""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from atoll.runtime.accounts.database import Database
from atoll.telemetry.usage_record import Attempt, UsageRecord

_numbers = itertools.count()


def fresh_database(server: str) -> str:
    """Make an empty database on a PostgreSQL server; return its URL."""
    import psycopg

    name = f"test_{os.getpid()}_{next(_numbers)}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return server.replace("/postgres?", f"/{name}?")


def sqlite_url(folder: Path, name: str = "accounts.db") -> str:
    """Make a SQLite database with its tables and nothing in them in a folder, once; return its URL."""
    path = folder / name
    if not path.exists():
        path.write_bytes(_sqlite_tables())
    return f"sqlite:///{path}"


@cache
def _sqlite_tables() -> bytes:
    """Return a file of SQLite as migrations leave it: they take most of the time of a short test."""

    async def make() -> None:
        await (await Database.open(f"sqlite:///{folder}/x.db")).close()

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as apart:
        apart.submit(asyncio.run, make()).result()
        return Path(folder, "x.db").read_bytes()


def record(
    request_id: str = "r",
    *,
    model: str = "m",
    prompt: int = 10,
    completion: int = 5,
    outcome: str = "ok",
    key_id: str | None = None,
    attempts: tuple[Attempt, ...] = (),
    backends: tuple[str, ...] = ("b",),
    started_s: float = 1_800_000_000.0,
) -> UsageRecord:
    """Return a finished request."""
    return UsageRecord(
        request_id,
        model,
        "/v1/completions",
        True,
        200,
        prompt,
        completion,
        False,
        backends,
        started_s,
        0.5,
        0.1,
        outcome,
        key_id,
        attempts,
    )


class Notes:
    """A log that remembers."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, object]]] = []

    def event(self, name: str, /, **fields: object) -> None:
        self.events.append((name, fields))

    def flush(self) -> None:
        pass

    def names(self) -> list[str]:
        return [name for name, _ in self.events]
