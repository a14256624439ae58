"""Tiny components: nothing to fetch, and something to break."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from atoll.components.base import (
    BadInputError,
    BatchComponent,
    Done,
    Inputs,
    Output,
    Setup,
    StreamComponent,
)


class Doubler(BatchComponent):
    """Doubles an array; sleeps, breaks or complains on demand."""

    name: ClassVar[str] = "doubler"
    max_batch: ClassVar[int] = 4

    def __init__(self, setup: Setup) -> None:
        self.factor = float(setup.option("factor", 2.0))

    @classmethod
    def load(cls, setup: Setup) -> Self:
        return cls(setup)

    def example(self) -> Inputs:
        return {"array": np.ones(3, np.float32)}

    def batch_key(self, inputs: Inputs) -> object:
        return inputs.get("key")

    def run(self, batch: Sequence[Inputs]) -> Sequence[Output | BadInputError]:
        return [self._one(inputs) for inputs in batch]

    def _one(self, inputs: Inputs) -> Output | BadInputError:
        if inputs.get("sleep_s"):
            time.sleep(inputs["sleep_s"])
        if inputs.get("broken"):
            raise ValueError("broken\nas asked")
        array: Any = inputs.get("array")
        if not isinstance(array, np.ndarray):
            return BadInputError("there must be an array", "array")
        return {"array": array * np.float32(self.factor), "writable": bool(array.flags.writeable)}


class Passer(BatchComponent):
    """Returns what it is given."""

    name: ClassVar[str] = "passer"

    @classmethod
    def load(cls, setup: Setup) -> Self:
        del setup
        return cls()

    def example(self) -> Inputs:
        return {}

    def run(self, batch: Sequence[Inputs]) -> Sequence[Output | BadInputError]:
        return [dict(inputs) for inputs in batch]


class Unable(BatchComponent):
    """Loads, and cannot run its example."""

    name: ClassVar[str] = "stuck"

    @classmethod
    def load(cls, setup: Setup) -> Self:
        del setup
        return cls()

    def example(self) -> Inputs:
        return {}

    def run(self, batch: Sequence[Inputs]) -> Sequence[Output | BadInputError]:
        raise RuntimeError("no weights")


class NumberStream(StreamComponent):
    """Counts, with an array for each number where asked; `left` says how many streams were left early."""

    name: ClassVar[str] = "counter"
    left: ClassVar[int] = 0
    started: ClassVar[threading.Event] = threading.Event()

    @classmethod
    def load(cls, setup: Setup) -> Self:
        del setup
        return cls()

    def example(self) -> Inputs:
        return {"to": 1}

    async def start(self) -> None:
        self.started.set()

    async def stream(self, inputs: Inputs) -> AsyncIterator[Output | Done]:
        done = False
        try:
            for number in range(int(inputs["to"])):
                if number == inputs.get("breaks_at"):
                    raise RuntimeError("out of numbers")
                array = np.full(int(inputs.get("size", 0)), number, np.float32)
                yield {"number": number, "array": array}
                await asyncio.sleep(float(inputs.get("pause_s", 0.0)))
            done = True
            yield Done({"count": int(inputs["to"])})
        finally:
            if not done:
                type(self).left += 1
