"""How often a plan holds in scenarios that it was not chosen with.

Some of the scenarios are simulated, service by service; of all of them load tells in which the plan holds
(`trial`). What load gets wrong where it can be compared is taken off what it says of all: the share in which
the plan holds is told(all) + mean over the simulated of (simulated - told), which is right on average however
wrong load is, and the surer the better load tells.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from atoll.prove.robust.trial import joint

if TYPE_CHECKING:
    from atoll.plan.plan import Plan
    from atoll.plan.problem import Problem
    from atoll.prove.robust.scenarios import ScenarioSet
    from atoll.prove.robust.trial import ScenarioLab

_SURE = 1.96
_MIN_ERROR = 0.5
"""Scenarios that may have gone the other way, at the least: nobody is sure of twenty that all hold."""


@dataclass(frozen=True)
class ScenarioVerdict:
    """How often a plan holds in fresh scenarios, with its 95 % confidence interval, and what requests keep.

    `simulated` is the share that hold of those simulated. `unserved_per_hour` are requests that do not keep
    their promises, per hour.
    """

    holds: float
    low: float
    high: float
    simulated: float
    requests_kept: float
    unserved_per_hour: float
    kept_by_service: dict[str, float]


def judge_plan_in(
    plan: Plan, problem: Problem, lab: ScenarioLab, fresh: ScenarioSet, simulated: int
) -> ScenarioVerdict:
    """Return how a plan fares in fresh scenarios, of which the first so many are simulated."""
    asked = [service for service in problem.services if service.rate_per_s > 0.0]
    trials = [lab.trial(plan, service.name) for service in asked]
    kept = np.ones((len(trials), simulated))
    for row, trial in enumerate(trials):
        lab.look(trial, fresh)
        for at in range(simulated):
            kept[row, at] = lab.simulate(trial, fresh, at)
    told = joint([trial.told(fresh.name) for trial in trials]).astype(float)
    enough = kept >= np.array([[trial.target] for trial in trials])
    seen = np.all(enough, axis=0).astype(float)
    difference = seen - told[:simulated]
    holds = float(np.clip(told.mean() + difference.mean(), 0.0, 1.0))
    error = _error(told, difference)
    rates = np.array(
        [
            [s.rate_per_s * fresh.scenarios[at].demand[s.name] for at in range(simulated)]
            for s in asked
        ]
    )
    lost = float((rates * (1.0 - kept)).sum(axis=0).mean())
    return ScenarioVerdict(
        holds=holds,
        low=max(0.0, holds - _SURE * error),
        high=min(1.0, holds + _SURE * error),
        simulated=float(seen.mean()),
        requests_kept=1.0 - lost / float(rates.sum(axis=0).mean()),
        unserved_per_hour=3600.0 * lost,
        kept_by_service={
            service.name: float(row.mean()) for service, row in zip(asked, enough, strict=True)
        },
    )


def _error(told: np.ndarray, difference: np.ndarray) -> float:
    """The standard error of the share: of what load tells, and of how far off it is."""
    of_all = float(told.var()) / len(told)
    min_variance = (_MIN_ERROR / len(difference)) ** 2
    return math.sqrt(of_all + max(float(difference.var(ddof=1)) / len(difference), min_variance))
