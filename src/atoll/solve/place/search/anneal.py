"""The inner loop of the flow search: annealing towards a level of flow (numba).

The flow of a placement says nothing about layers other than the weakest: most steps leave it as it is or
break it. So the search aims at a level f above the best flow known, and a placement counts

    E = flow + pull * mean over layers of min(capacity of the layer's holders, f)

so that steps which bring weak layers closer to f are taken before the flow can rise. With the threshold of
acceptance drawn first, E of the capacities alone rejects most steps before any flow is computed.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from atoll.solve.place.search.kernel import VALUE, attempt, weigh, weigh_after
from atoll.solve.place.search.kernel_tables import FlowState, Ints, Tables
from atoll.solve.place.search.moves import Words, propose, unit

_SAME_HEAT = 64
"""Evaluations between two changes of the temperature."""


@njit(cache=True, nogil=True)
def anneal(
    tables: Tables,
    state: FlowState,
    kind: Ints,
    random: Words,
    first: int,
    last: int,
    total: int,
    hot: float,
    cold: float,
    level: int,
    pull: float,
    goal: int,
    best: int,
    best_start: Ints,
    best_end: Ints,
) -> tuple[int, int]:
    """Do evaluations `first` to `last` of a run of `total`; return (evaluations done so far, best flow).

    The temperature falls from `hot` to `cold` (units of flow) over the run. Better placements than `best`
    are written to `best_start` and `best_end`; at `goal` the run ends.
    """
    n = kind.shape[0]
    change = np.empty((n + 2, 3), np.int64)
    start, end, rate, cover, number = state.start, state.end, tables.rate, state.cover, state.number
    most = tables.most
    layers = tables.layers
    weight = pull / layers
    now, _ = weigh(cover, level)
    done = first
    idle = 0
    heat = hot
    while done < last and best < goal and idle < 1000 * n:
        count = propose(random, start, end, most, kind, layers, 0, change)
        if count == 0:
            idle += 1
            continue
        idle = 0
        if done % _SAME_HEAT == 0 or done == first:
            heat = hot * (cold / hot) ** (done / total)
        done += 1
        then, weakest = weigh_after(start, end, rate, cover, change, count, level)
        drop = heat * np.log(unit(random)) + weight * np.float64(now - then)
        least = max(0, number[VALUE] + np.int64(np.ceil(drop)))
        if weakest >= least and attempt(tables, state, change, count, least):
            now = then
            if number[VALUE] > best:
                best = number[VALUE]
                best_start[:] = start
                best_end[:] = end
    return (last if idle else done), best
