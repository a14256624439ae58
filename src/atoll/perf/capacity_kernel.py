"""The search of `perf.capacity` over batch sizes, compiled: all stage counts and numbers of layers of a node.

The formulas are those of `CapacityModel._best`, term by term and in its order, so both give the same bits.
Here entries that cannot keep the promise are not searched, nor is what is left of a row once it carries
nothing: with more layers a node carries no more.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atoll.core.compiling import entry, part

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

COMPILED_AS = "capacities of nodes"


@part
def _interpolate(x: float, xs: Floats, ys: Floats) -> float:
    """Linear between points, constant beyond them, as `np.interp` has it."""
    last = len(xs) - 1
    # NaN stays NaN, as in `np.interp`.
    if x != x:
        return x
    if x < xs[0]:
        left: float = ys[0]
        return left
    if x >= xs[last]:
        right: float = ys[last]
        return right
    low, high = 0, last
    while high - low > 1:
        middle = (low + high) >> 1
        if x >= xs[middle]:
            low = middle
        else:
            high = middle
    # Exact at a point of the grid: the slope could round.
    if x == xs[low]:
        exact: float = ys[low]
        return exact
    slope = (ys[low + 1] - ys[low]) / (xs[low + 1] - xs[low])
    found: float = slope * (x - xs[low]) + ys[low]
    return found


@part
def _load_within(wait: float, stages: float, busiest: float, waits: Floats, loads: Floats) -> float:
    """`queueing.load_within` for half of what arrives."""
    if stages > 1.0:
        return min(1.0 - 1.0 / (1.0 + max(wait, 0.0)), busiest)
    return _interpolate(wait, waits, loads)


@part
def _lateness(
    i: int,
    stack: Floats,
    fixed: Floats,
    transfer: Floats,
    hops: float,
    passes: float,
    budget: float,
) -> float:
    """By how many seconds a batch is late."""
    late: float = (stack[i] + fixed[i]) * passes + transfer[i] * hops - budget
    return late


@part
def _crowding(
    i: int,
    stack: Floats,
    fixed: Floats,
    transfer: Floats,
    hops: float,
    passes: float,
    grid: Floats,
    depth: float,
    room: float,
) -> float:
    """By how many requests those in the pipeline exceed the room there is."""
    busy = stack[i] + fixed[i]
    spell = (busy * passes + transfer[i] * hops) / busy
    over: float = spell * (grid[i] * depth) - room
    return over


@part
def _crossing(below: int, size: int, first: float, second: float) -> float:
    """The fractional index at which values cross zero; `below` is the last index where they are not above."""
    if below < 0:
        return 0.0
    if below >= size - 1:
        return float(size - 1)
    share = -first / (second - first) if second > first else 0.0
    return below + share


@part
def _last_in_time(
    stack: Floats, fixed: Floats, transfer: Floats, hops: float, passes: float, budget: float
) -> float:
    """Where batches begin to be late (`grid.last_below`)."""
    size = len(stack)
    # Steps take longer with larger batches, so halving finds the last one in time.
    below, above = -1, size
    while above - below > 1:
        middle = (below + above) >> 1
        if _lateness(middle, stack, fixed, transfer, hops, passes, budget) <= 0.0:
            below = middle
        else:
            above = middle
    # Two neighbours on the grid, also where all batches are in time or none.
    left = min(max(below, 0), max(0, size - 2))
    return _crossing(
        below,
        size,
        _lateness(left, stack, fixed, transfer, hops, passes, budget),
        _lateness(min(left + 1, size - 1), stack, fixed, transfer, hops, passes, budget),
    )


@part
def _last_with_room(
    stack: Floats,
    fixed: Floats,
    transfer: Floats,
    hops: float,
    passes: float,
    grid: Floats,
    depth: float,
    room: float,
) -> float:
    """Where batches begin to need more room than there is (`grid.last_below`)."""
    size = len(stack)
    # A larger batch needs more room, so halving finds the last one that has it.
    below, above = -1, size
    while above - below > 1:
        middle = (below + above) >> 1
        if _crowding(middle, stack, fixed, transfer, hops, passes, grid, depth, room) <= 0.0:
            below = middle
        else:
            above = middle
    left = min(max(below, 0), max(0, size - 2))
    after = min(left + 1, size - 1)
    return _crossing(
        below,
        size,
        _crowding(left, stack, fixed, transfer, hops, passes, grid, depth, room),
        _crowding(after, stack, fixed, transfer, hops, passes, grid, depth, room),
    )


@part
def _clumped_seconds(
    stack: Floats, fixed: Floats, transfer: Floats, grid: Floats, room: float
) -> float:
    """Seconds of a step, and the hand-over, with as many prompts as there is room for."""
    size = len(grid)
    # Times are known on the grid only.
    batch = min(max(room, grid[0]), grid[size - 1])
    low, high = 0, size
    while low < high:
        middle = (low + high) >> 1
        if batch < grid[middle]:
            high = middle
        else:
            low = middle + 1
    index = min(max(low - 1, 0), max(0, size - 2))
    after = min(index + 1, size - 1)
    gap = grid[after] - grid[index]
    share = (batch - grid[index]) / gap if gap > 0.0 else 0.0
    first = (stack[index] + fixed[index]) + transfer[index]
    second = (stack[after] + fixed[after]) + transfer[after]
    took: float = first * (1.0 - share) + second * share
    return took


@entry(
    "(float64[::1], float64[:, ::1], float64[:, ::1], float64[::1], float64[:, ::1], boolean[:, ::1],"
    " float64[::1], float64[::1], float64[::1], float64[::1], float64[::1], float64[::1], float64[::1],"
    " float64[::1], float64[:, ::1], float64[:, ::1], boolean, float64, float64, float64, float64,"
    " float64[::1], float64[::1], float64[::1], float64[::1], float64[:, :, ::1])"
)
def fill_rates(  # noqa: C901 - one pass over positions, stages and layers
    grid: Floats,
    stack: Floats,
    fixed: Floats,
    transfer: Floats,
    room: Floats,
    fits: Bools,
    depth: Floats,
    budgets: Floats,
    passes: Floats,
    waited: Floats,
    spells: Floats,
    waiting: Floats,
    wire: Floats,
    tail_hop: Floats,
    tail_all: Floats,
    tail_longest: Floats,
    queues: bool,
    once: float,
    share: float,
    busiest: float,
    tokens: float,
    waits: Floats,
    loads: Floats,
    strict_waits: Floats,
    strict_loads: Floats,
    rates: Floats,
) -> None:
    """Write tokens/s of one copy: (positions, stage counts, layers + 1).

    `stack` is seconds by layers and batch, `fixed` by position and batch, `transfer` by batch; `room` and
    `fits` are by position and layers. By stage count are `depth`, `budgets`, `passes` and `waited` (a step
    with what is waited for before it, and without the queue), `spells` (S times a request's own steps),
    `waiting` (1 + 1 / 2S), `wire` and `tail_hop`. `tail_all` and `tail_longest` are `PieceTimes` by position
    and layers, empty where the longest prompt does not matter. With `queues` prompts wait for each other.
    """
    size, width = len(grid), stack.shape[0]
    tail = tail_all.shape[1] > 0
    for p in range(fixed.shape[0]):
        ends = fixed[p]
        for s in range(len(depth)):
            # A node alone hands nothing over.
            hops = 1.0 if depth[s] > 1.0 else 0.0
            rates[p, s, 0] = 0.0
            min_rate = np.inf
            for j in range(1, width):
                if min_rate <= 0.0 or not fits[p, j]:
                    min_rate = 0.0
                    rates[p, s, j] = 0.0
                    continue
                layers = stack[j]
                # One request alone, or one piece of it: if that is late, every batch is.
                alone = layers[0] + ends[0]
                first = alone * waited[s] + transfer[0] * hops
                in_time = first <= budgets[s]
                if tail and in_time:
                    # All its pieces pass one stage, and the longest of them the others.
                    pieces = (tail_all[p, j] + (depth[s] - 1.0) * tail_longest[p, j]) / depth[s]
                    in_time = pieces + tail_hop[s] <= budgets[s]
                if not in_time:
                    min_rate = 0.0
                    rates[p, s, j] = 0.0
                    continue
                late = _last_in_time(layers, ends, transfer, hops, passes[s], budgets[s])
                crowded = _last_with_room(
                    layers, ends, transfer, hops, passes[s], grid, depth[s], room[p, j]
                )
                # A batch grows until it meets the first of both limits.
                where = min(late, crowded)
                index = min(int(where), max(0, size - 2))
                part_of = where - index
                batch, step = grid[index], layers[index] + ends[index]
                if size > 1:
                    after = layers[index + 1] + ends[index + 1]
                    batch = batch * (1.0 - part_of) + grid[index + 1] * part_of
                    step = step * (1.0 - part_of) + after * part_of
                rate = batch / step
                if crowded <= 0.0:
                    # Even the smallest batch has too little room to keep the pipeline busy.
                    spell = grid[0] * depth[s] * (alone * passes[s] + transfer[0] * hops)
                    rate = rate * min(1.0, room[p, j] * alone / spell)
                if queues:
                    if depth[s] > 1.0:
                        # Prompts clump: one step may have all there is room for,
                        # and the other stages have nothing to do.
                        took = _clumped_seconds(layers, ends, transfer, grid, room[p, j])
                        rate = min(rate, room[p, j] / (took * spells[s]))
                    wait = (budgets[s] / waiting[s] - first / waiting[s]) * rate / once
                    if share == 0.5:
                        rate = rate * _load_within(wait, depth[s], busiest, waits, loads)
                    else:
                        load = _interpolate(wait * depth[s], strict_waits, strict_loads)
                        if share > 0.5:
                            load = min(load, _load_within(wait, depth[s], busiest, waits, loads))
                        rate = rate * load
                # Never more than with fewer layers, in spite of rounding.
                min_rate = min(min_rate, rate)
                rates[p, s, j] = min(min_rate * tokens, wire[s])
