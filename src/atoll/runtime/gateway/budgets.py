"""Budgets: what keys, their owners or everybody may cost in a month (UTC), and how much of it is spent.

Nothing is refused for a budget: who goes beyond it is an alarm. Limits of keys refuse. Budgets stand in the
settings, or are set while gateways run and kept beside the keys; of one thing the latter counts.
"""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from atoll.core.frozen import Frozen
from atoll.telemetry.logs import Log

if TYPE_CHECKING:
    from atoll.runtime.accounts.accounts import Accounts
    from atoll.runtime.accounts.usage_report import Row

_EVERY_S = 60.0
MAX_BUDGETS = 256


class BudgetSettings(Frozen):
    """A budget in US dollars a month: of a key (id), of an owner, a team say, or of all requests."""

    usd_per_month: float = Field(gt=0, le=1e12)
    key: str | None = Field(None, min_length=1, max_length=120)
    owner: str | None = Field(None, min_length=1, max_length=120)
    warn_at: float = Field(0.8, gt=0, le=1)
    """The share from which on it is a warning."""

    @model_validator(mode="after")
    def _of_one(self) -> BudgetSettings:
        if self.key is not None and self.owner is not None:
            raise ValueError("a budget is of a key or of an owner, not of both")
        return self

    @property
    def id(self) -> str:
        """Name of the budget in alarms."""
        return f"key {self.key}" if self.key else f"owner {self.owner}" if self.owner else "all"


@dataclass(frozen=True, slots=True)
class BudgetStanding:
    """How much of a budget is spent since the month began."""

    budget: BudgetSettings
    spent_usd: float
    in_settings: bool = False
    """Whether it stands in the gateway's settings, and is changed there."""

    @property
    def share(self) -> float:
        """Spent part of the budget; above 1 it is exceeded."""
        return self.spent_usd / self.budget.usd_per_month

    @property
    def level(self) -> Literal["error", "warning", "info"]:
        """Exceeded, close to it, or well."""
        if self.share >= 1.0:
            return "error"
        return "warning" if self.share >= self.budget.warn_at else "info"


def stand(budgets: Iterable[BudgetSettings], rows: Iterable[Row]) -> tuple[BudgetStanding, ...]:
    """Return how budgets stand by rows of usage that have `key`, `owner` and `cost_usd`."""
    spent = [(row["key"], row["owner"], float(row["cost_usd"])) for row in rows]
    return tuple(
        BudgetStanding(
            budget,
            sum(
                usd
                for key, owner, usd in spent
                if budget.key in (None, key) and budget.owner in (None, owner)
            ),
        )
        for budget in budgets
    )


def month_begin_s(now_s: float) -> float:
    """Return when the month of a moment began, in UTC."""
    now = datetime.datetime.fromtimestamp(now_s, datetime.UTC)
    return now.replace(day=1, hour=0, minute=0, second=0, microsecond=0).timestamp()


class BudgetWatch:
    """Looks once a minute at what is spent; `budgets` returns those of the settings."""

    def __init__(
        self,
        budgets: Callable[[], tuple[BudgetSettings, ...]],
        accounts: Accounts | None,
        log: Log,
    ) -> None:
        self._budgets, self._accounts, self._log = budgets, accounts, log
        self._next_s = 0.0
        self._looking: asyncio.Task[None] | None = None
        self.standings: tuple[BudgetStanding, ...] = ()

    def tick(self, now_s: float) -> None:
        """Look if it is time."""
        if now_s < self._next_s or self._accounts is None:
            return
        self._next_s = now_s + _EVERY_S
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self.look(time.time()))

    async def look(self, now_s: float) -> None:
        """Find out how budgets stand."""
        from atoll.runtime.accounts.usage_report import UsagePeriod, usage

        accounts = self._accounts
        if accounts is None:
            return
        rows: list[Row] = []
        try:
            told = {one.id: (one, True) for one in self._budgets()}
            for name, spec in (await accounts.database.budgets()).items():
                told[name] = BudgetSettings.from_json(spec), False
            if told:
                span = UsagePeriod(since_s=month_begin_s(now_s))
                rows = [row async for row in usage(accounts.database, ("key", "owner"), span)]
        except Exception as error:  # noqa: BLE001 - a database that is away has an alarm of its own
            self._log.event("budgets.unknown", error=repr(error))
            return
        found = stand((budget for budget, _ in told.values()), rows)
        self.standings = tuple(replace(one, in_settings=told[one.budget.id][1]) for one in found)

    async def close(self) -> None:
        """Wait for the look that is under way: cut off, it would leave the database's connection open."""
        if self._looking is not None:
            await self._looking
