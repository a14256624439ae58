"""State of a search: the best solution so far, the bound proven so far, and the limits that end it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from atoll.solve.deadline import Deadline
from atoll.solve.rent.allocation_types import Log
from atoll.solve.rent.items import Solution


@dataclass(frozen=True)
class MipLimits:
    """When an integer solve ends: at either gap, after so many seconds, simplex iterations or nodes."""

    seconds: float
    gap: float
    absolute_gap: float
    iterations: int
    nodes: int | None = None


@dataclass
class Work:
    """Work that a search has left, in simplex iterations, and counts of the work done.

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
        self, target: Target, deadline: Deadline, work: Work, log: Log | None = None
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

    def limits(self, iterations: int, part: float = 0.5, nodes: int | None = None) -> MipLimits:
        """Return limits of one integer solve, to a `part` of the gap asked for: others add to that gap."""
        gap, absolute = part * self.target.gap, part * self.target.absolute
        return MipLimits(self.deadline.limit(), gap, absolute, iterations, nodes)

    @property
    def spare(self) -> float:
        """How far below the objective the bound may stay."""
        return self.target.spare(self.objective)

    @property
    def wanted(self) -> float:
        """Cost below which a better solution is worth finding."""
        return self.objective - self.spare if np.isfinite(self.objective) else np.inf

    @property
    def done(self) -> bool:
        """Whether the target is reached, nothing can exist, or effort or time is spent."""
        if self.bound == np.inf or self.work.left <= 0.0 or self.deadline.limit() <= 0.0:
            return True
        return self.closed

    @property
    def closed(self) -> bool:
        """Whether the target is reached."""
        return self.solution is not None and self.bound >= self.wanted

    def _report(self) -> None:
        if self._log is not None:
            self._log(self.deadline.spent, self.objective, min(self.bound, self.objective))
