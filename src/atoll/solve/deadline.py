"""A deadline, the safety net beside counted work: what is searched is counted, not timed."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

_MOMENT_S = 1e-3
"""Seconds of a step where no time is left: it must return the first plan that it has."""
_COLUMN_S = 2e-5
"""Seconds for each column of an integer program before its search begins, on a busy machine."""


def _now() -> float:
    # Looked up when it is asked for: tests put another clock in its place.
    return time.perf_counter()


@dataclass
class Deadline:
    """When to stop, in seconds from now; several steps may share it. `missed` if any was left undone."""

    seconds: float
    began: float = field(default_factory=lambda: _now())  # noqa: PLW0108  (another clock may take its place)
    missed: bool = False

    @property
    def spent(self) -> float:
        """Seconds so far."""
        return _now() - self.began

    @property
    def left(self) -> float:
        """Seconds left, below 0 once it has passed."""
        return self.seconds - self.spent

    @property
    def passed(self) -> bool:
        """Whether none is left."""
        return self.left <= 0.0

    def share(self, part: float, kept: float = 0.0) -> float:
        """Return a share of the seconds left but for those `kept`, at least a moment: a solver needs some."""
        return max(_MOMENT_S, (self.left - kept) * part)

    def sooner(self, seconds: float) -> Deadline:
        """Return one that comes so many seconds before."""
        return Deadline(self.seconds - seconds, self.began)

    def is_over(self) -> bool:
        """Return whether it was missed, to be asked before something that would be left undone."""
        self.missed = self.missed or self.passed
        return self.missed

    def limit(self) -> float:
        """Return the seconds left for one step, not below 0; that none is left is remembered."""
        left = max(0.0, self.left)
        self.missed = self.missed or left <= 0.0
        return left

    def allows(self, columns: int) -> bool:
        """Return whether there is time for a program of so many columns; if not, that is remembered.

        It must be built and simplified before anything of it can be interrupted.
        """
        return self.lasts(columns * _COLUMN_S)

    def lasts(self, seconds: float) -> bool:
        """Return whether there is time for a step that nothing interrupts; if not, that is remembered."""
        enough = self.left >= seconds
        self.missed = self.missed or not enough
        return enough
