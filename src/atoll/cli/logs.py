"""`atoll logs`: what an instance of a fleet says, wherever it stands."""

from __future__ import annotations

import sys
import time
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
    from atoll.deploy.target import Deployer

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
    seen = read(_FOLLOWED).splitlines()
    while True:
        time.sleep(_EVERY_S)
        now = read(_FOLLOWED).splitlines()
        _write("\n".join(find_new(seen, now)))
        seen = now


def find_new(before: list[str], now: list[str]) -> list[str]:
    """Return the lines at the end of `now` that came after those of `before`."""
    for skipped in range(len(before) + 1):
        same = before[skipped:]
        if now[: len(same)] == same:
            return now[len(same) :]
    return now


def _write(text: str) -> None:
    if text:
        sys.stdout.write(text if text.endswith("\n") else f"{text}\n")
        sys.stdout.flush()


def _find(fleet: str | None, name: str, state: Path | None) -> Callable[[int], str]:
    """Return what reads the last lines of an instance; UnknownNameError suggests the nearest."""
    from atoll.control.operation.fleet_home import find_home, list_homes
    from atoll.control.operation.operated import look_at_targets

    homes: list[tuple[FleetHome, FleetRecord]] = []
    if fleet is not None or state is not None:
        homes.append(find_home(fleet, state))
    else:
        for home in list_homes():
            record = home.read()
            if record is not None:
                homes.append((home, record))
    found: dict[tuple[str, str], Callable[[int], str]] = {}
    errors = []
    for home, record in homes:
        if name in ("gateway", "hub"):
            found[record.name, name] = _file_reader(home.folder / f"{name}.log")
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


def _reader(deployer: Deployer, handle: str) -> Callable[[int], str]:
    return lambda lines: deployer.logs(handle, lines)


def _file_reader(path: Path) -> Callable[[int], str]:
    from atoll.runtime.supervise.supervised_process import last_lines

    return lambda lines: "\n".join(last_lines(path, lines))
