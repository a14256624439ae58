"""The cheapest executors and machines for a demand, or the most of it for a budget, with a proven bound.

First the largest share of demand, by the linear relaxation. Where that is all of it, the cheapest answer for
all of it. Where it is not, in whole numbers either, the largest share and then the cheapest answer at that
share. Goal "most" is the same without an upper limit on the share.

Executor types are priced, not listed: the relaxation takes in those that pay (see `Master`). Then an integer
program over those whose excess cost is small. Any answer that uses one left out costs at least the
relaxation plus its excess. So once the excess of all left out exceeds the distance between the best answer
and the relaxation, the bound of the integer program holds for all. Until then more are taken in. Before, a
small one over what is likely in the answer finds one to start from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from atoll.solve.array_types import Floats
from atoll.solve.deadline import Deadline
from atoll.solve.graph import program_answers as answers
from atoll.solve.graph.executor_master import Counter, Master, Relaxed
from atoll.solve.graph.graph_types import GraphAnswer, GraphProgram
from atoll.solve.graph.presolve import undominated
from atoll.solve.graph.program_answers import Routed, Whole
from atoll.solve.graph.program_table import Table, make_table, weigh_shares
from atoll.solve.lp import MipResult

ITERATIONS = 80_000
"""Simplex iterations of the usual effort."""
_MIN_UNITS = 120
"""Units that the first integer program has: enough for all of small problems."""
_NEXT_UNITS = 3_000
_GROWTH = 3
"""Units that the next integer program has at most, or this many times as many as the one before."""
_EARLY = 0.35
"""Share of the work left that an integer program gets which is not the last."""
_BEGIN = 0.3
"""The same for one over the few units that are likely in the answer."""
_CHEAP_UNITS = 24
"""Units of the least excess that are likely in the answer."""
_MIN_ITERATIONS = 2_000
"""Iterations that every integer program gets: the first must find something."""
_MOMENT_S = 2.0
"""Seconds that a first answer may take when time is up, on a busy machine."""
_ALL_SERVED = 1.0 - 1e-7
"""A share from which on the relaxation serves everything."""
_SHARE_TOLERANCE = 1e-9
"""How much of a share found before may be lost in the search for the cheapest."""


def solve_program(
    program: GraphProgram,
    *,
    gap: float = 1e-4,
    work: float = 1.0,
    deadline_s: float = math.inf,
    presolve: bool = True,
) -> GraphAnswer:
    """Return the best answer, "optimal" where its gap (relative) is proven.

    `work` multiplies the simplex iterations that the search may take; `deadline_s` is a safety net. Without
    `presolve` types that others dominate stay in: the answer is worth the same.
    """
    end = Deadline(deadline_s)
    counter = Counter(ITERATIONS * work)
    table = make_table(program, undominated(program) if presolve else None)
    if not table.classes:
        return _ShareSearch(table, gap, counter, end).answer_empty()
    if program.goal == "most":
        return _solve_most(table, gap, counter, end)
    return _solve_cost(table, gap, counter, end)


def _solve_most(table: Table, gap: float, counter: Counter, end: Deadline) -> GraphAnswer:
    """Return the largest multiple of demand, and the cheapest answer for it."""
    rough = Master(table, weights=None, cap=math.inf, work=counter)
    rough.seek_share()
    relaxed = rough.relax(end.left)
    if table.missing or not relaxed.feasible or -relaxed.objective <= _SHARE_TOLERANCE:
        return answers.nothing(table, table.missing or _DEMAND_UNMET, counter, late=end.passed)
    # With the relaxation's multiple as the demand, shares are at most 1 and numbers near it.
    # A relaxation that was cut off proves nothing: then a multiple that is surely too large.
    bound = -relaxed.objective if relaxed.complete else _largest(table)
    search = _ShareSearch(table.at_scale(bound), gap, counter, end)
    search.master.add_units(rough.inside)
    return search.answer_share()


def _solve_cost(table: Table, gap: float, counter: Counter, end: Deadline) -> GraphAnswer:
    """Return the cheapest answer for all demand, or for as much of it as can be met."""
    program = table.program
    search = _ShareSearch(table, gap, counter, end)
    # Served alike, all classes wait for the one that nothing can run.
    if program.shortage != "priority" and table.missing:
        return answers.nothing(table, table.missing, counter, late=False)
    search.master.seek_share()
    relaxed = search.master.relax(end.left)
    share = -relaxed.objective
    short = relaxed.feasible and relaxed.complete and share < _ALL_SERVED
    if not short:
        answer = search.answer_all(None)
        if isinstance(answer, GraphAnswer):
            return answer
        short = answer.infeasible
    if program.shortage == "fail" and short:
        return search.answer_nothing(_DEMAND_UNMET, share)
    return search.answer_share()


_DEMAND_UNMET = ("machines, budget and limits do not allow all demand to be met",)
_UNKNOWN = ("no answer was found within the effort: allow more work",)


def _largest(table: Table) -> float:
    """Return a multiple of demand that no answer exceeds: all executors at once for one class."""
    min_share = np.full(len(table.needs), np.inf)
    np.minimum.at(min_share, table.z_need, table.z_load)
    return float(table.max_executors.sum() / max(min_share.min(), 1e-9))


@dataclass(frozen=True)
class _Goal:
    """Objective of a search: the largest weighed share, or the least money at a share of `level`.

    Every class gets a share of `least` or more.
    """

    seeks: Literal["share", "cost"]
    level: float = -math.inf
    least: float = 0.0

    def set_on(self, master: Master) -> None:
        """Make it the goal of a master program."""
        master.bound_shares(self.least, 1.0)
        if self.seeks == "share":
            master.seek_share()
        else:
            master.seek_cost(self.level)


@dataclass(frozen=True)
class _Outcome:
    """The outcome of one search: whole numbers and flows (None: none found), their worth, what is proven."""

    whole: Whole | None
    routed: Routed | None
    objective: float
    bound: float
    infeasible: bool = False


class _ShareSearch:
    """Searches on one table, and the master program of the relaxation that they share."""

    def __init__(self, table: Table, gap: float, counter: Counter, end: Deadline) -> None:
        self.table = table
        self.gap = gap
        self.counter = counter
        self.end = end
        self.late = False
        self.likely = np.isin(table.unit_type, np.array(table.program.likely, np.int64))
        self.known = np.isin(table.unit_type, np.array(table.program.known, np.int64))
        self.weights: Floats | None = None
        if table.program.goal == "cost" and table.program.shortage == "priority":
            self.weights = weigh_shares(table.program, table.classes)
        self.master = self._make_master()

    def _make_master(self) -> Master:
        return Master(self.table, weights=self.weights, cap=1.0, work=self.counter)

    # ---------------------------------------------------------------- answers

    def answer_all(self, start: _Outcome | None) -> GraphAnswer | _Outcome:
        """Return the cheapest answer that serves everybody, or what is known where none was found."""
        found = self.prove(_Goal("cost", least=1.0), start)
        if found.whole is None or found.routed is None:
            return found
        return self.answer(found, (1.0, 1.0))

    def answer_share(self) -> GraphAnswer:
        """Return the answer with the largest share of demand, the cheapest of those."""
        program = self.table.program
        most = self.prove(_Goal("share"), None)
        if most.whole is None or most.routed is None or -most.objective <= _SHARE_TOLERANCE:
            known = most.infeasible or -most.bound <= _SHARE_TOLERANCE
            return self.answer_nothing(_DEMAND_UNMET if known else _UNKNOWN, -most.bound)
        level = self.level_of(most.routed)
        if program.goal == "cost" and level >= 1.0 - _SHARE_TOLERANCE:
            answer = self.answer_all(most)
            if isinstance(answer, GraphAnswer):
                return answer
        elif program.goal == "cost" and program.shortage == "fail":
            return self.answer_nothing(
                _DEMAND_UNMET if -most.bound < _ALL_SERVED else _UNKNOWN, -most.bound
            )
        # A hair less than was found, so that rounding cannot turn it away.
        cheap = self.prove(_Goal("cost", level * (1.0 - _SHARE_TOLERANCE)), most)
        if cheap.whole is None or cheap.routed is None:
            # Nothing cheaper was found: what serves most is an answer, too.
            cheap = replace(most, bound=cheap.bound)
        share = self.level_of(cheap.routed or most.routed)
        return self.answer(cheap, (share, max(share, -most.bound)))

    def answer_empty(self) -> GraphAnswer:
        """Return the answer to no demand: nothing."""
        served = {klass.key: 1.0 for klass in self.table.program.classes}
        return GraphAnswer("optimal", (), {}, (), {}, served, 0.0, 0.0, 0.0, 0.0)

    def answer_nothing(self, reasons: tuple[str, ...], share_bound: float) -> GraphAnswer:
        """Return that there is no answer, why, and which share could still be served."""
        bound = max(0.0, share_bound) * self.table.scale
        reasons = self.table.missing or reasons
        empty = answers.nothing(self.table, reasons, self.counter, late=self.late)
        most = self.table.program.goal == "most"
        return replace(empty, share_bound=bound, bound=bound if most else empty.bound)

    def answer(self, found: _Outcome, share: tuple[float, float]) -> GraphAnswer:
        """Return the answer of what was found; `share` is what is served, and what is proven of that."""
        table = self.table
        assert found.whole is not None
        assert found.routed is not None
        whole = answers.trim(table, found.whole, found.routed)
        rent, start = answers.costs(table, whole)
        flows, routes, split = answers.list_flows(table, found.routed)
        cost = rent + start
        bound = min(cost, max(0.0, found.bound * self.master.money))
        cheap = _near(cost, bound, self.gap)
        widest = _near(share[0], share[1], self.gap)
        keys = [m.key for m in table.program.machines]
        answer = GraphAnswer(
            status="optimal" if cheap and widest else "feasible",
            placed=answers.place(table, whole),
            machines={k: int(n) for k, n in zip(keys, whole.machines, strict=True) if n},
            flows=flows,
            routes=routes,
            served=answers.served(table, found.routed),
            usd_per_hour=rent,
            init_usd=start,
            objective=cost,
            bound=bound,
            nodes=self.counter.nodes,
            iterations=self.counter.iterations,
            cut_short=self.late,
            share=share[0] * table.scale,
            share_bound=share[1] * table.scale,
            split=split,
        )
        if table.program.goal == "most":
            return replace(
                answer,
                status="optimal" if widest else "feasible",
                objective=answer.share,
                bound=answer.share_bound,
            )
        if share[0] < 1.0 - _SHARE_TOLERANCE:
            return replace(answer, status="partial", reasons=table.missing or _DEMAND_UNMET)
        return answer

    def level_of(self, routed: Routed) -> float:
        """Return the weighed share that flows serve."""
        return float(self.master.weights @ routed.shares)

    # ---------------------------------------------------------------- proofs

    def prove(self, goal: _Goal, start: _Outcome | None) -> _Outcome:
        """Return the best integer solution for a goal and a bound over all units."""
        goal.set_on(self.master)
        # There must be an answer: what takes a moment is done also when time is up.
        relaxed = self.master.relax(max(_MOMENT_S, self.end.left))
        if not relaxed.feasible:
            self.late = self.late or self.end.passed
            return _Outcome(None, None, math.inf, -math.inf, relaxed.complete)
        floor = self._floor(relaxed)
        best, begun = self._begin(goal, start, floor)
        proven = best.bound
        if begun and best.objective - proven <= self._slack(best):
            return best
        order = np.argsort(relaxed.excess, kind="stable")
        order = order[self.table.fresh[order]]
        # Those of the relaxation come first, so that the first integer program has all that is needed.
        likely = relaxed.used | self.likely
        likely[order[:_CHEAP_UNITS]] = True
        order = np.concatenate([order[likely[order]], order[~likely[order]]])
        first = int(likely[order].sum())
        if not begun and len(order) > 2 * first:
            # An integer program that has a good answer from the start is solved several times sooner.
            _, found = self._solve_over(goal, order[:first], best, share=_BEGIN)
            if found is not None and found.objective < best.objective:
                best = replace(found, bound=proven)
            if best.whole is not None and (self.table.program.unproven or self.end.passed):
                self.late = self.late or self.end.passed
                return best

        def reach(distance: float) -> int:
            """Count the units up to the last one that may be in an answer so far above the floor."""
            return first + int((relaxed.excess[order[first:]] < distance).sum())

        number = max(_MIN_UNITS, 2 * first)
        if best.whole is not None:
            number = min(max(first, _NEXT_UNITS), reach(best.objective - self._slack(best) - floor))
        number = min(len(order), number)
        while True:
            # The last where all units are in, or where the next one could not make the best better.
            last = (
                number >= len(order)
                or self._slack(best) < float(relaxed.excess[order[number]]) + floor - best.objective
            )
            share = 1.0 if last else _EARLY
            result, found = self._solve_over(goal, order[:number], best, share=share)
            if found is not None and found.objective < best.objective:
                best = found
            inner = math.inf if result.status == "infeasible" else result.bound
            # An answer with a unit that is not in costs at least its excess more than the floor.
            beyond = relaxed.excess[order[number:]].min(initial=math.inf)
            bound = min(max(floor, inner), floor + max(0.0, float(beyond)))
            best = replace(best, bound=min(best.objective, max(proven, bound)))
            done = best.objective - best.bound <= self._slack(best)
            if done or number >= len(order) or self.counter.left <= 0.0 or self.end.passed:
                break
            # All whose excess is below the distance that is left, but not too many at once.
            enough = reach(best.objective - self._slack(best) - floor)
            if enough <= number:
                break
            number = min(enough, max(_NEXT_UNITS, _GROWTH * number))
        gone = result.status == "infeasible" and number >= len(order)
        return best if best.whole is not None else replace(best, infeasible=gone)

    def _floor(self, relaxed: Relaxed) -> float:
        """Return what the relaxation proves."""
        if relaxed.complete:
            return relaxed.objective
        self.late = True
        # Units left out could still gain what they are worth beyond their cost, each as often as it fits.
        max_executors = np.where(self.table.fresh, self.table.max_executors, 0.0)
        missing = (np.minimum(0.0, relaxed.excess) * max_executors).sum()
        return relaxed.objective + float(missing)

    def _begin(self, goal: _Goal, start: _Outcome | None, floor: float) -> tuple[_Outcome, bool]:
        """Return an answer to begin with, if there is one, what is proven, and whether it is a good one."""
        if start is not None and start.whole is not None and start.routed is not None:
            worth = self._worth(goal, start.whole, start.routed)
            return replace(start, objective=worth, bound=floor), True
        program, none = self.table.program, _Outcome(None, None, math.inf, floor)
        if goal.seeks != "cost" or goal.least < 1.0:
            return none, False
        none = replace(none, bound=max(floor, program.at_least / self.master.money))
        # Plans to learn from are looked for anew each time: one that was known teaches nothing.
        return (none, False) if program.unproven else self._take_known(goal, none)

    def _take_known(self, goal: _Goal, best: _Outcome) -> tuple[_Outcome, bool]:
        """Return the best answer with types of the known one, and whether it costs no more than that did."""
        units = np.flatnonzero(self.known & self.table.fresh)
        if not len(units):
            return best, False
        _, found = self._solve_over(goal, units, best, share=_BEGIN)
        if found is None:
            return best, False
        known = self.table.program.known_usd / self.master.money
        near = found.objective <= known * (1.0 + _SHARE_TOLERANCE)
        return replace(found, bound=min(found.objective, best.bound)), near

    def _slack(self, found: _Outcome) -> float:
        """Return the distance to the bound that will do."""
        if math.isinf(found.objective):
            return 0.0
        return max(0.5 * self.gap * abs(found.objective), 1e-9)

    def _solve_over(
        self, goal: _Goal, units: NDArray[np.int64], best: _Outcome, *, share: float
    ) -> tuple[MipResult, _Outcome | None]:
        """Solve the integer program over some units, and make the flows of what it finds exact.

        It may do the share of the work that is left.
        """
        master = self._make_master()
        used = [] if best.whole is None else list(best.whole.units)
        master.add_units(np.unique(np.concatenate([units, np.array(used, np.int64)])))
        goal.set_on(master)
        start = None
        if best.whole is not None and best.routed is not None:
            start = answers.values_of(master, best.whole, best.routed)
        result = master.solve_integer(
            gap=0.5 * self.gap,
            start=start,
            time_limit_s=self.end.left if start is not None else max(_MOMENT_S, self.end.left),
            iterations=max(_MIN_ITERATIONS, int(share * self.counter.left)),
        )
        self.late = self.late or result.timed_out
        if result.values is None:
            return result, None
        whole = answers.whole_of(master, result.values)
        routed = answers.route(self.table, whole, self.weights, goal.least, 1.0, self.counter)
        if routed is None or self.level_of(routed) < goal.level * (1.0 - 10 * _SHARE_TOLERANCE):
            return result, None
        return result, _Outcome(whole, routed, self._worth(goal, whole, routed), -math.inf)

    def _worth(self, goal: _Goal, whole: Whole, routed: Routed) -> float:
        if goal.seeks == "share":
            return -self.level_of(routed)
        return sum(answers.costs(self.table, whole)) / self.master.money


def _near(value: float, bound: float, gap: float) -> bool:
    return abs(value - bound) <= gap * max(abs(value), abs(bound)) + 1e-9
