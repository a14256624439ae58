"""The price of running: what plans would cost with other engines, and with layouts that none of them runs.

All of it is for capacity alone: what simulation finds that templates carry is known of this plan's only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from atoll.engines.table import list_planned
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.solve.explain.merit import merit
from atoll.solve.explain.plan_explanation import EngineCost
from atoll.solve.explain.planning_again import OutOfTimeError, Planner


def price_engines(planner: Planner, left_out: list[str]) -> tuple[EngineCost, ...]:
    """Return what the best plan costs as it is, with any layout, without each engine, and with others."""
    problem = planner.problem
    if not problem.settings.engines:
        return ()
    found: list[EngineCost] = []
    plain = replace(planner.effort, derating=None)
    for change, engines in _variants(problem.settings.engines):
        asked = problem.replace(settings={**dict(problem.settings), "engines": engines})
        try:
            # Not what the planner remembers: plans sized by simulation do not compare with these.
            plan = planner.ask_fresh(asked, f"engines: {change}", effort=plain)
        except OutOfTimeError:
            left_out.append("what other engines would cost")
            break
        found.append(_cost(change, engines, plan, asked))
    # Of machines that cost nothing there is nothing to say.
    return tuple(found) if any(cost.usd_per_hour for cost in found) else ()


def _variants(allowed: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield changes in words with the engines that are left; the first is no change."""
    yield "as it is", allowed
    yield "any layout, run by none of these", ()
    for name in allowed if len(allowed) > 1 else ():
        yield f"without {name}", tuple(other for other in allowed if other != name)
    for engine in list_planned():
        if engine.name not in allowed:
            yield f"with {engine.name}", (*allowed, engine.name)


def _cost(change: str, engines: tuple[str, ...], plan: Plan, problem: Problem) -> EngineCost:
    met = merit(plan, problem).meets_demand
    usd = plan.usd_per_hour if plan.status != "infeasible" else None
    return EngineCost(change=change, engines=engines, usd_per_hour=usd, meets_demand=met)
