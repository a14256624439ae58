"""Simulations that keep a deadline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.core.errors import AtollError

if TYPE_CHECKING:
    from atoll.sim.api import Progress
    from atoll.solve.deadline import Deadline


class SimulationCutShortError(AtollError):
    """The deadline came before a simulation had ended: nothing is known of the plan."""


def keep_deadline(deadline: Deadline | None) -> Progress:
    """Return what ends a simulation, by an error, once the deadline has passed; see `sim.api.Progress`."""

    def watch(_finished: int, _requests: int, clock_s: float) -> None:
        if deadline is not None and deadline.passed:
            raise SimulationCutShortError(
                f"a simulation stopped after {clock_s:,.0f} s of its time"
            )

    return watch
