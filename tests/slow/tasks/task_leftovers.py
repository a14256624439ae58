"""What a fleet of executors leaves behind: arrays that nobody holds, processes, folders; and its CPU time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from atoll.deploy.local.daemon import process_start
from atoll.runtime.http.http_client import fetch
from atoll.runtime.supervise.supervisor import descendants
from benchmarks.process_cpu import read_cpu_s


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
            if born := process_start(pid):
                # One that ends just now has used none, says the kernel.
                known_s = self.cpu_s.get((pid, born), 0.0)
                self.cpu_s[pid, born] = max(known_s, read_cpu_s([pid]))

    @property
    def total_cpu_s(self) -> float:
        """CPU seconds of all of them, as of the last look at each."""
        return sum(self.cpu_s.values())

    def survivors(self) -> list[int]:
        """Return those that still run."""
        return [pid for pid, born in self.cpu_s if process_start(pid) == born]
