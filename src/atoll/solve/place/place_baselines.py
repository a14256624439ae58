"""Placements by simple rules, for comparison: Swarm, Petals, separate pipelines, one chain, and at random.

Each returns None where its rule holds no whole model on these nodes. Petals needs partial inference.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise

import numpy as np

from atoll.core.rng import stream
from atoll.solve.array_types import Floats
from atoll.solve.place.evaluate import max_flow
from atoll.solve.place.flow_instance import FlowInstance, Placement

_REBALANCING = 8
"""Rounds in which every Petals server asks once whether to move."""
_WORTH_MOVING = 1.2
"""A Petals server moves if the weakest layer gains this much."""

Ranges = dict[int, tuple[int, int]]


def swarm(instance: FlowInstance) -> Placement | None:
    """Equal stages, as few as let the weakest node hold one; the strongest node joins the weakest stage.

    Stages have the same number of layers where some number of stages allows that. Where there are fewer
    nodes than stages, the node types that hold the fewest layers stay unused.
    """
    ranges = _even_stages(instance, range(instance.size))
    return None if ranges is None else _placement(instance, ranges)


def petals(instance: FlowInstance, seed: int = 0) -> Placement | None:
    """Nodes join one by one, each with all the layers it holds where the swarm is weakest, and may move on.

    A node takes the run of layers whose throughputs, sorted, are smallest; later it moves if the weakest
    layer of all gains a fifth by it. The order of joining is random.
    """
    order = stream(seed, "petals").permutation(instance.size)
    max_layers = np.minimum(instance.max_layers, instance.layers)
    rate = instance.rate[np.arange(instance.size), max_layers]
    load = np.zeros(instance.layers)
    start = np.zeros(instance.size, np.int64)
    for i in order:
        start[i] = _weakest_run(load, int(max_layers[i]))
        load[start[i] : start[i] + max_layers[i]] += rate[i]
    for _ in range(_REBALANCING):
        moved = False
        for i in order:
            rest = load.copy()
            rest[start[i] : start[i] + max_layers[i]] -= rate[i]
            better = _weakest_run(rest, int(max_layers[i]))
            tried = rest.copy()
            tried[better : better + max_layers[i]] += rate[i]
            if tried.min() > load.min() * _WORTH_MOVING:
                start[i], load, moved = better, tried, True
        if not moved:
            break
    return Placement(start, start + max_layers) if load.min() > 0 else None


def separate(instance: FlowInstance) -> Placement | None:
    """Each node type that can hold the model serves it alone, in equal stages; the others stay unused."""
    ranges, _ = _by_type(instance)
    return _placement(instance, ranges) if ranges else None


def separate_plus(instance: FlowInstance) -> Placement | None:
    """As `separate`, and what is left serves the model together if it can."""
    ranges, left = _by_type(instance)
    ranges |= _mix(instance, left) or {}
    return _placement(instance, ranges) if ranges else None


def chain(instance: FlowInstance) -> Placement | None:
    """One pipeline through all nodes: each next layer to the node that then still carries the most.

    No single pipeline carries more where links do not bind. Nodes stand region by region.
    """
    if int(instance.max_layers.sum()) < instance.layers:
        return None
    held = np.zeros(instance.size, np.int64)
    for _ in range(instance.layers):
        able = np.flatnonzero(held < instance.max_layers)
        held[able[np.argmax(instance.rate[able, held[able] + 1])]] += 1
    ranges: Ranges = {}
    done = 0
    for i in sorted(range(instance.size), key=lambda i: (instance.regions[i], i)):
        if held[i]:
            ranges[i] = (done, done + int(held[i]))
            done += int(held[i])
    return _placement(instance, ranges)


def at_random(instance: FlowInstance, seed: int = 0) -> Placement | None:
    """Nodes in random order, each with all the layers it holds from where the one before it ended.

    At the last layer the next node starts over; what reaches it in pieces only stays unused.
    """
    order = stream(seed, "random placement").permutation(instance.size)
    ranges: Ranges = {}
    chain: Ranges = {}
    done = 0
    for i in map(int, order):
        end = min(instance.layers, done + int(instance.max_layers[i]))
        chain[i] = (done, end)
        done = end
        if done == instance.layers:
            ranges |= chain
            chain, done = {}, 0
    return _placement(instance, ranges) if ranges else None


def _placement(instance: FlowInstance, ranges: Ranges) -> Placement:
    start, end = np.zeros(instance.size, np.int64), np.zeros(instance.size, np.int64)
    for i, (first, past) in ranges.items():
        start[i], end[i] = first, past
    return Placement(start, end)


def _weakest_run(load: Floats, length: int) -> int:
    """The first run of so many layers whose sorted throughputs are the smallest."""
    runs = np.sort(np.lib.stride_tricks.sliding_window_view(load, length), axis=1)
    return min(range(len(runs)), key=lambda s: (*runs[s].tolist(), s))


def _cuts(layers: int, stages: int) -> list[tuple[int, int]]:
    """Layers in equal stages, the first ones a layer longer where they do not divide."""
    edges = [layers * k // stages for k in range(stages + 1)]
    return list(pairwise(edges))


def _stage_counts(layers: int, min_stages: int, nodes: int) -> Iterator[int]:
    """Numbers of stages to try: the fewest of equal length, then the fewest of nearly equal length."""
    fewest = -(-layers // min_stages)
    yield from (n for n in range(fewest, nodes + 1) if layers % n == 0)
    yield fewest


def _even_stages(
    instance: FlowInstance, nodes: Iterable[int], stages: int | None = None
) -> Ranges | None:
    """Spread nodes over equal stages, strongest first, each to the stage that carries the least."""
    ordered = sorted(nodes)
    for min_held in sorted({int(instance.max_layers[i]) for i in ordered}):
        counts = (
            _stage_counts(instance.layers, min_held, len(ordered)) if stages is None else (stages,)
        )
        for count in counts:
            ranges = _spread(instance, ordered, count)
            if ranges is not None:
                return ranges
    return None


def _spread(instance: FlowInstance, nodes: Sequence[int], stages: int) -> Ranges | None:
    cuts = _cuts(instance.layers, stages)
    longest = max(end - start for start, end in cuts)
    able = [i for i in nodes if instance.max_layers[i] >= longest]
    if len(able) < stages:
        return None
    carried = [0.0] * stages
    ranges: Ranges = {}
    for i in sorted(able, key=lambda i: (instance.rate[i, longest], i), reverse=True):
        at = min(range(stages), key=lambda k: (carried[k], k))
        start, end = cuts[at]
        carried[at] += float(instance.rate[i, end - start])
        ranges[i] = (start, end)
    return ranges


def _best(instance: FlowInstance, options: Iterable[Ranges | None]) -> Ranges | None:
    """The option that carries the most, the first among equals."""
    valued = [
        (max_flow(instance, _placement(instance, ranges)).value, -n, ranges)
        for n, ranges in enumerate(options)
        if ranges
    ]
    best = max(valued, default=None, key=lambda option: option[:2])
    return best[2] if best is not None and best[0] > 0 else None


def _by_type(instance: FlowInstance) -> tuple[Ranges, list[int]]:
    """The best equal stages of every node type by itself, and the nodes that are left."""
    ranges: Ranges = {}
    left: list[int] = []
    for kind in sorted(set(instance.node_types)):
        nodes = [i for i, other in enumerate(instance.node_types) if other == kind]
        fewest = -(-instance.layers // int(instance.max_layers[nodes[0]]))
        options = (_even_stages(instance, nodes, n) for n in range(fewest, len(nodes) + 1))
        best = _best(instance, options)
        if best is None:
            left += nodes
        else:
            ranges |= best
    return ranges, sorted(left)


def _mix(instance: FlowInstance, nodes: Sequence[int]) -> Ranges | None:
    """One pipeline of unlike nodes: equal stages, or one node after the other by how much it holds."""
    room = [int(instance.max_layers[i]) for i in nodes]
    if sum(room) < instance.layers:
        return None
    edges = [instance.layers * done // sum(room) for done in accumulate(room, initial=0)]
    by_size = {i: (a, b) for i, (a, b) in zip(nodes, pairwise(edges), strict=True) if b > a}
    return _best(instance, (_even_stages(instance, nodes), by_size))
