"""The rules of `validate` for spot: what share of requests hangs on it, and that all that is rented serves.

A request is on spot where any instance that serves it has a spot node; of any-to-any services, where any
executor on its path has.
"""

from __future__ import annotations

from collections.abc import Iterator

from atoll.plan.plan import Instance, Plan
from atoll.plan.problem import Problem, Service
from atoll.plan.validate.violation import TOLERANCE, Violation, violation


def check_spot(plan: Plan, problem: Problem) -> Iterator[Violation]:
    """Yield services with more of their requests on spot than the fleet allows."""
    limit = problem.limits.spot_share
    if limit is None:
        return
    for service in problem.services:
        share = spot_share(plan, service)
        if share > limit + TOLERANCE:
            message = f"{share:.4%} of its requests are on spot, at most {limit:.4%} may be"
            yield violation("spot-share", service.name, message, share - limit)


def check_traffic(plan: Plan, problem: Problem) -> Iterator[Violation]:
    """Yield instances that cost money and to which no request is sent.

    Where roles must stand in several regions, one may be there for that.
    """
    met = plan.status in ("optimal", "feasible")
    if plan.goal != "cost" or not met or problem.limits.spread > 1:
        return
    reached = {name for route in plan.routes if route.share > 0.0 for name in route.instances}
    for instance in plan.plain_instances:
        if instance.usd_per_hour > 0.0 and instance.id not in reached:
            yield violation("route", instance.service, f"no request is sent to {instance.id}")


def spot_share(plan: Plan, service: Service) -> float:
    """Return the share of a service's requests that are served on spot."""
    if service.is_graph:
        return _graph_share(plan, service)
    spot = {i.id for i in plan.instances if i.service == service.name and _has_spot(i)}
    own = [route for route in plan.routes if route.service == service.name]
    return sum(route.share for route in own if spot & {*route.instances})


def _graph_share(plan: Plan, service: Service) -> float:
    """Executors of a step are drawn one by one: a request is off spot where all of them are."""
    spot = {i.id for i in plan.executor_instances if _has_spot(i)}
    weight = {klass.name: klass.share for klass in service.classes}
    off = 0.0
    on = 0.0
    for path in plan.paths:
        if path.service != service.name:
            continue
        safe = 1.0
        for step in path.steps:
            safe *= sum(share for name, share in step.instances.items() if name not in spot)
        asked = weight.get(path.klass, 0.0) * path.share
        off += asked * safe
        on += asked * (1.0 - safe)
    return on / (on + off) if on > 0.0 else 0.0


def _has_spot(instance: Instance) -> bool:
    return any(node.market == "spot" for node in instance.nodes)
