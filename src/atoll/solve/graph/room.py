"""How much room executors of a plan that keeps its promises have, to plan again with the same."""

from __future__ import annotations

from collections.abc import Callable

from atoll.catalog.catalog import Catalog
from atoll.plan.component_sharing import list_sharers, name_services
from atoll.plan.executor_use import executor_use
from atoll.plan.executors import routes_of
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.solve.graph.executor_options import options_of

_MAX_SLOW = 30.0
_RAISED = (1.0, 1.2, 1.5, 2.0, 4.0, _MAX_SLOW)
"""By what executors that a plan does not have are slowed down further, one after the other."""
_OTHERS = "*"
Slowdown = dict[tuple[str, str, str], float]
"""How much longer executors take, by service, parts and kind of node; "*": kinds that are not named."""


def slow_others(slow: Slowdown, is_beaten: Callable[[Slowdown], bool]) -> Slowdown:
    """Return slowdowns with those of kinds that a plan does not have raised until it is beaten no more."""
    raised = slow
    for factor in _RAISED:
        raised = {
            key: _clamp(slowed * factor) if key[2] == _OTHERS else slowed
            for key, slowed in slow.items()
        }
        if not is_beaten(raised):
            break
    return raised


def slowdown_of(plan: Plan, problem: Problem, catalog: Catalog) -> Slowdown:
    """Return how much longer executors count as taking, so that those of a plan are just full.

    By service, parts and kind of node; "*" stands for kinds that the plan does not have.
    """
    found: Slowdown = {}
    use = executor_use(plan, problem, catalog)
    for service in problem.services:
        own = [one for one in use.of_service(service.name) if one.busy]
        if not own:
            continue
        mean = _clamp(len(own) / sum(one.busy or 0.0 for one in own))
        routes = [
            route for klass in service.classes for route in routes_of(catalog, service, klass)
        ]
        for option in options_of(catalog.model(service.model), service, routes):
            shared = list_sharers(problem, service, option)
            for whose in {service.name, name_services(shared)}:
                found[whose, "+".join(option), _OTHERS] = mean
        for one in own:
            key = (name_services((one.service, *one.guests)), "+".join(one.parts), one.kind)
            found[key] = min(found.get(key, _MAX_SLOW), _clamp(1.0 / (one.busy or 1.0)))
    return found


def _clamp(factor: float) -> float:
    return min(_MAX_SLOW, max(1.0, factor))
