"""Step times of nodes of the stage engine while they serve, from what their heartbeats count.

A heartbeat says how many steps a node has run since its start, how many rows they had, and how long they took
by the clock. What happened between two of them is therefore known exactly, caches, other processes on the
core and the sending of results included, and nobody has to time anything in the nodes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

from atoll.engine.engine_messages import Heartbeat, SchedulerHello
from atoll.engine.mailbox import ZmqMailbox

LAG_S = 0.6
"""How old what a heartbeat says may be: an idle node looks, and beats, every quarter of a second."""
_POLL_S = 0.05
_HELLO_S = 5.0


class Counted(NamedTuple):
    """Steps of a node, their rows, and their seconds."""

    steps: int
    rows: int
    busy_s: float

    def since(self, before: Counted) -> Counted:
        """Return what came after `before`."""
        return Counted(
            self.steps - before.steps, self.rows - before.rows, self.busy_s - before.busy_s
        )


class NodeMeter:
    """Hears the heartbeats of some nodes, in order, and keeps all of them with the time they came."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        self._endpoints = tuple(endpoints)
        self._beats: dict[str, list[tuple[float, Counted]]] = {each: [] for each in endpoints}

    def hear(self, endpoint: str, at_s: float, counted: Counted) -> None:
        """Take a heartbeat in."""
        self._beats[endpoint].append((at_s, counted))

    @asynccontextmanager
    async def listen(self) -> AsyncIterator[NodeMeter]:
        """Be heard by the nodes, and hear them, for as long as this is open."""
        mailbox = ZmqMailbox()
        listening = asyncio.create_task(self._listen(mailbox))
        try:
            yield self
        finally:
            listening.cancel()
            with suppress(asyncio.CancelledError):
                await listening
            mailbox.close()

    async def _listen(self, mailbox: ZmqMailbox) -> None:
        greeted_s = float("-inf")
        while True:
            if time.monotonic() - greeted_s > _HELLO_S:
                greeted_s = time.monotonic()
                for endpoint in self._endpoints:
                    mailbox.send(endpoint, SchedulerHello(reply_to=mailbox.endpoint))
            for message in mailbox.receive(0.0):
                if isinstance(message, Heartbeat) and message.stats.endpoint in self._beats:
                    stats = message.stats
                    counted = Counted(stats.steps, stats.tokens, stats.busy_s)
                    self.hear(stats.endpoint, time.monotonic(), counted)
            await asyncio.sleep(_POLL_S)

    async def settle(self) -> tuple[Counted, ...]:
        """Return what all nodes have done, once they have said so; they must be idle."""
        await asyncio.sleep(LAG_S)
        return tuple(self._beats[each][-1][1] for each in self._endpoints)

    def between(self, from_s: float, until_s: float) -> tuple[Counted, ...]:
        """Return what each node said it did between the first and the last heartbeat of that time."""
        found = []
        for endpoint in self._endpoints:
            some = [counted for at_s, counted in self._beats[endpoint] if from_s <= at_s <= until_s]
            found.append(some[-1].since(some[0]) if some else Counted(0, 0, 0.0))
        return tuple(found)
