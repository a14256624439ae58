"""At which price a node type would be used, and what one more node is worth by the prices of the relaxation.

The break-even price needs no bisection: the cost of a fixed plan is a line in the price, the optimum the
lower envelope of such lines, so from price 0 each plan's line is followed to where it meets today's cost,
until no plan is below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from atoll.plan.plan import Plan
from atoll.plan.problem import Offer, Problem
from atoll.solve.explain.plan_explanation import MIN_SERVED, ExtraNodes, NodeUse, served_share
from atoll.solve.explain.planning_again import Planner, SolvedProblem
from atoll.solve.templates.library import Libraries

_LINES = 16
_CHEAPEST_GAP = 1e-4
"""A plan proven to this is taken for the cheapest; a price read off it is good to the cent or so."""
_COST_TOLERANCE = 4e-6
"""Share of a plan's cost that counts as rounding."""


@dataclass(frozen=True)
class BreakEven:
    """The share of today's prices from which on a node type is used, None if not even for free.

    `exact` if every plan was proven.
    """

    factor: float | None
    exact: bool


def break_even(kind: str, base: Plan, problem: Problem, planner: Planner) -> BreakEven | None:
    """Return how far the prices of a node type must fall for it to make the plan cheaper.

    A plan that serves more counts as better, too: under a budget a cheaper node may do so. None where the
    plans that were made do not tell: one that is worse than the plan without such nodes says nothing.
    """
    # It is used already at today's prices.
    if any(node_type == kind for _, node_type, _ in base.count_nodes()):
        return BreakEven(1.0, exact=False)
    mean = served_share(base, problem) <= 0.0
    served, cost = served_share(base, problem, mean=mean), base.objective or 0.0
    spare = max(1e-9, _COST_TOLERANCE * cost)
    if served >= 1.0 and cost <= spare:
        return BreakEven(None, exact=True)
    # Begin at a price of 0: what is not used for free is used at no price.
    factor, exact = 0.0, _is_proven(base)
    for step in range(_LINES):
        plan = _ask(kind, factor, problem, planner)
        exact = exact and _is_proven(plan)
        objective = plan.objective or 0.0
        slope = _cost_of(kind, plan, problem)
        then = served_share(plan, problem, mean=mean)
        fuller, less = then > served + MIN_SERVED, then < served - MIN_SERVED
        cheaper = not less and objective < cost - spare
        if slope <= 0.0 or not (fuller or cheaper):
            if step:
                return BreakEven(factor, exact and not less)
            # That it is not used for free counts only if no cheaper plan can have been missed.
            return BreakEven(None, exact) if _is_proven(plan) and not less else None
        # The argument by lines is about cost alone; where more is served the price is bisected.
        if fuller:
            return _bisect_price(kind, served, mean, problem, planner)
        # The cost of this plan is a line in the price: where it meets today's cost the next plan is asked
        # for.
        factor = min(1.0, factor + (cost - objective) / slope)
    return BreakEven(factor, exact)


def price_use(use: NodeUse, best: Plan, planner: Planner) -> NodeUse:
    """Return why a node type is not used with the price at which it would be, by planning again."""
    price = break_even(use.node_type, best, planner.problem, planner)
    if price is None:
        return use
    if price.factor is None:
        return use.model_copy(update={"verdict": "idle", "asked": True})
    return use.model_copy(
        update={
            "asked": True,
            "break_even_usd_per_hour": (use.usd_per_hour or 0.0) * price.factor,
            "exact": price.exact,
        }
    )


def estimate_worth(
    answer: SolvedProblem | None, problem: Problem, rental: ExtraNodes
) -> float | None:
    """Return about what one more node would save in USD/h, None where nothing is known of it.

    An estimate: what the relaxation would save for the first bit of it. Whole instances save less, or more.
    """
    allocation = None if answer is None else answer.allocation
    if allocation is None or allocation.status not in ("optimal", "feasible"):
        return None
    place = problem.regions.index(rental.region), problem.kinds.index(rental.node_type)
    return float(allocation.node_usd[place])


def nearest_first(
    node_types: Sequence[str], plan: Plan, problem: Problem, libraries: Libraries
) -> list[str]:
    """Return node types by how near they are to being used: what each carries, at what the plan pays for it.

    A machine of the type, whole or cut, is valued at the mean price of each role in the plan.
    """
    return sorted(node_types, key=lambda kind: (-_value_of(kind, plan, problem, libraries), kind))


def _value_of(node_type: str, plan: Plan, problem: Problem, libraries: Libraries) -> float:
    offers = [o for o in problem.offers if o.node_type == node_type and o.available]
    best = 0.0
    for role in problem.roles:
        standing = plan.of_role(role)
        carried = sum(instance.throughput_per_s for instance in standing)
        library = libraries.roles[str(role)]
        if carried <= 0.0 or not len(library):
            continue
        paid = sum(instance.usd_per_hour for instance in standing) / carried
        for offer in offers:
            for size, kind in zip(offer.sizes, offer.kinds, strict=True):
                column = libraries.kinds.index(kind)
                alone = library.counts[:, column] == library.counts.sum(axis=1)
                number = np.maximum(1, library.counts[:, column])
                each = np.where(alone, library.throughput / number, 0.0).max(initial=0.0)
                usd = max(1e-9, offer.usd_per_hour * size / offer.gpus)
                best = max(best, float(each) * paid / usd)
    return best


def _ask(kind: str, factor: float, problem: Problem, planner: Planner) -> Plan:
    return planner.ask(_at_price(problem, kind, factor), f"{kind} at {factor:.0%} of its price")


def _bisect_price(
    kind: str, served: float, mean: bool, problem: Problem, planner: Planner
) -> BreakEven:
    """Bisect for the price below which more is served; the envelope argument is about cost only."""
    low, high = 0.0, 1.0
    # To a hundredth of today's price: every step is a plan.
    while high - low > 0.01:
        middle = (low + high) / 2.0
        plan = _ask(kind, middle, problem, planner)
        if served_share(plan, problem, mean=mean) > served + MIN_SERVED:
            low = middle
        else:
            high = middle
    return BreakEven(low, exact=False)


def _is_proven(plan: Plan) -> bool:
    return plan.gap is not None and plan.gap <= _CHEAPEST_GAP


def _at_price(problem: Problem, kind: str, factor: float) -> Problem:
    def at(offer: Offer) -> Offer:
        if offer.node_type != kind:
            return offer
        return offer.model_copy(update={"usd_per_hour": offer.usd_per_hour * factor})

    return problem.replace(offers=tuple(map(at, problem.offers)))


def _cost_of(kind: str, plan: Plan, problem: Problem) -> float:
    """Return the cost of the machines of a type in a plan at today's prices, initialisation included."""
    price = {offer.key: offer.usd_per_hour for offer in problem.offers if offer.node_type == kind}
    total = sum(price.get(key, 0.0) * count for key, count in plan.count_nodes().items())
    for instance in plan.instances:
        for node in () if instance.kept else instance.nodes:
            usd = price.get((instance.region_of(node), node.node_type, node.market), 0.0)
            total += problem.settings.init_penalty * usd * node.share
    return total
