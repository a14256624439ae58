"""Time as a parameter: the same policy runs under a wall clock and under a virtual one."""

from __future__ import annotations

import asyncio
import heapq
import time
from itertools import count
from typing import Protocol

from atoll.core.errors import UsageError


class Clock(Protocol):
    """Monotonic time in seconds from an arbitrary origin, and waiting on it."""

    def now(self) -> float:
        """Return the current time in seconds."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait for so many seconds of this clock; zero or less only yields to other tasks."""
        ...


class WallClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Return the current time in seconds."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Wait for so many real seconds; zero or less only yields to other tasks."""
        await asyncio.sleep(max(0.0, seconds))


class VirtualClock:
    """A clock that moves only when told to, waking sleepers in order of deadline, then of arrival.

    `advance` wakes one sleeper at a time and lets everything it sets off run before the next one,
    so tasks that sleep again inside the interval are woken again inside it, at the right time. What
    "everything" means on an asyncio loop is bounded: `settle_yields` turns of the loop, which is
    how many ready callbacks in a row a woken task may hop through before it sleeps again.
    """

    def __init__(self, start_s: float = 0.0, *, settle_yields: int = 32) -> None:
        self._now_s = start_s
        self._settle_yields = settle_yields
        self._arrivals = count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> float:
        """Return the current virtual time in seconds."""
        return self._now_s

    async def sleep(self, seconds: float) -> None:
        """Wait until `advance` has carried the clock so many seconds further."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now_s + seconds, next(self._arrivals), woken))
        await woken

    def next_deadline(self) -> float | None:
        """Return when the earliest sleeper wakes, in seconds of this clock; None if none sleeps."""
        while self._sleepers and self._sleepers[0][2].done():  # cancelled while asleep
            heapq.heappop(self._sleepers)
        return self._sleepers[0][0] if self._sleepers else None

    async def advance(self, seconds: float) -> None:
        """Move the clock `seconds` forward, waking every sleeper whose deadline is passed."""
        if not seconds >= 0:
            raise UsageError(f"a clock cannot be advanced by {seconds} seconds")
        target_s = self._now_s + seconds
        await self._settle()  # tasks just created get to their first sleep
        while (deadline_s := self.next_deadline()) is not None and deadline_s <= target_s:
            self._now_s = max(self._now_s, deadline_s)
            heapq.heappop(self._sleepers)[2].set_result(None)
            await self._settle()
        self._now_s = target_s

    async def _settle(self) -> None:
        for _ in range(self._settle_yields):
            await asyncio.sleep(0)
