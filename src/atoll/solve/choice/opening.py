"""Which configurations to open: good sets by exchange, for a first answer to the choice problem.

A set changes by the best addition, exchange or removal until none is cheaper. What a set costs is a small
linear programme (a weight's storage counted by the share that is served from it). Which moves are worth that
is told by a table: with nothing shared between types (no FLOP/s, memory or storage) a type's cheapest routes
use two configurations but for rare cases of three, so its cost is the least over pairs of open ones. Moves
are taken up in the order of that cost, and none that is dearer by it than the best one found.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np

from atoll.solve.choice.candidates import Candidates
from atoll.solve.choice.problem import ChoiceProblem, Floats, Ints
from atoll.solve.lp import INFINITY, LinearProgram, Sparse

_PAIRS = 200
"""Sets of two that are solved, of which the best `_STARTS` are improved."""
_STARTS = 5
_STEPS = 40
_LOOKED_AT = 40
"""Moves of a step that are looked at, at most."""
_SLACK = 1e-9


def open_sets(problem: ChoiceProblem, columns: Candidates, among: Ints) -> list[Ints]:
    """Return distinct sets of candidates (of `among`), those of the least cost first."""
    if not len(among):
        return []
    search = _Exchange(problem, columns, among)
    found: dict[tuple[int, ...], float] = {}
    for start in search.starts():
        chosen, cost = search.run(start)
        if chosen:
            found[chosen] = cost
    order = sorted(found, key=lambda chosen: (found[chosen], chosen))
    return [among[list(chosen)] for chosen in order]


def _pair_costs(problem: ChoiceProblem, columns: Candidates, among: Ints) -> Floats:
    """Return [type, a, b]: what serving a type with a and b costs, unserved rest included, without rent."""
    stock = problem.horizon_h * problem.storage_usd
    number = len(among)
    table = np.empty((problem.shape[0], number, number))
    weights = stock * problem.weights_gb[columns.model[among]]
    for i in range(len(table)):
        delay = columns.delay[among, i]
        unmet = problem.unmet_usd[i]
        gain = unmet - problem.delay_usd[i] * delay - stock * problem.data_stored_gb[i]
        rows = (
            np.ones(number),
            delay / problem.delay_limit[i],
            columns.error[among, i] / problem.error_limit[i],
        )
        single = np.minimum(unmet, unmet + weights - gain * columns.most[among, i])
        best = np.minimum(single[:, None], single[None, :])
        for first, second in combinations(rows, 2):
            whole = first[:, None] * second[None, :] - first[None, :] * second[:, None]
            with np.errstate(divide="ignore", invalid="ignore"):
                left = (second[None, :] - first[None, :]) / whole
                right = (first[:, None] - second[:, None]) / whole
                fits = (left >= 0.0) & (right >= 0.0)
                for row in rows:
                    fits &= row[:, None] * left + row[None, :] * right <= 1.0 + _SLACK
                both = unmet + weights[:, None] + weights[None, :]
                both = both - gain[:, None] * left - gain[None, :] * right
            best = np.where(fits, np.minimum(best, np.where(fits, both, best)), best)
        table[i] = best
    return table


class _Exchange:
    def __init__(self, problem: ChoiceProblem, columns: Candidates, among: Ints) -> None:
        self._problem, self._columns, self._among = problem, columns, among
        self._table = _pair_costs(problem, columns, among)
        every = np.arange(len(among))
        self._alone = np.asarray(self._table[:, every, every])
        self._rent, self._pair = columns.rent[among], columns.pair[among]
        self._known: dict[tuple[int, ...], float] = {}

    def starts(self) -> list[tuple[int, ...]]:
        """Return nothing open, and the best of all sets of two."""
        total = self._table.sum(axis=0) + self._rent[:, None] + self._rent[None, :]
        total[self._pair[:, None] == self._pair[None, :]] = np.inf
        total[self._rent[:, None] + self._rent[None, :] > self._problem.budget] = np.inf
        total[np.tril_indices(len(total))] = np.inf
        first, second = np.unravel_index(
            np.argsort(total, axis=None, kind="stable")[:_PAIRS], total.shape
        )
        pairs = [
            (int(a), int(b)) for a, b in zip(first, second, strict=True) if np.isfinite(total[a, b])
        ]
        return [(), *sorted(pairs, key=lambda pair: (self._cost(pair), pair))[:_STARTS]]

    def run(self, start: tuple[int, ...]) -> tuple[tuple[int, ...], float]:
        """Improve a set until no move does."""
        chosen, cost = start, self._cost(start)
        for _ in range(_STEPS):
            best, move = cost - _SLACK, None
            for hoped, other in self._moves(chosen)[:_LOOKED_AT]:
                if hoped >= best:
                    break
                true = self._cost(other)
                if true < best:
                    best, move = true, other
            if move is None:
                break
            chosen, cost = move, best
        return chosen, cost

    def _moves(self, chosen: tuple[int, ...]) -> list[tuple[float, tuple[int, ...]]]:
        """Return the neighbours of a set by what they cost at least, cheapest first."""
        moves = []
        for leaving in (None, *chosen):
            rest = [a for a in chosen if a != leaving]
            served = self._served(rest)
            spent = float(self._rent[rest].sum())
            if leaving is not None:
                moves.append((spent + float(served.sum()), tuple(rest)))
            # Each candidate joins the rest: a type is served by it, or by it and one of the rest.
            joined = np.minimum(served[:, None], self._alone)
            if rest:
                joined = np.minimum(joined, self._table[:, rest].min(axis=1))
            total = spent + self._rent + joined.sum(axis=0)
            total[np.isin(self._pair, self._pair[rest])] = np.inf
            total[spent + self._rent > self._problem.budget] = np.inf
            moves.extend(
                (float(total[entering]), tuple(sorted([*rest, int(entering)])))
                for entering in np.argsort(total, kind="stable")[:_LOOKED_AT]
                if entering != leaving and np.isfinite(total[entering])
            )
        return sorted(moves)

    def _served(self, chosen: list[int]) -> Floats:
        if not chosen:
            return self._problem.unmet_usd
        return np.asarray(self._table[:, chosen][:, :, chosen].min(axis=(1, 2)))

    def _cost(self, chosen: tuple[int, ...]) -> float:
        """Return what a set costs: with what types share, or with weights stored whole, the larger."""
        if chosen not in self._known:
            one = list(chosen)
            cost = float(self._rent[one].sum() + self._served(one).sum())
            self._known[chosen] = max(cost, self._solved(chosen)) if chosen else cost
        return self._known[chosen]

    def _solved(self, chosen: tuple[int, ...]) -> float:
        problem, columns = self._problem, self._columns
        at = self._among[list(chosen)]
        types, number = problem.shape[0], len(at)
        owner, i = (part.ravel() for part in np.indices((number, types)))
        stock = problem.horizon_h * problem.storage_usd
        rent = float(columns.rent[at].sum())
        stored = (
            problem.data_stored_gb
            + problem.weights_gb[columns.model[at]][:, None] / columns.most[at]
        )
        usd = stock * stored + problem.delay_usd * columns.delay[at] - problem.unmet_usd
        if rent >= problem.budget:
            return np.inf
        # Rows by number: share, delay, error of each type; FLOP/s and memory of each set member; two totals.
        rows = np.concatenate(
            [
                i,
                types + i,
                2 * types + i,
                3 * types + owner,
                3 * types + number + owner,
                np.full(2 * len(i), 3 * types + 2 * number) + np.repeat([0, 1], len(i)),
            ]
        )
        values = [
            np.ones((number, types)),
            columns.delay[at] / problem.delay_limit,
            columns.error[at] / problem.error_limit,
            columns.load[at],
            columns.cache[at],
            stock * stored / (problem.budget - rent),
            stored / problem.storage_gb,
        ]
        entries = Sparse.of(
            rows,
            np.tile(np.arange(len(i)), 7),
            np.concatenate([value.ravel() for value in values]),
            3 * types + 2 * number + 2,
        )
        nothing = np.zeros(0, np.int64)
        lp = LinearProgram()
        empty = Sparse.of(nothing, nothing, np.zeros(0), len(i))
        lp.add_columns(usd.ravel(), np.zeros(len(i)), np.ones(len(i)), empty)
        lp.add_rows(np.full(entries.number, -INFINITY), np.ones(entries.number), entries)
        return rent + float(problem.unmet_usd.sum()) + lp.solve().objective
