"""Whom the code of a task asks when it calls a unit task or makes a choice."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Protocol

from atoll.core.errors import UsageError
from atoll.tasks.cutting import Cutter
from atoll.tasks.values import Value


class UnitLike(Protocol):
    """Part of a unit task that a recording must know."""

    component: str
    streams: bool

    def make_cutter(self) -> Cutter | None:
        """Return what cuts one stream for it, or None if it takes streams whole."""
        ...

    def take(self, piece: Value) -> Value:
        """Return what a piece is to the task."""
        ...

    def gather(self, pieces: list[Value]) -> Value:
        """Return pieces as one value."""
        ...


class TaskCalls(Protocol):
    """Whom the code of a task asks: a recording, or something that does everything at once."""

    def call(self, unit: UnitLike, inputs: dict[str, Any], cuts: bool) -> Any:
        """Have a unit task done; `cuts` is whether it cuts streams."""
        ...

    def give(self, pieces: tuple[Any, ...]) -> Any:
        """Make a stream of values."""
        ...

    def choose(self, n: int, weights: tuple[float, ...] | None) -> int:
        """Draw one of n."""
        ...

    def look_all(self, values: list[Any]) -> list[Any]:
        """Return what is behind several values at once."""
        ...


CURRENT: ContextVar[TaskCalls] = ContextVar("atoll_task")
"""Whom the code that runs now asks."""


def current() -> TaskCalls:
    """Return whom the code that runs now asks."""
    try:
        return CURRENT.get()
    except LookupError:
        raise UsageError(
            "unit tasks are called, and choices made, inside the invoke of a task only"
        ) from None
