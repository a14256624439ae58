"""Search over single instances: column generation, cuts, and integer solves over promising pairs.

It works at any scale and gives good prices to start from; where a role takes few instances,
`decomposition` is far stronger. Column generation finds prices for which the Lagrangian bound
(`relaxation`) is strong; pairs that cannot be part of anything better than the incumbent are never
looked at again; integer solves over the most promising pairs give incumbents. If a solve over all pairs
of slack at most s proves b, then no allocation costs less than min(b, bound + s): the others use a pair
of larger slack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from atoll.plan.solvers.columns import Model
from atoll.plan.solvers.lp import LpResult
from atoll.plan.solvers.master import Master
from atoll.plan.solvers.relaxation import (
    Evaluation,
    Goal,
    Prices,
    cheapest_rents,
    evaluate,
    offers_part,
    slacks,
)
from atoll.plan.solvers.standing import Standing

Floats = NDArray[np.float64]

_UNSERVED = 1e-7
_CUT_ROUNDS = 12
_STAGES = (400, 1500, 5000, 15000)
_SEEDS = 20
_HOPELESS = 1


class PairSearch:
    """One minimisation in steps: `tighten` to a bound and prices, `close` the gap.

    `unserved[r]` is the price of leaving role r unserved (for a weighted goal: its weight).
    """

    def __init__(
        self, model: Model, goal: Goal, unserved: Floats, standing: Standing, seed: int
    ) -> None:
        self.model, self.goal, self.standing = model, goal, standing
        self.master = Master(model, goal, unserved, seed)
        self.mips = 0
        self.evaluations = 0
        self.relaxed: tuple[Prices, Floats] | None = None
        self._weights = unserved
        rent = 1.0 if goal == "cost" else 0.0
        self.root = evaluate(model, goal, Prices(cheapest_rents(model), rent=rent), unserved)
        self._rate(self.root)
        self._add_below(np.inf, _SEEDS * len(model.pairs))

    def _rate(self, evaluation: Evaluation) -> None:
        self.evaluations += 1
        if evaluation.value > self.root.value:
            self.root = evaluation
        self.standing.prove(evaluation.value)

    def tighten(self) -> bool:
        """Solve the relaxation and cut it; return whether even that cannot serve all demand."""
        for _ in range(_CUT_ROUNDS):
            result = self.master.generate(self.standing.deadline.left)
            if result.status != "optimal":
                return False
            prices = self.master.prices(result)
            if self.relaxed is None:
                self.relaxed = prices, self.master.demand_duals(result)
            left = self.master.unserved(result).max(initial=0.0)
            if self.goal == "cost" and left > _UNSERVED:
                return True
            evaluation = evaluate(self.model, self.goal, prices, self._weights)
            self._rate(evaluation)
            if self.standing.done or not self._cut(result, evaluation):
                return False
        return False

    def _cut(self, result: LpResult, evaluation: Evaluation) -> bool:
        """Cut off the relaxed solution where a role's cover costs more than the relaxation thinks."""
        if self.goal != "cost":
            return False
        added = False
        for role, covered in enumerate(evaluation.covered):
            value = float(covered.additive[-1])
            if np.isfinite(value) and value > self.master.role_value(result, role) + 1e-4 * value:
                self.master.add_cut(role, covered.additive)
                added = True
        return added

    def lift(self, prices: Prices, floors: Sequence[float]) -> None:
        """Take over prices at which each role is known to cost at least its floor."""
        evaluation = evaluate(self.model, self.goal, prices, self._weights)
        covered = tuple(
            replace(c, floor=floor) for c, floor in zip(evaluation.covered, floors, strict=True)
        )
        value = offers_part(self.model.supply, self.model.limits, prices)
        value += sum(c.value for c in covered)
        self._rate(replace(evaluation, covered=covered, value=value))

    def survivors(self) -> int:
        """Return how many pairs are not excluded yet."""
        limit = self.standing.wanted - self.root.value
        return sum(int(np.count_nonzero(own <= limit)) for own in slacks(self.model, self.root))

    def _add_below(self, limit: float, most: int) -> None:
        own = slacks(self.model, self.root)
        limit = min(limit, _kth(own, most))
        for role, slack in enumerate(own):
            self.master.add(role, np.flatnonzero(slack <= limit))

    def close(self, stages: int = len(_STAGES) + 1) -> None:
        """Integer solves over more and more pairs until the target is proven, or stages or time run out."""
        standing = self.standing
        own = slacks(self.model, self.root)
        for stage, most in enumerate((*_STAGES, None)[:stages]):
            needed = standing.wanted - self.root.value
            limit = min(needed, np.inf if most is None else _kth(own, most))
            last = most is None or limit >= needed
            for role, slack in enumerate(own):
                self.master.add(role, np.flatnonzero(slack <= limit))
            self.mips += 1
            answer = self.master.solve_pairs(
                time_limit_s=standing.deadline.left,
                gap=0.5 * standing.target.gap,
                absolute_gap=0.5 * standing.target.absolute,
                start=standing.solution,
                node_limit=None if last else 100 * 2**stage,
            )
            if answer.solution is not None:
                standing.offer(answer.solution, answer.objective)
            # Pairs left out cost at least the root bound plus the limit.
            standing.prove(min(answer.bound, self.root.value + limit))
            given_up = standing.solution is None and stage >= _HOPELESS
            if last or given_up or standing.done:
                return


def _kth(own: list[Floats], most: int) -> float:
    """The slack that `most` pairs do not exceed."""
    joined = np.concatenate(own) if own else np.zeros(0)
    if len(joined) <= most:
        return np.inf
    return float(np.partition(joined, most - 1)[most - 1])
