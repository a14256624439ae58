"""`atoll history`: what was decided about a fleet, and why."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from atoll.cli.console_client import ConsoleClient, console_field, fleet_path, name_fleet
from atoll.cli.options import VerbSettings, json_field, verb
from atoll.control.operation.options import STATE_HELP
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
    last: int = option(50, "How many events.", ge=1, le=10_000)
    instance: str | None = option(None, "Only of this instance.")
    state: Path | None = option(None, STATE_HELP)
    console: str | None = console_field()
    as_json: bool = json_field("Print JSON, times in Unix seconds.")


@verb(app, HistorySettings)
def history(options: HistorySettings) -> None:
    """Show the plans that were made for a fleet, what was started, drained and stopped, and why.

    Also what failed, in the words of the target. The log only grows; it is written before things are done.
    """
    events = _ask(options)
    if options.as_json:
        emit([event.model_dump(mode="json") for event in events], True)
        return
    out = console()
    for event in events:
        out.print(describe_event(event), soft_wrap=True)
    if not events:
        out.print("nothing has happened yet")


def _ask(options: HistorySettings) -> Sequence[HistoryEvent]:
    from atoll.control.operation.fleet_history import HistoryEvent

    fleet = name_fleet(options.fleet, options.state, options.console)
    query = {"last": options.last, "instance": options.instance}
    path = fleet_path(fleet, "history", {k: v for k, v in query.items() if v is not None})
    said = ConsoleClient.find_fleets(options.console, options.state).ask("GET", path)
    return [HistoryEvent.parse(event) for event in said["events"]]


def describe_event(event: HistoryEvent) -> str:
    """Return an event in a line, its time as clocks here show it."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.at_s))
    what = f" {event.instance}" if event.instance is not None else ""
    cost = f" ({format_price(event.usd_per_hour)})" if event.usd_per_hour is not None else ""
    return f"{when}  {event.kind:<10}{what}  {' '.join(event.text.split())}{cost}"
