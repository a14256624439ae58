"""Whether a plan keeps what it says. Knows no solver; every plan from every solver passes here.

Rules, per instance and then for the plan as a whole:

    name           services, roles, regions, node types, ids exist and are used once
    host           on a fixed cluster, nodes are machines of it, as they are
    graph          flows run between nodes that exist, each pair once
    layers         every way from source to sink runs every layer once, in order; every path all parts that
                   its class needs
    hops           no way is longer than the stages the latency promise was split into
    memory         a node's layers fit beside one request's KV cache; so do an executor's parts
    flow           what enters a node leaves it
    node-capacity  no node carries more than it can within its share of the promise; no executor works more
                   than a second a second
    link-capacity  no hop carries more activations than its link, nor all slices of two machines together
    throughput     an instance carries what it says
    region         the nodes of a rented instance stand in its region
    offer          nodes are on offer in the region on that market
    availability   no more machines are used than there are; one that is cut counts once
    slice          slices are GPUs of one machine that may be cut so, and no GPU has two
    pinning        services stand only on kinds of nodes they allow
    sharing        services share executors only of components that they have in common
    cores          slices have the CPU cores that parts of executors need
    kept           instances said to be kept do run now
    demand         every service is served, unless the plan says it is partial
    served         the stated share of demand served is the true one, and every service has one
    route          routes lead over one instance, or prefill and decode; sum to 1; overload none; some lead
                   to every instance that costs money; paths over executors lead to those that have the
                   parts, in one region, the ways that are allowed
    handover       pairs hand KV over in time, within their interfaces and the links between regions; paths
                   keep the promise of their class with the slowest executors they lead over
    engine         an allowed engine runs every instance, started with the limits of the fleet
    model          stated models and weights are those of the fleet
    promise        stated promises are of the fleet's services and groups of their requests, each once, with
                   targets no lower than the fleet's and shares within their intervals that agree
    budget, spot-share, max-nodes, spread
                   the limits of the problem
    survive        what any loss leaves that is to be survived serves what must be kept
    cost           prices and initialisation add up, and so does the objective, in money or tokens/s
    bound          bounds and gap agree with the objective
    status         the status agrees with the gap and with what is served
    goal           the goal is one that the problem has: cost where nodes are rented, else tokens/s
    mix            every choice between models is answered, by its own services, once
    error, floor   mixes of models err as stated and no more than is allowed, and keep least shares
    problem        the plan was made for this problem

The structure of a plan (graph, layers without the model's size, hops, flow, throughput, slices, routes, cost
sums) can be checked without its problem; see `validate_structure`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from atoll.catalog.catalog import Catalog
from atoll.plan.plan import PROVEN_GAP, Plan
from atoll.plan.problem import Problem
from atoll.plan.validate.validate_choice import check_mixes
from atoll.plan.validate.validate_cluster import check_shared_links
from atoll.plan.validate.validate_engine import check_connectors
from atoll.plan.validate.validate_executors import check_paths
from atoll.plan.validate.validate_handover import check_handover
from atoll.plan.validate.validate_instance import check_names, check_node_limits, check_structure
from atoll.plan.validate.validate_losses import check_loss_routes, check_losses, find_unsurvived
from atoll.plan.validate.validate_machines import (
    check_gpus,
    check_limits,
    check_offers,
    check_prices,
    check_region,
    check_running,
    check_spread,
)
from atoll.plan.validate.validate_routes import check_loads, check_served, check_ways
from atoll.plan.validate.validate_spot import check_spot, check_traffic
from atoll.plan.validate.validate_stated import (
    check_intervals,
    check_launches,
    check_models,
    check_simulated,
    check_targets,
)
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

    With `same_problem` false the plan may have been made for another problem: does it still hold? A problem
    with choices is taken as the mixes of the plan leave it.
    """
    facts = problem.catalog() if catalog is None else catalog
    violations = validate_structure(plan)
    if not problem.is_settled:
        unsettled = list(check_mixes(plan, problem))
        violations += unsettled
        if any(found.rule == "mix" for found in unsettled):
            # There is no telling what the plan should serve.
            return violations
        problem = problem.settled(plan.mixes)
    is_same = plan.problem_hash == problem.content_hash()
    if same_problem and not is_same:
        violations.append(violation("problem", plan.problem_name, "was made for another problem"))
    violations += check_launches(plan, problem, same_problem=same_problem or is_same)
    problem = problem.started_as(plan.engines)
    named = True
    for instance in plan.instances:
        unknown = list(check_names(instance, problem, facts))
        named &= not unknown
        violations += unknown or check_node_limits(instance, problem, facts)
    if named:
        violations += check_paths(plan, problem, facts)
        violations += check_handover(plan, problem, facts)
        violations += check_connectors(plan)
        violations += check_shared_links(plan, problem, facts)
    for rule in (
        check_models,
        check_targets,
        check_simulated,
        check_offers,
        check_region,
        check_running,
        check_loads,
        check_traffic,
        check_limits,
        check_spot,
        check_spread,
        check_prices,
        _goal,
    ):
        violations += rule(plan, problem)
    # What names nothing that is there cannot be lost.
    short = find_unsurvived(plan, problem, facts) if named else {}
    violations += check_served(plan, problem, survives=not short)
    violations += check_losses(plan, problem, short)
    violations += check_loss_routes(plan, problem)
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
    violations += check_gpus(plan)
    violations += check_ways(plan)
    violations += check_intervals(plan)
    violations += _sums(plan)
    return violations


def _sums(plan: Plan) -> Iterator[Violation]:
    """Check that cost and bound of a plan agree with each other."""
    here = plan.problem_name
    usd = sum(instance.usd_per_hour for instance in plan.instances)
    cut = any(node.gpu_ids is not None for i in plan.instances for node in i.nodes)
    # What no instance uses of a cut machine is paid for, too.
    if exceeds(usd, plan.usd_per_hour) or (not cut and differs(usd, plan.usd_per_hour)):
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
    side = "above" if plan.goal == "cost" else "below"
    known = plan.capacity_bound
    if known is not None and _contradicts(plan, known, objective):
        message = f"the bound by capacity {known:g} is {side} the objective {objective:g}"
        yield violation("bound", here, message, abs(known - objective), field="capacity_bound")
    if plan.bound is None:
        if plan.gap is not None:
            yield violation("bound", here, "a gap without a bound")
        if plan.status == "optimal":
            yield violation("bound", here, "optimal without a proven bound")
        return
    # The larger of the two is the objective where less is better and the bound where more is.
    low, high = (plan.bound, objective) if plan.goal == "cost" else (objective, plan.bound)
    if _contradicts(plan, plan.bound, objective):
        message = f"the bound {plan.bound:g} is {side} the objective {objective:g}"
        yield violation("bound", here, message, low - high)
    gap = max(0.0, high - low) / high if high > 0 else 0.0
    if plan.gap is None or abs(gap - plan.gap) > TOLERANCE:
        yield violation("bound", here, f"the gap is {gap:g}, {plan.gap} is stated", field="gap")
    if plan.status == "optimal" and gap > PROVEN_GAP + TOLERANCE:
        yield violation("status", here, f"optimal with a gap of {gap:.2%}", gap - PROVEN_GAP)


def _contradicts(plan: Plan, bound: float, objective: float) -> bool:
    """Return whether a plan is better than a bound lets any be."""
    low, high = (bound, objective) if plan.goal == "cost" else (objective, bound)
    return exceeds(low, high)


def _goal(plan: Plan, problem: Problem) -> Iterator[Violation]:
    """Nodes are rented for cost; with a goal in tokens/s, the objective is what the flows carry."""
    if plan.objective is None or plan.status == "infeasible":
        return
    if (plan.goal == "cost") != (problem.cluster is None):
        nodes = "are rented" if problem.cluster is None else "are a fixed cluster"
        yield violation(
            "goal", plan.problem_name, f"its goal is {plan.goal}, and its nodes {nodes}"
        )
    if plan.goal == "cost":
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
