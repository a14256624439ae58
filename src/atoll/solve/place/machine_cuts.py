"""Machines of a cluster, whole or cut into slices of their GPUs: the units that layers are placed on.

The sizes a machine may be cut into divide each other (`plan.problem.slices_of`), so slices fit into machines
whenever their GPUs add up to no more than the machines have, and packing the largest first finds how.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from atoll.core.ids import parse_node_type
from atoll.plan.cluster import ClusterNode
from atoll.plan.cluster_profiles import cluster_of
from atoll.plan.problem import Problem
from atoll.solve.place.flow_instance import Unit
from atoll.solve.place.from_problem import whole_machines

MAX_UNITS = 400
"""Clusters are not cut into more pieces than this, beside the cut that an exact allocation asks for."""

Cut = tuple[Unit, ...]
SiteType = tuple[str, str]
"""A region and a node type: machines that are alike."""


def sizes_of(problem: Problem, machine: ClusterNode) -> tuple[int, ...]:
    """Return how many GPUs of a machine a slice may have, ascending; the last is all of them."""
    offer = problem.offer(machine.region, machine.node_type, "owned")
    count = parse_node_type(machine.node_type).gpu_count
    return (count,) if offer is None else offer.sizes


def even_cuts(problem: Problem) -> list[Cut]:
    """Return the cluster whole, then with every machine in halves, quarters, ... as far as it allows."""
    cluster = cluster_of(problem)
    cuts = [whole_machines(cluster)]
    parts = 2
    while True:
        cut: list[Unit] = []
        for machine in cluster.nodes:
            count = parse_node_type(machine.node_type).gpu_count
            sizes = sizes_of(problem, machine)
            size = max((s for s in sizes if s * parts <= count), default=sizes[0])
            cut += _pieces(machine, [size] * (count // size))
        if tuple(cut) == cuts[-1] or len(cut) > MAX_UNITS:
            return cuts
        cuts.append(tuple(cut))
        parts *= 2


def cut_for(problem: Problem, wanted: Mapping[SiteType, Counter[int]]) -> Cut:
    """Return the cluster cut so that it has at least so many slices of each size, what is left whole.

    Slices of alike machines are packed largest first. What is left of a cut machine becomes slices as
    large as they may be.
    """
    cluster = cluster_of(problem)
    machines: dict[SiteType, list[ClusterNode]] = {}
    for machine in cluster.nodes:
        machines.setdefault((machine.region, machine.node_type), []).append(machine)
    units: list[Unit] = []
    for key in sorted(machines):
        count = parse_node_type(key[1]).gpu_count
        asked = sorted(Counter(wanted.get(key, {})).elements(), reverse=True)
        for machine in machines[key]:
            mine: list[int] = []
            rest: list[int] = []
            for size in asked:
                (mine if sum(mine) + size <= count else rest).append(size)
            asked = rest
            left = count - sum(mine)
            for size in reversed(sizes_of(problem, machine)):
                while size <= left:
                    mine.append(size)
                    left -= size
            units += _pieces(machine, sorted(mine, reverse=True))
    return tuple(sorted(units, key=lambda unit: (unit.host, unit.gpu_ids or ())))


def _pieces(machine: ClusterNode, sizes: Sequence[int]) -> Iterator[Unit]:
    count = parse_node_type(machine.node_type).gpu_count
    first = 0
    for size in sizes:
        ids = None if size == count else tuple(range(first, first + size))
        yield Unit(machine.name, machine.node_type, machine.region, ids)
        first += size
