"""Daemon of one instance on this machine: runs its processes in a session that outlives the controller.

`python -m atoll.deploy.local.daemon FOLDER LOCK` reads `order.json` there, starts every node's command under
the supervisor, and writes what it sees to `state.json` whenever that changes. It locks `keeper.lock`
as long as it lives: two daemons of one folder are impossible, and whoever can take the lock knows that there
is none. The lock is taken before the daemon is started and inherited as the file descriptor LOCK, so that it
is held without a gap: a daemon that is slow to begin is never taken for one that never came.

SIGTERM drains: every command gets SIGTERM and the order's time to end by itself. SIGINT ends at once. Nothing
it started outlives it, however it ends (see `atoll.runtime.supervise.supervisor`).
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

from pydantic import model_validator

from atoll.core.errors import AtollError, shorten
from atoll.core.files import atomic_write, read_text_limited
from atoll.core.frozen import Frozen
from atoll.deploy.labels import Labels
from atoll.deploy.local.gpu_slots import HeldSlots
from atoll.deploy.target import FailureKind, InstanceState, classify_exit
from atoll.runtime.http.http_client import FetchError, fetch
from atoll.runtime.supervise.agent import Agent, ProcessSpec, SupervisedProcess
from atoll.runtime.supervise.supervised_process import Command, last_lines
from atoll.runtime.supervise.supervision import ProcessState, RestartLimits

ORDER = "order.json"
STATE = "state.json"
# Named as earlier versions named it: their running instances are found and adopted by it.
LOCK = "keeper.lock"
MAX_REASON_CHARACTERS = 300
EVENT_PREFIX = '{"time":'
"""How a line begins that `atoll join --log -` writes for programs."""
MAX_TAIL_BYTES = 64 * 2**10
PROBE_EVERY_S = 2.0
LOCK_WAIT_S = 2.0
"""Longer than anybody who only looks holds the lock."""


class DaemonNode(Frozen):
    """A command of an instance: what to run, what to set, where it listens (None: nowhere that is known)."""

    node: str
    argv: tuple[str, ...]
    env: dict[str, str]
    port: int | None = None


class ProcessId(Frozen):
    """A process by its number and when it started, which together never name another one."""

    pid: int
    start: str


class DaemonOrder(Frozen):
    """Order of a daemon: what to run, and the labels that say whose it is.

    It ends with the process `owner`, where there is one: on a machine that was lent, nothing outlives whoever
    lent it.
    """

    labels: Labels
    nodes: tuple[DaemonNode, ...]
    held: tuple[HeldSlots, ...]
    ready_s: float
    drain_s: float
    ordered_s: float
    owner: ProcessId | None = None


class DaemonState(Frozen):
    """State of an instance as its daemon sees it: `daemon` is itself, `processes` are those it started."""

    daemon: ProcessId
    state: InstanceState
    since_s: float
    reason: str = ""
    kind: FailureKind | None = None
    processes: tuple[ProcessId, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _read_earlier_version(cls, data: dict[str, object]) -> dict[str, object]:
        # Daemons of 0.2 and earlier, which may still run, write this key.
        return {"daemon" if key == "keeper" else key: value for key, value in data.items()}


def process_start(pid: int) -> str | None:
    """Return when a process started, in the kernel's own words; None if there is none, or it has ended."""
    try:
        # The name of the command may hold anything, brackets included.
        text = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None if sys.platform.startswith("linux") else _start_elsewhere(pid)
    # Behind the name, the 20th word is the start of the process: field 22 of proc(5).
    return None if text[0] in (b"Z", b"X") else text[19].decode("ascii")


def _start_elsewhere(pid: int) -> str | None:
    import subprocess

    shown = subprocess.run(
        ["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return shown.stdout.strip() or None


def last_word(lines: Sequence[str]) -> str:
    """Return the last line that was written for people; events of `atoll join` are not."""
    return next((line for line in reversed(lines) if not line.startswith(EVENT_PREFIX)), "no word")


@dataclass(slots=True)
class CommandProbe:
    """Ready is a command that answers where it listens, and that gateways know of if it joins a fabric.

    A command that listens nowhere is ready when it runs. `atoll join --log -` says in its log what it
    announced.
    """

    port: int | None
    log: Path
    every_s: float = PROBE_EVERY_S
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
        # Not every server has this page: 404 is an answer, too.
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
            # A log that is shorter than it was has been cut: it is read from its beginning.
            stream.seek(max(begin if begin <= size else 0, size - MAX_TAIL_BYTES))
            return stream.read().decode("utf-8", "replace")
    except OSError:
        return ""


def announces_nothing(text: str) -> bool:
    """Whether a log's events say that the node is in a fabric and serves nothing there."""
    silent = False
    for line in text.splitlines():
        if not line.startswith(EVENT_PREFIX) or '"event":"node.' not in line:
            continue
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if event["event"] == "node.joined":
                silent = True
            elif event["event"] == "node.announced":
                silent = not event.get("models")
    return silent


class InstanceDaemon:
    """The life of one instance's processes; see the module."""

    def __init__(self, folder: Path, order: DaemonOrder) -> None:
        self._folder, self._order = folder, order
        self._agent = Agent(self._changed)
        self._draining = self._hurried = False
        self._over = asyncio.Event()
        self._state: DaemonState | None = None
        self._me = ProcessId(pid=os.getpid(), start=process_start(os.getpid()) or "")

    async def run(self) -> None:
        """Start, watch, and return when all has ended."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._drain)
        loop.add_signal_handler(signal.SIGINT, self._hurry)
        # That the controller's terminal goes is no reason to end.
        loop.add_signal_handler(signal.SIGHUP, lambda: None)
        limits = RestartLimits(
            ready_s=self._order.ready_s,
            unwell=2**31,  # an engine that hangs is the affair of whoever joined it
            term_s=self._order.drain_s,
            # What replaces it is the controller's to decide.
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
            self._heed_owner()
        # Where some still run, this process just ends, and their supervisors see to the rest within seconds.
        if self._state is None or self._state.state != "failed":
            self._write("gone", "stopped" if self._hurried else "drained")

    def _heed_owner(self) -> None:
        owner = self._order.owner
        if owner is not None and process_start(owner.pid) != owner.start and not self._hurried:
            self._hurry()

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
        # Until all were added, and once one has failed, there is nothing to say of the whole.
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
        last = shorten(last_word(last_lines(failed.spec.command.log)), MAX_REASON_CHARACTERS)
        was_ready = self._state is not None and self._state.state == "ready"
        kind: FailureKind = "ended" if was_ready else classify_exit(failed.reason, last)
        self._write("failed", f"{failed.name} {failed.reason}: {last}", kind)
        # The others are of no use without it.
        self._over.set()

    def _write(
        self, state: InstanceState, reason: str = "", kind: FailureKind | None = None
    ) -> None:
        running = tuple(
            ProcessId(pid=each.pid, start=start)
            for each in self._agent.processes.values()
            if each.pid is not None and (start := process_start(each.pid)) is not None
        )
        # What ran last stays listed: whoever looks must be able to tell when all of it has ended.
        if state in ("gone", "failed") and self._state is not None:
            running = self._state.processes
        old = self._state
        since_s = old.since_s if old is not None and old.state == state else time.time()
        new = DaemonState(
            daemon=self._me,
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
    """Leave the caller's session and keep the instance of a folder, whose lock was inherited."""
    folder, lock = Path(arguments[0]), int(arguments[1])
    if os.fork():
        # The caller waits for this one; the daemon itself is nobody's child.
        os._exit(0)
    os.setsid()
    # What it starts must not hold the lock when the daemon itself is gone.
    os.set_inheritable(lock, False)
    try:
        order = DaemonOrder.from_json(read_text_limited(folder / ORDER), path=folder / ORDER)
        asyncio.run(_keep(folder, order))
    except AtollError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


def take_lock(home: Path) -> int | None:
    """Take the lock of a daemon's folder, past those who only look; None if a daemon has it.

    Returns the descriptor: the lock is held as long as somebody who inherited it lives.
    """
    lock = os.open(home / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    until_s = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until_s:
                os.close(lock)
                return None
            time.sleep(0.01)
        else:
            return lock


async def _keep(folder: Path, order: DaemonOrder) -> None:
    await InstanceDaemon(folder, order).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
