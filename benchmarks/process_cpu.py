"""CPU seconds of processes, and how long they waited for a core, from what Linux counts of them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


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
