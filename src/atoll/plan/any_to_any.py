"""The any-to-any services of plans and problems, by name."""

from __future__ import annotations

from atoll.plan.plan import Plan
from atoll.plan.problem import Problem


def list_any_to_any(*sources: Plan | Problem | None) -> tuple[str, ...]:
    """Return the any-to-any services of plans and problems, sorted."""
    found: set[str] = set()
    for source in sources:
        if isinstance(source, Problem):
            found |= {service.name for service in source.graph_services}
        elif source is not None:
            found |= {name for one in source.executor_instances for name in one.services}
    return tuple(sorted(found))
