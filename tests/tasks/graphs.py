"""Random programs over tasks, components that only count, and invokers whose time is virtual."""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar
from zlib import crc32

from hypothesis import strategies as st

from atoll.tasks.invocation import Final, Invocation
from atoll.tasks.task import Task, UnitTask, as_stream, choose, settled
from atoll.tasks.values import Value

T = TypeVar("T")


# What components give: a number that depends on everything they were given.


def answer(invocation: Invocation) -> Value:
    """Return what a component gives: {"v": number}, or the pieces of a stream."""
    number = crc32(repr((invocation.component, sorted(invocation.inputs.items()))).encode())
    if invocation.streams:
        return [f"{(number >> i) % 7}{'. ' if i % 2 else ' or '}" for i in range(number % 6)]
    return {"v": number % 1000, "also": [number % 3]}


class VirtualTime:
    """An invoker whose invocations take virtual time: one ends at a time, in an order of its own."""

    def __init__(self, salt: int = 0) -> None:
        self.now = 0.0
        self.made: list[Invocation] = []
        self.cancelled: list[Invocation] = []
        self.max_running = 0
        self._running = 0
        self._salt = salt
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._count = 0

    def duration(self, invocation: Invocation, step: int = 0) -> float:
        """Return how long an invocation takes, in virtual seconds."""
        return duration(self._salt, invocation.number, invocation.piece, step)

    async def call(self, invocation: Invocation) -> Value:
        self.made.append(invocation)
        with _Counted(self, invocation):
            await self._wait(self.duration(invocation))
        return answer(invocation)

    async def stream(self, invocation: Invocation) -> AsyncIterator[Value | Final]:
        self.made.append(invocation)
        pieces = answer(invocation)
        assert isinstance(pieces, list)
        with _Counted(self, invocation):
            for step, piece in enumerate(pieces):
                await self._wait(self.duration(invocation, step))
                yield piece
        yield Final({"pieces": len(pieces)})

    async def _wait(self, seconds: float) -> None:
        future = asyncio.get_running_loop().create_future()
        self._count += 1
        heapq.heappush(self._waiting, (self.now + seconds, self._count, future))
        await future

    async def drive(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something to its end, letting time pass whenever nothing else can happen."""
        task = asyncio.create_task(work)
        while True:
            for _ in range(
                16
            ):  # turns of the loop that one event may take to be heard of everywhere
                await asyncio.sleep(0)
            if task.done():
                return task.result()
            while True:
                assert self._waiting, "nothing runs and nobody waits: stuck"
                self.now, _, future = heapq.heappop(self._waiting)
                if not future.done():
                    break
            future.set_result(None)


class _Counted:
    def __init__(self, owner: VirtualTime, invocation: Invocation) -> None:
        self.owner = owner
        self.invocation = invocation

    def __enter__(self) -> None:
        self.owner._running += 1
        self.owner.max_running = max(self.owner.max_running, self.owner._running)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.owner._running -= 1
        if kind is not None and issubclass(kind, asyncio.CancelledError | GeneratorExit):
            self.owner.cancelled.append(self.invocation)


def duration(salt: int, number: int, piece: int | None, step: int = 0) -> float:
    """Return a time from 1 to 100 that no two share."""
    return 1 + 99 * random.Random(f"{salt} {number} {piece} {step}").random()


# Programs: what they do is data, and who does it is said when they run.


@dataclass(frozen=True)
class Op:
    """A step of a program. refs: which earlier values it uses, counted from the last."""

    kind: str
    refs: tuple[int, ...] = ()
    constant: int = 0
    blocks: tuple[tuple[Op, ...], ...] = ()


@dataclass
class Box:
    """Something that values hide in."""

    name: str
    inside: Any


class Doer:
    """What a program needs: done with unit tasks here, otherwise in tests."""

    def __init__(self, task: Program) -> None:
        self.task = task

    def call(self, inputs: dict[str, Any]) -> Any:
        return self.task.unit(**inputs)

    def stream(self, inputs: dict[str, Any]) -> Any:
        return self.task.talk(**inputs)

    def cut(self, source: Any, other: Any) -> Any:
        return self.task.map(text=source, other=other)

    def give(self, values: list[Any]) -> Any:
        return as_stream(*values)

    def number(self, value: Any) -> int:
        """Look at a value, whatever it is."""
        return crc32(str(value).encode()) % 5

    def numbers(self, values: list[Any]) -> int:
        return crc32(str(settled(values)).encode()) % 5

    def part(self, value: Any) -> Any:
        return value["v"]

    def choose(self, n: int) -> int:
        return choose(n, [1.0 + i for i in range(n)])


class WordCutter:
    """Cuts at spaces."""

    def __init__(self) -> None:
        self.text = ""

    def feed(self, piece: Value) -> list[Value]:
        *whole, self.text = (self.text + str(piece)).split(" ")
        return [word for word in whole if word]

    def finish(self) -> list[Value]:
        return [self.text] if self.text else []


class Program(Task[tuple[Op, ...], Any]):
    """A task that does what its request says."""

    def setup(self) -> None:
        self.unit = UnitTask("unit")
        self.talk = UnitTask("talk", streams=True)
        self.map = UnitTask("map", cut=WordCutter)

    def invoke(self, request: tuple[Op, ...]) -> Any:
        values: list[Any] = []
        execute(request, values, Doer(self))
        return {"all": values[-4:], "first": Box("first", values[:1])}


class Nested(Task[tuple[Op, ...], Any]):
    """A program in a task in a task."""

    def setup(self) -> None:
        self.inner = Program()

    def invoke(self, request: tuple[Op, ...]) -> Any:
        once = self.inner(request[:2])
        return [once, self.inner(request)]


def execute(program: tuple[Op, ...], values: list[Any], doer: Doer) -> None:
    """Do the steps of a program; what they make is appended to `values`."""
    for op in program:
        used = [values[-1 - ref % len(values)] for ref in op.refs] if values else []
        STEPS[op.kind](op, used, values, doer)


def _call(op: Op, used: list[Any], values: list[Any], doer: Doer) -> None:
    inputs: dict[str, Any] = {"constant": op.constant}
    shapes: list[Callable[[list[Any]], Any]] = [
        lambda given: given[0],
        list,
        lambda given: {"a": given, "b": {"c": given[0]}},
        lambda given: Box("box", given),
    ]
    if used:
        inputs["given"] = shapes[op.constant % 4](used)
    values.append(doer.call(inputs))


def _part(op: Op, used: list[Any], values: list[Any], doer: Doer) -> None:
    plain = doer.call({"constant": op.constant})
    values.append(doer.call({"part": doer.part(plain), "also": used}))


def _stream(op: Op, used: list[Any], values: list[Any], doer: Doer) -> None:
    values.append(doer.stream({"constant": op.constant, "given": used}))


def _cut(op: Op, used: list[Any], values: list[Any], doer: Doer) -> None:
    source = doer.stream({"constant": op.constant})
    values.append(source)
    values.append(doer.cut(source, used))


def _give(op: Op, used: list[Any], values: list[Any], doer: Doer) -> None:
    values.append(doer.cut(doer.give(["so it", " is ", f"{op.constant}"]), used))


def _branch(op: Op, used: list[Any], values: list[Any], doer: Doer) -> None:
    taken = doer.number(used[0]) % 2 if used else 0
    execute(op.blocks[taken], values, doer)


def _loop(op: Op, used: list[Any], values: list[Any], doer: Doer) -> None:
    for _ in range(2):
        last = doer.call({"constant": op.constant, "given": values[-1:]})
        values.append(last)
        if doer.number(last) % 2:
            break
        execute(op.blocks[0], values, doer)


def _settle(op: Op, used: list[Any], values: list[Any], doer: Doer) -> None:
    values.append(doer.numbers(used))


def _choose(op: Op, used: list[Any], values: list[Any], doer: Doer) -> None:
    drawn = doer.choose(2 + op.constant % 3)
    values.append(drawn)
    execute(op.blocks[drawn % 2], values, doer)


STEPS: dict[str, Callable[[Op, list[Any], list[Any], Doer], None]] = {
    "call": _call,
    "part": _part,
    "stream": _stream,
    "cut": _cut,
    "give": _give,
    "branch": _branch,
    "loop": _loop,
    "settle": _settle,
    "choose": _choose,
}


def programs(
    kinds: tuple[str, ...] = tuple(STEPS), most: int = 7
) -> st.SearchStrategy[tuple[Op, ...]]:
    """Programs of these kinds of steps."""
    refs = (
        st.tuples() | st.tuples(st.integers(0, 5)) | st.tuples(st.integers(0, 5), st.integers(0, 5))
    )
    constants = st.integers(0, 99)
    simple = [kind for kind in kinds if kind not in ("branch", "loop", "choose")]
    leaf = st.builds(Op, st.sampled_from(simple), refs, constants)
    inner = st.lists(leaf, max_size=3).map(tuple)
    blocks = st.tuples(inner, inner)
    forks = [kind for kind in kinds if kind not in simple]
    fork = st.builds(Op, st.sampled_from(forks), refs, constants, blocks) if forks else leaf
    return st.lists(leaf | fork, min_size=3, max_size=most).map(tuple)
