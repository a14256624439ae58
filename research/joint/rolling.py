"""A day of drifting demand: one placement kept, or planned anew in every window.

Arrivals of each type walk on their own, lambda(t + 1) = lambda(t) exp(N(0, sigma)), from the nominal ones in
the first window. A window's cost is stage 2's for the demand seen in it, times its share of the horizon:
GPUs and stored weights that are placed in a window are paid for that window only (1 / 288 of their price for
24 h), data, delay and unserved demand likewise. A change of placement costs nothing by itself, and GPUs given
back are not paid on: the paper says nothing of either. Solvers see the demand of the window as if it were
the whole horizon's, budget included; a placement that is kept may leave the budget when its demand rises,
by what its data cost more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from atoll.core.errors import UsageError
from atoll.core.rng import stream
from atoll.solve.joint.joint_problem import Floats, JointAnswer, JointProblem
from research.joint.stage2 import UNSERVED, demand_only, evaluate

WINDOWS = 288
"""Windows of five minutes in 24 h."""

JointSolver = Callable[[JointProblem], JointAnswer]


@dataclass(frozen=True)
class RolledCost:
    """USD over the horizon: mean and standard deviation over trials, each trial's cost.

    `violation_rate` is the share of (trial, window, type) with more than 1 % unserved; `changes` the mean
    number of windows in a trial whose placement differs from the one before.
    """

    mean: float
    std: float
    each: Floats
    violation_rate: float
    changes: float


def demand_walks(
    problem: JointProblem, sigma: float, *, trials: int = 30, windows: int = WINDOWS, seed: int = 0
) -> Floats:
    """Return factors on the arrivals, [trial, window, type], 1 in the first window."""
    if trials < 1 or windows < 1:
        raise UsageError(
            f"trials and windows: at least one each is needed, got {trials}, {windows}"
        )
    types = problem.shape[0]
    steps = stream(seed, "choice", "walk").normal(0.0, 1.0, (trials, windows, types))
    steps[:, 0] = 0.0
    return np.asarray(np.exp(sigma * np.cumsum(steps, axis=1)))


def static(problem: JointProblem, answer: JointAnswer, walks: Floats) -> RolledCost:
    """Keep one placement for all windows of all walks."""
    trials, windows, types = walks.shape
    cost = evaluate(problem, answer, demand_only(walks.reshape(-1, types)))
    return _rolled(
        cost.each.reshape(trials, windows).mean(axis=1), cost.violation_rate, changes=0.0
    )


def rolling(
    problem: JointProblem,
    solver: JointSolver,
    walks: Floats,
    *,
    first: JointAnswer | None = None,
) -> RolledCost:
    """Solve anew in every window; take the new placement only where it is cheaper for the demand seen.

    `first` is the placement of the first window; without it the solver's for the nominal demand.
    """
    trials, windows, types = walks.shape
    start = first if first is not None else solver(problem)
    totals = np.zeros(trials)
    unserved = changes = 0
    for trial in range(trials):
        held = start
        for window in range(windows):
            seen = walks[trial, window]
            now = demand_only(seen[None])
            cost = evaluate(problem, held, now)
            if window > 0:
                other = solver(replace(problem, rate=problem.rate * seen))
                offered = cost if _same(other, held) else evaluate(problem, other, now)
                if offered.mean < cost.mean - 1e-9:
                    held, cost = other, offered
                    changes += 1
            totals[trial] += cost.mean / windows
            unserved += int((cost.unmet > UNSERVED).sum())
    return _rolled(totals, unserved / (trials * windows * types), changes=changes / trials)


def _same(one: JointAnswer, two: JointAnswer) -> bool:
    """Whether two answers place the same; how they route is stage 2's."""
    return np.array_equal(one.config, two.config) and np.array_equal(one.placed, two.placed)


def _rolled(each: Floats, violation_rate: float, *, changes: float) -> RolledCost:
    std = float(each.std(ddof=1)) if len(each) > 1 else 0.0
    return RolledCost(float(each.mean()), std, each, violation_rate, changes)
