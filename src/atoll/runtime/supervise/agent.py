"""The node agent: keeps the engine processes of a machine running.

    agent = Agent(on_change=tell)
    agent.add(ProcessSpec("a/n0", Command((...), log=path), probe))
    await agent.ready(["a/n0"])
    await agent.stop(["a/n0"])         # TERM, then KILL
    await agent.close()

Nothing it started outlives it, however it ends (see `supervisor`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from atoll.core.errors import AtollError, UnknownNameError, UsageError
from atoll.runtime.supervise.fork_client import ForkServer
from atoll.runtime.supervise.start_watch import StartWatch
from atoll.runtime.supervise.supervised_process import Command, ProcessHandle, last_lines
from atoll.runtime.supervise.supervision import Action, ProcessState, RestartLimits, Supervision

_LOG = logging.getLogger(__name__)
_TICK_S = 0.05
_WATCH_S = 1.0
"""Between two looks at whether a process that starts gets anywhere."""


class ProcessError(AtollError):
    """A process could not be kept running; carries its last lines."""

    def __init__(self, name: str, reason: str, lines: tuple[str, ...], log: str) -> None:
        last_line = f": {lines[-1]}" if lines else ""
        super().__init__(f"{name} {reason}{last_line}", hint=f"see {log}")
        self.name = name
        self.lines = lines


class Probe(Protocol):
    """Looks whether a process can do its work."""

    every_s: float
    """Seconds between two looks at a process that is ready."""

    def reset(self) -> None:
        """Forget an earlier run of the process; called before each start."""
        ...

    async def check(self, pid: int) -> str | None:
        """Return None if all is well, else what is not."""
        ...


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process to keep running."""

    name: str
    command: Command
    probe: Probe
    limits: RestartLimits = field(default_factory=RestartLimits)


OnChange = Callable[["SupervisedProcess"], None]


class SupervisedProcess:
    """Keeps one process running, in a task of its own."""

    def __init__(
        self, spec: ProcessSpec, on_change: OnChange, fork_server: ForkServer | None
    ) -> None:
        self.spec = spec
        self.name = spec.name
        self.pid: int | None = None
        self._core = Supervision(spec.limits)
        self._process: ProcessHandle | None = None
        self._on_change = on_change
        self._fork_server = fork_server
        self._shown = ProcessState.WAITING
        self.changed = asyncio.Event()
        self._wake = asyncio.Event()
        self.task = asyncio.create_task(self._keep(), name=f"keep {spec.name}")

    @property
    def state(self) -> ProcessState:
        """Where the process stands."""
        return self._core.state

    @property
    def reason(self) -> str:
        """Why it was last ended or given up."""
        return self._core.reason

    @property
    def restarts(self) -> int:
        """How often it was started again."""
        return self._core.restarts

    def lines(self) -> tuple[str, ...]:
        """Return its last lines."""
        return last_lines(self.spec.command.log)

    def stop(self) -> None:
        """Begin to end it."""
        self._act(self._core.stop(time.monotonic()))
        self._tell()
        self._wake.set()

    def error(self) -> ProcessError:
        """Return why it does not run."""
        reason = self.reason or f"is {self.state}"
        return ProcessError(self.name, reason, self.lines(), str(self.spec.command.log))

    def _act(self, action: Action | None) -> None:
        if self._process is None or action is None:
            return
        if action is Action.TERM:
            self._process.term()
        elif action is Action.KILL:
            _LOG.info("%s is killed: %s", self.name, self.reason)
            self._process.kill()

    def _tell(self) -> None:
        if self.state is not self._shown:
            self._shown = self.state
            self.changed.set()
            self._on_change(self)

    async def _keep(self) -> None:
        while not self._core.over:
            if self._core.tick(time.monotonic()) is Action.START:
                self._tell()
                await self._run()
                self._tell()
                continue
            self._tell()
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), _TICK_S)

    async def _run(self) -> None:
        """Start the process and see it through to its end."""
        probe = self.spec.probe
        probe.reset()
        process = self._process = await ProcessHandle.start(self.spec.command, self._fork_server)
        self.pid = process.pid
        # It was told to stop while it was being started.
        if self.state is ProcessState.STOPPING:
            process.term()
        ended = asyncio.create_task(process.wait())
        watch = StartWatch(process.pid, self.spec.command.log)
        looking: asyncio.Task[str | None] | None = None
        look_s = watch_s = 0.0
        try:
            while not ended.done():
                await asyncio.wait({ended}, timeout=_TICK_S)
                now_s = time.monotonic()
                if ended.done():
                    break
                if self.state is ProcessState.STARTING and now_s >= watch_s:
                    watch_s = now_s + _WATCH_S
                    self._core.delayed(watch.take_delay_s())
                    if watch.advances():
                        self._core.advanced(now_s)
                self._act(self._core.tick(now_s))
                if looking is None and now_s >= look_s:
                    # In a task of its own: a look may take long, and the end of the process must be seen
                    # meanwhile.
                    looking = asyncio.create_task(probe.check(process.pid))
                if looking is not None and looking.done():
                    self._take_result(looking, now_s)
                    looking = None
                    look_s = now_s + (probe.every_s if self.state is ProcessState.READY else 0.0)
                self._tell()
            code = ended.result()
        finally:
            ended.cancel()
            if looking is not None:
                looking.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await looking
        self.pid = self._process = None
        self._core.exited(code, time.monotonic())
        if not self._core.over or self.state is ProcessState.FAILED:
            _LOG.info("%s %s (%s)", self.name, self.reason, self.state)

    def _take_result(self, looking: asyncio.Task[str | None], now_s: float) -> None:
        problem = looking.result()
        if self.state is ProcessState.STARTING and problem is None:
            self._core.ready(now_s)
        else:
            self._act(self._core.probed(problem))


class Agent:
    """Keeps many processes running."""

    def __init__(self, on_change: OnChange | None = None) -> None:
        self._on_change = on_change or (lambda _find: None)
        self.fork_server: ForkServer | None = None
        self.processes: dict[str, SupervisedProcess] = {}

    def add(self, spec: ProcessSpec) -> None:
        """Start a process and keep it running."""
        if spec.name in self.processes:
            raise UsageError(f"there is a process {spec.name!r} already", field="name")
        self.processes[spec.name] = SupervisedProcess(spec, self._on_change, self.fork_server)

    async def ready(self, names: Iterable[str]) -> None:
        """Wait until all of these are ready; the first that is given up is a ProcessError."""
        for process in [self._find(name) for name in names]:
            while process.state is not ProcessState.READY:
                if process.state in (
                    ProcessState.FAILED,
                    ProcessState.STOPPED,
                    ProcessState.STOPPING,
                ):
                    raise process.error()
                if process.task.done():
                    process.task.result()
                # Any other process that is given up ends the wait, too.
                self._raise_failed()
                process.changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.changed.wait(), 0.2)

    async def stop(self, names: Iterable[str]) -> None:
        """End processes, all at a time, and forget them."""
        processes = [self._find(name) for name in names]
        # All are told before any is waited for, so that they end at the same time.
        for process in processes:
            process.stop()
        await asyncio.gather(*(process.task for process in processes), return_exceptions=True)
        for process in processes:
            del self.processes[process.name]

    async def close(self) -> None:
        """Stop all processes, and the one they are forked from."""
        await self.stop(list(self.processes))
        if self.fork_server is not None:
            await self.fork_server.close()
            self.fork_server = None

    def _raise_failed(self) -> None:
        for process in self.processes.values():
            if process.state is ProcessState.FAILED:
                raise process.error()

    def _find(self, name: str) -> SupervisedProcess:
        if name not in self.processes:
            raise UnknownNameError("process", name, self.processes)
        return self.processes[name]
