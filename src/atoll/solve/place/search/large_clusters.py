"""Large clusters, site by site: groups of nodes that each hold the whole model, placed by themselves.

A thousand nodes are not one pipeline but many: links between sites are slow, and inside a site a few dozen
nodes already use their memory and time as well as hundreds do. So nodes are parted into groups:

1. A site is a region; one that cannot hold the model joins the site it has the widest links to.
2. A large site is dealt into k groups with the same numbers of every kind, give or take one. k is tried out
   for a few sizes of a group, on one group each; the one that gets the most out of its nodes is taken.
3. Each group is placed as blocks of one or two lanes (`lanes`), which come within a few percent of what nodes
   can compute, and annealed a little. Groups with equal numbers of every kind are placed once.

Flows of groups add up; what links between them could add on top is left to the search over all nodes.
"""

from __future__ import annotations

import time

import numpy as np

from atoll.solve.array_types import Ints
from atoll.solve.place.bound.bounds import coverage_bound
from atoll.solve.place.bound.lanes import lanes
from atoll.solve.place.flow_instance import FlowInstance, Placement, part_of
from atoll.solve.place.search.level_starts import by_level
from atoll.solve.place.search.restarts import BestPlacements, SearchBudget, explore

LARGE = 100
"""Nodes above which a cluster is searched site by site first."""
_GROUP_SIZES = (40, 60, 90)
"""Nodes of a group that are tried out."""
_ITERATIONS = 10_000
"""Simplex iterations for the lanes of a group."""
_MIN_ITERATIONS = 1_500
_WORK = 200_000_000
"""Work for annealing all groups: lanes leave little to find."""


def place_sites(
    instance: FlowInstance, *, seed: int, effort: float = 1.0, until: float = np.inf
) -> Placement | None:
    """Return a placement of every site by itself; None where no site holds the model.

    `effort` is the share of the usual work to do; `until` of `perf_counter` is a safety net.
    """
    placer = _GroupPlacer(instance, seed, effort, until)
    start, end = (np.zeros(instance.size, np.int64) for _ in range(2))
    some = False
    groups = [group for site in find_sites(instance) for group in _part(placer, site)]
    for group in groups:
        placement = placer.place(group, int(effort * _WORK * len(group) / instance.size))
        if placement is not None:
            some = True
            start[group], end[group] = placement.start, placement.end
    return Placement(start, end) if some else None


def find_sites(instance: FlowInstance) -> list[Ints]:
    """Return the nodes of every region; those of one that cannot hold the model with those nearest to it."""
    names = np.array(instance.regions)
    sites = [np.flatnonzero(names == name) for name in sorted(set(instance.regions))]
    # The smallest site joins first, and again until every site holds the model or one is left.
    while len(sites) > 1:
        held = [int(instance.max_layers[site].sum()) for site in sites]
        short = min(range(len(sites)), key=lambda at: held[at])
        if held[short] >= instance.layers:
            break
        own = sites.pop(short)
        # The mean link and not the widest: a single wide link does not make two sites one.
        wide = [float(instance.link[np.ix_(own, site)].mean()) for site in sites]
        best = int(np.argmax(wide))
        sites[best] = np.sort(np.concatenate([sites[best], own]))
    return sites


def deal(instance: FlowInstance, nodes: Ints, count: int) -> list[Ints]:
    """Deal nodes into groups with equal numbers of every kind, give or take one."""
    # Sorted by kind and dealt in turn, every group has the same number of a kind, give or take one.
    order = nodes[np.lexsort((nodes, instance.kind[nodes]))]
    return [np.sort(order[at::count]) for at in range(count)]


def _part(placer: _GroupPlacer, site: Ints) -> list[Ints]:
    """Return the groups of a site: as many as get the most out of its nodes."""
    instance = placer.instance
    counts = sorted({max(1, round(len(site) / size)) for size in _GROUP_SIZES})
    best, chosen = -1.0, [site]
    for count in counts:
        groups = deal(instance, site, count)
        # A group that cannot hold the model has no flow at all.
        if min(int(instance.max_layers[group].sum()) for group in groups) < instance.layers:
            continue
        # One group stands for all, as they are alike; flow over computing power compares groups of unlike
        # size.
        reached = placer.lane_flow(groups[0])[0] / max(
            1e-9, float(placer.computed[groups[0]].sum())
        )
        if reached > best:
            best, chosen = reached, groups
    return chosen


class _GroupPlacer:
    """Places groups of one instance; equal ones once."""

    def __init__(self, instance: FlowInstance, seed: int, effort: float, until: float) -> None:
        self.instance = instance
        self.seed = seed
        self.iterations = max(_MIN_ITERATIONS, int(effort * _ITERATIONS))
        self.until = until
        held = np.arange(instance.rate.shape[1])
        self.computed = (held * instance.rate).max(axis=1)
        """Token-layers per second of every node at its best."""
        self._lanes: dict[bytes, tuple[float, Placement | None]] = {}
        self._placed: dict[bytes, Placement | None] = {}

    def lane_flow(self, group: Ints) -> tuple[float, Placement | None]:
        """Return the flow of a group's lanes, tokens/s, and the lanes, by the order of `_ordered`."""
        key = self._key(group)
        if key not in self._lanes:
            small = part_of(self.instance, self._ordered(group))
            bound = coverage_bound(small)
            left = self.until - time.perf_counter()
            found = lanes(small, seconds=left, iterations=self.iterations, high=bound)
            # Work 0 only values the lanes; annealing waits until the size of groups is chosen.
            starts = [] if found is None else [found]
            pool = self._explore(small, bound, starts, 0)
            self._lanes[key] = (pool.best, found)
        return self._lanes[key]

    def place(self, group: Ints, work: int) -> Placement | None:
        """Return the placement of a group, by its own order; None where it cannot hold the model."""
        key, order = self._key(group), self._ordered(group)
        if key not in self._placed:
            small = part_of(self.instance, order)
            # Lanes were already found to choose the size, and are kept by kind.
            found = self.lane_flow(group)[1]
            starts = [own for own in (found, by_level(small)) if own is not None]
            pool = self._explore(small, coverage_bound(small), starts, work)
            best = pool.ranked(pool.bound, 0.0)[0]
            self._placed[key] = best.placement if best.value > 0.0 else None
        placed = self._placed[key]
        if placed is None:
            return None
        # The placement is by kind; the group's own order is what the caller writes to.
        back = np.argsort(order, kind="stable")
        return Placement(placed.start[back], placed.end[back])

    def _explore(
        self, small: FlowInstance, bound: float, starts: list[Placement], work: int
    ) -> BestPlacements:
        # Floats round: a flow this close to the bound counts as the bound.
        pool = BestPlacements(small, 1, bound * (1.0 - 1e-8), bound, time.perf_counter(), None)
        explore(pool, starts, SearchBudget(work, None, self.until), seed=self.seed)
        return pool

    def _key(self, group: Ints) -> bytes:
        """Equal for groups whose nodes can be exchanged one for one."""
        return np.sort(self.instance.kind[group]).tobytes()

    def _ordered(self, group: Ints) -> Ints:
        """The nodes of a group by kind, so that those of equal groups correspond."""
        return group[np.lexsort((group, self.instance.kind[group]))]
