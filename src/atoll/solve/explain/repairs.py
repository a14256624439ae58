"""Repairs that would help a plan: machines cut, phases together, other limits, more nodes, looser promises.

Each repair changes one thing, and each is a plan that was made and checked. Those that meet all demand come
first; those that merely help are told apart. A larger change never does worse than a smaller one (`Planner`),
so the smallest that does as much is found by bisection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from atoll.plan.plan import Market, Plan
from atoll.plan.problem import Limits, Offer, Problem, Service
from atoll.solve.explain.changes import (
    Change,
    cuts,
    faster_links,
    free_paths,
    free_phases,
    loosen_promise,
    looser_classes,
    more_gpu_types,
    unpinned,
    with_limits,
    with_more,
    with_spot,
)
from atoll.solve.explain.merit import merit
from atoll.solve.explain.plan_explanation import (
    MIN_SERVED,
    MIN_USD,
    ExtraNodes,
    Repair,
    RepairKind,
    served_share,
)
from atoll.solve.explain.planning_again import OutOfTimeError, Planner, gains, grows_on_average

PROMISES = (1.05, 1.1, 1.2, 1.35, 1.5, 2.0, 3.0, 4.0)
"""A promise is loosened to one of these times what it is."""
_MAX_ADDED = 1_000
"""Nodes of an offer that may be added: more than any plan needs."""
_MAX_ADDED_FREE = 32
"""The same for nodes that cost nothing, of which a plan would take all there are."""
_MAX_SERVICES = 3
"""Services whose promises are asked about one by one, the least served first."""
_MAX_TYPES = 4
"""Node types whose number is asked about one by one, the most promising first."""
_MACHINES = (1, 2, 4, 8)
"""Machines that are added to a cluster."""
_FREE = ("cut", "phases")
"""Changes that cost nothing, worth a mention where they only free machines."""
_MAX_SINGLE = 3
_TOGETHER: Mapping[RepairKind, str] = {
    "cut": "cut all machines into slices (without `whole`)",
    "phases": "phases of all services apart or together (`phases: auto`)",
    "pinning": "all services on any node (without `only` and `avoid`)",
}
"""Names of all changes of a kind together, where there are too many to ask about each."""
_STEPS = 5
"""Bisections for the smallest change that meets all demand: more might find a smaller one."""
_FEW_STEPS = 2
"""Bisections for the smallest change that merely helps."""

_T = TypeVar("_T")
AtSize = Callable[[int], Change]
"""A change of some size."""


@dataclass(frozen=True)
class Found:
    """A change that helps; `smallest` if no smaller one does as much. `parts` are what it is made of."""

    change: Change
    smallest: bool = True
    parts: tuple[Change, ...] = ()


def find_repairs(planner: Planner, base: Plan, left_out: list[str]) -> tuple[Repair, ...]:
    """Return single changes that serve more than `base`, or as much for less, best first.

    Those that meet all demand come first, by their cost; then those that merely help, by what they serve.
    Questions that there was no time for are named in `left_out`.
    """
    found: list[Found] = []
    for name, group in _groups(planner, base):
        try:
            for each in group:
                found.append(each)  # noqa: PERF402  (what was found before time ran out is kept)
        except OutOfTimeError:
            left_out.append(f"changes by {name}, in part")
    weighed = (_weigh(planner, base, each) for each in found)
    repairs = [each for each in weighed if each is not None]
    kept = (each for each in repairs if not any(_is_part(other, each) for other in repairs))
    return tuple(sorted(kept, key=_by_gain))


def _is_part(part: Repair, repair: Repair) -> bool:
    """Whether a repair with fewer more nodes serves all for no more."""
    had = {(r.region, r.node_type, r.market): r.count for r in repair.rentals}
    asked = {(r.region, r.node_type, r.market): r.count for r in part.rentals}
    fewer = bool(asked) and asked != had and all(had.get(key, 0) >= n for key, n in asked.items())
    return fewer and part.meets_demand and part.usd_per_hour <= repair.usd_per_hour + MIN_USD


def _by_gain(repair: Repair) -> tuple[bool, float, bool, float, float, bool, str]:
    served = 0.0 if repair.meets_demand else -repair.served
    # A machine of one's own has to be bought, which its price per hour leaves out.
    bought = any(rental.market == "owned" for rental in repair.rentals)
    tokens = -(repair.tokens_per_s or 0.0)
    usd = repair.usd_per_hour
    full = repair.meets_demand
    return (not full, served, bought, tokens, usd, repair.kind not in _FREE, repair.text)


def _groups(planner: Planner, base: Plan) -> Iterator[tuple[str, Iterator[Found]]]:
    """Yield the groups of questions, those that cost no money first."""
    problem = planner.problem
    short = not merit(base, problem).meets_demand
    if problem.family == "graph":
        each = partial(_each, planner, base)
        yield "looser promises", each(looser_classes(problem))
        yield "other GPU types", each(more_gpu_types(problem, planner.catalog))
        yield "cutting machines", each(cuts(problem))
        yield "other ways to run", each([*free_phases(problem), *free_paths(problem)])
        yield "spot nodes", each(with_spot(problem, planner.catalog))
        yield "other nodes", each(unpinned(problem))
        return
    yield "cutting machines", _together_then_single(planner, base, cuts(problem))
    if problem.cluster is not None:
        yield "faster links", _faster_links(planner, base)
        if short:
            yield "more machines", _more_machines(planner, base)
            yield "looser promises", _looser_promises(planner, base)
            yield "best effort", _best_effort(planner, base)
        return
    yield "running phases together", _together_then_single(planner, base, free_phases(problem))
    yield "limits", _other_limits(planner, base)
    if short:
        yield "more nodes", _more_nodes(planner, base)
    yield "spot nodes", _each(planner, base, with_spot(problem, planner.catalog))
    yield "other nodes", _together_then_single(planner, base, unpinned(problem))
    if short:
        yield "looser promises", _looser_promises(planner, base)


def _weigh(planner: Planner, base: Plan, found: Found) -> Repair | None:
    """Return a repair with the figures of the best plan known for it; None where it does not help."""
    change, problem = found.change, planner.problem
    plan = planner.best(change.problem, best_effort=change.best_effort)
    # The problem may have been planned better meanwhile: the change must beat that plan, too.
    again = planner.best(problem) or base
    free = change.kind in _FREE
    # A change made of several must beat each of its parts, or it is the part that helps.
    others = [again, *(planner.best(part.problem) or base for part in found.parts)]
    if plan is None or not all(
        gains(other, plan, problem, machines=free) for other in (base, *others)
    ):
        return None
    other = None if change.best_effort else planner.ask_remixed(change.problem, change.question)
    if other is not None and merit(other, problem) > merit(plan, problem):
        plan = other
    mean = grows_on_average(base, plan, problem)
    served, served_now = (served_share(each, problem, mean=mean) for each in (plan, base))
    costs = plan.goal == "cost"
    # Savings are told only where as much is served as before: else the two costs do not compare.
    saves = costs and served <= served_now + MIN_SERVED
    return Repair(
        kind=change.kind,
        where=change.where,
        before=change.before,
        after=change.after,
        rentals=change.rentals,
        usd_per_hour=plan.usd_per_hour,
        served=served,
        mean=mean,
        meets_demand=merit(plan, problem).meets_demand,
        saved_usd_per_hour=base.usd_per_hour - plan.usd_per_hour if saves else None,
        tokens_per_s=None if costs else plan.objective,
        machines=plan.nodes,
        freed=max(0, base.nodes - plan.nodes) if saves and free else 0,
        smallest=found.smallest,
    )


def _ask(planner: Planner, change: Change) -> Plan:
    return planner.ask(change.problem, change.question, best_effort=change.best_effort)


def _each(planner: Planner, base: Plan, changes: Iterable[Change]) -> Iterator[Found]:
    for change in changes:
        if gains(base, _ask(planner, change), planner.problem, machines=change.kind in _FREE):
            yield Found(change)


def _together_then_single(
    planner: Planner, base: Plan, changes: Sequence[Change]
) -> Iterator[Found]:
    """Ask about all changes of a kind at once; if that helps, about each, unless there are many."""
    few = len(changes) <= _MAX_SINGLE
    if len(changes) > 1:
        problem = _merge(planner.problem, [change.problem for change in changes])
        where = "; ".join(change.where for change in changes) if few else _TOGETHER[changes[0].kind]
        everything = Change(changes[0].kind, where, problem)
        free = everything.kind in _FREE
        # All at once do not help, so none of them does alone: a larger change never does worse.
        if not gains(base, _ask(planner, everything), planner.problem, machines=free):
            return
        yield Found(everything, parts=tuple(changes))
    yield from _each(planner, base, changes if few else ())


def _merge(problem: Problem, changed: Sequence[Problem]) -> Problem:
    """Return the problem with the changes of several, each of which changed services or offers of its own."""

    def pick(ours: tuple[_T, ...], theirs: Sequence[tuple[_T, ...]]) -> tuple[_T, ...]:
        return tuple(
            # Each problem changed entries of its own, so the first that differs is the only one.
            next((other[i] for other in theirs if other[i] != own), own)
            for i, own in enumerate(ours)
        )

    return problem.replace(
        services=pick(problem.services, [p.services for p in changed]),
        offers=pick(problem.offers, [p.offers for p in changed]),
    )


def _smallest(
    planner: Planner, base: Plan, at: AtSize, largest: int, *, first: bool = False
) -> Found | None:
    """Return the smallest change of 1..`largest` that does as much as the largest; None if that does nothing.

    "As much" is all demand, where the largest meets it, else the share of it that the largest serves; or,
    with `first`, anything at all.
    """
    problem = planner.problem
    # The largest change is asked first: where that does nothing no smaller one will.
    largest_plan = _ask(planner, at(largest))
    if not gains(base, largest_plan, problem):
        return None
    mean = grows_on_average(base, largest_plan, problem)
    full = merit(largest_plan, problem).meets_demand
    # Where demand is not met anyway, the smallest step that helps at all says enough.
    if first and not full:
        helps = gains(base, _ask(planner, at(1)), problem)
        return Found(at(1 if helps else largest), smallest=helps)
    goal = served_share(largest_plan, problem, mean=mean)
    low, high, sure = 0, largest, True
    for _ in range(_STEPS if full else _FEW_STEPS):
        if high - low <= 1:
            break
        middle = (low + high) // 2
        plan = _ask(planner, at(middle))
        served = served_share(plan, problem, mean=mean)
        if merit(plan, problem).meets_demand or (not full and served >= goal - MIN_SERVED):
            high = middle
        else:
            low = middle
            # A plan that falls short is no proof: only a bound below all demand makes the answer sure.
            sure = full and _is_too_little(planner, at(middle))
    else:
        sure = sure and high - low <= 1
    return Found(at(high), smallest=sure)


def _is_too_little(planner: Planner, change: Change) -> bool:
    """Whether it is proven that a change does not meet all demand."""
    answer = planner.answer(change.problem, best_effort=change.best_effort)
    return answer is not None and answer.max_served < 1.0


# Limits


def _other_limits(planner: Planner, base: Plan) -> Iterator[Found]:
    """Yield the smallest change of each limit that helps most; of all together where none helps alone."""
    problem, limits = planner.problem, planner.problem.limits
    found = [each for each in _single_limits(planner, base) if each is not None]
    yield from found
    names = {
        "the budget": limits.budget_usd_per_hour is not None,
        "the limit on nodes": limits.max_nodes is not None,
        "the limit on spot": limits.spot_share is not None,
        "the spread": limits.spread > 1,
    }
    given = [name for name, there in names.items() if there]
    # One limit may hide another: only all of them together show that limits are what holds the plan back.
    if not found and len(given) > 1:
        where = " and ".join((", ".join(given[:-1]), given[-1]))
        free = problem.replace(limits=Limits())
        yield from _each(planner, base, [Change("limits", where, free)])


def _single_limits(planner: Planner, base: Plan) -> Iterator[Found | None]:
    problem, limits = planner.problem, planner.problem.limits
    budget, max_nodes, share = limits.budget_usd_per_hour, limits.max_nodes, limits.spot_share
    if budget is not None and not merit(base, problem).meets_demand:
        free = with_limits(problem, budget_usd_per_hour=None)
        plan = planner.ask(free, "any budget")
        if gains(base, plan, problem):
            # The cheapest plan of all that serve as much is the smallest budget that suffices.
            enough = with_limits(problem, budget_usd_per_hour=max(budget, plan.usd_per_hour))
            planner.keep_for(enough, plan)
            change = Change("budget", "budget", enough, before=budget, after=plan.usd_per_hour)
            yield Found(change, smallest=plan.status == "optimal")
    if max_nodes is not None:
        free = with_limits(problem, max_nodes=None)
        plan = planner.ask(free, "any number of nodes")
        if gains(base, plan, problem) and plan.nodes > max_nodes:
            planner.keep_for(with_limits(problem, max_nodes=plan.nodes), plan)

            def nodes(more: int, max_nodes: int = max_nodes) -> Change:
                other = with_limits(problem, max_nodes=max_nodes + more)
                return Change("max-nodes", "nodes", other, before=max_nodes, after=max_nodes + more)

            yield _smallest(planner, base, nodes, plan.nodes - max_nodes)
    if share is not None and share < 1.0 and any(o.market == "spot" for o in problem.offers):
        steps = max(1, round((1.0 - share) * 10))

        def spot(step: int, share: float = share) -> Change:
            after = 1.0 if step == steps else round(share + step / 10, 6)
            other = with_limits(problem, spot_share=after)
            return Change(
                "spot-share", "share of requests on spot", other, before=share, after=after
            )

        yield _smallest(planner, base, spot, steps)
    if limits.spread > 1:

        def regions(fewer: int) -> Change:
            after = limits.spread - fewer
            other = with_limits(problem, spread=after)
            return Change(
                "spread", "regions of every role", other, before=limits.spread, after=after
            )

        yield _smallest(planner, base, regions, limits.spread - 1)


# Nodes


def _more_nodes(planner: Planner, base: Plan) -> Iterator[Found]:
    """Yield the cheapest mix of nodes, then node types alone, each from where it is cheapest."""
    problem = planner.problem
    everything = tuple(_rental(offer, _MAX_ADDED) for offer in problem.offers)
    plan = planner.ask(with_more(problem, everything), "any number of nodes of every type")
    if not gains(base, plan, problem):
        return
    missing = _nodes_beyond(plan, problem)
    priced = {o.key for o in problem.offers if o.usd_per_hour > 0.0}
    # How many nodes a plan takes that cost nothing says nothing.
    if len(missing) > 1 and all((r.region, r.node_type, r.market) in priced for r in missing):
        more = with_more(problem, missing)
        planner.keep_for(more, plan)
        yield Found(Change("nodes", "nodes", more, rentals=missing), plan.status == "optimal")
    first = {(r.region, r.node_type, r.market): -r.count for r in missing}
    for offer in _candidates(problem, first)[:_MAX_TYPES]:
        found = _of_offer(planner, base, offer)
        if found is not None:
            yield found


def _candidates(problem: Problem, first: Mapping[tuple[str, str, Market], int]) -> list[Offer]:
    """One offer of each node type, the cheapest; those that the cheapest mix takes most of come first."""
    best: dict[str, Offer] = {}

    def wanted(offer: Offer) -> tuple[int, float, tuple[str, str, Market]]:
        return (first.get(offer.key, 0), offer.usd_per_hour / offer.gpus, offer.key)

    for offer in problem.offers:
        known = best.get(offer.node_type)
        if known is None or wanted(offer) < wanted(known):
            best[offer.node_type] = offer
    return sorted(best.values(), key=wanted)


def _of_offer(planner: Planner, base: Plan, offer: Offer) -> Found | None:
    problem = planner.problem
    at = partial(_rented, problem, offer)
    if offer.usd_per_hour <= 0.0:
        return _smallest(planner, base, at, _MAX_ADDED_FREE, first=True)
    plan = _ask(planner, at(_MAX_ADDED))
    if not gains(base, plan, problem):
        return None
    enough = next((r.count for r in _nodes_beyond(plan, problem)), 0)
    if not enough:
        return None
    planner.keep_for(at(enough).problem, plan)
    return _smallest(planner, base, at, enough, first=True)


def _rented(problem: Problem, offer: Offer, count: int) -> Change:
    more = (_rental(offer, count),)
    return Change("nodes", offer.node_type, with_more(problem, more), rentals=more)


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


def _looser_promises(planner: Planner, base: Plan) -> Iterator[Found]:
    """Yield the tightest looser promise of each service that helps most, if all loosened together help."""
    problem = planner.problem
    kinds: tuple[RepairKind, ...] = ("ttft", "tpot")
    wanted = [(s, kind) for s in problem.services if s.rate_per_s > 0 for kind in kinds]
    if len(wanted) > 2:
        slowest = PROMISES[-1]
        services = tuple(s.scale_promises(ttft=slowest, tpot=slowest) for s in problem.services)
        plan = planner.ask(problem.replace(services=services), "looser promises")
        if not gains(base, plan, problem):
            return
    # The least served first: its promise is the likeliest to be in the way.
    wanted.sort(key=lambda pair: (base.served_fraction.get(pair[0].name, 1.0), pair[0].name))
    for service, kind in wanted[: 2 * _MAX_SERVICES]:
        found = _smallest(planner, base, partial(_loosened, problem, service, kind), len(PROMISES))
        if found is not None:
            yield found


def _loosened(problem: Problem, service: Service, kind: RepairKind, step: int) -> Change:
    return loosen_promise(problem, service, kind, PROMISES[step - 1])


# Fixed clusters


def _faster_links(planner: Planner, base: Plan) -> Iterator[Found]:
    cluster = planner.problem.cluster
    if cluster is None:
        return
    faster = faster_links(planner.problem, range(len(cluster.links)))
    yield from _each(planner, base, [Change("links", "all links ten times as fast", faster)])


def _best_effort(planner: Planner, base: Plan) -> Iterator[Found]:
    if not planner.effort.promise:
        return
    change = Change("best-effort", "best effort, promises aside", planner.problem, best_effort=True)
    yield from _each(planner, base, [change])


def _more_machines(planner: Planner, base: Plan) -> Iterator[Found]:
    """Yield how many more machines of each type help, from those there are most of."""
    problem = planner.problem
    offers = sorted(problem.offers, key=lambda o: (-o.available, o.key))
    for offer in offers[:_MAX_TYPES]:
        found = _smallest(
            planner, base, partial(_machines, problem, offer), len(_MACHINES), first=True
        )
        if found is not None:
            yield found


def _machines(problem: Problem, offer: Offer, step: int) -> Change:
    return _rented(problem, offer, _MACHINES[step - 1])
