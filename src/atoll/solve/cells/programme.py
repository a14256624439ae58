"""The cheapest executors and machines for a demand, or the most of it for a budget, with a proven bound.

First the largest share of demand, by the linear relaxation. Where that is all of it, the cheapest answer for
all of it. Where it is not, in whole numbers either, the largest share and then the cheapest answer at that
share. Goal "most" is the same without an upper limit on the share.

Executor types are priced, not listed: the relaxation takes in those that pay (see `Master`). Then an integer
programme over those whose excess cost is small. Any answer that uses one left out costs at least the
relaxation plus its excess. So once the excess of all left out exceeds the distance between the best answer
and the relaxation, the bound of the integer programme holds for all. Until then more are taken in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from atoll.solve.cells import answers
from atoll.solve.cells.answers import Routed, Whole
from atoll.solve.cells.master import Counter, Master
from atoll.solve.cells.presolve import undominated
from atoll.solve.cells.table import Table, make_table
from atoll.solve.cells.types import Answer, Programme
from atoll.solve.effort import Countdown

Floats = NDArray[np.float64]

ITERATIONS = 400_000
"""Simplex iterations of the usual effort."""
_FEW = 120
"""Units up to which the integer programme has all of them from the start."""
_GROWTH = 3
_ALL = 1.0 - 1e-7
"""A share from which on the relaxation serves everything."""
_SLACK = 1e-9
"""How much of a share found before may be lost in the search for the cheapest."""


@dataclass(frozen=True)
class _Found:
    """The outcome of one search: values (None: none found), what they are worth, and what is proven."""

    values: Floats | None
    objective: float
    bound: float
    infeasible: bool
    late: bool


def solve_programme(
    programme: Programme,
    *,
    gap: float = 1e-4,
    work: float = 1.0,
    deadline_s: float = math.inf,
    presolve: bool = True,
) -> Answer:
    """Return the best answer, "optimal" where its gap (relative) is proven.

    `work` multiplies the simplex iterations that the search may take; `deadline_s` is a safety net. Without
    `presolve` types that others dominate stay in: the answer is worth the same.
    """
    end = Countdown(deadline_s)
    counter = Counter(ITERATIONS * work)
    table = make_table(programme, undominated(programme) if presolve else None)
    if not table.classes:
        return _Search(table, gap, counter, end).answer_empty()
    if programme.goal == "most":
        return _solve_most(table, gap, counter, end)
    return _solve_cost(table, gap, counter, end)


def _solve_most(table: Table, gap: float, counter: Counter, end: Countdown) -> Answer:
    """Return the largest multiple of demand, and the cheapest answer for it."""
    rough = Master(table, weights=None, cap=math.inf, work=counter)
    rough.seek_share()
    relaxed = rough.relax(end.left)
    if table.missing or not relaxed.feasible or -relaxed.objective <= _SLACK:
        return answers.nothing(table, table.missing or _SHORT, counter, late=end.passed)
    # With the relaxation's multiple as the demand, shares are at most 1 and numbers near it.
    bound = -relaxed.objective if relaxed.complete else _largest(table)
    search = _Search(table.at_scale(bound), gap, counter, end)
    search.master.add_units(rough.inside)
    return search.answer_share("most")


def _solve_cost(table: Table, gap: float, counter: Counter, end: Countdown) -> Answer:
    programme = table.programme
    search = _Search(table, gap, counter, end)
    if programme.shortage != "priority" and table.missing:
        return answers.nothing(table, table.missing, counter, late=False)
    search.master.seek_share()
    relaxed = search.master.relax(end.left)
    short = relaxed.complete and -relaxed.objective < _ALL
    if not short:
        answer = search.answer_all(None)
        if answer is not None:
            return answer
    if programme.shortage == "fail" and (short or search.proven_short):
        return answers.nothing(table, table.missing or _SHORT, counter, late=search.late)
    return search.answer_share("cost")


_SHORT = ("machines, budget and limits do not allow all demand to be met",)
_UNKNOWN = ("no answer was found within the effort: allow more work",)


def _largest(table: Table) -> float:
    """Return a multiple of demand that no answer exceeds: all executors at once for one class."""
    least = np.full(len(table.needs), np.inf)
    np.minimum.at(least, table.z_need, table.z_load)
    return float(table.most.sum() / max(least.min(), 1e-9))


class _Search:
    """Searches on one master programme, and what they found."""

    def __init__(self, table: Table, gap: float, counter: Counter, end: Countdown) -> None:
        self.table = table
        self.gap = gap
        self.counter = counter
        self.end = end
        self.late = False
        self.proven_short = False
        self.weights: Floats | None = None
        if table.programme.goal == "cost" and table.programme.shortage == "priority":
            priority = [table.programme.classes[t].priority for t in table.classes]
            weights = np.maximum(0.0, np.array(priority))
            self.weights = weights / max(float(weights.sum()), 1e-12)
        self.master = Master(table, weights=self.weights, cap=1.0, work=counter)

    # ---------------------------------------------------------------- answers

    def answer_all(self, start: Floats | None) -> Answer | None:
        """Return the cheapest answer that serves everybody, None where there is none or none was found."""
        master = self.master
        master.bound_shares(1.0, 1.0)
        master.seek_cost(-math.inf)
        found = self.prove(start)
        self.proven_short = found.infeasible
        if found.values is not None:
            whole = answers.whole_of(master, found.values)
            routed = self.route(whole, least=1.0)
            if routed is not None:
                master.bound_shares(0.0, 1.0)
                return self.answer(whole, routed, found, (1.0, 1.0))
        master.bound_shares(0.0, 1.0)
        return None

    def answer_share(self, goal: str) -> Answer:
        """Return the answer with the largest share of demand, the cheapest of those."""
        master, fail = self.master, self.table.programme.shortage == "fail"
        master.bound_shares(0.0, 1.0)
        master.seek_share()
        most = self.prove(None)
        if most.values is None or -most.objective <= _SLACK:
            reasons = _SHORT if most.infeasible or most.values is not None else _UNKNOWN
            return answers.nothing(
                self.table, self.table.missing or reasons, self.counter, late=self.late
            )
        level = min(1.0, -most.objective)
        if goal == "cost" and level >= 1.0 - _SLACK:
            answer = self.answer_all(most.values)
            if answer is not None:
                return answer
        elif goal == "cost" and fail:
            reasons = _SHORT if -most.bound < 1.0 - _SLACK else _UNKNOWN
            return answers.nothing(self.table, reasons, self.counter, late=self.late)
        first = answers.whole_of(master, most.values)
        routed = self.route(first)
        if routed is None:
            return answers.nothing(self.table, _UNKNOWN, self.counter, late=self.late)
        level = min(level, self.level_of(routed))
        master.seek_cost(level * (1.0 - _SLACK))
        cheap = self.prove(most.values)
        whole = first
        if cheap.values is not None:
            second = answers.whole_of(master, cheap.values)
            flows = self.route(second)
            if flows is not None and self.level_of(flows) >= level * (1.0 - 10 * _SLACK):
                whole, routed = second, flows
        reached = self.level_of(routed)
        return self.answer(whole, routed, cheap, (reached, max(reached, -most.bound)), goal)

    def answer_empty(self) -> Answer:
        """Return the answer to no demand: nothing."""
        classes = self.table.programme.classes
        served = {klass.key: 1.0 for klass in classes}
        return Answer("optimal", (), {}, (), {}, served, 0.0, 0.0, 0.0, 0.0)

    def answer(
        self,
        whole: Whole,
        routed: Routed,
        found: _Found,
        share: tuple[float, float],
        goal: str = "cost",
    ) -> Answer:
        """Return the answer of whole numbers and flows; `found` has the bound on cost, `share` is proven."""
        table = self.table
        whole = answers.trim(table, whole, routed)
        rent, start = answers.costs(table, whole)
        flows, ways, split = answers.list_flows(table, routed)
        cost = rent + start
        bound = min(cost, max(0.0, found.bound * self.master.money))
        cheap = _near(cost, bound, self.gap)
        widest = _near(share[0], share[1], self.gap)
        keys = [m.key for m in table.programme.machines]
        answer = Answer(
            status="optimal" if cheap and widest else "feasible",
            placed=answers.place(table, whole),
            machines={k: int(n) for k, n in zip(keys, whole.machines, strict=True) if n},
            flows=flows,
            ways=ways,
            served=answers.served(table, routed),
            usd_per_hour=rent,
            init_usd=start,
            objective=cost,
            bound=bound,
            nodes=self.counter.nodes,
            iterations=self.counter.iterations,
            cut_short=self.late,
            share=share[0],
            share_bound=share[1],
            split=split,
        )
        if goal == "most":
            most = share[0] * table.scale
            return replace(
                answer,
                status="optimal" if widest else "feasible",
                objective=most,
                bound=share[1] * table.scale,
                share=most,
                share_bound=share[1] * table.scale,
            )
        if share[0] < 1.0 - _SLACK:
            return replace(answer, status="partial", reasons=table.missing or _SHORT)
        return answer

    def level_of(self, routed: Routed) -> float:
        """Return the weighed share that flows serve."""
        return float(self.master.weights @ routed.shares)

    def route(self, whole: Whole, least: float = 0.0) -> Routed | None:
        """Return exact flows for whole numbers."""
        return answers.route(self.table, whole, self.weights, least, 1.0, self.counter)

    # ---------------------------------------------------------------- proofs

    def prove(self, start: Floats | None) -> _Found:
        """Return the best integer solution for the master's goal and a bound over all units."""
        master = self.master
        relaxed = master.relax(self.end.left)
        if not relaxed.feasible:
            self.late = self.late or self.end.passed
            return _Found(None, math.inf, -math.inf, relaxed.complete, self.late)
        floor = relaxed.objective
        if not relaxed.complete:
            beyond = np.minimum(0.0, relaxed.excess) * np.where(
                self.table.fresh, self.table.most, 0
            )
            floor += float(beyond.sum())
        master.add_units(self._nearest(relaxed.excess, _FEW))
        best, objective, bound = start, math.inf, -math.inf
        while True:
            result = master.solve_integer(
                gap=0.5 * self.gap, start=best, time_limit_s=self.end.left
            )
            self.late = self.late or result.timed_out
            outside = master.outside
            if result.values is not None:
                best, objective = result.values, result.objective
            inner = math.inf if result.status == "infeasible" else result.bound
            left_out = float(relaxed.excess[outside].min(initial=math.inf))
            bound = min(max(floor, inner), floor + max(0.0, left_out))
            slack = max(0.5 * self.gap * abs(objective), 1e-9) if best is not None else 0.0
            done = not len(outside) or objective - bound <= slack
            if done or self.counter.left <= 0.0 or self.end.passed:
                break
            wanted = outside[relaxed.excess[outside] < objective - slack - floor]
            if not len(wanted):
                break
            number = min(len(wanted), (_GROWTH - 1) * max(_FEW, len(master.inside)))
            master.add_units(self._nearest(relaxed.excess, number))
        if math.isinf(objective):
            gone = result.status == "infeasible" and not len(master.outside)
            return _Found(None, math.inf, bound, gone, self.late)
        return _Found(best, objective, min(bound, objective), False, self.late)

    def _nearest(self, excess: Floats, number: int) -> NDArray[np.int64]:
        """Return that many units outside, those that cost least beyond their worth."""
        outside = self.master.outside
        order = np.argsort(excess[outside], kind="stable")[:number]
        return np.sort(outside[order])


def _near(value: float, bound: float, gap: float) -> bool:
    return abs(value - bound) <= gap * max(abs(value), abs(bound)) + 1e-9
