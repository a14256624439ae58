"""Whoever stays is told when something of the fleets changes; the work is done once, however many listen."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from atoll.desk.jobs import write_event

_LOG = logging.getLogger(__name__)
EVERY_S = 3.0
"""How often somebody looks while others listen."""
_BEAT_S = 15.0
"""After so long with nothing to say a comment is sent, so that nobody in between gives up."""
Read = Callable[[], Awaitable[dict[str, Any]]]
"""Returns all fleets as they are listed."""


class FleetWatch:
    """Looks at fleets for all listeners together, and only while there are any."""

    def __init__(self, read: Read, every_s: float = EVERY_S) -> None:
        self._read = read
        self._every_s = every_s
        self._listeners = 0
        self._task: asyncio.Task[None] | None = None
        self._said = b""
        self._changed = asyncio.Event()

    async def listen(self) -> AsyncGenerator[bytes, None]:
        """Yield `fleets` at once, and whenever something has changed."""
        self._listeners += 1
        if self._task is None:
            self._task = asyncio.create_task(self._watch())
        told = b""
        try:
            # Whoever is in between knows at once that this is a stream.
            yield b": \n\n"
            while True:
                if self._said != told:
                    told = self._said
                    yield told
                    continue
                changed = asyncio.ensure_future(self._changed.wait())
                done, _ = await asyncio.wait({changed}, timeout=_BEAT_S)
                changed.cancel()
                if not done:
                    yield b": \n\n"
        finally:
            self._listeners -= 1
            if not self._listeners and self._task is not None:
                self._task.cancel()
                self._task, self._said = None, b""

    async def _watch(self) -> None:
        while True:
            try:
                said = write_event("fleets", await self._read())
            except Exception:  # noqa: BLE001 - what cannot be read now may be in a moment
                _LOG.exception("cannot look at fleets")
                said = self._said
            if said != self._said:
                self._said = said
                self._changed.set()
                self._changed = asyncio.Event()
            await asyncio.sleep(self._every_s)
