"""The way to the database: a few requests at a time, so that the gateway's own writing never waits long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from atoll.runtime.gateway.faults import server_fault

_AT_ONCE = 3
"""Requests at the database: few, so that the gateway's own writing never waits long."""
_MAX_WAITING = 100
"""Requests that wait for their turn or have it."""
_KEY_PART = 5
"""One key has at most one part in so many of the places."""
_ANSWER_S = 30.0
"""For one of them, and for its turn."""


class DatabaseGate:
    """Lets requests at the database, some at a time."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(_AT_ONCE)
        self._inside: list[str | None] = []
        """The keys of all who wait or are let in."""

    @asynccontextmanager
    async def enter(self, who: str | None = None) -> AsyncIterator[None]:
        """Wait for a turn; 503 where too many wait, and where the database is away or too slow.

        `who` is the id of the key that asks.
        """
        # There where accounts are: they need what the database needs.
        from atoll.runtime.accounts.database import AWAY

        own = 0 if who is None else self._inside.count(who)
        if len(self._inside) >= _MAX_WAITING or own >= _MAX_WAITING // _KEY_PART:
            raise server_fault(503, "too many ask for keys and usage at once", retry_s=1)
        self._inside.append(who)
        try:
            async with asyncio.timeout(_ANSWER_S), self._free:
                yield
        except AWAY:
            # A time that is over is one of these.
            raise server_fault(
                503, "the database of keys and usage does not answer", "database_away", 5
            ) from None
        finally:
            self._inside.remove(who)
