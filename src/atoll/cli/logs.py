"""`atoll logs`: what an instance of a fleet says, wherever it stands."""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from atoll.cli.options import VerbSettings, verb
from atoll.control.operation.options import STATE_HELP
from atoll.core.errors import AtollError, UnknownNameError, UsageError
from atoll.core.options import option

if TYPE_CHECKING:
    from collections.abc import Callable

    from atoll.control.operation.fleet_home import FleetHome, FleetRecord

app = typer.Typer(add_completion=False)
_EVERY_S = 1.0
_FOLLOWED = 1000
"""Lines that are looked at for what is new; more than an instance says in a second."""


class LogsSettings(VerbSettings):
    """Options of `atoll logs`."""

    names: tuple[str, ...] = option(
        ...,
        "INSTANCE, or FLEET INSTANCE where several fleets have one of that name; also gateway "
        "and hub.",
        argument=True,
        metavar="[FLEET] INSTANCE",
    )
    lines: int = option(100, "How many of the last lines.", ge=1, le=100_000)
    follow: bool = option(False, "Go on until Ctrl-C.")
    state: Path | None = option(None, STATE_HELP)


@verb(app, LogsSettings)
def logs(options: LogsSettings) -> None:
    """Show the last lines that the nodes of an instance wrote, or a fleet's gateway or hub.

    The beginning of an instance's name will do, if only one begins so.
    """
    if len(options.names) > 2:
        raise UsageError("one instance at a time", hint="atoll logs FLEET INSTANCE")
    fleet = options.names[0] if len(options.names) == 2 else None
    read = _find(fleet, options.names[-1], options.state)
    text = read(options.lines)
    _write(text)
    if not options.follow:
        return
    from atoll.control.operation.instance_logs import find_new

    seen = read(_FOLLOWED).splitlines()
    while True:
        time.sleep(_EVERY_S)
        now = read(_FOLLOWED).splitlines()
        _write("\n".join(find_new(seen, now)))
        seen = now


def _write(text: str) -> None:
    if text:
        sys.stdout.write(text if text.endswith("\n") else f"{text}\n")
        sys.stdout.flush()


def _find(fleet: str | None, name: str, state: Path | None) -> Callable[[int], str]:
    """Return what reads the last lines of an instance; UnknownNameError suggests the nearest."""
    from atoll.control.operation.fleet_home import find_home, list_homes
    from atoll.control.operation.instance_logs import OWN, find_logs, read_tail

    homes: list[tuple[FleetHome, FleetRecord]] = []
    if fleet is not None or state is not None:
        homes.append(find_home(fleet, state))
    else:
        for home in list_homes():
            record = home.read()
            if record is not None:
                homes.append((home, record))
    found: dict[tuple[str, str], Callable[[int], str]] = {}
    errors: list[str] = []
    for home, record in homes:
        if name in OWN:
            found[record.name, name] = partial(read_tail, home.folder / f"{name}.log")
            continue
        logs = find_logs(home, record)
        errors += logs.errors
        found |= {(record.name, own): read for own, read in logs.readers.items() if own not in OWN}
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
