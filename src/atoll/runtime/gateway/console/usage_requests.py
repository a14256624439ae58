"""Usage summed up by one thing or two, as JSON or as a file of CSV.

All of it is read before any of it is sent, so that a client that reads slowly holds up nobody at the
database; therefore the number of rows is limited.
"""

from __future__ import annotations

import asyncio
import csv
import io
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Literal, Required, TypedDict, cast

import msgspec

from atoll.core.errors import InputError
from atoll.runtime.accounts.grants import role_forbids_error
from atoll.runtime.gateway.budgets import MAX_BUDGETS, BudgetSettings
from atoll.runtime.gateway.console.alarms import Level
from atoll.runtime.gateway.console.history_requests import UnixTime
from atoll.runtime.gateway.console.route import (
    NO_STORE,
    ConsoleCall,
    ConsoleRoute,
    show,
)
from atoll.runtime.http.api_route import NoQuery
from atoll.runtime.http.handlers import Response
from atoll.runtime.openai import ApiError

if TYPE_CHECKING:
    from atoll.runtime.accounts.usage_report import Row, UsagePeriod

ROWS = 10_000
"""Of JSON; more are left out, and that is said."""
_BUDGET_BYTES = 4096
CSV_ROWS = 100_000
"""Of CSV; more are refused: a file that lacks some would be taken for whole."""
_MAX_GROUPS = 2
"""Columns that usage is summed up by at once."""
_AT_A_TIME = 500
"""Rows that are written before requests have their turn."""
_FORMULA = ("=", "+", "-", "@", "|", "%", "'")
"""First characters that make a spreadsheet compute the text of a cell, or drop its beginning."""
_BLANK = " \t\r\n\0\u00a0\ufeff"


class UsageQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """By what usage is summed up, of which requests, and how it is written."""

    by: str = "key"
    """One or two of the columns, with a comma between."""
    since_s: UnixTime | None = None
    until_s: UnixTime | None = None
    key: str | None = None
    format: Literal["json", "csv"] = "json"


class ShownBudget(TypedDict):
    """A budget of this month, and what of it is spent, in US dollars."""

    key: str | None
    name: str | None
    owner: str | None
    usd_per_month: float
    spent_usd: float
    level: Level
    warn_at: float
    in_settings: bool


class BudgetList(TypedDict):
    """Budgets that a caller may see."""

    budgets: list[ShownBudget]


class ShownGap(TypedDict):
    """A time (Unix) in which a gateway could not write down all, and how many requests are missing of it."""

    since_s: float
    until_s: float | None
    lost: int


class UsageRow(TypedDict, total=False):
    """Sums of a group, named by one or two of the first columns; bytes are of whole requests only."""

    key: str | None
    name: str | None
    owner: str | None
    model: str | None
    outcome: str | None
    day: str | None
    provider: str | None
    node: str | None
    requests: Required[int]
    prompt_tokens: Required[int]
    completion_tokens: Required[int]
    bytes_in: int
    bytes_out: int
    audio_seconds: Required[float]
    speech_seconds: Required[float]
    image_pixels: Required[int]
    cost_usd: Required[float]


class UsageSums(TypedDict):
    """Sums in the order of their groups; `truncated`: there are more. Members are told of no gaps."""

    by: list[str]
    rows: list[UsageRow]
    truncated: bool
    gaps: list[ShownGap]


def show_budgets(call: ConsoleCall) -> Response:
    """Return how budgets stand; for members, those of their own keys and of their owner."""
    caller, accounts = call.caller, call.accounts
    found = []
    for one in call.context.budgets.standings:
        budget = one.budget
        key = None if budget.key is None else accounts.key(budget.key)
        own = (key is not None and caller.owns(key)) or (
            caller.owner != "" and budget.owner == caller.owner
        )
        if caller.role == "member" and not own:
            continue
        found.append(
            ShownBudget(
                key=budget.key,
                name=None if key is None else key.spec.name,
                owner=budget.owner,
                usd_per_month=budget.usd_per_month,
                spent_usd=round(one.spent_usd, 6),
                level=one.level,
                warn_at=budget.warn_at,
                in_settings=one.in_settings,
            )
        )
    return show(BudgetList(budgets=found))


async def set_budget(call: ConsoleCall) -> Response:
    """Set the budget of a key, an owner or all requests; of each there is one."""
    accounts = call.accounts
    call.query(NoQuery)
    if len(call.request.body) > _BUDGET_BYTES:
        raise ApiError(413, "a budget takes fewer bytes of JSON", code="request_too_large")
    try:
        budget = BudgetSettings.from_json(call.request.body)
    except InputError as error:
        raise ApiError(400, str(error), param=error.field) from None
    async with call.gate.enter(call.caller.key_id):
        if budget.key is not None and accounts.key(budget.key) is None:
            raise ApiError(404, f"there is no key {budget.key[:100]!r}", code="not_found")
        kept = await accounts.database.set_budget(budget.id, budget.to_json(), most=MAX_BUDGETS)
        if not kept:
            raise ApiError(400, f"there are {MAX_BUDGETS} budgets, and no more are kept")
        await call.context.budgets.look(time.time())
    call.context.log.event(
        "budget.set", budget=budget.id, usd=budget.usd_per_month, by=call.caller.label
    )
    return show_budgets(call)


async def remove_budget(call: ConsoleCall) -> Response:
    """Remove a budget that was set here; one of the settings counts again."""
    call.query(NoQuery)
    async with call.gate.enter(call.caller.key_id):
        if not await call.accounts.database.remove_budget(call.name):
            raise ApiError(404, f"no budget {call.name[:100]!r} was set here", code="not_found")
        await call.context.budgets.look(time.time())
    call.context.log.event("budget.removed", budget=call.name, by=call.caller.label)
    return show_budgets(call)


async def show_usage(call: ConsoleCall) -> Response:
    """Sum up what was used; for members, by their own keys."""
    accounts = call.accounts
    # There where accounts are: it needs what the database needs.
    from atoll.runtime.accounts.gaps import read_gaps
    from atoll.runtime.accounts.usage_report import SUMS, columns_of, usage

    query = call.query(UsageQuery)
    by = _read_groups(query.by, SUMS)
    span = _period(call, query)
    is_csv = query.format == "csv"
    max_rows = CSV_ROWS if is_csv else ROWS
    gaps: list[ShownGap] = []
    read = _CsvText(columns_of(by)) if is_csv else _JsonRows(gaps)
    if span is not None:
        async with (
            call.gate.enter(call.caller.key_id),
            aclosing(usage(accounts.database, by, span, max_rows + 1)) as rows,
        ):
            if not is_csv and call.caller.role != "member":
                gaps += [
                    ShownGap(since_s=gap.since_s, until_s=gap.until_s, lost=gap.lost)
                    for gap in await read_gaps(accounts.database, span.since_s, span.until_s)
                ]
            async for row in rows:
                read.add(row)
                if read.count % _AT_A_TIME == 0:
                    await asyncio.sleep(0)
    return read.answer(by)


class _JsonRows:
    """Rows as JSON."""

    def __init__(self, gaps: list[ShownGap]) -> None:
        self.count = 0
        self.gaps = gaps
        self._rows: list[Row] = []

    def add(self, row: Row) -> None:
        self.count += 1
        self._rows.append(row)

    def answer(self, by: Sequence[str]) -> Response:
        rows = cast(list[UsageRow], self._rows[:ROWS])
        truncated = self.count > ROWS
        return show(UsageSums(by=list(by), rows=rows, truncated=truncated, gaps=self.gaps))


class _CsvText:
    """Rows as a file of CSV with a header."""

    def __init__(self, columns: Sequence[str]) -> None:
        self.count = 0
        self._columns = columns
        self._text = io.StringIO()
        self._writer = csv.writer(self._text, lineterminator="\n")
        self._writer.writerow(columns)

    def add(self, row: Row) -> None:
        self.count += 1
        self._writer.writerow([_cell(row[name]) for name in self._columns])

    def answer(self, by: Sequence[str]) -> Response:
        if self.count > CSV_ROWS:
            raise ApiError(
                400,
                f"these are more than {CSV_ROWS} rows: narrow them with since_s and until_s",
                param="since_s",
            )
        headers = (
            *NO_STORE,
            ("content-disposition", f'attachment; filename="usage-{"-".join(by)}.csv"'),
            ("x-content-type-options", "nosniff"),
        )
        body = self._text.getvalue().encode()
        return Response(body, 200, "text/csv; charset=utf-8", headers)


def _cell(value: object) -> object:
    """Return a value that a spreadsheet takes for what it is: text that looks like a formula is quoted."""
    if isinstance(value, str) and value.lstrip(_BLANK).startswith(_FORMULA):
        return f"'{value}"
    return value


def _read_groups(text: str, known: Sequence[str]) -> list[str]:
    by = text.split(",")
    if len(by) > _MAX_GROUPS or len(set(by)) != len(by) or not set(by) <= set(known):
        raise ApiError(400, f"by is one or two of {', '.join(known)}", param="by")
    return by


def _period(call: ConsoleCall, query: UsageQuery) -> UsagePeriod | None:
    """Return which requests are meant and may be seen; None: none at all."""
    from atoll.runtime.accounts.usage_report import UsagePeriod

    accounts, caller = call.accounts, call.caller
    since_s, until_s, key_id = query.since_s, query.until_s, query.key
    is_member = caller.role == "member"
    if key_id is not None:
        key = accounts.key(key_id)
        if is_member and (key is None or not caller.owns(key)):
            raise role_forbids_error("A member sees only what its own keys used.")
        if key is None:
            raise ApiError(404, f"there is no key {key_id[:100]!r}", code="not_found")
        return UsagePeriod(since_s, until_s, key.id)
    if not is_member:
        return UsagePeriod(since_s, until_s)
    if caller.owner:
        return UsagePeriod(since_s, until_s, owner=caller.owner)
    return None if caller.key_id is None else UsagePeriod(since_s, until_s, caller.key_id)


ROUTES = (
    ConsoleRoute(
        *("GET", "budgets", "viewer", show_budgets, "How budgets of this month stand"),
        gives=BudgetList,
    ),
    ConsoleRoute(
        *("PUT", "budgets", "admin", set_budget, "Set the budget of a key, an owner or all"),
        takes=BudgetSettings,
        gives=BudgetList,
    ),
    ConsoleRoute(
        *("DELETE", "budgets/{id:path}", "admin", remove_budget),
        "Remove a budget that was set so",
        gives=BudgetList,
    ),
    ConsoleRoute(
        *("GET", "usage", "viewer", show_usage),
        "What was used, summed up; for members, by own keys",
        gives=UsageSums,
        query=UsageQuery,
        makes=("application/json", "text/csv"),
    ),
)
