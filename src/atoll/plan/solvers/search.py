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

from atoll.plan.solvers.allocation_types import Statistics
from atoll.plan.solvers.columns import Model
from atoll.plan.solvers.decomposition import Decomposition
from atoll.plan.solvers.pair_search import PairSearch
from atoll.plan.solvers.relaxation import Prices, cheapest_rents
from atoll.plan.solvers.standing import Standing

Floats = NDArray[np.float64]

_DEAR = 100.0


@dataclass(frozen=True)
class Outcome:
    """How the search ended; `short`: not even the linear relaxation serves all demand.

    `prices` and `demand` (of each role's whole demand) are duals of that relaxation.
    """

    short: bool
    prices: Prices
    demand: Floats
    statistics: Statistics


def minimise(model: Model, standing: Standing, seed: int) -> Outcome:
    """Search for the cheapest allocation from where `standing` is, and report to it."""
    prices = Prices(cheapest_rents(model))
    mixes = Decomposition(model, np.zeros(len(model.pairs)), standing, seed=seed)
    mixes.evaluate(prices)
    if not standing.done:
        mixes.integer(20)
    if standing.done:
        rates = np.array([p.rate for p in mixes.root.priced])
        return Outcome(standing.bound == np.inf, prices, rates, _statistics(model, mixes, None))
    dear = _DEAR * np.maximum(1.0, np.array([p.least for p in mixes.root.priced]))
    mixes.set_unserved(dear)
    pairs = PairSearch(model, "cost", dear, standing, seed)
    short = pairs.tighten()
    if not (short or standing.done):
        mixes.converge(pairs.root.prices)
        if not standing.done:
            mixes.integer(50)
        mixes.close()
    if not (short or standing.done):
        pairs.lift(mixes.root.prices, [p.least for p in mixes.root.priced])
        pairs.close()
    relaxed, demand = pairs.relaxed or (prices, np.zeros(len(model.pairs)))
    return Outcome(short, relaxed, demand, _statistics(model, mixes, pairs))


def _statistics(model: Model, mixes: Decomposition, pairs: PairSearch | None) -> Statistics:
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
