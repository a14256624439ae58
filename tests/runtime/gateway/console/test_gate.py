"""The way to the database: who waits, and who is told to come back."""

from __future__ import annotations

import asyncio

import pytest

from atoll.runtime.gateway.console.gate import DatabaseGate
from atoll.runtime.openai import ApiError


async def test_one_key_does_not_take_all_places() -> None:
    gate, over = DatabaseGate(), asyncio.Event()

    async def ask(who: str | None) -> None:
        async with gate.enter(who):
            await over.wait()

    eve = [asyncio.create_task(ask("eve")) for _ in range(100)]
    await asyncio.sleep(0)
    refused = [task for task in eve if task.done()]
    assert len(refused) == 80
    error = refused[0].exception()
    assert isinstance(error, ApiError)
    assert (error.status, error.retry_after_s) == (503, 1)
    others = [asyncio.create_task(ask(who)) for who in ("bob", None, *[None] * 20)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in others)
    over.set()
    await asyncio.gather(*others)
    await asyncio.gather(*eve, return_exceptions=True)
    async with gate.enter("eve"):
        pass


async def test_all_places_may_be_taken() -> None:
    gate, over = DatabaseGate(), asyncio.Event()

    async def ask(who: str) -> None:
        async with gate.enter(who):
            await over.wait()

    tasks = [asyncio.create_task(ask(f"key{n % 10}")) for n in range(100)]
    await asyncio.sleep(0)
    with pytest.raises(ApiError):
        await ask("bob")
    over.set()
    await asyncio.gather(*tasks)
