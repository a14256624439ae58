"""One run of a component that a task asked for, and who runs it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from atoll.tasks.values import Value


@dataclass(frozen=True, slots=True)
class Invocation:
    """A component and everything it is to be run with.

    number: the position in what the task asked for. piece: which piece of a cut stream it is for, counted
    from 0; None where nothing was cut. inputs: values by name, no placeholders. streams: whether the answer
    comes in pieces.
    """

    number: int
    piece: int | None
    component: str
    inputs: dict[str, Value]
    streams: bool


@dataclass(frozen=True, slots=True)
class Final:
    """The last thing that comes of a stream: what is known of the whole."""

    value: Value


class Invoker(Protocol):
    """Who runs invocations. Cancelling a call, or leaving a stream, must stop the work."""

    async def call(self, invocation: Invocation) -> Value:
        """Run a component that answers whole."""
        ...

    def stream(self, invocation: Invocation) -> AsyncIterator[Value | Final]:
        """Run a component that answers in pieces: the pieces, then one `Final`."""
        ...


@dataclass(slots=True)
class InvocationRecord:
    """Outcome of an invocation, written when it ended; times in seconds of `time.monotonic`.

    outcome: what `call` returned, or the value of `Final`. error: why there is none.
    """

    invocation: Invocation
    started_s: float
    ended_s: float
    outcome: Value = None
    error: BaseException | None = None
