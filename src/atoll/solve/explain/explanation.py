"""Why a plan is what it is: what stands in the way, what loosening it is worth, what would repair it.

This module holds the words and what can be read off a plan; planning again, which makes the figures
exact, is `solve.explain.explain`. Every figure in an explanation is the difference between two plans, never
an estimate from duals.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from atoll.core.frozen import Frozen
from atoll.core.ids import parse_node_type
from atoll.core.units import format_duration, format_price, format_share
from atoll.plan.plan import Market, Plan, Status
from atoll.plan.problem import Problem

ConstraintKind = Literal["availability", "budget", "spot-share", "max-nodes", "spread"]
RepairKind = Literal[
    "nodes", "ttft", "tpot", "budget", "spot-share", "max-nodes", "spread", "limits"
]
Verdict = Literal["used", "too-dear", "idle", "carries-nothing", "not-offered"]
"""Used; would be if it were cheaper; not even for free; holds no role; nothing of it can be had."""

_SAME = 1e-6
"""Relative difference that is taken for rounding."""


class Worth(Frozen):
    """What loosening a constraint gains, by planning again.

    `usd_per_hour` is how much cheaper the plan gets; where neither plan is proven optimal the truth lies
    between `at_least` and `at_most`. `served` is the share of demand served then and `served_now` that of
    now; where it grows, costs do not compare. Both are `mean` shares where the least served role has none.
    """

    usd_per_hour: float
    at_least: float
    at_most: float
    served: float
    served_now: float
    mean: bool = False

    @property
    def serves_more(self) -> bool:
        """Whether more demand is served."""
        return self.served > self.served_now + _SAME

    @property
    def nothing(self) -> bool:
        """Whether nothing is gained."""
        return not self.serves_more and self.usd_per_hour <= _SAME

    @property
    def text(self) -> str:
        """What is gained, after "would"."""
        if self.serves_more:
            demand = "the demand, on average," if self.mean else "the demand"
            then, now = format_share(self.served), format_share(self.served_now)
            return f"serve {then} of {demand} instead of {now}"
        if self.usd_per_hour <= _SAME:
            return "save nothing"
        if self.at_most - self.at_least <= 0.005 * max(1.0, self.usd_per_hour):
            return f"save {format_price(self.usd_per_hour)}"
        low = max(0.0, self.at_least)
        return f"save between {format_price(low)} and {format_price(self.at_most)}"


class ExtraNodes(Frozen):
    """So many more nodes of one offer."""

    region: str
    node_type: str
    market: Market
    count: int

    @property
    def where(self) -> str:
        """The offer in words: "A100-80:8 in gcp/us-central1"."""
        kind = f"{self.node_type} spot" if self.market == "spot" else self.node_type
        return f"{kind} in {self.region}"

    @property
    def text(self) -> str:
        """The nodes in words: "+2 A100-80:8 in gcp/us-central1"."""
        return f"+{self.count} {self.where}"


class Constraint(Frozen):
    """One constraint of the problem that a plan uses up: `used` of `limit`, in the words of `where`.

    `loosened` says how it is loosened: by one node (`rental`) or altogether. `worth` is what that gains;
    None where it was not asked.
    """

    kind: ConstraintKind
    where: str
    used: float
    limit: float
    loosened: str
    rental: ExtraNodes | None = None
    worth: Worth | None = None

    @property
    def text(self) -> str:
        """The constraint in a sentence."""
        sentence = (
            f"{self.where}: {_amount(self.kind, self.used)} of {_amount(self.kind, self.limit)}"
        )
        return (
            sentence
            if self.worth is None
            else f"{sentence}; {self.loosened} would {self.worth.text}"
        )


class Slack(Frozen):
    """What a role is asked for and what its instances carry, in its unit per second."""

    role: str
    demand_per_s: float
    capacity_per_s: float
    served: float

    @property
    def spare(self) -> float:
        """How much more of its demand the role could carry on the same nodes, 0 if none."""
        if self.demand_per_s <= 0:
            return 0.0
        return max(0.0, self.capacity_per_s / self.demand_per_s - 1.0)


class Repair(Frozen):
    """One change after which all demand is met, and what the plan costs then.

    `before` and `after` are the changed number (seconds, USD per hour, a share, nodes, regions). Unless
    `smallest`, a smaller change may do, too: planning stopped before that was decided.
    """

    kind: RepairKind
    where: str
    before: float | None = None
    after: float | None = None
    rentals: tuple[ExtraNodes, ...] = ()
    usd_per_hour: float | None = None
    smallest: bool = True

    @property
    def text(self) -> str:
        """The change in words, with its price."""
        if self.kind == "nodes":
            change = ", ".join(rental.text for rental in self.rentals)
        elif self.kind == "limits":
            change = f"without {self.where}"
        else:
            before, after = (
                _amount(self.kind, value or 0.0) for value in (self.before, self.after)
            )
            change = f"{self.where} {before} -> {after}"
        if not self.smallest:
            change += " (perhaps less)"
        if self.usd_per_hour is None:
            return f"{change}: then it can be served at all"
        return f"{change}: {format_price(self.usd_per_hour)} in all"


class RoleFit(Frozen):
    """Whether a node type can carry a role, and if not, why."""

    role: str
    carries: bool
    reason: str


class NodeUse(Frozen):
    """Why a node type is in a plan or not.

    `instances` stand on it, of the roles `used_by`. `usd_per_hour` is its lowest price on offer; at
    `break_even_usd_per_hour` or below (all its prices lowered alike) the cheapest plan uses it. That price
    is not `exact` where the plans it comes from are not proven optimal.
    """

    node_type: str
    verdict: Verdict
    used: int
    available: int
    instances: tuple[str, ...] = ()
    used_by: tuple[str, ...] = ()
    roles: tuple[RoleFit, ...] = ()
    usd_per_hour: float | None = None
    break_even_usd_per_hour: float | None = None
    asked: bool = True
    exact: bool = True

    @property
    def text(self) -> str:
        """The answer in a sentence."""
        if self.verdict == "used":
            return f"{self.used} of {self.available} used, by {', '.join(self.used_by)}"
        if self.verdict == "not-offered":
            return "none can be had"
        if self.verdict == "carries-nothing":
            reasons = dict.fromkeys(role.reason for role in self.roles)
            return f"carries nothing: {'; '.join(reasons)}"
        price = format_price(self.usd_per_hour or 0.0)
        if not self.asked:
            return f"not used at {price}"
        if self.verdict == "idle" or self.break_even_usd_per_hour is None:
            return "not used, and would not be for free"
        low = self.break_even_usd_per_hour
        fall = 1.0 - low / self.usd_per_hour if self.usd_per_hour else 0.0
        if fall <= _SAME:
            return f"not used, though another plan of the same cost does, at {price}"
        goal = f"{'' if self.exact else 'about '}{format_price(low)} (by {format_share(fall)})"
        return f"not used: {price} would have to fall to {goal}"


class Explanation(Frozen):
    """Everything asked about one plan of one problem.

    `best_usd_per_hour` is the objective of the best plan known for the problem, and `bound` what is proven
    of it; a plan made with less effort or by a baseline may cost more. `repairs` is None where none were
    looked for. `plans` counts how often was
    planned again, and `left_out` names the questions that time did not suffice for.
    """

    schema_version: Literal[1] = 1
    problem_name: str
    status: Status
    served: float
    usd_per_hour: float
    objective: float | None
    best_usd_per_hour: float | None = None
    bound: float | None = None
    constraints: tuple[Constraint, ...] = ()
    demand: tuple[Slack, ...] = ()
    repairs: tuple[Repair, ...] | None = None
    node_types: tuple[NodeUse, ...] = ()
    plans: int = 0
    left_out: tuple[str, ...] = ()

    @property
    def short(self) -> bool:
        """Whether some demand is not met."""
        return self.status in ("partial", "infeasible")


def served_share(plan: Plan, problem: Problem, *, mean: bool = False) -> float:
    """Return the share of demand a plan serves: the least of all services, or their mean by priority.

    0 for an infeasible plan. The mean is taken if asked for or where the problem weighs by priority.
    """
    if plan.status == "infeasible":
        return 0.0
    demanded = [service for service in problem.services if service.rate_per_s > 0]
    shares = [plan.served_fraction.get(service.name, 1.0) for service in demanded]
    if not shares:
        return 1.0
    if not mean and problem.settings.on_shortage != "priority":
        return min(shares)
    weights = [service.priority for service in demanded]
    return sum(w * s for w, s in zip(weights, shares, strict=True)) / sum(weights)


def slacks(plan: Plan, problem: Problem) -> tuple[Slack, ...]:
    """Return demand and capacity of every role, in the problem's order."""
    return tuple(
        Slack(
            role=str(role),
            demand_per_s=problem.demand(role),
            capacity_per_s=sum(i.throughput_per_s for i in plan.of_role(role)),
            served=plan.served_fraction.get(str(role), 1.0),
        )
        for role in problem.roles
    )


def tight_constraints(plan: Plan, problem: Problem) -> tuple[Constraint, ...]:
    """Return the constraints that a plan uses up, those of the problem's limits first.

    A limit is listed whenever it is set: instances are whole, so it may bind with something left of it.
    Only a budget cannot bind a plan that meets all demand, since that is as cheap as can be anyway.
    """
    return (*_limits(plan, problem), *_exhausted_limits(plan, problem))


def _limits(plan: Plan, problem: Problem) -> Iterator[Constraint]:
    limits = problem.limits
    short = plan.status in ("partial", "infeasible")
    if short and limits.budget_usd_per_hour is not None:
        yield Constraint(
            kind="budget",
            where="budget",
            used=plan.usd_per_hour,
            limit=limits.budget_usd_per_hour,
            loosened="any budget",
        )
    if limits.max_nodes is not None:
        yield Constraint(
            kind="max-nodes",
            where="nodes",
            used=plan.nodes,
            limit=limits.max_nodes,
            loosened="any number of nodes",
        )
    if limits.spot_share is not None and any(offer.market == "spot" for offer in problem.offers):
        spot = sum(
            count * parse_node_type(kind).gpu_count
            for (_, kind, market), count in plan.count_nodes().items()
            if market == "spot"
        )
        yield Constraint(
            kind="spot-share",
            where="GPUs on spot",
            used=spot / plan.gpus if plan.gpus else 0.0,
            limit=limits.spot_share,
            loosened="any share",
        )
    if limits.spread > 1:
        by_role = {i.role: {j.region for j in plan.of_role(i.role)} for i in plan.instances}
        yield Constraint(
            kind="spread",
            where="regions of every role",
            used=min(map(len, by_role.values()), default=0),
            limit=limits.spread,
            loosened="one region",
        )


def _exhausted_limits(plan: Plan, problem: Problem) -> Iterator[Constraint]:
    rented = plan.count_nodes()
    for offer in problem.offers:
        if offer.available and rented[offer.key] >= offer.available:
            more = ExtraNodes(
                region=offer.region, node_type=offer.node_type, market=offer.market, count=1
            )
            yield Constraint(
                kind="availability",
                where=more.where,
                used=rented[offer.key],
                limit=offer.available,
                loosened="one more",
                rental=more,
            )


def _amount(kind: ConstraintKind | RepairKind, value: float) -> str:
    if kind == "budget":
        return format_price(value)
    if kind == "spot-share":
        return format_share(value)
    if kind in ("ttft", "tpot"):
        return format_duration(value)
    return f"{value:g}"
