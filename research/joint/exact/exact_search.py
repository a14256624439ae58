"""The joint problem solved to a proven optimum: a search over what is open, bounded by tolls.

Rent dominates, so few configurations are open, and once they are known the rest is nearly a routing of each
type by itself. A node has some candidates open, some free and the others closed. Its bound is what types
pay with the best tolls found (`tolls`), which is much nearer to the truth than the integer program's
relaxation and a hundred times cheaper. Free candidates that would lift the bound above the best answer are
closed. Nodes are taken up by their bounds, least first; the free candidate on which most rent rests is
opened, or closed. What is left with a few free candidates is an integer program (`program`), as are now
and then the candidates most used at a node, for a better answer.

Effort is counted in nodes and passes; a deadline is a safety net that says so.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from atoll.core.errors import InfeasibleError
from atoll.solve.joint.joint_check import violations
from atoll.solve.joint.joint_problem import Floats, Ints, JointAnswer, JointProblem, cost_of
from atoll.solve.lp import INFINITY
from research.joint.exact.candidates import Candidates
from research.joint.exact.integer_program import JointProgram
from research.joint.exact.toll_routes import PASSES, Tolls, TollTable
from research.joint.exact.tolls import raise_tolls
from research.joint.exchange.exchange import exchange, exchange_at_prices

_ROOT, _OPENED, _CLOSED = (600, 1.0), (60, 1.0), (20, 0.5)
"""Passes and first step of the root, of a node with one more open, and of one with one more closed."""
_FREE = 2
"""Free candidates with which a node becomes an integer program."""
_TRIED, _TRIED_NODES = 7, 50
"""Candidates among which an answer is looked for at nodes 1, 4, 16, ..., and nodes of each such look."""
_PRICES = 100
"""Searches with other prices for a better answer, once the root has not proven the first one."""
_MAX_USE = 50.0
"""Loads above this count as this: a type cannot be served there in any case."""


@dataclass(frozen=True)
class ProvenAnswer:
    """An answer, what it costs (USD), the proven bound, and the work that it took.

    `configurations` are (pair, configuration) candidates in all, `kept` those that were left free at the
    root. `iterations` are passes over tolls and simplex iterations. `cut_short` says that a limit on work or
    the deadline ended it; `timed_out` that it was the deadline.
    """

    answer: JointAnswer
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
    problem: JointProblem,
    *,
    incumbent: JointAnswer | None = None,
    gap: float = 1e-4,
    node_limit: int | None = None,
    iteration_limit: int | None = None,
    deadline_s: float = INFINITY,
) -> ProvenAnswer:
    """Return the cheapest answer within a relative `gap`, proven; `incumbent` is a feasible one to beat.

    `node_limit` is the number of nodes after the root, `iteration_limit` that of passes and simplex
    iterations, about. Raises InfeasibleError where `max_unmet` leaves no answer, or none was found.
    """
    limits = _Limits(
        INFINITY if node_limit is None else node_limit,
        INFINITY if iteration_limit is None else iteration_limit,
        perf_counter() + deadline_s,
    )
    return _ExactSearch(problem, incumbent, gap, limits).run()


@dataclass(frozen=True)
class _Limits:
    nodes: float
    iterations: float
    end: float


class _BestAnswer:
    """The cheapest answer so far. Serving nothing is one, unless `max_unmet` forbids it."""

    def __init__(self, problem: JointProblem, incumbent: JointAnswer | None) -> None:
        self._problem = problem
        self.answer: JointAnswer | None = None
        self.cost = INFINITY
        self.take(incumbent)
        if (problem.max_unmet >= 1.0).all():
            self.take(_nothing(problem))
        found = exchange(problem)
        if not violations(problem, found):
            self.take(found)

    def take(self, other: JointAnswer | None) -> None:
        if other is not None:
            cost = cost_of(self._problem, other).total
            if cost < self.cost:
                self.answer, self.cost = other, cost


@dataclass(frozen=True)
class _SearchNode:
    """What is open and what is free; tolls of its parent, for the candidates `priced`."""

    opened: Ints
    free: Ints
    priced: Ints
    tolls: Tolls
    effort: tuple[int, float]


class _ExactSearch:
    def __init__(
        self, problem: JointProblem, incumbent: JointAnswer | None, gap: float, limits: _Limits
    ) -> None:
        self._problem, self._gap, self._limits = problem, gap, limits
        self._best = _BestAnswer(problem, incumbent)
        self._columns = columns = Candidates.of(problem)
        self._every = np.arange(columns.number)
        self._load = np.minimum(columns.load.T, _MAX_USE)
        self._cache = np.minimum(columns.cache.T, _MAX_USE)
        self._usd = (columns.delay * problem.delay_usd).T
        self._late = np.minimum(columns.delay / problem.delay_limit, 1e9).T - 1.0
        self._wrong = np.minimum(columns.error / problem.error_limit, 1e9).T - 1.0
        self._keep = problem.weights_gb[columns.model]
        self._amounts = np.array(
            [problem.horizon_h * problem.storage_usd, problem.budget, problem.storage_gb]
        )
        self._nodes = self._iterations = 0
        self._kept = columns.number
        self._closed = INFINITY
        """The least bound of all that was given up: nothing cheaper is there."""

    @property
    def _cut(self) -> float:
        """What is no cheaper than this is given up."""
        return self._best.cost * (1.0 - 0.9 * self._gap)

    def run(self) -> ProvenAnswer:
        types, number = self._problem.shape[0], self._columns.number
        nothing = np.zeros(0, np.int64)
        # Rent split evenly is a fair start.
        tolls = Tolls(
            np.tile(self._columns.rent / types, (types, 1)),
            np.zeros(number),
            np.zeros(number),
            np.zeros(2),
        )
        root = _SearchNode(nothing, self._every, self._every, tolls, _ROOT)
        heap = [(-INFINITY, 0, root)]
        if self._best.answer is None:
            # No answer to compare with: find one, or that there is none.
            self._solve(nothing, self._every, self._gap)
        if self._best.answer is None and not self._is_spent():
            raise InfeasibleError("no answer leaves as little unserved as max_unmet asks")
        ticket = 0
        while heap and heap[0][0] < self._cut and not self._is_spent():
            bound, _, node = heapq.heappop(heap)
            for child in self._expand(node, bound):
                # Of equals the newest first: an open candidate leads to an answer.
                ticket -= 1
                heapq.heappush(heap, (child[0], ticket, child[1]))
            if self._nodes == 1 and heap and self._best.answer is not None:
                self._best.take(exchange_at_prices(self._problem, self._best.answer, _PRICES))
        bound = min([self._closed, self._best.cost, *(entry[0] for entry in heap)])
        return self._result(bound, cut=bound < self._cut * (1.0 - 1e-9))

    def _is_spent(self) -> bool:
        return (
            self._nodes > self._limits.nodes
            or self._iterations > self._limits.iterations
            or perf_counter() >= self._limits.end
        )

    def _expand(self, node: _SearchNode, bound: float) -> list[tuple[float, _SearchNode]]:
        """Bound a node; return what is left of it, with its bound, the open one last."""
        columns = self._columns
        self._nodes += 1
        spent = columns.rent[node.opened].sum()
        free = node.free[spent + columns.rent[node.free] <= self._problem.budget]
        members = np.concatenate([node.opened, free])
        if not len(members):
            if (self._problem.max_unmet >= 1.0).all():
                self._closed = min(self._closed, float(self._problem.unmet_usd.sum()))
            return []
        tolls, found, spare, used = self._priced(node, members)
        bound = max(bound, found)
        if bound < self._cut and _is_power_of_4(self._nodes) and len(free):
            most = np.argsort(-used, kind="stable")[: max(_FREE, _TRIED - len(node.opened))]
            self._solve(node.opened, free[np.sort(most)], self._gap, _TRIED_NODES)
        left = bound + spare < self._cut
        if bound < self._cut and not left.all():
            self._closed = min(self._closed, bound + float(spare[~left].min()))
        free, used = free[left], used[left]
        if self._nodes == 1:
            self._kept = len(free)
        if bound >= self._cut:
            self._closed = min(self._closed, bound)
            return []
        if len(free) <= _FREE:
            self._closed = min(
                self._closed, max(bound, self._solve(node.opened, free, 0.5 * self._gap))
            )
            return []
        at = int(np.argmax((used + 1e-6) * columns.rent[free]))
        chosen, rest = free[at], np.delete(free, at)
        apart = rest[columns.pair[rest] != columns.pair[chosen]]
        opened = np.append(node.opened, chosen)
        return [
            (bound, _SearchNode(node.opened, rest, members, tolls, _CLOSED)),
            (bound, _SearchNode(opened, apart, members, tolls, _OPENED)),
        ]

    def _priced(self, node: _SearchNode, members: Ints) -> tuple[Tolls, float, Floats, Floats]:
        """Return a node's tolls, its bound, and of each free candidate what it has to spare and its use."""
        problem, opened = self._problem, len(node.opened)
        where = np.empty(self._columns.number, np.int64)
        where[node.priced] = np.arange(len(node.priced))
        at = where[members]
        placed = node.tolls.placed[:, at]
        placed[:, :opened] = 0.0
        tolls = Tolls(
            np.ascontiguousarray(placed),
            node.tolls.load[at],
            node.tolls.cache[at],
            node.tolls.totals.copy(),
        )
        load, cache, usd, late, wrong = (
            np.ascontiguousarray(each[:, members])
            for each in (self._load, self._cache, self._usd, self._late, self._wrong)
        )
        table = TollTable(
            self._columns.rent[members],
            self._keep[members],
            load,
            cache,
            usd,
            late,
            wrong,
            problem.unmet_usd,
            problem.data_stored_gb,
            self._amounts,
        )
        cut = self._cut
        # Steps aim a little above what is hoped for.
        target = 1.02 * cut if cut < INFINITY else problem.budget + float(problem.unmet_usd.sum())
        passes, rate = node.effort
        bound, work = raise_tolls(
            table, tolls, opened=opened, cut=cut, target=target, passes=passes, rate=rate
        )
        made = int(work.counts[PASSES])
        self._iterations += made
        return tolls, bound, work.spare[opened:], work.often[:, opened:].max(axis=0) / made

    def _solve(self, opened: Ints, free: Ints, gap: float, node_limit: int | None = None) -> float:
        """Solve with these open and those free; keep a better answer, return the bound."""
        cut, limits = self._cut, self._limits
        program = JointProgram(
            self._problem,
            self._columns,
            np.sort(np.concatenate([opened, free])),
            opened=opened,
            cut=cut,
        )
        left = limits.iterations - self._iterations
        answer, mip = program.solve(
            None, gap, node_limit, None if left == INFINITY else max(0, int(left)), limits.end
        )
        self._iterations += mip.iterations
        self._best.take(answer)
        return cut if mip.status == "infeasible" else min(cut, mip.bound)

    def _result(self, bound: float, *, cut: bool) -> ProvenAnswer:
        best = self._best
        late = cut and perf_counter() >= self._limits.end
        if best.answer is None:
            raise InfeasibleError("no answer was found within the limits: raise them or max_unmet")
        return ProvenAnswer(
            replace(best.answer, bound=bound),
            best.cost,
            bound,
            self._nodes,
            self._iterations,
            self._columns.number,
            self._kept,
            cut,
            late,
        )


def _is_power_of_4(number: int) -> bool:
    return number & (number - 1) == 0 and number.bit_length() % 2 == 1


def _nothing(problem: JointProblem) -> JointAnswer:
    types, models, tiers, _ = problem.shape
    return JointAnswer(
        np.full((models, tiers), -1, np.int64),
        np.zeros((types, models, tiers)),
        np.zeros((types, models, tiers), np.bool_),
        np.ones(types),
    )
