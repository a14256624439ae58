"""Tasks: units that run one component, and composites that put units together in plain Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import index
from typing import Any, ClassVar, Generic, TypeVar

from atoll.core.errors import InputError
from atoll.tasks.cutting import Cutter
from atoll.tasks.task_asker import CURRENT, current
from atoll.tasks.values import Value, join_pieces

In = TypeVar("In")
Out = TypeVar("Out")


class UnitTask:
    """One component. Calling it records an invocation and returns a placeholder for what it will give.

    component: its name in the registry. streams: it answers in pieces, and the placeholder is a stream. cut:
    makes what cuts a stream that is given to it; then it is invoked once for every piece, and the answers are
    a stream again, in order. Without `cut`, a stream is gathered first.
    """

    __slots__ = ("__dict__", "component", "cut", "streams")

    def __init__(
        self, component: str, *, streams: bool = False, cut: Callable[[], Cutter] | None = None
    ) -> None:
        if not component:
            raise InputError("a unit task names the component it runs", field="component")
        if streams and cut is not None:
            raise InputError(
                f"{component}: a task that cuts streams cannot stream itself", field="cut"
            )
        self.component = component
        self.streams = streams
        self.cut = cut

    def __call__(self, **inputs: Any) -> Any:
        """Record an invocation; inputs by name, placeholders anywhere in them."""
        calls = CURRENT.get(None) or current()
        return calls.call(self, inputs, self.cut is not None)

    def make_cutter(self) -> Cutter | None:
        """Return what cuts one stream for it, or None if it takes streams whole."""
        return None if self.cut is None else self.cut()

    def take(self, piece: Value) -> Value:
        """Return what a piece of the component's stream, or of its answers to a cut one, is to the task."""
        return piece

    def gather(self, pieces: list[Value]) -> Value:
        """Return a whole stream as one value: texts joined, else a list."""
        return join_pieces(pieces)


class Task(Generic[In, Out]):
    """A composite task. Subclasses make their units in `setup` and put them together in `invoke`.

    obeys: which of "tools", "response_format", "logprobs" and "n" of a chat it obeys, by handing `Turn.form`
    to the component that answers and adding `Turn.choice` to its seed; the others are refused by name.
    """

    obeys: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.options: Mapping[str, Any] = dict(options or {})
        self.setup()

    def setup(self) -> None:
        """Make the units, once; `self.options` is what the service says."""

    def invoke(self, request: In) -> Out:
        """Answer a request: plain Python over placeholders.

        It is run again whenever it looked at something that was not there yet, so it must do the same each
        time: depend on the request, on results and on `choose` only, and change nothing.
        """
        raise NotImplementedError(f"{type(self).__name__} has no invoke")

    def __call__(self, request: In) -> Out:
        """Do this task as a part of another."""
        return self.invoke(request)


def choose(n: int, weights: Sequence[float] | None = None) -> int:
    """Draw one of 0..n-1, all alike or by weight: once for a request, from its seed."""
    given = None if weights is None else tuple(map(float, weights))
    return current().choose(index(n), given)


def as_stream(*pieces: Any) -> Any:
    """Return a stream of values, known or pending, as for a task that cuts its input."""
    return current().give(pieces)


def settled(values: Iterable[Any]) -> list[Any]:
    """Look at several values at once and return them; one after the other may take a round each."""
    return current().look_all(list(values))


def unit_tasks(task: Task[Any, Any]) -> dict[str, UnitTask]:
    """Return the unit tasks that a task and the tasks in it keep as attributes, by dotted name."""
    found: dict[str, UnitTask] = {}
    for name, value in vars(task).items():
        if isinstance(value, UnitTask):
            found[name] = value
        elif isinstance(value, Task):
            found |= {f"{name}.{below}": unit for below, unit in unit_tasks(value).items()}
    return found
