"""`atoll usage`: what the keys of a gateway have used, and what it cost."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from atoll.cli.keys import DB_HELP, parse_moment, with_database
from atoll.cli.options import VerbSettings, json_field, verb
from atoll.core.options import option
from atoll.report.terminal import emit, note, table

if TYPE_CHECKING:
    from atoll.runtime.accounts.database import Database
    from atoll.runtime.accounts.gaps import LedgerGap

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
    db: str | None = option(None, DB_HELP, env="ATOLL_DB")
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
    count = with_database(options.db, lambda database: _show(database, options))
    target = parquet or csv
    if target is not None and str(target) != "-":
        note(f"wrote {count:,} rows to {target}")


async def _show(database: Database, options: UsageSettings) -> int:
    from atoll.runtime.accounts import usage_report as report
    from atoll.runtime.accounts.gaps import read_gaps

    since, until, key = options.since, options.until, options.key
    csv, parquet = options.csv, options.parquet
    span = report.UsagePeriod(
        None if since is None else parse_moment(since, "--since", ahead=False),
        None if until is None else parse_moment(until, "--until", ahead=False),
        None if key is None else (await database.key(key)).id,
    )
    for gap in await read_gaps(database, span.since_s, span.until_s):
        note(_describe_gap(gap))
    rows = report.usage(database, options.by, span)
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


def _describe_gap(gap: LedgerGap) -> str:
    """Say what the ledger may lack."""
    since, until = (
        "an unknown time"
        if at_s is None
        else f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%d %H:%M:%S}"
        for at_s in (gap.since_s, gap.until_s)
    )
    lost = f"{gap.lost:,} requests are missing" if gap.lost else "no request is known to be missing"
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
