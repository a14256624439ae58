"""Connections to the executors: kept, made again when they break, asked for invocations.

Everything here is I/O; what to do about what goes wrong is decided in `recovery`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from atoll.core.errors import AtollError
from atoll.runtime.executor.executor_client import (
    ExecutorClient,
    ExecutorLostError,
    InvocationError,
)
from atoll.runtime.executor.executor_messages import Finished
from atoll.runtime.graph_server.graph_config import ExecutorAddress
from atoll.runtime.graph_server.recovery import TroubleError
from atoll.tasks.values import Handle, Value

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class ExecutorOutcome:
    """Result of an invocation, and where its time went at the executor, in seconds."""

    value: Value
    waited_s: float = 0.0
    ran_s: float = 0.0
    batch: int = 1


@dataclass(frozen=True, slots=True)
class ExecutorOrder:
    """One attempt at an invocation. Arrays of the result are leased for `lease_s`."""

    component: str
    inputs: dict[str, Value]
    request: str
    deadline_s: float
    lease_s: float


class ExecutorFleet(Protocol):
    """Executors by id. What goes wrong at one is a `TroubleError`, "lost" where it is not there."""

    def dead(self) -> frozenset[str]:
        """Return the executors that cannot be reached now."""
        ...

    def silent_s(self, executor: str) -> float:
        """Return for how many seconds an executor cannot be reached; inf if it never could."""
        ...

    async def change(self, timeout_s: float) -> None:
        """Return when an executor came back or went, or after `timeout_s`."""
        ...

    async def call(self, executor: str, order: ExecutorOrder) -> ExecutorOutcome:
        """Run an invocation; cancelled, it is cancelled there."""
        ...

    def stream(
        self, executor: str, order: ExecutorOrder
    ) -> AsyncGenerator[Value | ExecutorOutcome, None]:
        """Run an invocation that gives pieces and then its outcome."""
        ...

    async def queue(self, executor: str, component: str) -> int:
        """Return how many invocations wait or run there."""
        ...

    async def fetch(self, handle: Handle) -> NDArray[Any]:
        """Return an array, from its file on the same host, else over the wire."""
        ...

    async def renew(self, executor: str, handles: Sequence[Handle], lease_s: float) -> None:
        """Say that arrays are still needed; nothing where the executor is gone."""
        ...

    async def release(self, executor: str, handles: Sequence[Handle]) -> None:
        """Say that arrays are needed no more; where the executor is gone, its leases run out."""
        ...


_LOG = logging.getLogger(__name__)
_CONNECT_S = 5.0
_LOOK_S = 0.2
"""How often a connection is looked at while nothing is asked over it."""
# Pauses between two attempts to connect: doubled each time, up to the longest.
_FIRST_WAIT_S = 0.05
_LONGEST_WAIT_S = 1.0
_QUEUE_S = 0.5
"""How long an executor may take to say how long its queue is."""


class ExecutorLinks:
    """All executors of a graph server (`ExecutorFleet`)."""

    def __init__(self, executors: Iterable[ExecutorAddress], token: str, holder: str) -> None:
        self._clients = {
            executor.id: ExecutorClient(executor.address, token, holder, connect_s=_CONNECT_S)
            for executor in executors
        }
        self._components = {executor.id: executor.components for executor in executors}
        self._by_address = {client.address: client for client in self._clients.values()}
        self._changed = asyncio.Event()
        self._seen_s: dict[str, float] = {}
        self._keepers: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to connect, and to connect again whenever a connection breaks."""
        self._keepers = [
            asyncio.create_task(self._keep(name, client), name=f"link {name}")
            for name, client in self._clients.items()
        ]

    async def close(self) -> None:
        """Hang up."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for client in self._clients.values():
            await client.close()

    def dead(self) -> frozenset[str]:
        """Return the executors without a connection."""
        return frozenset(name for name, client in self._clients.items() if not client.is_connected)

    def silent_s(self, executor: str) -> float:
        """Return for how many seconds there is no connection to an executor; inf if there never was."""
        if self._clients[executor].is_connected:
            return 0.0
        seen_s = self._seen_s.get(executor)
        return float("inf") if seen_s is None else time.monotonic() - seen_s

    async def change(self, timeout_s: float) -> None:
        """Return when a connection was made or broke, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)

    async def call(self, executor: str, order: ExecutorOrder) -> ExecutorOutcome:
        """Run an invocation; cancelled, it is cancelled there."""
        with _as_trouble():
            finished = await self._clients[executor].call(
                order.component,
                order.inputs,
                lease_s=order.lease_s,
                deadline_s=order.deadline_s,
                request=order.request,
            )
            return _outcome(finished)

    async def stream(
        self, executor: str, order: ExecutorOrder
    ) -> AsyncGenerator[Value | ExecutorOutcome, None]:
        """Run an invocation that gives pieces and then its outcome."""
        with _as_trouble():
            answers = self._clients[executor].stream(
                order.component,
                order.inputs,
                lease_s=order.lease_s,
                deadline_s=order.deadline_s,
                request=order.request,
            )
            async with contextlib.aclosing(answers):
                async for answer in answers:
                    yield _outcome(answer) if isinstance(answer, Finished) else answer.value

    async def queue(self, executor: str, component: str) -> int:
        """Return how many invocations wait or run there."""
        with _as_trouble():
            try:
                async with asyncio.timeout(_QUEUE_S):
                    queues = await self._clients[executor].ask_queues()
            except TimeoutError:
                raise ExecutorLostError(f"{executor} does not say how long its queue is") from None
        return queues.get(component, 0)

    async def fetch(self, handle: Handle) -> NDArray[Any]:
        """Return an array: carried by its handle, mapped on the same host, or sent by its owner."""
        from atoll.runtime.executor.arrays import LostHandleError, open_handle

        # No connection is needed for what lies on this host.
        try:
            return open_handle(handle)
        except LostHandleError as error:
            client = self._by_address.get(handle.address)
            if client is None:
                raise TroubleError("lost_handle", error.message, handle=handle.id) from error
        with _as_trouble():
            return await client.fetch(handle)

    async def renew(self, executor: str, handles: Sequence[Handle], lease_s: float) -> None:
        """Say that arrays are still needed."""
        with contextlib.suppress(ExecutorLostError):
            await self._clients[executor].renew(handles, lease_s)

    async def release(self, executor: str, handles: Sequence[Handle]) -> None:
        """Say that arrays are needed no more; where the executor is gone, its leases run out."""
        with contextlib.suppress(ExecutorLostError):
            await self._clients[executor].release(handles)

    async def _keep(self, name: str, client: ExecutorClient) -> None:
        wait_s = _FIRST_WAIT_S
        while True:
            try:
                await client.connect()
            except AtollError as error:
                _LOG.debug("%s: %s", name, error)
                await asyncio.sleep(wait_s)
                wait_s = min(2.0 * wait_s, _LONGEST_WAIT_S)
                continue
            wait_s = _FIRST_WAIT_S
            missing = sorted(set(self._components[name]) - set(client.components))
            if missing:
                _LOG.warning("%s does not run %s", name, ", ".join(missing))
            _LOG.info("connected to %s", name)
            self._notify()
            while client.is_connected:
                # Noted while it is there, so that silence counts from the last time it was seen.
                self._seen_s[name] = time.monotonic()
                await asyncio.sleep(_LOOK_S)
            _LOG.warning("lost %s", name)
            self._notify()

    def _notify(self) -> None:
        """Wake everybody who waits for a change."""
        # A new event for those who wait from now on: this change wakes those who wait now, and them alone.
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _outcome(finished: Finished) -> ExecutorOutcome:
    return ExecutorOutcome(finished.value, finished.waited_s, finished.ran_s, finished.batch)


@contextlib.contextmanager
def _as_trouble() -> Generator[None, None, None]:
    """Turn what the executor's client raises into a `TroubleError`."""
    try:
        yield
    except InvocationError as error:
        raise TroubleError(error.code, error.message, error.param, error.handle) from error
    except ExecutorLostError as error:
        raise TroubleError("lost", error.message) from error
