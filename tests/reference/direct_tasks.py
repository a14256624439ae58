"""A task done at once, without placeholders: the plain meaning that runs are compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from atoll.core.errors import UsageError
from atoll.tasks.forms import snapshot as snapshot_of
from atoll.tasks.invocation import Invocation
from atoll.tasks.recording import draw, shares_of
from atoll.tasks.task import Task
from atoll.tasks.task_asker import CURRENT, UnitLike
from atoll.tasks.values import Value, join_pieces

Out = TypeVar("Out")


class WholeText(str):
    """A stream of texts that has come to its end: a text that remembers its pieces."""

    __slots__ = ("pieces",)

    pieces: list[Value]


class WholeList(list[Value]):
    """A stream that has come to its end: a list that remembers its pieces."""

    __slots__ = ("pieces",)

    pieces: list[Value]


class DirectCalls:
    """Does what the code of a task asks when it asks."""

    running = False

    def __init__(self, call: Callable[[Invocation], Value], seed: int) -> None:
        self._call = call
        self._seed = seed
        self._position = 0
        self._choices = 0

    def call(self, unit: UnitLike, inputs: dict[str, Any], cuts: bool) -> Any:
        """Invoke a component."""
        number = self._position
        self._position += 1
        streams = [name for name, value in inputs.items() if type(value) in (WholeText, WholeList)]
        plain = {name: self._plain(value) for name, value in inputs.items()}
        if not (cuts and streams):
            given = self._call(Invocation(number, None, unit.component, plain, unit.streams))
            if not unit.streams:
                return given
            return _whole([unit.take(piece) for piece in cast("list[Value]", given)], unit.gather)
        if len(streams) > 1:
            raise UsageError(f"{unit.component}: {' and '.join(streams)} are both streams")
        (name,) = streams
        cutter = unit.make_cutter()
        assert cutter is not None
        parts = [part for piece in inputs[name].pieces for part in cutter.feed(piece)]
        parts += cutter.finish()
        answers = [
            self._call(Invocation(number, at, unit.component, {**plain, name: part}, False))
            for at, part in enumerate(parts)
        ]
        return _whole([unit.take(answer) for answer in answers], unit.gather)

    def _plain(self, value: Any) -> Any:
        return snapshot_of(value, self, [])

    def look(self, number: int) -> Any:
        """There is nothing to look at: no value is pending."""
        raise UsageError(f"#{number} is a placeholder of another request")

    def look_all(self, values: list[Any]) -> list[Any]:
        """Return the values: they are all there."""
        return values

    def give(self, pieces: tuple[Any, ...]) -> Any:
        """Make a stream of values."""
        self._position += 1
        return _whole([self._plain(piece) for piece in pieces], join_pieces)

    def choose(self, n: int, weights: tuple[float, ...] | None) -> int:
        """Draw one of n."""
        shares = shares_of(n, weights)
        self._position += 1
        self._choices += 1
        return draw(self._seed, self._choices - 1, shares)


def _whole(pieces: list[Value], gather: Callable[[list[Value]], Value]) -> Any:
    value = gather(list(pieces))
    whole: WholeText | WholeList
    if isinstance(value, str):
        whole = WholeText(value)
    elif isinstance(value, list):
        whole = WholeList(value)
    else:
        return value
    whole.pieces = pieces
    return whole


def run_directly(
    task: Task[Any, Out], request: Any, call: Callable[[Invocation], Value], *, seed: int = 0
) -> Out:
    """Do a task at once and in order; for a stream, `call` returns the list of its pieces.

    Streams in the answer are texts and lists like any other.
    """
    token = CURRENT.set(DirectCalls(call, seed))
    try:
        return task.invoke(request)
    finally:
        CURRENT.reset(token)
