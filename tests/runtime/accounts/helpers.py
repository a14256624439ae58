"""Builders and stand-ins for the tests of accounts."""

from __future__ import annotations

import itertools
import os

from atoll.telemetry.usage_record import Attempt, UsageRecord

_numbers = itertools.count()


def fresh_database(server: str) -> str:
    """Make an empty database on a PostgreSQL server; return its URL."""
    import psycopg

    name = f"test_{os.getpid()}_{next(_numbers)}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return server.replace("/postgres?", f"/{name}?")


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
