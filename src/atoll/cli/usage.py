"""`atoll usage`: what the keys of a gateway have used, and what it cost."""

from __future__ import annotations

import asyncio
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import typer

from atoll.cli.console_client import ConsoleClient, console_field
from atoll.cli.key_store import ConsoleKeys, find_accounts, with_database
from atoll.cli.keys import STORE_HELP, parse_moment
from atoll.cli.options import VerbSettings, json_field, verb
from atoll.core.errors import AtollError
from atoll.core.options import option
from atoll.report.terminal import emit, note, table

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from atoll.runtime.accounts.database import Database

app = typer.Typer(add_completion=False)
_SHOWN = 1000


class UsageSettings(VerbSettings):
    """Options of `atoll usage`."""

    by: str = option(
        "key",
        "Sum up by key, owner, model, outcome, day, provider or node; or list every operation or attempt.",
    )
    since: str | None = option(None, "2026-11-01, or 30d ago (UTC).")
    until: str | None = option(None, "Before this date or time.")
    key: str | None = option(None, "Of one key: its id or name.")
    csv: Path | None = option(None, "Write a CSV file; - for standard output.")
    parquet: Path | None = option(None, "Write a Parquet file.")
    db: str | None = option(None, STORE_HELP, env="ATOLL_DB")
    console: str | None = console_field()
    as_json: bool = json_field()


@verb(app, UsageSettings)
def usage(options: UsageSettings) -> None:
    """Show requests, tokens and cost (US dollars) by key, model, provider or day.

    Tokens that a client received count once, whatever was retried or moved. Keys that are not tracked
    do not appear. Sound (seconds heard, seconds spoken) and pixels are shown where there are any.
    """
    from atoll.core.errors import UnknownNameError, UsageError
    from atoll.core.files import check_target
    from atoll.runtime.accounts.usage_report import LISTS, SUMS

    by, csv, parquet = options.by, options.csv, options.parquet
    if by not in SUMS + LISTS:
        raise UnknownNameError("grouping", by, SUMS + LISTS, field="--by")
    if sum((csv is not None, parquet is not None, options.as_json)) > 1:
        raise UsageError("--csv, --parquet and --json exclude each other", hint="name one of them")
    for target in (csv, parquet):
        if target is not None and str(target) != "-":
            check_target(target)
    # Lists of millions of rows are read from the database itself.
    client = None if by in LISTS else find_accounts(options.db, options.console)
    if client is not None:
        count = asyncio.run(_write(_each(_ask_sums(client, options)), options))
    else:
        count = with_database(options.db, lambda database: _show(database, options))
    target = parquet or csv
    if target is not None and str(target) != "-":
        note(f"wrote {count:,} rows to {target}")


async def _show(database: Database, options: UsageSettings) -> int:
    from atoll.runtime.accounts import usage_report as report
    from atoll.runtime.accounts.gaps import read_gaps

    since_s, until_s = _read_span(options)
    key = None if options.key is None else (await database.key(options.key)).id
    span = report.UsagePeriod(since_s, until_s, key)
    for gap in await read_gaps(database, span.since_s, span.until_s):
        note(_describe_gap(gap.since_s, gap.until_s, gap.lost))
    return await _write(report.usage(database, options.by, span), options)


def _ask_sums(client: ConsoleClient, options: UsageSettings) -> list[dict[str, Any]]:
    """Return the sums that a console tells of."""
    from atoll.runtime.accounts.api_keys import choose_key

    since_s, until_s = _read_span(options)
    key = (
        None if options.key is None else choose_key(ConsoleKeys(client).list_all(), options.key).id
    )
    query = {"by": options.by, "since_s": since_s, "until_s": until_s, "key": key}
    asked = urlencode({name: value for name, value in query.items() if value is not None})
    said = client.ask("GET", f"/atoll/v1/usage?{asked}")
    if said["truncated"] and (options.as_json or options.csv or options.parquet):
        raise AtollError("there are more rows than a console tells", hint="name the database: --db")
    for gap in said["gaps"]:
        note(_describe_gap(gap["since_s"], gap["until_s"], gap["lost"]))
    rows: list[dict[str, Any]] = said["rows"]
    return rows


async def _each(rows: list[dict[str, Any]]) -> AsyncGenerator[dict[str, Any], None]:
    for row in rows:
        yield row


def _read_span(options: UsageSettings) -> tuple[float | None, float | None]:
    since, until = options.since, options.until
    return (
        None if since is None else parse_moment(since, "--since", ahead=False),
        None if until is None else parse_moment(until, "--until", ahead=False),
    )


async def _write(rows: AsyncIterator[dict[str, Any]], options: UsageSettings) -> int:
    """Write rows where they are wanted; return how many there were."""
    from atoll.runtime.accounts import usage_report as report

    csv, parquet = options.csv, options.parquet
    columns = report.columns_of(options.by)
    if parquet is not None:
        with report.WholeFile(parquet) as file:
            return await report.export(rows, report.ParquetSink(file.temporary, columns))
    if csv is not None and str(csv) == "-":
        return await report.export(rows, report.CsvSink(sys.stdout, columns))
    if csv is not None:
        with report.WholeFile(csv) as file, file.temporary.open("w", newline="") as stream:
            return await report.export(rows, report.CsvSink(stream, columns))
    listed: list[dict[str, Any]] = []
    async for row in rows:
        listed.append(row)
        if not options.as_json and len(listed) == _SHOWN:
            note(f"only the first {_SHOWN:,} rows are shown; --csv writes all")
            break
    emit(listed, options.as_json, lambda: _draw(columns, listed))
    return len(listed)


def _describe_gap(since_s: float | None, until_s: float | None, missing: int) -> str:
    """Say what the ledger may lack."""
    since, until = (
        "an unknown time"
        if at_s is None
        else f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%d %H:%M:%S}"
        for at_s in (since_s, until_s)
    )
    lost = f"{missing:,} requests are missing" if missing else "no request is known to be missing"
    return f"from {since} to {until} (UTC) a gateway served on a full disk: {lost}"


_WIDE = ("endpoint", "operation_id", "status", "stream", "estimated", "day", "backend", "number")
"""Columns that only programs want to see."""
_MEDIA = ("audio_seconds", "speech_seconds", "image_pixels", "bytes_in", "bytes_out")
"""Shown where there are any."""


def _draw(columns: tuple[str, ...], rows: list[dict[str, Any]]) -> Any:
    listing = "started_s" in columns
    shown = [
        name
        for name in columns
        if not (listing and (name in _WIDE or name == "id"))
        and not (name in _MEDIA and not any(row[name] for row in rows))
    ]
    if listing:
        shown.remove("started_s")
        shown.insert(0, "started_s")
    right = (
        "tokens",
        "requests",
        "usd",
        "seconds",
        "pixels",
        "first token s",
        "bytes in",
        "bytes out",
    )
    titles = [name.replace("_", " ") for name in shown]
    titles = ["started" if title == "started s" else title for title in titles]
    return table(
        titles,
        [tuple(_cell(name, row[name]) for name in shown) for row in rows],
        right=[title for title in titles if title.endswith(right)],
    )


def _cell(name: str, value: Any) -> object:
    if name == "started_s":
        return f"{datetime.fromtimestamp(value, UTC):%Y-%m-%d %H:%M:%S}"
    if name == "cost_usd":
        return f"{value:,.6f}"
    if isinstance(value, float):
        return f"{value:,.3f}"
    return f"{value:,}" if isinstance(value, int) else value
