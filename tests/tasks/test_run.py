"""Runs: streams, errors, cancelling, what is written down."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import pytest

from atoll.core.errors import AtollError, InputError, UsageError
from atoll.tasks.cutting import sentences
from atoll.tasks.invocation import Final, Invocation
from atoll.tasks.mapping import READ_AHEAD
from atoll.tasks.run import AnswerEvent, Run
from atoll.tasks.task import Task, UnitTask, as_stream
from atoll.tasks.values import Value
from tests.tasks.graphs import VirtualTime


class Talk(UnitTask):
    def take(self, piece: Value) -> Value:
        assert isinstance(piece, dict)
        return piece["text"]


@dataclass
class Said:
    text: Any
    audio: Any
    note: str = "as is"


class Spoken(Task[str, Said]):
    """A text, and its sentences in capitals."""

    def setup(self) -> None:
        self.talk = Talk("talk", streams=True)
        self.speak = UnitTask("speak", cut=sentences())

    def invoke(self, request: str) -> Said:
        text = self.talk(prompt=request)
        return Said(text, self.speak(text=text, voice="heart"))


class Scripted:
    """An invoker that does what it is told: `on` names coroutines by component."""

    def __init__(self, **on: Callable[[Invocation], Any]) -> None:
        self.on = on
        self.begun: list[str] = []
        self.ended: list[str] = []

    async def call(self, invocation: Invocation) -> Value:
        self.begun.append(invocation.component)
        try:
            given: Value = await self.on[invocation.component](invocation)
            return given
        finally:
            self.ended.append(invocation.component)

    async def stream(self, invocation: Invocation) -> AsyncIterator[Value | Final]:
        self.begun.append(invocation.component)
        try:
            async for item in self.on[invocation.component](invocation):
                yield item
        finally:
            self.ended.append(invocation.component)


async def capitals(invocation: Invocation) -> Value:
    assert invocation.inputs["voice"] == "heart"
    return {"sound": str(invocation.inputs["text"]).upper()}


async def hello(invocation: Invocation) -> AsyncIterator[Value | Final]:
    for text in ("Hello ", "there. How", " are you? ", "Fine."):
        yield {"text": text, "token_ids": []}
        for _ in range(12):
            await asyncio.sleep(0)
    yield Final({"finish_reason": "stop"})


async def forever(invocation: Invocation) -> Any:
    await asyncio.get_running_loop().create_future()


async def collect(run: Run[Any]) -> list[AnswerEvent]:
    return [event async for event in run.events()]


def test_speech_begins_at_the_first_sentence() -> None:
    run = Run(Spoken(), "hi", Scripted(talk=hello, speak=capitals))
    events = asyncio.run(collect(run))
    assert [
        (event.path[0], event.value, event.last) for event in events if event.path != ("text",)
    ] == [
        ("note", "as is", True),
        ("audio", {"sound": "HELLO THERE."}, False),
        ("audio", {"sound": "HOW ARE YOU?"}, False),
        ("audio", {"sound": "FINE."}, False),
        ("audio", None, True),
    ]
    texts = [event.value for event in events if event.path == ("text",)]
    assert texts == ["Hello ", "there. How", " are you? ", "Fine.", None]
    places = [event.value for event in events]
    assert places.index({"sound": "HELLO THERE."}) < places.index("Fine.")
    assert run.rounds == 1
    outcomes = {r.invocation.component: r.outcome for r in run.records}
    assert outcomes["talk"] == {"finish_reason": "stop"}
    assert [r.invocation.piece for r in run.records if r.invocation.component == "speak"] == [
        0,
        1,
        2,
    ]
    assert all(record.started_s <= record.ended_s for record in run.records)


def test_the_result_is_everything_gathered() -> None:
    run = Run(Spoken(), "hi", Scripted(talk=hello, speak=capitals), double_check=True)
    assert asyncio.run(run.result()) == Said(
        "Hello there. How are you? Fine.",
        [{"sound": "HELLO THERE."}, {"sound": "HOW ARE YOU?"}, {"sound": "FINE."}],
    )


def test_read_ahead_is_bounded_and_answers_are_in_order() -> None:
    class Many(Task[int, Any]):
        def setup(self) -> None:
            self.speak = UnitTask("unit", cut=sentences())

        def invoke(self, request: int) -> Any:
            return self.speak(text=as_stream(*(f"Number {i}. " for i in range(request))))

    for salt in range(5):
        invoker = VirtualTime(salt)
        run = Run(Many(), 12, invoker)
        found = asyncio.run(invoker.drive(run.result()))
        assert invoker.max_running == READ_AHEAD
        by_piece = {r.invocation.piece: r.outcome for r in run.records}
        assert found == [by_piece[piece] for piece in range(12)]
        assert [r.invocation.piece for r in run.records] != list(range(12)) or salt


def test_a_stream_without_cut_is_gathered_and_may_have_several_readers() -> None:
    class Both(Task[str, Any]):
        def setup(self) -> None:
            self.talk = Talk("talk", streams=True)
            self.whole = UnitTask("whole")
            self.speak = UnitTask("speak", cut=sentences())

        def invoke(self, request: str) -> Any:
            text = self.talk(prompt=request)
            return [text, self.whole(given=[text]), self.speak(text=text, voice="heart"), len(text)]

    async def whole(invocation: Invocation) -> Value:
        return invocation.inputs

    run = Run(Both(), "hi", Scripted(talk=hello, speak=capitals, whole=whole))
    text, given, sounds, length = asyncio.run(run.result())
    assert text == "Hello there. How are you? Fine."
    assert given == {"given": [text]}
    assert len(sounds) == 3
    assert length == len(text)
    assert run.rounds == 2
    assert [r.invocation.component for r in run.records].count("talk") == 1


def test_two_streams_cannot_be_cut() -> None:
    class Two(Task[str, Any]):
        def setup(self) -> None:
            self.speak = UnitTask("speak", cut=sentences())

        def invoke(self, request: str) -> Any:
            return self.speak(text=as_stream("a"), voice=as_stream("b"))

    with pytest.raises(UsageError, match="text and voice are both streams"):
        asyncio.run(Run(Two(), "", Scripted()).result())


class Units(Task[Any, Any]):
    """A task made of a function."""

    def __init__(self, code: Callable[[Any], Any]) -> None:
        self.code = code
        super().__init__()

    def setup(self) -> None:
        self.good, self.bad, self.slow = UnitTask("good"), UnitTask("bad"), UnitTask("slow")
        self.talk = UnitTask("talk", streams=True)
        self.speak = UnitTask("speak", cut=sentences())

    def invoke(self, request: Any) -> Any:
        return self.code(self)


async def good(invocation: Invocation) -> Value:
    return {"text": "good"}


async def bad(invocation: Invocation) -> Value:
    raise ValueError("bad luck")


async def half(invocation: Invocation) -> AsyncIterator[Value | Final]:
    yield "One. "
    yield "Two. "
    raise ValueError("half way")


async def endless(invocation: Invocation) -> AsyncIterator[Value | Final]:
    while True:
        yield "More. "
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    "code",
    [
        lambda t: [t.slow(x=1), t.bad(x=1)],
        lambda t: [t.slow(x=1), str(t.bad(x=1))],
        lambda t: [t.slow(x=1), t.good(x=t.bad(x=t.good(x=1)))],
        lambda t: [t.slow(x=1), t.good(x=[t.bad(x=1)["text"]])["text"] == "a"],
        lambda t: [t.slow(x=1), t.bad(x=1), str(t.good(x=1))],
    ],
)
def test_the_first_error_that_is_needed_ends_the_run(code: Callable[[Any], Any]) -> None:
    invoker = Scripted(good=good, bad=bad, slow=forever)
    run = Run(Units(code), None, invoker)
    with pytest.raises(ValueError, match="bad luck"):
        asyncio.run(run.result())
    assert sorted(invoker.begun) == sorted(invoker.ended)  # the slow one was cancelled
    assert {r.invocation.component for r in run.records if r.error is not None} == {"bad", "slow"}


def test_an_error_that_nobody_needs_ends_nothing() -> None:
    def code(task: Any) -> Any:
        task.bad(x=1)
        task.slow(x=task.bad(x=2))
        return [str(task.good(x=1)), task.good(x=2)["text"]]

    invoker = Scripted(good=good, bad=bad, slow=forever)
    assert asyncio.run(Run(Units(code), None, invoker).result()) == ["{'text': 'good'}", "good"]
    assert "slow" not in invoker.begun


def test_what_nobody_needs_is_cancelled_at_the_end() -> None:
    def code(task: Any) -> Any:
        task.slow(x=1)
        return task.good(x=1)

    invoker = Scripted(good=good, slow=forever)
    assert asyncio.run(Run(Units(code), None, invoker).result()) == {"text": "good"}
    assert sorted(invoker.ended) == ["good", "slow"]


def test_a_stream_that_breaks_ends_the_run_after_its_pieces() -> None:
    async def speak(invocation: Invocation) -> Value:
        return invocation.inputs["text"]

    def code(task: Any) -> Any:
        text = task.talk(x=1)
        return {"text": text, "audio": task.speak(text=text)}

    events: list[Any] = []

    async def go() -> None:
        async for event in Run(Units(code), None, Scripted(talk=half, speak=speak)).events():
            events.append(event.value)  # noqa: PERF401 - up to where it breaks

    with pytest.raises(ValueError, match="half way"):
        asyncio.run(go())
    assert events[:2] == ["One. ", "Two. "]


def test_an_error_in_a_piece_ends_the_run() -> None:
    async def speak(invocation: Invocation) -> Value:
        if invocation.piece == 2:
            raise ValueError("third")
        return invocation.inputs["text"]

    invoker = Scripted(talk=endless, speak=speak)
    with pytest.raises(ValueError, match="third"):
        asyncio.run(Run(Units(lambda t: t.speak(text=t.talk(x=1))), None, invoker).result())
    assert sorted(invoker.begun) == sorted(invoker.ended)


def test_a_stream_without_its_final_is_an_error() -> None:
    async def cut_off(invocation: Invocation) -> AsyncIterator[Value | Final]:
        yield "a"

    with pytest.raises(AtollError, match="the stream of #0 talk ended without Final"):
        asyncio.run(Run(Units(lambda t: t.talk(x=1)), None, Scripted(talk=cut_off)).result())


def test_a_part_that_is_not_there_is_named() -> None:
    with pytest.raises(InputError, match=r"#0\['txet'\]: there is no such part"):
        asyncio.run(
            Run(Units(lambda t: t.good(x=t.good(x=1)["txet"])), None, Scripted(good=good)).result()
        )


def test_errors_of_the_code_end_the_run() -> None:
    def code(task: Any) -> Any:
        first = task.good(x=1)
        task.slow(x=1)
        raise KeyError(str(first["text"]))

    invoker = Scripted(good=good, slow=forever)
    with pytest.raises(KeyError, match="good"):
        asyncio.run(Run(Units(code), None, invoker).result())
    assert sorted(invoker.ended) == ["good", "slow"]


async def test_cancelling_the_result_cancels_everything() -> None:
    def code(task: Any) -> Any:
        return [task.slow(x=1), task.speak(text=task.talk(x=1))]

    invoker = Scripted(slow=forever, talk=endless, speak=forever)

    waiting = asyncio.create_task(Run(Units(code), None, invoker).result())
    for _ in range(40):
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert len(asyncio.all_tasks()) == 1
    assert sorted(invoker.begun) == sorted(invoker.ended)
    assert invoker.begun.count("speak") == READ_AHEAD


async def test_leaving_events_early_cancels_everything() -> None:
    invoker = Scripted(talk=endless, speak=forever)

    run = Run(Units(lambda t: [t.talk(x=1), t.speak(text=t.talk(x=2))]), None, invoker)
    async with aclosing(run.events()) as events:
        async for event in events:
            assert event == AnswerEvent((0,), "More. ", False)
            break
    assert len(asyncio.all_tasks()) == 1
    assert sorted(invoker.begun) == sorted(invoker.ended)


async def test_a_run_is_taken_once() -> None:
    run = Run(Units(lambda t: 1), None, Scripted())
    assert await run.result() == 1
    with pytest.raises(UsageError, match="once"):
        await run.result()


def test_only_what_is_looked_at_is_waited_for() -> None:
    def code(task: Any) -> Any:
        slow = task.slow(x=1)
        text = str(task.good(x=1)["text"])
        return [slow, task.good(x=text)]

    release = asyncio.Event()

    async def slow(invocation: Invocation) -> Value:
        await release.wait()
        return "slow"

    async def releasing(invocation: Invocation) -> Value:
        if invocation.inputs["x"] == "good":  # the second round runs while `slow` still does
            release.set()
        return {"text": "good"}

    run = Run(Units(code), None, Scripted(slow=slow, good=releasing))
    assert asyncio.run(run.result()) == ["slow", {"text": "good"}]
    assert run.rounds == 2
