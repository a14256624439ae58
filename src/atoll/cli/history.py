"""`atoll history`: what was decided about a fleet, and why."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from atoll.cli.console_client import ConsoleClient, console_field, fleet_path
from atoll.cli.options import VerbSettings, json_field, verb
from atoll.control.operation.options import STATE_HELP
from atoll.core.errors import UsageError
from atoll.core.options import option
from atoll.core.units import format_price
from atoll.report.terminal import console, emit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from atoll.control.operation.fleet_history import HistoryEvent

app = typer.Typer(add_completion=False)


class HistorySettings(VerbSettings):
    """Options of `atoll history`."""

    fleet: str | None = option(
        None, "Name or file of a fleet; none: the only one that is up.", argument=True
    )
    last: int = option(50, "How many events.", ge=1)
    instance: str | None = option(None, "Only of this instance.")
    state: Path | None = option(None, STATE_HELP)
    console: str | None = console_field()
    as_json: bool = json_field("Print JSON, times in Unix seconds.")


@verb(app, HistorySettings)
def history(options: HistorySettings) -> None:
    """Show the plans that were made for a fleet, what was started, drained and stopped, and why.

    Also what failed, in the words of the target. The log only grows; it is written before things are done.
    """
    from atoll.control.operation.fleet_home import find_home

    if options.console is not None:
        events = _ask(options, options.console)
    else:
        home, _ = find_home(options.fleet, options.state)
        events = home.history.read(instance=options.instance, last=options.last)
    if options.as_json:
        emit([event.model_dump(mode="json") for event in events], True)
        return
    out = console()
    for event in events:
        out.print(describe_event(event), soft_wrap=True)
    if not events:
        out.print("nothing has happened yet")


def _ask(options: HistorySettings, url: str) -> Sequence[HistoryEvent]:
    """Return the events that a console elsewhere tells of."""
    from atoll.control.operation.fleet_history import HistoryEvent

    if options.fleet is None:
        raise UsageError("which fleet?", hint="atoll history FLEET --console URL")
    client = ConsoleClient.find(url)
    said = client.ask("GET", fleet_path(options.fleet, f"history?last={options.last}"))
    events = [HistoryEvent.parse(event) for event in said["events"]]
    return [e for e in events if options.instance in (None, e.instance)]


def describe_event(event: HistoryEvent) -> str:
    """Return an event in a line, its time as clocks here show it."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.at_s))
    what = f" {event.instance}" if event.instance is not None else ""
    cost = f" ({format_price(event.usd_per_hour)})" if event.usd_per_hour is not None else ""
    return f"{when}  {event.kind:<10}{what}  {' '.join(event.text.split())}{cost}"
