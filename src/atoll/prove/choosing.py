"""Promises with a choice of models: which model answers is chosen for what its promises take.

Levels are chosen for capacity first, and the plan for the problem that they settle is sized by simulation
(`promise`). What a promise takes differs by model: short of it are those whose instances are nearly full, and
few. So levels are chosen once more with the demand of each way scaled by what its promise cost beside its
capacity; a model that was not tried counts with its capacity. That is done a few times, while it gives other
levels, and the cheapest plan that keeps its promises is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from atoll.solve.effort import Countdown, Effort
from atoll.solve.rent.choosing.choose import ChosenLevels
from atoll.solve.rent.choosing.solver import choose_mixes, with_mixes

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.plan.plan import Plan
    from atoll.plan.problem import Problem
    from atoll.solve.progress import OnProgress

ROUNDS = 3
"""How often levels are chosen, at most."""
_SAME = 4
"""Decimals of a share in which levels must differ to be others."""
_FIRST = 0.5
_MOST = 10.0
"""What a promise may make a way's demand count for, at most."""

Keep = Callable[["Problem", float], "Plan"]
"""Plans a problem without choices so that its promises are kept, in so many seconds."""
FindPlan = Callable[["Problem", Effort, float], "Plan"]
"""Plans a problem without choices for capacity, with some effort in so many seconds."""


def keep_chosen_promises(
    problem: Problem,
    catalog: Catalog,
    keep: Keep,
    find: FindPlan,
    effort: Effort,
    *,
    deadline: Countdown,
    say: Callable[[str], None] = lambda _text: None,
    on_progress: OnProgress | None = None,
) -> Plan:
    """Return the cheapest plan found whose promises are kept, over mixes of models; it has its mixes."""
    first: ChosenLevels | None = None
    best: Plan | None = None
    tried: set[tuple[tuple[str, float], ...]] = set()
    factors: dict[str, float] = {}
    for number in range(ROUNDS):
        say(f"choosing models, round {number + 1}")
        chosen = choose_mixes(
            problem, catalog, effort, Countdown(deadline.share(_FIRST)), on_progress, factors
        )
        first = first or chosen
        key = tuple(sorted((name, round(y, _SAME)) for name, y in chosen.levels.items()))
        if key in tried:
            break
        tried.add(key)
        settled = problem.settled(chosen.mixes)
        plan = keep(settled, deadline.share(_FIRST if number == 0 else 1.0))
        made = with_mixes(plan, replace(chosen, bound=first.bound))
        made = made.model_copy(
            update={"capacity_bound": made.bound if made.promises else made.capacity_bound}
        )
        if best is None or _merit(made) > _merit(best):
            best = made
        if number + 1 == ROUNDS or deadline.passed or not plan.instances:
            break
        capacity = chosen.plan or find(settled, effort, deadline.share(_FIRST))
        factors |= _factors(plan, capacity)
    assert best is not None
    return best


def _merit(plan: Plan) -> tuple[bool, bool, float, float]:
    """What makes one plan better than another: all is served, promises are kept, at the lower price."""
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
        name: min(_MOST, max(1.0, kept[name] / cost))
        for name, cost in usd.items()
        if cost > 0.0 and name in kept
    }
