"""The safety net of a search: work is counted, and this ends it where the clock runs out before."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


def _now() -> float:
    # Looked up when it is asked for: tests put another clock in its place.
    return time.perf_counter()


@dataclass
class Deadline:
    """When to stop, in seconds from now, whatever is left to do; remembers whether it came."""

    seconds: float
    began: float = field(default_factory=_now)
    came: bool = False

    @property
    def passed(self) -> float:
        """Seconds so far."""
        return _now() - self.began

    @property
    def left(self) -> float:
        """Seconds until it comes, 0 at least."""
        return max(0.0, self.seconds - self.passed)

    def is_over(self) -> bool:
        """Return whether it came, to be asked before something that would be left undone."""
        self.came = self.came or self.passed >= self.seconds
        return self.came
