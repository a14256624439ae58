"""Placements for what may come: the least mean cost of stage 2 over scenarios, asked for directly.

A cost-minimal placement breaks when delays, errors or arrivals turn out larger; a greedy one may waste the
right GPUs by luck. Here the uncertainty is told, scenarios are drawn from it, and placements are judged by
what they cost on average once each scenario routes anew (`operate`). Candidates come from robust
counterparts: the nominal problem with delays, errors and arrivals raised by a share of their spread (a
budget of uncertainty, from none to all of it), solved by any solver. The best of them is then changed step
by step while the mean falls: types get a further route or lose one, pairs another configuration, pairs are
added from other candidates or given up. Every placement keeps (5b) to (5k) at nominal values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from atoll.solve.joint.joint_check import violations
from atoll.solve.joint.joint_problem import Bools, Ints, JointAnswer, JointProblem, cost_of
from research.joint.stage2 import Scenarios, draw_scenarios, evaluate, reroute

RobustSolver = Callable[[JointProblem], JointAnswer]

_RAISED = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of the spread by which counterparts are raised."""
_EVALUATIONS = 1200
"""How many placements are judged at most."""
_BETTER = 1e-6


@dataclass(frozen=True)
class Uncertainty:
    """What may come: shares by which delays, errors and arrivals spread, and a factor on delays and errors.

    `stresses` are equally likely; scenarios are drawn for each of them.
    """

    delay: float = 0.25
    error: float = 0.25
    rate: float = 0.2
    stresses: tuple[float, ...] = (1.0,)

    def draw(self, problem: JointProblem, count: int, seed: int) -> Scenarios:
        """Draw about `count` scenarios."""
        each = max(1, count // len(self.stresses))
        parts = [
            draw_scenarios(
                problem,
                each,
                seed + at,
                delay=self.delay,
                error=self.error,
                rate=self.rate,
                stress=stress,
            )
            for at, stress in enumerate(self.stresses)
        ]
        return Scenarios(
            np.concatenate([part.delay for part in parts]),
            np.concatenate([part.error for part in parts]),
            np.concatenate([part.rate for part in parts]),
        )

    def counterparts(self, problem: JointProblem) -> Iterator[JointProblem]:
        """Yield the problem with values raised by more and more of what may come."""
        for stress in sorted({1.0, *self.stresses}):
            for share in _RAISED:
                yield replace(
                    problem,
                    delay=problem.delay * stress * (1.0 + share * self.delay),
                    error=problem.error * stress * (1.0 + share * self.error),
                    rate=problem.rate * (1.0 + share * self.rate),
                )


@dataclass(frozen=True)
class RobustAnswer:
    """A placement, its mean stage-2 cost over the scenarios it was found with, and the work it took."""

    answer: JointAnswer
    mean: float
    evaluations: int


def plan_robustly(
    problem: JointProblem,
    solver: RobustSolver,
    uncertainty: Uncertainty,
    *,
    scenarios: int = 96,
    seed: int = 0,
    evaluations: int = _EVALUATIONS,
) -> RobustAnswer:
    """Return the placement of least mean stage-2 cost that was found with so many evaluations."""
    drawn = uncertainty.draw(problem, scenarios, seed)
    search = _RobustSearch(problem, drawn, evaluations)
    candidates = [solver(part) for part in uncertainty.counterparts(problem)]
    for candidate in candidates:
        search.offer(candidate)
    search.descend(candidates)
    return RobustAnswer(search.best, search.mean, search.evaluations)


class _RobustSearch:
    """The best placement so far, and the scenarios that judge."""

    def __init__(self, problem: JointProblem, drawn: Scenarios, evaluations: int) -> None:
        self.problem, self.drawn, self.most = problem, drawn, evaluations
        types, models, tiers, _ = problem.shape
        nothing = np.zeros((types, models, tiers))
        self.best = JointAnswer(
            np.full((models, tiers), -1, np.int64), nothing, nothing > 0.0, np.ones(types)
        )
        self.mean = cost_of(problem, self.best).total
        self.evaluations = 0
        self._seen: set[bytes] = set()

    def offer(self, candidate: JointAnswer) -> bool:
        """Judge a placement; return whether it is the best so far."""
        key = candidate.config.tobytes() + candidate.placed.tobytes()
        if key in self._seen or self.evaluations >= self.most:
            return False
        self._seen.add(key)
        settled = self._settle(candidate)
        if settled is None:
            return False
        self.evaluations += 1
        mean = evaluate(self.problem, settled, self.drawn).mean
        if mean >= self.mean * (1.0 - _BETTER):
            return False
        self.best, self.mean = settled, mean
        return True

    def _settle(self, candidate: JointAnswer) -> JointAnswer | None:
        """Route at nominal values; None where a constraint of stage 1 is broken."""
        problem = self.problem
        gpus = np.where(candidate.config >= 0, problem.gpus[np.maximum(candidate.config, 0)], 0)
        stored = candidate.placed.sum(axis=(0, 2)) @ problem.weights_gb
        paid = problem.horizon_h * (
            float(gpus.sum(axis=0) @ problem.gpu_usd) + problem.storage_usd * float(stored)
        )
        if paid > problem.budget or stored > problem.storage_gb:
            return None
        settled = reroute(problem, candidate)
        return None if violations(problem, settled) else settled

    def descend(self, candidates: list[JointAnswer]) -> None:
        """Take the first change that helps, again and again, until none does or the work is done."""
        known = _known_configs(candidates)
        improved = True
        while improved and self.evaluations < self.most:
            improved = False
            for config, placed in self._changes(known):
                changed = replace(self.best, config=config, placed=placed)
                if self.offer(changed):
                    improved = True
                    break

    def _changes(self, known: list[tuple[int, int, int]]) -> Iterator[tuple[Ints, Bools]]:
        config, placed = self.best.config, self.best.placed
        active = list(zip(*np.nonzero(config >= 0), strict=True))
        # A further route for a type, or one fewer.
        for j, k in active:
            for i in range(len(placed)):
                flipped = placed.copy()
                flipped[i, j, k] = not placed[i, j, k]
                yield config, flipped
        # Another configuration of a pair.
        for j, k in active:
            for option in np.nonzero(self.problem.allowed[k])[0]:
                if option != config[j, k]:
                    other = config.copy()
                    other[j, k] = option
                    yield other, placed
        # A pair given up.
        for j, k in active:
            yield _without(config, placed, j, k)
        # A pair that other candidates use, for all types or in place of another pair.
        for j, k, c in known:
            if config[j, k] >= 0:
                continue
            yield _with(config, placed, j, k, c)
            for p, q in active:
                yield _with(*_without(config, placed, p, q), j, k, c, like=placed[:, p, q])


def _known_configs(candidates: list[JointAnswer]) -> list[tuple[int, int, int]]:
    """Pairs and configurations that candidates use, each once, in order."""
    found = {
        (int(j), int(k), int(candidate.config[j, k]))
        for candidate in candidates
        for j, k in zip(*np.nonzero(candidate.config >= 0), strict=True)
    }
    return sorted(found)


def _without(config: Ints, placed: Bools, j: int, k: int) -> tuple[Ints, Bools]:
    config, placed = config.copy(), placed.copy()
    config[j, k] = -1
    placed[:, j, k] = False
    return config, placed


def _with(
    config: Ints, placed: Bools, j: int, k: int, c: int, like: Bools | None = None
) -> tuple[Ints, Bools]:
    config, placed = config.copy(), placed.copy()
    config[j, k] = c
    placed[:, j, k] = True if like is None else like
    return config, placed
