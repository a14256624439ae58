"""Keeps the processes of one instance on this machine, in a session of its own that outlives the controller.

`python -m atoll.deploy.local_keeper FOLDER` reads `order.json` there, starts every node's command under the
supervisor, and writes what it sees to `state.json` whenever that changes. It holds a lock on `keeper.lock` as
long as it lives: two keepers of one folder are impossible, and whoever can take the lock knows that there is
none. SIGTERM drains: every command gets SIGTERM and the order's time to end by itself. SIGINT ends at once.
Nothing it started outlives it, however it ends (see `atoll.runtime.supervise.guard`).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from atoll.core.errors import AtollError, shorten
from atoll.core.files import atomic_write, read_text_limited
from atoll.core.frozen import Frozen
from atoll.deploy.door import FailureKind, Labels, StandingState
from atoll.deploy.exits import classify_exit
from atoll.deploy.local_slots import HeldSlots
from atoll.runtime.http.client import FetchError, fetch
from atoll.runtime.supervise.agent import Agent, ProcessSpec, SupervisedProcess
from atoll.runtime.supervise.process import Command, last_lines
from atoll.runtime.supervise.supervision import ProcessState, RestartLimits

ORDER, STATE, LOCK = "order.json", "state.json", "keeper.lock"
"""A command that ends is not started again: whether its instance shall stand is the controller's to say."""
_REASON = 300
_EVENT = '{"time":'
_TAIL_BYTES = 64 * 2**10
_LOOK_S = 2.0
_TAKE_S = 2.0


class KeptNode(Frozen):
    """A command of an instance: what to run, what to set, where it listens (None: nowhere that is known)."""

    node: str
    argv: tuple[str, ...]
    env: dict[str, str]
    port: int | None = None


class KeptOrder(Frozen):
    """What a keeper is told, and the labels that say whose it is."""

    labels: Labels
    nodes: tuple[KeptNode, ...]
    held: tuple[HeldSlots, ...]
    ready_s: float
    drain_s: float
    ordered_s: float


class KeptProcess(Frozen):
    """A process by its number and when it started, which together never name another one."""

    pid: int
    start: str


class KeeperState(Frozen):
    """What a keeper sees. `keeper` is itself, `processes` what it started."""

    keeper: KeptProcess
    state: StandingState
    since_s: float
    reason: str = ""
    kind: FailureKind | None = None
    processes: tuple[KeptProcess, ...] = ()


def process_start(pid: int) -> str | None:
    """Return when a process started, in the kernel's own words; None if there is none, or it has ended."""
    try:
        # The name of the command may hold anything, brackets included.
        text = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None if sys.platform.startswith("linux") else _start_elsewhere(pid)
    return None if text[0] in (b"Z", b"X") else text[19].decode("ascii")


def _start_elsewhere(pid: int) -> str | None:
    import subprocess

    shown = subprocess.run(
        ["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return shown.stdout.strip() or None


def last_word(lines: Sequence[str]) -> str:
    """Return the last line that was written for people; events of `atoll join` are not."""
    return next((line for line in reversed(lines) if not line.startswith(_EVENT)), "no word")


@dataclass(slots=True)
class CommandProbe:
    """Ready is a command that answers where it listens, and that gateways know of if it joins a fabric.

    A command that listens nowhere is ready when it runs. `atoll join --log -` says in its log what it
    announced.
    """

    port: int | None
    log: Path
    every_s: float = _LOOK_S
    begin: int = field(default=0)

    def reset(self) -> None:
        """Begin to read the log where it ends now."""
        self.begin = self.log.stat().st_size if self.log.exists() else 0

    async def check(self, pid: int) -> str | None:
        """Return None if it answers, else what is missing."""
        del pid
        if self.port is None:
            return None
        try:
            status, _ = await fetch(f"http://127.0.0.1:{self.port}/health", timeout_s=5.0)
        except FetchError as error:
            await asyncio.sleep(0.1)
            return str(error)
        if status >= 400 and status != 404:
            await asyncio.sleep(0.1)
            return f"/health answered with status {status}"
        if announces_nothing(_tail(self.log, self.begin)):
            await asyncio.sleep(0.05)
            return "not announced in the fabric"
        return None


def _tail(log: Path, begin: int) -> str:
    try:
        with log.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(begin if begin <= size else 0, size - _TAIL_BYTES))
            return stream.read().decode("utf-8", "replace")
    except OSError:
        return ""


def announces_nothing(text: str) -> bool:
    """Whether a log's events say that the node is in a fabric and serves nothing there."""
    silent = False
    for line in text.splitlines():
        if not line.startswith(_EVENT) or '"event":"node.' not in line:
            continue
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if event["event"] == "node.joined":
                silent = True
            elif event["event"] == "node.announced":
                silent = not event.get("models")
    return silent


class InstanceKeeper:
    """The life of one instance's processes; see the module."""

    def __init__(self, folder: Path, order: KeptOrder) -> None:
        self._folder, self._order = folder, order
        self._agent = Agent(self._changed)
        self._draining = self._hurried = False
        self._over = asyncio.Event()
        self._state: KeeperState | None = None
        self._me = KeptProcess(pid=os.getpid(), start=process_start(os.getpid()) or "")

    async def run(self) -> None:
        """Start, watch, and return when all has ended."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._drain)
        loop.add_signal_handler(signal.SIGINT, self._hurry)
        loop.add_signal_handler(signal.SIGHUP, lambda: None)
        limits = RestartLimits(
            ready_s=self._order.ready_s,
            unwell=2**31,  # an engine that hangs is the affair of whoever joined it
            term_s=self._order.drain_s,
            again=False,
        )
        self._write("starting")
        for node in self._order.nodes:
            log = self._folder / f"{node.node}.log"
            command = Command(node.argv, log, node.env, threads=None)
            self._agent.add(ProcessSpec(node.node, command, CommandProbe(node.port, log), limits))
        while not self._over.is_set() and not all(
            each.task.done() for each in self._agent.processes.values()
        ):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), 0.1)
            self._look()
        # Where some still run, this process just ends, and their guards see to the rest within seconds.
        if self._state is None or self._state.state != "failed":
            self._write("gone", "stopped" if self._hurried else "drained")

    def _drain(self) -> None:
        if not self._draining:
            self._draining = True
            self._write("draining")
            for process in self._agent.processes.values():
                process.stop()

    def _hurry(self) -> None:
        self._hurried = True
        self._over.set()

    def _changed(self, process: SupervisedProcess) -> None:
        del process
        self._look()

    def _look(self) -> None:
        """Write the state of the instance, which is that of the worst of its processes."""
        processes = list(self._agent.processes.values())
        has_failed = self._state is not None and self._state.state == "failed"
        if len(processes) < len(self._order.nodes) or self._hurried or has_failed:
            return
        failed = next((each for each in processes if each.state is ProcessState.FAILED), None)
        if self._draining:
            self._write("draining")
        elif failed is not None:
            self._fail(failed)
        elif all(each.state is ProcessState.READY for each in processes):
            self._write("ready")
        elif self._state is None or self._state.state == "starting":
            self._write("starting")

    def _fail(self, failed: SupervisedProcess) -> None:
        last = shorten(last_word(last_lines(failed.spec.command.log)), _REASON)
        was_ready = self._state is not None and self._state.state == "ready"
        kind: FailureKind = "ended" if was_ready else classify_exit(failed.reason, last)
        self._write("failed", f"{failed.name} {failed.reason}: {last}", kind)
        # The others are of no use without it.
        self._over.set()

    def _write(
        self, state: StandingState, reason: str = "", kind: FailureKind | None = None
    ) -> None:
        running = tuple(
            KeptProcess(pid=each.pid, start=start)
            for each in self._agent.processes.values()
            if each.pid is not None and (start := process_start(each.pid)) is not None
        )
        if state in ("gone", "failed") and self._state is not None:
            running = self._state.processes
        old = self._state
        since_s = old.since_s if old is not None and old.state == state else time.time()
        new = KeeperState(
            keeper=self._me,
            state=state,
            since_s=since_s,
            reason=reason,
            kind=kind,
            processes=running,
        )
        if new != old:
            self._state = new
            atomic_write(self._folder / STATE, new.to_json())


def main(arguments: list[str]) -> int:
    """Leave the caller's session, take the lock of a folder, and keep its instance."""
    folder = Path(arguments[0])
    if os.fork():
        # The caller waits for this one; the keeper itself is nobody's child.
        os._exit(0)
    os.setsid()
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return 0  # it was discarded before this process began
    if not _take(lock) or not (folder / ORDER).exists():
        return 0
    try:
        order = KeptOrder.from_json(read_text_limited(folder / ORDER), path=folder / ORDER)
        asyncio.run(_keep(folder, order))
    except AtollError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


def _take(lock: int) -> bool:
    """Take a keeper's lock, past those who only look whether it is held."""
    until_s = time.monotonic() + _TAKE_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until_s:
                return False
            time.sleep(0.01)
        else:
            return True


async def _keep(folder: Path, order: KeptOrder) -> None:
    await InstanceKeeper(folder, order).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
