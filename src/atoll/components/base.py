"""Base classes of components: loaded once, then asked in batches or for streams.

A component takes and gives plain values (`atoll.tasks.values`); where a handle travels between processes, a
component sees and returns a numpy array. It knows nothing of handles, sockets or other components.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeAlias

Inputs: TypeAlias = Mapping[str, Any]
"""Inputs of one invocation: values by name, arrays as read-only numpy arrays."""
Output: TypeAlias = Any
"""Output of one invocation: a value, arrays as numpy arrays."""


class BadInputError(Exception):
    """An input that no executor could do anything with: the client's fault (400), never retried."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


@dataclass(frozen=True, slots=True)
class Setup:
    """How to load a component: `device` is "cpu" or "cuda:N", `threads` how many cores it may keep busy."""

    device: str = "cpu"
    threads: int = 1
    options: Mapping[str, Any] | None = None

    def option(self, name: str, default: Any = None) -> Any:
        """Return an option by name."""
        return (self.options or {}).get(name, default)


class LoadedComponent(ABC):
    """A part of a model, ready to run. Subclass `BatchComponent` or `StreamComponent`."""

    name: ClassVar[str]
    """How tasks, plans and executors call it."""
    obeys: ClassVar[frozenset[str]] = frozenset()
    """Which of "tools", "response_format" and "logprobs" it obeys; executors refuse it the others by name."""

    @classmethod
    @abstractmethod
    def load(cls, setup: Setup) -> Self:
        """Fetch weights where needed and load them; called once, in a thread."""

    @abstractmethod
    def example(self) -> Inputs:
        """Return small inputs that it must be able to run: the executor's proof that it is ready."""

    async def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Give back what it holds besides memory."""


class BatchComponent(LoadedComponent):
    """A component that answers whole: a batch of invocations in, as many outputs out."""

    max_batch: ClassVar[int] = 8
    """The most invocations that are run together."""

    def batch_key(self, inputs: Inputs) -> object:  # noqa: ARG002 - most may be mixed as they come
        """Return what invocations must share to be run together, as the shape of their inputs."""
        return None

    @abstractmethod
    def run(self, batch: Sequence[Inputs]) -> Sequence[Output | BadInputError]:
        """Run invocations together, in a worker thread: one output, or one error, for each.

        The output for some inputs must not depend on what else is in the batch, beyond rounding.
        """


@dataclass(frozen=True, slots=True)
class Done:
    """The last thing a stream yields: what is known of the whole."""

    value: Output


class StreamComponent(LoadedComponent):
    """A component that answers in pieces, and batches by itself."""

    async def start(self) -> None:
        """Begin whatever runs beside requests; called once in the executor's loop, before any `stream`."""

    @abstractmethod
    def stream(self, inputs: Inputs) -> AsyncIterator[Output | Done]:
        """Yield pieces and then one `Done`, in the executor's loop; left early, it stops working."""
