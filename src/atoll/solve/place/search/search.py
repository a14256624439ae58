"""Local search for the placement with the largest flow: annealing with restarts, good at any time.

Starts are given placements, those by level (`greedy`), those of lanes (`lanes`) and, on large clusters, sites
placed one by one (`sites`). Every run anneals from one of them, or from the best so far (`restarts`). The
search ends at the proven bound, at a target, or when its work or its evaluations are spent: the same seed
gives the same answer, bit for bit, on an idle and on a busy machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from atoll.core.errors import UsageError
from atoll.core.rng import stream
from atoll.solve.place.bound.bounds import upper_bound
from atoll.solve.place.bound.lanes import ITERATIONS as LANE_ITERATIONS
from atoll.solve.place.bound.lanes import lanes
from atoll.solve.place.instance import FlowInstance, Ints, Placement, PlacementResult
from atoll.solve.place.search.greedy import by_level, by_region
from atoll.solve.place.search.moves import propose_one
from atoll.solve.place.search.restarts import (
    COOLED,
    HEATS,
    UNLIMITED,
    BestPlacements,
    Log,
    SearchBudget,
    explore,
)
from atoll.solve.place.search.sites import LARGE, place_sites

WORK = 4_000_000_000
"""What a search may do, in steps of its kernel (`restarts`): about twenty CPU-seconds."""
EVALUATIONS = 20_000
"""What a search by any objective may do."""
_EACH_NODE = 20_000
"""Evaluations for each node from which on a large cluster is worth all the work its sites may take."""
_LARGE_SHARE = 0.03
"""Share of the work for annealing a large cluster as a whole: a step there is dear."""
_LEAVE_OUT = 40
"""One step in so many takes a node out, where that can be better."""
_ONE_RUN = 0.1
_MISSES = 1000
"""Steps in a row, for each node, that come to nothing before a run is over: no node can move."""
_STUCK = 20
"""Runs that end so before the search does."""


def search(
    instance: FlowInstance,
    *,
    seconds: float = np.inf,
    seed: int = 0,
    workers: int = 1,
    start: Sequence[Placement] = (),
    target: float | None = None,
    evaluations: int | None = None,
    work: int = WORK,
    bound: float | None = None,
    log: Log | None = None,
) -> PlacementResult:
    """Return the best placement found with so much `work`, or in so many `evaluations` if given.

    On a large cluster both limits hold: an evaluation there may cost a thousand times as much. Ends early
    at the proven bound or at `target` tokens/s. `workers` threads run restarts of their own. `seconds` is a
    safety net: a search that it ends says so. A `bound` that was proven elsewhere is taken as it is.
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
        work=work,
        bound=bound,
        log=log,
    )[0]


def search_many(
    instance: FlowInstance,
    *,
    candidates: int,
    seconds: float = np.inf,
    seed: int = 0,
    workers: int = 1,
    start: Sequence[Placement] = (),
    target: float | None = None,
    evaluations: int | None = None,
    work: int = WORK,
    bound: float | None = None,
    log: Log | None = None,
) -> tuple[PlacementResult, ...]:
    """Return up to `candidates` distinct placements, best first, at least one; see `search`.

    Where nothing flows, the one placement uses no node.
    """
    for name, count in (("candidates", candidates), ("workers", workers)):
        if count < 1:
            raise UsageError(f"{name} must be at least 1, got {count}", field=name)
    began, cpu = time.perf_counter(), time.process_time()
    until = began + seconds
    starts = _starts(instance, start)
    large = instance.size > LARGE
    if bound is None:
        bound = upper_bound(instance, tight=evaluations is None or not large).value
    if bound > 0.0 and (large or evaluations is None):
        left = until - time.perf_counter()
        # With little to do, little of it is for starts: they are some of several.
        share = min(1.0, 8.0 * work / WORK)
        if large:
            if evaluations is not None:
                share = min(share, evaluations / (_EACH_NODE * instance.size))
            more = place_sites(instance, seed=seed, effort=share, until=until)
            work = int(work * _LARGE_SHARE)
        else:
            more = lanes(
                instance, seconds=left, iterations=int(share * LANE_ITERATIONS), high=bound
            )
        starts += [] if more is None else [more]
    elif evaluations is not None:
        work = UNLIMITED
    goal = bound * (1.0 - 1e-8) if target is None else min(target, bound * (1.0 - 1e-8))
    pool = BestPlacements(instance, candidates, goal, bound, began, log)
    explore(pool, starts, SearchBudget(work, evaluations, until), seed=seed, workers=workers)
    return pool.ranked(bound, cpu)


def _starts(instance: FlowInstance, extra: Sequence[Placement]) -> list[Placement]:
    """Return what to search from: given placements and those by level."""
    greedy = (by_level(instance), by_region(instance))
    return [*extra, *(placement for placement in greedy if placement is not None)]


def search_by(
    instance: FlowInstance,
    evaluate: Callable[[Ints, Ints], float],
    *,
    candidates: int = 1,
    seconds: float = np.inf,
    seed: int = 0,
    start: Sequence[Placement] = (),
    evaluations: int = EVALUATIONS,
    bound: float = np.inf,
    log: Log | None = None,
) -> tuple[PlacementResult, ...]:
    """Search for the largest value of any objective of (start, end), say sustained throughput; best first.

    The same steps as `search`, with nodes left out now and then; for objectives that take so long that the
    loop around them does not matter. Runs are a tenth of the evaluations each; `seconds` is a safety net.
    """
    began, cpu = time.perf_counter(), time.process_time()
    pool = BestPlacements(instance, candidates, bound, bound, began, log)
    random = stream(seed, "flow", "any objective")
    starts = _starts(instance, start)
    scored = [(float(evaluate(placement.start, placement.end)), placement) for placement in starts]
    for value, placement in scored:
        pool.offer(value, placement)
    pool.count(len(scored))

    def spent() -> float:
        if time.perf_counter() - began >= seconds:
            pool.cut_short = True
            return 1.0
        return pool.done / max(1, evaluations)

    run = stuck = 0
    while scored and spent() < 1.0 and pool.best < bound and stuck < _STUCK:
        best = max(scored, key=lambda pair: pair[0])
        begin = scored[int(random.integers(len(scored)))] if run % 2 else best
        top, moved = _run_by(pool, evaluate, begin, random, spent)
        pool.offer(*top)
        scored.append(top)
        stuck += not moved
        run += 1
    return pool.ranked(bound, cpu)


def _run_by(
    pool: BestPlacements,
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
    first, hot = spent(), float(random.choice(HEATS)) * max(pool.best, 1e-9) / len(kind)
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
        if then - value < hot * COOLED**gone * np.log(1.0 - random.random()):
            start[nodes], end[nodes] = old
            continue
        value = then
        if value > top[0]:
            top = (value, Placement(start.copy(), end.copy()))
            if value > pool.best:
                pool.offer(*top)
    return top, True
