"""Is a server well, and what does it serve now: asked again and again."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from atoll.runtime.join.offers import Inspector, ServerOffer, UnhealthyError

_FIRST_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """Seconds between two looks, and how many bad ones in a row count."""

    interval_s: float = 2.0
    failures: int = 3


class Health:
    """Health of a server, from repeated looks at it: decisions only.

    One good look makes it well; `failures` bad ones in a row make it unwell again. Before it is well
    for the first time, and before it is well again, it has to prove it with a token. `served`: it has
    been well since it was started.
    """

    def __init__(self, failures: int) -> None:
        self._max_bad = failures
        self._bad = 0
        self.offer: ServerOffer | None = None
        self.reason = "not looked at yet"
        self.served = False
        self._unwell_since_s: float | None = None

    def unwell_s(self, now_s: float) -> float:
        """Return for how long it has not been well."""
        return 0.0 if self._unwell_since_s is None else now_s - self._unwell_since_s

    @property
    def prove(self) -> bool:
        """Whether the next look has to ask for a token."""
        return self.offer is None

    def good(self, offer: ServerOffer) -> None:
        """Take a good look."""
        self._bad = 0
        self.offer = offer
        self.reason = ""
        self.served = True
        self._unwell_since_s = None

    def bad(self, reason: str, now_s: float) -> None:
        """Take a bad look."""
        self._bad += 1
        self.reason = reason
        if self._unwell_since_s is None:
            self._unwell_since_s = now_s
        if self._bad >= self._max_bad:
            self.offer = None

    def reset(self) -> None:
        """Begin anew with another process."""
        self._bad = 0
        self.offer = None
        self.reason = "starting"
        self.served = False
        self._unwell_since_s = None


class Watcher:
    """Looks at a server for as long as it runs, and tells of every change of what it serves."""

    def __init__(
        self,
        inspector: Inspector,
        on_change: Callable[[], None],
        settings: WatchSettings | None = None,
    ) -> None:
        self.inspector = inspector
        self.settings = settings or WatchSettings()
        self.health = Health(self.settings.failures)
        self._on_change = on_change
        self._wake = asyncio.Event()
        self._generation = 0

    @property
    def offer(self) -> ServerOffer | None:
        """Offer of now; None if it is not well."""
        return self.health.offer

    def reset(self) -> None:
        """Forget the process that was: another one will answer."""
        self._generation += 1
        self.inspector.reset()
        self.health.reset()
        self._wake.set()

    def hurry(self) -> None:
        """Look at once: something looked wrong."""
        self._wake.set()

    async def run(self) -> None:
        """Look at the server again and again until cancelled."""
        pause_s = _FIRST_PAUSE_S
        while True:
            await self.look()
            # While an engine loads, or is away, its next answer should not be missed for long.
            serves = self.health.offer is not None
            pause_s = _FIRST_PAUSE_S if serves else pause_s * 1.5
            interval_s = self.settings.interval_s
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(
                    self._wake.wait(), interval_s if serves else min(pause_s, interval_s)
                )

    async def look(self) -> None:
        """Look at the server once and take what it says into account."""
        before, generation = self.health.offer, self._generation
        try:
            offer = await self.inspector.look(prove=self.health.prove)
        except UnhealthyError as error:
            if generation == self._generation:
                self.health.bad(str(error), time.monotonic())
        else:
            if generation == self._generation:
                self.health.good(offer)
        if self.health.offer != before and generation == self._generation:
            self._on_change()


@dataclass(slots=True)
class EngineProbe:
    """Probe for the supervisor of a process: ready is one that serves, hung one that has not for `hung_s`."""

    watcher: Watcher
    hung_s: float
    every_s: float = 1.0

    def reset(self) -> None:
        """Forget the process that was."""
        self.watcher.reset()

    async def check(self, pid: int) -> str | None:
        """Say what the watcher saw."""
        del pid
        health = self.watcher.health
        if health.offer is not None:
            return None
        if health.served and health.unwell_s(time.monotonic()) < self.hung_s:
            # Withdrawn; it may yet come back by itself.
            return None
        await asyncio.sleep(0.05)
        return health.reason
