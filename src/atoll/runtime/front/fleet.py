"""What a front needs of the executors behind it, however they are reached."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from atoll.tasks.values import Handle, Value

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class ExecutorOutcome:
    """What an invocation gave, and where its time went at the executor, in seconds."""

    value: Value
    waited_s: float = 0.0
    ran_s: float = 0.0
    batch: int = 1


@dataclass(frozen=True, slots=True)
class ExecutorOrder:
    """One attempt at an invocation. Arrays of the result are leased for `lease_s`."""

    component: str
    inputs: dict[str, Value]
    request: str
    deadline_s: float
    lease_s: float


class ExecutorFleet(Protocol):
    """Executors by id. What goes wrong at one is a `TroubleError`, "lost" where it is not there."""

    def dead(self) -> frozenset[str]:
        """Return the executors that cannot be reached now."""
        ...

    def silent_s(self, executor: str) -> float:
        """Return for how many seconds an executor cannot be reached; inf if it never could."""
        ...

    async def change(self, timeout_s: float) -> None:
        """Return when an executor came back or went, or after `timeout_s`."""
        ...

    async def call(self, executor: str, order: ExecutorOrder) -> ExecutorOutcome:
        """Run an invocation; cancelled, it is cancelled there."""
        ...

    def stream(
        self, executor: str, order: ExecutorOrder
    ) -> AsyncGenerator[Value | ExecutorOutcome, None]:
        """Run an invocation that gives pieces and then its outcome."""
        ...

    async def queue(self, executor: str, component: str) -> int:
        """Return how many invocations wait or run there."""
        ...

    async def fetch(self, handle: Handle) -> NDArray[Any]:
        """Return an array, from its file on the same host, else over the wire."""
        ...

    async def renew(self, executor: str, handles: Sequence[Handle], lease_s: float) -> None:
        """Say that arrays are still needed; nothing where the executor is gone."""
        ...

    async def release(self, executor: str, handles: Sequence[Handle]) -> None:
        """Say that arrays are needed no more; where the executor is gone, its leases run out."""
        ...
