"""All solvers behind one call: a problem in, a checked plan out.

    plan = solve(problem)

There are two families. Where nodes are on offer, the cheapest of them are rented (`rent`); where a cluster is
given, layers are placed on it (`place`). Nobody else has to know which family a problem belongs to.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

from atoll.core.errors import (
    InfeasibleError,
    MissingDependencyError,
    UnknownNameError,
    UsageError,
)
from atoll.solve.effort import DEADLINE_S, Effort

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.plan.plan import Plan
    from atoll.plan.problem import Problem
    from atoll.solve.comparison import Compared
    from atoll.solve.family import SolverFamily
    from atoll.solve.progress import OnProgress

_PACKAGES = ("numba", "highspy", "scipy")
LATE = "a longer --deadline may find a plan that serves more"
"""What to do where the deadline came before the search ended."""


def solve(
    problem: Problem,
    *,
    solver: str | None = None,
    effort: Effort | None = None,
    deadline_s: float = DEADLINE_S,
    on_progress: OnProgress | None = None,
    catalog: Catalog | None = None,
) -> Plan:
    """Return a plan for a problem that has passed the validator.

    `solver` is one of `solvers(problem)`, by default the first of them. The search ends when the plan is
    proven as close to the best as `effort` asks, or after `deadline_s` seconds; `on_progress` is told how
    far it is. `catalog` are the facts to plan with, by default those of the problem. Where there is no plan
    its status is "infeasible" and its reasons say why.
    """
    if not deadline_s > 0:
        raise UsageError(f"a deadline of {deadline_s:g} s", hint="give it some time, as in 30.0")
    require_packages()
    from atoll.plan.validate.check import check

    family = _family(problem)
    name = solver or family.names[0]
    _check_name(name, problem)
    facts = problem.catalog() if catalog is None else catalog
    plan = family.solve(name, problem, facts, effort or Effort(), deadline_s, on_progress)
    check(plan, problem, facts)
    return plan


def solvers(problem: Problem) -> tuple[str, ...]:
    """Return the names of the solvers that fit a problem, the default first."""
    return _family(problem).names


def compare_solvers(
    plan: Plan,
    problem: Problem,
    *,
    effort: Effort | None = None,
    deadline_s: float = DEADLINE_S,
    on_progress: OnProgress | None = None,
    catalog: Catalog | None = None,
) -> Iterator[Compared]:
    """Yield what simple rules make of the problem, beside a plan for it."""
    from atoll.plan.validate.violation import InvalidPlanError
    from atoll.solve.comparison import broken, compare

    facts = problem.catalog() if catalog is None else catalog
    for name in _family(problem).baselines:
        if name == plan.solver:
            continue
        try:
            other = solve(
                problem,
                solver=name,
                effort=effort,
                deadline_s=deadline_s,
                on_progress=on_progress,
                catalog=facts,
            )
        except InvalidPlanError as error:
            # Baselines know no limits of the whole; the validator says which they break.
            yield broken(name, error)
        else:
            yield compare(other, plan, problem)


def count_templates(
    problem: Problem, *, catalog: Catalog | None = None, cached: bool = True
) -> dict[str, dict[str, int]]:
    """Return by role how many templates there are, of how many sets of nodes; placing needs none."""
    facts = problem.catalog() if catalog is None else catalog
    return _family(problem).count_templates(problem, facts, cached)


def require(
    plan: Plan, problem: Problem, *, strict: bool = False, late: bool = False
) -> InfeasibleError | None:
    """Return why a plan is not good enough, None if it is: there is none, or it must meet all demand.

    `strict` asks for all demand; a fleet that says `on_shortage: fail` does so, too. `late` says that the
    deadline came before the search ended.
    """
    from atoll.core.units import format_share

    why = "the deadline came first" if late else "; ".join(plan.reasons[:3])
    because = f": {why}" if why else ""
    family = _family(problem)
    if plan.status == "infeasible":
        hint = LATE if late else family.hint
        return InfeasibleError(family.failure.format(name=plan.problem_name) + because, hint=hint)
    if plan.status == "partial" and (strict or problem.settings.on_shortage == "fail"):
        least = min(plan.served_fraction.values())
        accept = "accept that (no --strict, no 'on_shortage: fail'), or ask `atoll explain`"
        return InfeasibleError(
            f"only {format_share(least)} of the demand can be met{because}",
            hint=LATE if late else accept,
        )
    return None


def require_packages() -> None:
    """Say which extra to install where the packages that plan are missing."""
    for package in _PACKAGES:
        if find_spec(package) is None:
            raise MissingDependencyError(package, "plan", needed_for="planning")


def _family(problem: Problem) -> SolverFamily:
    """Return the solvers for a problem: the one place that asks whether it has a cluster."""
    if problem.cluster is not None:
        from atoll.solve.place.solver import FAMILY as PLACING

        return PLACING
    from atoll.solve.rent.solver import FAMILY as RENTING

    return RENTING


def _check_name(name: str, problem: Problem) -> None:
    """Refuse a solver that nobody knows, or that is for another kind of problem."""
    from atoll.solve.place.solver import FAMILY as PLACING
    from atoll.solve.rent.solver import FAMILY as RENTING

    fitting = solvers(problem)
    if name in fitting:
        return
    if name not in (*RENTING.names, *PLACING.names):
        raise UnknownNameError("solver", name, (*RENTING.names, *PLACING.names))
    what = "no fixed cluster" if name in PLACING.names else "a fixed cluster"
    raise UsageError(f"{problem.name} has {what}", hint=f"use {', '.join(fitting)}", field="solver")
