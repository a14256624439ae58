"""Starts for the search: placements by flow level, worked out without looking at links.

For a level f, m equal nodes side by side carry f on j layers if m T(j) >= f. Nodes of one class (same
rates, same region) that number c then hold at most

    D(c) = max_j  j + D(c - ceil(f / T(j))),   D(c) = 0 where no stage is left

layers as stages one after another, and f is reached if the D of all classes add up to L. Bisection finds
the largest f. With as many stages as nodes this is the chain of all nodes; with many nodes per stage it comes
close to the coverage bound.
"""

from __future__ import annotations

import numpy as np

from atoll.solve.array_types import Floats, Ints
from atoll.solve.place.flow_instance import FlowInstance, Placement

_STEPS = 60


def _classes(instance: FlowInstance, nodes: Ints) -> list[Ints]:
    """Return nodes grouped by region and rates, regions together."""
    keys: dict[tuple[object, ...], list[int]] = {}
    for i in nodes:
        keys.setdefault((instance.regions[i], instance.rate[i].tobytes()), []).append(int(i))
    order = sorted(keys, key=lambda key: str(key[0]))
    return [np.array(keys[key], np.int64) for key in order]


def _stages(rate: Floats, count: int, level: float) -> tuple[Ints, Ints, Ints]:
    """Return D(0..count), the layers of the stage that D(c) adds, and the nodes it takes, by layers."""
    need = np.full(len(rate), count + 1, np.int64)
    some = rate > 0.0
    need[some] = np.minimum(np.ceil(level / rate[some] * (1.0 - 1e-12)), count + 1).astype(np.int64)
    need[0] = count + 1
    held = np.arange(len(rate))
    best = np.zeros(count + 1, np.int64)
    pick = np.zeros(count + 1, np.int64)
    for c in range(1, count + 1):
        best[c] = best[c - 1]
        fits = need <= c
        if fits.any():
            gain = np.where(fits, held + best[np.maximum(c - need, 0)], 0)
            j = int(gain.argmax())
            if gain[j] > best[c]:
                best[c], pick[c] = gain[j], j
    return best, pick, need


def _layers_at(instance: FlowInstance, classes: list[Ints], level: float) -> int:
    return sum(
        int(
            _stages(
                instance.rate[nodes[0], : instance.max_layers[nodes[0]] + 1], len(nodes), level
            )[0][-1]
        )
        for nodes in classes
    )


def by_level(instance: FlowInstance, nodes: Ints | None = None) -> Placement | None:
    """Place nodes (all by default) as stages of the highest level that holds all layers; or None."""
    used = np.arange(instance.size) if nodes is None else nodes
    classes = _classes(instance, used)
    low, high = 0.0, float(instance.rate[used].max(axis=1).sum())
    if _layers_at(instance, classes, 1e-9 * high) < instance.layers:
        return None
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if _layers_at(instance, classes, middle) >= instance.layers:
            low = middle
        else:
            high = middle
    start, end = np.zeros(instance.size, np.int64), np.zeros(instance.size, np.int64)
    at = 0
    for members in classes:
        rate = instance.rate[members[0], : instance.max_layers[members[0]] + 1]
        best, pick, need = _stages(rate, len(members), low)
        left = len(members)
        while left > 0 and best[left] > 0 and at < instance.layers:
            j = int(pick[left])
            if best[left] == best[left - 1]:
                left -= 1
                continue
            group = members[left - need[j] : left]
            start[group], end[group] = at, min(at + j, instance.layers)
            at = min(at + j, instance.layers)
            left -= int(need[j])
    return Placement(start, end)


def by_region(instance: FlowInstance) -> Placement | None:
    """Place every region that can hold all layers by itself, `by_level`; None if none can."""
    start, end = np.zeros(instance.size, np.int64), np.zeros(instance.size, np.int64)
    some = False
    for region in sorted(set(instance.regions)):
        nodes = np.flatnonzero(np.array([name == region for name in instance.regions]))
        if int(instance.max_layers[nodes].sum()) < instance.layers:
            continue
        placement = by_level(instance, nodes)
        if placement is not None:
            some = True
            start[nodes], end[nodes] = placement.start[nodes], placement.end[nodes]
    return Placement(start, end) if some else None
