"""Local search for the placement with the largest flow: annealing with restarts, good at any time.

Starts are given placements, those by level (`level_starts`), those of lanes (`lanes`) and, on large clusters,
sites placed one by one (`large_clusters`). Every run anneals from one of them, or from the best so far
(`restarts`). The search ends at the proven bound, at a target, or when its work or its evaluations are spent:
the same seed gives the same answer, bit for bit, on an idle and on a busy machine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from atoll.core.errors import UsageError
from atoll.solve.place.bound.bounds import upper_bound
from atoll.solve.place.bound.lanes import ITERATIONS as LANE_ITERATIONS
from atoll.solve.place.bound.lanes import lanes
from atoll.solve.place.flow_instance import FlowInstance, Placement, PlacementResult
from atoll.solve.place.search.large_clusters import LARGE, place_sites
from atoll.solve.place.search.level_starts import by_level, by_region
from atoll.solve.place.search.restarts import (
    UNLIMITED,
    BestPlacements,
    Log,
    SearchBudget,
    explore,
)

WORK = 4_000_000_000
"""Work of a search, in steps of its kernel (`restarts`): about twenty CPU-seconds."""
_EACH_NODE = 20_000
"""Evaluations for each node from which on a large cluster is worth all the work its sites may take."""
_LARGE_SHARE = 0.03
"""Share of the work for annealing a large cluster as a whole: a step there is dear."""


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
            # Sites have been placed already, and a step over all nodes is dear.
            work = int(work * _LARGE_SHARE)
        else:
            more = lanes(
                instance, seconds=left, iterations=int(share * LANE_ITERATIONS), high=bound
            )
        starts += [] if more is None else [more]
    # Where evaluations are counted, work is not.
    elif evaluations is not None:
        work = UNLIMITED
    # Flows are rounded down to whole units, so the bound itself may never be reached exactly.
    goal = bound * (1.0 - 1e-8) if target is None else min(target, bound * (1.0 - 1e-8))
    pool = BestPlacements(instance, candidates, goal, bound, began, log)
    explore(pool, starts, SearchBudget(work, evaluations, until), seed=seed, workers=workers)
    return pool.ranked(bound, cpu)


def _starts(instance: FlowInstance, extra: Sequence[Placement]) -> list[Placement]:
    """Return what to search from: given placements and those by level."""
    greedy = (by_level(instance), by_region(instance))
    return [*extra, *(placement for placement in greedy if placement is not None)]
