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
    Dial,
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


@dataclass(slots=True)
class _Link:
    """Connection to one executor; `leaving`: it finishes what it has, and is asked nothing new."""

    client: ExecutorClient
    components: tuple[str, ...]
    keeper: asyncio.Task[None] | None = None
    leaving: bool = False
    seen_s: float | None = None


class ExecutorLinks:
    """All executors of a graph server (`ExecutorFleet`); `use` says which those are from now on."""

    def __init__(
        self,
        executors: Iterable[ExecutorAddress],
        token: str,
        holder: str,
        dial: Dial = asyncio.open_connection,
    ) -> None:
        self._token, self._holder, self._dial = token, holder, dial
        self._links: dict[str, _Link] = {}
        self._absent: frozenset[str] = frozenset()
        self._changed = asyncio.Event()
        self._started = False
        self._ended: set[asyncio.Task[None]] = set()
        self.use(executors)

    def use(self, executors: Iterable[ExecutorAddress], absent: Iterable[str] = ()) -> None:
        """Ask these from now on; `absent` are named by paths and not there.

        One that is not among them any more finishes what it has, as long as it is reached.
        """
        listed = {executor.id: executor for executor in executors}
        for name, link in self._links.items():
            link.leaving = name not in listed
        for name, executor in listed.items():
            known = self._links.get(name)
            if known is not None and known.client.address == executor.address:
                known.components = executor.components
                continue
            if known is not None:
                # It was started anew elsewhere: nothing of before is left there.
                self._drop(known)
            client = ExecutorClient(
                *(executor.address, self._token, self._holder),
                connect_s=_CONNECT_S,
                dial=self._dial,
            )
            self._links[name] = _Link(client, executor.components)
            if self._started:
                self._keep_link(name)
        self._absent = frozenset(absent) - self._links.keys()
        self._notify()

    def start(self) -> None:
        """Begin to connect, and to connect again whenever a connection breaks."""
        self._started = True
        for name in self._links:
            self._keep_link(name)

    async def close(self) -> None:
        """Hang up."""
        keepers = [link.keeper for link in self._links.values() if link.keeper is not None]
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, *self._ended, return_exceptions=True)
        for link in self._links.values():
            await link.client.close()

    def dead(self) -> frozenset[str]:
        """Return the executors without a connection, and those that are leaving or not there."""
        lost = {
            name
            for name, link in self._links.items()
            if link.leaving or not link.client.is_connected
        }
        return self._absent | lost

    def silent_s(self, executor: str) -> float:
        """Return for how many seconds there is no connection to an executor; inf if there never was."""
        link = self._links.get(executor)
        if link is not None and link.client.is_connected:
            return 0.0
        if link is None or link.seen_s is None:
            return float("inf")
        return time.monotonic() - link.seen_s

    async def change(self, timeout_s: float) -> None:
        """Return when a connection was made or broke, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)

    async def call(self, executor: str, order: ExecutorOrder) -> ExecutorOutcome:
        """Run an invocation; cancelled, it is cancelled there."""
        with _as_trouble():
            finished = await self._client(executor).call(
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
            answers = self._client(executor).stream(
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
                    queues = await self._client(executor).ask_queues()
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
            owners = (link.client for link in self._links.values())
            client = next((each for each in owners if each.address == handle.address), None)
            if client is None:
                raise TroubleError("lost_handle", error.message, handle=handle.id) from error
        with _as_trouble():
            return await client.fetch(handle)

    async def renew(self, executor: str, handles: Sequence[Handle], lease_s: float) -> None:
        """Say that arrays are still needed."""
        with contextlib.suppress(ExecutorLostError):
            await self._client(executor).renew(handles, lease_s)

    async def release(self, executor: str, handles: Sequence[Handle]) -> None:
        """Say that arrays are needed no more; where the executor is gone, its leases run out."""
        with contextlib.suppress(ExecutorLostError):
            await self._client(executor).release(handles)

    def _client(self, executor: str) -> ExecutorClient:
        link = self._links.get(executor)
        if link is None:
            raise ExecutorLostError(f"{executor} is not there any more")
        return link.client

    def _keep_link(self, name: str) -> None:
        link = self._links[name]
        link.keeper = asyncio.create_task(self._keep(name, link), name=f"link {name}")

    def _drop(self, link: _Link) -> None:
        if link.keeper is not None:
            link.keeper.cancel()
        closing = asyncio.create_task(link.client.close())
        self._ended.add(closing)
        closing.add_done_callback(self._ended.discard)

    async def _keep(self, name: str, link: _Link) -> None:
        client, wait_s = link.client, _FIRST_WAIT_S
        while not link.leaving:
            try:
                await client.connect()
            except AtollError as error:
                _LOG.debug("%s: %s", name, error)
                await asyncio.sleep(wait_s)
                wait_s = min(2.0 * wait_s, _LONGEST_WAIT_S)
                continue
            wait_s = _FIRST_WAIT_S
            missing = sorted(set(link.components) - set(client.components))
            if missing:
                _LOG.warning("%s does not run %s", name, ", ".join(missing))
            _LOG.info("connected to %s", name)
            self._notify()
            while client.is_connected:
                # Noted while it is there, so that silence counts from the last time it was seen.
                link.seen_s = time.monotonic()
                await asyncio.sleep(_LOOK_S)
            _say_lost(name, link)
            self._notify()
        # It has left for good; one that comes back under its name is another.
        if self._links.get(name) is link:
            del self._links[name]

    def _notify(self) -> None:
        """Wake everybody who waits for a change."""
        # A new event for those who wait from now on: this change wakes those who wait now, and them alone.
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _say_lost(name: str, link: _Link) -> None:
    # Who has said that it leaves is no loss.
    _LOG.log(logging.INFO if link.leaving else logging.WARNING, "lost %s", name)


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
