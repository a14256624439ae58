"""A plan next to what other solvers make of the same problem."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from atoll.core.errors import InternalError
from atoll.core.frozen import Frozen
from atoll.core.units import format_price
from atoll.plan.plan import Plan, Status
from atoll.plan.problem import Problem
from atoll.plan.validate.violation import InvalidPlanError
from atoll.solve.deadline import Deadline
from atoll.solve.explain.plan_explanation import served_share
from atoll.solve.family import family_of
from atoll.solve.plan_request import PlanRequest

_ROUNDING = 1e-6
"""Share of a bound that a cheaper plan may differ by."""


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


def compare_solvers(
    plan: Plan, problem: Problem, request: PlanRequest | None = None
) -> Iterator[Compared]:
    """Yield what simple rules make of the problem, beside a plan for it, until the deadline has passed."""
    from atoll.solve.registry import solve
    from atoll.solve.resizing import sized_like

    request = request or PlanRequest()
    catalog, left = request.catalog_for(problem), Deadline(request.deadline_s)
    # What a rule would rent for the same promises, its instances carrying what the plan's do.
    whole = problem
    problem, derating = sized_like(plan, whole.settled(plan.mixes), catalog)
    if derating is not None and derating.priors:
        # Models that the plan does not use carry what its own do on average.
        derating = replace(derating, default=sum(derating.priors.values()) / len(derating.priors))
    if problem.settings is not whole.settings:
        whole = whole.replace(settings=problem.settings)
    effort = request.effort if derating is None else replace(request.effort, derating=derating)
    if plan.promises and problem.family == "graph":
        from atoll.solve.graph.room import slowdown_of

        # Executors of a rule are given the room that those of the plan have, on average.
        effort = replace(effort, slowdown=slowdown_of(plan, problem, catalog))
    family = family_of(problem)
    names = [name for name in family.baselines if name != plan.solver]
    for tried, name in enumerate(names):
        if left.passed:
            return
        seconds = left.share(1 / (len(names) - tried))
        asked = replace(
            request, solver=name, effort=effort, deadline_s=seconds, catalog=catalog, stats=None
        )
        try:
            other = solve(whole if name in family.choosers else problem, asked)
        except InvalidPlanError as error:
            # Baselines know no limits of the whole; the validator says which they break.
            rules = dict.fromkeys(str(violation.rule) for violation in error.violations)
            yield Compared(solver=name, broken=tuple(rules))
        else:
            refuse_cheaper(other, plan, problem)
            yield compare(other, plan, problem, whole.settled(other.mixes) if other.mixes else None)


def refuse_cheaper(other: Plan, plan: Plan, problem: Problem) -> None:
    """Raise InternalError where a valid plan costs less than is proven of every plan that serves as much."""
    bound = plan.bound if plan.capacity_bound is None else plan.capacity_bound
    same = plan.goal == other.goal == "cost" and "partial" not in (plan.status, other.status)
    if bound is None or other.objective is None or not same or other.status == "infeasible":
        return
    if other.objective < bound * (1.0 - _ROUNDING):
        raise InternalError(
            f"the rule {other.solver} plans {problem.name} for {format_price(other.objective)}, and"
            f" nothing was to cost less than {format_price(bound)}: what is proven is wrong",
            hint="report this with the fleet file; until then take the plan of that rule (--solver)",
        )


def compare(other: Plan, plan: Plan, problem: Problem, others: Problem | None = None) -> Compared:
    """Return another plan's figures beside those of `plan`; `others` is its problem, should it differ."""
    asked = problem if others is None else others
    served, own = served_share(other, asked), served_share(plan, problem)
    same = abs(served - own) <= 1e-3 and plan.usd_per_hour > 0
    return Compared(
        solver=other.solver,
        status=other.status,
        usd_per_hour=other.usd_per_hour,
        nodes=other.nodes,
        served=served,
        served_mean=served_share(other, asked, mean=True),
        ratio=other.usd_per_hour / plan.usd_per_hour if same else None,
        tokens_per_s=None if other.goal == "cost" else other.objective,
        hops=max((instance.stages for instance in other.instances), default=0),
    )
