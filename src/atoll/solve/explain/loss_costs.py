"""What surviving costs: what each kind of loss leaves, and what a plan costs where it could not happen."""

from __future__ import annotations

from atoll.plan.losses import list_left
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.plan.survival import Survival
from atoll.solve.explain.changes import with_limits
from atoll.solve.explain.plan_explanation import LossCost
from atoll.solve.explain.planning_again import OutOfTimeError, Planner

_MOST = 6
"""Kinds of losses that are priced, those that leave least first."""


def price_losses(base: Plan, planner: Planner, left_out: list[str]) -> tuple[LossCost, ...]:
    """Return each kind of loss with what it leaves of a plan and what surviving it costs, the worst first.

    At last all of them together: what the plan would cost if nothing were ever lost.
    """
    problem, survival = planner.problem, planner.problem.limits.survival
    if problem.family != "rent" or not survival.lost or not base.instances:
        return ()
    least: dict[tuple[str, ...], tuple[float, str]] = {}
    for left in list_left(base, problem, planner.catalog):
        for name, share in left.shares.items():
            kinds = tuple(dict.fromkeys(left.loss.kinds))
            least[kinds] = min(least.get(kinds, (share, name)), (share, name))
    order = sorted(least, key=lambda kinds: (least[kinds][0], kinds))
    found = []
    for kinds in order:
        share, service = least[kinds]
        found.append(
            LossCost(
                lost=" and ".join(kinds),
                service=service,
                left=share,
                keep=survival.keep,
            )
        )
    asked = [
        (at, survival.model_copy(update={"spared": tuple(sorted({*survival.spared, *kinds}))}))
        for at, kinds in enumerate(order[:_MOST])
    ]
    found.append(LossCost(lost=None, keep=survival.keep))
    asked.append((len(found) - 1, Survival()))
    for at, other in asked:
        said = found[at].lost or "anything"
        usd = _saved(base, with_survival(problem, other), said, planner)
        if usd is None:
            left_out.append(f"what surviving the loss of {said} costs")
            continue
        found[at] = found[at].model_copy(update={"saves_usd": usd})
    return (*_bind(found[:-1]), found[-1])


def _bind(losses: list[LossCost]) -> list[LossCost]:
    """Name the loss that binds: the one that costs most, or where none does alone, that leaves least."""
    worst = max(losses, key=lambda loss: (round(loss.saves_usd or 0.0, 6), -loss.left))
    return [one.model_copy(update={"binds": one is worst}) for one in losses]


def with_survival(problem: Problem, survival: Survival) -> Problem:
    """Return the problem with other losses to survive."""
    return with_limits(problem, survive=survival if survival.lost else 0)


def _saved(base: Plan, asked: Problem, said: str, planner: Planner) -> float | None:
    """What a plan that need not survive something saves, USD/h; None where there was no time to ask."""
    try:
        plan = planner.ask(asked, f"without the loss of {said}")
    except OutOfTimeError:
        return None
    if plan.status not in ("optimal", "feasible"):
        return 0.0
    return max(0.0, (base.objective or 0.0) - (plan.objective or 0.0))
