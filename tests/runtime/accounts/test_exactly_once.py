"""Gateways that die and a database that fails, in any order: every token is counted once."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from pathlib import Path

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.runtime.accounts import schema
from atoll.runtime.accounts.accounts import Accounts
from atoll.runtime.accounts.api_keys import NewKey
from atoll.runtime.accounts.database import Database
from atoll.runtime.accounts.journal import UsageJournal
from atoll.runtime.accounts.ledger import LedgerRows
from tests.runtime.accounts.helpers import record
from tests.seeds import examples


class Flaky(Database):
    """Fails before it commits, or after."""

    fails = ""

    async def write(self, segment: str, rows: LedgerRows) -> bool:
        if self.fails == "before":
            raise OSError("away")
        done = await super().write(segment, rows)
        if self.fails == "after":
            raise OSError("the answer was lost")
        return done


steps = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.integers(0, 1), st.integers(0, 9)),
        st.tuples(st.just("deliver"), st.integers(0, 1), st.integers(1, 9)),
        st.tuples(st.just("end"), st.integers(0, 1), st.integers(0, 9)),
        st.tuples(st.just("die"), st.integers(0, 1), st.just(0)),
        st.tuples(st.sampled_from(["sync", "before", "after"]), st.integers(0, 1), st.just(0)),
    ),
    min_size=5,
    max_size=40,
)


class Gateway:
    """One of two gateways that share a machine and a database."""

    def __init__(self, folder: Path, header: bytes) -> None:
        self._folder = folder
        self._header = header
        self.running: list[tuple[int, str, int]] = []

    async def start(self) -> None:
        database = await Database.open(f"{self._folder}/x.db")
        database.__class__ = Flaky
        self.database = database
        self.accounts = Accounts(database, UsageJournal.claim(self._folder / "journal", slots=64))
        await self.accounts.sync()

    async def die(self) -> None:
        journal = self.accounts._journal
        for folder in (journal._folder, *journal._adopted):
            folder.close()
        await self.database.close()
        self.running.clear()

    def begin(self, name: str, tokens: int) -> None:
        grant = self.accounts.admit(self._header, "m")
        slot = self.accounts.opened(grant, name, "m", "e")
        self.accounts.delivered(slot, tokens)
        self.running.append((slot, name, tokens))

    def deliver(self, more: int) -> tuple[str, int]:
        slot, name, tokens = self.running.pop(0)
        self.accounts.delivered(slot, tokens + more)
        self.running.append((slot, name, tokens + more))
        return name, tokens + more

    def end(self, more: int) -> tuple[str, int]:
        slot, name, tokens = self.running.pop(0)
        grant = self.accounts.authenticate(self._header)
        self.accounts.closed(slot, grant, record(name, prompt=0, completion=tokens + more))
        return name, tokens + more

    async def sync(self, fails: str) -> None:
        assert isinstance(self.database, Flaky)
        self.database.fails = fails
        await self.accounts.sync()
        self.database.fails = ""


@settings(examples(12), suppress_health_check=[HealthCheck.too_slow])
@given(steps=steps)
def test_every_token_counts_once(
    steps: list[tuple[str, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("g")

    async def main() -> None:
        header, template = await _template(tmp_path_factory.getbasetemp())
        shutil.copy(template, folder / "x.db")
        them = [Gateway(folder, header), Gateway(folder, header)]
        for gateway in them:
            await gateway.start()
        names = (f"r{i}" for i in itertools.count())
        truth: dict[str, int] = {}
        for what, which, amount in steps:
            gateway = them[which]
            if what == "begin":
                name = next(names)
                gateway.begin(name, amount)
                truth[name] = amount
            elif what in ("deliver", "end"):
                if gateway.running:
                    name, tokens = getattr(gateway, what)(amount)
                    truth[name] = tokens
            elif what == "die":
                await gateway.die()
                await gateway.start()
            else:
                await gateway.sync("" if what == "sync" else what)
        for gateway in them:
            await gateway.die()
        await them[0].start()
        await them[0].accounts.close()

        database = await Database.open(f"{folder}/x.db")
        async with database.reading() as connection:
            rows = (await connection.execute(sa.select(schema.operations))).all()
            total = await connection.scalar(
                sa.select(schema.counters.c.tokens).where(schema.counters.c.period == "total")
            )
        await database.close()
        assert len(rows) == len(truth)
        assert {row.request_id: row.completion_tokens for row in rows} == truth
        assert (total or 0) == sum(truth.values())

    asyncio.run(main())


async def _template(base: Path) -> tuple[bytes, Path]:
    """Make a database with a key once, to be copied."""
    path, held = base / "template.db", base / "template.key"
    if not held.exists():
        database = await Database.open(str(path))
        text, _ = await database.create_key(NewKey(name="n", tokens_total=10**9))
        await database.close()
        held.write_text(text)
    return f"Bearer {held.read_text()}".encode(), path
