"""Planning with simulation at hand: what `solve` finds, and on a cluster the best of it by simulation."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from atoll.solve.effort import DEADLINE_S, Countdown, Effort
from atoll.solve.progress import OnProgress, Progress, SolveStats
from atoll.solve.registry import solve

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.plan.plan import Plan
    from atoll.plan.problem import Problem


def plan(
    problem: Problem,
    *,
    solver: str | None = None,
    effort: Effort | None = None,
    deadline_s: float = DEADLINE_S,
    on_progress: OnProgress | None = None,
    catalog: Catalog | None = None,
    rank: bool = True,
    stats: SolveStats | None = None,
) -> Plan:
    """Return a plan as `solve` does; with `rank`, the best placements on a cluster are simulated.

    Of those the one that generates most under full load is taken and changed further; simulations end with
    the deadline like everything else. What is rented is chosen by its cost, which needs no simulation.
    """
    facts = problem.catalog() if catalog is None else catalog
    chosen = effort or Effort()
    if rank and chosen.rank is None:
        from atoll.prove.rank import Simulated

        def say(text: str) -> None:
            if on_progress is not None:
                on_progress(Progress("ranking", text))

        if problem.hosts:
            # Before the deadline of the search begins.
            from atoll.core.compiling import compile_entries
            from atoll.sim import loop

            compile_entries(loop.__name__)
        chosen = replace(
            chosen, rank=Simulated(problem, facts, say, deadline=Countdown(deadline_s))
        )
    return solve(
        problem,
        solver=solver,
        effort=chosen,
        deadline_s=deadline_s,
        on_progress=on_progress,
        catalog=facts,
        stats=stats,
    )
