"""Usage, summed up or row by row, and its export into a file."""

from __future__ import annotations

import csv
import os
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, TextIO

import sqlalchemy as sa

from atoll.core.errors import InputError, MissingDependencyError
from atoll.runtime.accounts.database import Database
from atoll.runtime.accounts.key_limits import day_of
from atoll.runtime.accounts.schema import attempts, keys, operations

SUMS = ("key", "owner", "model", "outcome", "day", "provider", "node")
"""Columns that usage can be summed up by."""
LISTS = ("operation", "attempt")
"""Kinds of rows that it can be listed by."""
MEDIA = {
    "audio_ms": "audio_seconds",
    "speech_ms": "speech_seconds",
    "image_pixels": "image_pixels",
}
"""Columns of sound and pictures, and what they are called in a report."""
BYTES = ("bytes_in", "bytes_out")
"""Columns of services that are no models; of whole requests only."""
_NUSD = 1e-9
_WHOLE = ("_tokens", "requests", "attempts", *BYTES)
_CHUNK = 2000
"""Rows that are read and written at a time."""
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class UsagePeriod:
    """Which requests: begun at or after one moment and before another (Unix time), of one key or owner."""

    since_s: float | None = None
    until_s: float | None = None
    key_id: str | None = None
    owner: str | None = None

    def conditions(self) -> list[sa.ColumnElement[bool]]:
        """Return the condition in SQL."""
        clauses: list[sa.ColumnElement[bool]] = []
        if self.since_s is not None:
            # The day is that of the end, which is never before; it has an index.
            clauses.append(operations.c.day >= day_of(self.since_s))
            clauses.append(operations.c.started_s >= self.since_s)
        if self.until_s is not None:
            clauses.append(operations.c.started_s < self.until_s)
        if self.key_id is not None:
            clauses.append(operations.c.key_id == self.key_id)
        if self.owner is not None:
            own = sa.select(keys.c.id).where(keys.c.owner == self.owner)
            clauses.append(operations.c.key_id.in_(own))
        return clauses


EVER = UsagePeriod()
"""All requests."""


async def usage(
    database: Database, by: str | Sequence[str], span: UsagePeriod = EVER, limit: int | None = None
) -> AsyncGenerator[Row, None]:
    """Yield usage: a row a group for one or several of SUMS, a row each for one of LISTS; `limit` rows.

    Tokens of requests are in sums exactly once, and so is their cost, in US dollars. Sums by provider or
    node are over attempts: a request that moved counts in each place with what was delivered there.
    """
    async with database.reading() as connection:
        statement = _statement(by, span).limit(limit)
        result = await connection.stream(statement.execution_options(yield_per=_CHUNK))
        async for row in result:
            yield _row(row._asdict())


def _statement(by: str | Sequence[str], span: UsagePeriod) -> sa.Select[Any]:
    if isinstance(by, str):
        return _listing(by, span) if by in LISTS else _sum((by,), span)
    return _sum(by, span)


def _row(row: Row) -> Row:
    cost = row.pop("cost_nusd")
    plain = {
        # PostgreSQL sums integers to decimals.
        name: int(value) if name.endswith(_WHOLE) else value
        for name, value in row.items()
        if name not in MEDIA
    }
    media = {"audio_seconds": int(row["audio_ms"]) / 1000}
    media["speech_seconds"] = int(row["speech_ms"]) / 1000
    media["image_pixels"] = int(row["image_pixels"])
    return plain | media | {"cost_usd": int(cost) * _NUSD}


def _sum(by: Sequence[str], span: UsagePeriod) -> sa.Select[Any]:
    table: sa.FromClause = operations.outerjoin(keys, keys.c.id == operations.c.key_id)
    count = sa.func.count().label("requests")
    counted = operations
    if not {"provider", "node"}.isdisjoint(by):
        table = table.join(attempts, operations.c.id == attempts.c.operation_id)
        count = sa.func.count(sa.distinct(attempts.c.operation_id)).label("requests")
        counted = attempts
    groups: dict[str, sa.ColumnElement[Any]] = {
        "key": sa.func.coalesce(operations.c.key_id, ""),
        "owner": sa.func.coalesce(keys.c.owner, ""),
        "model": operations.c.model,
        "outcome": operations.c.outcome,
        "day": operations.c.day,
        "provider": sa.func.coalesce(attempts.c.provider, ""),
        "node": sa.func.coalesce(attempts.c.node, ""),
    }
    ordered = [groups[name].label(name) for name in by]
    columns: list[sa.ColumnElement[Any]] = []
    for group in ordered:
        columns.append(group)
        if group.name == "key":
            columns.append(sa.func.coalesce(keys.c.name, "").label("name"))
    grouped = list(columns)
    columns += [
        count,
        sa.func.sum(counted.c.prompt_tokens).label("prompt_tokens"),
        sa.func.sum(counted.c.completion_tokens).label("completion_tokens"),
        *(sa.func.sum(counted.c[name]).label(name) for name in MEDIA),
        *(sa.func.sum(operations.c[name]).label(name) for name in BYTES if counted is operations),
        sa.func.sum(counted.c.cost_nusd).label("cost_nusd"),
    ]
    return (
        sa.select(*columns)
        .select_from(table)
        .where(*span.conditions())
        .group_by(*grouped)
        .order_by(*ordered)
    )


def _listing(by: str, span: UsagePeriod) -> sa.Select[Any]:
    if by == "operation":
        return (
            sa.select(operations)
            .where(*span.conditions())
            .order_by(operations.c.started_s, operations.c.id)
        )
    return (
        sa.select(attempts, operations.c.started_s, operations.c.key_id, operations.c.model)
        .join(operations, operations.c.id == attempts.c.operation_id)
        .where(*span.conditions())
        .order_by(operations.c.started_s, attempts.c.operation_id, attempts.c.number)
    )


def columns_of(by: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names of the columns of `usage`."""
    names = [column.name for column in _statement(by, EVER).selected_columns]
    kept = [name for name in names if name != "cost_nusd" and name not in MEDIA]
    return (*kept, *MEDIA.values(), "cost_usd")


class RowSink(Protocol):
    """A file, or standard output, that rows of a report are written to."""

    def write(self, rows: Sequence[Row]) -> None:
        """Write rows, each with a value for every column."""
        ...

    def close(self) -> None:
        """Write what is held back; nothing may be written after."""
        ...


class CsvSink:
    """Rows as CSV with a header, on an open stream."""

    def __init__(self, stream: TextIO, columns: Sequence[str]) -> None:
        self._writer = csv.DictWriter(stream, columns, lineterminator="\n")
        self._writer.writeheader()

    def write(self, rows: Sequence[Row]) -> None:
        """Write rows, each with a value for every column."""
        self._writer.writerows(rows)

    def close(self) -> None:
        """Nothing is held back."""


class ParquetSink:
    """Rows as a Parquet file."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ModuleNotFoundError as error:
            raise MissingDependencyError("pyarrow", "parquet", needed_for="--parquet") from error
        self._pa = pa
        self._schema = pa.schema([(name, _arrow_type(pa, name)) for name in columns])
        self._writer = pq.ParquetWriter(path, self._schema)

    def write(self, rows: Sequence[Row]) -> None:
        """Write some rows as a group."""
        self._writer.write_table(self._pa.Table.from_pylist(list(rows), schema=self._schema))

    def close(self) -> None:
        """Write the end of the file."""
        self._writer.close()


def _arrow_type(pa: Any, name: str) -> Any:
    if name.endswith((*_WHOLE, "_pixels")) or name in ("status", "number"):
        return pa.int64()
    if name in ("stream", "estimated"):
        return pa.bool_()
    if name.endswith(("_s", "_usd", "seconds")):
        return pa.float64()
    return pa.string()


async def export(rows: AsyncIterator[Row], sink: RowSink) -> int:
    """Write all rows; return how many there were."""
    count = 0
    held: list[Row] = []
    async for row in rows:
        held.append(row)
        if len(held) >= _CHUNK:
            sink.write(held)
            count += len(held)
            held.clear()
    sink.write(held)
    sink.close()
    return count + len(held)


class WholeFile:
    """A file that appears under its name only when it is complete."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary = path

    def __enter__(self) -> Self:
        try:
            handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=".", suffix=".tmp")
        except OSError as error:
            reason = (error.strerror or type(error).__name__).lower()
            raise InputError(f"cannot write: {reason}", path=self.path) from error
        os.close(handle)
        self.temporary = Path(name)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        if kind is None:
            self.temporary.replace(self.path)
        else:
            self.temporary.unlink(missing_ok=True)
