"""Who reads an answer slowly reads all of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from atoll.tasks.invocation import Final, Invocation
from atoll.tasks.run import Run
from atoll.tasks.task import Task, UnitTask
from atoll.tasks.values import Value


@dataclass(frozen=True)
class Pair:
    """Two streams."""

    first: Any
    second: Any


class Two(Task[int, Pair]):
    """Gives two streams at once."""

    def setup(self) -> None:
        self.count = UnitTask("count", streams=True)

    def invoke(self, request: int) -> Pair:
        return Pair(self.count(most=request), self.count(most=request))


class Counter:
    """Counts as fast as it is let."""

    async def call(self, invocation: Invocation) -> Value:
        raise AssertionError(invocation)

    async def stream(self, invocation: Invocation) -> AsyncIterator[Value | Final]:
        for number in range(int(invocation.inputs["most"])):  # type: ignore[arg-type]
            await asyncio.sleep(0)
            yield number
        yield Final(None)


async def test_what_comes_while_an_event_is_looked_at_is_not_missed() -> None:
    seen: list[tuple[str | int, Any]] = []
    async with asyncio.timeout(30.0):
        async for event in Run(Two(), 5, Counter()).events():
            # Longer than everything that is still to come takes.
            for _ in range(50):
                await asyncio.sleep(0)
            if not event.last:
                seen.append((event.path[0], event.value))
    for name in ("first", "second"):
        assert [value for path, value in seen if path == name] == [0, 1, 2, 3, 4]
