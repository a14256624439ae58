"""The cheapest allocation that meets all demand: which search when.

Prices at which machines are rented settle it where machines are plenty: each service takes what is
cheapest for it. If that does not fit together, small problems are solved whole over all instances. Larger
ones first get better prices from mixes of whole services (`mix_master`), whose bound says which instances can
matter, and are then solved over more and more of those (`instance_master`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from atoll.solve.array_types import Floats, Ints
from atoll.solve.deadline import Deadline
from atoll.solve.rent.capped.capped_oracle import tighten
from atoll.solve.rent.fast.fast_search import FastSearch
from atoll.solve.rent.greedy_allocation import fill, served_share
from atoll.solve.rent.incumbent import Incumbent
from atoll.solve.rent.instance_master import InstanceAnswer, InstanceMaster
from atoll.solve.rent.items import RentModel, Solution
from atoll.solve.rent.mix_master import Decomposition, offer_items
from atoll.solve.rent.relaxation import (
    Evaluation,
    Prices,
    market_prices,
    price_of_all,
    slacks,
)
from atoll.solve.rent.rental_program import cheapest_supply, costs
from atoll.solve.rent.rounding import Dive
from atoll.solve.rent.service_oracle import ServiceOracle
from atoll.solve.rent.step_functions import GRID

MANY_TABLES = 1000
"""Services in regions up to which demand is counted in the finest steps."""
_COARSE_GRID = GRID // 8
"""Steps of a demand where there are more."""
SMALL = 1500
"""Items up to which a problem is solved whole at once."""
_STAGES = (400, 1500, 5000, 20000)
"""Items of all services that are solved over, one number after the other, before all of them."""
_REPAIR_WORK = 0.35
"""Share of the work left that may go into finding an allocation which serves everything."""
_MAX_RAISES = 2
"""How often the price of what is left unserved is raised, to four times what it was."""
_IMPROVE_WORK = 0.5
"""Share of the work left that may go into bettering the best solution by pairs of services."""
_NEIGHBOURS = 400
"""Items of each service that it may choose among where two services choose anew."""
_PAIR_WORK = 3000
"""Simplex iterations of a program for two services."""
_PAIR_GAP = 0.02
"""Share of the gap asked for to which a program for two services is solved."""
_PAIR_START = 100.0
"""Simplex iterations that building a program for two services counts as."""
_MIN_GAIN = 1e-6
"""Share of the value that a change must gain to be taken."""
_MAX_PAIRS = 60
"""Pairs of services that choose anew in one pass."""
_UNSERVED_PRICE = 3.0
"""Price of leaving a service unserved, as a multiple of what serving it costs at least."""
_MAX_NODES = 2000
"""Nodes of the search tree of a program over mixes."""
_SHARE_TOLERANCE = 1e-7
"""Share of a demand, or of a cost, that integer solves and sums may miss."""
_RATE_S = 8e-4
"""Seconds of a bound for each service and region, on a busy machine."""
_FILL_S = 3e-4
"""Seconds of finding something for everybody, for each service and region."""
_FIRST_ROUNDS = 2
"""Rounds of the heuristic that comes before everything else."""


@dataclass(frozen=True)
class SearchOutcome:
    """How the search ended: duals of the relaxation, and how many items could still matter.

    `partial` is what serves most of every service, where nothing was found that serves all; `relaxation`
    what was found of prices, to go on from where something is found after all (`better`). `market_bound` is
    the bound at market prices.
    """

    prices: Prices
    demand: Floats
    mixes: int
    survivors: int
    partial: Solution | None = None
    relaxation: Decomposition | None = None
    market_bound: float = 0.0


def rate_at(model: RentModel, prices: Prices, standing: Incumbent, seed: int) -> SearchOutcome:
    """Prove what can be at prices that are good already, and search no further."""
    if not has_time_to_rate(model, standing.deadline):
        return _unrated(model, prices)
    mixes = Decomposition(
        model, oracles_of(model), "cost", np.zeros(len(model.items)), standing, seed
    )
    first = mixes.rate(prices)
    survivors = 0 if standing.closed else sum(len(items) for items in model.items)
    demand = np.array([legs.least for legs in first.legs])
    return SearchOutcome(prices, demand, 0, survivors, None, mixes, first.value)


def is_large(model: RentModel) -> bool:
    """Return whether there are so many services in regions that programs over instances take too long."""
    return len(model.services) * model.regions > MANY_TABLES


def has_time_to_rate(model: RentModel, deadline: Deadline) -> bool:
    """Return whether there is time for a bound, which takes seconds where services are very many."""
    return not is_large(model) or deadline.lasts(_RATE_S * len(model.services) * model.regions)


def before_filling(model: RentModel, deadline: Deadline) -> Deadline:
    """Return when a search must end that leaves time for serving a little of each of very many services."""
    return deadline.sooner(_FILL_S * len(model.services) * model.regions)


def _unrated(model: RentModel, prices: Prices) -> SearchOutcome:
    """Return what is known where nothing could be proven."""
    total = sum(len(items) for items in model.items)
    return SearchOutcome(prices, np.zeros(len(model.items)), 0, total)


def oracles_of(model: RentModel, grid: int | None = None) -> list[ServiceOracle]:
    """Return an oracle for each service, by so many steps of its demand."""
    grid = grid or (_COARSE_GRID if is_large(model) else GRID)
    return [
        ServiceOracle(service, items, model.regions, grid)
        for service, items in zip(model.services, model.items, strict=True)
    ]


def minimise(model: RentModel, standing: Incumbent, seed: int) -> SearchOutcome:
    """Search for the cheapest allocation from where `standing` is, and report to it."""
    # No plan costs more than everything on offer; the margin is for rounding.
    standing.ceiling = price_of_all(model) * (1.0 + _SHARE_TOLERANCE) + _SHARE_TOLERANCE
    if standing.solution is None and not is_large(model):
        _take_quickly(model, standing)
    if not has_time_to_rate(model, standing.deadline):
        if standing.solution is None:
            _take_in_turn(model, standing)
        return _unrated(model, market_prices(model))
    oracles = oracles_of(model)
    mixes = Decomposition(model, oracles, "cost", np.zeros(len(oracles)), standing, seed)
    first = mixes.rate(market_prices(model))
    demand = np.array([legs.least for legs in first.legs])
    # Not even the bound is finite: nothing serves everything.
    if standing.bound == np.inf:
        return SearchOutcome(first.prices, np.where(np.isfinite(demand), demand, 0.0), 0, 0)
    # Where there is much to look at, not before it is known that there may be something.
    if standing.solution is None and is_large(model):
        _take_quickly(model, standing)
    # What is picked at prices does not heed spread.
    if model.limits.spread == 1 and (
        standing.solution is None or has_time_to_rate(model, standing.deadline)
    ):
        _take_cheapest(model, oracles, standing, seed)
        if not standing.done and standing.solution is None and not is_large(model):
            chosen = fill(model, oracles)
            if chosen is not None:
                offer_items(model, chosen, standing, seed)
    total = sum(len(items) for items in model.items)
    partial: Solution | None = None
    relaxed = None
    if not standing.done and total <= SMALL:
        relaxed = _solve_whole(model, standing, seed)
    if not standing.done:
        mixes.unserved = _UNSERVED_PRICE * np.maximum(1.0, demand)
        mixes.master.set_unserved(mixes.unserved)
        mixes, partial = _search_mixes(model, mixes, standing, seed)
    # The duals of the best relaxation that there was.
    prices, duals = relaxed or mixes.relaxed or (first.prices, demand)
    survivors = 0 if standing.closed else total
    return SearchOutcome(prices, duals, mixes.master.number, survivors, partial, mixes, first.value)


def _search_mixes(
    model: RentModel, mixes: Decomposition, standing: Incumbent, seed: int
) -> tuple[Decomposition, Solution | None]:
    """Search from the best prices there are; also returns what serves most where nothing serves all."""
    large = is_large(model)
    mixes.pace = mixes.rough if large else mixes.pace
    mixes.converge()
    mixes.choose(50)
    if large:
        dive(model, mixes, standing)
        return mixes, None
    if not standing.done:
        mixes = tighten(mixes, seed)
        mixes.choose(_MAX_NODES)
        mixes.vary(_MAX_NODES)
    if standing.done:
        return mixes, None
    partial = repair(model, mixes, _list_near(mixes), standing, seed)
    # Where nothing is found, finding out how much can be served (`scarcity`) is the better search.
    if standing.solution is not None:
        better(model, mixes, standing, seed)
    return mixes, partial


def dive(model: RentModel, mixes: Decomposition, standing: Incumbent) -> None:
    """Offer whole mixes of all services found by fixing those that the relaxation takes most, in turn."""
    # Mixes are not made to stand in several regions.
    if standing.done or model.limits.spread > 1:
        return
    found = Dive(mixes, FastSearch(model)).run()
    if found is not None:
        standing.offer(found.solution, sum(costs(model, found.solution)))


def better(model: RentModel, mixes: Decomposition, standing: Incumbent, seed: int) -> None:
    """Better the best solution, and prove how good it is, as far as the prices found of mixes lead."""
    improve(model, mixes.root, _list_near(mixes), standing, seed)
    close(model, oracles_of(model), mixes.root, slacks(mixes.oracles, mixes.root), standing, seed)


def _list_near(mixes: Decomposition) -> list[Ints]:
    """Per service the items that two services may choose among: of little slack, or in a mix."""
    lowest_slack = lowest_each(slacks(mixes.oracles, mixes.root), _NEIGHBOURS)
    return [
        np.union1d(some, used) for some, used in zip(lowest_slack, mixes.used_items(), strict=True)
    ]


def _take_in_turn(model: RentModel, standing: Incumbent) -> None:
    """Offer what services find in turn at market prices: worth the time, also where none is left."""
    search = FastSearch(model)
    order = search.order(np.ones(len(model.items)))
    if model.items and search.fill_in_turn(order, 1.0, lambda: False):
        found = search.fitted()
        if search.ledger.sound and search.ledger.within:
            standing.offer(found.solution, found.cost)


def _take_quickly(model: RentModel, standing: Incumbent) -> None:
    """Offer what a heuristic finds in a moment, so that a deadline that comes early finds something."""
    # Few services have something in a moment, whatever the time.
    until = standing.deadline.is_over if is_large(model) else lambda: False
    found = FastSearch(model, until).fit(
        np.ones(len(model.items)), rounds=_FIRST_ROUNDS, move=False
    )
    if found is not None:
        standing.offer(found.solution, found.cost)


def _take_cheapest(
    model: RentModel, oracles: Sequence[ServiceOracle], standing: Incumbent, seed: int
) -> None:
    """Offer what each service would take if there were plenty of everything.

    Twice: a slice at its share of the machine's price, and at all of it, as if nobody shared the machine.
    """
    cut = any(len(sizes) > 1 for sizes in model.supply.sizes)
    for prices in (market_prices(model), *([market_prices(model, alone=True)] if cut else [])):
        # One that serves everything is worth the time, also where none is left.
        if standing.done and standing.solution is not None:
            return
        row = prices.row
        chosen = [oracle.pick(oracle.legs(row, lower=False)) for oracle in oracles]
        whole = tuple(picked for picked in chosen if picked is not None)
        if len(whole) == len(chosen):
            offer_items(model, whole, standing, seed)


def _solve_whole(model: RentModel, standing: Incumbent, seed: int) -> tuple[Prices, Floats] | None:
    """Solve over all items there are; return the duals of the relaxation, if it has any."""
    every = [np.arange(len(items)) for items in model.items]
    master = InstanceMaster(model, "cost", np.zeros(0), every, standing.work, seed)
    result = master.relax(standing.deadline.limit())
    # Not all of the work: what follows needs some if this does not come to its end.
    answer = master.solve(standing.limits(standing.work.part(0.6)), standing.solution)
    if answer.solution is not None:
        standing.offer(answer.solution, answer.objective)
    standing.prove(answer.bound)
    if result.status != "optimal":
        return None
    return master.prices(result), master.demand_duals(result)


def close(
    model: RentModel,
    oracles: Sequence[ServiceOracle],
    root: Evaluation,
    item_slacks: list[Floats],
    standing: Incumbent,
    seed: int,
) -> None:
    """Integer solves over more and more items until the target is proven, or effort is spent.

    If a solve over all items of slack at most s proves b, no allocation costs less than min(b, bound + s):
    the others use an item of larger slack.
    """
    for max_items in (*_STAGES, None):
        if standing.done:
            return
        needed = standing.wanted - root.value
        chosen, limit = lowest(item_slacks, needed, max_items)
        if standing.solution is not None:
            chosen = with_used(chosen, standing.solution)
        if not standing.deadline.allows(sum(len(some) for some in chosen)):
            return
        master = InstanceMaster(model, "cost", np.zeros(0), chosen, standing.work, seed)
        master.add_cuts(oracles, [legs.cost for legs in root.legs])
        last = limit >= needed
        iterations = standing.work.part(0.9 if last else 0.35)
        answer = master.solve(standing.limits(iterations), standing.solution)
        if answer.solution is not None:
            standing.offer(answer.solution, answer.objective)
        standing.prove(min(answer.bound, root.value + limit))
        if last:
            return


def repair(
    model: RentModel, mixes: Decomposition, near: list[Ints], standing: Incumbent, seed: int
) -> Solution | None:
    """Find an allocation that serves everything, if there is none yet; return the closest if none is found.

    Whole mixes seldom fit together for all services, but they do for most of them. From there, two services
    choose anew at a time, while the others stay as they are and what is left unserved has a price.
    """
    if standing.solution is not None or len(model.services) < 2 or model.limits.spread > 1:
        return None
    root = mixes.root
    price = _UNSERVED_PRICE * np.maximum(1.0, [legs.least for legs in root.legs])
    # A service that nothing can serve has no price.
    if not np.isfinite(price).all():
        return None
    # Work that must be left for what comes after.
    min_left = standing.work.left - standing.work.part(_REPAIR_WORK)
    chosen = mixes.choose_some(price, _MAX_NODES)
    solution = None if chosen is None else cheapest_supply(model, chosen, seed)
    if solution is None:
        return None
    unserved = _unserved(model, solution)
    if not unserved.any():
        standing.offer(solution, sum(costs(model, solution)))
        return None
    closest, lacks = solution, float(unserved.max())
    for _ in range(_MAX_RAISES):
        before = np.inf
        value = sum(costs(model, solution)) + float(price @ unserved)
        while value < before:
            before = value
            for pair in _pairs(_regrets(root, solution) + price * unserved):
                if standing.work.left <= min_left or standing.done:
                    return closest
                found = _choose_anew(model, solution, pair, near, price, standing, seed)
                if found.solution is None or found.objective >= value * (1.0 - _MIN_GAIN):
                    continue
                solution, value = found.solution, found.objective
                unserved = np.where(found.served >= 1.0 - _SHARE_TOLERANCE, 0.0, 1.0 - found.served)
                closest, lacks = min(
                    (closest, lacks), (solution, float(unserved.max())), key=_lacks
                )
                if unserved.any():
                    continue
                # Once more where nothing may be left, so that not even a hair of it is.
                whole = _choose_anew(model, solution, pair, near, np.zeros(0), standing, seed)
                if whole.solution is not None:
                    standing.offer(whole.solution, whole.objective)
                    return None
        price = 4.0 * price
    return closest


def _lacks(known: tuple[Solution, float]) -> float:
    """The share of the worst-served that a solution leaves unserved."""
    return known[1]


def _unserved(model: RentModel, solution: Solution) -> Floats:
    """The share of each service that a solution leaves unserved, phases paired inside regions only."""
    share = np.array(
        [
            served_share(items, number, model.regions)
            for items, number in zip(model.items, solution.items, strict=True)
        ]
    )
    return np.where(share >= 1.0 - _SHARE_TOLERANCE, 0.0, 1.0 - share)


def improve(
    model: RentModel, root: Evaluation, near: list[Ints], standing: Incumbent, seed: int
) -> None:
    """Better the best solution: two services choose anew at a time, while the others stay as they are.

    Those that cost most above their least at the root's prices come first.
    """
    # With two services a pair is the whole problem, which `close` solves.
    if standing.solution is None or len(model.services) < 3:
        return
    budget = standing.work.left - standing.work.part(_IMPROVE_WORK)
    before = np.inf
    while standing.objective < before:
        before = standing.objective
        for pair in _pairs(_regrets(root, standing.solution)):
            if standing.work.left <= budget or standing.done:
                return
            found = _choose_anew(model, standing.solution, pair, near, np.zeros(0), standing, seed)
            if found.solution is not None:
                standing.offer(found.solution, found.objective)


def _choose_anew(
    model: RentModel,
    solution: Solution,
    free: tuple[int, int],
    near: list[Ints],
    unserved: Floats,
    standing: Incumbent,
    seed: int,
) -> InstanceAnswer:
    """Let two services have any items that are `near`; the others keep theirs."""
    let_in = free_items(solution, near, free)
    standing.work.charge(_PAIR_START)
    master = InstanceMaster(model, "cost", unserved, let_in, standing.work, seed)
    for m, number in enumerate(solution.items):
        if m not in free:
            master.fix(m, number)
    # What two services gain is little beside what all cost, and gains of many pairs add up.
    return master.solve(standing.limits(_PAIR_WORK, part=_PAIR_GAP), solution)


def with_used(chosen: Sequence[Ints], solution: Solution) -> list[Ints]:
    """Return items of each service with those that a solution has: a solve can then start from it."""
    return [
        np.union1d(some, np.array(sorted(number), np.int64))
        for some, number in zip(chosen, solution.items, strict=True)
    ]


def free_items(solution: Solution, near: Sequence[Ints], free: Collection[int]) -> list[Ints]:
    """Return the items of a solution, with all that are `near` for the services that are free."""
    none = np.zeros(0, np.int64)
    return with_used([near[m] if m in free else none for m in range(len(near))], solution)


def _regrets(root: Evaluation, solution: Solution) -> Floats:
    """Return by how much each service costs more than its least at the root's prices."""
    return np.array(
        [
            sum(legs.cost[item] * count for item, count in number.items()) - legs.least
            for legs, number in zip(root.legs, solution.items, strict=True)
        ]
    )


def _pairs(loss: Floats) -> list[tuple[int, int]]:
    """Pairs of services, those that lose most first."""
    order = [int(m) for m in np.argsort(-loss, kind="stable")]
    # By the one that loses less: pairs among the first few come before any with the next.
    pairs = [(order[i], order[j]) for j in range(1, len(order)) for i in range(j)]
    return pairs[:_MAX_PAIRS]


def lowest_each(item_slacks: list[Floats], max_items: int) -> list[Ints]:
    """Return per service the `max_items` items of least slack, in order of items."""
    return [
        np.sort(np.argsort(slack, kind="stable")[:max_items][: int(np.isfinite(slack).sum())])
        for slack in item_slacks
    ]


def lowest(
    item_slacks: list[Floats], limit: float, max_items: int | None
) -> tuple[list[Ints], float]:
    """Return per service the items of slack up to `limit`, `max_items` in all; and the least of others."""
    joined = np.concatenate([np.zeros(0), *item_slacks])
    service = np.repeat(np.arange(len(item_slacks)), [len(slack) for slack in item_slacks])
    place = np.concatenate(
        [np.zeros(0, np.int64), *(np.arange(len(slack)) for slack in item_slacks)]
    )
    chosen = (
        np.flatnonzero(joined <= limit)
        if np.isfinite(limit)
        else np.flatnonzero(np.isfinite(joined))
    )
    if max_items is not None and len(chosen) > max_items:
        chosen = chosen[np.argsort(joined[chosen], kind="stable")]
        # The least slack of those left out: up to there the bound of a solve holds.
        limit = float(joined[chosen[max_items]])
        chosen = np.sort(chosen[:max_items])
    return [place[chosen[service[chosen] == m]] for m in range(len(item_slacks))], limit
