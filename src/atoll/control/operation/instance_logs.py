"""Where the last lines of a fleet's instances, gateway and hub are read, wherever those stand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from atoll.control.operation.fleet_home import FleetHome, FleetRecord
from atoll.control.operation.operated import look_at_targets
from atoll.runtime.supervise.supervised_process import last_lines

ReadLog = Callable[[int], str]
"""Returns so many of the last lines; asks the target, and may take its time."""
OWN = ("gateway", "hub")
"""Processes of a fleet that are no instances."""


class FleetLogs(NamedTuple):
    """Readers by name, and why targets could not be asked."""

    readers: dict[str, ReadLog]
    errors: tuple[str, ...]


def find_logs(home: FleetHome, record: FleetRecord) -> FleetLogs:
    """Return what can be read of a fleet; it asks all its targets."""
    readers: dict[str, ReadLog] = {
        name: partial(read_tail, home.folder / f"{name}.log")
        for name in OWN
        if (home.folder / f"{name}.log").exists()
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
