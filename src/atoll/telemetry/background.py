"""Work that must not delay requests: handed over in a microsecond, done by a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

_Item = TypeVar("_Item")
_BATCH = 512


class Background(Generic[_Item]):
    """A thread that calls `handle` with what was offered, in order and in batches.

    Under load it wakes at most once every `pause_s` seconds; idle it sleeps. At most `most` items wait;
    further ones are refused and counted, as are batches that `handle` fails at.
    """

    def __init__(
        self,
        name: str,
        handle: Callable[[list[_Item]], None],
        *,
        most: int = 10_000,
        pause_s: float = 0.2,
    ) -> None:
        self.error = ""
        """Last error of `handle`."""
        self._refused = self._failed = 0
        self._handle = handle
        self._most = most
        self._pause_s = pause_s
        self._queue: SimpleQueue[_Item | None] = SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def lost(self) -> int:
        """Items refused or failed at."""
        return self._refused + self._failed

    def offer(self, item: _Item) -> bool:
        """Hand an item over; return whether it was taken."""
        if self._closing.is_set() or self._queue.qsize() >= self._most:
            self._refused += 1
            return False
        self._queue.put(item)
        return True

    def close(self, seconds: float = 5.0) -> bool:
        """Take no more and wait for what was taken; return whether all of it was handled in time."""
        if not self._closing.is_set():
            self._closing.set()
            self._queue.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        ended = False
        while not ended:
            batch: list[_Item] = []
            item = self._queue.get()
            while item is not None:
                batch.append(item)
                if len(batch) == _BATCH:
                    break
                try:
                    item = self._queue.get_nowait()
                except Empty:
                    break
            ended = item is None
            if batch:
                self._handle_safely(batch)
            # A pause lets items gather, so that a busy queue wakes the thread rarely; closing ends it.
            self._closing.wait(self._pause_s)

    def _handle_safely(self, batch: list[_Item]) -> None:
        try:
            self._handle(batch)
        except Exception as error:  # noqa: BLE001 - the edge of a thread: the next batch may go well
            self._failed += len(batch)
            self.error = f"{type(error).__name__}: {error}"
