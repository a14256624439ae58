"""The price of running: what plans would cost with other engines, and with layouts that none of them runs.

Each price that differs says which limits make it so: what of the instances in question other engines do not
run, and which would. All of it is for capacity alone: what simulation finds that templates carry is known of
this plan's only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from atoll.catalog.catalog import Catalog
from atoll.engines.table import find_engine, list_planned
from atoll.plan.engine_layout import list_limits
from atoll.plan.plan import Instance, Plan
from atoll.plan.problem import Problem
from atoll.solve.explain.merit import merit
from atoll.solve.explain.plan_explanation import EngineCost, EngineLimit
from atoll.solve.explain.planning_again import OutOfTimeError, Planner

_SAME = 1e-6
"""Share by which prices may differ and be the same."""


def price_engines(planner: Planner, left_out: list[str]) -> tuple[EngineCost, ...]:
    """Return what the best plan costs as it is, with any layout, without each engine, and with others."""
    problem = planner.problem
    allowed = problem.settings.engines
    if not allowed:
        return ()
    found: list[EngineCost] = []
    plain = replace(planner.effort, derating=None)
    base: Plan | None = None
    for change, engine, engines in _variants(allowed):
        asked = problem.replace(settings={**dict(problem.settings), "engines": engines})
        try:
            # Not what the planner remembers: plans sized by simulation do not compare with these.
            plan = planner.ask_fresh(asked, f"engines: {change}", effort=plain)
        except OutOfTimeError:
            left_out.append("what other engines would cost")
            break
        cost = _cost(change, engines, plan, asked)
        if base is None:
            base = plan
        elif _differs(plan, base):
            instances = _concerned(plan, base, engine, allowed)
            others = set(allowed) - {engine}
            limits = _find_limits(instances, others, problem, planner.catalog)
            usd = base.usd_per_hour if base.status != "infeasible" else None
            update = {"engine": engine, "allowed_usd_per_hour": usd, "limits": limits}
            cost = cost.model_copy(update=update)
        found.append(cost)
    # Of machines that cost nothing there is nothing to say.
    return tuple(found) if any(cost.usd_per_hour for cost in found) else ()


def _variants(allowed: tuple[str, ...]) -> Iterator[tuple[str, str | None, tuple[str, ...]]]:
    """Yield changes in words, the engine that comes or goes, and those that are left; first no change."""
    yield "as it is", None, allowed
    yield "any layout, run by none of these", None, ()
    for name in allowed if len(allowed) > 1 else ():
        yield f"without {name}", name, tuple(other for other in allowed if other != name)
    for engine in list_planned():
        if engine.name not in allowed:
            yield f"with {engine.name}", engine.name, (*allowed, engine.name)


def _cost(change: str, engines: tuple[str, ...], plan: Plan, problem: Problem) -> EngineCost:
    met = merit(plan, problem).meets_demand
    usd = plan.usd_per_hour if plan.status != "infeasible" else None
    return EngineCost(change=change, engines=engines, usd_per_hour=usd, meets_demand=met)


def _differs(plan: Plan, base: Plan) -> bool:
    if plan.status != base.status:
        return True
    return abs(plan.usd_per_hour - base.usd_per_hour) > _SAME * max(1.0, base.usd_per_hour)


def _concerned(
    plan: Plan, base: Plan, engine: str | None, allowed: tuple[str, ...]
) -> tuple[Instance, ...]:
    """Return instances that make the difference: those of the engine, or all of any layout.

    An engine that is left out has them in the plan as it is, one that is added in the other.
    """
    if engine is None:
        return plan.instances
    own = base if engine in allowed else plan
    return tuple(instance for instance in own.instances if instance.engine == engine)


def _find_limits(
    instances: Iterable[Instance], others: Collection[str], problem: Problem, catalog: Catalog
) -> tuple[EngineLimit, ...]:
    """Return what other engines do not run of instances that none of them runs."""
    missing: dict[str, tuple[set[str], set[str]]] = {}
    concerned: list[Instance] = []
    for instance in instances:
        limits = {name: _limits_of(name, instance, problem, catalog) for name in others}
        if not all(limits.values()):
            continue
        concerned.append(instance)
        for name, lacks in limits.items():
            for limit in lacks:
                named, engines = missing.setdefault(limit, (set(), set()))
                named.add(instance.id)
                engines.add(name)
    found = []
    for limit, (named, engines) in sorted(missing.items()):
        # What another limit says of the same instances, and of more engines, goes without saying.
        if any(engines < more and named <= of_more for of_more, more in missing.values()):
            continue
        own = [instance for instance in concerned if instance.id in named]
        run_by = tuple(
            engine.name
            for engine in list_planned()
            if not any(limit in _limits_of(engine.name, one, problem, catalog) for one in own)
        )
        found.append(
            EngineLimit(
                limit=limit,
                instances=tuple(sorted(named)),
                missing_in=tuple(sorted(engines)),
                run_by=run_by,
            )
        )
    return tuple(found)


def _limits_of(
    name: str, instance: Instance, problem: Problem, catalog: Catalog
) -> tuple[str, ...]:
    spec = catalog.model(problem.service(instance.service).model).llm
    return list_limits(find_engine(name), instance, spec, catalog)
