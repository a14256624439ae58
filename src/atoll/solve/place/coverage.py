"""Upper bounds that hold however machines are cut: all of them at work, none with more than the whole flow.

A machine of g GPUs cut into slices of s does at most (g / s) max_j j min(T_s(j), F) token-layers a second,
and mixed sizes no more than the best of them, since sizes divide each other. With F L of them needed, the
largest F with enough bounds every flow (`bound.bounds`, U2). Links are not counted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from atoll.catalog.catalog import Catalog
from atoll.core.ids import parse_node_type
from atoll.plan.cluster_profiles import cluster_of
from atoll.plan.problem import Problem, Service
from atoll.solve.array_types import Floats
from atoll.solve.place.flow_instance import Unit
from atoll.solve.place.from_problem import flow_instance
from atoll.solve.place.latency import max_within
from atoll.solve.place.machine_cuts import SiteType, sizes_of

_BISECTION = 60


@dataclass(frozen=True)
class Coverage:
    """Capacity of machines for a service, by site and type: number of slices, and tokens/s by layers."""

    layers: int
    stock: dict[SiteType, int]
    slices: dict[SiteType, tuple[tuple[int, Floats], ...]]

    def work(self, flow: float) -> dict[SiteType, float]:
        """Return the token-layers a second that one machine does at most, by site and type."""
        best = {}
        for key, ways in self.slices.items():
            best[key] = max(
                (n * float((np.arange(len(row)) * np.minimum(row, flow)).max()) for n, row in ways),
                default=0.0,
            )
        return best

    def bound(self) -> float:
        """Return the largest flow that all machines together could carry, tokens/s."""
        low, high = 0.0, 1.0
        while self._carries(high) and high < 1e15:
            low, high = high, 2 * high
        for _ in range(_BISECTION):
            middle = (low + high) / 2
            low, high = (middle, high) if self._carries(middle) else (low, middle)
        return high

    def _carries(self, flow: float) -> bool:
        total = sum(self.stock[key] * work for key, work in self.work(flow).items())
        return total >= flow * self.layers


def coverage_of(problem: Problem, catalog: Catalog, service: Service, *, promise: bool) -> Coverage:
    """Return what the machines of a cluster, whole or cut, can do for a service."""
    stock: Counter[SiteType] = Counter()
    samples: dict[Unit, tuple[SiteType, int]] = {}
    for machine in cluster_of(problem).nodes:
        key = (machine.region, machine.node_type)
        stock[key] += 1
        if stock[key] > 1:
            continue
        count = parse_node_type(machine.node_type).gpu_count
        for size in sizes_of(problem, machine):
            ids = None if size == count else tuple(range(size))
            unit = Unit(machine.name, machine.node_type, machine.region, ids)
            samples[unit] = (key, count // size)
    instance = flow_instance(problem, catalog, service, units=tuple(samples), promised=promise)
    if promise and instance.size:
        instance = max_within(instance)
    slices: dict[SiteType, list[tuple[int, Floats]]] = {key: [] for key in stock}
    for i, unit in enumerate(instance.units):
        key, number = samples[unit]
        slices[key].append((number, instance.rate[i, : int(instance.max_layers[i]) + 1]))
    return Coverage(instance.layers, dict(stock), {k: tuple(v) for k, v in slices.items()})
