"""Promises with a choice of models: which model answers is chosen for what its promises take.

Levels are chosen for capacity first, and the plan for the problem that they settle is sized by simulation
(`promise`). What a promise takes differs by model: short of it are those whose instances are nearly full, and
few. So levels are chosen once more with the demand of each way scaled by what its promise cost beside its
capacity; a model that was not tried counts with its capacity. That is done a few times, while it gives other
levels, and the cheapest plan that keeps its promises is taken. Its bound is over all levels, with every
template carrying as much as one that nobody has simulated (`simulated_bound`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from atoll.prove.rent_promises import keep_promises
from atoll.prove.simulated_bound import UNKNOWN
from atoll.solve.deadline import Deadline
from atoll.solve.registry import solve
from atoll.solve.rent.choosing.choose import ChosenLevels
from atoll.solve.rent.choosing.solver import choose_mixes, with_mixes

if TYPE_CHECKING:
    from atoll.plan.plan import Plan
    from atoll.plan.problem import Problem
    from atoll.solve.plan_request import PlanRequest

ROUNDS = 3
"""How often levels are chosen, at most."""
_LEVEL_DECIMALS = 4
"""Decimals of a share in which levels must differ to be others."""
_FIRST_SHARE = 0.5
"""Share of the time that is left for choosing models, and for the first plan: more rounds may follow."""
_MAX_FACTOR = 10.0
"""Largest factor that a promise may put on the demand of a choice's service."""


def keep_chosen_promises(problem: Problem, request: PlanRequest) -> Plan:
    """Return the cheapest plan found whose promises are kept, over mixes of models; it has its mixes."""
    deadline = Deadline(request.deadline_s)

    def within(share: float) -> PlanRequest:
        return replace(request, deadline_s=deadline.share(share))

    first: ChosenLevels | None = None
    best: Plan | None = None
    tried: set[tuple[tuple[str, float], ...]] = set()
    factors: dict[str, float] = {}
    for number in range(ROUNDS):
        request.say("promises", f"choosing models, round {number + 1}")
        chosen = choose_mixes(problem, request, Deadline(deadline.share(_FIRST_SHARE)), factors)
        first = first or chosen
        key = tuple(sorted((name, round(y, _LEVEL_DECIMALS)) for name, y in chosen.levels.items()))
        if key in tried:
            break
        tried.add(key)
        settled = problem.settled(chosen.mixes)
        plan = keep_promises(settled, within(_FIRST_SHARE if number == 0 else 1.0))
        made = with_mixes(plan, replace(chosen, bound=first.bound))
        made = made.model_copy(
            update={"capacity_bound": made.bound if made.promises else made.capacity_bound}
        )
        if best is None or _merit(made) > _merit(best):
            best = made
        if number + 1 == ROUNDS or deadline.passed or not plan.instances:
            break
        capacity = chosen.plan or solve(settled, within(_FIRST_SHARE))
        factors |= _factors(plan, capacity)
    assert best is not None
    assert first is not None
    if not best.promises:
        return best
    # Whatever mix is simulated, no model's instances are taken to carry more than `UNKNOWN` says.
    request.say("promises", "looking for a bound")
    eased = {service.name: 1.0 / UNKNOWN for service in problem.services}
    least = choose_mixes(problem, request, Deadline(deadline.share(_FIRST_SHARE)), eased)
    mixes, late = best.mixes, best.cut_short
    return with_mixes(best, replace(first, mixes=mixes, bound=least.bound, cut_short=late))


def _merit(plan: Plan) -> tuple[bool, bool, float, float]:
    """Return the order of plans: all is served, promises are kept, at the lower price."""
    kept = bool(plan.promises) and all(promise.is_kept for promise in plan.promises)
    served = min(plan.served_fraction.values(), default=0.0)
    whole = plan.status in ("optimal", "feasible")
    return whole, kept, served if not whole else 1.0, -(plan.objective or 0.0)


def _factors(plan: Plan, capacity: Plan) -> dict[str, float]:
    """By service what its promise costs beside its capacity, at least 1."""
    usd: dict[str, float] = {}
    for instance in capacity.instances:
        usd[instance.service] = usd.get(instance.service, 0.0) + instance.usd_per_hour
    kept: dict[str, float] = {}
    for instance in plan.instances:
        kept[instance.service] = kept.get(instance.service, 0.0) + instance.usd_per_hour
    return {
        name: min(_MAX_FACTOR, max(1.0, kept[name] / cost))
        for name, cost in usd.items()
        if cost > 0.0 and name in kept
    }
