"""Plans that are served on this machine only, not yet elsewhere: executors of any-to-any models."""

from __future__ import annotations

from collections.abc import Iterable

from atoll.core.errors import UsageError
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem


def list_any_to_any(*sources: Plan | Problem | None) -> tuple[str, ...]:
    """Return the any-to-any services of plans and problems, sorted."""
    found: set[str] = set()
    for source in sources:
        if isinstance(source, Problem):
            found |= {service.name for service in source.graph_services}
        elif source is not None:
            found |= {one.service for one in source.executor_instances}
    return tuple(sorted(found))


def refuse_unserved(*sources: Plan | Problem | None, only: Iterable[str] | None = None) -> None:
    """Raise UsageError where a plan or a problem has any-to-any services, of those in `only` if given."""
    names = set(list_any_to_any(*sources))
    wanted = sorted(names if only is None else names & set(only))
    if wanted:
        raise UsageError(
            f"any-to-any plans are served on one machine, not operated elsewhere: {', '.join(wanted)}",
            field="classes",
            hint="serve it with `atoll serve`, or give plain models a fleet of their own",
        )
