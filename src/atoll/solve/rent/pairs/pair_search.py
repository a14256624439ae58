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

from atoll.solve.lp import LpResult
from atoll.solve.rent.columns import RentModel
from atoll.solve.rent.pairs.master import Master
from atoll.solve.rent.relaxation import (
    Evaluation,
    Goal,
    Prices,
    cheapest_rents,
    evaluate,
    offers_part,
    slacks,
)
from atoll.solve.rent.standing import Incumbent

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_UNSERVED = 1e-7
_CUT_ROUNDS = 12
_STAGES = (400, 1500, 5000, 15000)
_SEEDS = 20
_HOPELESS = 1
_PAIRS_PER_S = 2000
"""Pairs for which an integer solve needs a second before it first looks at the time."""


class PairSearch:
    """One minimisation in steps: `tighten` to a bound and prices, `close` the gap.

    `unserved[r]` is the price of leaving role r unserved (for a weighted goal: its weight).
    """

    def __init__(
        self, model: RentModel, goal: Goal, unserved: Floats, standing: Incumbent, seed: int
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
        self._add(_lowest(slacks(model, self.root), np.inf, _SEEDS * len(model.pairs))[0])

    def _rate(self, evaluation: Evaluation) -> None:
        self.evaluations += 1
        if evaluation.value > self.root.value:
            self.root = evaluation
        self.standing.prove(evaluation.value)

    def relax(self) -> LpResult:
        """Solve the linear relaxation; its duals are kept the first time, before any cut."""
        result = self.master.generate(self.standing.left)
        if self.relaxed is None and result.status == "optimal":
            self.relaxed = self.master.prices(result), self.master.demand_duals(result)
        return result

    def tighten(self) -> bool:
        """Solve the relaxation and cut it; return whether even that cannot serve all demand."""
        for _ in range(_CUT_ROUNDS):
            result = self.relax()
            if result.status != "optimal":
                return False
            prices = self.master.prices(result)
            left = self.master.unserved_shares(result).max(initial=0.0)
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
        return sum(int(np.count_nonzero(slack <= limit)) for slack in slacks(self.model, self.root))

    def _add(self, chosen: list[Ints]) -> None:
        for role, pairs in enumerate(chosen):
            self.master.add(role, pairs)

    def close(self, stages: int = len(_STAGES) + 1) -> None:
        """Integer solves over more and more pairs until the target is proven, or stages or time run out."""
        standing = self.standing
        role_slacks = slacks(self.model, self.root)
        for stage, most in enumerate((*_STAGES, None)[:stages]):
            needed = standing.wanted - self.root.value
            chosen, limit = _lowest(role_slacks, needed, most)
            last = limit >= needed
            if sum(len(pairs) for pairs in chosen) > _PAIRS_PER_S * standing.left:
                return
            self._add(chosen)
            # What the incumbent uses stays in, for the solve starts from it.
            self.master.admit([slack <= needed + standing.spare for slack in role_slacks])
            self.mips += 1
            answer = self.master.solve_pairs(
                time_limit_s=standing.left,
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


def _lowest(role_slacks: list[Floats], limit: float, most: int | None) -> tuple[list[Ints], float]:
    """Return per role the pairs of slack at most `limit`, `most` of them, and what others have at least."""
    joined = np.concatenate([np.zeros(0), *role_slacks])
    role = np.repeat(np.arange(len(role_slacks)), [len(slack) for slack in role_slacks])
    place = np.concatenate(
        [np.zeros(0, np.int64), *(np.arange(len(slack)) for slack in role_slacks)]
    )
    chosen = np.flatnonzero(joined <= limit)
    if most is not None and len(chosen) > most:
        chosen = chosen[np.argsort(joined[chosen], kind="stable")]
        limit = float(joined[chosen[most]])
        chosen = np.sort(chosen[:most])
    return [place[chosen[role[chosen] == r]] for r in range(len(role_slacks))], limit
