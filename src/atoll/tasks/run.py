"""A request to a task, carried out: rounds of recording, and what was recorded run as soon as it can be."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from atoll.tasks.invocation import InvocationRecord, Invoker
from atoll.tasks.task import Task

Out = TypeVar("Out")


@dataclass(frozen=True, slots=True)
class AnswerEvent:
    """A part of the answer.

    path: which part, as field names and positions; () is the answer itself. For a stream there is an event
    for each piece and then one with `last` and no value; for everything else there is one, with `last`.
    """

    path: tuple[str | int, ...]
    value: Any
    last: bool


class Run(Generic[Out]):
    """One request to a task. Take either `result` or `events`, once."""

    def __init__(
        self,
        task: Task[Any, Out],
        request: Any,
        invoker: Invoker,
        *,
        seed: int = 0,
        double_check: bool = False,
    ) -> None:
        self.rounds = 0
        self.records: list[InvocationRecord] = []

    async def result(self) -> Out:
        """Return the whole answer, streams gathered."""
        raise NotImplementedError

    def events(self) -> AsyncIterator[AnswerEvent]:
        """Yield parts of the answer as they come; leaving early cancels everything."""
        raise NotImplementedError
