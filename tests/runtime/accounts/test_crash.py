"""A gateway that is killed again and again: the ledger has what clients received, once."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sqlalchemy as sa

from atoll.runtime.accounts import schema
from atoll.runtime.accounts.accounts import Accounts
from atoll.runtime.accounts.api_keys import NewKey
from atoll.runtime.accounts.database import Database

KILLS = 3


@pytest.mark.slow
def test_kill_9_loses_and_doubles_nothing(url: str, tmp_path: Path) -> None:
    async def make() -> str:
        database = await Database.open(url)
        text, _ = await database.create_key(NewKey(name="n", tokens_total=10**12))
        await database.close()
        return text

    key = asyncio.run(make())
    truth, journal = tmp_path / "truth", tmp_path / "journal"
    chance = random.Random(7)
    command = [sys.executable, "-m", "tests.runtime.accounts.crashing"]
    for kill in range(KILLS):
        before = truth.stat().st_size if truth.exists() else 0
        process = subprocess.Popen([*command, url, str(journal), str(truth), key])
        until_s = time.monotonic() + 120
        while not truth.exists() or truth.stat().st_size <= before:
            assert process.poll() is None, kill
            assert time.monotonic() < until_s, kill
            time.sleep(0.01)
        time.sleep(chance.uniform(0.05, 0.4))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()

    received: dict[str, list[int]] = {}
    for line in truth.read_text().splitlines():
        request, tokens = line.split()
        received.setdefault(request, []).append(int(tokens))

    async def check() -> None:
        accounts = await Accounts.open(url, journal=journal)
        await accounts.close()
        database = await Database.open(url)
        async with database.reading() as connection:
            rows = (await connection.execute(sa.select(schema.operations))).all()
            parts = (await connection.execute(sa.select(schema.attempts))).all()
            left = (await connection.execute(sa.select(schema.segments))).all()
            total, audio_ms, pixels = (
                await connection.execute(
                    sa.select(
                        schema.counters.c.tokens,
                        schema.counters.c.audio_ms,
                        schema.counters.c.pixels,
                    ).where(schema.counters.c.period == "total")
                )
            ).one()
        await database.close()
        by_request = {row.request_id: row for row in rows}
        assert len(by_request) == len(rows)
        assert set(received) <= set(by_request)
        crashed = 0
        for request, row in by_request.items():
            seen = received.get(request, [])
            if row.outcome == "crashed":
                crashed += 1
                # The last delivery was said to the client, and perhaps not yet to the journal.
                last = (*seen[-1:], *(seen[-2:-1] or [0]))
                assert row.completion_tokens in last
                assert row.speech_ms in {10 * tokens for tokens in last}
                assert row.image_pixels in {3 * tokens for tokens in last}
            else:
                assert row.completion_tokens == seen[-1]
                assert (row.speech_ms, row.image_pixels) == (10 * seen[-1], 3 * seen[-1])
        assert 1 <= crashed <= 12 * KILLS
        assert len(rows) > crashed
        assert total == sum(row.prompt_tokens + row.completion_tokens for row in rows)
        assert sum(p.completion_tokens for p in parts) == sum(r.completion_tokens for r in rows)
        assert audio_ms == sum(row.speech_ms for row in rows)
        assert pixels == sum(row.image_pixels for row in rows)
        assert sum(p.speech_ms for p in parts) == audio_ms
        assert sum(p.image_pixels for p in parts) == pixels
        assert not list(journal.rglob("*.done"))
        assert len(left) <= KILLS

    asyncio.run(check())
