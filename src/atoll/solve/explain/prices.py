"""At which price a node type would be used.

The break-even price needs no bisection: the cost of a fixed plan is a line in the price, the optimum the
lower envelope of such lines, so from price 0 each plan's line is followed to where it meets today's cost,
until no plan is below.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.plan.plan import Plan
from atoll.plan.problem import Offer, Problem
from atoll.solve.explain.explanation import LEAST_SERVED, served_share
from atoll.solve.explain.whatif import Planner

_LINES = 16
_NEARLY = 1e-4
"""A plan proven to this is taken for the cheapest; a price read off it is good to the cent or so."""
_SPARE = 4e-6


@dataclass(frozen=True)
class BreakEven:
    """The share of today's prices from which on a node type is used; `exact` if every plan was proven."""

    factor: float
    exact: bool


def break_even(kind: str, base: Plan, problem: Problem, planner: Planner) -> BreakEven | None:
    """Return how far the prices of a node type must fall for it to make the plan cheaper, None if never.

    A plan that serves more counts as better, too: under a budget a cheaper node may do so.
    """
    if any(node_type == kind for _, node_type, _ in base.count_nodes()):
        return BreakEven(1.0, exact=False)
    mean = served_share(base, problem) <= 0.0
    served, cost = served_share(base, problem, mean=mean), base.objective or 0.0
    spare = max(1e-9, _SPARE * cost)
    factor, exact = 0.0, _is_proven(base)
    for step in range(_LINES):
        plan = _ask(kind, factor, problem, planner)
        exact = exact and _is_proven(plan)
        objective = plan.objective or 0.0
        slope = _cost_of(kind, plan, problem)
        fuller = served_share(plan, problem, mean=mean) > served + LEAST_SERVED
        less = served_share(plan, problem, mean=mean) < served - LEAST_SERVED
        if slope <= 0.0 or less or not (fuller or objective < cost - spare):
            return BreakEven(factor, exact) if step else None
        if fuller:
            return _bisect_price(kind, served, mean, problem, planner)
        factor = min(1.0, factor + (cost - objective) / slope)
    return BreakEven(factor, exact)


def _ask(kind: str, factor: float, problem: Problem, planner: Planner) -> Plan:
    return planner.ask(_at_price(problem, kind, factor), f"{kind} at {factor:.0%} of its price")


def _bisect_price(
    kind: str, served: float, mean: bool, problem: Problem, planner: Planner
) -> BreakEven:
    """Bisect for the price below which more is served; the envelope argument is about cost only."""
    low, high = 0.0, 1.0
    while high - low > 0.01:
        middle = (low + high) / 2.0
        plan = _ask(kind, middle, problem, planner)
        if served_share(plan, problem, mean=mean) > served + LEAST_SERVED:
            low = middle
        else:
            high = middle
    return BreakEven(low, exact=False)


def _is_proven(plan: Plan) -> bool:
    return plan.gap is not None and plan.gap <= _NEARLY


def _at_price(problem: Problem, kind: str, factor: float) -> Problem:
    def at(offer: Offer) -> Offer:
        if offer.node_type != kind:
            return offer
        return offer.model_copy(update={"usd_per_hour": offer.usd_per_hour * factor})

    return problem.replace(offers=tuple(map(at, problem.offers)))


def _cost_of(kind: str, plan: Plan, problem: Problem) -> float:
    """What the machines of a type cost in a plan at today's prices, initialisation included."""
    price = {offer.key: offer.usd_per_hour for offer in problem.offers if offer.node_type == kind}
    total = sum(price.get(key, 0.0) * count for key, count in plan.count_nodes().items())
    for instance in plan.instances:
        for node in () if instance.kept else instance.nodes:
            usd = price.get((instance.region_of(node), node.node_type, node.market), 0.0)
            total += problem.settings.init_penalty * usd * node.share
    return total
