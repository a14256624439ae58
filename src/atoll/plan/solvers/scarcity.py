"""When demand cannot be met: the most that can be served.

The most is the largest common fraction of every role's demand, or the largest mean fraction weighted by
priority. Roles that nothing on offer can serve are left out of it. If the common fraction is nil (two
roles need the same node, say) the mean is taken instead: serving some is better than serving none.

The common fraction is found by bisection: whether a fraction f of all demand fits is decided by the
relaxation over mixes, which shows for most f that are too large that some role would go without.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from atoll.plan.solvers.allocation_types import Statistics
from atoll.plan.solvers.columns import Model, Solution
from atoll.plan.solvers.decomposition import Decomposition
from atoll.plan.solvers.pair_search import PairSearch
from atoll.plan.solvers.relaxation import Prices
from atoll.plan.solvers.search import minimise
from atoll.plan.solvers.standing import Deadline, Standing, Target

Floats = NDArray[np.float64]
Rebuild = Callable[[float], Model]
"""The model with this fraction of every role's demand asked for."""

EXACT = 1e-4
"""Fractions are proven to this."""
_NOTHING = 1e-9
_MISSING = 1e-6


@dataclass(frozen=True)
class Served:
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


def most_served(
    model: Model,
    rebuild: Rebuild,
    weights: Floats,
    deadline: Deadline,
    *,
    priority: bool,
    seed: int,
) -> Served:
    """Return the largest common fraction of demand, or (`priority`) the largest weighted mean fraction."""
    free = replace(model, penalty=np.zeros(model.cells))
    if not priority:
        served = _common(free, rebuild, deadline, seed)
        if served.achieved > _NOTHING or len(model.pairs) < 2:
            return served
    return _weighted(free, weights, deadline, seed)


def _common(model: Model, rebuild: Rebuild, deadline: Deadline, seed: int) -> Served:
    roles = len(model.pairs)
    standing = Standing(Target(0.0, EXACT), deadline.part(0.5))
    pairs = PairSearch(model, "common", np.ones(roles), standing, seed)
    pairs.tighten()
    prices = pairs.relaxed[0] if pairs.relaxed is not None else pairs.root.prices
    pairs.close(stages=1)
    solution, low = standing.solution, 0.0
    if solution is not None:
        low = float(served_shares(model, solution).min(initial=1.0))
    high = top = max(low, min(1.0, 1.0 - standing.bound))
    fraction = top if top == 1.0 else low + 0.5 * (top - low)
    while top - low > EXACT and deadline.left > 0.0:
        fits, found = _fits(rebuild(fraction), prices, deadline.part(0.3), seed)
        if found is not None:
            solution, low = found, float(served_shares(model, found).min(initial=1.0))
        else:
            top = fraction
            # What could be neither found nor excluded counts as possible.
            high = high if fits else fraction
        fraction = low + max(0.5 * (top - low), 0.9 * EXACT)
    statistics = Statistics(pairs=sum(len(p) for p in model.pairs), mips=pairs.mips)
    return Served(solution, np.full(roles, low), low, max(low, high), prices, statistics)


def _fits(
    model: Model, prices: Prices, deadline: Deadline, seed: int
) -> tuple[bool, Solution | None]:
    """Return whether all demand may fit what can be had, and a solution if one was found."""
    roles = len(model.pairs)
    standing = Standing(Target(0.0, _MISSING), deadline)
    free = replace(model, penalty=np.zeros(model.cells))
    mixes = Decomposition(free, np.ones(roles), standing, rent=0.0, serve_all=False, seed=seed)
    mixes.converge(prices, enough=_MISSING)
    if standing.bound > _MISSING:
        return False, None
    mixes.integer(50)
    if standing.solution is not None and standing.objective < 0.5:
        return True, standing.solution
    # Anything will do: a gap of all of it.
    any_cost = Standing(Target(1.0), deadline)
    minimise(model, any_cost, seed)
    return any_cost.bound < np.inf, any_cost.solution


def _weighted(model: Model, weights: Floats, deadline: Deadline, seed: int) -> Served:
    roles, total = len(model.pairs), float(weights.sum())
    normal = weights / total if total > 0.0 else np.full(roles, 1.0 / max(1, roles))
    standing = Standing(Target(0.0, EXACT), deadline)
    pairs = PairSearch(model, "weighted", normal, standing, seed)
    pairs.tighten()
    prices = pairs.relaxed[0] if pairs.relaxed is not None else pairs.root.prices
    mixes = Decomposition(
        model, normal, standing, rent=0.0, partial=True, serve_all=False, seed=seed
    )
    if not standing.done:
        mixes.converge(prices)
        mixes.integer(50)
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
    return Served(standing.solution, fraction, achieved, most, prices, statistics)


def served_shares(model: Model, solution: Solution) -> Floats:
    """Return the share of each role's demand that is served (an instance counts for all of it at most)."""
    share = np.zeros(len(model.pairs))
    for role, started in enumerate(solution.started):
        pairs = model.pairs[role]
        index = pairs.find(started.keys(), model.regions)
        share[role] = pairs.share[index] @ np.array(list(started.values()), np.float64)
        share[role] += model.kept[role].pairs.share @ solution.kept[role]
    return np.minimum(1.0, share)
