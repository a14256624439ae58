"""When demand cannot be met: serve the most that can be served, then serve that at the least cost.

The most is the largest common fraction of every role's demand, or the largest mean fraction weighted by
priority. Roles that nothing on offer can serve are left out of it. If the common fraction is nil (two
roles need the same node, say) the mean is taken instead: serving some is better than serving none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll.plan.solvers.allocation_types import Log
from atoll.plan.solvers.columns import Model
from atoll.plan.solvers.master import Solution
from atoll.plan.solvers.relaxation import Goal, Prices
from atoll.plan.solvers.search import Deadline, Outcome, Search, Target

Floats = NDArray[np.float64]

EXACT = 1e-4
"""Fractions are proven to this."""
_NOTHING = 1e-9


@dataclass(frozen=True)
class Served:
    """The most that can be served: a solution, per role the fraction to serve, and what is proven of it."""

    solution: Solution | None
    fraction: Floats
    goal: Goal
    achieved: float
    most: float
    prices: Prices
    outcome: Outcome


def most_served(
    model: Model, priority: bool, weights: Floats, deadline: Deadline, *, seed: int, log: Log | None
) -> Served:
    """Return the largest common fraction of demand, or (`priority`) the largest weighted mean fraction."""
    goal: Goal = "weighted" if priority else "common"
    total = float(weights.sum())
    normal = weights / total if total > 0.0 else np.full(len(weights), 1.0 / max(1, len(weights)))
    outcome = Search(
        model, goal, normal, Target(0.0, EXACT), deadline, seed=seed, log=_served_log(log)
    ).run()
    fraction = np.zeros(len(model.pairs))
    if outcome.solution is not None:
        fraction = np.minimum(1.0, served_shares(model, outcome.solution))
        if goal == "common":
            fraction = np.full(len(fraction), fraction.min(initial=1.0))
    if goal == "common" and len(model.pairs) > 1 and fraction.max(initial=0.0) <= _NOTHING:
        return most_served(model, True, weights, deadline, seed=seed, log=log)
    achieved = float(fraction @ normal) if goal == "weighted" else float(fraction.min(initial=1.0))
    most = max(achieved, min(1.0, 1.0 - outcome.bound))
    return Served(outcome.solution, fraction, goal, achieved, most, outcome.prices, outcome)


def served_shares(model: Model, solution: Solution) -> Floats:
    """Return the share of each role's demand a solution serves, instances above all of it counted as all."""
    share = np.zeros(len(model.pairs))
    for role, started in enumerate(solution.started):
        pairs = model.pairs[role]
        index = pairs.find(started.keys(), model.regions)
        share[role] = pairs.share[index] @ np.array(list(started.values()), np.float64)
        share[role] += model.kept[role].pairs.share @ solution.kept[role]
    return share


def _served_log(log: Log | None) -> Log | None:
    # While fractions are sought there is no cost yet to report.
    if log is None:
        return None
    return lambda seconds, _objective, _bound: log(seconds, np.inf, 0.0)
