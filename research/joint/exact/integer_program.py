"""The joint problem over a few configurations as an integer program on HiGHS.

The paper linearises x_ijk w_jkc with McCormick's rows. Here v_ijkc, the share of type i that (j, k) serves
*in configuration c*, is the variable itself: x_ijk = sum_c v_ijkc, v_ijkc <= a_ijkc w_jkc, where a is the
most that memory, FLOP/s, delay and error let one configuration serve. (5f) and (5g) hold per configuration.
Whoever serves type i must open a configuration that can: if none with an error (or delay) below t > eps_i
is open, then u_i >= 1 - eps_i / t. These rows close a large part of the gap, and no solver finds them by
itself.
"""

from __future__ import annotations

from time import perf_counter

import numpy as np

from atoll.solve.joint.joint_problem import Bools, Floats, Ints, JointAnswer, JointProblem
from atoll.solve.lp import INFINITY, LinearProgram, MipResult, Sparse
from research.joint.exact.candidates import Candidates

_TOLERANCE = 1e-7
_TRIALS = 1
"""Trial branchings cost more than they save here: these relaxations are degenerate and slow."""
_COVER = 1.3
"""Rows that ask for an able configuration are made for limits up to so many times the promise."""


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


class JointProgram:
    """The integer program over some of the candidates. Columns: w, v by candidate and type, z, u.

    Those at `opened` are open in any case; answers that cost more than `cut` USD are none.
    """

    def __init__(
        self,
        problem: JointProblem,
        columns: Candidates,
        kept: Ints,
        *,
        opened: Ints | None = None,
        cut: float = INFINITY,
    ) -> None:
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
        upper = np.concatenate([np.ones(self._u), problem.max_unmet])
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
        if cut < INFINITY:
            index = np.nonzero(cost)[0]
            rows.add(index, cost[index] / cut, -INFINITY, 1.0)
        rows.put(self.lp)
        if opened is not None and len(opened):
            one = np.ones(len(opened))
            self.lp.set_bounds(np.searchsorted(kept, opened), one, one)
        self.lp.set_integer(np.concatenate([np.arange(number), np.arange(self._z, self._u)]))

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
        problem, columns, kept, types = self._problem, self._columns, self._kept, self._types
        placed = self._z + np.arange(len(self._pairs)) * types
        opened = np.arange(len(kept))
        for i in range(types):
            # An error is a pair's, whatever its configuration, so placing is what is asked for.
            for index, value, limit in (
                (placed + i, columns.error[kept[self._first], i], problem.error_limit[i]),
                (opened, columns.delay[kept, i], problem.delay_limit[i]),
            ):
                levels = np.unique(value)
                for level in levels[levels > limit * (1.0 + 1e-9)]:
                    able = index[value < level]
                    unmet = 1.0 - limit / level
                    share = np.append(np.full(len(able), unmet), 1.0)
                    rows.add(np.append(able, self._u + i), share, unmet, INFINITY)
                    if level > limit * _COVER:
                        break
        for pair in range(len(self._pairs)):
            members = np.nonzero(self._pair == pair)[0]
            for i in range(types):
                index = np.append(members, placed[pair] + i)
                rows.add(index, np.append(np.ones(len(members)), -1.0), 0.0, INFINITY)

    def solve(
        self,
        start: JointAnswer | None,
        gap: float,
        node_limit: int | None,
        iteration_limit: int | None,
        end: float,
    ) -> tuple[JointAnswer | None, MipResult]:
        """Solve from an answer; one that opens what is not here is no start."""
        mip = self.lp.solve_mip(
            time_limit_s=end - perf_counter(),
            gap=gap,
            start=None if start is None else self._values(start),
            node_limit=node_limit,
            iteration_limit=iteration_limit,
            tolerance=_TOLERANCE,
            trials=_TRIALS,
        )
        return (None if mip.values is None else self._answer(mip.values)), mip

    def _values(self, answer: JointAnswer) -> Floats | None:
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

    def _answer(self, values: Floats) -> JointAnswer:
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
        unmet = np.clip(1.0 - routed.sum(axis=(1, 2)), 0.0, problem.max_unmet)
        placed: Bools = routed > 0.0
        return JointAnswer(config, routed, placed, np.where(unmet < 1e-9, 0.0, unmet))
