"""The rules of `validate` for requests on their way: routes, loads, what is served."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from atoll.core.ids import Phase
from atoll.plan.plan import Instance, Plan
from atoll.plan.problem import Problem, Service
from atoll.plan.validate.violation import TOLERANCE, Violation, differs, exceeds, violation

_PHASES = {1: (Phase.BOTH,), 2: (Phase.PREFILL, Phase.DECODE)}


def check_ways(plan: Plan) -> Iterator[Violation]:
    """Yield routes that lead nowhere: one instance runs both phases, or one prefill and one decode."""
    instances = {instance.id: instance for instance in plan.instances}
    for (service, way), count in Counter((r.service, r.instances) for r in plan.routes).items():
        if count > 1:
            yield violation("route", service, f"{count} routes over {', '.join(way)}")
    shares: defaultdict[str, float] = defaultdict(float)
    for route in plan.routes:
        shares[route.service] += route.share
        for name, phase in zip(route.instances, _PHASES[len(route.instances)], strict=True):
            instance = instances.get(name)
            if instance is None:
                message = f"leads to {name}, which is not in the plan"
                yield violation("route", route.service, message)
            elif (instance.service, instance.phase) != (route.service, phase):
                message = f"leads to {name} for {phase}, which is {instance.role}"
                yield violation("route", route.service, message)
    for service, total in sorted(shares.items()):
        if differs(total, 1.0):
            message = f"shares of its routes sum to {total:g}"
            yield violation("route", service, message, abs(total - 1.0))


def check_served(plan: Plan, problem: Problem, *, survives: bool = True) -> Iterator[Violation]:
    """Yield demand that is not met though the plan says so, and shares that are not the true ones.

    In every region as many requests are served as both of its phases carry, and those that run together. A
    plan is partial, too, that does not survive what it should.
    """
    names = {service.name for service in problem.services}
    named = {route.service: "routes" for route in plan.routes}
    named |= {name: f"served_fraction.{name}" for name in plan.served_fraction}
    for name in sorted(named.keys() - names):
        message = "a share or a route of an unknown service"
        yield violation("name", name, message, field=named[name])
    for name in sorted(names - plan.served_fraction.keys()):
        message = "no share of its demand is stated"
        yield violation("served", name, message, field=f"served_fraction.{name}")
    # That executors do the work of what is said to be served, `executors` checks.
    short = any(plan.served_fraction.get(s.name, 1.0) < 1.0 for s in problem.graph_services)
    for service in problem.plain_services:
        at_home, at_most = _supply(plan, service)
        demand = service.demand_per_s
        min_share = 1.0 if not exceeds(demand, at_home) else at_home / demand
        max_share = 1.0 if not exceeds(demand, at_most) else at_most / demand
        if not _crosses(plan, service):
            max_share = min_share
        stated = plan.served_fraction.get(service.name, 1.0)
        short |= stated < 1.0
        if _limits_spot(plan, problem, service):
            min_share = 0.0  # Requests that would be served on spot only may have to go.
        if stated > max_share + TOLERANCE or stated < min_share - TOLERANCE:
            message = f"serves {max_share:.6g} of its demand, {stated:.6g} is stated"
            yield violation("served", service.name, message, abs(max_share - stated))
        if max_share < 1.0 and plan.status in ("optimal", "feasible"):
            message = f"serves {max_share:.6g} of its demand, yet the plan is {plan.status}"
            yield violation("demand", service.name, message, (1.0 - max_share) * demand)
        routed = any(route.service == service.name for route in plan.routes)
        if stated > 0 and exceeds(demand, 0.0) and not routed:
            yield violation("route", service.name, f"serves {stated:.6g} of its demand by no route")
    if plan.status == "partial" and not short and survives:
        yield violation("status", plan.problem_name, "partial, yet all of the demand is served")
    elif plan.status in ("optimal", "feasible") and short:
        message = f"{plan.status}, yet not all of the demand is served"
        yield violation("status", plan.problem_name, message)


def _limits_spot(plan: Plan, problem: Problem, service: Service) -> bool:
    """Return whether a service has nodes on spot, and may use them for some of its requests only."""
    return problem.limits.spot_share is not None and any(
        node.market == "spot"
        for i in plan.instances
        if i.service == service.name
        for node in i.nodes
    )


def _supply(plan: Plan, service: Service) -> tuple[float, float]:
    """Return the requests/s that a service's instances serve inside regions, and if all could be paired."""
    per_request = {
        Phase.PREFILL: service.lengths.input_mean,
        Phase.DECODE: service.lengths.output_mean,
        Phase.BOTH: 1.0,
    }
    carried: dict[Phase, defaultdict[str, float]] = {p: defaultdict(float) for p in per_request}
    for instance in plan.instances:
        if instance.service == service.name and instance.role_id in service.roles:
            rate = instance.throughput_per_s / per_request[instance.phase]
            carried[instance.phase][instance.region] += rate
    prefill, decode = carried[Phase.PREFILL], carried[Phase.DECODE]
    together = sum(carried[Phase.BOTH].values())
    paired = sum(min(rate, decode[region]) for region, rate in prefill.items())
    return together + paired, together + min(sum(prefill.values()), sum(decode.values()))


def _crosses(plan: Plan, service: Service) -> bool:
    """Return whether any request of the service leaves a region between its phases."""
    regions = {instance.id: instance.region for instance in plan.instances}
    own = [route for route in plan.routes if route.service == service.name]
    return any(len({regions.get(name) for name in route.instances}) > 1 for route in own)


def check_loads(plan: Plan, problem: Problem) -> Iterator[Violation]:
    """Yield instances of which requests that follow the routes ask more than they carry."""
    asked = units_per_s(plan, problem)
    for instance in plan.plain_instances:
        load = asked.get(instance.id, 0.0)
        if exceeds(load, instance.throughput_per_s):
            carries = instance.throughput_per_s
            message = f"sends {load:g}/s to {instance.id}, which carries {carries:g}/s"
            yield violation("route", instance.service, message, load - carries)


def units_per_s(plan: Plan, problem: Problem) -> dict[str, float]:
    """Return what the routes ask of each instance at the demand served, in units of its role, by id."""
    instances = {instance.id: instance for instance in plan.instances}
    services = {service.name: service for service in problem.services}
    asked: defaultdict[str, float] = defaultdict(float)
    for route in plan.routes:
        service = services.get(route.service)
        for instance in (instances.get(name) for name in route.instances):
            if instance is not None and service is not None and _plays(instance, service):
                served = plan.served_fraction.get(service.name, 1.0)
                asked[instance.id] += route.share * service.demand(instance.role) * served
    return dict(asked)


def _plays(instance: Instance, service: Service) -> bool:
    return instance.service == service.name and instance.role_id in service.roles
