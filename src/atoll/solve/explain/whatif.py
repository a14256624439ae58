"""What if: answers about a plan found by planning again with one thing changed.

Prices, availability and limits do not touch the templates, so most questions cost one allocation; a
changed promise needs the templates of its own role again. The break-even price of a node type needs no
bisection: the cost of a fixed plan is a line in the price, the optimum the lower envelope of such lines,
so from price 0 each plan's line is followed to where it meets today's cost, until no plan is below.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from atoll.catalog.catalog import Catalog
from atoll.core.ids import RoleId
from atoll.plan.plan import Plan
from atoll.plan.problem import Offer, Problem
from atoll.plan.validate.check import check
from atoll.solve.explain.explanation import Constraint, ExtraNodes, Worth, served_share
from atoll.solve.rent.optimal import Solved
from atoll.solve.rent.optimal import solve as solve_optimal
from atoll.solve.templates.cache import TemplateCache
from atoll.solve.templates.generate import TemplateLibrary, generate
from atoll.solve.templates.library import Libraries, role_tables

EXACT = 1e-6
"""Relative gap to which what-if plans are proven."""
MOST_PLANS = 400
MOST_SECONDS = 60.0
_PLAN_SECONDS = 3.0
_LINES = 16
_NEARLY = 1e-4
"""A plan proven to this is taken for the cheapest; a price read off it is good to the cent or so."""
_FULLER = 1e-3
"""Shares of demand are proven to 1e-4; less than this is no gain."""

Progress = Callable[[int, str], None]
"""Called with the plans made so far and the question being answered."""


class OutOfTimeError(Exception):
    """The plans or the seconds allowed for an explanation are used up."""


@dataclass
class Planner:
    """Plans variants of a problem, within a number of plans and of seconds for all of them.

    Templates of roles are shared between variants; `libraries` belong to the problem as given.
    """

    problem: Problem
    catalog: Catalog
    libraries: Libraries
    cache: TemplateCache | None = None
    most_plans: int = MOST_PLANS
    most_seconds: float = MOST_SECONDS
    progress: Progress | None = None
    plans: int = 0
    started: float = field(init=False)

    def __post_init__(self) -> None:
        self.started = time.perf_counter()

    @property
    def seconds_left(self) -> float:
        """Seconds left for all questions together."""
        return self.most_seconds - (time.perf_counter() - self.started)

    def tick(self, question: str) -> None:
        """Say which question is being answered; raises OutOfTimeError if there is no time for it."""
        if self.plans >= self.most_plans or self.seconds_left <= 0:
            raise OutOfTimeError
        if self.progress is not None:
            self.progress(self.plans, question)

    def solve(
        self, problem: Problem, question: str, libraries: Libraries | None = None
    ) -> tuple[Solved, bool]:
        """Return the answer to a variant, and whether it was given before its own deadline."""
        self.tick(question)
        self.plans += 1
        deadline_s = min(_PLAN_SECONDS, max(0.5, self.seconds_left))
        solved = solve_optimal(
            problem, self.catalog, libraries or self.libraries, deadline_s=deadline_s, gap=EXACT
        )
        check(solved.plan, problem, self.catalog)
        return solved, solved.plan.seconds < deadline_s

    def plan(self, problem: Problem, question: str, libraries: Libraries | None = None) -> Plan:
        """Return the plan of a variant."""
        return self.solve(problem, question, libraries)[0].plan

    def library(self, problem: Problem, role: RoleId) -> TemplateLibrary:
        """Return the templates of one role of a variant."""
        tables = role_tables(problem, self.catalog, role)
        most = problem.settings.max_nodes_per_instance
        if self.cache is None:
            return generate(tables, most)
        return self.cache.library(tables, most)

    def with_roles(self, problem: Problem, roles: Iterable[RoleId]) -> Libraries:
        """Return the libraries with the templates of some roles computed for a variant."""
        computed = {str(role): self.library(problem, role) for role in roles}
        return Libraries(self.libraries.node_types, {**self.libraries.roles, **computed})


def soft(problem: Problem) -> Problem:
    """The problem that serves what it can: how much that is tells more than that it is not all."""
    if problem.settings.on_shortage != "fail":
        return problem
    return problem.replace(settings=problem.settings.model_copy(update={"on_shortage": "fraction"}))


def worth(now: Plan, then: Plan, problem: Problem) -> Worth:
    """Return what is gained from one plan to another, with what is proven of it."""
    mean = served_share(now, problem) <= 0.0
    objective, bound = (now.objective or 0.0, now.bound or 0.0)
    other, other_bound = (then.objective or 0.0, then.bound or 0.0)
    return Worth(
        usd_per_hour=objective - other,
        at_least=bound - other,
        at_most=objective - other_bound,
        served=served_share(then, problem, mean=mean),
        served_now=served_share(now, problem, mean=mean),
        mean=mean,
    )


def loosen(problem: Problem, constraint: Constraint) -> Problem:
    """Return the problem without a constraint, or with one more node."""
    if constraint.rental is not None:
        return with_more(problem, (constraint.rental,))
    free: dict[str, tuple[str, int | None]] = {
        "budget": ("budget_usd_per_hour", None),
        "max-nodes": ("max_nodes", None),
        "spot-share": ("spot_share", None),
        "spread": ("spread", 1),
    }
    name, value = free[constraint.kind]
    return problem.replace(limits=problem.limits.model_copy(update={name: value}))


def with_more(problem: Problem, rentals: Iterable[ExtraNodes]) -> Problem:
    """Return the problem with more nodes on offer."""
    more = {(r.region, r.node_type, r.market): r.count for r in rentals}
    return problem.replace(
        offers=tuple(
            offer.model_copy(update={"available": offer.available + more.get(offer.key, 0)})
            for offer in problem.offers
        )
    )


@dataclass(frozen=True)
class BreakEven:
    """The share of today's prices from which on a node type is used; `exact` if every plan was proven."""

    factor: float
    exact: bool


def break_even(kind: str, base: Plan, problem: Problem, planner: Planner) -> BreakEven | None:
    """Return how far the prices of a node type must fall for it to make the plan cheaper, None if never.

    A plan that serves more counts as better, too: under a budget a cheaper node may do so.
    """
    mean = served_share(base, problem) <= 0.0
    served, cost = served_share(base, problem, mean=mean), base.objective or 0.0
    spare = max(1e-9, 4.0 * EXACT * cost)
    factor, exact = 0.0, _is_proven(base)
    for step in range(_LINES):
        question = f"{kind} at {factor:.0%} of its price"
        plan = planner.plan(_at_price(problem, kind, factor), question)
        exact = exact and _is_proven(plan)
        objective = plan.objective or 0.0
        slope = _cost_of(kind, plan, problem)
        fuller = served_share(plan, problem, mean=mean) > served + _FULLER
        if slope <= 0.0 or not (fuller or objective < cost - spare):
            return BreakEven(factor, exact) if step else None
        if fuller:
            return _bisect_price(kind, served, mean, problem, planner)
        factor = min(1.0, factor + (cost - objective) / slope)
    return BreakEven(factor, exact)


def _bisect_price(
    kind: str, served: float, mean: bool, problem: Problem, planner: Planner
) -> BreakEven:
    """Bisect for the price below which more is served; the envelope argument is about cost only."""
    low, high = 0.0, 1.0
    while high - low > 0.01:
        middle = (low + high) / 2.0
        plan = planner.plan(
            _at_price(problem, kind, middle), f"{kind} at {middle:.0%} of its price"
        )
        if served_share(plan, problem, mean=mean) > served + _FULLER:
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

    return problem.replace(offers=tuple(at(offer) for offer in problem.offers))


def _cost_of(kind: str, plan: Plan, problem: Problem) -> float:
    """What the nodes of a type cost in a plan at today's prices, initialisation included."""
    total = 0.0
    for instance in plan.instances:
        scale = 1.0 if instance.kept else 1.0 + problem.settings.init_penalty
        for node in instance.nodes:
            offer = problem.offer(instance.region, node.node_type, node.market)
            if node.node_type == kind and offer is not None:
                total += scale * offer.usd_per_hour
    return total
