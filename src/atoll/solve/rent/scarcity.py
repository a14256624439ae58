"""When demand cannot be met: the most that can be served.

The most is the largest common fraction of every role's demand, or the largest mean fraction weighted by
priority. Roles that nothing on offer can serve are left out of it. Where not even one instance of each
of the others can stand at once, the common fraction is that of as many roles as can (of equally many,
those of more weight): serving some is better than serving none.

The common fraction is found by bisection: whether a fraction f of all demand fits is shown by an
allocation of it, or refuted by a bound above the price of all nodes there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from atoll.solve.rent.answer import cheapest_nodes, restrict
from atoll.solve.rent.columns import RentModel, Solution
from atoll.solve.rent.mixes.decomposition import Decomposition
from atoll.solve.rent.pairs.pair_search import PairSearch
from atoll.solve.rent.relaxation import Prices, cheapest_rents, price_of_all
from atoll.solve.rent.search import glance, minimise
from atoll.solve.rent.standing import Deadline, Incumbent, Target
from atoll.solve.rent.types import Statistics

Floats = NDArray[np.float64]
Rebuild = Callable[[list[int], float], RentModel]
"""The model of some of the roles with this fraction of their demand asked for."""

EXACT = 1e-4
"""Fractions are proven to this."""
_COARSE = 2e-3
_LITTLE = 1e-6
"""A fraction that any instance serves."""
_TILT = 1e-4
"""Price of all nodes where what counts is the number of roles: of equal choices the cheaper one."""
_MANY = 24
"""Instances per role beyond which mixes are too many for them to help."""


@dataclass(frozen=True)
class ServedDemand:
    """The most that can be served: a solution, the fraction of each role's demand to serve, and proof.

    `achieved` and `most` are the common fraction or the weighted mean; `prices` are duals that say what
    stands in the way.
    """

    solution: Solution | None
    fraction: Floats
    achieved: float
    most: float
    prices: Prices
    statistics: Statistics


def serve_most(
    model: RentModel,
    rebuild: Rebuild,
    weights: Floats,
    deadline: Deadline,
    *,
    priority: bool,
    seed: int,
) -> ServedDemand:
    """Return the largest common fraction of demand, or (`priority`) the largest weighted mean fraction."""
    roles = list(range(len(model.pairs)))
    if priority:
        served = _weigh(replace(model, penalty=np.zeros(model.cells)), weights, deadline, seed)
        if served.solution is not None:
            return served
    some, start = _start_together(rebuild(roles, _LITTLE), weights, deadline.part(0.3), seed)
    if not some:
        return _serve_nobody(model)
    reduced = rebuild(some, 1.0)
    served = _common(
        reduced, lambda f: rebuild(some, f), restrict(start, roles, some), deadline, seed
    )
    fraction = np.zeros(len(roles))
    fraction[some] = served.fraction
    return replace(served, solution=_widen(model, served.solution, some), fraction=fraction)


def _serve_nobody(model: RentModel) -> ServedDemand:
    prices = Prices(np.zeros(model.cells))
    return ServedDemand(None, np.zeros(len(model.pairs)), 0.0, 0.0, prices, Statistics())


def _widen(model: RentModel, solution: Solution | None, some: list[int]) -> Solution | None:
    """Return a solution of some roles as one of all."""
    if solution is None:
        return None
    started: list[dict[int, int]] = [{} for _ in model.pairs]
    kept = [np.zeros(len(running.pairs), np.int64) for running in model.kept]
    for i, role in enumerate(some):
        started[role], kept[role] = solution.started[i], solution.kept[i]
    return replace(solution, started=tuple(started), kept=tuple(kept))


def _start_together(
    model: RentModel, weights: Floats, deadline: Deadline, seed: int
) -> tuple[list[int], Solution | None]:
    """Return as many roles as can have an instance each at once, and such instances.

    `model` asks for so little that any instance is enough.
    """
    roles, total = len(model.pairs), float(weights.sum())
    # All weights together count for less than one role more.
    price = 1.0 + (0.5 * weights / total if total > 0.0 else np.zeros(roles))
    free = replace(model, penalty=np.zeros(model.cells))
    standing = Incumbent(Target(0.0, 2.0 * _TILT), deadline)
    tilt = _TILT / max(price_of_all(free), _TILT)
    mixes = Decomposition(free, price, standing, rent=tilt, serve_all=False, seed=seed)
    mixes.converge(Prices(tilt * cheapest_rents(free), rent=tilt))
    mixes.dive()
    if not standing.done:
        mixes.solve_integer(50)
        mixes.close()
    solution = standing.solution
    if solution is None or not served_shares(model, solution).any():
        solution = _start_one_by_one(model)
    shares = served_shares(model, solution)
    return [role for role in range(roles) if shares[role] > 0.0], solution


def _start_one_by_one(model: RentModel) -> Solution:
    """An instance for one role after the other, those with the least choice first; needs no time.

    Nothing where a role must stand in several regions or the share of spot is limited.
    """
    supply, limits = model.supply, model.limits
    room = np.zeros(model.cells + 1, np.int64)
    np.add.at(room, model.offer_cell, supply.available)
    started: list[dict[int, int]] = [{} for _ in model.pairs]
    kept = tuple(np.zeros(len(running.pairs), np.int64) for running in model.kept)
    nothing = np.zeros(len(supply.usd), np.int64)
    if limits.spread > 1 or limits.spot_share is not None:
        return Solution(nothing, tuple(started), kept)
    for role in sorted(range(len(started)), key=lambda r: len(model.pairs[r])):
        pairs = model.pairs[role]
        keys = pairs.keys(model.regions)
        for i in np.argsort(pairs.prices(cheapest_rents(model)), kind="stable"):
            use = np.bincount(pairs.cells[i], minlength=model.cells + 1)
            use[-1] = 0
            if np.any(use > room):
                continue
            started[role] = {int(keys[i]): 1}
            if _keeps_limits(model, Solution(nothing, tuple(started), kept)):
                room -= use
            else:
                started[role] = {}
            break
    solution = Solution(nothing, tuple(started), kept)
    return replace(solution, rented=cheapest_nodes(model, solution))


def _keeps_limits(model: RentModel, solution: Solution) -> bool:
    """Whether the nodes in use keep budget and number of nodes."""
    rented, limits = cheapest_nodes(model, solution), model.limits
    if limits.budget is not None and float(model.supply.usd @ rented) > limits.budget:
        return False
    return limits.max_nodes is None or int(rented.sum()) <= limits.max_nodes


def _common(
    model: RentModel,
    rebuild: Callable[[float], RentModel],
    start: Solution | None,
    deadline: Deadline,
    seed: int,
) -> ServedDemand:
    free = replace(model, penalty=np.zeros(model.cells))
    standing = Incumbent(Target(0.0, EXACT), deadline)
    pairs = PairSearch(free, "common", np.ones(len(model.pairs)), standing, seed)
    pairs.tighten()
    prices = pairs.relaxed[0] if pairs.relaxed is not None else pairs.root.prices
    probe = _Probe(model, rebuild, seed)
    probe.high = probe.top = min(1.0, max(0.0, 1.0 - standing.bound))
    if start is not None:
        probe.take(start)
    if all(len(p) and 1.0 / p.share.max() <= _MANY for p in model.pairs):
        probe.bisect(deadline.part(0.7))
        probe.search(deadline.part(0.8))
    standing.prove(1.0 - probe.high)
    if probe.solution is not None:
        standing.offer(probe.solution, 1.0 - probe.low)
    if not standing.done:
        pairs.close()
    low = 0.0
    if standing.solution is not None:
        low = float(served_shares(model, standing.solution).min(initial=1.0))
    most = max(low, min(1.0, 1.0 - standing.bound))
    statistics = Statistics(pairs=sum(len(p) for p in model.pairs), mips=pairs.mips)
    fraction = np.full(len(model.pairs), low)
    return ServedDemand(standing.solution, fraction, low, most, prices, statistics)


class _Probe:
    """What is known of the common fraction: `low` is served by `solution`, above `high` nothing can be.

    From `top` on, nothing was found though it is not excluded.
    """

    def __init__(self, model: RentModel, rebuild: Callable[[float], RentModel], seed: int) -> None:
        self.solution: Solution | None = None
        self.low, self.high, self.top = 0.0, 1.0, 1.0
        self._model, self._rebuild, self._seed = model, rebuild, seed
        self._prices = Prices(cheapest_rents(model))

    def take(self, solution: Solution) -> None:
        """Take an allocation if it serves more."""
        low = float(served_shares(self._model, solution).min(initial=1.0))
        if self.solution is None or low > self.low:
            self.solution, self.low = solution, low
            self.high, self.top = max(self.high, low), max(self.top, low)

    def bisect(self, deadline: Deadline) -> None:
        """Bring `low` and `top` together by quick looks, then `high` to where nothing is shown any more."""
        while self.top - self.low > _COARSE and deadline.left > 0.0:
            self._look(0.5 * (self.low + self.top), deadline)
        open_from = self.top
        while self.high - open_from > _COARSE and deadline.left > 0.0:
            fraction = 0.5 * (open_from + self.high)
            self._look(fraction, deadline)
            if self.high > fraction:
                open_from = max(fraction, self.low)
        self.top = self.high

    def _look(self, fraction: float, deadline: Deadline) -> None:
        # A gap of all of it: anything will do.
        standing = Incumbent(Target(1.0), deadline)
        self._prices = glance(self._rebuild(fraction), standing, self._prices, self._seed)
        self._note(fraction, standing)

    def _note(self, fraction: float, standing: Incumbent) -> None:
        if standing.solution is not None:
            self.take(standing.solution)
            return
        self.top = min(self.top, fraction)
        if standing.bound == np.inf:
            self.high = fraction

    def search(self, deadline: Deadline) -> None:
        """Look closely for allocations of fractions between `low` and `top` until these meet."""
        while self.top - self.low > EXACT and deadline.left > 0.0:
            fraction = self.low + max(0.5 * (self.top - self.low), 0.9 * EXACT)
            standing = Incumbent(Target(1.0), deadline.part(0.3))
            minimise(self._rebuild(fraction), standing, self._seed)
            self._note(fraction, standing)


def _weigh(model: RentModel, weights: Floats, deadline: Deadline, seed: int) -> ServedDemand:
    roles, total = len(model.pairs), float(weights.sum())
    normal = weights / total if total > 0.0 else np.full(roles, 1.0 / max(1, roles))
    standing = Incumbent(Target(0.0, EXACT), deadline)
    pairs = PairSearch(model, "weighted", normal, standing, seed)
    pairs.tighten()
    prices = pairs.relaxed[0] if pairs.relaxed is not None else pairs.root.prices
    mixes = Decomposition(
        model, normal, standing, rent=0.0, partial=True, serve_all=False, seed=seed
    )
    if not standing.done:
        mixes.converge(prices)
        mixes.solve_integer(50)
        mixes.close()
    if not standing.done:
        pairs.close()
    fraction = np.zeros(roles)
    if standing.solution is not None:
        fraction = np.minimum(1.0, served_shares(model, standing.solution))
    achieved = float(fraction @ normal)
    most = max(achieved, min(1.0, 1.0 - standing.bound))
    statistics = Statistics(
        pairs=sum(len(p) for p in model.pairs), mixes=mixes.mixes, mips=mixes.mips + pairs.mips
    )
    return ServedDemand(standing.solution, fraction, achieved, most, prices, statistics)


def served_shares(model: RentModel, solution: Solution) -> Floats:
    """Return the share of each role's demand that is served (an instance counts for all of it at most)."""
    share = np.zeros(len(model.pairs))
    for role, started in enumerate(solution.started):
        pairs = model.pairs[role]
        index = pairs.find(started.keys(), model.regions)
        share[role] = pairs.share[index] @ np.array(list(started.values()), np.float64)
        share[role] += model.kept[role].pairs.share @ solution.kept[role]
    return np.minimum(1.0, share)
