"""`atoll logs`: what an instance of a fleet says, wherever it stands."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import typer

from atoll.cli.console_client import ConsoleClient, console_field, fleet_path
from atoll.cli.options import VerbSettings, verb
from atoll.control.operation.options import STATE_HELP
from atoll.core.errors import UsageError
from atoll.core.options import option

if TYPE_CHECKING:
    from collections.abc import Callable

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
    console: str | None = console_field()


@verb(app, LogsSettings)
def logs(options: LogsSettings) -> None:
    """Show the last lines that the nodes of an instance wrote, or a fleet's gateway or hub.

    The beginning of an instance's name will do, if only one begins so.
    """
    if len(options.names) > 2:
        raise UsageError("one instance at a time", hint="atoll logs FLEET INSTANCE")
    fleet = options.names[0] if len(options.names) == 2 else None
    if options.console is not None:
        read = _ask(fleet, options, options.console)
    else:
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


def _ask(fleet: str | None, options: LogsSettings, url: str) -> Callable[[int], str]:
    """Return what asks a console elsewhere for the last lines."""
    if fleet is None:
        raise UsageError("of which fleet?", hint="atoll logs FLEET INSTANCE --console URL")
    client = ConsoleClient.find(url)
    path = fleet_path(fleet, f"logs/{quote(options.names[-1], safe='')}")

    def read(lines: int) -> str:
        return str(client.ask("GET", f"{path}?lines={min(lines, 10_000)}")["text"])

    return read


def _find(fleet: str | None, name: str, state: Path | None) -> Callable[[int], str]:
    """Return what reads the last lines of an instance; UnknownNameError suggests the nearest."""
    from atoll.control.operation.fleet_home import find_home, list_homes
    from atoll.control.operation.instance_logs import find_logs

    if fleet is not None or state is not None:
        return find_logs([find_home(fleet, state)], name)
    homes = [(home, home.read()) for home in list_homes()]
    return find_logs([(home, record) for home, record in homes if record is not None], name)
