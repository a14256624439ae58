"""Where the ledger may lack something: a gateway goes on serving while it cannot write down what it does.

Such a time is marked in the database as soon as that can be reached, and again when it ends. A gateway that
dies in it leaves a mark without an end.
"""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass

import sqlalchemy as sa

from atoll.runtime.accounts import schema
from atoll.runtime.accounts.database import Database


@dataclass(slots=True)
class LedgerGap:
    """A time in which not everything was written down."""

    id: str
    since_s: float
    """Unix time."""
    until_s: float | None = None
    """None: it lasts, or its gateway died in it."""
    requests: int = 0
    """That were let in though the disk knew nothing of them as they ran."""
    lost: int = 0
    """Of those, the ones that are not in the ledger."""


class GapBook:
    """The gaps of one gateway that the database does not know of as they are."""

    def __init__(self) -> None:
        self.requests = 0
        """In all gaps since the start."""
        self.lost = 0
        self.current: LedgerGap | None = None
        self._untold: dict[str, LedgerGap] = {}

    def admit(self, unix_s: float) -> None:
        """Note a request that is let in all the same."""
        self._gap(unix_s).requests += 1
        self.requests += 1

    def lose(self, unix_s: float) -> None:
        """Note a request that the ledger will not have."""
        self._gap(unix_s).lost += 1
        self.lost += 1

    def end(self, unix_s: float) -> None:
        """Note that everything is written down again."""
        gap, self.current = self.current, None
        if gap is not None:
            gap.until_s = unix_s
            self._untold[gap.id] = gap

    def _gap(self, unix_s: float) -> LedgerGap:
        gap = self.current
        if gap is None:
            gap = self.current = LedgerGap(secrets.token_hex(16), unix_s)
        self._untold[gap.id] = gap
        return gap

    async def tell(self, database: Database) -> None:
        """Write what the database does not know; raises one of AWAY."""
        rows = [asdict(gap) for gap in self._untold.values()]
        if not rows:
            return
        statement = database.insert(schema.gaps)
        changed = {n: statement.excluded[n] for n in ("until_s", "requests", "lost")}
        statement = statement.on_conflict_do_update(index_elements=[schema.gaps.c.id], set_=changed)
        async with database.writing() as connection:
            await connection.execute(statement, rows)
        for row in rows:
            told = self._untold.get(row["id"])
            # It may have changed while it was written: then it is told again.
            if told is not None and asdict(told) == row:
                del self._untold[row["id"]]


async def read_gaps(
    database: Database, since_s: float | None = None, until_s: float | None = None
) -> list[LedgerGap]:
    """Return the gaps that lie in a time or reach into it, oldest first."""
    table = schema.gaps
    wanted = sa.select(table).order_by(table.c.since_s)
    if since_s is not None:
        wanted = wanted.where(table.c.until_s.is_(None) | (table.c.until_s >= since_s))
    if until_s is not None:
        wanted = wanted.where(table.c.since_s < until_s)
    async with database.reading() as connection:
        return [LedgerGap(**row._asdict()) for row in await connection.execute(wanted)]
