"""`atoll logs`: what an instance of a fleet says, wherever it stands."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import typer

from atoll.cli.console_client import ConsoleClient, console_field, fleet_path, name_fleet
from atoll.cli.options import VerbSettings, verb
from atoll.control.operation.options import STATE_HELP
from atoll.core.errors import AtollError, UnknownNameError, UsageError
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
    read = _find(options)
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


def _find(options: LogsSettings) -> Callable[[int], str]:
    """Return what reads the last lines of an instance; an error suggests the nearest."""
    client = ConsoleClient.find_fleets(options.console, options.state)
    name = options.names[-1]
    if len(options.names) == 2 or options.state is not None:
        fleet = options.names[0] if len(options.names) == 2 else None
        fleet = name_fleet(fleet, options.state, options.console)
    else:
        fleet, name = _find_fleet(client, name)
    path = f"logs/{quote(name, safe='')}"

    def read(lines: int) -> str:
        return str(client.ask("GET", fleet_path(fleet, path, {"lines": lines}))["text"])

    return read


def _find_fleet(client: ConsoleClient, name: str) -> tuple[str, str]:
    """Return the only fleet that has such an instance, and the whole name of that."""
    known: dict[tuple[str, str], None] = {}
    errors: list[str] = []
    for fleet in client.ask("GET", "/atoll/v1/fleets")["fleets"]:
        if fleet["kind"] in ("operated", "served"):
            said = client.ask("GET", fleet_path(fleet["name"], "logs"))
            known |= dict.fromkeys((fleet["name"], each) for each in said["logs"])
            errors += said["errors"]
    fitting = [key for key in known if key[1] == name] or [
        key for key in known if key[1].startswith(name)
    ]
    if len(fitting) == 1:
        return fitting[0]
    fleets = sorted({fleet for fleet, _ in fitting})
    if len(fleets) > 1:
        text = f"{', '.join(fleets)} have an instance {name}"
        raise UsageError(text, hint=f"atoll logs FLEET {name}")
    if not fitting and errors:
        raise AtollError(f"{name} is not to be found, and {errors[0]}")
    raise UnknownNameError("instance", name, [each for _, each in known])
