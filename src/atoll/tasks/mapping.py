"""A component run on every piece of a cut stream: several at once, answers in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from atoll.core.errors import AtollError
from atoll.tasks.cutting import Cutter
from atoll.tasks.feed import PieceFeed
from atoll.tasks.values import Value

READ_AHEAD = 4
"""The most invocations of one cut stream that run, or wait for an earlier one, at a time."""


def error_of(task: asyncio.Task[Any]) -> BaseException | None:
    """Return why a task that has ended gave nothing."""
    if task.cancelled():
        return AtollError("an invocation was cancelled by who ran it")
    return task.exception()


class StreamMap:
    """Starts an invocation for every piece that a cutter gives, and puts the answers in order.

    `start` is told the number of a piece and the piece.
    """

    def __init__(
        self,
        source: PieceFeed,
        cutter: Cutter,
        start: Callable[[int, Value], asyncio.Task[Any]],
        put: Callable[[Value], None],
    ) -> None:
        self._source = source
        self._cutter = cutter
        self._start = start
        self._put = put
        self._line: deque[asyncio.Task[Any]] = deque()
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._started = 0

    async def run(self) -> None:
        """Go over the whole stream. The first error ends it; nothing runs on when this has ended."""
        self._source.listeners.append(self._changed.set)
        try:
            await self._read()
            for part in self._cutter.finish():
                await self._launch(part)
            while self._line:
                await self._change()
        finally:
            self._source.listeners.remove(self._changed.set)
            for task in self._line:
                task.cancel()
            if self._line:
                await asyncio.wait(self._line)

    async def _read(self) -> None:
        source, at = self._source, 0
        while True:
            while at < len(source.pieces):
                at += 1
                for part in self._cutter.feed(source.pieces[at - 1]):
                    await self._launch(part)
            if source.error is not None:
                raise source.error
            if source.closed:
                return
            await self._change()

    async def _launch(self, part: Value) -> None:
        while len(self._line) >= READ_AHEAD:
            await self._change()
        task = self._start(self._started, part)
        self._started += 1
        self._line.append(task)
        task.add_done_callback(self._landed)

    async def _change(self) -> None:
        # Everything that counts is looked at before and after, and nothing happens in between.
        self._changed.clear()
        await self._changed.wait()
        if self._failure is not None:
            raise self._failure

    def _landed(self, task: asyncio.Task[Any]) -> None:
        self._failure = self._failure or error_of(task)
        while self._failure is None and self._line and self._line[0].done():
            answered = self._line.popleft()
            try:
                # One after the first may have failed in this turn of the loop, and not told yet.
                self._failure = error_of(answered)
                if self._failure is None:
                    self._put(answered.result())
            except Exception as bad:  # noqa: BLE001 - whatever is wrong with it, the stream ends of it
                self._failure = bad
        self._changed.set()
