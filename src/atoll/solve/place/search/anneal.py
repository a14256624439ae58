"""The inner loop of the flow search: annealing towards a level of flow (numba).

The flow of a placement says nothing about layers other than the weakest: most steps leave it as it is or
break it. So the search aims at a level f above the best flow known, and a placement counts

    E = flow + pull * mean over layers of min(capacity of the layer's holders, f)

so that steps which bring weak layers closer to f are taken before the flow can rise. With the threshold of
acceptance drawn first, E of the capacities alone rejects most steps before any flow is computed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from atoll.core.compiling import entry, lean_part
from atoll.solve.array_types import Ints
from atoll.solve.place.search.flow_kernel import VALUE, WORK, attempt, take_over, weigh, weigh_after
from atoll.solve.place.search.flow_tables import STATE_TYPE, TABLES_TYPE, FlowState, Tables
from atoll.solve.place.search.moves import propose
from atoll.solve.random_words import Words, unit

COMPILED_AS = "the search for placements"
_SAME_HEAT = 64
"""Evaluations between two changes of the temperature."""
_NO_KIND = np.zeros(0, np.int64)
_NO_CHANGE = np.zeros((0, 3), np.int64)
_NO_WORD = np.zeros(0, np.uint64)


@lean_part
def _anneal(
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
    change: Ints,
) -> tuple[int, int]:
    """Do what `anneal` says; `change` has room for the rows of a step."""
    n = kind.shape[0]
    start, end, rate, cover, number = state.start, state.end, tables.rate, state.cover, state.number
    max_layers = tables.max_layers
    layers = tables.layers
    weight = pull / layers
    now, _ = weigh(cover, level)
    done = first
    idle = 0
    heat = hot
    # Steps that come to nothing do not count as evaluations, so a placement with no valid step needs its own
    # end.
    while done < last and best < goal and idle < 1000 * n:
        count = propose(random, start, end, max_layers, kind, layers, 0, change)
        if count == 0:
            idle += 1
            continue
        idle = 0
        # The power is dear beside a rejected step, so the temperature is kept for a while.
        if done % _SAME_HEAT == 0 or done == first:
            heat = hot * (cold / hot) ** (done / total)
        done += 1
        # Every evaluation pays for weighing all layers, also those that never touch the flow.
        number[WORK] += layers
        then, weakest = weigh_after(start, end, rate, cover, change, count, level)
        # Metropolis turned around: with the random number drawn first, the least flow that is accepted is
        # known.
        drop = heat * np.log(unit(random)) + weight * np.float64(now - then)
        min_value = max(0, number[VALUE] + np.int64(np.ceil(drop)))
        # The weakest layer bounds the flow, so this test spares the flow of most rejected steps.
        if weakest >= min_value and attempt(tables, state, change, count, min_value):
            now = then
            if number[VALUE] > best:
                best = number[VALUE]
                for i in range(n):
                    best_start[i] = start[i]
                    best_end[i] = end[i]
    # Without a valid step the run counts as complete, else its caller would ask for the rest again.
    return (last if idle else done), best


@entry(
    f"({TABLES_TYPE}, {STATE_TYPE}, int64[::1], uint64[::1], int64, int64, int64, float64, float64,"
    " int64, float64, int64, int64, int64[::1], int64[::1], int64[:, ::1])"
)
def _load_or_anneal(
    tables: tuple[Any, ...],
    state: tuple[Any, ...],
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
    start: Ints,
    end: Ints,
    change: Ints,
) -> tuple[int, int]:
    """`anneal`; with `total` 0 `load`. One entry for both: most of what they are made of is the same."""
    if total == 0:
        return 0, take_over(Tables(*tables), FlowState(*state), start, end)
    return _anneal(
        Tables(*tables), FlowState(*state), kind, random, first, last, total, hot, cold, level, pull,
        goal, best, start, end, change,
    )  # fmt: skip


def load(tables: Tables, state: FlowState, start: Ints, end: Ints) -> int:
    """Take over a placement and compute its maximum flow from nothing; return its value."""
    _, value = _load_or_anneal(
        tuple(tables), tuple(state), _NO_KIND, _NO_WORD, 0, 0, 0, 0.0, 0.0, 0, 0.0, 0, 0,
        np.ascontiguousarray(start, np.int64), np.ascontiguousarray(end, np.int64), _NO_CHANGE,
    )  # fmt: skip
    return value


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
    return _load_or_anneal(
        tuple(tables), tuple(state), kind, random, first, last, total, hot, cold, level, pull, goal,
        best, best_start, best_end, np.empty((len(kind) + 2, 3), np.int64),
    )  # fmt: skip
