"""The choice problem solved to a proven optimum, as an integer programme on HiGHS.

The paper linearises x_ijk w_jkc with McCormick's rows. Here v_ijkc, the share of type i that (j, k) serves
*in configuration c*, is the variable itself: x_ijk = sum_c v_ijkc, v_ijkc <= a_ijkc w_jkc, where a is the
most that memory, FLOP/s, delay and error let one configuration serve. (5f) and (5g) hold per configuration,
and one that another of the same pair and as many GPUs beats in every delay is left out. Whoever serves
type i must open a configuration that can: if none with an error (or delay) below t > eps_i is open, then
u_i >= 1 - eps_i / t. These rows close a large part of the gap, and no solver finds them by itself.

Three solves: the relaxation; a core of the configurations with the least reduced costs, which gives a good
answer; and all those whose reduced cost is below the distance between the two. The others cannot be in a
better answer. Effort is counted in nodes and iterations; a deadline is a safety net that says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import numpy as np

from atoll.solve.choice.problem import Bools, ChoiceAnswer, ChoiceProblem, Floats, Ints, cost_of
from atoll.solve.lp import INFINITY, LinearProgram, LpResult, MipResult, Sparse

_CORE = 40
"""Configurations of the core that looks for a first answer."""
_CORE_GAP = 0.005
_TOLERANCE = 1e-7
_COVER = 1.3
"""Rows that ask for an able configuration are made for limits up to so many times the promise."""


@dataclass(frozen=True)
class ExactChoice:
    """An answer, what it costs (USD), the proven bound, and the work that it took.

    `configurations` are (pair, configuration) candidates in all, `kept` those of the last solve. `cut_short`
    says that a limit on work or the deadline ended it; `timed_out` that it was the deadline.
    """

    answer: ChoiceAnswer
    cost: float
    bound: float
    nodes: int
    iterations: int
    configurations: int
    kept: int
    cut_short: bool
    timed_out: bool

    @property
    def gap(self) -> float:
        """How much of the cost is not proven, as a share."""
        return max(0.0, self.cost - self.bound) / max(abs(self.cost), 1e-12)


def exact(
    problem: ChoiceProblem,
    *,
    incumbent: ChoiceAnswer | None = None,
    gap: float = 1e-4,
    node_limit: int | None = None,
    iteration_limit: int | None = None,
    deadline_s: float = INFINITY,
) -> ExactChoice:
    """Return the cheapest answer within a relative `gap`, proven; `incumbent` is one to beat."""
    end = perf_counter() + deadline_s
    columns = Candidates.of(problem)
    whole = _ChoiceMip(problem, columns, np.arange(columns.number))
    relaxed = whole.lp.solve(max(0.0, end - perf_counter()))
    best = incumbent if incumbent is not None else _nothing(problem)
    if relaxed.status != "optimal":
        # Only the clock can end it: serving nothing is feasible where `most_unmet` allows it.
        return _result(problem, best, -INFINITY, columns, columns.number, [], cut=True, late=True)
    done: list[MipResult] = []
    reduced = _reduced(relaxed, columns.number)
    floor, cost = relaxed.objective, cost_of(problem, best).total
    if floor < cost * (1.0 - gap) and columns.number > _CORE:
        core = np.sort(np.argsort(reduced, kind="stable")[:_CORE])
        first = _ChoiceMip(problem, columns, core).solve(
            best, max(gap, _CORE_GAP), node_limit, iteration_limit, end
        )
        done.append(first[1])
        best = _better(problem, best, first[0])
        cost = cost_of(problem, best).total
    # A configuration that is open adds its reduced cost to the relaxation's.
    kept = np.nonzero(floor + reduced <= cost * (1.0 - 0.5 * gap) + 1e-9)[0]
    last, mip = _ChoiceMip(problem, columns, kept).solve(
        best, 0.5 * gap, node_limit, iteration_limit, end
    )
    done.append(mip)
    best = _better(problem, best, last)
    cost = cost_of(problem, best).total
    # What was left out costs at least the first of these, what was kept at least the second.
    bound = min(cost, max(floor, min(mip.bound, cost * (1.0 - 0.5 * gap))))
    return _result(
        problem,
        best,
        bound,
        columns,
        len(kept),
        done,
        cut=mip.status == "stopped",
        late=mip.timed_out,
    )


@dataclass(frozen=True)
class Candidates:
    """Configurations worth opening, one row each: pair (j, k), configuration c, and what they can do.

    `delay`, `error`, `load`, `cache`, `most` are [candidate, type]; `load` and `cache` are shares of what the
    configuration has, `most` the share of a type that it could serve alone.
    """

    model: Ints
    tier: Ints
    config: Ints
    pair: Ints
    rent: Floats
    delay: Floats
    error: Floats
    load: Floats
    cache: Floats
    most: Floats

    @property
    def number(self) -> int:
        """How many there are."""
        return len(self.model)

    @classmethod
    def of(cls, problem: ChoiceProblem) -> Candidates:
        """Collect those that fit memory and budget and that no other of their pair beats."""
        _, models, tiers, _ = problem.shape
        rows = [
            (j, k, c) for j in range(models) for k in range(tiers) for c in _useful(problem, j, k)
        ]
        j, k, c = (np.array([row[axis] for row in rows], np.int64) for axis in range(3))
        gpus = problem.gpus[c]
        load = problem.load_tflop[:, j, k].T / (problem.capacity_tflop[k] * gpus)[:, None]
        room = problem.memory_gb[k] * gpus - problem.weights_gb[j]
        cache = problem.kv_load_gb[:, j, k].T / np.maximum(room, 1e-12)[:, None]
        delay, error = problem.delay[:, j, k, c].T, problem.error[:, j, k].T
        tightest = np.maximum.reduce(
            [load, cache, delay / problem.delay_limit, error / problem.error_limit]
        )
        return cls(
            j,
            k,
            c,
            np.asarray(np.unique(j * tiers + k, return_inverse=True)[1], np.int64),
            problem.horizon_h * problem.gpu_usd[k] * gpus,
            delay,
            error,
            load,
            cache,
            1.0 / np.maximum(tightest, 1.0),
        )


def _useful(problem: ChoiceProblem, j: int, k: int) -> list[int]:
    gpus, delay = problem.gpus, problem.delay[:, j, k]
    rent = problem.horizon_h * problem.gpu_usd[k] * gpus
    fits = [
        c
        for c in range(problem.shape[3])
        if problem.allowed[k, c]
        and problem.weights_gb[j] < problem.memory_gb[k] * gpus[c]
        and rent[c] <= problem.budget
    ]

    def beaten(c: int, by: int) -> bool:
        # Fewer GPUs would also mean less memory and FLOP/s, so only equal numbers compare.
        if by == c or gpus[by] != gpus[c] or not (delay[:, by] <= delay[:, c]).all():
            return False
        return bool((delay[:, by] < delay[:, c]).any()) or by < c

    return [c for c in fits if not any(beaten(c, by) for by in fits)]


class _Rows:
    """Rows collected one by one."""

    def __init__(self) -> None:
        self._owner: list[Ints] = []
        self._index: list[Ints] = []
        self._value: list[Floats] = []
        self._lower: list[float] = []
        self._upper: list[float] = []

    def add(self, index: Ints, value: Floats, lower: float, upper: float) -> None:
        self._owner.append(np.full(len(index), len(self._lower), np.int64))
        self._index.append(index)
        self._value.append(value)
        self._lower.append(lower)
        self._upper.append(upper)

    def put(self, lp: LinearProgram) -> None:
        entries = Sparse.of(
            np.concatenate(self._owner),
            np.concatenate(self._index),
            np.concatenate(self._value),
            len(self._lower),
        )
        lp.add_rows(np.array(self._lower), np.array(self._upper), entries)


class _ChoiceMip:
    """The integer programme over some of the candidates. Columns: w, v by candidate and type, z, u."""

    def __init__(self, problem: ChoiceProblem, columns: Candidates, kept: Ints) -> None:
        self._problem, self._columns, self._kept = problem, columns, kept
        self._types = types = problem.shape[0]
        self._pairs, self._pair = np.unique(columns.pair[kept], return_inverse=True)
        number, pairs = len(kept), len(self._pairs)
        self._first = np.array([np.argmax(self._pair == a) for a in range(pairs)], np.int64)
        self._v, self._z = number, number + number * types
        self._u = self._z + pairs * types
        self._number = self._u + types
        hours, price = problem.horizon_h, problem.storage_usd
        weights = np.repeat(problem.weights_gb[columns.model[kept][self._first]], types)
        data = np.tile(problem.data_stored_gb, number)
        self._stored = np.concatenate([np.zeros(number), data, weights, np.zeros(types)])
        rent = np.concatenate([columns.rent[kept], np.zeros(self._number - number)])
        self._paid = rent + hours * price * self._stored
        cost = self._paid.copy()
        cost[self._v : self._z] += (columns.delay[kept] * problem.delay_usd).ravel()
        cost[self._u :] += problem.unmet_usd
        upper = np.concatenate([np.ones(self._u), problem.most_unmet])
        nothing = np.zeros(0, np.int64)
        self.lp = LinearProgram()
        self.lp.add_columns(
            cost,
            np.zeros(self._number),
            upper,
            Sparse.of(nothing, nothing, np.zeros(0), self._number),
        )
        rows = _Rows()
        self._promises(rows)
        self._capacities(rows)
        self._able(rows)
        rows.put(self.lp)
        whole = np.concatenate([np.arange(number), np.arange(self._z, self._u)])
        self.lp.set_integer(whole)

    def _promises(self, rows: _Rows) -> None:
        problem, kept = self._problem, self._kept
        every = self._v + np.arange(len(kept)) * self._types
        for i in range(self._types):
            served = np.append(every + i, self._u + i)
            rows.add(served, np.ones(len(served)), 1.0, 1.0)
            for value, limit in (
                (self._columns.delay[kept, i], problem.delay_limit[i]),
                (self._columns.error[kept, i], problem.error_limit[i]),
            ):
                rows.add(every + i, value / limit, -INFINITY, 1.0)
        for amount, limit in (
            (self._paid, problem.budget),
            (self._stored, problem.storage_gb),
        ):
            index = np.nonzero(amount)[0]
            rows.add(index, amount[index] / limit, -INFINITY, 1.0)

    def _capacities(self, rows: _Rows) -> None:
        columns, kept, types = self._columns, self._kept, self._types
        for a, candidate in enumerate(kept):
            served = self._v + a * types + np.arange(types)
            for use in (columns.load[candidate], columns.cache[candidate]):
                if use.sum() > 1.0:
                    rows.add(np.append(served, a), np.append(use, -1.0), -INFINITY, 0.0)
            for i in range(types):
                most = columns.most[candidate, i]
                rows.add(np.array([served[i], a]), np.array([1.0, -most]), -INFINITY, 0.0)
        for pair in range(len(self._pairs)):
            members = np.nonzero(self._pair == pair)[0]
            if len(members) > 1:
                rows.add(members, np.ones(len(members)), -INFINITY, 1.0)
            for i in range(types):
                most = float(columns.most[kept[members], i].max())
                index = np.append(self._v + members * types + i, self._z + pair * types + i)
                rows.add(index, np.append(np.ones(len(members)), -most), -INFINITY, 0.0)

    def _able(self, rows: _Rows) -> None:
        problem, kept = self._problem, self._kept
        for i in range(self._types):
            for value, limit in (
                (self._columns.error[kept, i], problem.error_limit[i]),
                (self._columns.delay[kept, i], problem.delay_limit[i]),
            ):
                levels = np.unique(value)
                for level in levels[levels > limit * (1.0 + 1e-9)]:
                    able = np.nonzero(value < level)[0]
                    unmet = 1.0 - limit / level
                    index = np.append(able, self._u + i)
                    rows.add(index, np.append(np.full(len(able), unmet), 1.0), unmet, INFINITY)
                    if level > limit * _COVER:
                        break

    def solve(
        self,
        start: ChoiceAnswer,
        gap: float,
        node_limit: int | None,
        iteration_limit: int | None,
        end: float,
    ) -> tuple[ChoiceAnswer | None, MipResult]:
        """Solve from an answer; one that opens what is not here is no start."""
        mip = self.lp.solve_mip(
            time_limit_s=end - perf_counter(),
            gap=gap,
            start=self._values(start),
            node_limit=node_limit,
            iteration_limit=iteration_limit,
            tolerance=_TOLERANCE,
        )
        return (None if mip.values is None else self._answer(mip.values)), mip

    def _values(self, answer: ChoiceAnswer) -> Floats | None:
        columns, kept = self._columns, self._kept
        model, tier = columns.model[kept], columns.tier[kept]
        is_open = answer.config[model, tier] == columns.config[kept]
        if int(is_open.sum()) != int((answer.config >= 0).sum()):
            return None
        values = np.zeros(self._number)
        values[: self._v] = is_open
        values[self._v : self._z] = (answer.routed[:, model, tier].T * is_open[:, None]).ravel()
        placed = answer.placed[:, model[self._first], tier[self._first]].T
        values[self._z : self._u] = placed.ravel()
        values[self._u :] = answer.unmet
        return values

    def _answer(self, values: Floats) -> ChoiceAnswer:
        problem, columns = self._problem, self._columns
        types, models, tiers, _ = problem.shape
        config = np.full((models, tiers), -1, np.int64)
        routed = np.zeros((types, models, tiers))
        shares = np.clip(values[self._v : self._z], 0.0, 1.0).reshape(len(self._kept), types)
        for a in np.nonzero(values[: self._v] > 0.5)[0]:
            candidate = self._kept[a]
            at = columns.model[candidate], columns.tier[candidate]
            share = np.where(shares[a] > 1e-9, shares[a], 0.0)
            if share.any():
                config[at] = columns.config[candidate]
                routed[(slice(None), *at)] = share
        unmet = np.clip(1.0 - routed.sum(axis=(1, 2)), 0.0, problem.most_unmet)
        placed: Bools = routed > 0.0
        return ChoiceAnswer(config, routed, placed, np.where(unmet < 1e-9, 0.0, unmet))


def _reduced(relaxed: LpResult, number: int) -> Floats:
    """Return what opening a candidate adds at least; none for those that the relaxation opens."""
    return np.maximum(relaxed.reduced[:number], 0.0)


def _nothing(problem: ChoiceProblem) -> ChoiceAnswer:
    types, models, tiers, _ = problem.shape
    return ChoiceAnswer(
        np.full((models, tiers), -1, np.int64),
        np.zeros((types, models, tiers)),
        np.zeros((types, models, tiers), np.bool_),
        np.ones(types),
    )


def _better(problem: ChoiceProblem, best: ChoiceAnswer, other: ChoiceAnswer | None) -> ChoiceAnswer:
    if other is None or cost_of(problem, other).total >= cost_of(problem, best).total:
        return best
    return other


def _result(
    problem: ChoiceProblem,
    best: ChoiceAnswer,
    bound: float,
    columns: Candidates,
    kept: int,
    done: list[MipResult],
    *,
    cut: bool,
    late: bool,
) -> ExactChoice:
    answer = ChoiceAnswer(best.config, best.routed, best.placed, best.unmet, bound)
    return ExactChoice(
        answer,
        cost_of(problem, answer).total,
        bound,
        sum(mip.nodes for mip in done),
        sum(mip.iterations for mip in done),
        columns.number,
        kept,
        cut,
        late,
    )
