"""Processes of benchmarks: started and ended, their CPU seconds, and how long they waited for a core."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_TICKS = os.sysconf("SC_CLK_TCK")
_STOP_S = 20.0


@contextmanager
def running(
    command: Sequence[str],
    *,
    log: IO[bytes] | IO[str] | int | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command beside what happens within; it is asked to end then, and killed if it does not.

    What it says goes to `log`, by default where this process says things; `env` is more of its environment.
    """
    process = subprocess.Popen(
        command, stdout=log, stderr=log, env={**os.environ, **(env or {})}, cwd=cwd
    )
    try:
        yield process
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ask a process to end, and kill it if it does not."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_until(
    true: Callable[[], object], seconds: float, what: str, *processes: subprocess.Popen[bytes]
) -> None:
    """Wait until something is true; an error says `what` is not, after so long or as a process has ended."""
    until_s = time.monotonic() + seconds
    while not true():
        if time.monotonic() > until_s or any(p.poll() is not None for p in processes):
            raise RuntimeError(f"{what} did not start")
        time.sleep(0.02)


def listens(port: int) -> bool:
    """Whether somebody takes connections at a port of this machine."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


def read_cpu_s(pids: Iterable[int]) -> float:
    """Return the CPU seconds that processes have used, all their threads together; gone ones count 0."""
    total_s = 0.0
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            continue
        fields = text.rpartition(")")[2].split()
        total_s += (int(fields[11]) + int(fields[12])) / _TICKS
    return total_s


def list_children(pid: int) -> list[int]:
    """Return the processes that a process has started itself."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(word) for word in path.read_text(encoding="ascii").split()]
        except OSError:
            continue
    return found


def read_core_share(before: tuple[float, float], after: tuple[float, float]) -> float:
    """Return which share of the time that processes wanted a core they had one, between two readings."""
    ran_s, waited_s = after[0] - before[0], after[1] - before[1]
    return ran_s / (ran_s + waited_s) if ran_s > 0.0 else 1.0


def read_schedule_s(pids: Iterable[int]) -> tuple[float, float]:
    """Return the seconds that the threads of processes ran, and that they waited for a core."""
    ran_s = waited_s = 0.0
    for pid in pids:
        for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            try:
                ran, waited, *_ = path.read_text(encoding="ascii").split()
            except (OSError, ValueError):
                continue
            ran_s, waited_s = ran_s + int(ran) / 1e9, waited_s + int(waited) / 1e9
    return ran_s, waited_s
