"""What a fleet of executors leaves behind: arrays that nobody holds, processes, folders; and its CPU time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from atoll.runtime.http.http_client import fetch
from atoll.runtime.supervise.supervisor import descendants

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class StoredArrays:
    """Arrays in the stores of a fleet: as its processes count them, and files. running: requests, too."""

    handles: int
    server_bytes: int
    arrays: int
    parts: int
    running: int

    @property
    def leaked(self) -> int:
        """Arrays that are still there, however they are counted."""
        return max(self.handles + (self.server_bytes > 0), self.arrays) + self.parts


async def count_arrays(store: Path, server_url: str, executor_urls: list[str]) -> StoredArrays:
    """Ask every process what it stores, and look into the folder of all stores."""
    handles = 0
    for url in executor_urls:
        _, body = await fetch(f"{url}/atoll/v1/status", timeout_s=10.0)
        handles += int(json.loads(body)["handles"])
    _, body = await fetch(f"{server_url}/atoll/v1/status", timeout_s=10.0)
    server = json.loads(body)
    return StoredArrays(
        handles,
        int(server["stored_bytes"]),
        len(list(store.glob("*/*.array"))),
        len(list(store.glob("*/*.part"))),
        int(server["running"]),
    )


@dataclass
class ProcessWatch:
    """Every process that was ever seen, and the CPU seconds each had used by then."""

    cpu_s: dict[tuple[int, str], float] = field(default_factory=dict)

    def look(self, pids: Iterable[int] | None = None) -> None:
        """Note these processes; all that are below this one where none are named."""
        for pid in descendants(os.getpid()) if pids is None else pids:
            if (found := _read(pid)) is not None:
                born, seconds = found
                self.cpu_s[pid, born] = seconds

    @property
    def total_cpu_s(self) -> float:
        """CPU seconds of all of them, as of the last look at each."""
        return sum(self.cpu_s.values())

    def survivors(self) -> list[int]:
        """Return those that still run."""
        return [pid for pid, born in self.cpu_s if (found := _read(pid)) and found[0] == born]


def strays(folder: Path) -> list[int]:
    """Return the processes but this one whose command line names a folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if os.fsencode(folder) in command:
                found.append(int(entry.name))
    return found


def _read(pid: int) -> tuple[str, float] | None:
    """Return when a process was born, in ticks, and its CPU seconds; None if it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    if fields[0] == "Z":
        return None
    return fields[19], (int(fields[11]) + int(fields[12])) * _TICK_S
