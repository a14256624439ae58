"""When demand cannot be met: the most that can be served.

The most is the largest common fraction of every service's demand, or the largest mean fraction weighted by
priority. Services that nothing on offer can serve are left out of it. Where not even one instance of each
of the others can stand at once, the common fraction is that of as many services as can (of equally many,
those of more weight): serving some is better than serving none.

Both are one problem: the same programs as for the cost, with machines free of charge and the share left
unserved to be minimised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from atoll.solve.array_types import Floats, Ints
from atoll.solve.deadline import Deadline
from atoll.solve.rent.fast.fast_search import FastSearch
from atoll.solve.rent.greedy_allocation import fill, served_share
from atoll.solve.rent.incumbent import Incumbent, MipLimits, Target, Work
from atoll.solve.rent.instance_master import InstanceGoal, InstanceMaster
from atoll.solve.rent.items import RentModel, Solution
from atoll.solve.rent.many.fluid_program import FluidProgram
from atoll.solve.rent.mix_master import Decomposition
from atoll.solve.rent.relaxation import Prices, market_prices, slacks
from atoll.solve.rent.rent_search import (
    SMALL,
    before_filling,
    free_items,
    has_time_to_rate,
    is_large,
    lowest_each,
    oracles_of,
)
from atoll.solve.rent.rental_program import cheapest_supply

Rebuild = Callable[[list[int], float], RentModel]
"""The model of some of the services with this fraction of their demand asked for."""

EXACT = 1e-4
"""Fractions are proven to this."""
_ROUGH = 5e-3
"""Fractions of very many services are proven to this."""
_MIN_FRACTION = 1e-6
"""A fraction of the demand so small that any instance serves it."""
_STAGES = (300, 1500)
"""Items of each service to solve over, one after the other."""
_AIM = 0.97
"""Share of what may be possible at which items are priced: at all of it few things are left to choose."""
_SMALLEST, _FEW_SMALL = 40, 3
"""Items of each phase and region among which services look for a place, and where services are very many."""
_FIRST, _FIRST_FILLED = 0.6, 0.02
"""Share that very many services have to reach first: of what may be possible, or of their demand."""
_SEARCH_WORK = 0.7
"""Share of the work left that may go into the search for the share of very many services."""
_TIGHTER = (1.0, 0.85, 0.7, 0.5)
"""Parts of the limits on the whole that are tried in turn, until machines are within them."""
_SAME = 1e-9
"""Share of what is served that rounding may take."""
_STAND_ROUNDS = 2
"""Rounds of the heuristic that looks for a place for each of very many services."""
_RAISE_WORK = 0.6
"""Share of the work left that may go into raising the share of who is served worst."""
_RAISE_ITERATIONS = 3000
"""Simplex iterations of a program for two or three services."""
_MIN_RAISE = 1e-3
"""Share of the demand that is worth beginning with the worst-served again."""
_UNSERVED_PRICE = 3.0
"""Price of leaving a service unserved, as a multiple of what serving it costs at least."""
_MAX_COST = 1e9
"""USD per hour that stand for a service which nothing can serve."""


@dataclass(frozen=True)
class ServedDemand:
    """The most that can be served: a solution, the fraction of each service's demand to serve, and proof.

    `achieved` is the common fraction or the weighted mean, `fraction_bound` what is proven of the largest;
    `prices` are duals that say what stands in the way; `proof` are those of the bound, and `guide` those of
    serving about this much at the least cost, where they are known already.
    """

    solution: Solution | None
    fraction: Floats
    achieved: float
    fraction_bound: float
    prices: Prices
    proof: Prices | None = None
    guide: Prices | None = None


def serve_most(
    model: RentModel,
    rebuild: Rebuild,
    deadline: Deadline,
    end: Deadline,
    work: Work,
    *,
    priority: bool,
    seed: int,
    start: Solution | None = None,
    prices: Prices | None = None,
) -> ServedDemand:
    """Return the largest common fraction of demand, or (`priority`) the largest weighted mean fraction.

    `start` is an allocation that serves much of it and `prices` are those of a relaxation of serving most,
    if one is known. The search has time until `deadline`; what is simple, where that came first, until `end`.
    """
    if not is_large(model):
        return _serve_most(model, rebuild, deadline, work, priority, seed, start, prices)
    # Each step of the search takes seconds there: what is left has to do for something simpler.
    sooner = before_filling(model, deadline)
    found = _serve_nobody(model)
    # Without prices a relaxation comes first.
    priced = prices is not None and not priority
    if not sooner.is_over() and (priced or has_time_to_rate(model, sooner)):
        found = _serve_most(model, rebuild, sooner, work, priority, seed, start, prices)
    deadline.missed = deadline.missed or sooner.missed
    if found.solution is not None and (found.fraction.all() or not sooner.missed):
        return found
    filled = _fill_up(model, work, end, seed)
    # Whom the search left out nothing was found for.
    return found if _merit(found) >= _merit(filled) else filled


def _merit(found: ServedDemand) -> tuple[int, float]:
    """Order of what is served: more services, then more of each."""
    return int(np.count_nonzero(found.fraction)), found.achieved


def _fill_up(model: RentModel, work: Work, deadline: Deadline, seed: int) -> ServedDemand:
    """Return what is found at market prices until time is up; services that have nothing are left out."""
    # Compiling it takes seconds that only problems of very many services need.
    from atoll.solve.rent.many.share_search import find_share

    if not model.services:
        return _serve_nobody(model)
    found = _take(model, find_share(model, None, _FIRST_FILLED, work, deadline, seed).chosen)
    some = found.fitted().served > _MIN_FRACTION
    if not some.any() or not found.ledger.sound or not found.ledger.within:
        return _serve_nobody(model)
    least = min(1.0, float(found.fitted().served[some].min()))
    found.prune(least)
    fraction = np.where(some, least, 0.0)
    return ServedDemand(found.fitted().solution, fraction, least, 1.0, market_prices(model))


def _take(model: RentModel, chosen: Sequence[Mapping[int, int]]) -> FastSearch:
    """Return instances with their machines; what the market cannot give is left out."""
    search = FastSearch(model)
    for items, some, taken in zip(model.items, chosen, search.chosen, strict=True):
        for item, number in some.items():
            if search.ledger.take(items, item, number):
                taken[item] = number
    return search


def _serve_most(
    model: RentModel,
    rebuild: Rebuild,
    deadline: Deadline,
    work: Work,
    priority: bool,
    seed: int,
    start: Solution | None,
    prices: Prices | None,
) -> ServedDemand:
    every = list(range(len(model.services)))
    weights = np.array([service.weight for service in model.services])
    if priority:
        served = _search(model, rebuild, "weighted", weights, deadline, work, seed, start)
        if served.solution is not None and served.achieved > _MIN_FRACTION:
            return served
    found: ServedDemand | None = None
    # Where services are very many, that takes longer than finding out that all can.
    if prices is not None and every and is_large(model):
        found = _search_common(model, rebuild, weights, deadline, work, seed, start, prices)
        if found.solution is not None and found.achieved > _MIN_FRACTION:
            return found
    # First who can stand at all: one without a place would hold the common fraction at 0.
    some, least = _stand_together(rebuild(every, _MIN_FRACTION), weights, deadline, work, seed)
    if not some:
        return _serve_nobody(model)
    # Each step of the search takes seconds there.
    if is_large(model) and deadline.is_over():
        return _of_start(model, least, some, _serve_nobody(model))
    if found is not None and len(some) == len(every):
        some_served = found
    elif len(some) == len(every):
        some_served = _search_common(model, rebuild, weights, deadline, work, seed, start, prices)
    else:
        some_served = _search_common(
            rebuild(some, 1.0),
            # Numbered anew among `some`: back to the numbers of all.
            lambda inner, f: rebuild([some[i] for i in inner], f),
            weights[some],
            deadline,
            work,
            seed,
        )
    if some_served.solution is None or some_served.achieved <= _MIN_FRACTION:
        return _of_start(model, least, some, some_served)
    fraction = np.zeros(len(every))
    fraction[some] = some_served.fraction
    solution = _widen(some_served.solution, some, len(every))
    return replace(some_served, solution=solution, fraction=fraction)


def _serve_nobody(model: RentModel) -> ServedDemand:
    nothing = np.zeros(len(model.services))
    return ServedDemand(None, nothing, 0.0, 0.0, Prices(np.zeros(model.rows)))


def _widen(solution: Solution, some: list[int], number: int) -> Solution:
    """Return a solution of some services as one of all."""
    items: list[dict[int, int]] = [{} for _ in range(number)]
    for at, service in enumerate(some):
        items[service] = solution.items[at]
    return replace(solution, items=tuple(items))


def _of_start(
    model: RentModel, start: Solution, some: list[int], found: ServedDemand
) -> ServedDemand:
    """Return the share of demand that the instances serve which merely stand together."""
    share = _shares(model, start)
    min_share = float(share[some].min())
    fraction = np.zeros(len(share))
    fraction[some] = min_share
    return ServedDemand(
        start, fraction, min_share, max(min_share, found.fraction_bound), found.prices
    )


def _stand_together(
    model: RentModel, weights: Floats, deadline: Deadline, work: Work, seed: int
) -> tuple[list[int], Solution]:
    """Return as many services as can stand at once, and instances of them.

    `model` asks for so little that any instance is enough.
    """
    number, total = len(model.services), float(weights.sum())
    # All weights together count for less than one service more.
    price = 1.0 + (0.5 * weights / total if total > 0.0 else np.zeros(number))
    nothing = Solution(
        np.zeros(len(model.supply.usd), np.int64), {}, tuple({} for _ in range(number))
    )
    let_in = [np.arange(len(items)) for items in model.items]
    if is_large(model):
        found = FastSearch(model, deadline.is_over).fit(
            np.ones(number), rounds=_STAND_ROUNDS, move=False
        )
        if found is not None:
            return list(range(number)), found.solution
        if deadline.is_over():
            return [], nothing
    if sum(len(items) for items in model.items) > SMALL:
        let_in = [_spread_out(model, m) for m in range(number)]
    master = InstanceMaster(model, "stand", price, let_in, work, seed)
    # Services count 1 and a little: a gap of 0.2 proves how many there are.
    answer = master.solve(MipLimits(deadline.limit(), 0.0, 0.2, work.part(0.3)))
    if answer.solution is None:
        return [], nothing
    return [m for m in range(number) if answer.served[m] > 0.5], answer.solution


def _spread_out(model: RentModel, service: int) -> Ints:
    """Some small items of each phase and region: those that take the least."""
    each = _FEW_SMALL if is_large(model) else _SMALLEST
    items = model.items[service]
    taken = items.taken()
    chosen = []
    for phase in np.unique(items.phase):
        for region in np.unique(items.region):
            here = np.flatnonzero((items.phase == phase) & (items.region == region))
            chosen.append(here[np.argsort(taken[here], kind="stable")[:each]])
    return np.sort(np.concatenate([np.zeros(0, np.int64), *chosen]))


def _search_common(
    model: RentModel,
    rebuild: Rebuild,
    weights: Floats,
    deadline: Deadline,
    work: Work,
    seed: int,
    start: Solution | None = None,
    prices: Prices | None = None,
) -> ServedDemand:
    if is_large(model) and model.limits.spread == 1:
        return _search_large(model, rebuild, deadline, work, seed, prices)
    return _search(model, rebuild, "common", weights, deadline, work, seed, start)


def _search(
    model: RentModel,
    rebuild: Rebuild,
    goal: InstanceGoal,
    weights: Floats,
    deadline: Deadline,
    work: Work,
    seed: int,
    start: Solution | None = None,
) -> ServedDemand:
    # Only what is served counts here: starting costs nothing.
    free = replace(model, start=np.zeros(len(model.start)))
    number, total = len(model.services), float(weights.sum())
    normal = weights / total if total > 0.0 else np.full(number, 1.0 / max(1, number))
    standing = Incumbent(Target(0.0, EXACT), deadline, work)
    oracles = oracles_of(free)
    small = sum(len(items) for items in model.items) <= SMALL
    common = goal == "common"
    mixes = Decomposition(free, oracles, "common" if common else "weighted", normal, standing, seed)
    mixes.converge()
    prices = (mixes.relaxed or (mixes.root.prices, None))[0]
    best = np.zeros(number)

    def take(solution: Solution | None, objective: float, served: Floats) -> None:
        nonlocal best
        if solution is not None and standing.offer(solution, objective):
            best = np.clip(served, 0.0, 1.0)

    firsts = (start, _first(free, rebuild, 1.0 - standing.bound, seed))
    for first in (one for one in firsts if one is not None):
        share = _shares(free, first)
        # What is minimised is the share left unserved.
        value = 1.0 - float(share.min() if common else normal @ share)
        take(first, value, np.full(number, share.min()) if common else share)
    if small:
        choices: list[list[Ints] | None] = [None]
    else:
        choices = list(_choices(free, rebuild, 1.0 - standing.bound, standing, seed))
    if common and choices[-1] is not None:
        _raise_lowest(free, choices[-1], normal, standing, take, seed)
    for let_in in choices:
        if standing.done:
            break
        whole = let_in is None
        if let_in is None:
            let_in = [np.arange(len(items)) for items in model.items]
        if standing.solution is not None:
            let_in = [
                np.union1d(some, np.array(sorted(items), np.int64))
                for some, items in zip(let_in, standing.solution.items, strict=True)
            ]
        master = InstanceMaster(free, goal, normal, let_in, work, seed)
        iterations = work.part(0.6 if whole else 0.45)
        answer = master.solve(standing.limits(iterations), standing.solution)
        take(answer.solution, answer.objective, answer.served)
        # A bound over some items says nothing of the others.
        if whole:
            standing.prove(answer.bound)
    achieved = 0.0
    if standing.solution is not None:
        achieved = float(best.min(initial=1.0)) if common else float(best @ normal)
    fraction_bound = max(achieved, min(1.0, 1.0 - standing.bound))
    return ServedDemand(standing.solution, best, achieved, fraction_bound, prices)


def _search_large(
    model: RentModel,
    rebuild: Rebuild,
    deadline: Deadline,
    work: Work,
    seed: int,
    prices: Prices | None,
) -> ServedDemand:
    """Return the largest common share of very many services, and instances that serve it for little."""
    from atoll.solve.rent.many.share_search import lower_rent

    # Only what is served counts here: starting costs nothing.
    model = replace(model, start=np.zeros(len(model.start)))
    every = list(range(len(model.services)))
    standing = Incumbent(Target(0.0, _ROUGH), deadline, work)
    if prices is None:
        prices = FluidProgram(model, rent=0.0, seed=seed, work=work).converge(deadline)
    if has_time_to_rate(model, deadline):
        none = np.zeros(len(every))
        Decomposition(model, oracles_of(model), "common", none, standing, seed).rate(prices)
    most = min(1.0, 1.0 - standing.bound)
    # Regions are searched one by one: what crosses between them is left out.
    alone = replace(model, services=tuple(replace(each, pairs=()) for each in model.services))
    search = _search_share(alone, prices, _FIRST * most, work, deadline, seed)
    achieved = min(1.0, float(search.fitted().served.min(initial=1.0)))
    if achieved <= _MIN_FRACTION or not search.ledger.within:
        return ServedDemand(None, np.zeros(len(every)), 0.0, most, prices, prices)
    search.prune(achieved)
    solution, guide = search.fitted().solution, None
    if not deadline.is_over():
        # The same for less.
        own = Work(work.left)
        smaller = rebuild(every, achieved)
        guide = FluidProgram(smaller, rent=1.0, seed=seed, work=own).converge(deadline)
        less = lower_rent(alone, guide.row, solution.items, achieved, own, deadline, seed)
        work.charge(own.spent)
        cheaper = _take(alone, less).fitted()
        if cheaper.cost < search.ledger.cost and cheaper.served.min() >= achieved * (1.0 - _SAME):
            solution = cheaper.solution
    achieved = float(_shares(model, solution).min(initial=1.0))
    share = np.full(len(every), achieved)
    return ServedDemand(solution, share, achieved, max(achieved, most), prices, prices, guide)


def _search_share(
    model: RentModel, prices: Prices, first: float, work: Work, deadline: Deadline, seed: int
) -> FastSearch:
    """Return instances with their machines that serve much of all, within the limits if that was found."""
    from atoll.solve.rent.many.share_search import find_share

    search = FastSearch(model)
    for tighter in _TIGHTER:
        part = Work(work.part(_SEARCH_WORK))
        within = replace(model, limits=model.limits.scaled(tighter))
        found = find_share(within, prices.row, first * tighter, part, deadline, seed)
        work.charge(part.spent)
        search = _take(model, found.chosen)
        # Parts of machines may be within limits that machines are not.
        if search.ledger.within:
            break
    return search


def price_mixes(model: RentModel, standing: Incumbent, seed: int) -> Decomposition:
    """Return the relaxation over mixes at the least cost, leaving a service out being dear."""
    mixes = Decomposition(
        model, oracles_of(model), "cost", np.zeros(len(model.services)), standing, seed
    )
    first = mixes.rate(market_prices(model))
    mixes.unserved = _UNSERVED_PRICE * np.maximum(
        1.0, [min(legs.least, _MAX_COST) for legs in first.legs]
    )
    mixes.master.set_unserved(mixes.unserved)
    if is_large(model):
        mixes.pace = mixes.rough
    mixes.converge()
    return mixes


def _raise_lowest(
    model: RentModel,
    near: list[Ints],
    weights: Floats,
    standing: Incumbent,
    take: Callable[[Solution | None, float, Floats], None],
    seed: int,
) -> None:
    """Raise the share of who is served worst: it chooses anew with one or two others that keep to theirs.

    Programs of two or three services are small; those of all rarely find anything that is better.
    """
    min_left = standing.work.left - standing.work.part(_RAISE_WORK)
    while standing.solution is not None:
        before = standing.objective
        lowest, *others = np.argsort(_shares(model, standing.solution), kind="stable").tolist()
        for some in (*combinations(others, 1), *combinations(others, 2)):
            if standing.done or standing.work.left <= min_left:
                return
            solution, free = standing.solution, {lowest, *some}
            let_in = free_items(solution, near, free)
            master = InstanceMaster(model, "common", weights, let_in, standing.work, seed)
            for m, number in enumerate(solution.items):
                if m not in free:
                    master.fix(m, number)
            answer = master.solve(standing.limits(_RAISE_ITERATIONS), solution)
            take(answer.solution, answer.objective, answer.served)
            if standing.objective < before - _MIN_RAISE:
                break
        else:
            return


def _shares(model: RentModel, solution: Solution) -> Floats:
    return np.array(
        [
            min(1.0, served_share(items, number, model.regions))
            for items, number in zip(model.items, solution.items, strict=True)
        ]
    )


def _first(model: RentModel, rebuild: Rebuild, fraction_bound: float, seed: int) -> Solution | None:
    """A first allocation of a fraction well below what may be possible."""
    every = list(range(len(model.services)))
    # Less each time: a greedy fill reaches less than the bound allows.
    for part in (0.95, 0.85, 0.7, 0.5, 0.25):
        smaller = rebuild(every, max(1e-6, fraction_bound * part))
        chosen = fill(smaller, oracles_of(smaller))
        if chosen is not None and model.limits.spread == 1:
            solution = cheapest_supply(model, chosen, seed)
            if solution is not None:
                return solution
    return None


def _choices(
    model: RentModel, rebuild: Rebuild, fraction_bound: float, standing: Incumbent, seed: int
) -> list[list[Ints]]:
    """Ever more items, by how little they raise the cost of serving about what may be possible."""
    every = list(range(len(model.services)))
    smaller = rebuild(every, max(1e-6, _AIM * min(1.0, fraction_bound)))
    # Work of its own, so that pricing cannot spend what the solves need.
    work = Work(standing.work.part(0.3))
    mixes = price_mixes(smaller, Incumbent(Target(1e-3), standing.deadline, work), seed)
    standing.work.charge(work.spent)
    found = slacks(mixes.oracles, mixes.root)
    return [lowest_each(found, number) for number in _STAGES]
