"""What recording and replaying tasks costs, without any component (part of `benchmarks.tasks`).

The graph has 20 invocations: four chains of four, joined by one, whose result the code looks at; then three
more. So its code runs twice: one round of recording, one replay. Counted is CPU time of this process.

- pure: `Recording` alone: making it, both rounds, noting every result, filling in inputs. No event loop.
  This is `record_replay_us`.
- driven: all of `Run.result()` as a server awaits it, where `call` of the invoker returns at once: the same
  and one asyncio task per invocation, records with times, the answer, and what the event loop does
  meanwhile. `bare_tasks_us` is what the event loop alone takes for 20 tasks that do nothing.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from statistics import median
from time import process_time_ns
from typing import Any

from atoll.tasks.invocation import Final, Invocation
from atoll.tasks.recording import Recording
from atoll.tasks.run import Run
from atoll.tasks.task import Task, UnitTask
from atoll.tasks.values import Value

INVOCATIONS = 20
RUNS = 2000
_BATCH = 50


class TwentyCalls(Task[str, dict[str, Any]]):
    """Twenty invocations and one look."""

    def setup(self) -> None:
        self.step = UnitTask("step")
        self.join = UnitTask("join")

    def invoke(self, request: str) -> dict[str, Any]:
        """Answer with the results of the last three."""
        chains = []
        for chain in range(4):
            value: Any = request
            for _ in range(4):
                value = self.step(text=value, chain=chain)["text"]
            chains.append(value)
        joined = self.join(texts=chains, voice="heart")
        if joined["text"] == "":
            return {}
        return {name: self.step(text=joined["text"], chain=name) for name in ("a", "b", "c")}


class AtOnce:
    """An invoker whose components cost nothing."""

    async def call(self, invocation: Invocation) -> Value:
        return {"text": invocation.component}

    async def stream(self, invocation: Invocation) -> AsyncIterator[Value | Final]:
        yield Final(invocation.component)


def record_purely(task: TwentyCalls) -> int:
    """Record and replay without an event loop; return how many entries there were."""
    recording = Recording(task, "hello")
    while not recording.replay():
        _settle_all(recording)
    _settle_all(recording)
    assert recording.rounds == 2
    return len(recording.entries)


def _settle_all(recording: Recording) -> None:
    while recording.ready:
        ready, recording.ready = recording.ready, []
        for entry in ready:
            recording.inputs_of(entry)
            recording.settle(entry.number, {"text": "step"})


async def drive(task: TwentyCalls, invoker: AtOnce) -> int:
    """Run the graph; return how many invocations were made."""
    run = Run(task, "hello", invoker)
    await run.result()
    assert run.rounds == 2
    return len(run.records)


async def _drive_often(task: TwentyCalls, runs: int) -> list[float]:
    invoker = AtOnce()
    times = []
    for _ in range(runs // _BATCH):
        began = process_time_ns()
        for _ in range(_BATCH):
            assert await drive(task, invoker) == INVOCATIONS
        times.append((process_time_ns() - began) / _BATCH / 1e3)
    return times


async def _spawn_often(runs: int) -> list[float]:
    loop = asyncio.get_running_loop()
    invoker, invocation = AtOnce(), Invocation(0, None, "step", {}, False)
    times = []
    for _ in range(runs // _BATCH):
        began = process_time_ns()
        for _ in range(_BATCH):
            await asyncio.wait(
                [loop.create_task(invoker.call(invocation)) for _ in range(INVOCATIONS)]
            )
        times.append((process_time_ns() - began) / _BATCH / 1e3)
    return times


def measure_record_replay(runs: int = RUNS) -> dict[str, float]:
    """Return CPU time of one request in microseconds: medians over batches of 50 requests."""
    task = TwentyCalls()
    assert record_purely(task) == INVOCATIONS
    gc.collect()
    pure = []
    for _ in range(runs // _BATCH):
        began = process_time_ns()
        for _ in range(_BATCH):
            record_purely(task)
        pure.append((process_time_ns() - began) / _BATCH / 1e3)
    driven = asyncio.run(_drive_often(task, runs))
    bare = asyncio.run(_spawn_often(runs))
    return {
        "record_replay_us": round(median(pure), 1),
        "driven_us": round(median(driven), 1),
        "bare_tasks_us": round(median(bare), 1),
    }
