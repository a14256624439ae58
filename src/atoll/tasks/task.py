"""Tasks: units that run one component, and composites that put units together in plain Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from atoll.tasks.cutting import Cutter
from atoll.tasks.values import Value

In = TypeVar("In")
Out = TypeVar("Out")


class UnitTask:
    """One component. Calling it records an invocation and returns a placeholder for what it will give."""

    def __init__(
        self, component: str, *, streams: bool = False, cut: Callable[[], Cutter] | None = None
    ) -> None:
        self.component = component
        self.streams = streams
        self.cut = cut

    def __call__(self, **inputs: Any) -> Any:
        """Record an invocation; inputs by name, placeholders among them."""
        raise NotImplementedError

    def take(self, piece: Value) -> Value:
        """Return what a piece of the component's stream is to the task."""
        return piece

    def gather(self, pieces: list[Value]) -> Value:
        """Return a whole stream as one value: texts joined, else a list."""
        raise NotImplementedError


class Task(Generic[In, Out]):
    """A composite task. Subclasses make their units in `setup` and put them together in `invoke`."""

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.options: Mapping[str, Any] = dict(options or {})
        self.setup()

    def setup(self) -> None:
        """Make the units, once; `self.options` is what the service says."""

    def invoke(self, request: In) -> Out:
        """Answer a request. Run several times for one request: it must do the same each time."""
        raise NotImplementedError

    def __call__(self, request: In) -> Out:
        """Do this task as a part of another."""
        return self.invoke(request)


def choose(n: int, weights: Sequence[float] | None = None) -> int:
    """Draw one of 0..n-1, once per request."""
    raise NotImplementedError
