"""One caller of an executor: what is under way for it, and what it is told."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from typing import Any

from msgspec import Struct

from atoll.core.errors import AtollError
from atoll.runtime.executor.executor_client import InvocationError, is_flowing
from atoll.runtime.executor.executor_messages import InvocationFailed
from atoll.runtime.executor.executor_wire import encode_frame

_LOG = logging.getLogger(__name__)


class CallerGoneError(AtollError):
    """The caller hung up, or does not read what it is sent."""


class CallerConnection:
    """A connection whose caller is known; `holder` names it in leases."""

    def __init__(self, writer: asyncio.StreamWriter, holder: str, silent_s: float) -> None:
        self.holder = holder
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self._writer = writer
        self._silent_s = silent_s

    def begin(self, number: int, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start what answers an exchange."""
        task = asyncio.create_task(work)
        self.tasks[number] = task
        task.add_done_callback(lambda _: self._ended(number, task))
        return task

    def cancel(self, number: int) -> None:
        """End an exchange that nobody waits for; one that is over is no matter."""
        if (task := self.tasks.get(number)) is not None:
            task.cancel()

    def fail(self, number: int, error: InvocationError) -> None:
        """Say that an exchange has failed."""
        self.write(InvocationFailed(number, error.code, error.message, error.param, error.handle))

    def write(self, message: Struct) -> None:
        """Send a short message without waiting until it is read; dropped if the caller is gone."""
        if not self._writer.is_closing():
            self._writer.write(encode_frame(message))

    async def send(self, message: Struct) -> None:
        """Send a message and wait until the caller reads fast enough."""
        if self._writer.is_closing():
            raise CallerGoneError(f"{self.holder} has hung up")
        self._writer.write(encode_frame(message))
        await self.flush()

    async def flush(self) -> None:
        """Wait until the caller has read most of what it was sent; one that does not is cut off."""
        if is_flowing(self._writer):
            return
        patience = asyncio.timeout(self._silent_s)
        try:
            async with patience:
                await self._writer.drain()
        except OSError as error:
            raise CallerGoneError(f"{self.holder} has hung up: {error}") from error
        except TimeoutError as error:
            if not patience.expired():
                raise
            self._writer.transport.abort()
            raise CallerGoneError(f"{self.holder} does not read") from error

    async def close(self) -> None:
        """Cancel what is under way and hang up."""
        tasks = list(self.tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    def _ended(self, number: int, task: asyncio.Task[None]) -> None:
        self.tasks.pop(number, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.error("an exchange with %s failed", self.holder, exc_info=error)
