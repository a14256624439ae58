"""CPU seconds of processes, from what Linux counts of them."""

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
