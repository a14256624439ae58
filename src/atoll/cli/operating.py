"""The terminal as whoever is told of a fleet and asked about its changes; for `up`, `operate` and `down`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import typer

from atoll.cli.progress import live_line
from atoll.control.operation.options import OperationListener
from atoll.core.errors import UsageError
from atoll.core.units import pluralize
from atoll.report.terminal import console, emit, note

if TYPE_CHECKING:
    from atoll.control.operation.control_loop import LoopTurn
    from atoll.control.operation.fleet_change import FleetChange
    from atoll.control.operation.fleet_home import FleetRecord
    from atoll.deploy.target import InstanceStatus


class TerminalListener(OperationListener):
    """Writes to stderr what happens, shows changes and asks before they are made unless `yes`.

    With `as_json` stdout is for JSON alone.
    """

    def __init__(self, *, yes: bool, as_json: bool = False) -> None:
        self._yes, self._as_json = yes, as_json

    def note(self, text: str) -> None:
        """Write a line to stderr."""
        note(text)

    def working(
        self, text: str, deadline_s: float | None = None
    ) -> AbstractContextManager[Callable[[str], None]]:
        """Show a line that changes while something runs."""
        return live_line(text, deadline_s)

    def approve(self, change: FleetChange) -> bool:
        """Show a change, and ask whether to go ahead where there is one."""
        if not self._as_json:
            console().print(change.text(), soft_wrap=True)
        return change.is_empty or self._ask()

    def approve_end(
        self, record: FleetRecord, instances: Sequence[tuple[str, InstanceStatus]], wait_s: float
    ) -> bool:
        """Show what ends with a fleet, and ask whether to go ahead."""
        for target, each in instances:
            console().print(f"  - {each.labels.instance} on {target} ({each.state})")
        own = record.entrance is not None and record.entrance.hub is not None
        besides = " and its gateway and hub" if own else ""
        word = "drained and ended" if wait_s else "ended at once"
        console().print(
            f"{record.name}: {pluralize(len(instances), 'instance')}{besides} will be {word}"
        )
        return self._ask()

    def _ask(self) -> bool:
        return self._yes or typer.confirm("Go ahead?", default=False)

    def turned(self, turn: LoopTurn) -> None:
        """Print a turn as JSON, where that is asked for."""
        if self._as_json:
            done = [type(action).__name__ for action in turn.done]
            emit({"time_s": turn.view.time_s, "reasons": turn.decision.reasons, "done": done}, True)

    def check_can_ask(self) -> None:
        """Raise UsageError where nobody could be asked."""
        if not self._yes and not (sys.stdin is not None and sys.stdin.isatty()):
            raise UsageError(
                "a change has to be confirmed, and there is no terminal to ask at",
                hint="--yes goes ahead, --dry-run only shows",
            )
