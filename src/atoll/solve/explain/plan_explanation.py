"""Why a plan is what it is: what stands in the way, what loosening it is worth, what would repair it.

This module holds the words and what can be read off a plan; planning again, which gives the figures, is
`explain_plan`. A figure is a fact if it is the difference between two checked plans, and says that
it is an estimate if it is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import SerializerFunctionWrapHandler, model_serializer

from atoll.core.frozen import Frozen
from atoll.core.ids import Phase, RoleId
from atoll.core.units import format_duration, format_price, format_share, pluralize
from atoll.plan.executor_use import PartUse
from atoll.plan.plan import Goal, Market, Plan, Status
from atoll.plan.problem import Problem
from atoll.plan.validate.validate_spot import spot_share
from atoll.solve.explain.quality import ChoiceQuality

ConstraintKind = Literal[
    "availability",
    "budget",
    "spot-share",
    "max-nodes",
    "spread",
    "machine",
    "link",
    "memory",
    "promise",
]
"""The first five are of rented nodes, the others of fixed clusters."""
RepairKind = Literal[
    "nodes",
    "ttft",
    "tpot",
    "budget",
    "spot-share",
    "max-nodes",
    "spread",
    "limits",
    "cut",
    "phases",
    "spot",
    "pinning",
    "links",
    "best-effort",
    "ahead",
    "image",
    "gpus",
    "paths",
]
"""The last four are of any-to-any models."""
Verdict = Literal["used", "too-dear", "idle", "carries-nothing", "not-offered"]
"""Used; would be if it were cheaper; not even for free; holds no role; nothing of it can be had."""

MIN_SERVED = 1e-3
"""A larger share of demand by less than this is no gain."""
MIN_USD = 0.005
"""Nor is a saving that rounds to nothing."""
_MIN_TOKENS = 1e-3
FITS = "carries all classes"
"""Why a part runs on a kind of node, where it does without exception."""


class Worth(Frozen):
    """Gain of a change over the plan that is explained.

    `usd_per_hour` is how much less another plan costs then, which was made and checked; no plan saves more
    than `at_most`, where that is proven. `served` is the share of demand served then and `served_now` that of
    the plan; where it grows, costs do not compare. Both are `mean` shares where the least served service has
    none. On a fixed cluster `tokens_per_s` is carried then. `again` says that planning again without the
    change gains as much. An `estimated` worth comes from the prices of the relaxation: no plan was made.
    """

    usd_per_hour: float
    served: float
    served_now: float
    at_most: float | None = None
    mean: bool = False
    tokens_per_s: float | None = None
    tokens_per_s_now: float | None = None
    again: bool = False
    estimated: bool = False

    @property
    def serves_more(self) -> bool:
        """Whether more demand is served."""
        return self.served > self.served_now + MIN_SERVED

    @property
    def carries_more(self) -> bool:
        """Whether a cluster carries more tokens/s."""
        now, then = self.tokens_per_s_now, self.tokens_per_s
        return now is not None and then is not None and then > now * (1.0 + _MIN_TOKENS)

    @property
    def nothing(self) -> bool:
        """Whether the change gains nothing."""
        gains = self.serves_more or self.carries_more or self.usd_per_hour > MIN_USD
        return self.again or not gains

    @property
    def text(self) -> str:
        """The gain in words, to follow "would"."""
        if self.again:
            return "gain no more than planning again does"
        if self.serves_more:
            demand = "the demand, on average," if self.mean else "the demand"
            then, now = format_share(self.served), format_share(self.served_now)
            return f"serve {then} of {demand} instead of {now}"
        if self.carries_more:
            return (
                f"carry {self.tokens_per_s:,.0f} tokens/s instead of {self.tokens_per_s_now:,.0f}"
            )
        if self.usd_per_hour <= MIN_USD:
            more = self.at_most is not None and self.at_most > MIN_USD and not self.estimated
            if more:
                return f"save at most {format_price(self.at_most or 0.0)}"
            return "gain nothing" if self.at_most is not None else "gain nothing that was found"
        if self.estimated:
            return f"save about {format_price(self.usd_per_hour)} (estimate)"
        saved = f"save {format_price(self.usd_per_hour)}"
        if self.at_most is None or self.at_most - self.usd_per_hour <= 0.005 * max(
            1.0, self.usd_per_hour
        ):
            return saved
        return f"{saved}, {format_price(self.at_most)} at most"


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
        return f"+{self.count} {self.where}{' of your own' if self.market == 'owned' else ''}"


class Constraint(Frozen):
    """One constraint of the problem that a plan uses up: `used` of `limit`, in the words of `where`.

    `loosened` says how it is loosened: by one node (`rental`), or altogether. `worth` is what that gains;
    None where it was not asked. Machines and links of a cluster have no figures of their own.
    """

    kind: ConstraintKind
    where: str
    used: float | None = None
    limit: float | None = None
    loosened: str
    rental: ExtraNodes | None = None
    worth: Worth | None = None

    @property
    def text(self) -> str:
        """The constraint in a sentence."""
        sentence = self.where
        if self.used is not None and self.limit is not None:
            used, limit = _amount(self.kind, self.used), _amount(self.kind, self.limit)
            sentence += f": {used} of {limit}"
        if self.worth is None:
            return sentence
        return f"{sentence}; {self.loosened} would {self.worth.text}"


class Slack(Frozen):
    """Demand of a role and throughput of its instances, in its unit per second.

    Where a service runs some requests apart and some together, each role is asked for its part of them.
    """

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
    """One change that helps, and what the plan made with it costs and serves.

    `before` and `after` are the changed number (seconds, USD per hour, a share, nodes, regions). Where it
    `meets_demand` nothing is left to serve, else `served` is the share: of the least served service, or the
    `mean` where only that grows. `saved_usd_per_hour` is what the plan costs less than the one explained,
    where that serves as much, and `freed` the machines it does without. Unless `smallest`, a smaller change
    may do as much: that was not decided.
    """

    kind: RepairKind
    where: str
    before: float | None = None
    after: float | None = None
    rentals: tuple[ExtraNodes, ...] = ()
    usd_per_hour: float
    served: float = 1.0
    mean: bool = False
    meets_demand: bool = True
    saved_usd_per_hour: float | None = None
    tokens_per_s: float | None = None
    machines: int | None = None
    freed: int = 0
    smallest: bool = True

    @property
    def change(self) -> str:
        """The change in words."""
        if self.kind == "nodes":
            return ", ".join(rental.text for rental in self.rentals)
        if self.kind == "limits":
            return f"without {self.where}"
        if self.before is None or self.after is None:
            return self.where
        before, after = _amount(self.kind, self.before), _amount(self.kind, self.after)
        return f"{self.where} {before} -> {after}"

    @property
    def text(self) -> str:
        """The change in words, with its price and what it does."""
        change = self.change if self.smallest else f"{self.change} (perhaps less)"
        said = (
            [] if self.tokens_per_s is not None else [f"{format_price(self.usd_per_hour)} in all"]
        )
        if self.saved_usd_per_hour is not None and self.saved_usd_per_hour > MIN_USD:
            said.append(f"{format_price(self.saved_usd_per_hour)} less")
        elif self.freed:
            said.append(f"on {pluralize(self.machines or 0, 'machine')}, {self.freed} fewer")
        if not self.meets_demand:
            said.append(f"serves {format_share(self.served)}{' on average' if self.mean else ''}")
        if self.tokens_per_s is not None:
            said.append(f"carries {self.tokens_per_s:,.0f} tokens/s")
        return f"{change}: {', '.join(said)}"


class RoleFit(Frozen):
    """Whether a node type can carry a role, and if not, why."""

    role: str
    carries: bool
    reason: str


class NodeUse(Frozen):
    """Why a node type is in a plan or not.

    `instances` stand on it, of the roles `used_by`. `usd_per_hour` is its lowest price on offer; at
    `break_even_usd_per_hour` or below (all its prices lowered alike) a cheaper plan uses it. That price is
    not `exact` where the plans it comes from are not proven optimal, and `estimated` where none were made.
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
    estimated: bool = False

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
        if self.usd_per_hour is None:
            return "not used: no placement that was found is better with it"
        price = format_price(self.usd_per_hour)
        if not self.asked:
            return f"not used at {price}"
        if self.verdict == "idle" or self.break_even_usd_per_hour is None:
            return "not used, and would not be for free"
        low = self.break_even_usd_per_hour
        fall = 1.0 - low / self.usd_per_hour if self.usd_per_hour else 0.0
        if fall <= 1e-6 and not self.estimated:
            return f"not used, though another plan of the same cost does, at {price}"
        about = "" if self.exact and not self.estimated else "about "
        if fall <= 1e-6:
            return f"not used, though {price} is {about}what it is worth (estimate)"
        goal = f"{about}{format_price(low)} (by {format_share(fall)})"
        return f"not used: {price} would have to fall to {goal}{', an estimate' if self.estimated else ''}"


class DeployedWay(Frozen):
    """The best plan of a way to deploy any-to-any models that has a name, such as E/P/D.

    `ratio` is its cost over that of the plan explained, where both serve the same; `broken` names the rules
    that it breaks, and then there is no plan. It is `estimated` where the plan explained keeps its promises
    in simulation: this one was not simulated, its executors are taken to need as much room.
    """

    name: str
    status: Status | None = None
    usd_per_hour: float | None = None
    nodes: int | None = None
    served: float | None = None
    ratio: float | None = None
    broken: tuple[str, ...] = ()
    estimated: bool = False

    @property
    def text(self) -> str:
        """The verdict in words."""
        if self.broken:
            return f"breaks {', '.join(self.broken)}"
        if self.status in (None, "infeasible") or not self.served:
            return "no plan"
        text = f"{format_price(self.usd_per_hour or 0.0)} on {pluralize(self.nodes or 0, 'node')}"
        text = f"about {text}" if self.estimated else text
        if self.ratio is not None:
            return f"{text}, x{self.ratio:.2f}"
        return f"{text}, serves {format_share(self.served)}"


class PartFit(Frozen):
    """Whether a part of a model can run alone on a kind of node, and if not (or not for all), why.

    `reason` is the same for all kinds of nodes that fail alike, `detail` says more of this one.
    """

    service: str
    part: str
    kind: str
    carries: bool
    reason: str
    detail: str = ""


class EngineLimit(Frozen):
    """What engines do not run (`missing_in`) of instances of a plan: "several nodes in a stage".

    `run_by` are those that do; which of them may run anything is the fleet's to say.
    """

    limit: str
    instances: tuple[str, ...]
    missing_in: tuple[str, ...]
    run_by: tuple[str, ...]


class EngineCost(Frozen):
    """What a plan for capacity alone costs per hour with some engines; without any, with any layout.

    `usd_per_hour` is None where there is no plan, and `allowed_usd_per_hour` is what it costs with the
    engines that the fleet allows. `engine` is the one that is left out or added. `limits` are those without
    which it would not differ: of `engine`'s instances what others do not run, or of any layout what none of
    those allowed does.
    """

    change: str
    engines: tuple[str, ...]
    usd_per_hour: float | None
    meets_demand: bool
    engine: str | None = None
    allowed_usd_per_hour: float | None = None
    limits: tuple[EngineLimit, ...] = ()

    @property
    def text(self) -> str:
        """The answer in words."""
        shown = "no plan" if self.usd_per_hour is None else format_price(self.usd_per_hour)
        if not self.meets_demand and self.usd_per_hour is not None:
            shown += ", and demand is not met"
        if not self.limits or self.allowed_usd_per_hour is None:
            return f"{self.change}: {shown}"
        now = format_price(self.allowed_usd_per_hour)
        if self.engine is None:
            return f"{self.change}: {shown}; it has {self._describe_layout()}"
        what = _join([limit.limit for limit in self.limits])
        if self.engine in self.engines:
            who = f"{self.engine} runs {what}, which none of the others does"
            return f"{who}; with it {shown}, without {now}"
        also = set.intersection(*(set(limit.run_by) for limit in self.limits)) - {self.engine}
        who = f"no engine{' allowed here' if also else ''} runs {what} except {self.engine}"
        return f"{who}; with it {now}, without {shown}"

    def _describe_layout(self) -> str:
        """What engines allowed here do not run together, and who runs which of it."""
        by_engines: dict[tuple[str, ...], list[str]] = {}
        for limit in self.limits:
            by_engines.setdefault(limit.run_by, []).append(limit.limit)
        parts = [
            f"{_join(limits)}, which "
            + (
                f"only {_join(names)} {'run' if len(names) > 1 else 'runs'}"
                if names
                else "none runs"
            )
            for names, limits in by_engines.items()
        ]
        named = dict.fromkeys(name for limit in self.limits for name in limit.instances)
        return f"{', and '.join(parts)} ({', '.join(named)})"


def _join(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


class LossCost(Frozen):
    """A kind of loss that a plan survives: what it leaves of the service it hurts most, and its price.

    `saves_usd` is what a plan saves per hour that need not survive it, None where that was not asked; `binds`
    says that no other costs more, or where none costs anything alone, that none leaves less. Without `lost`
    it is about all losses together.
    """

    lost: str | None
    service: str = ""
    left: float = 1.0
    keep: float = 1.0
    binds: bool = False
    saves_usd: float | None = None

    @property
    def text(self) -> str:
        """The answer in words."""
        saves = ""
        if self.saves_usd is not None:
            saves = f"{format_price(self.saves_usd)} less" if self.saves_usd > 0.0 else "no less"
        if self.lost is None:
            return f"if nothing were ever lost: {saves or 'not asked'}"
        text = f"{self.lost} lost: {format_share(self.left)} of {self.service} can be served"
        text += f", {format_share(self.keep)} must be" + ("; it binds" if self.binds else "")
        return text + (f"; if it could not be lost: {saves}" if saves else "")


class Explanation(Frozen):
    """Everything asked about one plan of one problem.

    The plan explained is the one all figures compare with; of an infeasible one nothing can be read off, and
    then it is the plan that serves the most. `again` is what planning again without any change gains over it;
    `simple` says that it is one that costs more than the cheapest for being simple.
    `bound` is proven of the objective of any plan. `repairs` is None where none were looked for; where demand
    is met they are changes that are cheaper, or carry more. `plans` counts how often was planned again, and
    `left_out` names the questions that were not asked. With a `goal` other than cost, a fixed cluster's,
    `objective` and `bound` are tokens/s. Of any-to-any models: `ways` are ways to deploy that have a name,
    `parts` how busy each part keeps its executors, the bottleneck first, and `fits` which parts run where.
    Of choices between models: `choices` are what right answers cost. `engines` are what others would cost,
    and `losses` what surviving each costs.
    """

    schema_version: Literal[1] = 1
    problem_name: str
    status: Status
    goal: Goal = "cost"
    served: float
    usd_per_hour: float
    objective: float | None
    bound: float | None = None
    again: Worth | None = None
    constraints: tuple[Constraint, ...] = ()
    demand: tuple[Slack, ...] = ()
    repairs: tuple[Repair, ...] | None = None
    node_types: tuple[NodeUse, ...] = ()
    plans: int = 0
    left_out: tuple[str, ...] = ()
    ways: tuple[DeployedWay, ...] = ()
    parts: tuple[PartUse, ...] = ()
    fits: tuple[PartFit, ...] = ()
    choices: tuple[ChoiceQuality, ...] = ()
    engines: tuple[EngineCost, ...] = ()
    losses: tuple[LossCost, ...] = ()
    simple: bool = False

    @model_serializer(mode="wrap")
    def _without_executors(self, write: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Leave out what only any-to-any models and choices have."""
        fields: dict[str, object] = write(self)
        later = ("ways", "parts", "fits", "choices", "engines", "losses", "simple")
        return {name: value for name, value in fields.items() if value or name not in later}

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
            demand_per_s=problem.demand(role) * _routed_share(plan, problem, role),
            capacity_per_s=sum(i.throughput_per_s for i in plan.of_role(role)),
            served=plan.served_fraction.get(role.model, 1.0),
        )
        for role in problem.roles
    )


def _routed_share(plan: Plan, problem: Problem, role: RoleId) -> float:
    """The share of a service's requests that goes to a role; where nothing stands, that which would first."""
    if any(route.service == role.model for route in plan.routes):
        return min(1.0, sum(plan.weights(role.model, role.phase).values()))
    first = Phase.BOTH if problem.service(role.model).phases == "auto" else role.phase
    return 1.0 if role.phase is first else 0.0


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
        yield Constraint(
            kind="spot-share",
            where="requests on spot",
            used=max(spot_share(plan, service) for service in problem.services),
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
    for offer in () if problem.cluster is not None else problem.offers:
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
    if kind in ("ttft", "tpot", "ahead", "image"):
        return format_duration(value)
    return f"{value:g}"
