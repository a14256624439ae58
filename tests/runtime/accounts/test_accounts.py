"""Keys, limits and usage as a gateway meets them."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa

from atoll.runtime.accounts import schema
from atoll.runtime.accounts.accounts import Accounts, Grant, TokenPrice
from atoll.runtime.accounts.api_keys import NewKey
from atoll.runtime.accounts.database import Database
from atoll.runtime.accounts.journal import UsageJournal
from atoll.runtime.accounts.key_limits import Counted
from atoll.runtime.openai import ApiError
from atoll.runtime.pool.policy import Policy
from atoll.telemetry.usage_record import Attempt
from tests.runtime.accounts.helpers import Notes, fresh_database, record, sqlite_url

NOON_S = 1_800_014_400.0  # 2027-01-15 12:00 UTC


class World:
    """A gateway's accounts under a clock of our own, and the database behind them."""

    accounts: Accounts

    def __init__(self, database: Database) -> None:
        self.database = database
        self.notes = Notes()
        self.now_s = 0.0

    async def key(self, **spec: object) -> tuple[bytes, str]:
        """Make a key that the gateway knows; return its header and id."""
        text, key = await self.database.create_key(NewKey.parse({"name": "n", **spec}))
        await self.accounts.sync()
        return f"Bearer {text}".encode(), key.id

    def request(self, header: bytes | None, *, prompt: int = 10, completion: int = 5) -> Grant:
        """Make a whole request."""
        grant = self.accounts.admit(header, "m")
        slot = self.accounts.opened(grant, "r", "m", "e")
        self.accounts.closed(slot, grant, record(prompt=prompt, completion=completion))
        return grant

    async def rows(self, table: sa.Table) -> list[dict[str, object]]:
        async with self.database.reading() as connection:
            return [row._asdict() for row in await connection.execute(sa.select(table))]


@asynccontextmanager
async def world(url: str, journal: Path, **more: object) -> AsyncIterator[World]:
    database, other = await Database.open(url), await Database.open(url)
    made = World(other)
    accounts = made.accounts = Accounts(
        database,
        UsageJournal.claim(journal, slots=16),
        log=made.notes,
        clock=lambda: made.now_s,
        wall=lambda: NOON_S + made.now_s,
        **more,  # type: ignore[arg-type]
    )
    try:
        yield made
    finally:
        await accounts.close()
        await other.close()


@pytest.fixture
def lite(tmp_path: Path) -> str:
    return sqlite_url(tmp_path)


def refusal(call: Callable[[], object]) -> ApiError:
    with pytest.raises(ApiError) as refused:
        call()
    return refused.value


async def test_who_has_no_key_is_refused(lite: str, tmp_path: Path) -> None:
    async with world(lite, tmp_path / "j") as it:
        header, key_id = await it.key(owner="me", policy=Policy(regions=("eu",)))
        grant = it.accounts.admit(header, "m")
        assert grant == (key_id, "me", Policy(regions=("eu",)), True, ())
        assert it.accounts.authenticate(header) is grant
        stranger, _ = await it.key()
        wrong = header[:-43] + stranger[-43:]
        for given in (None, b"", b"Bearer sk-abc", wrong, header[:-1], b"Bearer \xff"):
            error = refusal(lambda given=given: it.accounts.admit(given, "m"))  # type: ignore[misc]
            assert error.status == 401
            body = json.loads(error.body())["error"]
            assert body["code"] == "invalid_api_key"
            assert body["type"] == "authentication_error"
        assert it.accounts.refused == {401: 6}


async def test_without_required_keys_anybody_comes_in_but_no_wrong_key(
    lite: str, tmp_path: Path
) -> None:
    async with world(lite, tmp_path / "j", required=False) as it:
        header, _ = await it.key()
        assert it.accounts.admit(None, "m").key_id is None
        assert it.accounts.admit(b"Bearer sk-whatever", "m").key_id is None
        assert it.accounts.admit(header, "m").key_id is not None
        wrong = header[:-1] + (b"a" if header[-1:] != b"a" else b"b")
        assert refusal(lambda: it.accounts.admit(wrong, "m")).status == 401
        it.request(None)
        await it.accounts.sync()
        (row,) = await it.rows(schema.operations)
        assert row["key_id"] is None
        assert row["completion_tokens"] == 5


async def test_a_key_without_the_model_is_403(lite: str, tmp_path: Path) -> None:
    async with world(lite, tmp_path / "j") as it:
        header, _ = await it.key(models=("llama-*",))
        grant = it.accounts.admit(header, "llama-3")
        error = refusal(lambda: it.accounts.admit(header, "gpt"))
        assert (error.status, error.code, error.param) == (403, "model_not_allowed", "model")
        assert it.accounts.visible_models(grant, ["gpt", "llama-3", "llama-4"]) == (
            "llama-3",
            "llama-4",
        )


async def test_revoked_and_expired_keys_stop_working(url: str, tmp_path: Path) -> None:
    async with world(url, tmp_path / "j") as it:
        header, key_id = await it.key()
        old, _ = await it.key(expires_s=NOON_S + 10)
        it.accounts.admit(header, "m")
        it.accounts.admit(old, "m")
        await it.database.revoke_key(key_id)
        await it.accounts.sync()
        assert "revoked" in refusal(lambda: it.accounts.admit(header, "m")).message
        it.now_s = 10.0
        error = refusal(lambda: it.accounts.admit(old, "m"))
        assert error.status == 401
        assert "expired" in error.message


async def test_requests_per_minute(lite: str, tmp_path: Path) -> None:
    async with world(lite, tmp_path / "j") as it:
        header, _ = await it.key(requests_per_min=3)
        other, _ = await it.key(requests_per_min=3)
        for _ in range(3):
            it.request(header)
        error = refusal(lambda: it.accounts.admit(header, "m"))
        assert (error.status, error.code) == (429, "rate_limit_exceeded")
        assert error.retry_after_s == 20
        grant = it.request(other)
        headers = dict(it.accounts.limit_headers(grant))
        assert headers[b"x-ratelimit-limit-requests"] == b"3"
        assert headers[b"x-ratelimit-remaining-requests"] == b"2"
        assert headers[b"x-ratelimit-reset-requests"] == b"20.000s"
        it.now_s = 20.0
        it.request(header)
        assert refusal(lambda: it.accounts.admit(header, "m")).status == 429


async def test_tokens_per_minute_are_charged_while_an_answer_grows(
    lite: str, tmp_path: Path
) -> None:
    async with world(lite, tmp_path / "j") as it:
        header, _ = await it.key(tokens_per_min=60)
        grant = it.accounts.admit(header, "m")
        slot = it.accounts.opened(grant, "r", "m", "e")
        it.accounts.delivered(slot, 80)
        it.accounts.admit(header, "m")
        await it.accounts.sync()
        error = refusal(lambda: it.accounts.admit(header, "m"))
        assert (error.status, error.code, error.retry_after_s) == (429, "rate_limit_exceeded", 21)
        # 20 of the prompt are charged at the end, and nothing twice.
        it.accounts.closed(slot, grant, record(prompt=20, completion=80))
        assert refusal(lambda: it.accounts.admit(header, "m")).retry_after_s == 41
        it.now_s = 41.0
        it.accounts.admit(header, "m")


async def test_requests_at_once(lite: str, tmp_path: Path) -> None:
    async with world(lite, tmp_path / "j") as it:
        header, _ = await it.key(concurrent=2)
        grant = it.accounts.admit(header, "m")
        slots = [it.accounts.opened(grant, "r", "m", "e") for _ in range(2)]
        error = refusal(lambda: it.accounts.admit(header, "m"))
        assert error.status == 429
        assert error.retry_after_s == 1
        it.accounts.closed(slots[0], grant, record())
        it.accounts.admit(header, "m")


async def test_quotas_are_of_all_gateways_together(url: str, tmp_path: Path) -> None:
    async with world(url, tmp_path / "j") as one, world(url, tmp_path / "j") as two:
        header, key_id = await one.key(tokens_per_day=100, tokens_total=1000)
        await two.accounts.sync()
        one.request(header, prompt=30, completion=30)
        two.request(header, prompt=10, completion=30)
        one.accounts.admit(header, "m")  # knows of 60
        await two.accounts.sync()
        await one.accounts.sync()
        error = refusal(lambda: one.accounts.admit(header, "m"))
        assert (error.status, error.code, error.kind) == (
            429,
            "insufficient_quota",
            "insufficient_quota",
        )
        assert error.retry_after_s == 12 * 3600
        one.now_s = 12 * 3600.0  # the next day
        one.accounts.admit(header, "m")
        used = await one.database.counters([key_id], ["total", "2027-01-15"])
        assert used[key_id] == {"total": Counted(100), "2027-01-15": Counted(100)}


async def test_a_quota_is_known_at_once_here_and_after_a_restart(url: str, tmp_path: Path) -> None:
    async with world(url, tmp_path / "j") as it:
        header, _ = await it.key(tokens_total=15)
        it.request(header)
        error = refusal(lambda: it.accounts.admit(header, "m"))
        assert error.code == "insufficient_quota"
        assert error.retry_after_s is None
    async with world(url, tmp_path / "j") as it:
        await it.accounts.sync()
        assert refusal(lambda: it.accounts.admit(header, "m")).code == "insufficient_quota"


async def test_running_answers_count_towards_a_quota(lite: str, tmp_path: Path) -> None:
    async with world(lite, tmp_path / "j") as it:
        header, _ = await it.key(tokens_total=50)
        grant = it.accounts.admit(header, "m")
        slot = it.accounts.opened(grant, "r", "m", "e")
        it.accounts.delivered(slot, 50)
        await it.accounts.sync()
        assert refusal(lambda: it.accounts.admit(header, "m")).code == "insufficient_quota"
        it.accounts.closed(slot, grant, record(prompt=0, completion=40))
        it.accounts.admit(header, "m")


async def test_what_was_used_is_written_down_with_its_cost(url: str, tmp_path: Path) -> None:
    async with world(url, tmp_path / "j", prices={"m": TokenPrice(5.0, 7.0)}) as it:
        header, key_id = await it.key()
        grant = it.accounts.admit(header, "m")
        slot = it.accounts.opened(grant, "same-id", "m", "e")
        other = it.accounts.opened(grant, "same-id", "m", "e")
        attempts = (
            Attempt("b1", "n1", "ethz", 2, 0.1, "failed", 1.0, 2.0),
            Attempt("b2", "n2", "epfl", 3, 0.1, "ok"),
        )
        it.accounts.closed(slot, grant, record("same-id", attempts=attempts))
        it.accounts.closed(other, grant, record("same-id", outcome="cancelled"))
        await it.accounts.sync()
        await it.accounts.sync()
        rows = await it.rows(schema.operations)
        # A client may repeat its ids; both requests count.
        assert [row["request_id"] for row in rows] == ["same-id"] * 2
        assert {row["key_id"] for row in rows} == {key_id}
        (first,) = [row for row in rows if row["outcome"] == "ok"]
        assert first["cost_nusd"] == 10 * 1000 + 2 * 2000 + 3 * 7000
        parts = [r for r in await it.rows(schema.attempts) if r["operation_id"] == first["id"]]
        assert [(p["provider"], p["completion_tokens"]) for p in parts] == [
            ("ethz", 2),
            ("epfl", 3),
        ]
        assert await it.rows(schema.segments) == []
        assert it.accounts.stats()["written"] == 2
        assert it.accounts.stats()["unwritten"] == 0
        assert it.accounts.stats()["journal_bytes"] == 0


async def test_a_key_that_is_not_tracked_leaves_only_what_quotas_need(
    url: str, tmp_path: Path
) -> None:
    async with world(url, tmp_path / "j") as it:
        free, free_id = await it.key(track=False)
        metered, metered_id = await it.key(track=False, tokens_total=100)
        for header in (free, metered):
            assert it.request(header).track is False
        # One that dies is no different.
        it.accounts.opened(it.accounts.admit(free, "m"), "secret-id", "secret-model", "e")
        slots = (tmp_path / "j" / "0" / "slots").read_bytes()
        assert b"secret" not in slots
        assert free_id.encode() not in slots
        await it.accounts.sync()
        assert await it.rows(schema.operations) == await it.rows(schema.attempts) == []
        counters = await it.rows(schema.counters)
        assert {row["key_id"] for row in counters} == {metered_id}
        assert {row["tokens"] for row in counters} == {15}


async def test_what_ran_when_a_gateway_died_is_counted_by_the_next(
    url: str, tmp_path: Path
) -> None:
    async with world(url, tmp_path / "j") as it:
        header, key_id = await it.key(tokens_total=10**6)
        grant = it.accounts.admit(header, "m")
        slot = it.accounts.opened(grant, "cut", "m", "e")
        it.accounts.delivered(slot, 123)
    for _ in range(2):
        async with world(url, tmp_path / "j") as it:
            await it.accounts.sync()
            (row,) = await it.rows(schema.operations)
            said = (row["request_id"], row["outcome"], row["completion_tokens"])
            assert said == ("cut", "crashed", 123)
            assert row["estimated"] is True
            used = await it.database.counters([key_id], ["total"])
            assert used[key_id]["total"] == Counted(123)


class Broken(Database):
    """A database that can be taken away, or that breaks off after it has committed."""

    away = False
    forgetful = False

    async def write(self, segment: str, rows: object) -> bool:
        self._check()
        done = await super().write(segment, rows)  # type: ignore[arg-type]
        if self.forgetful:
            raise OSError("the answer was lost")
        return done

    async def key_changes(self, since: int) -> object:  # type: ignore[override]
        self._check()
        return await super().key_changes(since)

    def _check(self) -> None:
        if self.away:
            raise OSError("gone")


async def test_without_its_database_a_gateway_goes_on_and_catches_up(
    url: str, tmp_path: Path
) -> None:
    async with world(url, tmp_path / "j") as it:
        header, _ = await it.key(tokens_total=10**6)
        database = it.accounts._database
        database.__class__ = Broken
        assert isinstance(database, Broken)
        database.away = True
        for _ in range(5):
            it.request(header)
            assert not await it.accounts.sync()
        assert it.notes.names().count("accounts.database_away") == 1
        assert it.accounts.stats()["database_up"] is False
        assert it.accounts.stats()["unwritten"] == 5
        journal_bytes = it.accounts.stats()["journal_bytes"]
        assert isinstance(journal_bytes, int)
        assert journal_bytes > 0
        assert await it.rows(schema.operations) == []
        database.away = False
        await it.accounts.sync()
        await it.accounts.sync()
        assert "accounts.database_back" in it.notes.names()
        assert len(await it.rows(schema.operations)) == 5
        assert it.accounts.stats()["journal_bytes"] == 0
        assert it.accounts.stats()["unwritten"] == 0


async def test_a_commit_whose_answer_was_lost_is_not_written_twice(
    url: str, tmp_path: Path
) -> None:
    async with world(url, tmp_path / "j") as it:
        header, key_id = await it.key(tokens_total=10**6)
        it.request(header)
        database = it.accounts._database
        database.__class__ = Broken
        assert isinstance(database, Broken)
        database.forgetful = True
        assert not await it.accounts.sync()
        assert not await it.accounts.sync()
        database.forgetful = False
        it.request(header)
        await it.accounts.sync()
        await it.accounts.sync()
        assert len(await it.rows(schema.operations)) == 2
        used = await it.database.counters([key_id], ["total"])
        assert used[key_id]["total"] == Counted(30)
        assert it.accounts._keys[key_id].usage.count("total") == Counted(30)


async def test_a_journal_that_is_full_says_so_and_loses_nothing(lite: str, tmp_path: Path) -> None:
    async with world(lite, tmp_path / "j", journal_bytes=1000) as it:
        header, _ = await it.key()
        database = it.accounts._database
        database.__class__ = Broken
        assert isinstance(database, Broken)
        database.away = True
        await it.accounts.sync()
        grant = it.accounts.admit(header, "m")
        slot = it.accounts.opened(grant, "r", "m", "e")
        made = 0
        while not it.accounts.stats()["journal_full"]:
            it.request(header)
            made += 1
            await it.accounts.sync()
        assert "accounts.journal_full" in it.notes.names()
        error = refusal(lambda: it.accounts.admit(header, "m"))
        assert error.status == 503
        assert error.retry_after_s == 5
        it.accounts.closed(slot, grant, record())  # what runs may end
        database.away = False
        await it.accounts.sync()
        await it.accounts.sync()
        it.accounts.admit(header, "m")
        assert len(await it.rows(schema.operations)) == made + 1


async def test_rows_that_are_never_taken_are_set_aside(lite: str, tmp_path: Path) -> None:
    class Picky(Database):
        async def write(self, segment: str, rows: object) -> bool:
            raise ValueError("no such rows")

    async with world(lite, tmp_path / "j", required=False) as it:
        it.accounts._database.__class__ = Picky
        it.request(None)
        assert await it.accounts.sync()
        assert "accounts.refused" in it.notes.names()
        assert len(list((tmp_path / "j" / "0").glob("*.refused"))) == 1
        assert it.accounts.stats()["journal_bytes"] == 0


async def test_nonsense_counts_of_an_engine_do_not_break_the_ledger(
    url: str, tmp_path: Path
) -> None:
    async with world(url, tmp_path / "j", required=False) as it:
        for prompt, completion in ((-5, 3), (10**30, 2**63)):
            it.request(None, prompt=prompt, completion=completion)
        await it.accounts.sync()
        rows = await it.rows(schema.operations)
        found = sorted(
            (int(str(r["prompt_tokens"])), int(str(r["completion_tokens"]))) for r in rows
        )
        assert found == [(0, 3), (2**26, 2**26)]


async def test_too_many_at_once_for_the_journal_is_503(lite: str, tmp_path: Path) -> None:
    async with world(lite, tmp_path / "j", required=False) as it:
        grant = it.accounts.admit(None, "m")
        slots = [it.accounts.opened(grant, "r", "m", "e") for _ in range(16)]
        assert refusal(lambda: it.accounts.opened(grant, "r", "m", "e")).status == 503
        it.accounts.closed(slots[0], grant, record())
        it.accounts.opened(grant, "r", "m", "e")


async def test_a_changed_key_keeps_what_it_has_used(lite: str, tmp_path: Path) -> None:
    async with world(lite, tmp_path / "j") as it:
        header, _key_id = await it.key(requests_per_min=2)
        it.request(header)
        it.request(header)
        spec = NewKey(name="n", requests_per_min=3).to_json()
        async with it.database._engine.begin() as connection:
            await connection.execute(schema.keys.update().values(spec=spec, version=99))
            await connection.execute(schema.versions.update().values(version=99))
        await it.accounts.sync()
        it.request(header)
        assert refusal(lambda: it.accounts.admit(header, "m")).status == 429


async def test_secrets_are_nowhere(lite: str, tmp_path: Path) -> None:
    async with world(lite, tmp_path / "j") as it:
        header, key_id = await it.key(tokens_total=1)
        secret = header.decode().split("-")[2]
        it.request(header)
        said = [refusal(lambda: it.accounts.admit(header, "m"))]
        await it.database.revoke_key(key_id)
        await it.accounts.sync()
        said.append(refusal(lambda: it.accounts.admit(header, "m")))
        said.append(refusal(lambda: it.accounts.admit(header[:-1], "m")))
        shown = [repr(error) + repr(error.__dict__) + error.body().decode() for error in said]
        shown += [repr(it.notes.events), repr(it.accounts.stats()), repr(it.accounts.authenticate)]
        assert not any(secret[:12] in text for text in shown)
        held = [p for p in tmp_path.rglob("*") if p.is_file()]
        assert held
        assert not any(secret.encode() in path.read_bytes() for path in held)


async def test_it_follows_the_database_by_itself(url: str, tmp_path: Path) -> None:
    accounts = await Accounts.open(url, journal=tmp_path / "j", refresh_s=0.02)
    other = await Database.open(url)
    text, key = await other.create_key(NewKey(name="n"))
    header = f"Bearer {text}".encode()

    async def until(admitted: bool) -> None:
        for _ in range(500):
            try:
                accounts.admit(header, "m")
                known = True
            except ApiError:
                known = False
            if known is admitted:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("it did not follow")

    await until(True)
    await other.revoke_key(key.id)
    await until(False)
    await accounts.close()
    await other.close()


@pytest.mark.slow
async def test_a_postgresql_that_goes_away_and_comes_back(postgres: str, tmp_path: Path) -> None:
    import psycopg

    url = fresh_database(postgres)
    name = url.split("/")[3].split("?")[0]

    def let_in(allowed: bool) -> None:
        with psycopg.connect(postgres, autocommit=True) as connection:
            connection.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS {allowed}")
            if not allowed:
                connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s",
                    (name,),
                )

    async with world(url, tmp_path / "j") as it:
        header, key_id = await it.key(tokens_total=10**6)
        it.request(header)
        let_in(False)
        assert not await it.accounts.sync()
        it.request(header)
        assert not await it.accounts.sync()
        let_in(True)
        assert await it.accounts.sync()
        assert await it.accounts.sync()
        assert len(await it.rows(schema.operations)) == 2
        used = await it.database.counters([key_id], ["total"])
        assert used[key_id]["total"] == Counted(30)
        assert it.notes.names().count("accounts.database_away") == 1


async def test_a_full_disk_refuses_the_next_and_says_so_once(
    lite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with world(lite, tmp_path / "j") as it:
        header, _ = await it.key()
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", no_space)
            it.request(header)
            await it.accounts.sync()
            await it.accounts.sync()
            error = refusal(lambda: it.accounts.admit(header, "m"))
            assert (error.status, error.retry_after_s) == (503, 5)
        notes = [fields for name, fields in it.notes.events if name == "accounts.journal_full"]
        assert [note["reason"] for note in notes] == ["no space left on device"]
        await it.accounts.sync()
        assert "accounts.journal_free" in it.notes.names()
        it.request(header)
        await it.accounts.sync()
        assert len(await it.rows(schema.operations)) == 2
