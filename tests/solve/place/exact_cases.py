"""Small random clusters with whole rates and links, and the best flow over all their placements."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from atoll.core.rng import stream
from atoll.solve.place.flow_instance import FlowInstance, Placement


@dataclass(frozen=True)
class Shape:
    """What random clusters look like: numbers of nodes and layers, and how fast links are."""

    nodes: int = 4
    layers: int = 4
    tables: int = 2
    links: str = "loose"
    partial: bool = False


def cluster(
    layers: int,
    rates: list[list[float]],
    *,
    link: float = 1e6,
    ends: float = 1e6,
    regions: list[str] | None = None,
    partial: bool = False,
) -> FlowInstance:
    """Return nodes with these rates for 1, 2, ... layers, all links equal, tokens/s."""
    size = len(rates)
    table = np.zeros((size, max(map(len, rates)) + 1))
    for i, own in enumerate(rates):
        table[i, 1 : len(own) + 1] = own
    kinds = {tuple(own): i for i, own in reversed(list(enumerate(rates)))}
    between = np.full((size, size), link)
    np.fill_diagonal(between, 0.0)
    return FlowInstance(
        layers=layers,
        names=tuple(f"n{i}" for i in range(size)),
        node_types=tuple(f"t{kinds[tuple(own)]}" for own in rates),
        regions=tuple(regions or ["here"] * size),
        kind=np.array([kinds[tuple(own)] for own in rates]),
        max_layers=np.array([len(own) for own in rates]),
        rate=table,
        link=between,
        enter=np.full(size, ends),
        leave=np.full(size, ends),
        latency=np.zeros((size, size)),
        enter_s=np.zeros(size),
        leave_s=np.zeros(size),
        partial=partial,
    )


def random_cluster(seed: int, shape: Shape) -> FlowInstance:
    """Return a random cluster; rates mostly fall with layers, sometimes they rise."""
    random = stream(seed, "exact clusters")
    tables = []
    for _ in range(shape.tables):
        most = int(random.integers(1, 4))
        falling = np.sort(random.integers(2, 60, most))[::-1]
        tables.append([float(x) for x in (falling if random.random() < 0.8 else falling[::-1])])
    chosen = [tables[int(random.integers(len(tables)))] for _ in range(shape.nodes)]
    regions = [str(x) for x in random.choice(["east", "west"], shape.nodes)]
    found = cluster(shape.layers, chosen, regions=regions, partial=shape.partial)
    if shape.links == "random":
        slow = random.integers(0, 40, found.link.shape).astype(float)
        np.fill_diagonal(slow, 0.0)
        found.link[:] = slow
        found.enter[:] = random.integers(0, 80, shape.nodes)
        found.leave[:] = random.integers(0, 80, shape.nodes)
        found.kind[:] = np.arange(shape.nodes)
    return found


def placements(instance: FlowInstance) -> Iterator[Placement]:
    """Go through all placements that hold every layer somewhere."""
    ranges = [
        [(0, 0)]
        + [
            (s, s + j)
            for j in range(1, min(int(most), instance.layers) + 1)
            for s in range(instance.layers - j + 1)
        ]
        for most in instance.max_layers
    ]
    for chosen in itertools.product(*ranges):
        held = set().union(*(range(s, e) for s, e in chosen))
        if len(held) == instance.layers:
            yield Placement(np.array([s for s, _ in chosen]), np.array([e for _, e in chosen]))


def flow_of(instance: FlowInstance, placement: Placement) -> float:
    """Return the largest flow of a placement by augmenting paths (whole rates and links)."""
    room = _edges(instance, placement)
    total = 0.0
    while True:
        back: dict[str, str] = {"source": ""}
        queue = ["source"]
        for a in queue:
            for b, left in room.get(a, {}).items():
                if left > 0 and b not in back:
                    back[b] = a
                    queue.append(b)
        if "sink" not in back:
            return total
        path = ["sink"]
        while path[-1] != "source":
            path.append(back[path[-1]])
        steps = list(itertools.pairwise(path[::-1]))
        amount = min(room[a][b] for a, b in steps)
        for a, b in steps:
            room[a][b] -= amount
            room[b][a] += amount
        total += amount


def _edges(instance: FlowInstance, placement: Placement) -> dict[str, dict[str, float]]:
    """Return what each edge between vertices carries, and 0 for the way back."""
    used = [i for i in range(instance.size) if placement.end[i] > placement.start[i]]
    room: dict[str, dict[str, float]] = {}

    def edge(a: str, b: str, speed: float) -> None:
        if speed > 0:
            room.setdefault(a, {})[b] = speed
            room.setdefault(b, {}).setdefault(a, 0.0)

    for i in used:
        start, end = placement.start[i], placement.end[i]
        edge(f"in{i}", f"out{i}", float(instance.rate[i, end - start]))
        if start == 0:
            edge("source", f"in{i}", float(instance.enter[i]))
        if end == instance.layers:
            edge(f"out{i}", "sink", float(instance.leave[i]))
        for k in used:
            inside = instance.partial and placement.start[k] <= end < placement.end[k]
            if k != i and (placement.start[k] == end or inside):
                edge(f"out{i}", f"in{k}", float(instance.link[i, k]))
    return room


def best_flow(instance: FlowInstance) -> float:
    """Return the best flow over all placements, 0 where there is none."""
    return max((flow_of(instance, placement) for placement in placements(instance)), default=0.0)
