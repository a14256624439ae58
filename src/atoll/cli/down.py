"""`atoll down`: drain a fleet, end it, and what was started for it."""

from __future__ import annotations

from pathlib import Path

import typer

from atoll.cli.operating import TerminalListener
from atoll.cli.options import VerbSettings, verb
from atoll.control.operation.options import STATE_HELP
from atoll.core.options import option
from atoll.core.quantities import Duration
from atoll.report.terminal import note

app = typer.Typer(add_completion=False)


class DownSettings(VerbSettings):
    """Options of `atoll down`."""

    fleet: str | None = option(
        None, "Name or file of a fleet; none: the only one that is up.", argument=True
    )
    yes: bool = option(False, "Do not ask.")
    now: bool = option(False, "Do not wait for streams: end everything at once.")
    wait: Duration = option("10min", "How long streams may take; what still runs then is ended.")
    state: Path | None = option(None, STATE_HELP)


@verb(app, DownSettings)
def down(options: DownSettings) -> None:
    """Have every instance of a fleet finish its streams and end, then its gateway and hub.

    History and settings stay, so that `atoll up` brings it back. A controller that operates the fleet has to
    be stopped first.
    """
    from atoll.api.running import RunningFleet

    fleet = RunningFleet.find(options.fleet, state=options.state)
    terminal = TerminalListener(yes=options.yes)
    terminal.check_can_ask()
    if fleet.down(wait_s=0.0 if options.now else options.wait, listener=terminal):
        note(f"{fleet.name} is down; `atoll up {fleet.record.source}` brings it back")
    else:
        note("nothing was changed")
