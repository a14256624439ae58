"""When demand cannot be met: the most that can be served.

The most is the largest common fraction of every service's demand, or the largest mean fraction weighted by
priority. Services that nothing on offer can serve are left out of it. Where not even one instance of each
of the others can stand at once, the common fraction is that of as many services as can (of equally many,
those of more weight): serving some is better than serving none.

Both are one problem: the same programmes as for the cost, with machines free of charge and the share left
unserved to be minimised.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from atoll.solve.rent.greedy import fill, served_share
from atoll.solve.rent.instances import InstanceGoal, InstanceMaster
from atoll.solve.rent.items import RentModel, Solution
from atoll.solve.rent.mixes import Decomposition
from atoll.solve.rent.programme import cheapest_supply
from atoll.solve.rent.relaxation import Prices, market_prices, slacks
from atoll.solve.rent.search import SMALL, lowest_each, oracles_of
from atoll.solve.rent.standing import Incumbent, RentDeadline, Target, Work

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Rebuild = Callable[[list[int], float], RentModel]
"""The model of some of the services with this fraction of their demand asked for."""

EXACT = 1e-4
"""Fractions are proven to this."""
_LITTLE = 1e-6
"""A fraction that any instance serves."""
_STAGES = (300, 1500)
"""Items of each service to solve over, one after the other."""
_AIM = 0.97
_DEAR = 3.0
_ENDLESS = 1e9


@dataclass(frozen=True)
class ServedDemand:
    """The most that can be served: a solution, the fraction of each service's demand to serve, and proof.

    `achieved` and `most` are the common fraction or the weighted mean; `prices` are duals that say what
    stands in the way.
    """

    solution: Solution | None
    fraction: Floats
    achieved: float
    most: float
    prices: Prices


def serve_most(
    model: RentModel,
    rebuild: Rebuild,
    deadline: RentDeadline,
    work: Work,
    *,
    priority: bool,
    seed: int,
) -> ServedDemand:
    """Return the largest common fraction of demand, or (`priority`) the largest weighted mean fraction."""
    every = list(range(len(model.services)))
    weights = np.array([service.weight for service in model.services])
    if priority:
        served = _search(model, rebuild, "weighted", weights, deadline, work, seed)
        if served.solution is not None and served.achieved > _LITTLE:
            return served
    some, start = _stand_together(rebuild(every, _LITTLE), weights, deadline, work, seed)
    if not some:
        return _serve_nobody(model)
    if len(some) == len(every):
        some_served = _search(model, rebuild, "common", weights, deadline, work, seed)
    else:
        some_served = _search(
            rebuild(some, 1.0),
            lambda inner, f: rebuild([some[i] for i in inner], f),
            "common",
            weights[some],
            deadline,
            work,
            seed,
        )
    if some_served.solution is None or some_served.achieved <= _LITTLE:
        return _of_start(model, start, some, some_served)
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
    """What the instances that merely stand together serve."""
    share = np.array(
        [
            min(1.0, served_share(items, number, model.regions))
            for items, number in zip(model.items, start.items, strict=True)
        ]
    )
    least = float(share[some].min())
    fraction = np.zeros(len(share))
    fraction[some] = least
    return ServedDemand(start, fraction, least, max(least, found.most), found.prices)


def _stand_together(
    model: RentModel, weights: Floats, deadline: RentDeadline, work: Work, seed: int
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
    if sum(len(items) for items in model.items) > SMALL:
        let_in = [_spread_out(model, m) for m in range(number)]
    master = InstanceMaster(model, "stand", price, let_in, work, seed)
    answer = master.solve(
        time_limit_s=deadline.left,
        gap=0.0,
        absolute_gap=0.2,
        start=None,
        node_limit=None,
        iteration_limit=work.part(0.3),
    )
    if answer.solution is None:
        return [], nothing
    return [m for m in range(number) if answer.served[m] > 0.5], answer.solution


def _spread_out(model: RentModel, service: int) -> Ints:
    """Some small items of each phase and region: those that take the least."""
    items = model.items[service]
    taken = items.taken()
    chosen = []
    for phase in np.unique(items.phase):
        for region in np.unique(items.region):
            here = np.flatnonzero((items.phase == phase) & (items.region == region))
            chosen.append(here[np.argsort(taken[here], kind="stable")[:40]])
    return np.sort(np.concatenate([np.zeros(0, np.int64), *chosen]))


def _search(
    model: RentModel,
    rebuild: Rebuild,
    goal: InstanceGoal,
    weights: Floats,
    deadline: RentDeadline,
    work: Work,
    seed: int,
) -> ServedDemand:
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

    first = _first(free, rebuild, 1.0 - standing.bound, seed)
    if first is not None:
        share = _shares(free, first)
        value = 1.0 - float(share.min() if common else normal @ share)
        take(first, value, np.full(number, share.min()) if common else share)
    if small:
        choices: list[list[Ints] | None] = [None]
    else:
        choices = list(_choices(free, rebuild, 1.0 - standing.bound, standing, seed))
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
        answer = master.solve(
            time_limit_s=deadline.left,
            gap=0.0,
            absolute_gap=0.5 * EXACT,
            start=standing.solution,
            node_limit=None,
            iteration_limit=work.part(0.6 if whole else 0.45),
        )
        take(answer.solution, answer.objective, answer.served)
        if whole:
            standing.prove(answer.bound)
    achieved = 0.0
    if standing.solution is not None:
        achieved = float(best.min(initial=1.0)) if common else float(best @ normal)
    most = max(achieved, min(1.0, 1.0 - standing.bound))
    return ServedDemand(standing.solution, best, achieved, most, prices)


def _shares(model: RentModel, solution: Solution) -> Floats:
    return np.array(
        [
            min(1.0, served_share(items, number, model.regions))
            for items, number in zip(model.items, solution.items, strict=True)
        ]
    )


def _first(model: RentModel, rebuild: Rebuild, most: float, seed: int) -> Solution | None:
    """A first allocation of a fraction well below what may be possible."""
    every = list(range(len(model.services)))
    for part in (0.95, 0.85, 0.7, 0.5, 0.25):
        smaller = rebuild(every, max(1e-6, most * part))
        chosen = fill(smaller, oracles_of(smaller))
        if chosen is not None and model.limits.spread == 1:
            solution = cheapest_supply(model, chosen, seed)
            if solution is not None:
                return solution
    return None


def _choices(
    model: RentModel, rebuild: Rebuild, most: float, standing: Incumbent, seed: int
) -> list[list[Ints]]:
    """Ever more items, by how little they raise the cost of serving about what may be possible."""
    every = list(range(len(model.services)))
    smaller = rebuild(every, max(1e-6, _AIM * min(1.0, most)))
    oracles = oracles_of(smaller)
    work = Work(standing.work.part(0.3))
    priced = Incumbent(Target(1e-3), standing.deadline, work)
    mixes = Decomposition(smaller, oracles, "cost", np.zeros(len(every)), priced, seed)
    first = mixes.rate(market_prices(smaller))
    mixes.unserved = _DEAR * np.maximum(1.0, [min(legs.least, _ENDLESS) for legs in first.legs])
    mixes.master.set_unserved(mixes.unserved)
    mixes.converge()
    standing.work.charge(work.spent)
    found = slacks(oracles, mixes.root)
    return [lowest_each(found, number) for number in _STAGES]
