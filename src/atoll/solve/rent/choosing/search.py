"""The cheapest mix of models with the machines for it: which search when.

As `rent_search`, with levels free: prices at which machines are rented give first mixes; small problems are
solved whole; larger ones get better prices from mixes of instances at all levels, whose bound says which
instances can matter, and are solved over more and more of those. What is proven holds over all levels,
templates and regions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll.solve.rent.allocation_types import LossLimits
from atoll.solve.rent.choosing.bound import error_prices
from atoll.solve.rent.choosing.decomposition import (
    LevelDecomposition,
    LevelEvaluation,
    evaluate_levels,
    level_slacks,
)
from atoll.solve.rent.choosing.level_rows import LevelRows
from atoll.solve.rent.choosing.masters import LevelInstanceMaster
from atoll.solve.rent.greedy_allocation import served_share
from atoll.solve.rent.incumbent import Incumbent
from atoll.solve.rent.instance_master import InstanceAnswer
from atoll.solve.rent.items import RentModel, Solution
from atoll.solve.rent.relaxation import (
    Prices,
    market_prices,
    price_of_all,
)
from atoll.solve.rent.rent_search import (
    SMALL,
    free_items,
    lowest,
    lowest_each,
    oracles_of,
    with_used,
)
from atoll.solve.rent.rental_program import cheapest_supply, costs
from atoll.solve.rent.service_oracle import Legs
from atoll.solve.rent.step_functions import GRID
from atoll.solve.rent.surviving import SMALL_SURVIVING, search_surviving

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Levels = dict[int, float]

# Items of the integer solves that close the gap, more each time.
_STAGES = (400, 1500, 5000)
_MAX_ITEMS = 20_000
"""Items beyond which nothing is solved over all that may matter."""
_SCARCE_STAGES = (100, 400)
"""Items of each service to look for the most that can be served with."""
# What leaving a service out costs in the relaxation, in its least costs.
_DEAR = 3.0
_NODES = 200
_SHARE_TOLERANCE = 1e-9
"""Difference of shares, and relative difference of costs, that counts as rounding."""
_TRY_WORK = 200.0
"""Work of trying levels, in simplex iterations."""
_MAX_TRIES = 24
_NEIGHBOURS = 120
_FIRST_EFFORT = 0.3
"""Share of the effort for a first solve over all services."""
_FIRST_ITEMS = 40
"""Items of each phase that it is over, at least."""
_IMPROVE = 0.4
_PAIR_WORK = 8000
_PAIR_START = 100.0
"""Work of building a program for a few services, in simplex iterations."""
_MAX_PAIRS = 40
_MIN_GAIN = 1e-6
"""Relative gain below which improving ends."""


@dataclass
class LevelStanding:
    """The best solution with its levels; the rest as `Incumbent` has it."""

    standing: Incumbent
    levels: Levels

    def offer(self, solution: Solution, objective: float, levels: Levels) -> bool:
        """Take a solution at some levels if it is better; return whether it was."""
        if not self.standing.offer(solution, objective):
            return False
        self.levels = levels
        return True


@dataclass(frozen=True)
class LevelOutcome:
    """How the search ended: levels of ways, what error is worth by choice (USD/h per unit), and prices.

    `served` is the common fraction that was found where not all can be served.
    """

    solution: Solution | None
    levels: Levels
    error_usd: dict[int, float]
    prices: Prices
    served: float = 1.0


class LevelSearch:
    """A search for the cheapest levels and instances of one model."""

    def __init__(self, model: RentModel, rows: LevelRows, standing: Incumbent, seed: int) -> None:
        self.model, self.rows, self.standing, self.seed = model, rows, standing, seed
        self.best = LevelStanding(standing, {})
        self.oracles = oracles_of(model, GRID)
        self.total = sum(len(items) for items in model.items)
        self.error_usd: dict[int, float] = {}

    def run(self) -> LevelOutcome:
        """Search, and report to `standing`."""
        standing = self.standing
        # No plan costs more than everything on offer; the margin is for rounding.
        standing.ceiling = price_of_all(self.model) * (1.0 + _SHARE_TOLERANCE) + _SHARE_TOLERANCE
        mixes = LevelDecomposition(self.model, self.oracles, self.rows, standing, self.seed)
        mixes.rate(market_prices(self.model))
        root = self._root(mixes)
        self.error_usd = _errors_of(self.rows, root)
        # An infinite bound says that not everything can be served.
        losses = self.model.limits.losses
        if standing.bound < np.inf and losses is not None:
            self._survive(mixes, losses)
        elif standing.bound < np.inf:
            self._take_cheapest()
            if self.total <= SMALL:
                self._solve_whole()
            if not standing.done and self.total > SMALL:
                self._decompose(mixes)
        if standing.solution is not None:
            levels = self.best.levels
            # After a loss no more than these may be kept.
            if losses is None:
                levels = self._settle(standing.solution, levels)
            prices = (mixes.relaxed or (self._root(mixes).prices, None))[0]
            return LevelOutcome(standing.solution, levels, self.error_usd, prices)
        return self._serve_most(mixes)

    def _enough(self) -> bool:
        """Whether there is no more to search, or nothing left to search with."""
        return self.standing.done

    @staticmethod
    def _root(mixes: LevelDecomposition) -> LevelEvaluation:
        assert mixes.level_root is not None
        return mixes.level_root

    def _survive(self, mixes: LevelDecomposition, losses: LossLimits) -> None:
        """Solve with rows for every loss."""
        if self.total > SMALL_SURVIVING:
            self._price(mixes)
        root = self._root(mixes)
        self.best.levels = search_surviving(
            self.model,
            losses,
            self.standing,
            self.seed,
            level_slacks(self.oracles, self.rows, root),
            root.value,
            safe=losses.safe,
            rows=self.rows,
        )

    def _price(self, mixes: LevelDecomposition) -> None:
        """Find the best prices."""
        min_costs = [legs.least for legs in self._root(mixes).legs]
        mixes.unserved = _DEAR * np.maximum(1.0, np.where(np.isfinite(min_costs), min_costs, 1.0))
        mixes.master.set_unserved(mixes.unserved)
        mixes.converge()
        self.error_usd = _errors_of(self.rows, self._root(mixes))

    def _take_cheapest(self) -> None:
        """Offer what ways would take if there were plenty of everything, at a few levels."""
        cut = any(len(sizes) > 1 for sizes in self.model.supply.sizes)
        for prices in (
            market_prices(self.model),
            *([market_prices(self.model, alone=True)] if cut else []),
        ):
            at = evaluate_levels(self.model, self.oracles, self.rows, prices)
            self._try_levels(at)

    def _try_levels(self, at: LevelEvaluation) -> None:
        """Offer instances for the levels of a bound, and for corners of the conditions, cheapest first."""
        row = at.prices.row
        legs = [oracle.legs(row, lower=False) for oracle in self.oracles]
        whole = {way: leg.total.dense() for way, leg in enumerate(legs) if way in self.rows.ways}
        base: Levels = {}
        for group in at.groups:
            base |= group.levels
        candidates = [base] if base else []
        # Programs need finite costs: 1e12 is for ways that cannot be served at all.
        cost = {way: min(float(table[-1]), 1e12) for way, table in whole.items()}
        corner = self.rows.least(cost)
        if corner is not None:
            candidates.append(corner)
            # With one way far cheaper than the others: the corner that uses it most.
            for way in self.rows.ways:
                scale = 1.0 + max(cost.values())
                far = self.rows.least({**cost, way: cost[way] - 1e3 * scale})
                if far is not None:
                    candidates.append(far)
        priced = []
        for number, levels in enumerate(candidates):
            value = sum(float(whole[w][_steps_up(y)]) for w, y in levels.items())
            priced.append((value, number))
        tried: set[tuple[tuple[int, float], ...]] = set()
        for value, number in sorted(priced)[:_MAX_TRIES]:
            levels = candidates[number]
            # Levels that differ by rounding only are tried once.
            key = tuple(sorted((way, round(y, 9)) for way, y in levels.items()))
            if not np.isfinite(value) or key in tried:
                continue
            tried.add(key)
            # As long as there is no solution it goes on, whatever was spent.
            if self.standing.done and self.standing.solution is not None:
                return
            self._offer_at(legs, levels)

    def _offer_at(self, legs: Sequence[Legs], levels: Levels) -> None:
        """Offer the instances that ways take at some levels and prices."""
        self.standing.work.charge(_TRY_WORK)
        chosen: list[dict[int, int]] = []
        for m, (oracle, leg) in enumerate(zip(self.oracles, legs, strict=True)):
            steps = _steps_up(levels[m]) if m in levels else GRID
            picked: dict[int, int] | None = {} if steps == 0 else oracle.pick(leg, steps)
            if picked is None:
                return
            chosen.append(picked)
        self._offer_items(tuple(chosen))

    def _offer_items(self, chosen: tuple[dict[int, int], ...]) -> bool:
        """Offer items at the best levels that they carry, with the cheapest machines."""
        # What is picked at prices does not heed spread.
        if self.model.limits.spread > 1:
            return False
        carried = self._carried(chosen)
        # Services outside the conditions have no level to lower: all of them is served.
        if any(
            carried[m] < 1.0 - _SHARE_TOLERANCE
            for m in range(len(chosen))
            if m not in self.rows.ways
        ):
            return False
        levels = self.rows.settle(carried)
        if levels is None:
            return False
        solution = cheapest_supply(self.model, chosen, self.seed)
        if solution is None:
            return False
        return self.best.offer(solution, sum(costs(self.model, solution)), levels)

    def _carried(self, chosen: Sequence[dict[int, int]]) -> Levels:
        """The share of each service's demand that items carry, phases paired inside regions only."""
        return {
            m: served_share(items, number, self.model.regions)
            for m, (items, number) in enumerate(zip(self.model.items, chosen, strict=True))
        }

    def _settle(self, solution: Solution, levels: Levels) -> Levels:
        """The levels that err least of those that a solution carries."""
        carried = self._carried(solution.items)
        # With pairs, phases also meet across regions, which `_carried` does not count.
        max_levels = {
            way: max(carried[way], levels.get(way, 0.0))
            if self.model.services[way].pairs
            else carried[way]
            for way in self.rows.ways
        }
        return self.rows.settle(max_levels) or levels

    def _solve_whole(self) -> None:
        """Solve over all items there are."""
        standing = self.standing
        every = [np.arange(len(items)) for items in self.model.items]
        master = self._master(every)
        master.levels.set_wide(True)
        result = master.relax(standing.deadline.limit())
        if result.status == "optimal":
            self.error_usd = master.levels.error_duals(result)
        master.levels.set_wide(False)
        if standing.done:
            return
        standing.prove(self._solve(master, standing.work.part(0.8)).bound)

    def _master(self, let_in: Sequence[Ints]) -> LevelInstanceMaster:
        """The integer program over some items of each service."""
        work = self.standing.work
        return LevelInstanceMaster(self.model, "cost", self.rows, let_in, work, self.seed)

    def _solve(self, master: LevelInstanceMaster, iterations: int) -> InstanceAnswer:
        """Solve a program, from the best solution so far, and offer what is found."""
        standing = self.standing
        found = master.solve_levels(standing, standing.solution, self.best.levels, iterations)
        if found.answer.solution is not None:
            self.best.offer(found.answer.solution, found.answer.objective, found.levels)
        return found.answer

    def _decompose(self, mixes: LevelDecomposition) -> None:
        standing = self.standing
        self._price(mixes)
        if not self._enough():
            self._try_levels(self._root(mixes))
        if self._enough():
            return
        limits = standing.limits(standing.work.part(0.1), nodes=_NODES)
        chosen = mixes.master.choose(limits, serve_all=True)
        if chosen is not None:
            self._offer_items(chosen)
        if self._enough():
            return
        root, used = self._root(mixes), mixes.used_items()
        item_slacks = level_slacks(self.oracles, self.rows, root)
        edge = self._find_edges(root)
        ended = self._take_edge([np.union1d(a, b) for a, b in zip(edge, used, strict=True)])
        near = [
            np.union1d(np.union1d(some, own), outer)
            for some, own, outer in zip(
                lowest_each(item_slacks, _NEIGHBOURS), used, edge, strict=True
            )
        ]
        # Pairs are for where the effort ended that solve.
        if not ended:
            self._improve(root, near)
        self._close(root, item_slacks, used)

    def _find_edges(self, root: LevelEvaluation) -> list[Ints]:
        """Per service the items that no other beats: those carry more, or cost more.

        At the root's prices, and where slices cost all of their machine. Slack does not tell small items
        from large ones, and whole machines are filled by all sizes.
        """
        alone = market_prices(self.model, alone=True).row
        edges = []
        for m, (oracle, legs) in enumerate(zip(self.oracles, root.legs, strict=True)):
            items = oracle.items
            if m in self.rows.closed:
                edges.append(np.zeros(0, np.int64))
                continue
            found = [np.zeros(0, np.int64)]
            for cost in (legs.cost, items.prices(alone)):
                for phase in np.unique(items.phase):
                    here = np.flatnonzero(items.phase == phase)
                    found.append(_edge(here, cost[here], items.share[here]))
            edges.append(np.unique(np.concatenate(found)))
        return edges

    def _take_edge(self, let_in: list[Ints]) -> bool:
        """Solve over some items of all services; return whether that solve came to its end."""
        standing = self.standing
        if standing.solution is not None:
            let_in = with_used(let_in, standing.solution)
        answer = self._solve(self._master(let_in), standing.work.part(_FIRST_EFFORT))
        return answer.solution is not None and answer.bound >= standing.wanted

    def _improve(self, root: LevelEvaluation, near: list[Ints]) -> None:
        """Better the best solution: two choices take instances anew at a time, others keep theirs.

        All levels are free: what others have may carry more or less of what is asked.
        """
        standing = self.standing
        ways = set(self.rows.ways)
        entities = [frozenset(choice.ways) for choice in self.rows.by_choice]
        entities += [frozenset([m]) for m in range(len(self.oracles)) if m not in ways]
        if standing.solution is None or len(entities) < 2:
            return
        # What must be left for closing the gap.
        work_reserve = standing.work.left - standing.work.part(_IMPROVE)
        before = np.inf
        while standing.objective < before * (1.0 - _MIN_GAIN):
            before = standing.objective
            loss = self._losses(root, entities)
            order = sorted(range(len(entities)), key=lambda e: (-loss[e], e))
            alone = [entities[e] for e in order]
            pairs = [alone[i] | alone[j] for j in range(1, len(alone)) for i in range(j)]
            # Single choices first, then pairs of those that lose most.
            for free in [*alone, *pairs][:_MAX_PAIRS]:
                if standing.work.left <= work_reserve or standing.done:
                    return
                self._take_anew(free, near)

    def _losses(self, root: LevelEvaluation, entities: Sequence[frozenset[int]]) -> list[float]:
        """Return what choices cost at the root's prices in the best solution, beside the least they could."""
        solution = self.standing.solution
        assert solution is not None
        cost = [
            sum(legs.cost[item] * count for item, count in number.items())
            for legs, number in zip(root.legs, solution.items, strict=True)
        ]
        levels = self.best.levels
        paid = []
        for entity in entities:
            min_cost = 0.0
            for m in entity:
                steps = _steps_up(levels.get(m, 1.0))
                min_cost += min(root.legs[m].total.at(steps), cost[m])
            paid.append(sum(cost[m] for m in entity) - min_cost)
        return paid

    def _take_anew(self, free: frozenset[int], near: list[Ints]) -> None:
        """Let some services have any items that are `near`; the others keep theirs."""
        standing, solution = self.standing, self.standing.solution
        assert solution is not None
        standing.work.charge(_PAIR_START)
        master = self._master(free_items(solution, near, free))
        for m, number in enumerate(solution.items):
            if m not in free:
                master.fix(m, number)
        self._solve(master, min(_PAIR_WORK, standing.work.part(0.2)))

    def _close(self, root: LevelEvaluation, item_slacks: list[Floats], used: list[Ints]) -> None:
        """Integer solves over more and more items until the target is proven, or effort is spent."""
        standing = self.standing
        for stage, max_items in enumerate((*_STAGES, None)):
            if standing.done or (stage > 1 and standing.solution is None):
                return
            needed = standing.wanted - root.value
            chosen, limit = lowest(item_slacks, needed, max_items)
            if sum(len(some) for some in chosen) > _MAX_ITEMS:
                return
            # Also the lowest of every service: by slack over all, one of them might have none.
            if stage == 0:
                near = lowest_each(item_slacks, _STAGES[0] // (2 * len(chosen)))
                chosen = [
                    np.union1d(np.union1d(a, b), c)
                    for a, b, c in zip(chosen, near, used, strict=True)
                ]
            if standing.solution is not None:
                chosen = with_used(chosen, standing.solution)
            if not standing.deadline.allows(sum(len(some) for some in chosen)):
                return
            master = self._master(chosen)
            master.add_level_cuts(self.oracles, [legs.cost for legs in root.legs])
            # All that can matter is in: this solve decides.
            last = limit >= needed
            answer = self._solve(master, standing.work.part(0.9 if last else 0.35))
            # A plan with an item left out costs at least `limit` more than the root's bound.
            standing.prove(min(answer.bound, root.value + limit))
            if last:
                return

    def _serve_most(self, mixes: LevelDecomposition) -> LevelOutcome:
        """The levels at which the largest common fraction was found that can be served."""
        standing, root = self.standing, self._root(mixes)
        best: tuple[float, Levels] = (0.0, {})
        stages: Sequence[int | None] = (None,) if self.total <= SMALL else _SCARCE_STAGES
        for limit in stages:
            if limit is None:
                let_in = [np.arange(len(items)) for items in self.model.items]
            else:
                let_in = [self._useful(m, root.legs[m], limit) for m in range(len(self.oracles))]
            master = LevelInstanceMaster(
                self.model, "common", self.rows, let_in, standing.work, self.seed
            )
            found = master.solve_levels(standing, None, {}, standing.work.part(0.5))
            if found.answer.solution is not None and found.served > best[0] + _SHARE_TOLERANCE:
                # Levels were found for a part of the demand: these are for all of it.
                scaled = {way: y / found.served for way, y in found.levels.items()}
                best = (found.served, scaled)
        served, levels = best
        # Too little is served for its levels to mean much: the cheapest that meet the conditions.
        if served <= 1e-6 or not self.rows.hold(levels, 1e-5):
            cost = {way: min(root.legs[way].least, 1e12) for way in self.rows.ways}
            levels = self.rows.least(cost) or {}
            served = 0.0
        return LevelOutcome(None, levels, self.error_usd, root.prices, served)

    def _useful(self, service: int, legs: Legs, limit: int) -> Ints:
        """Items that carry most for their price, some of each phase and region, and the smallest."""
        items = self.model.items[service]
        rate = legs.cost / np.maximum(items.share, 1e-12)
        taken = items.taken()
        chosen = []
        for phase in np.unique(items.phase):
            here = np.flatnonzero(items.phase == phase)
            chosen.append(here[np.argsort(rate[here], kind="stable")[:limit]])
            for region in np.unique(items.region[here]):
                there = here[items.region[here] == region]
                few = max(4, limit // 10)
                chosen.append(there[np.argsort(taken[there], kind="stable")[:few]])
                chosen.append(there[np.argsort(rate[there], kind="stable")[:few]])
        return np.unique(np.concatenate([np.zeros(0, np.int64), *chosen]))


def _edge(which: Ints, cost: Floats, share: Floats) -> Ints:
    """Items of which none costs less and carries as much, in layers until there are enough."""
    chosen: list[Ints] = []
    left = np.lexsort((-share, cost))
    while len(left) and sum(len(some) for some in chosen) < _FIRST_ITEMS:
        # By rising cost, an item is on the edge if it carries more than all before it.
        max_share = np.maximum.accumulate(share[left])
        first = np.append(True, max_share[1:] > max_share[:-1])
        chosen.append(which[left[first]])
        left = left[~first]
    return np.concatenate([np.zeros(0, np.int64), *chosen])


def _steps_up(level: float) -> int:
    # Up, so that what is picked there carries the level; 1e-6 is for rounding.
    return min(GRID, max(0, int(np.ceil(level * GRID - 1e-6))))


def _errors_of(rows: LevelRows, at: LevelEvaluation) -> dict[int, float]:
    """Return what one more unit of mean error saves by choice, at the prices of a bound."""
    found: dict[int, float] = {}
    for group in rows.groups:
        found |= error_prices(rows, group, {way: at.legs[way] for way in group.ways})
    return {c: found.get(c, 0.0) for c in range(len(rows.by_choice))}
