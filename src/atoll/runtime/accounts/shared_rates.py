"""Limits over all gateways of a database, settled in the background; `rate_leases` and `count_leases` decide.

One transaction tells the database that this gateway lives, takes what it has spent and brings its leases. In
SQLite it begins with a write, so that no other gateway's comes between reading a bucket and changing it; in
PostgreSQL the rows of the buckets are locked, in one order for all.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from atoll.runtime.accounts import schema
from atoll.runtime.accounts.count_leases import COUNT_LEASE_S, CountAsk, SharedCount, lend
from atoll.runtime.accounts.database import AWAY, Database
from atoll.runtime.accounts.grants import RUNNING, ActiveKey
from atoll.runtime.accounts.key_limits import periods
from atoll.runtime.accounts.rate_leases import (
    IDLE_S,
    LEASE_S,
    LeaseAsk,
    LeaseGrant,
    OtherLease,
    SharedBucket,
    SharedLimit,
    settle,
)

_ALIVE_S = 15.0
"""A gateway that was not heard of for so long does not count."""
_BEAT_S = 5.0
"""How often one without anything to settle is heard of."""
_ANSWER_S = 5.0
"""How long the database may take for one answer."""
_BATCH = 400
"""Limits that are settled in one statement."""
_FIRST_S = -1e18
"""Stands for "never" in a column."""
Named = tuple[str, str]
"""Key and limit."""
Ask = LeaseAsk | CountAsk


@dataclass(frozen=True, slots=True)
class RateAnswer:
    """Answer of the database when limits are settled."""

    gateways: int
    """That use it now."""
    grants: Mapping[Named, LeaseGrant]


class SharedRates:
    """The limits of one gateway's keys, shared with all others of the database."""

    def __init__(self, database: Database, now_s: float) -> None:
        self.id = secrets.token_hex(8)
        self.gateways = 1
        """That use the database, as far as is known."""
        self.shared = True
        """False: the database is away, and each gateway goes by an equal share."""
        self._database = database
        self._settled_s = now_s
        self._beat_s = float("-inf")
        self._known_s = now_s + _BEAT_S + 1.0
        """By when all others know of this gateway."""
        self._limited: dict[str, ActiveKey] = {}
        """Keys with limits that are shared."""
        self.active: dict[str, ActiveKey] = {}
        """Of them, those that asked lately, or of which something runs or is not settled."""
        self._fresh: list[str] = []
        """Of them, those whose levels were not read yet."""
        self._settling = asyncio.Lock()

    def know(self, key_id: str, held: ActiveKey) -> None:
        """Take a key that is new or changed."""
        if not held.shared:
            self._limited.pop(key_id, None)
            self.active.pop(key_id, None)
        else:
            if key_id not in self._limited:
                self._fresh.append(key_id)
            self._limited[key_id] = held
            for count in held.counts.values():
                count.share(self.gateways)

    async def settle(self, now_s: float, unix_s: float) -> None:
        """Tell the database what was spent and take leases; raises one of AWAY if it is away."""
        async with self._settling:
            limits = dict(self._limits(self.active))
            counts = dict(self._counts(self.active))
            asks = self._asks(limits, counts, now_s, unix_s)
            beats = bool(self._limited) and now_s - self._beat_s >= _BEAT_S
            # There is nothing to say: the database is left alone.
            if not asks and not self._fresh and not beats:
                return
            try:
                answer = await asyncio.wait_for(
                    exchange(self._database, self.id, asks, unix_s, careful=now_s < self._known_s),
                    _ANSWER_S,
                )
                await self._begin(answer.gateways, now_s, unix_s)
            except AWAY:
                self.check(now_s)
                raise
            if answer.gateways != self.gateways:
                # Who is not alone any more believes less of what it holds no lease of.
                for _, limit in self._limits(self._limited):
                    limit.begin(limit.level(now_s), answer.gateways, now_s)
                for _, count in self._counts(self._limited):
                    count.share(answer.gateways)
            self.gateways, self.shared = answer.gateways, True
            self._settled_s = self._beat_s = now_s
            for ask in asks:
                at = (ask.key_id, ask.what)
                if isinstance(ask, CountAsk):
                    counts[at].granted(answer.grants[at], self.gateways, wants=ask.wants)
                else:
                    limits[at].granted(answer.grants[at], self.gateways, now_s, wants=ask.wants)
            # Keys of which nothing runs and nothing is to be settled are looked at no more.
            for key_id in [k for k, held in self.active.items() if not held.running]:
                if not any(limit.settles(wants=False) for _, limit in self._all((key_id,))):
                    del self.active[key_id]

    def check(self, now_s: float) -> None:
        """Go by an equal share if the database was not asked for too long."""
        # Others heed its leases no longer than this.
        if now_s - self._settled_s > LEASE_S and self.shared:
            self.shared = False
            for _, limit in self._limits(self._limited):
                limit.fall_back(self.gateways, now_s)
            for _, count in self._counts(self._limited):
                count.fall_back(self.gateways)

    async def close(self, unix_s: float) -> None:
        """Give everything back; raises one of AWAY if the database is away."""
        async with self._settling:
            limits, counts = dict(self._limits(self.active)), dict(self._counts(self.active))
            asks = self._asks(limits, counts, float("inf"), unix_s)
            # One that the database never heard of has nothing to take back.
            if asks or self._beat_s > float("-inf"):
                leaving = exchange(self._database, self.id, asks, unix_s, leave=True)
                await asyncio.wait_for(leaving, _ANSWER_S)

    async def _begin(self, gateways: int, now_s: float, unix_s: float) -> None:
        """Learn what other gateways, or this one before a restart, have left of limits."""
        if not self._fresh:
            return
        names = tuple(self._fresh)
        levels = await asyncio.wait_for(read_levels(self._database, names, unix_s), _ANSWER_S)
        self._fresh.clear()
        for named, limit in self._limits(names):
            left = limit.limit
            if named in levels:
                level, elapsed_s = levels[named]
                # Since then it has grown, by what a minute allows.
                left = min(left, level + elapsed_s * limit.limit / 60.0)
            if left < limit.limit or gateways > 1:
                limit.begin(left, gateways, now_s)

    def _asks(
        self,
        limits: Mapping[Named, SharedLimit],
        counts: Mapping[Named, SharedCount],
        now_s: float,
        unix_s: float,
    ) -> list[Ask]:
        """Return what is to be settled, in one order for all gateways, which lock the rows of the buckets."""
        asks: list[Ask] = []
        for (key_id, what), limit in limits.items():
            wants = self._wants(key_id, now_s)
            if limit.settles(wants=wants):
                keep = self._limited[key_id].reserved if what == "tokens" else 0
                asks.append(limit.ask(key_id, what, wants=wants, keep=keep))
        now = periods(unix_s)
        for (key_id, what), count in counts.items():
            wants = count.in_use > 0 or self._wants(key_id, now_s)
            if count.settles(wants=wants):
                span = "" if what == RUNNING else what.rpartition("_")[2]
                counted = self._limited[key_id].counted(what, now) if span else 0.0
                asks.append(count.ask(key_id, what, wants=wants, span=span, counted=counted))
        return sorted(asks, key=itemgetter(0, 1))

    def _wants(self, key_id: str, now_s: float) -> bool:
        return now_s - self._limited[key_id].asked_s < IDLE_S

    def _all(self, names: Sequence[str]) -> Iterable[tuple[Named, SharedLimit | SharedCount]]:
        yield from self._limits(names)
        yield from self._counts(names)

    def _counts(self, names: Iterable[str]) -> Iterable[tuple[Named, SharedCount]]:
        for key_id in names:
            held = self._limited.get(key_id)
            for what, count in () if held is None else held.counts.items():
                yield (key_id, what), count

    def _limits(self, names: Iterable[str]) -> Iterable[tuple[Named, SharedLimit]]:
        for key_id in names:
            held = self._limited.get(key_id)
            if held is not None and held.requests is not None:
                yield (key_id, "requests"), held.requests
            if held is not None and held.tokens is not None:
                yield (key_id, "tokens"), held.tokens


async def exchange(
    database: Database,
    gateway: str,
    asks: Sequence[Ask],
    unix_s: float,
    *,
    leave: bool = False,
    careful: bool = False,
) -> RateAnswer:
    """Settle limits for one gateway, all or none; with `leave` it is forgotten after that.

    Unless it is alone, one that is `careful` is lent nothing.
    """
    grants: dict[tuple[str, str], LeaseGrant] = {}
    table = schema.gateways
    async with database.writing() as connection:
        now_s = await _now(connection, unix_s)
        # A write comes first: in SQLite it is what keeps others out.
        seen = database.insert(table).values(id=gateway, seen_s=now_s)
        await connection.execute(
            seen.on_conflict_do_update(index_elements=[table.c.id], set_={"seen_s": now_s})
        )
        gone = table.c.id == gateway if leave else table.c.seen_s < now_s - _ALIVE_S
        await connection.execute(table.delete().where(gone))
        count = await connection.scalar(sa.select(sa.func.count()).select_from(table))
        careful = careful and (count or 0) > 1
        for some in _batched(asks):
            grants |= await _settle(
                database, connection, gateway, some, now_s, unix_s, careful=careful
            )
    return RateAnswer(max(1, int(count or 0)), grants)


def _batched(asks: Sequence[Ask]) -> Iterable[Sequence[Ask]]:
    """Yield asks in batches; all of a key, which come one after the other, are in one of them."""
    batch: list[Ask] = []
    for ask in asks:
        if len(batch) >= _BATCH and ask.key_id != batch[-1].key_id:
            yield batch
            batch = []
        batch.append(ask)
    if batch:
        yield batch


async def _settle(
    database: Database,
    connection: AsyncConnection,
    gateway: str,
    asks: Sequence[Ask],
    now_s: float,
    unix_s: float,
    *,
    careful: bool,
) -> dict[Named, LeaseGrant]:
    buckets, leases = schema.buckets, schema.leases
    names = sorted({ask.key_id for ask in asks})
    # A limit that nobody has used yet begins full. Of a count the row is only there to be locked.
    new = [{"key_id": a.key_id, "what": a.what, "level": a.limit, "at_s": now_s} for a in asks]
    await connection.execute(database.insert(buckets).on_conflict_do_nothing(), new)
    # The lock is for PostgreSQL; in SQLite the write before keeps others out.
    rows = await connection.execute(
        sa.select(buckets)
        .where(buckets.c.key_id.in_(names))
        .order_by(buckets.c.key_id, buckets.c.what)
        .with_for_update()
    )
    held = {(row.key_id, row.what): SharedBucket(row.level, row.at_s) for row in rows}
    others: dict[Named, list[OtherLease]] = {}
    for row in await connection.execute(
        sa.select(leases).where(
            leases.c.key_id.in_(names), leases.c.gateway != gateway, leases.c.expires_s > now_s
        )
    ):
        others.setdefault((row.key_id, row.what), []).append(OtherLease(row.lent, row.served_s))
    # After the lock: others have written down what they gave back leases for.
    counted = await _counted(connection, [a for a in asks if isinstance(a, CountAsk)], unix_s)
    grants: dict[Named, LeaseGrant] = {}
    levels: list[dict[str, Any]] = []
    lent: list[dict[str, Any]] = []
    for ask in asks:
        at = {"key_id": ask.key_id, "what": ask.what}
        named = (ask.key_id, ask.what)
        if isinstance(ask, CountAsk):
            grant = lend(ask, counted.get(named, 0.0), others.get(named, ()), now_s)
        else:
            bucket, grant = settle(held[named], ask, others.get(named, ()), now_s, careful=careful)
            levels.append(at | {"level": bucket.level, "at_s": bucket.at_s})
        grants[named] = grant
        if ask.wants or grant.lent > 0.0:
            lasts_s = COUNT_LEASE_S if isinstance(ask, CountAsk) else LEASE_S
            until = {"expires_s": now_s + lasts_s, "served_s": max(_FIRST_S, grant.served_s)}
            lent.append(at | {"gateway": gateway, "lent": grant.lent} | until)
    if levels:
        await _put(database, connection, buckets, levels)
    # Its own leases are written anew; those that ran out are nobody's.
    mine = leases.c.key_id.in_(names) & (
        (leases.c.gateway == gateway) | (leases.c.expires_s <= now_s)
    )
    await connection.execute(leases.delete().where(mine))
    if lent:
        await connection.execute(leases.insert(), lent)
    return grants


async def _counted(
    connection: AsyncConnection, asks: Sequence[CountAsk], unix_s: float
) -> dict[Named, float]:
    """Return what the ledger has counted of quotas."""
    wanted = [ask for ask in asks if ask.span]
    if not wanted:
        return {}
    now, table = periods(unix_s), schema.counters
    rows = await connection.execute(
        sa.select(table).where(
            table.c.key_id.in_({ask.key_id for ask in wanted}),
            table.c.period.in_({now.named(ask.span) for ask in wanted}),
        )
    )
    used = {(row.key_id, row.period): row._mapping for row in rows}
    return {
        (ask.key_id, ask.what): float(row[ask.what.rpartition("_")[0]])
        for ask in wanted
        if (row := used.get((ask.key_id, now.named(ask.span)))) is not None
    }


async def _put(
    database: Database, connection: AsyncConnection, table: sa.Table, rows: list[dict[str, Any]]
) -> None:
    statement = database.insert(table)
    changed = {c.name: statement.excluded[c.name] for c in table.c if not c.primary_key}
    await connection.execute(
        statement.on_conflict_do_update(index_elements=list(table.primary_key), set_=changed), rows
    )


async def read_levels(
    database: Database, key_ids: Sequence[str], unix_s: float
) -> dict[tuple[str, str], tuple[float, float]]:
    """Return what was left of limits, and how many seconds ago, by key and limit."""
    table = schema.buckets
    levels = {}
    async with database.reading() as connection:
        now_s = await _now(connection, unix_s)
        for start in range(0, len(key_ids), _BATCH):
            wanted = sa.select(table).where(table.c.key_id.in_(key_ids[start : start + _BATCH]))
            for row in await connection.execute(wanted):
                levels[row.key_id, row.what] = (row.level, max(0.0, now_s - row.at_s))
    return levels


async def _now(connection: AsyncConnection, unix_s: float) -> float:
    """Return the time that all gateways go by: that of the database, where it is not on their machine."""
    if connection.dialect.name != "postgresql":
        return unix_s
    found = await connection.scalar(
        sa.select(sa.cast(sa.func.extract("epoch", sa.func.clock_timestamp()), sa.Float(53)))
    )
    return unix_s if found is None else float(found)
