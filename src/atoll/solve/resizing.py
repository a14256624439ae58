"""Planning again at the sizes of a plan that keeps its promises."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.solve.assembly import keep
from atoll.solve.derating import Derating, NodeSet, node_set

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.plan.plan import Plan
    from atoll.plan.problem import Problem

MOST_NODES = 8
"""Nodes that a template may have."""


def sized_like(plan: Plan, problem: Problem, catalog: Catalog) -> tuple[Problem, Derating | None]:
    """Return the problem as a plan that keeps its promises was sized for, and what templates carry there.

    Those of the plan carry what they do in it, others of a role what those of the plan do on average. A plan
    for capacity alone has no shares to give.
    """
    if not plan.promises or problem.cluster is not None:
        return problem, None
    sized = problem.replace(settings=problem.settings.model_copy(update={"sized_for": "share"}))
    shares: dict[tuple[str, NodeSet], float] = {}
    by_role: dict[str, list[float]] = {}
    for instance in plan.instances:
        whole = keep(sized, catalog, instance).throughput_per_s
        share = min(1.0, instance.throughput_per_s / whole) if whole > 0.0 else 1.0
        shares[instance.role, node_set(instance)] = share
        by_role.setdefault(instance.role, []).append(share)
    priors = {
        (role, size): sum(some) / len(some)
        for role, some in by_role.items()
        for size in range(1, MOST_NODES + 1)
    }
    return sized, Derating(shares, priors)
