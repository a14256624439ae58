"""Requests for which no backend has room, first come first served."""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import Protocol

_WOKEN = 16
"""Waiting requests that try again when one ends."""


class Waiter(Protocol):
    """A request that waits."""

    def retry(self) -> None:
        """Look for a backend again."""


class RequestQueue:
    """The requests that wait, in the order in which they came; empty most of the time."""

    __slots__ = ("_waking", "waiting")

    def __init__(self) -> None:
        self._waking = False
        self.waiting: dict[Waiter, None] = {}

    def add(self, waiter: Waiter) -> None:
        """Have a request wait; one that waits already keeps its place."""
        self.waiting.setdefault(waiter)

    def remove(self, waiter: Waiter) -> None:
        """Have a request wait no more."""
        self.waiting.pop(waiter, None)

    def wake(self) -> None:
        """Let the first ones try again, soon: a backend has room."""
        if self.waiting and not self._waking:
            self._waking = True
            asyncio.get_running_loop().call_soon(self._retry_first)

    def _retry_first(self) -> None:
        self._waking = False
        for waiter in list(islice(self.waiting, _WOKEN)):
            waiter.retry()
