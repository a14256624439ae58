"""Kills of executors while clients ask: who is struck when, what clients saw of it, and what was left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from atoll.core.rng import stream
from atoll.runtime.http.http_client import fetch
from atoll.runtime.task_fleet.task_endpoint import store_folder
from tests.slow.tasks.checked_clients import STUCK_S, AnswersSeen, CheckedClients, until
from tests.slow.tasks.task_clients import KINDS, ClientOrder
from tests.slow.tasks.task_leftovers import ProcessWatch, StoredArrays, count_arrays

if TYPE_CHECKING:
    from atoll.runtime.local.local_fleet import LocalFleet

_WAYS = ("any", "stream", "pair", "maker")
_SHARES = (0.3, 0.4, 0.15, 0.15)
_ANSWERS_BETWEEN = 2
"""Answers that must have come since a kill before the next; the two of a pair fall together."""
_LEASES_S = 90.0
"""After this every lease has run out (`atoll.runtime.graph_server.dispatch.LEASE_S`), with time to spare."""
_WATCH_S = 0.5


@dataclass
class ChaosOutcome(AnswersSeen):
    """What clients saw of the kills, and what was left. Times are seconds."""

    kills: Counter[str] = field(default_factory=Counter)
    """By executor."""
    ways: Counter[str] = field(default_factory=Counter)
    back_s: list[float] = field(default_factory=list)
    """From a kill until the executor was ready again."""
    calm_differences: int = 0
    """Wrong answers among those with many clients and no kills; in `wrong_answers`, too."""
    failovers: int = 0
    remakes: int = 0
    arrays: StoredArrays | None = None
    arrays_at_end: int = 0
    free_after_s: float = 0.0
    orphans: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0

    @property
    def leaked_handles(self) -> int:
        """Arrays that are left; one where nobody could count them."""
        return 1 if self.arrays is None else self.arrays.leaked + self.arrays.running


class TaskChaos:
    """A fleet under load, and what befalls it."""

    def __init__(
        self,
        fleet: LocalFleet,
        orders: Sequence[ClientOrder],
        seed: int,
        clients: int,
        watch: ProcessWatch,
        tell: Callable[[str], None],
    ) -> None:
        self.outcome = ChaosOutcome()
        self.watch = watch
        self._tell = tell
        self._waits: list[asyncio.Task[None]] = []
        self._fleet = fleet
        self._store = store_folder(fleet.home)
        self._asks = CheckedClients(fleet.url, orders, self.outcome, tell)
        self._streams = self._asks.streams
        self._clients = clients
        self._picks = stream(seed, "tasks_chaos", "orders")
        self._strikes = stream(seed, "tasks_chaos", "strikes")
        self._stopping = False
        self._groups: dict[str, list[str]] = {}
        for process, *_ in fleet.endpoints[0].endpoint.held:
            self._groups.setdefault(process.rpartition("-")[0], []).append(process)

    async def run(self, kills: int) -> None:
        """Learn the right answers, then strike while clients ask."""
        await self._asks.learn()
        watching = asyncio.create_task(self._watch())
        try:
            await self._calm()
            asking = [asyncio.create_task(self._ask_on()) for _ in range(self._clients)]
            try:
                async with asyncio.timeout(STUCK_S * (1 + kills)):
                    while self.outcome.kills.total() < kills:
                        await self._strike(kills - self.outcome.kills.total())
                    await self._asks.more_answers(_ANSWERS_BETWEEN)
            finally:
                self._stopping = True
                await asyncio.gather(*asking)
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching

    # Clients

    async def _calm(self) -> None:
        """Ask everything once with many clients and no kills: what differs is not the kills' fault."""
        waiting = list(self._asks.orders)

        async def work() -> None:
            while waiting:
                await self._asks.ask(waiting.pop())

        await asyncio.gather(*(work() for _ in range(self._clients)))
        self.outcome.calm_differences = self.outcome.wrong_answers

    async def _ask_on(self) -> None:
        while not self._stopping:
            # Kinds alike, whatever the number of orders of each.
            kind = KINDS[int(self._picks.integers(len(KINDS)))]
            found = [order for order in self._asks.orders if order.kind == kind]
            if found:
                await self._asks.ask(found[int(self._picks.integers(len(found)))])

    # Kills

    async def _strike(self, left: int) -> None:
        """Kill one executor, or both of a kind so that requests must wait."""
        way = str(self._strikes.choice(_WAYS, p=_SHARES))
        await self._asks.more_answers(_ANSWERS_BETWEEN)
        if way == "pair" and left > 1:
            await until(lambda: bool(self._whole_groups()), "kind of which all are ready")
            names = self._groups[self._choose(self._whole_groups())]
            for place in self._strikes.permutation(len(names)):
                await self._kill(names[int(place)], way)
            return
        if way == "maker" and left > 1:
            await self._strike_maker()
            return
        if way in ("stream", "maker"):
            await until(lambda: bool(self._streaming()), "stream")
            await self._kill(self._choose(self._streaming()), "stream")
            return
        await until(lambda: bool(self._ready_ones()), "executor that is ready")
        await self._kill(self._choose(self._ready_ones()), "any")

    async def _strike_maker(self) -> None:
        """Kill what made the inputs of a stream; once they are gone, kill where the stream comes from."""
        await until(lambda: bool(self._long_ways()), "stream over two executors")
        numbers = self._long_ways()
        number = numbers[int(self._strikes.integers(len(numbers)))]
        maker, next_one = self._streams[number].way[:2]
        await self._kill(maker, "maker")
        store = self._store / maker
        # What starts in its place empties its store before all else.
        await until(
            lambda: number not in self._streams or not any(store.glob("*.array")), "empty store"
        )
        if number in self._streams and self._is_ready(next_one):
            await self._kill(next_one, "maker")

    def _choose(self, names: Sequence[str]) -> str:
        return names[int(self._strikes.integers(len(names)))]

    def _is_ready(self, name: str) -> bool:
        process = self._fleet.agent.processes[name]
        return str(process.state) == "ready" and process.pid is not None

    def _ready_ones(self) -> list[str]:
        return [name for names in self._groups.values() for name in names if self._is_ready(name)]

    def _whole_groups(self) -> list[str]:
        return [group for group, names in self._groups.items() if all(map(self._is_ready, names))]

    def _streaming(self) -> list[str]:
        """Return the executors from which answers that have begun are coming, not those before them."""
        ways = [reply.way for reply in self._streams.values() if reply.pieces > 1]
        coming = {name for way in ways for name in way[1:] or way}
        return [name for name in self._ready_ones() if name in coming]

    def _long_ways(self) -> list[int]:
        """Return the streams that have begun and whose inputs another executor made."""
        return [
            number
            for number, reply in self._streams.items()
            if reply.pieces > 1 and len(reply.way) > 1 and all(map(self._is_ready, reply.way[:2]))
        ]

    async def _kill(self, name: str, way: str) -> None:
        await until(lambda: bool(self._streams), "request")
        self.watch.look()
        process = self._fleet.agent.processes[name]
        pid = process.pid
        if pid is None:
            return
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.outcome.kills[name] += 1
        self._tell(f"{self.outcome.kills.total()}. {name} ({way})")
        self.outcome.ways[way] += 1
        # It takes a moment until the agent knows.
        await until(lambda: process.pid != pid, f"end of {name}")
        self._waits.append(asyncio.create_task(self._time_return(name)))

    async def _time_return(self, name: str) -> None:
        began_s = time.monotonic()
        await until(lambda: self._is_ready(name), f"return of {name}")
        self.outcome.back_s.append(time.monotonic() - began_s)

    async def _watch(self) -> None:
        while True:
            self.watch.look()
            await asyncio.sleep(_WATCH_S)

    # What is left

    async def count_left(self) -> None:
        """Wait until every lease has run out, and count what is left nevertheless."""
        await asyncio.gather(*self._waits)
        endpoint = self._fleet.endpoints[0].endpoint
        urls = [spec.probe.url for spec in endpoint.nodes]  # type: ignore[attr-defined]
        began_s = time.monotonic()
        await self._count_attempts(endpoint.backend.url)
        while True:
            found = await count_arrays(self._store, endpoint.backend.url, urls)
            waited_s = time.monotonic() - began_s
            if self.outcome.arrays is None:
                self.outcome.arrays_at_end = found.handles
            self.outcome.arrays, self.outcome.free_after_s = found, waited_s
            if self.outcome.leaked_handles == 0 or waited_s > _LEASES_S:
                return
            await asyncio.sleep(_WATCH_S)

    async def _count_attempts(self, server: str) -> None:
        """Read from the graph server how often invocations went elsewhere, and how often inputs were lost."""
        _, page = await fetch(f"{server}/metrics", timeout_s=10.0)
        for line in page.decode().splitlines():
            if line.startswith("atoll_graph_invocations_total{"):
                count = int(float(line.rpartition(" ")[2]))
                self.outcome.failovers += count if 'outcome="lost"' in line else 0
                self.outcome.remakes += count if 'outcome="lost_handle"' in line else 0
