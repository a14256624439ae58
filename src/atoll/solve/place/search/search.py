"""Local search for the placement with the largest flow: annealing with restarts, good at any time.

Starts are given placements, those by level (`greedy`) and, where time counts and not evaluations, those of
lanes (`lanes`). Every run anneals from one of them, or from the best so far, towards a level a little above
the best flow (`anneal`). The search ends at the proven bound, at a target, or when time or evaluations are
spent. With a number of evaluations instead of seconds the same seed gives the same answer, bit for bit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from atoll.core.errors import UsageError
from atoll.core.rng import stream
from atoll.solve.place.bound.bounds import upper_bound
from atoll.solve.place.bound.lanes import lanes
from atoll.solve.place.instance import FlowInstance, Ints, Placement, PlacementResult
from atoll.solve.place.search.anneal import anneal, load
from atoll.solve.place.search.greedy import by_level, by_region
from atoll.solve.place.search.kernel import VALUE
from atoll.solve.place.search.kernel_tables import state_of, tables_of
from atoll.solve.place.search.moves import propose_one

Log = Callable[[float, float, float], None]
"""Told seconds since the start, the best value and the proven bound, both in tokens/s."""

_RUN = 12_000
"""Evaluations of a full run, for each node; the first runs are shorter."""
_SHORT = (0.02, 0.1, 0.25, 0.5)
_LEAST_RUN = 500
_HEATS = (0.1, 0.3, 1.0, 2.0)
"""Temperatures that runs begin with, as a share of the mean flow per node."""
_PULLS = (0.5, 1.0, 3.0)
_COOLED = 0.05
_ABOVE = (0.005, 0.1)
"""How far above the best flow a run aims, from and to."""
_LEAVE_OUT = 40
"""One step in so many takes a node out, where that can be better."""
_ONE_RUN = 0.1
_MISSES = 1000
"""Steps in a row, for each node, that come to nothing before a run is over: no node can move."""
_STUCK = 20
"""Runs that end so before the search does."""
_LANES_S = 5.0
_CHUNK = 400_000
"""Evaluations times nodes between two looks at the clock."""


@dataclass
class _BestPlacements:
    """The best distinct placements of all runs, best first, and when to stop."""

    instance: FlowInstance
    size: int
    goal: float
    bound: float
    began: float
    log: Log | None
    placements: dict[bytes, tuple[float, Placement]] = field(default_factory=dict)
    best: float = 0.0
    done: int = 0
    stop: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, evaluations: int) -> None:
        """Add to the evaluations done."""
        with self.lock:
            self.done += evaluations

    def offer(self, value: float, placement: Placement) -> None:
        """Keep a placement if it is among the best; equal nodes with exchanged ranges are the same."""
        key = _signature(self.instance, placement)
        with self.lock:
            if key in self.placements or value <= 0.0:
                return
            self.placements[key] = (value, placement)
            if len(self.placements) > self.size:
                del self.placements[
                    min(self.placements, key=lambda other: self.placements[other][0])
                ]
            if value > self.best:
                self.best = value
                if self.log is not None:
                    self.log(time.perf_counter() - self.began, value, self.bound)


def _signature(instance: FlowInstance, placement: Placement) -> bytes:
    order = np.lexsort((placement.end, placement.start, instance.kind))
    rows = np.stack([instance.kind[order], placement.start[order], placement.end[order]])
    return rows.astype(np.int64).tobytes()


def search(
    instance: FlowInstance,
    *,
    seconds: float = 60.0,
    seed: int = 0,
    workers: int = 1,
    start: Sequence[Placement] = (),
    target: float | None = None,
    evaluations: int | None = None,
    log: Log | None = None,
) -> PlacementResult:
    """Return the best placement found within `seconds`, or within `evaluations` if given.

    Ends early at the proven bound or at `target` tokens/s. `workers` threads run restarts of their own.
    """
    return search_many(
        instance,
        candidates=1,
        seconds=seconds,
        seed=seed,
        workers=workers,
        start=start,
        target=target,
        evaluations=evaluations,
        log=log,
    )[0]


def search_many(
    instance: FlowInstance,
    *,
    candidates: int,
    seconds: float = 60.0,
    seed: int = 0,
    workers: int = 1,
    start: Sequence[Placement] = (),
    target: float | None = None,
    evaluations: int | None = None,
    log: Log | None = None,
) -> tuple[PlacementResult, ...]:
    """Return up to `candidates` distinct placements, best first, at least one; see `search`.

    Where nothing flows, the one placement uses no node.
    """
    for name, count in (("candidates", candidates), ("workers", workers)):
        if count < 1:
            raise UsageError(f"{name} must be at least 1, got {count}", field=name)
    began, cpu = time.perf_counter(), time.process_time()
    starts = _starts(instance, start)
    bound = upper_bound(instance).value
    if evaluations is None:
        more = lanes(instance, seconds=min(_LANES_S, seconds / 6), high=bound)
        starts += [] if more is None else [more]
    goal = bound * (1.0 - 1e-8) if target is None else min(target, bound * (1.0 - 1e-8))
    pool = _BestPlacements(instance, candidates, goal, bound, began, log)
    if starts and bound > 0.0:
        until = np.inf if evaluations is not None else began + seconds
        share = None if evaluations is None else -(-evaluations // workers)
        if workers == 1:
            _Worker(pool, starts, seed, 0).work(until, share)
        else:
            with ThreadPoolExecutor(workers) as threads:
                jobs = [
                    threads.submit(_Worker(pool, starts, seed, number).work, until, share)
                    for number in range(workers)
                ]
                for job in jobs:
                    job.result()
    return _rank(pool, bound, began, cpu)


def _starts(instance: FlowInstance, extra: Sequence[Placement]) -> list[Placement]:
    """Return what to search from: given placements and those by level."""
    greedy = (by_level(instance), by_region(instance))
    return [*extra, *(placement for placement in greedy if placement is not None)]


def _rank(
    pool: _BestPlacements, bound: float, began: float, cpu: float
) -> tuple[PlacementResult, ...]:
    spent = (time.perf_counter() - began, time.process_time() - cpu)
    if not pool.placements:
        nothing = np.zeros(pool.instance.size, np.int64)
        return (PlacementResult(Placement(nothing, nothing.copy()), 0.0, bound, pool.done, *spent),)
    ranked = sorted(pool.placements.items(), key=lambda item: (-item[1][0], item[0]))
    return tuple(
        PlacementResult(placement, value, max(bound, value), pool.done, *spent)
        for _, (value, placement) in ranked
    )


class _Worker:
    """One thread's restarts.

    Workers know nothing of each other's placements, so that with a given number of evaluations it does not
    matter which is faster.
    """

    def __init__(
        self, pool: _BestPlacements, starts: Sequence[Placement], seed: int, number: int
    ) -> None:
        self.pool = pool
        self.starts = starts
        self.tables, self.units = tables_of(pool.instance)
        self.state = state_of(self.tables)
        self.scratch = state_of(self.tables)
        self.random = stream(seed, "flow", str(number))
        self.words = self.random.integers(1, 1 << 63, 1, np.uint64)
        self.kind = np.ascontiguousarray(pool.instance.kind, np.int64)
        self.goal = int(pool.goal * self.units)
        self.best = 0
        self.start, self.end = np.zeros_like(self.kind), np.zeros_like(self.kind)
        self.chunk = max(64, _CHUNK // pool.instance.size)

    def work(self, until: float, evaluations: int | None) -> None:
        """Run restarts until time (of `perf_counter`) or evaluations are spent."""
        for placement in self.starts:
            value = load(self.tables, self.state, placement.start, placement.end)
            if value > self.best:
                self._keep(value, placement.start, placement.end)
            self._offer(placement.start, placement.end)
        left = evaluations if evaluations is not None else 1 << 62
        spent, began = 0, time.perf_counter()
        runs = 0
        while left > 0 and self.best < self.goal and not self.pool.stop.is_set():
            now = time.perf_counter()
            if now >= until:
                break
            total = _RUN * len(self.kind)
            if runs < len(_SHORT):
                total = int(total * _SHORT[runs])
            # A run that is cut off never cools down: leave room for more of them.
            if evaluations is not None:
                total = min(total, evaluations // 8 + 1)
            elif spent:
                total = min(total, int(spent / (now - began) * (until - now) / 3))
            else:
                total = min(total, self.chunk)
            total = min(max(total, _LEAST_RUN), left)
            done = self._run(total, until, fresh=runs > 0 and self.random.random() < 0.5)
            left -= done
            spent += done
            runs += 1
        if self.best >= self.goal and evaluations is None:
            self.pool.stop.set()

    def _run(self, total: int, until: float, *, fresh: bool) -> int:
        """Anneal once, from the best placement so far or from one of the starts; return its evaluations."""
        tables, state, random = self.tables, self.state, self.random
        if fresh:
            chosen = self.starts[int(random.integers(len(self.starts)))]
            load(tables, state, chosen.start, chosen.end)
        else:
            load(tables, state, self.start, self.end)
        # Where nothing flows yet, a tenth of the bound stands in for the flow.
        usual = max(self.best, int(0.1 * self.pool.bound * self.units), 1)
        hot = float(random.choice(_HEATS)) * usual / len(self.kind)
        pull = float(random.choice(_PULLS))
        most = int(self.pool.bound * self.units) + 1
        level = min(int(usual * (1.0 + random.uniform(*_ABOVE))) + 1, most)
        best, start, end = int(state.number[VALUE]), state.start.copy(), state.end.copy()
        done = 0
        while done < total and best < self.goal and not self.pool.stop.is_set():
            upto = min(done + self.chunk, total)
            reached, best = anneal(
                tables, state, self.kind, self.words, done, upto, total, hot, hot * _COOLED, level, pull,
                self.goal, best, start, end,
            )  # fmt: skip
            self.pool.count(reached - done)
            done = reached
            if best > self.best:
                self._keep(best, start, end)
                self._offer(start, end)
            if time.perf_counter() >= until:
                break
        self._offer(start, end)
        return done

    def _keep(self, value: int, start: Ints, end: Ints) -> None:
        self.best = value
        self.start[:], self.end[:] = start, end

    def _offer(self, start: Ints, end: Ints) -> None:
        """Give a placement to the pool, without the nodes that carry nothing."""
        value = load(self.tables, self.scratch, start, end)
        n = len(start)
        idle = self.scratch.flow[2 * n : 3 * n] == 0
        self.pool.offer(
            value / self.units, Placement(np.where(idle, 0, start), np.where(idle, 0, end))
        )


def search_by(
    instance: FlowInstance,
    evaluate: Callable[[Ints, Ints], float],
    *,
    candidates: int = 1,
    seconds: float = 60.0,
    seed: int = 0,
    start: Sequence[Placement] = (),
    evaluations: int | None = None,
    bound: float = np.inf,
    log: Log | None = None,
) -> tuple[PlacementResult, ...]:
    """Search for the largest value of any objective of (start, end), say sustained throughput; best first.

    The same steps as `search`, with nodes left out now and then; for objectives that take so long that the
    loop around them does not matter. Runs are a tenth of the time or evaluations each.
    """
    began, cpu = time.perf_counter(), time.process_time()
    pool = _BestPlacements(instance, candidates, bound, bound, began, log)
    random = stream(seed, "flow", "any objective")
    starts = _starts(instance, start)
    scored = [(float(evaluate(placement.start, placement.end)), placement) for placement in starts]
    for value, placement in scored:
        pool.offer(value, placement)
    pool.count(len(scored))

    def spent() -> float:
        if evaluations is not None:
            return pool.done / max(1, evaluations)
        return (time.perf_counter() - began) / max(seconds, 1e-9)

    run = stuck = 0
    while scored and spent() < 1.0 and pool.best < bound and stuck < _STUCK:
        best = max(scored, key=lambda pair: pair[0])
        begin = scored[int(random.integers(len(scored)))] if run % 2 else best
        top, moved = _run_by(pool, evaluate, begin, random, spent)
        pool.offer(*top)
        scored.append(top)
        stuck += not moved
        run += 1
    return _rank(pool, bound, began, cpu)


def _run_by(
    pool: _BestPlacements,
    evaluate: Callable[[Ints, Ints], float],
    begin: tuple[float, Placement],
    random: np.random.Generator,
    spent: Callable[[], float],
) -> tuple[tuple[float, Placement], bool]:
    """Anneal once by any objective; return the best of the run, and whether nodes could move to its end."""
    instance = pool.instance
    kind = instance.kind.astype(np.int64)
    most = np.minimum(instance.most, instance.layers).astype(np.int64)
    words = random.integers(1, 1 << 63, 1, np.uint64)
    change = np.zeros((instance.size + 2, 3), np.int64)
    value, top = begin[0], begin
    start, end = begin[1].start.copy(), begin[1].end.copy()
    first, hot = spent(), float(random.choice(_HEATS)) * max(pool.best, 1e-9) / len(kind)
    misses = 0
    while (gone := (spent() - first) / _ONE_RUN) < 1.0 and spent() < 1.0:
        rows = propose_one(words, start, end, most, kind, instance.layers, _LEAVE_OUT, change)
        misses = 0 if rows else misses + 1
        if misses > _MISSES * len(kind):
            return top, False
        if not rows:
            continue
        nodes = change[:rows, 0]
        old = start[nodes], end[nodes]
        start[nodes], end[nodes] = change[:rows, 1], change[:rows, 2]
        then = float(evaluate(start, end))
        pool.count(1)
        if then - value < hot * _COOLED**gone * np.log(1.0 - random.random()):
            start[nodes], end[nodes] = old
            continue
        value = then
        if value > top[0]:
            top = (value, Placement(start.copy(), end.copy()))
            if value > pool.best:
                pool.offer(*top)
    return top, True
