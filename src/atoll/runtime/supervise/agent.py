"""The node agent: keeps the engine processes of a machine running.

    agent = Agent(on_change=tell)
    agent.add(Managed("a/n0", Command((...), log=path), probe))
    await agent.ready(["a/n0"])
    await agent.stop(["a/n0"])         # TERM, then KILL
    await agent.close()

Nothing it started outlives it, however it ends (see `guard`).
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
from atoll.runtime.supervise.process import Command, GuardedProcess, Nursery, last_lines
from atoll.runtime.supervise.supervision import Action, ProcessState, RestartLimits, Supervision

_LOG = logging.getLogger(__name__)
_TICK_S = 0.05


class ProcessError(AtollError):
    """A process could not be kept running; carries its last lines."""

    def __init__(self, name: str, reason: str, lines: tuple[str, ...], log: str) -> None:
        said = f": {lines[-1]}" if lines else ""
        super().__init__(f"{name} {reason}{said}", hint=f"see {log}")
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
class Managed:
    """A process to keep running."""

    name: str
    command: Command
    probe: Probe
    limits: RestartLimits = field(default_factory=RestartLimits)


OnChange = Callable[["Keeper"], None]


class Keeper:
    """Keeps one process running, in a task of its own."""

    def __init__(self, managed: Managed, on_change: OnChange, nursery: Nursery | None) -> None:
        self.managed = managed
        self.name = managed.name
        self.pid: int | None = None
        self._core = Supervision(managed.limits)
        self._process: GuardedProcess | None = None
        self._on_change = on_change
        self._nursery = nursery
        self._shown = ProcessState.WAITING
        self.changed = asyncio.Event()
        self._wake = asyncio.Event()
        self.task = asyncio.create_task(self._keep(), name=f"keep {managed.name}")

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
        return last_lines(self.managed.command.log)

    def stop(self) -> None:
        """Begin to end it."""
        self._act(self._core.stop(time.monotonic()))
        self._tell()
        self._wake.set()

    def error(self) -> ProcessError:
        """Return why it does not run."""
        reason = self.reason or f"is {self.state}"
        return ProcessError(self.name, reason, self.lines(), str(self.managed.command.log))

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
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), _TICK_S)

    async def _run(self) -> None:
        """Start the process and see it through to its end."""
        probe = self.managed.probe
        probe.reset()
        process = self._process = await GuardedProcess.start(self.managed.command, self._nursery)
        self.pid = process.pid
        if self.state is ProcessState.STOPPING:
            process.term()
        ended = asyncio.create_task(process.wait())
        looking: asyncio.Task[str | None] | None = None
        look_s = 0.0
        try:
            while not ended.done():
                await asyncio.wait({ended}, timeout=_TICK_S)
                now_s = time.monotonic()
                if ended.done():
                    break
                self._act(self._core.tick(now_s))
                if looking is None and now_s >= look_s:
                    looking = asyncio.create_task(probe.check(process.pid))
                if looking is not None and looking.done():
                    self._looked(looking, now_s)
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

    def _looked(self, looking: asyncio.Task[str | None], now_s: float) -> None:
        problem = looking.result()
        if self.state is ProcessState.STARTING and problem is None:
            self._core.ready(now_s)
        else:
            self._act(self._core.probed(problem))


class Agent:
    """Keeps many processes running."""

    def __init__(self, on_change: OnChange | None = None) -> None:
        self._on_change = on_change or (lambda _keeper: None)
        self.nursery: Nursery | None = None
        self.keepers: dict[str, Keeper] = {}

    def add(self, managed: Managed) -> None:
        """Start a process and keep it running."""
        if managed.name in self.keepers:
            raise UsageError(f"there is a process {managed.name!r} already", field="name")
        self.keepers[managed.name] = Keeper(managed, self._on_change, self.nursery)

    async def ready(self, names: Iterable[str]) -> None:
        """Wait until all of these are ready; the first that is given up is a ProcessError."""
        for keeper in [self._keeper(name) for name in names]:
            while keeper.state is not ProcessState.READY:
                if keeper.state in (
                    ProcessState.FAILED,
                    ProcessState.STOPPED,
                    ProcessState.STOPPING,
                ):
                    raise keeper.error()
                if keeper.task.done():
                    keeper.task.result()
                self._raise_failed()
                keeper.changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(keeper.changed.wait(), 0.2)

    async def stop(self, names: Iterable[str]) -> None:
        """End processes, all at a time, and forget them."""
        keepers = [self._keeper(name) for name in names]
        for keeper in keepers:
            keeper.stop()
        await asyncio.gather(*(keeper.task for keeper in keepers), return_exceptions=True)
        for keeper in keepers:
            del self.keepers[keeper.name]

    async def close(self) -> None:
        """End everything."""
        await self.stop(list(self.keepers))
        if self.nursery is not None:
            await self.nursery.close()
            self.nursery = None

    def _raise_failed(self) -> None:
        for keeper in self.keepers.values():
            if keeper.state is ProcessState.FAILED:
                raise keeper.error()

    def _keeper(self, name: str) -> Keeper:
        if name not in self.keepers:
            raise UnknownNameError("process", name, self.keepers)
        return self.keepers[name]
