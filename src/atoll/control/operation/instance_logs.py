"""Last lines of what instances of fleets wrote, and their gateways and hubs, wherever they stand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from atoll.control.operation.fleet_home import FleetHome, FleetRecord
from atoll.control.operation.operated import look_at_targets
from atoll.core.errors import AtollError, UnknownNameError, UsageError
from atoll.deploy.target import Deployer
from atoll.runtime.supervise.supervised_process import last_lines

ReadLines = Callable[[int], str]
"""Returns so many of the last lines."""
OWN_LOGS: Mapping[str, str] = {
    "gateway": "gateway.log",
    "hub": "hub.log",
    "graph-server": "graph-server.log",
}
"""What writes into a fleet's home, and where."""


def find_logs(homes: Iterable[tuple[FleetHome, FleetRecord]], name: str) -> ReadLines:
    """Return what reads the lines of an instance, or of a process in `OWN_LOGS`.

    The beginning of an instance's name will do, if only one begins so; UnknownNameError suggests the nearest.
    """
    found: dict[tuple[str, str], ReadLines] = {}
    errors = []
    for home, record in homes:
        if name in OWN_LOGS:
            found[record.name, name] = _file_reader(home.folder / OWN_LOGS[name])
            continue
        for look in look_at_targets(home, record):
            errors += [f"{look.target}: {look.error}"] if look.error is not None else []
            for each in look.statuses:
                if look.deployer is not None:
                    found[record.name, each.labels.instance] = _reader(look.deployer, each.handle)
    fitting = [key for key in found if key[1] == name] or [
        key for key in found if key[1].startswith(name)
    ]
    if len(fitting) == 1:
        return found[fitting[0]]
    if len({key[0] for key in fitting}) > 1:
        raise UsageError(
            f"{', '.join(sorted({key[0] for key in fitting}))} have an instance {name}",
            hint=f"atoll logs FLEET {name}",
        )
    if not fitting and errors:
        raise AtollError(f"{name} is not to be found, and {errors[0]}")
    raise UnknownNameError("instance", name, [key[1] for key in found])


def _reader(deployer: Deployer, handle: str) -> ReadLines:
    return lambda lines: deployer.logs(handle, lines)


def _file_reader(path: Path) -> ReadLines:
    return lambda lines: "\n".join(last_lines(path, lines))
