"""Components at work: one batch at a time in a thread, or streams in the loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from atoll.components.base import (
    BadInputError,
    BatchComponent,
    Done,
    Inputs,
    LoadedComponent,
    Output,
    StreamComponent,
)
from atoll.core.errors import shorten
from atoll.core.request_parameters import ANSWER_FIELDS
from atoll.runtime.executor.executor_client import InvocationError
from atoll.runtime.executor.figures import ComponentFigures
from atoll.runtime.executor.outputs import NoSaver, count_array_bytes
from atoll.runtime.executor.store import StoreFullError
from atoll.tasks.values import Value

_LOG = logging.getLogger(__name__)
_SAVED_AT_ONCE_BYTES = 2**16
"""More than this is written to the store in a thread, so that no stream waits for it."""
# Characters of an error that a caller is told.
_MESSAGE = 300
Emit = Callable[[Value], Awaitable[None]]
"""Sends a piece of a stream to who asked."""


class Saver(Protocol):
    """Makes values of outputs (`outputs.OutputSaver`)."""

    @property
    def abandoned(self) -> bool:
        """Whether nobody wants the output any more."""

    def save(self, output: Output) -> Value:
        """Return an output as a value that can be sent."""


@dataclass(frozen=True, slots=True)
class InvocationEnd:
    """The end of an invocation, and where its time went, in seconds."""

    value: Value
    waited_s: float
    ran_s: float
    batch: int


def explain(error: BaseException) -> InvocationError:
    """Return an error of a component as its caller shall see it: one line, and whose fault it is."""
    if isinstance(error, InvocationError):
        return error
    if isinstance(error, BadInputError):
        return InvocationError("bad_input", shorten(error.message, _MESSAGE), error.param)
    if isinstance(error, StoreFullError):
        return InvocationError("overloaded", error.message)
    words = " ".join(str(error).split())
    return InvocationError("failed", shorten(f"{type(error).__name__}: {words}", _MESSAGE))


class ComponentWorker(ABC):
    """Runs the invocations of one component."""

    def __init__(self, name: str, component: LoadedComponent, max_waiting: int) -> None:
        self.name = name
        self.component = component
        self.figures = ComponentFigures()
        self.running = 0
        self.answered_s = float("-inf")
        """When it last gave anything, in seconds of `time.monotonic`."""
        self.busy_since_s: float | None = None
        """Since when it has worked on what it works on now."""
        self._max_waiting = max_waiting

    @property
    @abstractmethod
    def waiting(self) -> int:
        """How many invocations wait."""

    async def start(self) -> None:  # noqa: B027 - not all have something to start
        """Begin to work."""

    @abstractmethod
    async def run(self, inputs: Inputs, saver: Saver, emit: Emit) -> InvocationEnd:
        """Run one invocation; `InvocationError` if it cannot be done."""

    async def prove(self) -> None:
        """Run the component's own example, as any invocation."""

        async def ignore(piece: Value) -> None:
            del piece

        await self.run(self.component.example(), NoSaver(), ignore)

    async def close(self) -> None:
        """Stop working."""
        await self.component.close()

    def _refuse(self) -> InvocationError:
        return InvocationError("overloaded", f"{self._max_waiting} invocations of {self.name} wait")


@dataclass(slots=True, eq=False)
class _BatchedInvocation:
    inputs: Inputs
    saver: Saver
    since_s: float
    answer: asyncio.Future[InvocationEnd] = field(repr=False)


class BatchWorker(ComponentWorker):
    """Runs batches of a component, one at a time, in a thread of a pool that components share."""

    def __init__(
        self, name: str, component: BatchComponent, max_waiting: int, threads: Executor
    ) -> None:
        super().__init__(name, component, max_waiting)
        self._batched = component
        self._threads = threads
        self._queue: BatchQueue[_BatchedInvocation] = BatchQueue(component.max_batch, max_waiting)
        self._starts = False
        self._closed = False

    @property
    def waiting(self) -> int:
        """How many invocations wait."""
        return len(self._queue)

    async def close(self) -> None:
        """Stop working; a batch that runs goes on in its thread, which cannot be ended."""
        self._closed = True
        await super().close()

    async def run(self, inputs: Inputs, saver: Saver, emit: Emit) -> InvocationEnd:
        """Wait for a batch, and for what it gives."""
        del emit
        if self._queue.is_full:
            raise self._refuse()
        try:
            key = self._batched.batch_key(inputs)
        except Exception as error:
            raise self._note(error) from error
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[InvocationEnd] = loop.create_future()
        invocation = _BatchedInvocation(inputs, saver, time.monotonic(), answer)
        self._queue.add(invocation, key)
        if not self._starts and not self.running:
            # Not at once: what came together with it shall run together with it.
            self._starts = True
            loop.call_soon(self._start, loop)
        try:
            return await answer
        finally:
            # Also when the caller has left: what waits for nobody is not run.
            self._queue.drop(invocation)

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have a thread run the next batch, unless one runs or none waits."""
        self._starts = False
        if self.running or self._closed or not (batch := self._queue.take()):
            return
        self.running = len(batch)
        self.busy_since_s = started_s = time.monotonic()
        try:
            self._threads.submit(self._work, batch, started_s, loop)
        except RuntimeError as error:  # the threads are shut down
            self._ended(batch, [explain(error) for _ in batch], started_s, loop)

    def _work(
        self,
        batch: Sequence[_BatchedInvocation],
        started_s: float,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Run a batch in a worker thread, and wake the loop once, when all of it is done."""
        values: Sequence[Value | InvocationError]
        try:
            values = self._run_batch(batch)
        except BaseException as error:  # noqa: BLE001 - a component that wants to exit has failed
            _LOG.error("%s failed", self.name, exc_info=error)
            values = [InvocationError("failed", type(error).__name__) for _ in batch]
        # What is mapped for them is let go now: who hears that it is finished may free it.
        for invocation in batch:
            invocation.inputs = {}
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(self._ended, batch, values, started_s, loop)

    def _ended(
        self,
        batch: Sequence[_BatchedInvocation],
        values: Sequence[Value | InvocationError],
        started_s: float,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.running = 0
        self.busy_since_s = None
        self._answer(batch, values, started_s)
        self._start(loop)

    def _answer(
        self,
        batch: Sequence[_BatchedInvocation],
        values: Sequence[Value | InvocationError],
        started_s: float,
    ) -> None:
        ended_s = time.monotonic()
        ran_s = ended_s - started_s
        self.figures.count_batch(len(batch), ran_s)
        for invocation, value in zip(batch, values, strict=True):
            waited_s = started_s - invocation.since_s
            answer = invocation.answer
            if isinstance(value, InvocationError):
                self.figures.count(value.code, waited_s)
                # Who finds fault with an input works.
                proven = value.code == "bad_input"
                if not answer.done():
                    answer.set_exception(value)
            else:
                self.figures.count("ok", waited_s)
                proven = True
                if not answer.done():
                    answer.set_result(InvocationEnd(value, waited_s, ran_s, len(batch)))
            if proven:
                self.answered_s = ended_s

    def _run_batch(self, batch: Sequence[_BatchedInvocation]) -> Sequence[Value | InvocationError]:
        """Run a batch in a worker thread; if it breaks, each of it alone, so that one harms no other."""
        try:
            outputs = list(self._batched.run([invocation.inputs for invocation in batch]))
            if len(outputs) != len(batch):
                raise ValueError(f"{len(outputs)} outputs for {len(batch)} inputs")
        except Exception as error:  # noqa: BLE001 - whatever a component does, others must go on
            if len(batch) == 1:
                return [self._note(error)]
            return [value for invocation in batch for value in self._run_batch([invocation])]
        return [
            self._save(invocation, output)
            for invocation, output in zip(batch, outputs, strict=True)
        ]

    def _save(self, invocation: _BatchedInvocation, output: Output) -> Value | InvocationError:
        if isinstance(output, BadInputError):
            return explain(output)
        try:
            return invocation.saver.save(output)
        except Exception as error:  # noqa: BLE001 - as above
            return self._note(error)

    def _note(self, error: Exception) -> InvocationError:
        return note_failure(self.name, error)


def note_failure(name: str, error: Exception) -> InvocationError:
    """Return an error as its caller shall see it, and log one that is nobody else's fault."""
    explained = explain(error)
    if explained.code == "failed":
        _LOG.error("%s failed", name, exc_info=error)
    return explained


class StreamWorker(ComponentWorker):
    """Runs streams of a component in the loop, as many as come up to a limit."""

    def __init__(self, name: str, component: StreamComponent, max_waiting: int) -> None:
        super().__init__(name, component, max_waiting)
        self._streamed = component

    @property
    def waiting(self) -> int:
        """None: the component has its own queue, whose length it does not tell."""
        return 0

    async def start(self) -> None:
        """Begin to work."""
        await self._streamed.start()

    async def run(self, inputs: Inputs, saver: Saver, emit: Emit) -> InvocationEnd:
        """Emit the pieces of a stream, and return its end."""
        if self.running >= self._max_waiting:
            raise self._refuse()
        started_s = time.monotonic()
        self.running += 1
        if self.busy_since_s is None:
            self.busy_since_s = started_s
        # A cancellation is no Exception: it is what remains if nothing else is said.
        outcome = "cancelled"
        try:
            value = await self._follow(inputs, saver, emit)
            outcome = "ok"
        except Exception as error:
            explained = note_failure(self.name, error)
            outcome = explained.code
            raise explained from error
        finally:
            self.running -= 1
            if not self.running:
                self.busy_since_s = None
            ran_s = time.monotonic() - started_s
            self.figures.count(outcome, 0.0)
            self.figures.count_batch(1, ran_s)
            # A component that finds fault with an input works.
            if outcome == "bad_input":
                self._progress()
        return InvocationEnd(value, 0.0, ran_s, 1)

    async def _follow(self, inputs: Inputs, saver: Saver, emit: Emit) -> Value:
        for name in inputs:
            # Most components leave what they do not know unread, and nobody would notice.
            if name in ANSWER_FIELDS and ANSWER_FIELDS[name] not in self._streamed.obeys:
                raise BadInputError(f"{name}: {self.name} does not obey it; leave it out", name)
        stream = self._streamed.stream(inputs)
        try:
            async for piece in stream:
                self._progress()
                if isinstance(piece, Done):
                    return await self._save(saver, piece.value)
                await emit(await self._save(saver, piece))
        finally:
            # Left half way, it must stop now, not when it is collected.
            close = getattr(stream, "aclose", None)
            if close is not None:
                await close()
        raise ValueError("the stream ended without Done")

    def _progress(self) -> None:
        now_s = time.monotonic()
        self.answered_s = now_s
        if self.running:
            self.busy_since_s = now_s

    @staticmethod
    async def _save(saver: Saver, output: Output) -> Value:
        if count_array_bytes(output) > _SAVED_AT_ONCE_BYTES:
            return await asyncio.to_thread(saver.save, output)
        return saver.save(output)


def make_worker(
    name: str, component: LoadedComponent, max_waiting: int, threads: Executor
) -> ComponentWorker:
    """Return what runs a component."""
    if isinstance(component, BatchComponent):
        return BatchWorker(name, component, max_waiting, threads)
    if isinstance(component, StreamComponent):
        return StreamWorker(name, component, max_waiting)
    raise TypeError(f"{name} neither batches nor streams")


_Item = TypeVar("_Item", bound=Hashable)


class BatchQueue(Generic[_Item]):
    """Queue of a component. The oldest always runs next, with others of its key behind it.

    Nobody is overtaken but by those who ride along with an older one, so nobody starves.
    """

    def __init__(self, max_batch: int, max_waiting: int) -> None:
        if max_batch < 1:
            raise ValueError("a batch has at least one")
        self._max_batch = max_batch
        self._max_waiting = max_waiting
        # Ordered by arrival, and left from the middle without a search.
        self._waiting: OrderedDict[_Item, object] = OrderedDict()

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @property
    def is_full(self) -> bool:
        """Whether no more may wait."""
        return len(self._waiting) >= self._max_waiting

    def add(self, item: _Item, key: object) -> None:
        """Have one wait; `key` is what it must share with those it runs with."""
        if self.is_full:
            raise OverflowError("the queue is full")
        self._waiting[item] = key

    def drop(self, item: _Item) -> bool:
        """Have one wait no more; False if it did not."""
        if item not in self._waiting:
            return False
        del self._waiting[item]
        return True

    def take(self) -> list[_Item]:
        """Return those that run next, in order of arrival; none if none waits."""
        batch: list[_Item] = []
        first: object = None
        for item, key in self._waiting.items():
            if not batch:
                first = key
            elif key != first:
                continue
            batch.append(item)
            if len(batch) == self._max_batch:
                break
        for item in batch:
            del self._waiting[item]
        return batch
