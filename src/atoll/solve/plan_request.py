"""A planning request: everything besides the problem that planning needs to know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from atoll.core.errors import UsageError
from atoll.solve.effort import DEADLINE_S, Effort
from atoll.solve.solve_progress import OnProgress, Progress, SolveStats

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.plan.plan import Plan
    from atoll.plan.problem import Problem

FindPlan = Callable[["Problem", "PlanRequest"], "Plan"]
"""Plans a problem; the steps of a search call it with less effort or time than they were given."""


@dataclass(frozen=True)
class PlanRequest:
    """How to plan a problem, passed unchanged from the caller down to the solver.

    `solver` is one of `solvers(problem)`, by default the first. The search ends when the plan is proven as
    close to the best as `effort` asks, or when the work that it allows is done. `deadline_s` (seconds) is a
    safety net: equal requests give equal plans unless it passes first, and then the plan says `cut_short`.
    `catalog` are the facts to plan with, by default those of the problem. `on_progress` is told how far
    planning is, and `stats` collects what it took. With `rescue` a simple rule answers where it serves
    more than what a search that was cut short has found.

    The rest is for planning with simulation (`prove.planning`): `rank` simulates the best placements on a
    fixed cluster and takes the best of them; `capacity_only` leaves out sizing by simulation; `error_bars`
    says how likely each promise is kept, over the errors that the performance model may have.
    """

    solver: str | None = None
    effort: Effort = field(default_factory=Effort)
    deadline_s: float = DEADLINE_S
    on_progress: OnProgress | None = None
    catalog: Catalog | None = None
    stats: SolveStats | None = None
    rank: bool = True
    capacity_only: bool = False
    error_bars: bool = True
    rescue: bool = True

    def catalog_for(self, problem: Problem) -> Catalog:
        """Return the facts to plan a problem with."""
        return problem.catalog() if self.catalog is None else self.catalog

    def check_deadline(self) -> None:
        """Raise UsageError where there is no time to plan in."""
        if not self.deadline_s > 0:
            raise UsageError(
                f"a deadline of {self.deadline_s:g} s", hint="give it some time, as in 30.0"
            )

    def say(
        self,
        stage: str,
        text: str,
        share: float | None = None,
        work: Mapping[str, int] | None = None,
    ) -> None:
        """Tell whoever listens how far planning is."""
        if self.on_progress is not None:
            self.on_progress(Progress(stage, text, share, work))
