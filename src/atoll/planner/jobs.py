"""Jobs in worker processes: planning and simulating takes seconds; the service answers meanwhile.

A job is a plain function (`worker.Job`). A few workers are kept, warm; a job whose asker goes away is killed
with its worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator
from typing import NamedTuple

from atoll.planner.worker import Event, NamedJob, Said, name_of
from atoll.runtime.http.handlers import EventStream
from atoll.runtime.openai import ApiError

_MAX_LINE_BYTES = 256 * 2**20
_MAX_WAITING = 16
WARM = ("atoll.planner.whatif", "atoll.planner.plan_simulation")


class JobMessage(NamedTuple):
    """Message of a worker about a job; `result` or `error` is its last."""

    event: Event
    said: Said


class JobRunner:
    """Runs at most `most` jobs at once, each for `limit_s` seconds at most; others wait their turn.

    Workers load `modules` before their first job.
    """

    def __init__(
        self,
        most: int = 2,
        *,
        nice: int = 0,
        limit_s: float = 300.0,
        modules: tuple[str, ...] = WARM,
    ) -> None:
        self._gate = asyncio.Semaphore(most)
        self._limit_s = limit_s
        self._nice = nice
        self._modules = modules
        self._idle: list[Process] = []
        self._knows: dict[int, set[str]] = {}
        """By process of a worker the fleets that it has worked on, of which it remembers what takes long."""
        self._busy: set[Process] = set()
        self._waiting = 0

    async def warm(self) -> None:
        """Start a worker before the first job comes."""
        if not self._idle and not self._busy:
            self._idle.append(await self._start())

    async def messages(self, job: NamedJob, arguments: Said) -> AsyncGenerator[JobMessage, None]:
        """Run a job; yield what is said of it, its result or error last."""
        if self._waiting >= _MAX_WAITING:
            raise ApiError(
                429, "too many questions at once: ask again later", kind="rate_limit_error"
            )
        if self._gate.locked():
            yield JobMessage(
                "progress", {"text": "waiting for others to be answered", "share": None}
            )
        self._waiting += 1
        try:
            await self._gate.acquire()
        finally:
            self._waiting -= 1
        try:
            fleet = str(arguments.get("place", {}).get("path"))
            worker = await self._take(fleet)
            self._knows.setdefault(worker.pid, set()).add(fleet)
            self._busy.add(worker)
            over = False
            try:
                async with contextlib.aclosing(self._ask(worker, job, arguments)) as said:
                    async for message in said:
                        over = message.event != "progress"
                        yield message
            finally:
                self._busy.discard(worker)
                # A worker in the middle of a job cannot be told to leave it: it is killed.
                if over and worker.returncode is None:
                    self._idle.append(worker)
                else:
                    self._knows.pop(worker.pid, None)
                    await _kill(worker)
        finally:
            self._gate.release()

    async def run(self, job: NamedJob, arguments: Said) -> Said:
        """Run a job to its end; return its result, or raise ApiError."""
        async with contextlib.aclosing(self.messages(job, arguments)) as messages:
            async for message in messages:
                if message.event == "result":
                    return message.said
                if message.event == "error":
                    raise to_api_error(message.said)
        raise ApiError(500, "no answer", kind="server_error")

    async def close(self) -> None:
        """End all workers."""
        for worker in [*self._idle, *self._busy]:
            await _kill(worker)
        self._idle.clear()

    async def _take(self, fleet: str) -> Process:
        """Return a worker that waits for a job, one that knows the fleet if there is one.

        Those that have died meanwhile are left out.
        """
        self._idle = [worker for worker in self._idle if worker.returncode is None]
        self._idle.sort(key=lambda worker: fleet in self._knows.get(worker.pid, ()))
        return self._idle.pop() if self._idle else await self._start()

    async def _start(self) -> Process:
        warm = [word for module in self._modules for word in ("--warm", module)]
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "atoll.planner.worker", "--nice", str(self._nice), *warm),
            stdin=PIPE,
            stdout=PIPE,
            limit=_MAX_LINE_BYTES,
        )

    async def _ask(
        self, worker: Process, job: NamedJob, arguments: Said
    ) -> AsyncGenerator[JobMessage, None]:
        assert worker.stdin is not None
        assert worker.stdout is not None
        line = json.dumps({"job": name_of(job), "arguments": arguments}, allow_nan=False)
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + self._limit_s
        try:
            worker.stdin.write(line.encode() + b"\n")
            await worker.stdin.drain()
            # Each piece may be waited for by another task, so that no one timeout spans them all.
            while heard := await asyncio.wait_for(worker.stdout.readline(), ends_s - loop.time()):
                message = JobMessage(**json.loads(heard))
                yield message
                if message.event != "progress":
                    return
        except TimeoutError:
            await _kill(worker)
            text = f"not done within {self._limit_s:g} s: ask for less"
            yield _failure(504, text, "timeout")
            return
        except (ConnectionError, ValueError):
            # The worker has died, or its line is longer than is read.
            pass
        await _kill(worker)
        # The system may have ended it for its memory.
        yield _failure(500, "the process that worked on it has ended: ask for less", None)


def stream_job(runner: JobRunner, job: NamedJob, arguments: Said) -> EventStream:
    """Return an answer of events: `progress` now and then, at last `result` or `error`."""
    return EventStream(_events(runner, job, arguments), (("cache-control", "no-store"),))


def write_event(event: str, data: object) -> bytes:
    """Return a server-sent event with one line of JSON."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return f"event: {event}\ndata: {text}\n\n".encode()


def to_api_error(said: Said) -> ApiError:
    """Return what `describe_error` said as what the server answers with."""
    return ApiError(
        said["status"],
        said["message"],
        kind=said["kind"],
        code=said.get("code"),
        param=said.get("param"),
    )


async def _events(runner: JobRunner, job: NamedJob, arguments: Said) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(runner.messages(job, arguments)) as messages:
        async for message in messages:
            if message.event == "error":
                yield write_event("error", json.loads(to_api_error(message.said).body()))
            else:
                yield write_event(message.event, message.said)


def _failure(status: int, text: str, code: str | None) -> JobMessage:
    return JobMessage(
        "error", {"status": status, "message": text, "kind": "server_error", "code": code}
    )


async def _kill(worker: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        worker.kill()
    await worker.wait()
