"""Whether a plan keeps what it says. Knows no solver; every plan from every solver passes here.

Rules, per instance and then for the plan as a whole:

    name           services, roles, regions, node types, ids exist and are used once
    host           on a fixed cluster, nodes are machines of it, as they are, each used once
    graph          flows run between nodes that exist, each pair once
    layers         every way from source to sink runs every layer once, in order
    hops           no way is longer than the stages the latency promise was split into
    memory         a node's layers fit beside one request's KV cache
    flow           what enters a node leaves it
    node-capacity  no node carries more than it can within its share of the promise
    link-capacity  no hop carries more activations than its link
    throughput     an instance carries what it says
    offer          nodes are on offer in the region on that market
    availability   no more nodes are used than there are
    pinning        services stand only on node types they allow
    kept           instances said to be kept do run now
    demand         every role carries its demand, unless the plan says it is partial
    served         the stated share of demand served is the true one
    route          routes lead to instances of the role, sum to 1, overload none
    budget, spot-share, max-nodes, spread
                   the limits of the problem
    cost           prices and initialisation add up, and so does the objective, in money or tokens/s
    bound          bound and gap agree with the objective
    problem        the plan was made for this problem

The structure of a plan (graph, layers without the model's size, hops, flow, throughput, route, cost
sums) can be checked without its problem; see `validate_structure`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

from atoll.catalog.catalog import Catalog
from atoll.core.ids import parse_node_type
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.plan.validate.instance import check_names, check_node_limits, check_structure
from atoll.plan.validate.violation import (
    TOLERANCE,
    InvalidPlanError,
    Violation,
    differs,
    exceeds,
    violation,
)

__all__ = ["InvalidPlanError", "Violation", "check", "validate", "validate_structure"]


def validate(
    plan: Plan, problem: Problem, catalog: Catalog | None = None, *, same_problem: bool = True
) -> list[Violation]:
    """Return everything that is wrong with a plan; an empty list is a valid plan.

    With `same_problem` false the plan may have been made for another problem: does it still hold?
    """
    facts = problem.catalog() if catalog is None else catalog
    violations = validate_structure(plan)
    if same_problem and plan.problem_hash != problem.content_hash():
        violations.append(violation("problem", plan.problem_name, "was made for another problem"))
    for instance in plan.instances:
        unknown = list(check_names(instance, problem, facts))
        violations += unknown or check_node_limits(instance, problem, facts)
    for rule in (
        _offers,
        _hosts,
        _check_running,
        _demand,
        _loads,
        _limits,
        _spread,
        _prices,
        _goal,
    ):
        violations += rule(plan, problem)
    return violations


def check(plan: Plan, problem: Problem, catalog: Catalog | None = None) -> None:
    """Raise InvalidPlanError if anything is wrong with the plan."""
    violations = validate(plan, problem, catalog)
    if violations:
        raise InvalidPlanError(plan.problem_name, violations)


def validate_structure(plan: Plan) -> list[Violation]:
    """Return what is wrong with a plan on its own, whatever problem it answers."""
    ids = Counter(instance.id for instance in plan.instances)
    violations = [
        violation("name", i, f"{n} instances have this id") for i, n in ids.items() if n > 1
    ]
    for instance in plan.instances:
        if instance.role_id.model != instance.service:
            message = f"{instance.role} is no role of {instance.service}"
            violations.append(violation("name", instance.id, message))
        violations += check_structure(instance)
    violations += _routes(plan)
    violations += _sums(plan)
    return violations


def _routes(plan: Plan) -> Iterator[Violation]:
    instances = {instance.id: instance for instance in plan.instances}
    routed = Counter((route.service, route.phase) for route in plan.routes)
    for (service, phase), count in routed.items():
        if count > 1:
            yield violation("route", f"{service} {phase}", f"{count} routes")
    for route in plan.routes:
        where = f"{route.service} {route.phase}"
        for name in route.weights:
            instance = instances.get(name)
            if instance is None:
                yield violation("route", where, f"leads to {name}, which is not in the plan")
            elif (instance.service, instance.phase) != (route.service, route.phase):
                yield violation("route", where, f"leads to {name}, which is {instance.role}")
        total = sum(route.weights.values())
        if differs(total, 1.0):
            yield violation("route", where, f"weights sum to {total:g}", abs(total - 1.0))


def _sums(plan: Plan) -> Iterator[Violation]:
    """What a plan says about its cost and bound must agree with itself."""
    here = plan.problem_name
    usd = sum(instance.usd_per_hour for instance in plan.instances)
    if differs(usd, plan.usd_per_hour):
        message = f"instances cost ${usd:g}/h, ${plan.usd_per_hour:g}/h is stated"
        yield violation("cost", here, message, abs(usd - plan.usd_per_hour))
    if plan.status == "infeasible":
        if plan.instances:
            yield violation("demand", here, "infeasible, yet there are instances")
        return
    if plan.objective is None:
        yield violation("cost", here, "there are instances, yet no objective")
        return
    total = plan.usd_per_hour + plan.init_usd
    if plan.goal == "cost" and differs(total, plan.objective):
        message = f"the objective is ${plan.objective:g}/h, cost and initialisation ${total:g}/h"
        yield violation("cost", here, message, abs(total - plan.objective))
    yield from _bound(plan, plan.objective)


def _bound(plan: Plan, objective: float) -> Iterator[Violation]:
    here = plan.problem_name
    if plan.bound is None:
        if plan.gap is not None:
            yield violation("bound", here, "a gap without a bound")
        if plan.status == "optimal":
            yield violation("bound", here, "optimal without a proven bound")
        return
    # The larger of the two is the objective where less is better and the bound where more is.
    low, high = (plan.bound, objective) if plan.goal == "cost" else (objective, plan.bound)
    if exceeds(low, high):
        side = "above" if plan.goal == "cost" else "below"
        message = f"the bound {plan.bound:g} is {side} the objective {objective:g}"
        yield violation("bound", here, message, low - high)
    gap = max(0.0, high - low) / high if high > 0 else 0.0
    if plan.gap is None or abs(gap - plan.gap) > TOLERANCE:
        yield violation("bound", here, f"the gap is {gap:g}, {plan.gap} is stated")


def _offers(plan: Plan, problem: Problem) -> Iterator[Violation]:
    for (region, kind, market), count in sorted(plan.count_nodes().items()):
        where = f"{region} {kind} {market}"
        offer = problem.offer(region, kind, market)
        if offer is None:
            yield violation("offer", where, f"{count} used, none on offer", count)
        elif count > offer.available:
            message = f"{count} used, {offer.available} available"
            yield violation("availability", where, message, count - offer.available)


def _hosts(plan: Plan, problem: Problem) -> Iterator[Violation]:
    used = Counter(n.host for instance in plan.instances for n in instance.nodes if n.host)
    for host, count in sorted(used.items()):
        if count > 1 and problem.cluster is not None:
            yield violation("host", host, f"used {count} times", count - 1)


def _goal(plan: Plan, problem: Problem) -> Iterator[Violation]:
    """With a goal in tokens/s, the objective must be what the flows of the instances carry."""
    if plan.goal == "cost" or plan.objective is None or plan.status == "infeasible":
        return
    carried = goal_value(plan, problem)
    if differs(carried, plan.objective):
        message = f"its flows carry {carried:g} tokens/s, {plan.objective:g} are stated"
        yield violation("cost", plan.problem_name, message, abs(carried - plan.objective))


def goal_value(plan: Plan, problem: Problem) -> float:
    """Return the tokens/s that the instances carry, prompt and generated ones.

    With the goal "fair", what all services would carry together if each got the share of its demand that
    the worst served one gets.
    """
    carried, demands = {}, {}
    for service in problem.services:
        tokens = service.lengths.input_mean + service.lengths.output_mean
        rates = [i.throughput_per_s for i in plan.instances if i.service == service.name]
        carried[service.name] = tokens * sum(rates)
        demands[service.name] = tokens * service.rate_per_s * service.headroom
    if plan.goal != "fair":
        return sum(carried.values())
    shares = [carried[name] / demand for name, demand in demands.items() if demand > 0]
    return min(shares, default=0.0) * sum(demands.values())


def _check_running(plan: Plan, problem: Problem) -> Iterator[Violation]:
    running = Counter(instance.placement_key for instance in problem.running)
    kept = Counter(instance.placement_key for instance in plan.instances if instance.kept)
    for key, count in kept.items():
        if count > running[key]:
            message = f"{count} said to be kept, {running[key]} run"
            yield violation("kept", f"{key[0]} {key[1]}", message, count - running[key])


def _supply(plan: Plan, role: str) -> float:
    return sum(instance.throughput_per_s for instance in plan.of_role(role))


def _demand(plan: Plan, problem: Problem) -> Iterator[Violation]:
    roles = [str(role) for role in problem.roles]
    for role in roles:
        demand, supply = problem.demand(role), _supply(plan, role)
        met = not exceeds(demand, supply)
        if not met and plan.status in ("optimal", "feasible"):
            message = f"carries {supply:g}/s of {demand:g}/s, yet the plan is {plan.status}"
            yield violation("demand", role, message, demand - supply)
        true = 1.0 if met else supply / demand
        stated = plan.served_fraction.get(role, 1.0)
        if abs(true - stated) > TOLERANCE:
            message = f"serves {true:.6g} of its demand, {stated:.6g} is stated"
            yield violation("served", role, message, abs(true - stated))
    for role in plan.served_fraction:
        if role not in roles:
            yield violation("name", role, "a served fraction of a role nobody asked for")


def _loads(plan: Plan, problem: Problem) -> Iterator[Violation]:
    """Requests that follow the routes must not ask more of an instance than it carries."""
    routes = {(route.service, route.phase): route for route in plan.routes}
    carries = {instance.id: instance.throughput_per_s for instance in plan.instances}
    for role in problem.roles:
        supply = _supply(plan, str(role))
        route = routes.pop((role.model, role.phase), None)
        if route is None:
            if supply > 0:
                yield violation("route", str(role), "no route leads to its instances")
            continue
        load = min(problem.demand(role), supply)
        for name, weight in route.weights.items():
            if name in carries and exceeds(weight * load, carries[name]):
                message = f"sends {weight * load:g}/s to {name}, which carries {carries[name]:g}/s"
                yield violation("route", str(role), message, weight * load - carries[name])
    for service, phase in routes:
        yield violation("route", f"{service} {phase}", "a route of a role nobody asked for")


def _limits(plan: Plan, problem: Problem) -> Iterator[Violation]:
    limits, here = problem.limits, plan.problem_name
    budget = limits.budget_usd_per_hour
    if budget is not None and exceeds(plan.usd_per_hour, budget):
        message = f"${plan.usd_per_hour:g}/h with a budget of ${budget:g}/h"
        yield violation("budget", here, message, plan.usd_per_hour - budget)
    if limits.max_nodes is not None and plan.nodes > limits.max_nodes:
        message = f"{plan.nodes} nodes of at most {limits.max_nodes}"
        yield violation("max-nodes", here, message, plan.nodes - limits.max_nodes)
    if limits.spot_share is not None and plan.gpus:
        spot = sum(
            count * parse_node_type(kind).gpu_count
            for (_, kind, market), count in plan.count_nodes().items()
            if market == "spot"
        )
        if exceeds(spot, limits.spot_share * plan.gpus):
            message = f"{spot} of {plan.gpus} GPUs are spot, at most {limits.spot_share:.0%} may be"
            yield violation("spot-share", here, message, spot / plan.gpus - limits.spot_share)


def _spread(plan: Plan, problem: Problem) -> Iterator[Violation]:
    least = problem.limits.spread
    by_role = itertools.groupby(
        sorted((i.role, i.region_of(node)) for i in plan.instances for node in i.nodes),
        key=lambda pair: pair[0],
    )
    for role, pairs in by_role:
        regions = {region for _, region in pairs}
        if len(regions) < least:
            message = f"stands in {len(regions)} regions, {least} are asked for"
            yield violation("spread", role, message, least - len(regions))


def _prices(plan: Plan, problem: Problem) -> Iterator[Violation]:
    for instance in plan.instances:
        offers = [
            problem.offer(instance.region_of(n), n.node_type, n.market) for n in instance.nodes
        ]
        if None in offers:
            continue  # its own rule says so
        usd = sum(offer.usd_per_hour for offer in offers if offer is not None)
        if differs(usd, instance.usd_per_hour):
            message = f"its nodes cost ${usd:g}/h, ${instance.usd_per_hour:g}/h is stated"
            yield violation("cost", instance.id, message, abs(usd - instance.usd_per_hour))
    fresh = sum(instance.usd_per_hour for instance in plan.instances if not instance.kept)
    init = fresh * problem.settings.init_penalty
    if differs(init, plan.init_usd):
        message = f"initialisation costs ${init:g}/h, ${plan.init_usd:g}/h is stated"
        yield violation("cost", plan.problem_name, message, abs(init - plan.init_usd))
