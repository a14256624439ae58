"""Components that services share: whose executors may take whose requests.

A component of a service is that of its model. Two services have one in common where their model is the same,
or where both give theirs the same name. An executor may work for several services where they have all of its
components in common and their engines are started alike: weights lie in memory once, and its seconds are
divided among the requests of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from atoll.perf.components.class_loads import component_of
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem, Service

ComponentKey = tuple[str, str, str]
"""What tells a component from others: "model", "name" or "service", which of those, and the component."""


def component_key(service: Service, component: str) -> ComponentKey:
    """Return what tells a component of a service from others: equal ones are the same component."""
    named = dict(service.share_as).get(component)
    if named is not None:
        return "name", named, component
    if service.share:
        return "model", service.model, component
    return "service", service.name, component


def may_share(problem: Problem, one: Service, other: Service, parts: Iterable[str]) -> bool:
    """Return whether executors of these parts may work for both services."""
    if not (one.is_graph and other.is_graph):
        return False
    components = {component_of(part) for part in parts}
    return all(
        component_key(one, name) == component_key(other, name) for name in components
    ) and problem.engine_of(one) == problem.engine_of(other)


def list_sharers(problem: Problem, service: Service, parts: Sequence[str]) -> tuple[str, ...]:
    """Return the services that may share executors of these parts of a service, itself among them."""
    return tuple(
        other.name
        for other in problem.graph_services
        if other.name == service.name or may_share(problem, service, other, parts)
    )


def name_services(services: Iterable[str]) -> str:
    """Return what executors of some services are called, such as "docs&talk" (names have no "&")."""
    return "&".join(sorted(services))


def group_services(plan: Plan, services: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return these services in groups whose requests meet at no executor of a plan, each in their order."""
    group = {name: frozenset((name,)) for name in services}
    for executor in plan.executor_instances:
        met = [name for name in executor.services if name in group]
        joined = frozenset(name for one in met for name in group[one])
        group |= dict.fromkeys(joined, joined)
    return tuple(
        dict.fromkeys(tuple(name for name in services if name in group[one]) for one in services)
    )
