"""How a search stands: the best solution, what is proven, and when that is enough."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from atoll.solve.rent.columns import Solution
from atoll.solve.rent.types import Log


class Deadline:
    """Wall-clock time left."""

    def __init__(self, seconds: float) -> None:
        self._start = time.perf_counter()
        self._end = self._start + seconds

    @property
    def passed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start

    @property
    def left(self) -> float:
        """Seconds left, not below 0."""
        return max(0.0, self._end - time.perf_counter())

    def part(self, share: float) -> Deadline:
        """Return a deadline after a share of what is left."""
        return Deadline(self.left * share)


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

    `ceiling` is what no solution can cost more than: a bound above it is one of inf. Where nothing is
    found after a share `patience` of the time, the search is over.
    """

    def __init__(
        self, target: Target, deadline: Deadline, log: Log | None = None, patience: float = 1.0
    ) -> None:
        self.target = target
        self.deadline = deadline
        self.solution: Solution | None = None
        self.objective = np.inf
        self.bound = -np.inf
        self.ceiling = np.inf
        self._patience = deadline.part(patience)
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
    def left(self) -> float:
        """Seconds left, not below 0."""
        return self._patience.left if self.solution is None else self.deadline.left

    @property
    def done(self) -> bool:
        """Whether the target is reached, nothing can exist, or time is up."""
        if self.left <= 0.0 or self.bound == np.inf:
            return True
        return self.solution is not None and self.bound >= self.wanted

    def _report(self) -> None:
        if self._log is not None:
            self._log(self.deadline.passed, self.objective, min(self.bound, self.objective))
