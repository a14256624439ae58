"""Limits a minute over several gateways of one database."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from atoll.runtime.accounts import schema
from atoll.runtime.accounts import shared_rates as module
from atoll.runtime.accounts.grants import Grant, NoLeaseError
from atoll.runtime.accounts.rate_leases import LeaseAsk, slice_of
from atoll.runtime.accounts.shared_rates import exchange
from atoll.runtime.openai import ApiError
from tests.runtime.accounts.helpers import record, sqlite_url
from tests.runtime.accounts.test_accounts import NOON_S, World, world
from tests.runtime.accounts.test_gateway import place
from tests.runtime.gateway.engine import ScriptedEngine


@asynccontextmanager
async def gateways(url: str, folder: Path, count: int = 2) -> AsyncIterator[list[World]]:
    async with AsyncExitStack() as stack:
        them = [await stack.enter_async_context(world(url, folder / "j")) for _ in range(count)]
        for gateway in them:
            gateway.accounts._rates._settled_s = gateway.now_s = -20.0
            gateway.accounts._rates._known_s = -10.0
        yield them


@pytest.fixture
def lite(tmp_path: Path) -> str:
    return sqlite_url(tmp_path)


async def share_key(them: list[World], **spec: object) -> bytes:
    """Make a key, and have all know of each other: their clocks are at 0 again after that."""
    header, _ = await them[0].key(**spec)
    for now_s in (-10.0, 0.0):
        for gateway in them:
            gateway.now_s = now_s
            await gateway.accounts.sync()
    return header


def admit(gateway: World, header: bytes, most: int = 10**6) -> int:
    """Have as many requests as may be let in; return how many were."""
    for count in range(most):
        try:
            gateway.request(header, prompt=1, completion=0)
        except ApiError:
            return count
    return most


async def play(them: list[World], header: bytes, seconds: int) -> list[int]:
    """Have every gateway asked for more than there is, and settle once a second, one after the other."""
    admitted = [0] * len(them)
    for tick in range(seconds * 4):
        for number, gateway in enumerate(them):
            gateway.now_s = them[0].now_s
            admitted[number] += admit(gateway, header)
            if tick % 4 == number:
                await gateway.accounts._settle()
        them[0].now_s += 0.25
    return admitted


@pytest.mark.slow
async def test_two_gateways_together_keep_a_limit(lite: str, tmp_path: Path) -> None:
    async with gateways(lite, tmp_path) as them:
        header = await share_key(them, requests_per_min=60)
        assert [g.accounts.stats()["gateways"] for g in them] == [2, 2]
        admitted = await play(them, header, 20)
        # A minute's worth at once, and one a second: each alone would let in as much.
        assert 75 <= sum(admitted) <= 80 + 3 * slice_of(60)
        assert min(admitted) >= 8  # the first had the minute, the second has half of the rate
        # What went over is missing later.
        assert sum(admitted) + sum(await play(them, header, 10)) <= 90 + 3 * slice_of(60)


@pytest.mark.slow
async def test_tokens_too(lite: str, tmp_path: Path) -> None:
    async with gateways(lite, tmp_path) as them:
        header = await share_key(them, tokens_per_min=600)
        used = 0
        for second in range(20):
            for gateway in them:
                gateway.now_s = float(second)
                for _ in range(5):
                    try:
                        gateway.request(header, prompt=20, completion=10)
                    except ApiError:
                        break
                    used += 30
                await gateway.accounts._settle()
        # The last request of each may be in debt.
        assert 740 <= used <= 800 + 3 * slice_of(600) + 2 * 30


async def test_one_gateway_gets_all_that_the_other_does_not_need(lite: str, tmp_path: Path) -> None:
    async with gateways(lite, tmp_path) as them:
        busy, idle = them
        header = await share_key(them, requests_per_min=60)
        assert admit(busy, header) == 2  # before it has asked
        await busy.accounts.sync()
        assert admit(busy, header) == 58
        # The other learns of it when it is asked, with no more than a slice too many.
        assert admit(idle, header) == 2
        await idle.accounts.sync()
        assert admit(idle, header) == 0
        await busy.accounts.sync()
        for now_s in (10.0, 20.0, 30.0):
            for gateway in them:
                gateway.now_s = now_s
                await gateway.accounts.sync()
        # Half a minute's worth, less what was too much; both begin with a slice.
        admitted = [admit(gateway, header) for gateway in them]
        await busy.accounts.sync()
        assert admitted == [2, 2]
        assert admit(busy, header) == 26
        await idle.accounts.sync()
        assert admit(idle, header) == 0


async def test_a_restart_does_not_fill_a_bucket(lite: str, tmp_path: Path) -> None:
    async with gateways(lite, tmp_path, 1) as (it,):
        header = await share_key([it], requests_per_min=60)
        assert admit(it, header) == 60
    async with gateways(lite, tmp_path, 1) as (again,):
        again.now_s = 5.0
        await again.accounts.sync()
        await again.accounts.sync()
        assert again.accounts.stats()["gateways"] == 1  # the other said good-bye
        assert admit(again, header) == 5


@pytest.mark.slow
async def test_without_the_database_each_goes_by_its_half_and_says_so(
    lite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: object, **__: object) -> object:
        raise OSError("away")

    async with gateways(lite, tmp_path) as them:
        header = await share_key(them, requests_per_min=60)
        await play(them, header, 5)
        with monkeypatch.context() as patch:
            patch.setattr(module, "exchange", away)
            before = await play(them, header, 20)
            assert [g.accounts.stats()["rates_shared"] for g in them] == [False, False]
            # No burst, but the rate, and half of it each.
            assert 17 <= sum(before) <= 20 + 3 * slice_of(60)
            assert abs(before[0] - before[1]) <= 3
        after = await play(them, header, 20)
        assert [g.accounts.stats()["rates_shared"] for g in them] == [True, True]
        assert 12 <= sum(after) <= 20 + 3 * slice_of(60)


@pytest.mark.slow
async def test_a_gateway_that_died_is_soon_no_longer_counted(lite: str, tmp_path: Path) -> None:
    async with gateways(lite, tmp_path) as (dead, alive):
        header = await share_key([dead, alive], requests_per_min=60)
        assert admit(dead, header) == 2
        await dead.accounts.sync()  # and holds 58 now
        assert admit(alive, header) == 2
        await alive.accounts.sync()
        admitted = 2
        for second in range(1, 31):
            alive.now_s = float(second)
            await alive.accounts._settle()
            admitted += admit(alive, header)
        assert alive.accounts.stats()["gateways"] == 1
        # What the dead one held is lost, and no more: the rate goes on.
        assert 27 <= admitted <= 32
        dead.now_s = 30.0


@pytest.mark.slow
async def test_a_gateway_that_is_new_takes_little_until_all_know_of_it(
    lite: str, tmp_path: Path
) -> None:
    async with gateways(lite, tmp_path, 1) as (old,):
        header = await share_key([old], requests_per_min=60)
        async with world(lite, tmp_path / "j") as new:
            await new.accounts.sync()
            admitted = 0
            for second in range(6):
                new.now_s = old.now_s = float(second)
                await new.accounts._settle()
                admitted += admit(new, header)
            # The old one has not heard of the other, and lets a minute's worth in.
            admitted += admit(old, header)
            assert admitted <= 60 + 5 + 3 * slice_of(60)
            assert admitted >= 60
            new.now_s = old.now_s = 7.0
            await old.accounts._settle()
            await new.accounts._settle()
            admitted += admit(old, header) + admit(new, header)
            assert admitted <= 60 + 7 + 3 * slice_of(60)


@pytest.mark.parametrize("empty_url", ["sqlite", "postgresql"], indirect=True)
async def test_settling_at_once_loses_nothing(url: str, tmp_path: Path) -> None:
    """Four gateways, all at the same time, on each kind of database."""

    async with gateways(url, tmp_path, 1) as (it,):
        asks = [
            LeaseAsk(f"k{number}", what, 6000.0, 0.0, 1.0, False, 0.0)
            for number in range(5)
            for what in ("requests", "tokens")
        ]
        for _ in range(3):
            await asyncio.gather(*(exchange(it.database, f"g{n}", asks, NOON_S) for n in range(4)))
        levels = {(r["key_id"], r["what"]): r["level"] for r in await it.rows(schema.buckets)}
        assert set(levels) == {(ask.key_id, ask.what) for ask in asks}
        # PostgreSQL goes by its own clock, and fills them meanwhile.
        least = 6000.0 - 12.0
        assert all(least <= float(str(level)) <= 6000.0 for level in levels.values())
        if it.database._engine.dialect.name == "sqlite":
            assert set(levels.values()) == {least}
        assert len(await it.rows(schema.gateways)) in (4, 5)


async def test_a_key_that_is_new_to_a_gateway_is_settled_at_once(lite: str, tmp_path: Path) -> None:
    """The task in the background is woken, rather than waiting for its turn."""

    async with gateways(lite, tmp_path) as them:
        header = await share_key(them, requests_per_min=60)
        it = them[0]
        assert not it.accounts._hurry.is_set()
        running = asyncio.create_task(it.accounts._run(3600.0))
        it.request(header, prompt=1)
        async with asyncio.timeout(30):
            while not it.accounts._keys[header.decode()[13:25]].requests.leased:  # type: ignore[union-attr]
                await asyncio.sleep(0.005)
        running.cancel()
        assert admit(it, header) == 59


async def test_two_gateways_on_one_database_over_http(tmp_path: Path) -> None:
    engines = [ScriptedEngine(), ScriptedEngine()]
    async with place(tmp_path, engines[0]) as one, place(tmp_path, engines[1]) as two:
        key = await one.key(requests_per_min=12)
        for it in (two, one):
            it.accounts._rates._beat_s = float("-inf")
            await it.accounts.sync()
            assert it.accounts.stats()["gateways"] == 2
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        statuses: Counter[int] = Counter()
        for _ in range(25):
            for it in (one, two):
                reply = await it.ask(key, max_tokens=1)
                statuses[reply.status] += 1
                if statuses[200] % 4 == 1:
                    await it.accounts.sync()
        assert set(statuses) == {200, 429}
        # Each by itself would have let in as much again.
        assert statuses[200] <= 12 + (loop.time() - began_s) / 5 + 3 * slice_of(12)
        await two.accounts.sync()
        assert len(await one.rows(schema.operations)) == statuses[200]
        page = one.bench.gateway.metrics.page(0, 0).decode()
        assert "atoll_accounts_gateways 2.0" in page
        assert "atoll_accounts_rates_shared 1.0" in page


async def test_requests_at_the_same_time_are_of_all_gateways(lite: str, tmp_path: Path) -> None:
    async with gateways(lite, tmp_path) as them:
        header = await share_key(them, concurrent=4)

        def begin(gateway: World) -> bool:
            try:
                grant = gateway.accounts.admit(header, "m")
            except ApiError:
                return False
            gateway.accounts.opened(grant, "r", "m", "e")
            return True

        # Half each before anything is settled, so both together no more than there are.
        assert [sum(begin(g) for _ in range(9)) for g in them] == [2, 2]
        # Whoever settles first may have all that is not known to be in use: once.
        begun = 4
        for _ in range(3):
            for gateway in them:
                await gateway.accounts.sync()
                begun += sum(begin(g) for g in them for _ in range(9))
        assert begun <= 4 + 2


async def test_a_strict_key_has_no_more_at_the_same_time(lite: str, tmp_path: Path) -> None:
    async with gateways(lite, tmp_path, 3) as them:
        header = await share_key(them, concurrent=4, strict=True)
        running: list[tuple[World, int, Grant]] = []
        for turn in range(18):
            gateway = them[turn % 3]
            for _ in range(3):
                with contextlib.suppress(NoLeaseError):
                    grant = gateway.accounts.admit(header, "m")
                    running.append((gateway, gateway.accounts.opened(grant, "r", "m", "e"), grant))
            assert len(running) <= 4
            await gateway.accounts.sync()
            if turn % 4 == 3:
                assert running
                where, slot, grant = running.pop(0)
                where.accounts.closed(slot, grant, record())
        assert len(running) >= 3


async def test_a_strict_key_never_goes_over_its_quota(lite: str, tmp_path: Path) -> None:
    async with gateways(lite, tmp_path, 3) as them:
        header = await share_key(them, tokens_per_day=1000, concurrent=100, strict=True)
        running: list[tuple[World, int, Grant]] = []
        used = 0
        for turn in range(60):
            gateway = them[turn % 3]
            await gateway.accounts.sync()
            for _ in range(4):
                try:
                    grant = gateway.accounts.admit(header, "m", 40)
                except NoLeaseError:
                    break
                slot = gateway.accounts.opened(grant, "r", "m", "e", need=40)
                running.append((gateway, slot, grant))
            # All of them use all they may; the oldest half ends, and some of it is delivered before.
            for gateway_, slot, grant in running[: len(running) // 2]:
                gateway_.accounts.delivered(slot, 15)
                gateway_.accounts.closed(slot, grant, record(prompt=10, completion=30))
                used += 40
            running = running[len(running) // 2 :]
            assert used + 40 * len(running) <= 1000
        # And all of it was to be had.
        assert used + 40 * len(running) == 1000
        with pytest.raises(ApiError) as refused:
            them[0].accounts.admit(header, "m", 2000)
        assert (refused.value.status, refused.value.code) == (400, "over_key_limit")


async def test_a_strict_key_waits_for_its_part_and_must_say_max_tokens(tmp_path: Path) -> None:
    async with place(tmp_path, ScriptedEngine()) as it:
        key = await it.key(requests_per_min=3, tokens_per_day=100_000, strict=True)
        # The first request finds no lease, has it settled and goes on: the client sees none of that.
        settling = asyncio.create_task(it.accounts._run(60.0))
        assert [(await it.ask(key, max_tokens=2)).status for _ in range(4)] == [200, 200, 200, 429]
        reply = await it.ask(key)
        assert reply.status == 400
        assert b"max_tokens_needed" in reply.body
        settling.cancel()
