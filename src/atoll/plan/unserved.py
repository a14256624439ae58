"""What is planned and simulated, and not served yet: executors of any-to-any models."""

from __future__ import annotations

from collections.abc import Iterable

from atoll.core.errors import UsageError
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem


def list_unserved(source: Plan | Problem | None) -> tuple[str, ...]:
    """Return the any-to-any services of a plan or a problem, which nothing can serve yet, sorted."""
    if source is None:
        return ()
    if isinstance(source, Problem):
        return tuple(service.name for service in source.services if service.is_graph)
    return tuple(sorted({one.service for one in source.instances if one.is_executor}))


def refuse_unserved(*sources: Plan | Problem | None, only: Iterable[str] | None = None) -> None:
    """Raise UsageError where a plan or a problem has any-to-any services, of those in `only` if given."""
    names = {name for source in sources for name in list_unserved(source)}
    wanted = sorted(names if only is None else names & set(only))
    if wanted:
        raise UsageError(
            f"any-to-any plans are planned and simulated, not served yet: {', '.join(wanted)}",
            field="classes",
            hint="try it with `atoll simulate`; serve plain models from a fleet of their own",
        )
