"""What would let all demand be met: more nodes, a looser promise, a larger limit; smallest first found.

Each repair changes one thing. Whether a change suffices only ever turns from no to yes as it grows, so
the smallest is found by bisection, starting from what the plan with the largest change really uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from atoll.core.ids import Phase, RoleId
from atoll.plan.plan import Plan
from atoll.plan.problem import Limits, Offer, Problem, Service
from atoll.solve.explain.explanation import ExtraNodes, Repair, RepairKind
from atoll.solve.explain.whatif import OutOfTimeError, Planner, with_more

_PLENTY = 10_000
_PROMISE_STEP = 0.01
_PROMISE_STEPS = 300
"""A promise is loosened by up to 300 steps of 1 % of what it is now."""

Attempt = Callable[[int], tuple[Plan, bool]]
"""The plan with a change of some size, and whether that size was decided in time."""


class AskLimits(Protocol):
    """Plans with other limits; as `Attempt`."""

    def __call__(self, question: str, **changes: float | None) -> tuple[Plan, bool]:
        """Return the plan and whether it was decided in time."""
        ...


def find_repairs(planner: Planner, left_out: list[str]) -> tuple[Repair, ...]:
    """Return single changes after which all demand is met, the cheapest plan first.

    Where a role has no template at all, no nodes help: then the promises that would give it one.
    """
    problem = strict(planner.problem)
    hopeless = [role for role in problem.roles if _has_no_template(planner, problem, role)]
    repairs: list[Repair] = []
    groups: list[tuple[str, Iterator[Repair]]] = []
    if hopeless:
        groups.append(
            ("promises that can be carried", carriable_promises(planner, problem, hopeless))
        )
    else:
        groups.append(("limits", limit_repairs(planner, problem)))
        groups.append(("more nodes", node_repairs(planner, problem)))
        groups.append(("looser promises", promise_repairs(planner, problem)))
    for name, group in groups:
        try:
            repairs.extend(group)
        except OutOfTimeError:
            left_out.append(f"repairs by {name}, in part")
    return tuple(sorted(repairs, key=_by_cost))


def _by_cost(repair: Repair) -> tuple[float, str, str]:
    usd = float("inf") if repair.usd_per_hour is None else repair.usd_per_hour
    return (usd, repair.kind, repair.text)


def strict(problem: Problem) -> Problem:
    """Return the problem that has no answer where not all demand can be met."""
    return problem.replace(settings=problem.settings.model_copy(update={"on_shortage": "fail"}))


def _meets_demand(plan: Plan) -> bool:
    return plan.status in ("optimal", "feasible")


def _has_no_template(planner: Planner, problem: Problem, role: RoleId) -> bool:
    return problem.demand(role) > 0 and len(planner.libraries.roles[str(role)]) == 0


@dataclass(frozen=True)
class _Smallest:
    size: int
    plan: Plan
    sure: bool


def _bisect(attempt: Attempt, largest: int, plan: Plan) -> _Smallest:
    """Return the smallest size in 1..largest that suffices, given that `largest` does with `plan`."""
    low, best = 0, _Smallest(largest, plan, True)
    while best.size - low > 1:
        middle = (low + best.size) // 2
        candidate, decided = attempt(middle)
        if _meets_demand(candidate):
            best = _Smallest(middle, candidate, best.sure)
        else:
            low = middle
            best = _Smallest(best.size, best.plan, best.sure and decided)
    return best


# Limits


def limit_repairs(planner: Planner, problem: Problem) -> Iterator[Repair]:
    """Yield the smallest change of each limit that suffices; of all together where none does alone."""
    limits = problem.limits

    def ask(question: str, **changes: float | None) -> tuple[Plan, bool]:
        looser = problem.replace(limits=limits.model_copy(update=changes))
        solved, decided = planner.solve(looser, question)
        return solved.plan, decided

    singles = list(_single_limits(problem, ask))
    yield from singles
    names = _set_limits(problem)
    if not singles and len(names) > 1:
        free = Limits().model_dump()
        plan, _ = ask("no limits", **free)
        if _meets_demand(plan):
            where = " and ".join((", ".join(names[:-1]), names[-1]))
            yield Repair(kind="limits", where=where, usd_per_hour=plan.usd_per_hour)


def _set_limits(problem: Problem) -> list[str]:
    limits = problem.limits
    names = {
        "the budget": limits.budget_usd_per_hour is not None,
        "the limit on nodes": limits.max_nodes is not None,
        "the limit on spot": limits.spot_share is not None,
        "the spread": limits.spread > 1,
    }
    return [name for name, there in names.items() if there]


def _single_limits(problem: Problem, ask: AskLimits) -> Iterator[Repair]:
    limits = problem.limits
    budget = limits.budget_usd_per_hour
    if budget is not None:
        plan, _ = ask("any budget", budget_usd_per_hour=None)
        if _meets_demand(plan):
            # The cheapest plan of all is the smallest budget that suffices.
            yield Repair(
                kind="budget",
                where="budget",
                before=budget,
                after=plan.usd_per_hour,
                usd_per_hour=plan.usd_per_hour,
                smallest=plan.status == "optimal",
            )
    most = limits.max_nodes
    if most is not None:
        plan, _ = ask("any number of nodes", max_nodes=None)
        if _meets_demand(plan):
            best = _bisect(
                lambda n: ask(f"{most + n} nodes", max_nodes=most + n), plan.nodes - most, plan
            )
            yield _limit("max-nodes", "nodes", most, most + best.size, best)
    share = limits.spot_share
    if share is not None and any(offer.market == "spot" for offer in problem.offers):
        plan, _ = ask("any spot share", spot_share=None)
        if _meets_demand(plan):
            steps = max(1, round((1.0 - share) * 100))

            def at(step: int, share: float = share) -> float:
                return min(1.0, share + step / 100)

            best = _bisect(lambda n: ask(f"spot share {at(n):.0%}", spot_share=at(n)), steps, plan)
            yield _limit("spot-share", "share of GPUs on spot", share, at(best.size), best)
    for spread in range(limits.spread - 1, 0, -1):
        plan, decided = ask(f"in {spread} regions", spread=spread)
        if _meets_demand(plan):
            best = _Smallest(spread, plan, decided)
            yield _limit("spread", "regions of every role", limits.spread, spread, best)
            break


def _limit(kind: RepairKind, where: str, before: float, after: float, best: _Smallest) -> Repair:
    return Repair(
        kind=kind,
        where=where,
        before=before,
        after=after,
        usd_per_hour=best.plan.usd_per_hour,
        smallest=best.sure,
    )


# Nodes


def node_repairs(planner: Planner, problem: Problem) -> Iterator[Repair]:
    """Yield the cheapest mix of nodes, then each node type alone, from where it is cheapest."""
    everything = [_rental(offer, _PLENTY) for offer in problem.offers]
    plan = planner.plan(with_more(problem, everything), "any number of nodes of every type")
    if not _meets_demand(plan):
        return
    missing = _nodes_beyond(plan, problem)
    if len(missing) > 1:
        yield Repair(
            kind="nodes",
            where="nodes",
            rentals=missing,
            usd_per_hour=plan.usd_per_hour,
            smallest=plan.status == "optimal",
        )
    first = [(r.region, r.node_type, r.market) for r in missing]
    for offer in _candidates(problem, first):
        repair = _offer_repair(planner, problem, offer)
        if repair is not None:
            yield repair


def _candidates(problem: Problem, first: Sequence[tuple[str, str, str]]) -> list[Offer]:
    """One offer of each node type, the cheapest; those that the cheapest mix takes come first."""
    best: dict[str, Offer] = {}
    for offer in problem.offers:
        known = best.get(offer.node_type)
        wanted = (offer.key not in first, offer.usd_per_hour)
        if known is None or wanted < (known.key not in first, known.usd_per_hour):
            best[offer.node_type] = offer
    return sorted(best.values(), key=lambda o: (o.key not in first, o.usd_per_hour, o.key))


def _offer_repair(planner: Planner, problem: Problem, offer: Offer) -> Repair | None:
    def ask(number: int) -> tuple[Plan, bool]:
        more = _rental(offer, number)
        solved, decided = planner.solve(with_more(problem, (more,)), more.text)
        return solved.plan, decided

    plan, _ = ask(_PLENTY)
    if not _meets_demand(plan):
        return None
    enough = next((r.count for r in _nodes_beyond(plan, problem)), 1)
    best = _bisect(ask, enough, plan)
    return Repair(
        kind="nodes",
        where=offer.node_type,
        rentals=(_rental(offer, best.size),),
        usd_per_hour=best.plan.usd_per_hour,
        smallest=best.sure,
    )


def _rental(offer: Offer, count: int) -> ExtraNodes:
    return ExtraNodes(
        region=offer.region, node_type=offer.node_type, market=offer.market, count=count
    )


def _nodes_beyond(plan: Plan, problem: Problem) -> tuple[ExtraNodes, ...]:
    """The nodes a plan uses beyond those on offer."""
    rented = plan.count_nodes()
    return tuple(
        _rental(offer, rented[offer.key] - offer.available)
        for offer in problem.offers
        if rented[offer.key] > offer.available
    )


# Promises


def _parts(service: Service) -> Iterator[tuple[RepairKind, tuple[RoleId, ...]]]:
    """Each promise of a service and the roles it binds."""
    for kind, phase in (("ttft", Phase.PREFILL), ("tpot", Phase.DECODE)):
        bound = tuple(role for role in service.roles if role.phase in (phase, Phase.BOTH))
        yield ("ttft" if kind == "ttft" else "tpot"), bound


def _loosen_promise(problem: Problem, service: Service, kind: RepairKind, step: int) -> Problem:
    """The problem with one promise loosened by so many steps."""
    promise = service.ttft_s if kind == "ttft" else service.tpot_s
    value = promise * (1.0 + _PROMISE_STEP * step)
    loosened = service.model_copy(update={f"{kind}_s": value})
    services = tuple(loosened if s.name == service.name else s for s in problem.services)
    return problem.replace(services=services)


def _promise_repair(
    service: Service, kind: RepairKind, step: int, plan: Plan | None, sure: bool
) -> Repair:
    before = service.ttft_s if kind == "ttft" else service.tpot_s
    return Repair(
        kind=kind,
        where=f"{kind.upper()} of {service.name}",
        before=before,
        after=before * (1.0 + _PROMISE_STEP * step),
        usd_per_hour=None if plan is None else plan.usd_per_hour,
        smallest=sure,
    )


def promise_repairs(planner: Planner, problem: Problem) -> Iterator[Repair]:
    """Yield the tightest looser promise of each service that suffices alone."""
    for service in problem.services:
        if service.rate_per_s <= 0:
            continue
        for kind, roles in _parts(service):

            def ask(
                step: int,
                service: Service = service,
                kind: RepairKind = kind,
                roles: tuple[RoleId, ...] = roles,
            ) -> tuple[Plan, bool]:
                looser = _loosen_promise(problem, service, kind, step)
                libraries = planner.with_roles(looser, roles)
                percent = 100 * _PROMISE_STEP * step
                question = f"{kind.upper()} of {service.name} +{percent:.0f}%"
                solved, decided = planner.solve(looser, question, libraries)
                return solved.plan, decided

            plan, _ = ask(_PROMISE_STEPS)
            if _meets_demand(plan):
                best = _bisect(ask, _PROMISE_STEPS, plan)
                yield _promise_repair(service, kind, best.size, best.plan, best.sure)


def carriable_promises(
    planner: Planner, problem: Problem, roles: Sequence[RoleId]
) -> Iterator[Repair]:
    """Yield the tightest promise under which a role without templates has one."""
    for role in roles:
        service = problem.service_of(role)
        for kind, bound in _parts(service):
            if role not in bound:
                continue

            def is_carried(
                step: int,
                service: Service = service,
                kind: RepairKind = kind,
                role: RoleId = role,
            ) -> bool:
                planner.tick(f"{kind.upper()} of {service.name}")
                looser = _loosen_promise(problem, service, kind, step)
                return len(planner.library(looser, role)) > 0

            low, high = 0, _PROMISE_STEPS
            if not is_carried(high):
                continue
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if is_carried(middle) else (middle, high)
            yield _promise_repair(service, kind, high, None, True)
