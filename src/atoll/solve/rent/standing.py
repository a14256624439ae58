"""How a search stands: the best solution, what is proven, and when that is enough."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from atoll.solve.rent.items import Solution
from atoll.solve.rent.types import Log

_COLUMN_S = 2e-5
"""What a column of an integer programme may take before its search begins, on a busy machine."""


class RentDeadline:
    """Wall-clock time left: a safety net. What is searched is counted (`Work`), not timed."""

    def __init__(self, seconds: float) -> None:
        self._start = time.perf_counter()
        self._end = self._start + seconds
        self.missed = False

    @property
    def passed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start

    @property
    def left(self) -> float:
        """Seconds left, not below 0; asking when none is left is remembered in `missed`."""
        left = max(0.0, self._end - time.perf_counter())
        self.missed = self.missed or left <= 0.0
        return left

    def allows(self, columns: int) -> bool:
        """Return whether there is time for a programme of so many columns; if not, that is remembered.

        It must be built and simplified before anything of it can be interrupted.
        """
        enough = self.left >= columns * _COLUMN_S
        self.missed = self.missed or not enough
        return enough


@dataclass
class Work:
    """What a search may still do, in simplex iterations, and what it has done.

    Everything else is counted in the same coin, at about what it takes.
    """

    left: float
    rounds: int = 0
    mips: int = 0
    nodes: int = 0
    iterations: int = 0
    spent: float = 0.0

    def charge(self, iterations: float) -> None:
        """Note work done."""
        self.spent += iterations
        self.left -= iterations

    def part(self, share: float) -> int:
        """Return a share of what is left, at least one."""
        return max(1, int(max(0.0, self.left) * share))


@dataclass(frozen=True)
class Target:
    """A gap relative to the objective or an absolute one, whichever is reached first."""

    gap: float
    absolute: float = 1e-9

    def spare(self, objective: float) -> float:
        """Return how far below the objective a bound may stay."""
        if np.isinf(objective):
            return self.absolute
        return max(self.gap * abs(objective), self.absolute)


class Incumbent:
    """The best solution so far and the best bound; a bound of inf proves that there is no solution.

    `ceiling` is what no solution can cost more than: a bound above it is one of inf.
    """

    def __init__(
        self, target: Target, deadline: RentDeadline, work: Work, log: Log | None = None
    ) -> None:
        self.target = target
        self.deadline = deadline
        self.work = work
        self.solution: Solution | None = None
        self.objective = np.inf
        self.bound = -np.inf
        self.ceiling = np.inf
        self._log = log

    def offer(self, solution: Solution, objective: float) -> bool:
        """Take a solution if it is better; return whether it was."""
        if objective >= self.objective:
            return False
        self.solution, self.objective = solution, objective
        self._report()
        return True

    def prove(self, bound: float) -> None:
        """Take a bound if it is better."""
        if bound > self.ceiling:
            bound = np.inf
        if bound > self.bound:
            self.bound = bound
            self._report()

    @property
    def spare(self) -> float:
        """How far below the objective the bound may stay."""
        return self.target.spare(self.objective)

    @property
    def wanted(self) -> float:
        """What a better solution must cost less than to be worth finding."""
        return self.objective - self.spare if np.isfinite(self.objective) else np.inf

    @property
    def done(self) -> bool:
        """Whether the target is reached, nothing can exist, or effort or time is spent."""
        if self.bound == np.inf or self.work.left <= 0.0 or self.deadline.left <= 0.0:
            return True
        return self.closed

    @property
    def closed(self) -> bool:
        """Whether the target is reached."""
        return self.solution is not None and self.bound >= self.wanted

    def _report(self) -> None:
        if self._log is not None:
            self._log(self.deadline.passed, self.objective, min(self.bound, self.objective))
