"""Recorded and replayed, a task gives what it gives run directly: random programs over virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from atoll.tasks.invocation import Invocation
from atoll.tasks.recording import Recording
from atoll.tasks.run import Run
from atoll.tasks.values import Value
from tests.reference.direct_tasks import run_directly
from tests.seeds import examples
from tests.tasks.graphs import (
    Doer,
    Nested,
    Op,
    Program,
    VirtualTime,
    answer,
    duration,
    execute,
    programs,
)

quick = examples(50)
LOOKING = ("call", "part", "branch", "loop", "settle")


def key(invocation: Invocation) -> tuple[Any, ...]:
    return (
        invocation.number,
        invocation.piece,
        invocation.component,
        repr(sorted(invocation.inputs.items())),
    )


@quick
@given(programs(), st.integers(0, 1000), st.booleans())
def test_a_run_gives_what_the_plain_code_gives(
    program: tuple[Op, ...], salt: int, nested: bool
) -> None:
    task = Nested() if nested else Program()
    direct: list[Invocation] = []

    def call(invocation: Invocation) -> Value:
        direct.append(invocation)
        return answer(invocation)

    expected = run_directly(task, program, call, seed=salt)
    invoker = VirtualTime(salt)
    run = Run(task, program, invoker, seed=salt, double_check=True)
    found = asyncio.run(invoker.drive(run.result()))
    assert found == expected
    made = [key(invocation) for invocation in invoker.made]
    assert len(made) == len(set(made))  # nothing is run twice
    assert set(made) <= {key(invocation) for invocation in direct}
    assert sorted(key(record.invocation) for record in run.records) == sorted(made)


@quick
@given(programs(), st.integers(0, 1000))
def test_events_add_up_to_the_result(program: tuple[Op, ...], salt: int) -> None:
    expected = run_directly(Program(), program, answer, seed=salt)
    invoker = VirtualTime(salt)
    run = Run(Program(), program, invoker, seed=salt)

    async def collect() -> dict[tuple[str | int, ...], list[Any]]:
        parts: dict[tuple[str | int, ...], list[Any]] = {}
        ended: set[tuple[str | int, ...]] = set()
        async for event in run.events():
            assert event.path not in ended
            parts.setdefault(event.path, [])
            if event.last:
                ended.add(event.path)
            if event.value is not None:
                parts[event.path].append(event.value)
        assert ended == set(parts)
        return parts

    parts = asyncio.run(invoker.drive(collect()))
    for path, pieces in parts.items():
        whole: Any = expected
        for step in path:
            plain = type(whole) in (dict, list)
            whole = whole[step] if plain else getattr(whole, str(step))
        if whole == [] or (pieces and all(isinstance(piece, str) for piece in pieces)):
            assert "".join(str(piece) for piece in pieces if piece != []) == (whole or "")
        else:
            assert pieces == [whole] or pieces == whole


class Timed:
    """A value of the model: when it is there."""

    def __init__(self, value: Any, end_s: float) -> None:
        self.value = value
        self.end_s = end_s


class Model(Doer):
    """What must happen, without placeholders: what is known when, and how often the code runs."""

    def __init__(self, salt: int) -> None:
        self.salt = salt
        self.now_s = 0.0
        self.rounds = 1
        self.position = 0

    def call(self, inputs: dict[str, Any]) -> Any:
        ends: list[float] = [self.now_s]
        plain = {name: self.open(value, ends) for name, value in inputs.items()}
        number = self.position
        self.position += 1
        value = answer(Invocation(number, None, "unit", plain, False))
        return Timed(value, max(ends) + duration(self.salt, number, None))

    def open(self, value: Any, ends: list[float]) -> Any:
        if isinstance(value, Timed):
            ends.append(value.end_s)
            return value.value
        if isinstance(value, list | tuple):
            return [self.open(item, ends) for item in value]
        if isinstance(value, dict):
            return {name: self.open(item, ends) for name, item in value.items()}
        if hasattr(value, "inside"):
            return {"name": value.name, "inside": self.open(value.inside, ends)}
        return value

    def wait(self, ends: list[float]) -> None:
        if ends and max(ends) > self.now_s:
            self.now_s = max(ends)
            self.rounds += 1

    def number(self, value: Any) -> int:
        ends: list[float] = []
        plain = self.open(value, ends)
        self.wait(ends)
        return Doer.number(self, plain)

    def numbers(self, values: list[Any]) -> int:
        ends: list[float] = []
        plain = [self.open(value, ends) for value in values]
        self.wait(ends)
        return Doer.number(self, plain)

    def part(self, value: Any) -> Any:
        return Timed(value.value["v"], value.end_s)


@quick
@given(programs(LOOKING), st.integers(0, 1000))
def test_rounds_are_as_few_and_as_early_as_can_be(program: tuple[Op, ...], salt: int) -> None:
    model = Model(salt)
    values: list[Any] = []
    execute(program, values, model)
    needed: list[float] = []
    model.open([values[-4:], values[:1]], needed)
    invoker = VirtualTime(salt)
    run = Run(Program(), program, invoker)
    asyncio.run(invoker.drive(run.result()))
    assert run.rounds == model.rounds
    assert invoker.now == max([model.now_s, *needed])


class Depths(Model):
    """The longest chain of looks: what was recorded before a look is there after it."""

    def call(self, inputs: dict[str, Any]) -> Any:
        value = super().call(inputs).value
        return Timed(value, float(self.rounds))

    def wait(self, ends: list[float]) -> None:
        self.rounds = max([self.rounds, *(int(end) + 1 for end in ends)])


@quick
@given(programs(LOOKING))
def test_with_all_results_at_hand_rounds_are_the_longest_chain_of_looks(
    program: tuple[Op, ...],
) -> None:
    model = Depths(0)
    values: list[Any] = []
    execute(program, values, model)
    recording = Recording(Program(), program)
    while not recording.replay():
        while recording.ready:
            ready, recording.ready = recording.ready, []
            for entry in ready:
                inputs = recording.inputs_of(entry)
                recording.settle(entry.number, answer(Invocation(0, None, "unit", inputs, False)))
    assert recording.rounds == model.rounds
