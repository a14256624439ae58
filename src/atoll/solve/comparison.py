"""A plan next to what other solvers make of the same problem."""

from __future__ import annotations

from atoll.core.frozen import Frozen
from atoll.plan.plan import Plan, Status
from atoll.plan.problem import Problem
from atoll.plan.validate.violation import InvalidPlanError
from atoll.solve.explain.explanation import served_share


class Compared(Frozen):
    """Another solver's plan in figures.

    `served` is the share of demand of the least served service (the mean where the problem weighs services by
    priority) and `served_mean` the mean of all. `ratio` is its cost over that of the plan it is compared
    with, where both serve the same. `broken` names the rules it breaks: a baseline may know nothing of a
    budget, and then has no plan to compare. On a fixed cluster `tokens_per_s` is what it carries and `hops`
    its longest pipeline.
    """

    solver: str
    status: Status | None = None
    usd_per_hour: float | None = None
    nodes: int | None = None
    served: float | None = None
    served_mean: float | None = None
    ratio: float | None = None
    broken: tuple[str, ...] = ()
    tokens_per_s: float | None = None
    hops: int = 0


def compare(other: Plan, plan: Plan, problem: Problem) -> Compared:
    """Return another plan's figures beside those of `plan`."""
    served, own = served_share(other, problem), served_share(plan, problem)
    same = abs(served - own) <= 1e-3 and plan.usd_per_hour > 0
    return Compared(
        solver=other.solver,
        status=other.status,
        usd_per_hour=other.usd_per_hour,
        nodes=other.nodes,
        served=served,
        served_mean=served_share(other, problem, mean=True),
        ratio=other.usd_per_hour / plan.usd_per_hour if same else None,
        tokens_per_s=None if other.goal == "cost" else other.objective,
        hops=max((instance.stages for instance in other.instances), default=0),
    )


def broken(solver: str, error: InvalidPlanError) -> Compared:
    """Return the line of a solver whose plan broke a rule."""
    rules = dict.fromkeys(str(violation.rule) for violation in error.violations)
    return Compared(solver=solver, broken=tuple(rules))
