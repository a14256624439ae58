"""Annealing with restarts: the best distinct placements of many runs, within a budget of counted work.

Every run anneals from one of the starts, or from the best so far, towards a level a little above the best
flow (`anneal`). What a run may cost is counted in the kernel's own steps (`kernel.WORK`), never in seconds:
the same seed gives the same answer, bit for bit, however busy the machine is. The clock is a safety net.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from atoll.core.rng import stream
from atoll.solve.array_types import Ints
from atoll.solve.place.flow_instance import FlowInstance, Placement, PlacementResult
from atoll.solve.place.search.anneal import anneal, load
from atoll.solve.place.search.flow_kernel import VALUE, WORK
from atoll.solve.place.search.flow_tables import state_of, tables_of

Log = Callable[[float, float, float], None]
"""Told seconds since the start, the best value and the proven bound, both in tokens/s."""

_RUN = 12_000
"""Evaluations of a full run, for each node; the first runs are shorter."""
_FIRST_RUNS = (0.02, 0.1, 0.25, 0.5)
"""Lengths of the first runs, as shares of a full one: a first answer comes soon."""
_MIN_RUN = 500
"""Evaluations of the shortest run."""
HEATS = (0.1, 0.3, 1.0, 2.0)
"""Temperatures that runs begin with, as a share of the mean flow per node."""
_PULLS = (0.5, 1.0, 3.0)
"""Weights of layers that are too weak (see `anneal`), one a run."""
COOLED = 0.05
"""Temperature at the end of a run, as a share of that at its beginning."""
_ABOVE = (0.005, 0.1)
"""How far above the best flow a run aims, from and to."""
UNLIMITED = 1 << 60
"""Work of a search that counts evaluations alone."""
_CHUNK = 400_000
"""Evaluations times nodes between two looks at the clock."""


@dataclass(frozen=True)
class SearchBudget:
    """Limits of a search: evaluations, the kernel's work, and, as a safety net, the time at which it ends.

    `work` counts vertices reached and arcs looked at: 150 to 600 million of them are a CPU-second.
    """

    work: int
    evaluations: int | None = None
    until: float = np.inf

    def shared(self, workers: int) -> SearchBudget:
        """Return the part of one worker out of several."""
        own = None if self.evaluations is None else -(-self.evaluations // workers)
        return SearchBudget(-(-self.work // workers), own, self.until)


@dataclass
class BestPlacements:
    """The best distinct placements of all runs, at which flow to stop, and whether the clock ended them."""

    instance: FlowInstance
    size: int
    goal: float
    bound: float
    began: float
    log: Log | None
    placements: dict[bytes, tuple[float, Placement]] = field(default_factory=dict)
    best: float = 0.0
    done: int = 0
    cut_short: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, evaluations: int) -> None:
        """Add to the evaluations done."""
        with self.lock:
            self.done += evaluations

    def offer(self, value: float, placement: Placement) -> None:
        """Keep a placement if it is among the best; equal nodes with exchanged ranges are the same."""
        key = _signature(self.instance, placement)
        with self.lock:
            # A placement without any flow is no answer; `ranked` makes up an idle one if nothing else is
            # kept.
            if value <= 0.0:
                return
            known = self.placements.get(key)
            if known is not None:
                # Whichever thread came first.
                if _written(placement) < _written(known[1]):
                    self.placements[key] = (value, placement)
                return
            self.placements[key] = (value, placement)
            # Ties are broken by the key and not by the order of arrival, so threads do not change what is
            # kept.
            if len(self.placements) > self.size:
                worst = min(self.placements, key=lambda own: (self.placements[own][0], own))
                del self.placements[worst]
            if value > self.best:
                self.best = value
                if self.log is not None:
                    self.log(time.perf_counter() - self.began, value, self.bound)

    def ranked(self, bound: float, cpu: float) -> tuple[PlacementResult, ...]:
        """Return what was kept, best first; with nothing, one placement that uses no node.

        `cpu` is what `process_time` was at the start.
        """
        spent = (time.perf_counter() - self.began, time.process_time() - cpu, self.cut_short)
        if not self.placements:
            idle = np.zeros(self.instance.size, np.int64)
            nothing = Placement(idle, idle.copy())
            return (PlacementResult(nothing, 0.0, bound, self.done, *spent),)
        ranked = sorted(self.placements.items(), key=lambda item: (-item[1][0], item[0]))
        return tuple(
            PlacementResult(placement, value, max(bound, value), self.done, *spent)
            for _, (value, placement) in ranked
        )


def _signature(instance: FlowInstance, placement: Placement) -> bytes:
    # Nodes of a kind are sorted by range: two placements that only exchange equal nodes get the same bytes.
    order = np.lexsort((placement.end, placement.start, instance.kind))
    rows = np.stack([instance.kind[order], placement.start[order], placement.end[order]])
    return rows.astype(np.int64).tobytes()


def _written(placement: Placement) -> bytes:
    return placement.start.tobytes() + placement.end.tobytes()


class _RestartWorker:
    """One thread's restarts.

    Workers know nothing of each other's placements, so that with a given number of evaluations it does not
    matter which is faster.
    """

    def __init__(
        self, pool: BestPlacements, starts: Sequence[Placement], seed: int, number: int
    ) -> None:
        self.pool = pool
        self.starts = starts
        self.tables, self.units = tables_of(pool.instance, pool.bound)
        # Two states: one that runs go on from, and one to value an offer without touching the run.
        self.state = state_of(self.tables)
        self.scratch = state_of(self.tables)
        self.random = stream(seed, "flow", str(number))
        # xorshift never leaves the state 0, so its one word starts at 1 or above.
        self.words = self.random.integers(1, 1 << 63, 1, np.uint64)
        self.kind = np.ascontiguousarray(pool.instance.kind, np.int64)
        # The kernel compares whole numbers; `units` is how many of them are a token/s.
        self.goal = int(pool.goal * self.units)
        self.best = 0
        self.start, self.end = np.zeros_like(self.kind), np.zeros_like(self.kind)
        self.chunk = max(64, _CHUNK // pool.instance.size)

    def work(self, budget: SearchBudget) -> None:
        """Run restarts until the goal is reached or the budget is spent."""
        # The starts count as answers themselves, so a search without any budget still returns the best of
        # them.
        for placement in self.starts:
            value = load(self.tables, self.state, placement.start, placement.end)
            if value > self.best:
                self._keep(value, placement.start, placement.end)
            self._offer(placement.start, placement.end)
        left = budget.evaluations if budget.evaluations is not None else 1 << 62
        spent, runs = 0, 0
        first = int(self.state.number[WORK])
        while left > 0 and self.best < self.goal:
            worked = int(self.state.number[WORK]) - first
            if time.perf_counter() >= budget.until:
                self.pool.cut_short = True
                break
            if worked >= budget.work:
                break
            total = _RUN * len(self.kind)
            if runs < len(_FIRST_RUNS):
                total = int(total * _FIRST_RUNS[runs])
            # A run that is cut off never cools down: leave room for more of them.
            if budget.evaluations is not None:
                total = min(total, budget.evaluations // 8 + 1)
            if budget.work < UNLIMITED:
                # A run may take a third of the work left, at the work per evaluation of the runs so far.
                room = spent * (budget.work - worked) // (3 * max(worked, 1))
                # Before the first run nothing is known about the work of an evaluation: one chunk measures
                # it.
                total = min(total, room if spent else self.chunk)
            total = min(max(total, _MIN_RUN), left)
            # Later runs go on from the best or begin anew, evenly, so that one good valley does not take all
            # of them.
            done = self._run(total, budget, first, fresh=runs > 0 and self.random.random() < 0.5)
            left -= done
            spent += done
            runs += 1

    def _run(self, total: int, budget: SearchBudget, first: int, *, fresh: bool) -> int:
        """Anneal once, from the best placement so far or from one of the starts; return its evaluations."""
        tables, state, random = self.tables, self.state, self.random
        if fresh:
            chosen = self.starts[int(random.integers(len(self.starts)))]
            load(tables, state, chosen.start, chosen.end)
        else:
            load(tables, state, self.start, self.end)
        # Where nothing flows yet, a tenth of the bound stands in for the flow.
        usual = max(self.best, int(0.1 * self.pool.bound * self.units), 1)
        hot = float(random.choice(HEATS)) * usual / len(self.kind)
        pull = float(random.choice(_PULLS))
        # Above the proven bound there is nothing to aim at.
        max_value = int(self.pool.bound * self.units) + 1
        level = min(int(usual * (1.0 + random.uniform(*_ABOVE))) + 1, max_value)
        best, start, end = int(state.number[VALUE]), state.start.copy(), state.end.copy()
        done = 0
        # A run may go beyond the budget, since one that is cut never cools down; twice the budget ends it.
        max_work = first + 2 * budget.work
        while done < total and best < self.goal:
            upto = min(done + self.chunk, total)
            reached, best = anneal(
                tables, state, self.kind, self.words, done, upto, total, hot, hot * COOLED, level, pull,
                self.goal, best, start, end,
            )  # fmt: skip
            self.pool.count(reached - done)
            done = reached
            if best > self.best:
                self._keep(best, start, end)
                self._offer(start, end)
            if time.perf_counter() >= budget.until or state.number[WORK] > max_work:
                break
        self._offer(start, end)
        return done

    def _keep(self, value: int, start: Ints, end: Ints) -> None:
        self.best = value
        self.start[:], self.end[:] = start, end

    def _offer(self, start: Ints, end: Ints) -> None:
        """Give a placement to the pool, without the nodes that carry nothing."""
        # Valued in the other state, since the run goes on from its own; a node without flow is not used.
        value = load(self.tables, self.scratch, start, end)
        n = len(start)
        idle = self.scratch.flow[2 * n : 3 * n] == 0
        self.pool.offer(
            value / self.units, Placement(np.where(idle, 0, start), np.where(idle, 0, end))
        )


def explore(
    pool: BestPlacements,
    starts: Sequence[Placement],
    budget: SearchBudget,
    *,
    seed: int,
    workers: int = 1,
) -> None:
    """Fill the pool with the best placements of restarts from `starts`, in `workers` threads.

    Each worker has its share of the budget and knows nothing of the others, so that it does not matter which
    is faster; only where all that is asked for is reached may one end before the others.
    """
    # With no start to go from, or a bound that says nothing can flow, there is nothing to look for.
    if not starts or pool.bound <= 0.0:
        return
    share = budget.shared(workers)
    if workers == 1:
        _RestartWorker(pool, starts, seed, 0).work(share)
        return
    with ThreadPoolExecutor(workers) as threads:
        jobs = [
            threads.submit(_RestartWorker(pool, starts, seed, number).work, share)
            for number in range(workers)
        ]
        # A result is asked of every thread, so that an error in one of them is raised here.
        for job in jobs:
            job.result()
