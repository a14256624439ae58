"""The best placement of a small cluster by trying all of them: what search and programs are checked with.

Placements are listed node by node. A branch ends where the layers that still lack capacity for more than
the best flow found need more work than the nodes left could do: no placement beyond it can be better. Of
nodes of one kind only ordered ranges are listed. What is left is given to the library's max flow.
"""

from __future__ import annotations

import time

import numpy as np
from numba import njit
from numpy.typing import NDArray

from atoll.solve.array_types import Floats, Ints
from atoll.solve.place.evaluate import max_flow
from atoll.solve.place.flow_instance import FlowInstance, Placement, PlacementResult

_BATCH = 64
_SAME = 1e-7
"""Relative difference that counts as equal: the library's flow is that exact."""


@njit(cache=True, nogil=True)
def _next_placements(
    range_start: Ints,
    range_end: Ints,
    number: Ints,
    twin: Ints,
    rate: Floats,
    work: Floats,
    least: float,
    slack: float,
    cover: Floats,
    chosen: Ints,
    depth: int,
    rows: Ints,
) -> tuple[int, int]:
    """Go on listing placements in which every layer has `least` tokens/s or more; return (found, depth).

    `chosen[i]` is the range of node i, -1 before the first; `cover` the capacity of each layer by nodes below
    `depth`. The list ends with depth -1. `work[i]` is what nodes i and after can do at most, token-layers/s;
    `slack` forgives rounding in `cover`.
    """
    n = number.shape[0]
    found = 0
    while depth >= 0:
        if depth == n:
            rows[found] = chosen
            found += 1
            depth -= 1
            if found == rows.shape[0]:
                return found, depth
            continue
        here = chosen[depth]
        if here >= 0:
            s, e = range_start[depth, here], range_end[depth, here]
            cover[s:e] -= rate[depth, e - s]
            here += 1
        elif twin[depth] >= 0:
            here = chosen[twin[depth]]
        else:
            here = 0
        if here == number[depth]:
            chosen[depth] = -1
            depth -= 1
            continue
        chosen[depth] = here
        s, e = range_start[depth, here], range_end[depth, here]
        cover[s:e] += rate[depth, e - s]
        lacking = np.maximum(least - cover, 0.0).sum()
        if lacking <= work[depth + 1] + slack:
            depth += 1
    return found, depth


def brute(instance: FlowInstance, *, above: float = 0.0) -> PlacementResult:
    """Return the best of all placements with a flow above `above`; value `above` and no node if none is.

    Meant for a handful of nodes: the work grows with the number of ranges to the power of nodes.
    """
    began, cpu = time.perf_counter(), time.process_time()
    n, layers = instance.size, instance.layers
    order = np.argsort(instance.kind, kind="stable")
    kind = instance.kind[order]
    ranges = [
        [(0, 0)]
        + [
            (s, s + j)
            for j in range(1, min(int(instance.max_layers[i]), layers) + 1)
            for s in range(layers - j + 1)
            if instance.rate[i, j] > 0.0
        ]
        for i in order
    ]
    most = max(len(own) for own in ranges)
    pairs = np.zeros((2, n, most), np.int64)
    for place, own in enumerate(ranges):
        pairs[:, place, : len(own)] = np.array(own).T
    number = np.array([len(own) for own in ranges], np.int64)
    twin = np.array([i - 1 if i and kind[i - 1] == kind[i] else -1 for i in range(n)], np.int64)
    rate = np.ascontiguousarray(instance.rate[order])
    rate[:, 0] = 0.0
    slack = 1e-12 * float(rate.max())
    # Something that flows at all flows at the capacity of some node or link.
    sizes = np.concatenate(
        [own.ravel() for own in (rate, instance.link, instance.enter, instance.leave)]
    )
    smallest = float(sizes[sizes > 0.0].min(initial=np.inf)) * (1.0 - _SAME)
    held = np.arange(rate.shape[1])
    cover, chosen = np.zeros(layers), np.full(n, -1, np.int64)
    rows: NDArray[np.int64] = np.zeros((_BATCH, n), np.int64)
    best, placement = above, Placement(np.zeros(n, np.int64), np.zeros(n, np.int64))
    tried, depth = 0, 0
    while depth >= 0 and np.isfinite(smallest):
        least = max(best * (1.0 + _SAME), smallest)
        own = (held * np.minimum(rate, least)).max(axis=1)
        work = np.append(np.cumsum(own[::-1])[::-1], 0.0)
        found, depth = _next_placements(
            pairs[0], pairs[1], number, twin, rate, work, least, slack, cover, chosen, depth, rows
        )
        for row in rows[:found]:
            start, end = np.zeros(n, np.int64), np.zeros(n, np.int64)
            start[order] = pairs[0, np.arange(n), row]
            end[order] = pairs[1, np.arange(n), row]
            here = Placement(start, end)
            value = max_flow(instance, here).value
            tried += 1
            if value > best * (1.0 + _SAME):
                best, placement = value, here
    spent = (time.perf_counter() - began, time.process_time() - cpu)
    return PlacementResult(placement, best, best, tried, *spent)
