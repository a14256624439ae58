"""Executors in memory, for tests: each component is a function, and any executor may be told to break."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any

import numpy as np

from atoll.runtime.executor.arrays import inline, open_handle
from atoll.runtime.graph_server.executor_links import ExecutorOrder, ExecutorOutcome
from atoll.runtime.graph_server.recovery import TroubleError
from atoll.tasks.values import Handle, Value, handles_in

_TURNS = 20
"""Turns of the loop between two pieces of a stream: enough for what they set off to be done."""
Component = Callable[[dict[str, Any]], Any]
"""Takes inputs with arrays; returns an output, or an iterator over pieces whose last is ("end", value)."""


class FakeFleet:
    """Executors by id, each running all components it is given."""

    def __init__(self, executors: dict[str, dict[str, Component]]) -> None:
        self.executors = executors
        self.down: set[str] = set()
        self.script: dict[str, list[TroubleError | int]] = defaultdict(list)
        """What goes wrong next at an executor: an error, or how many pieces come before it is lost."""
        self.arrays: dict[str, tuple[str, np.ndarray[Any, Any]]] = {}
        self.calls: list[tuple[str, str]] = []
        self.released: Counter[str] = Counter()
        self.renewed: list[str] = []
        self.queues: dict[str, int] = {}
        self.waits: list[float] = []
        self.on_wait: Callable[[], None] = lambda: None
        self._ids = itertools.count(1)

    def dead(self) -> frozenset[str]:
        return frozenset(self.down)

    def silent_s(self, executor: str) -> float:
        return float("inf") if executor in self.down else 0.0

    async def change(self, timeout_s: float) -> None:
        self.waits.append(timeout_s)
        self.on_wait()

    def lose_arrays(self, executor: str) -> None:
        """Forget every array of an executor, as a crash does."""
        self.arrays = {name: kept for name, kept in self.arrays.items() if kept[0] != executor}

    def held(self) -> set[str]:
        """Return the arrays that nobody has released."""
        return set(self.arrays) - set(self.released)

    async def call(self, executor: str, order: ExecutorOrder) -> ExecutorOutcome:
        await asyncio.sleep(0)
        output = self._run(executor, order)
        await asyncio.sleep(0)
        if isinstance(output, Iterator):
            output = list(output)[-1][1]
        return ExecutorOutcome(self._put(executor, output), 0.25, 0.5, 1)

    async def stream(
        self, executor: str, order: ExecutorOrder
    ) -> AsyncGenerator[Value | ExecutorOutcome, None]:
        script = self.script[executor]
        most = script.pop(0) if script and isinstance(script[0], int) else None
        for number, piece in enumerate(self._run(executor, order)):
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            if number == most:
                raise TroubleError("lost", f"{executor} is gone")
            if isinstance(piece, tuple):
                yield ExecutorOutcome(self._put(executor, piece[1]))
                return
            yield self._put(executor, piece)

    async def queue(self, executor: str, component: str) -> int:
        del component
        return self.queues.get(executor, 0)

    async def fetch(self, handle: Handle) -> np.ndarray[Any, Any]:
        if handle.is_inline:
            return np.frombuffer(handle.data, handle.dtype).reshape(handle.shape)
        if handle.id not in self.arrays:
            raise TroubleError("lost_handle", "gone", handle=handle.id)
        return self.arrays[handle.id][1]

    async def renew(self, executor: str, handles: Sequence[Handle], lease_s: float) -> None:
        del executor, lease_s
        self.renewed += [handle.id for handle in handles]

    async def release(self, executor: str, handles: Sequence[Handle]) -> None:
        del executor
        self.released.update(handle.id for handle in handles)

    def _run(self, executor: str, order: ExecutorOrder) -> Any:
        self.calls.append((executor, order.component))
        if executor in self.down:
            raise TroubleError("lost", f"{executor} is not there")
        script = self.script[executor]
        if script and isinstance(script[0], TroubleError):
            raise script.pop(0)  # type: ignore[misc]
        for handle in handles_in(order.inputs):
            if not handle.is_inline and not handle.path and handle.id not in self.arrays:
                raise TroubleError("lost_handle", "gone", handle=handle.id)
        return self.executors[executor][order.component](self._open(order.inputs))

    def _open(self, value: Any) -> Any:
        if isinstance(value, Handle):
            if value.is_inline or value.path:
                return open_handle(value)
            return self.arrays[value.id][1]
        if isinstance(value, dict):
            return {key: self._open(part) for key, part in value.items()}
        return [self._open(part) for part in value] if isinstance(value, list) else value

    def _put(self, executor: str, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            if value.nbytes <= 16:
                return inline(value)
            name = f"{next(self._ids):032x}"
            self.arrays[name] = (executor, value)
            dtype, shape = value.dtype.name, tuple(value.shape)
            return Handle(name, executor, "", "", "", dtype, shape, 0)
        if isinstance(value, dict):
            return {key: self._put(executor, part) for key, part in value.items()}
        return [self._put(executor, part) for part in value] if isinstance(value, list) else value
