"""The best allocation for a goal, with a bound that holds over all templates and regions.

Column generation finds prices for which the Lagrangian bound (`relaxation`) is strong; pairs that cannot
be part of anything better than the incumbent are never looked at again; integer solves over the most
promising pairs give incumbents. If a solve over all pairs of slack at most s proves b, then no allocation
costs less than min(b, bound + s): the others use a pair of larger slack.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll.plan.solvers.allocation_types import Log, Statistics
from atoll.plan.solvers.columns import Model
from atoll.plan.solvers.lp import LpResult
from atoll.plan.solvers.master import Answer, Master, Solution
from atoll.plan.solvers.relaxation import Evaluation, Goal, Prices, evaluate, slacks

Floats = NDArray[np.float64]

_UNSERVED = 1e-7
_CUT_ROUNDS = 12
_STAGES = (400, 1500, 5000, 15000)
_QUICK = 2000
_HOPELESS = 1


class Deadline:
    """Wall-clock time left."""

    def __init__(self, seconds: float) -> None:
        self._start = time.perf_counter()
        self._end = self._start + seconds

    @property
    def passed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start

    @property
    def left(self) -> float:
        """Seconds left, not below 0."""
        return max(0.0, self._end - time.perf_counter())


@dataclass(frozen=True)
class Target:
    """When to stop: a gap relative to the objective or an absolute one, whichever is reached first."""

    gap: float
    absolute: float = 1e-9

    def spare(self, objective: float) -> float:
        """Return how far below the objective a bound may stay."""
        return max(self.gap * abs(objective), self.absolute)


@dataclass(frozen=True)
class Outcome:
    """What the search reached; `short`: not even whole demand in the linear relaxation can be served.

    `prices` and `demand` are duals of the linear relaxation (of each role's whole demand).
    """

    solution: Solution | None
    objective: float
    bound: float
    short: bool
    prices: Prices
    demand: Floats
    statistics: Statistics


def cheapest_rents(model: Model) -> Floats:
    """Return the lowest price on offer in each cell (0 where nothing is)."""
    rent = np.full(model.cells, np.inf)
    some = model.supply.available > 0
    np.minimum.at(rent, model.offer_cell[some], model.supply.usd[some])
    return np.where(np.isfinite(rent), rent, 0.0)


class Search:
    """One minimisation; `run` carries it to its target or the deadline."""

    def __init__(
        self,
        model: Model,
        goal: Goal,
        weights: Floats,
        target: Target,
        deadline: Deadline,
        *,
        seed: int = 0,
        log: Log | None = None,
    ) -> None:
        self._model, self._goal, self._weights = model, goal, weights
        self._target, self._deadline = target, deadline
        self._seed, self._log = seed, log
        self._solution: Solution | None = None
        self._objective = np.inf
        self._bound = -np.inf
        self._mips = 0
        self._evaluations = 0
        self._relaxed: tuple[Prices, Floats] | None = None
        rent = 1.0 if goal == "cost" else 0.0
        self._root = self._evaluate(Prices(cheapest_rents(model), rent=rent))

    def run(self, start: tuple[Solution, float] | None = None) -> Outcome:
        """Search from a known solution (with its objective) if there is one."""
        if start is not None:
            self._solution, self._objective = start
        master = self._new_master()
        short = False
        if self._goal == "cost":
            self._try_running(master)
            self._add_below(master, self._target.spare(self._root.value), _QUICK)
            self._offer(self._integer(master, 20))
        else:
            self._add_below(master, np.inf, 20 * len(self._model.pairs))
        if not self._done():
            short = self._tighten(master)
        if not (short or self._done()):
            self._close(master)
        return self._outcome(master, short)

    def _outcome(self, master: Master, short: bool) -> Outcome:
        statistics = Statistics(
            rounds=master.rounds,
            columns=master.columns,
            cuts=master.cuts,
            pairs=sum(len(p) for p in self._model.pairs),
            survivors=sum(
                int(np.count_nonzero(own <= self._cutoff()))
                for own in slacks(self._model, self._root)
            ),
            mips=self._mips,
            bound_evaluations=self._evaluations,
        )
        prices, demand = self._relaxed or (
            self._root.prices,
            np.array([c.rate for c in self._root.covered]),
        )
        bound = min(self._bound, self._objective)
        return Outcome(self._solution, self._objective, bound, short, prices, demand, statistics)

    def _new_master(self) -> Master:
        if self._goal != "cost":
            return Master(self._model, self._goal, self._weights, self._seed)
        values = np.array([c.value for c in self._root.covered])
        dear = 100.0 * np.maximum(1.0, np.where(np.isfinite(values), values, 0.0))
        return Master(self._model, "cost", dear, self._seed)

    def _evaluate(self, prices: Prices) -> Evaluation:
        self._evaluations += 1
        evaluation = evaluate(self._model, self._goal, prices, self._weights)
        if self._evaluations == 1 or evaluation.value > self._root.value:
            self._root = evaluation
        self._raise(evaluation.value)
        return evaluation

    def _raise(self, bound: float) -> None:
        if bound > self._bound:
            self._bound = bound
            self._report()

    def _offer(self, answer: Answer) -> None:
        self._mips += 1
        if answer.solution is not None and answer.objective < self._objective:
            self._solution, self._objective = answer.solution, answer.objective
            self._report()

    def _report(self) -> None:
        if self._log is not None:
            self._log(self._deadline.passed, self._objective, min(self._bound, self._objective))

    def _done(self) -> bool:
        if self._deadline.left <= 0.0:
            return True
        found = bool(np.isfinite(self._objective))
        return found and self._objective - self._bound <= self._target.spare(self._objective)

    def _integer(self, master: Master, nodes: int | None) -> Answer:
        return master.solve_pairs(
            time_limit_s=self._deadline.left,
            gap=0.5 * self._target.gap,
            absolute_gap=0.5 * self._target.absolute,
            start=self._solution,
            node_limit=nodes,
        )

    def _try_running(self, master: Master) -> None:
        """What runs now is worth keeping if it is good enough, so look at it alone first."""
        if any(len(kept.pairs) for kept in self._model.kept):
            self._offer(self._integer(master, 20))

    def _tighten(self, master: Master) -> bool:
        """Solve the relaxation and cut it; return whether even that cannot serve all demand."""
        for _ in range(_CUT_ROUNDS):
            result = master.generate(self._deadline.left)
            if result.status != "optimal":
                return False
            prices = master.prices(result)
            if self._relaxed is None:
                self._relaxed = prices, master.demand_duals(result)
            if self._goal == "cost" and self._solution is None:
                if master.unserved(result).max(initial=0.0) > _UNSERVED:
                    return True
            evaluation = self._evaluate(prices)
            if self._done() or not self._cut(master, result, evaluation):
                return False
        return False

    def _cut(self, master: Master, result: LpResult, evaluation: Evaluation) -> bool:
        """Cut off the relaxed solution where a role's cover costs more than the relaxation thinks."""
        if self._goal != "cost":
            return False
        added = False
        for role, covered in enumerate(evaluation.covered):
            value = float(covered.additive[-1])
            if np.isfinite(value) and value > master.role_value(result, role) + 1e-4 * value:
                master.add_cut(role, covered.additive)
                added = True
        return added

    def _cutoff(self) -> float:
        """Slack at which a pair can no longer be part of anything worth finding."""
        if np.isinf(self._objective):
            return np.inf
        return self._objective - self._target.spare(self._objective) - self._root.value

    def _add_below(self, master: Master, limit: float, most: int) -> None:
        own = slacks(self._model, self._root)
        limit = min(limit, _kth(own, most))
        for role, slack in enumerate(own):
            master.add(role, np.flatnonzero(slack <= limit))

    def _close(self, master: Master) -> None:
        """Integer solves over more and more pairs until the target is proven or time is up."""
        own = slacks(self._model, self._root)
        for stage, most in enumerate((*_STAGES, None)):
            limit = min(self._cutoff(), np.inf if most is None else _kth(own, most))
            last = most is None or limit >= self._cutoff()
            for role, slack in enumerate(own):
                master.add(role, np.flatnonzero(slack <= limit))
            answer = self._integer(master, None if last else 100 * 2**stage)
            self._offer(answer)
            # Pairs left out cost at least the root bound plus the limit.
            self._raise(min(answer.bound, self._root.value + limit))
            given_up = self._solution is None and stage >= _HOPELESS
            if last or given_up or self._done():
                return


def _kth(own: list[Floats], most: int) -> float:
    """The slack that `most` pairs do not exceed."""
    joined = np.concatenate(own) if own else np.zeros(0)
    if len(joined) <= most:
        return np.inf
    return float(np.partition(joined, most - 1)[most - 1])
