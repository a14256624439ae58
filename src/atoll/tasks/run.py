"""A request to a task, carried out: rounds of recording, and what was recorded run as soon as it can be.

Nothing waits for more than it needs. An invocation starts when its inputs are there. The code of the task
runs again when what it looked at is there, whatever else still runs. When the answer is there, what nobody
needs is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass
from time import monotonic
from typing import Any, Generic, TypeVar, cast

from atoll.core.errors import AtollError, UsageError
from atoll.tasks.entry import TaskEntry
from atoll.tasks.forms import answer_parts, fill_answer
from atoll.tasks.invocation import Final, Invocation, InvocationRecord, Invoker
from atoll.tasks.mapping import StreamMap, error_of
from atoll.tasks.pending import Path, PendingStream, is_pending
from atoll.tasks.recording import Recording
from atoll.tasks.task import Task
from atoll.tasks.values import Value, join_pieces

__all__ = ["AnswerEvent", "InvocationRecord", "Run"]

Out = TypeVar("Out")


class Run(Generic[Out]):
    """One request to a task. Take either `result` or `events`, once.

    The first error of an invocation that the answer needs, or that the code looks at, ends it with that
    error. However it ends, nothing runs on after it.
    """

    __slots__ = (
        "_advancing",
        "_changed",
        "_double_check",
        "_failure",
        "_flights",
        "_invoker",
        "_is_used",
        "_loop",
        "_needed",
        "_recording",
        "records",
    )

    def __init__(
        self,
        task: Task[Any, Out],
        request: Any,
        invoker: Invoker,
        *,
        seed: int = 0,
        double_check: bool = False,
    ) -> None:
        """Prepare a request: `seed` decides what `choose` draws, `double_check` finds side effects."""
        self.records: list[InvocationRecord] = []
        """Finished invocations, in order of their ends."""
        self._invoker = invoker
        self._double_check = double_check
        self._recording = Recording(task, request, seed)
        self._flights: set[asyncio.Task[Any]] = set()
        self._needed: set[int] = set()
        self._failure: BaseException | None = None
        self._advancing = False
        self._is_used = False
        self._loop: asyncio.AbstractEventLoop
        self._changed: asyncio.Future[None] | None = None

    @property
    def rounds(self) -> int:
        """How often the code of the task has run."""
        return self._recording.rounds

    async def result(self) -> Out:
        """Return the whole answer: streams gathered, texts joined. Cancelling it cancels everything."""
        self._begin()
        try:
            self._advance()
            while not self._is_over():
                await self._change()
            answer = self.answer()
            if self._double_check:
                self._recording.double_check()
            return answer
        finally:
            await self._stop()

    def answer(self) -> Out:
        """Return the whole answer once its last event was taken."""
        recording = self._recording
        return cast("Out", fill_answer(recording.answer, recording.value_of))

    async def events(self) -> AsyncGenerator[AnswerEvent, None]:
        """Yield the parts of the answer as they come; leaving early cancels everything."""
        self._begin()
        try:
            self._advance()
            while not self._recording.is_answered:
                self._check()
                await self._change()
            parts = AnswerParts(self._recording)
            while True:
                # Who takes an event may take its time; what came meanwhile has woken nobody.
                while events := parts.take():
                    for event in events:
                        yield event
                if self._is_over() and not parts.are_left:
                    break
                await self._change()
            if self._double_check:
                self._recording.double_check()
        finally:
            await self._stop()

    # What is under way.

    def _begin(self) -> None:
        if self._is_used:
            raise UsageError("a run gives its answer once", hint="make another Run")
        self._is_used = True
        self._loop = asyncio.get_running_loop()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _is_over(self) -> bool:
        self._check()
        return self._recording.is_answered and not self._needed

    async def _change(self) -> None:
        self._changed = self._loop.create_future()
        await self._changed

    def _wake(self) -> None:
        changed = self._changed
        if changed is not None and not changed.done():
            changed.set_result(None)

    async def _stop(self) -> None:
        flights = self._flights
        while flights:
            for flight in tuple(flights):
                flight.cancel()
            await asyncio.wait(flights)
            # Their callbacks run in the next turn of the loop, and take them off the set.
            await asyncio.sleep(0)

    def _advance(self) -> None:
        """Run the code of the task as far as it goes by what is known."""
        self._advancing = False
        recording = self._recording
        try:
            while not recording.is_answered and self._failure is None:
                if recording.replay():
                    self._note_needs()
                self._launch()
                if not self._may_go_on():
                    break
        except Exception as error:  # noqa: BLE001 - whatever the code raises is how the request ends
            self._fail(error)
        self._wake()

    def _may_go_on(self) -> bool:
        recording = self._recording
        for number in recording.awaited:
            error = recording.entries[number].error
            if error is not None:
                self._fail(error)
        return not recording.is_answered and not recording.awaited

    def _note_needs(self) -> None:
        """Note which entries the answer needs."""
        recording = self._recording
        for _, part in answer_parts(recording.answer):
            if is_pending(part):
                entry = recording.entries[part._number]
                if not entry.is_known:
                    self._needed.add(entry.number)
                    if entry.error is not None:
                        self._fail(entry.error)

    def _fail(self, error: BaseException) -> None:
        """Note what the request ends with: the first that is told."""
        if self._failure is None:
            self._failure = error
        self._wake()

    def _launch(self) -> None:
        """Start everything that can start."""
        recording = self._recording
        while recording.ready:
            # Emptied first: starting one may make others ready at once.
            ready, recording.ready = recording.ready, []
            for entry in ready:
                try:
                    inputs = recording.inputs_of(entry)
                except AtollError as error:
                    self._failed(entry.number, error)
                    continue
                unit = entry.unit
                if unit is None:
                    self._give(entry, inputs["pieces"])
                elif entry.cut_input:
                    self._fly(self._map(entry, inputs), _Flight(self, entry, None))
                else:
                    invocation = Invocation(
                        entry.number, None, unit.component, inputs, unit.streams
                    )
                    flight = _Flight(self, entry, invocation)
                    if unit.streams:
                        self._fly(self._pump(entry, invocation), flight)
                    else:
                        self._fly(self._invoker.call(invocation), flight)

    def _fly(self, work: Coroutine[Any, Any, Any], flight: _Flight) -> asyncio.Task[Any]:
        task = self._loop.create_task(work)
        self._flights.add(task)
        task.add_done_callback(flight)
        return task

    def _give(self, entry: TaskEntry, pieces: list[Value]) -> None:
        assert entry.feed is not None
        from_code = entry.feed
        for piece in pieces:
            from_code.put(piece)
        from_code.close()
        self._settled(entry.number, _gather(entry))

    async def _pump(self, entry: TaskEntry, invocation: Invocation) -> Value:
        """Move the pieces of a stream to its feed; return its final value."""
        assert entry.feed is not None
        assert entry.unit is not None
        put, take = entry.feed.put, entry.unit.take
        stream = self._invoker.stream(invocation)
        try:
            async for item in stream:
                if type(item) is Final:
                    return item.value
                put(take(cast("Value", item)))
                self._wake()
        finally:
            # Left half way, the invocation must stop now, not when the stream is collected.
            close = getattr(stream, "aclose", None)
            if close is not None:
                await close()
        raise AtollError(
            f"the stream of #{entry.number} {invocation.component} ended without Final"
        )

    async def _map(self, entry: TaskEntry, inputs: dict[str, Any]) -> None:
        """Run a component on every piece of a cut stream."""
        unit, feed = entry.unit, entry.feed
        source = self._recording.entries[entry.inputs[entry.cut_input]._number].feed
        assert unit is not None
        assert feed is not None
        assert source is not None
        cutter = unit.make_cutter()
        assert cutter is not None

        def start(piece: int, part: Value) -> asyncio.Task[Any]:
            invocation = Invocation(
                entry.number, piece, unit.component, {**inputs, entry.cut_input: part}, False
            )
            work = self._invoker.call(invocation)
            return self._fly(work, _Flight(self, None, invocation))

        def put(answer: Value) -> None:
            feed.put(unit.take(answer))
            self._wake()

        await StreamMap(source, cutter, start, put).run()

    # What comes back.

    def _landed(self, flight: _Flight, task: asyncio.Task[Any]) -> None:
        self._flights.discard(task)
        error = error_of(task)
        outcome = task.result() if error is None else None
        if flight.invocation is not None:
            self.records.append(
                InvocationRecord(flight.invocation, flight.started_s, monotonic(), outcome, error)
            )
        entry = flight.entry
        if entry is None:
            return
        # A stream settles as a whole, gathered from its pieces.
        if error is None and entry.feed is not None:
            entry.feed.close()
            try:
                outcome = _gather(entry)
            except Exception as bad:  # noqa: BLE001 - whatever `gather` says, the value is not there
                error = bad
        if error is not None:
            self._failed(entry.number, error)
        else:
            self._settled(entry.number, outcome)

    def _settled(self, number: int, value: Any) -> None:
        recording = self._recording
        recording.settle(number, value)
        # After a failure nothing new is started.
        if recording.ready and self._failure is None:
            self._launch()
        if recording.wanted and not recording.awaited:
            self._advance_soon()
        if number in self._needed:
            self._needed.discard(number)
            self._wake()

    def _failed(self, number: int, error: BaseException) -> None:
        recording = self._recording
        recording.fail(number, error)
        # A failure that neither the answer nor the code needs does not end the request.
        for other in (*self._needed, *recording.awaited):
            if recording.entries[other].error is not None:
                self._fail(error)
                return

    def _advance_soon(self) -> None:
        # Not at once: what else comes in this turn of the loop is then known to the round.
        if not self._advancing:
            self._advancing = True
            self._loop.call_soon(self._advance)


class _Flight:
    """Purpose of a task of the event loop; called when it has ended."""

    __slots__ = ("entry", "invocation", "run", "started_s")

    def __init__(
        self, run: Run[Any], entry: TaskEntry | None, invocation: Invocation | None
    ) -> None:
        self.run = run
        self.entry = entry
        self.invocation = invocation
        self.started_s = monotonic()

    def __call__(self, task: asyncio.Task[Any]) -> None:
        self.run._landed(self, task)


def _gather(entry: TaskEntry) -> Value:
    assert entry.feed is not None
    gather = join_pieces if entry.unit is None else entry.unit.gather
    return gather(list(entry.feed.pieces))


@dataclass(frozen=True, slots=True)
class AnswerEvent:
    """A part of the answer.

    path: which part, as field names and positions; () is the answer itself. For a stream there is an event
    for each piece and then one with `last` and no value; for everything else there is one, with `last`.
    """

    path: Path
    value: Any
    last: bool


class AnswerParts:
    """The parts of an answer that were not given out yet, in the order of the answer."""

    __slots__ = ("_left", "_recording")

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._left = [_AnswerPart(path, value) for path, value in answer_parts(recording.answer)]

    @property
    def are_left(self) -> bool:
        """Whether something is still to come."""
        return bool(self._left)

    def take(self) -> list[AnswerEvent]:
        """Return what has come since."""
        events: list[AnswerEvent] = []
        self._left = [part for part in self._left if not self._take_from(part, events)]
        return events

    def _take_from(self, part: _AnswerPart, events: list[AnswerEvent]) -> bool:
        """Add what has come of a part; return whether that is all."""
        value = part.value
        if not is_pending(value):
            events.append(AnswerEvent(part.path, value, True))
            return True
        entry = self._recording.entries[value._number]
        whole: bool = entry.is_known
        if type(value) is PendingStream and entry.feed is not None:
            pieces = entry.feed.pieces
            events.extend(AnswerEvent(part.path, piece, False) for piece in pieces[part.given :])
            part.given = len(pieces)
            if whole:
                events.append(AnswerEvent(part.path, None, True))
        elif whole:
            events.append(AnswerEvent(part.path, self._recording.value_of(value), True))
        return whole


class _AnswerPart:
    __slots__ = ("given", "path", "value")

    def __init__(self, path: Path, value: Any) -> None:
        self.path = path
        self.value = value
        self.given = 0
