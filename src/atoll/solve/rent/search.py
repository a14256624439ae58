"""The cheapest allocation that meets all demand: which search when.

Prices at which nodes are rented settle it where nodes are plenty: each role takes its cheapest mix. If
these do not fit together, the relaxation over single instances gives prices, those over mixes better
ones; what is still open is settled by listing mixes (`decomposition`) or, where there are too many of
them, over single instances (`pair_search`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll.solve.rent.columns import RentModel, Solution
from atoll.solve.rent.mixes.decomposition import Decomposition
from atoll.solve.rent.pairs.pair_search import PairSearch
from atoll.solve.rent.relaxation import Prices, cheapest_rents, price_of_all
from atoll.solve.rent.standing import Incumbent
from atoll.solve.rent.types import Statistics

Floats = NDArray[np.float64]

_DEAR = 100.0
_DEAR_MIX = 3.0
_HAIR = 1e-9


@dataclass(frozen=True)
class SearchOutcome:
    """How the search ended; `short`: not even the linear relaxation serves all demand.

    `prices` and `demand` (of each role's whole demand) are duals of that relaxation.
    """

    short: bool
    prices: Prices
    demand: Floats
    statistics: Statistics


def minimise(model: RentModel, standing: Incumbent, seed: int) -> SearchOutcome:
    """Search for the cheapest allocation from where `standing` is, and report to it."""
    standing.ceiling = price_of_all(model) * (1.0 + _HAIR)
    prices = Prices(cheapest_rents(model))
    mixes = Decomposition(model, np.zeros(len(model.pairs)), standing, seed=seed)
    mixes.evaluate(prices)
    if not standing.done:
        mixes.solve_integer(20)
    if standing.done and (standing.solution is None or _has_room(model, standing.solution)):
        rates = np.array([p.rate for p in mixes.root.priced])
        return SearchOutcome(
            standing.bound == np.inf, prices, rates, _statistics(model, mixes, None)
        )
    dear = _DEAR * np.maximum(1.0, np.array([p.least for p in mixes.root.priced]))
    mixes.set_unserved(_DEAR_MIX / _DEAR * dear)
    pairs = PairSearch(model, "cost", dear, standing, seed)
    if standing.done:
        pairs.relax()
    short = not standing.done and pairs.tighten()
    if not (short or standing.done):
        mixes.converge(pairs.root.prices)
        if not standing.done:
            mixes.dive()
            mixes.solve_integer(50)
        mixes.close()
    if not (short or standing.done):
        pairs.lift(mixes.root.prices, [p.least for p in mixes.root.priced])
        pairs.close()
    relaxed, demand = pairs.relaxed or (prices, np.zeros(len(model.pairs)))
    return SearchOutcome(short, relaxed, demand, _statistics(model, mixes, pairs))


def glance(model: RentModel, standing: Incumbent, prices: Prices, seed: int) -> Prices:
    """Look quickly for any allocation, or for a proof that there is none; return the best prices.

    `prices` are those to start from.
    """
    standing.ceiling = price_of_all(model) * (1.0 + _HAIR)
    mixes = Decomposition(model, np.zeros(len(model.pairs)), standing, seed=seed)
    mixes.evaluate(prices)
    mixes.set_unserved(_DEAR_MIX * np.maximum(1.0, np.array([p.least for p in mixes.root.priced])))
    if not standing.done:
        mixes.converge(prices)
    if not standing.done:
        mixes.dive()
    if not standing.done:
        mixes.solve_integer(100)
    return mixes.root.prices


def _has_room(model: RentModel, solution: Solution) -> bool:
    """Whether more could be had of everything that is rented, so that prices are those of the market."""
    full = (solution.rented > 0) & (solution.rented >= model.supply.available)
    limits = model.limits
    free = limits.budget is None and limits.spot_share is None and limits.max_nodes is None
    return free and not bool(full.any())


def _statistics(model: RentModel, mixes: Decomposition, pairs: PairSearch | None) -> Statistics:
    total = sum(len(p) for p in model.pairs)
    if pairs is None:
        return Statistics(pairs=total, mixes=mixes.mixes, mips=mixes.mips)
    return Statistics(
        rounds=pairs.master.rounds + mixes.rounds,
        columns=pairs.master.columns,
        cuts=pairs.master.cuts,
        pairs=total,
        survivors=pairs.survivors(),
        mixes=mixes.mixes,
        mips=mixes.mips + pairs.mips,
    )
