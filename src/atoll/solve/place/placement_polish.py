"""Annealing of a placement by any value of it, for goals whose evaluation takes milliseconds.

Steps keep the boundaries that other nodes meet: a node takes the range of another or one between two
boundaries, two nodes of different kinds change places, or a boundary moves by a layer with all that meet at
it. Placements that leave a layer to nobody are not evaluated.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from atoll.solve.array_types import Ints
from atoll.solve.deadline import Deadline
from atoll.solve.place.flow_instance import FlowInstance, Placement

Value = Callable[[Ints, Ints], float]
_HOT = 0.03
"""Share of the best value that the first step may lose with a chance of 1/e."""
_COLD = 0.001
"""The same of the last step."""
_AGAIN = 60
"""Steps without a better placement, for each node, after which the best one is taken up again."""


def polish(
    instance: FlowInstance,
    start: Placement,
    value: Value,
    *,
    steps: int,
    random: np.random.Generator,
    deadline: Deadline | None = None,
) -> tuple[Placement, float]:
    """Return the best placement found from `start` within so many steps, and its value.

    Steps that cannot be taken count, too. A deadline ends it early.
    """
    at = (start.start.copy(), start.end.copy())
    here = best = value(*at)
    kept = at
    stale = 0
    for taken in range(steps):
        if deadline is not None and deadline.is_over():
            break
        stale += 1
        # Wandering too far without success: go on from the best.
        if stale > _AGAIN * instance.size:
            at, here, stale = kept, best, 0
        tried = change(instance, *at, random)
        if tried is None:
            continue
        new = value(*tried)
        # The temperature falls geometrically, in proportion to the best value.
        heat = max(best, 1e-12) * _HOT * (_COLD / _HOT) ** (taken / steps)
        if new >= here or random.random() < math.exp((new - here) / heat):
            at, here = tried, new
            if new > best * (1 + 1e-12):
                best, kept, stale = new, tried, 0
    return Placement(*kept), best


def change(
    instance: FlowInstance, start: Ints, end: Ints, random: np.random.Generator
) -> tuple[Ints, Ints] | None:
    """Return a placement with one step taken, None where the one drawn is impossible or bares a layer."""
    tried = _step(instance, start, end, random)
    return tried if tried is not None and _covers_all(*tried, instance.layers) else None


def _covers_all(start: Ints, end: Ints, layers: int) -> bool:
    edges = np.zeros(layers + 1, np.int64)
    used = end > start
    np.add.at(edges, start[used], 1)
    np.add.at(edges, end[used], -1)
    # A layer that nobody holds stops all flow, so such a step needs no value.
    return bool(np.cumsum(edges)[:layers].min() > 0)


def _step(
    instance: FlowInstance, start: Ints, end: Ints, random: np.random.Generator
) -> tuple[Ints, Ints] | None:
    """Return a changed placement, None where the step drawn cannot be taken."""
    which = random.random()
    if which < 0.45:
        return _retake(instance, start, end, random)
    if which < 0.7:
        return _exchange(instance, start, end, random)
    return _shift(instance, start, end, random)


def _retake(
    instance: FlowInstance, start: Ints, end: Ints, random: np.random.Generator
) -> tuple[Ints, Ints] | None:
    """Give a node the range between two boundaries, as far as it can hold it."""
    i = int(random.integers(instance.size))
    edges = np.unique(np.concatenate([start, end, [0, instance.layers]]))
    first = int(random.choice(edges[:-1]))
    reach = edges[(edges > first) & (edges <= first + instance.max_layers[i])]
    # Mostly up to a boundary, where ranges meet; at times elsewhere, so that new boundaries come up.
    if len(reach) and random.random() < 0.8:
        past = int(random.choice(reach))
    else:
        past = min(instance.layers, first + 1 + int(random.integers(instance.max_layers[i])))
    if (first, past) == (start[i], end[i]):
        return None
    new = (start.copy(), end.copy())
    new[0][i], new[1][i] = first, past
    return new


def _exchange(
    instance: FlowInstance, start: Ints, end: Ints, random: np.random.Generator
) -> tuple[Ints, Ints] | None:
    i, k = (int(x) for x in random.integers(instance.size, size=2))
    # Equal nodes with exchanged ranges are the same placement.
    if instance.kind[i] == instance.kind[k]:
        return None
    if end[k] - start[k] > instance.max_layers[i] or end[i] - start[i] > instance.max_layers[k]:
        return None
    new = (start.copy(), end.copy())
    for ends in new:
        ends[i], ends[k] = ends[k], ends[i]
    return new


def _shift(
    instance: FlowInstance, start: Ints, end: Ints, random: np.random.Generator
) -> tuple[Ints, Ints] | None:
    """Move a boundary by a layer or two, with every node that starts or ends there."""
    used = end > start
    edges = np.unique(np.concatenate([start[used], end[used]]))
    inner = edges[(edges > 0) & (edges < instance.layers)]
    if not len(inner):
        return None
    at = int(random.choice(inner))
    to = at + int(random.choice((-2, -1, 1, 2)))
    if not 0 < to < instance.layers:
        return None
    new = (np.where(used & (start == at), to, start), np.where(used & (end == at), to, end))
    held = new[1] - new[0]
    if (held[used] < 1).any() or (held > instance.max_layers).any():
        return None
    return new
