"""Last lines of what instances of fleets wrote, and their gateways and hubs, wherever they stand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from atoll.control.operation.fleet_home import FleetHome, FleetRecord
from atoll.control.operation.operated import look_at_targets
from atoll.runtime.supervise.supervised_process import last_lines

ReadLines = Callable[[int], str]
"""Returns so many of the last lines; asks the target, and may take its time."""
OWN_LOGS: Mapping[str, str] = {
    "gateway": "gateway.log",
    "hub": "hub.log",
    "graph-server": "graph-server.log",
}
"""What writes into a fleet's home, and where."""


class FleetLogs(NamedTuple):
    """Readers by name, and why targets could not be asked."""

    readers: dict[str, ReadLines]
    errors: tuple[str, ...]


def list_logs(home: FleetHome, record: FleetRecord) -> FleetLogs:
    """Return what can be read of a fleet; it asks all its targets."""
    readers: dict[str, ReadLines] = {
        name: partial(read_tail, home.folder / file)
        for name, file in OWN_LOGS.items()
        if (home.folder / file).exists()
    }
    errors = []
    for look in look_at_targets(home, record):
        errors += [f"{look.target}: {look.error}"] if look.error is not None else []
        if look.deployer is not None:
            for each in look.statuses:
                readers[each.labels.instance] = partial(look.deployer.logs, each.handle)
    return FleetLogs(readers, tuple(errors))


def read_tail(path: Path, lines: int) -> str:
    """Return the last lines of a file."""
    return "\n".join(last_lines(path, lines))


def find_new(before: list[str], now: list[str]) -> list[str]:
    """Return the lines at the end of `now` that came after those of `before`."""
    for skipped in range(len(before) + 1):
        same = before[skipped:]
        if now[: len(same)] == same:
            return now[len(same) :]
    return now
