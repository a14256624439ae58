from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, Self

import numpy as np
import pytest

from atoll.components.base import BatchComponent, Inputs, Output, Setup
from atoll.runtime.executor.executor_client import InvocationError
from atoll.runtime.executor.workers import BatchWorker, StreamWorker
from atoll.tasks.values import Value
from tests.runtime.executor.toys import NumberStream


class SizeTeller(BatchComponent):
    """Says how large each batch was; leaves on demand."""

    name: ClassVar[str] = "size-teller"
    max_batch: ClassVar[int] = 4

    @classmethod
    def load(cls, setup: Setup) -> Self:
        del setup
        return cls()

    def example(self) -> Inputs:
        return {}

    def run(self, batch: Sequence[Inputs]) -> Sequence[Output]:
        if any(inputs.get("leave") for inputs in batch):
            raise SystemExit(3)
        return [{"batch": len(batch), "n": inputs.get("n")} for inputs in batch]


class PlainSaver:
    abandoned = False

    def save(self, output: Output) -> Value:
        value: Value = output
        return value


async def _ignore(piece: Value) -> None:
    del piece


def _with_worker(work: Callable[[BatchWorker, ThreadPoolExecutor], Awaitable[None]]) -> None:
    async def main() -> None:
        with ThreadPoolExecutor(1) as threads:
            worker = BatchWorker("teller", SizeTeller.load(Setup()), 100, threads)
            await worker.start()
            await work(worker, threads)
            await worker.close()

    asyncio.run(main())


def test_what_comes_together_runs_together() -> None:
    async def work(worker: BatchWorker, threads: ThreadPoolExecutor) -> None:
        del threads
        calls = [worker.run({"n": n}, PlainSaver(), _ignore) for n in range(6)]
        ends = await asyncio.gather(*calls)
        assert [end.value for end in ends] == [
            {"batch": 4 if n < 4 else 2, "n": n} for n in range(6)
        ]
        assert (worker.waiting, worker.running, worker.busy_since_s) == (0, 0, None)

    _with_worker(work)


def test_a_component_that_would_exit_has_failed_and_works_on() -> None:
    async def work(worker: BatchWorker, threads: ThreadPoolExecutor) -> None:
        del threads
        with pytest.raises(InvocationError, match="SystemExit") as caught:
            await worker.run({"leave": True}, PlainSaver(), _ignore)
        assert caught.value.code == "failed"
        assert (await worker.run({}, PlainSaver(), _ignore)).batch == 1

    _with_worker(work)


def test_threads_that_are_shut_down_answer_all_the_same() -> None:
    async def work(worker: BatchWorker, threads: ThreadPoolExecutor) -> None:
        threads.shutdown()
        with pytest.raises(InvocationError, match="RuntimeError"):
            await worker.run({}, PlainSaver(), _ignore)
        assert worker.running == 0

    _with_worker(work)


def test_inputs_are_let_go_before_the_answer_comes() -> None:
    async def work(worker: BatchWorker, threads: ThreadPoolExecutor) -> None:
        del threads
        for _ in range(20):
            array = np.zeros(3)
            gone = weakref.ref(array)
            running = asyncio.ensure_future(worker.run({"array": array}, PlainSaver(), _ignore))
            del array
            await running
            assert gone() is None

    _with_worker(work)


async def test_a_component_is_not_asked_what_it_would_leave_unread() -> None:
    worker = StreamWorker("numbers", NumberStream.load(Setup()), 100)
    for name in ("tools", "response_format", "top_logprobs"):
        with pytest.raises(InvocationError, match="does not obey it; leave it out") as caught:
            await worker.run({"count": 1, name: []}, PlainSaver(), _ignore)
        assert (caught.value.code, caught.value.param) == ("bad_input", name)
