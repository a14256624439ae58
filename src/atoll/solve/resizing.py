"""Planning again at the sizes of a plan that keeps its promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from atoll.solve.assembly import keep
from atoll.solve.derating import Derating, NodeSet, node_set

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.plan.plan import Plan
    from atoll.plan.problem import Problem

MAX_NODES = 8
"""Nodes that a template may have."""
_HALVINGS = 4


def sized_like(plan: Plan, problem: Problem, catalog: Catalog) -> tuple[Problem, Derating | None]:
    """Return the problem as a plan that keeps its promises was sized for, and what templates carry there.

    Those of the plan carry what they do in it, others of a role what those of the plan do on average. A plan
    for capacity alone has no shares to give.
    """
    if not plan.promises or problem.cluster is not None:
        return problem, None
    sized = problem.replace(settings=problem.settings.model_copy(update={"sized_for": "share"}))
    return sized, derating_of(plan, sized, catalog)


def derating_of(plan: Plan, problem: Problem, catalog: Catalog) -> Derating:
    """Return what templates of a problem carry where those of a plan carry what they do in it.

    Others of a role carry what those of the plan do on average.
    """
    shares: dict[tuple[str, NodeSet], float] = {}
    by_role: dict[str, list[float]] = {}
    # Executors have no templates: `Effort.slowdown` is theirs.
    for instance in plan.plain_instances:
        whole = keep(problem, catalog, instance).throughput_per_s
        share = min(1.0, instance.throughput_per_s / whole) if whole > 0.0 else 1.0
        shares[instance.role, node_set(instance)] = share
        by_role.setdefault(instance.role, []).append(share)
    priors = {
        (role, size): sum(some) / len(some)
        for role, some in by_role.items()
        for size in range(1, MAX_NODES + 1)
    }
    return Derating(shares, priors)


def lower_priors(derating: Derating, is_beaten: Callable[[Derating], bool]) -> Derating:
    """Return what templates carry with the others than the plan's lowered until they beat it no more.

    The plan's search simulated the templates that came near it, and found none that makes it cheaper; what it
    found is not part of a plan. So the others carry at most what leaves the plan the cheapest: the largest
    common factor for which planning again does not find a cheaper one, within a sixteenth. Where it finds one
    of the plan's own templates alone, that is so at what they are known to carry.
    """
    if not is_beaten(derating):
        return derating
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        if is_beaten(_scale_unknown(derating, middle)):
            high = middle
        else:
            low = middle
    return _scale_unknown(derating, low)


def _scale_unknown(derating: Derating, factor: float) -> Derating:
    priors = {key: factor * share for key, share in derating.priors.items()}
    return replace(derating, priors=priors, default=factor * derating.default)
