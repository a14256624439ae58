"""One service on hundreds or thousands of machines: site by site, in groups, by counts of alike machines.

1. The cluster becomes a stock (`stock`): alike machines are a number. A site is a region; one that cannot
   hold the model joins the one it has the widest links to.
2. A bound holds for all pipelines within the sites and between them (`pipeline_bound`).
3. A site is dealt into groups of about `_GROUP` machines with equal numbers of every kind. Whole machines
   fill the stages of a pipeline in each of them (`stage_fill`), what is left forms another.
4. Each group is placed on its own machines, and its flow found as on a small cluster, links and all. Groups
   with equal numbers and links are placed once.

Groups share no link, so their flows add up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from atoll.catalog.catalog import Catalog
from atoll.core.ids import parse_node_type
from atoll.plan.cluster_profiles import cluster_of
from atoll.plan.problem import Problem, Service
from atoll.solve.array_types import Ints
from atoll.solve.deadline import Deadline
from atoll.solve.place.bound.bounds import Missing, coverage_bound
from atoll.solve.place.flow_instance import FlowInstance, Flows, Placement, Unit
from atoll.solve.place.from_problem import flow_instance
from atoll.solve.place.place_service import FlowEffort, score_of
from atoll.solve.place.place_to_plan import Placed, fit_links
from atoll.solve.place.search.flow_search import WORK, search
from atoll.solve.place.sites.pipeline_bound import bound_pipelines
from atoll.solve.place.sites.spread_flow import spread_within
from atoll.solve.place.sites.stage_exchange import Filled
from atoll.solve.place.sites.stage_fill import fill_best
from atoll.solve.place.sites.stage_rates import Place, place_of
from atoll.solve.place.sites.stock import Stock, list_sites, pick_rows, take_stock

LARGE = 100
"""Machines above which a cluster is placed site by site."""
_GROUP = 100
"""Machines of a group: many enough to share a pipeline's stages evenly, few enough for one instance."""
_TRIES = 12
"""Cuts from which pipelines of a group are sought, for each group that differs from all others."""
_STEPS = 150
"""Exchanges of nodes without a better pipeline that end the search from one of them."""
_ENOUGH = 0.985
"""Share of a group's bound that ends its search."""
_ANNEALED = 0.05
"""Share of the usual work of a search that goes into each group where the largest flow is asked for."""
_EXPECTED = 0.98
"""Share of what stages carry that a flow spread over links must have to be taken as it is."""
_LEFTOVER = 0.04
"""Share of a group's worth in machines that are left from which on they are placed as well."""


@dataclass(frozen=True)
class SitesPlaced:
    """Groups of machines with what flows over each, the bound for all in tokens/s, and what is missing."""

    placed: tuple[Placed, ...]
    bound: float
    missing: Missing


@dataclass(frozen=True)
class Group:
    """Machines that are placed by themselves: the entries they are of, and how many of each entry."""

    entries: Ints
    machines: Ints


def is_large(problem: Problem) -> bool:
    """Return whether a cluster is placed site by site."""
    return len(cluster_of(problem).nodes) > LARGE


def place_sites(
    problem: Problem, catalog: Catalog, service: Service, effort: FlowEffort, deadline: Deadline
) -> SitesPlaced | None:
    """Return the placement of a large cluster; None where too many of its machines differ."""
    stock = take_stock(problem, catalog, service, partial=effort.partial, promised=effort.promise)
    if stock is None:
        return None
    sites = list_sites(stock)
    places = [place_of(stock, site, effort) for site in sites]
    bound = _bound(stock, places, sites, effort)
    placer = _GroupPlacer(problem, catalog, service, stock, effort)
    found: list[Placed] = []
    free = [list(entry.hosts) for entry in stock.entries]
    value = 0.0
    for site, place in zip(sites, places, strict=True):
        for group in deal(stock, site):
            # What is left undone is not placed at all, so the deadline is asked first.
            if found and deadline.is_over():
                break
            hosts = [
                [free[entry].pop(0) for _ in range(number)]
                for entry, number in enumerate(group.machines.tolist())
            ]
            for placed in placer.place(group, place, hosts):
                found.append(placed)
                value += placed.flows.value
            if effort.log is not None:
                effort.log(deadline.spent, value, bound)
    return SitesPlaced(tuple(found), bound, find_missing_layers(stock))


def find_missing_layers(stock: Stock) -> Missing:
    """Return how many layers all machines cannot hold together."""
    held, layers = int((stock.machines * stock.max_layers).sum()), stock.sample.layers
    return Missing(max(0, layers - held), held, layers, 0.0)


def _bound(
    stock: Stock, places: Sequence[Place], sites: Sequence[Ints], effort: FlowEffort
) -> float:
    """Return the bound on all placements: what lasts of a flow is no more than the flow."""
    if effort.goal == "sustained" and not effort.promise:
        effort = replace(effort, objective="max-flow")
        places = [place_of(stock, site, effort) for site in sites]
    every = np.arange(len(stock.entries))
    together = [place_of(stock, every, effort)] if len(sites) > 1 else []
    return bound_pipelines([*places, *together], stock.machines).value


def deal(stock: Stock, site: Ints) -> Iterator[Group]:
    """Yield the groups of a site: all with equal numbers of every entry, the last one with what is left."""
    machines = np.zeros(len(stock.entries), np.int64)
    machines[site] = stock.machines[site]
    count = max(1, round(int(machines.sum()) / _GROUP))
    each = machines // count
    # Small groups must still hold the model.
    while count > 1 and int((each * stock.max_layers).sum()) < 2 * stock.sample.layers:
        count -= 1
        each = machines // count
    for _ in range(count - 1):
        yield Group(site, each)
    yield Group(site, machines - (count - 1) * each)


@dataclass
class _GroupPlacer:
    """Places groups of one service; equal ones once."""

    problem: Problem
    catalog: Catalog
    service: Service
    stock: Stock
    effort: FlowEffort

    def __post_init__(self) -> None:
        self._score = score_of(self.effort)
        self._known: dict[tuple[object, ...], tuple[dict[str, int], list[Placed]]] = {}

    def place(self, group: Group, place: Place, hosts: Sequence[Sequence[str]]) -> list[Placed]:
        """Return the pipelines of a group on machines by entry."""
        key = self._key(group)
        names = [name for own in hosts for name in own]
        self.effort.done.update(groups=1)
        if key not in self._known:
            found = list(self._place(group.machines, place, hosts))
            self._known[key] = dict(zip(names, range(len(names)), strict=True)), found
        at, found = self._known[key]
        return [self._moved(placed, at, names) for placed in found]

    def _moved(self, placed: Placed, at: Mapping[str, int], names: Sequence[str]) -> Placed:
        """Return a placement on other machines: those called `names` for those that were at these places."""
        by_name, instance = cluster_of(self.problem).by_name, placed.instance
        units = []
        for unit in instance.units:
            machine = by_name[names[at[unit.host]]]
            units.append(Unit(machine.name, machine.node_type, machine.region, unit.gpu_ids))
        moved = replace(
            instance,
            names=tuple(unit.name for unit in units),
            regions=tuple(unit.region for unit in units),
            units=tuple(units),
        )
        return replace(placed, instance=moved)

    def _key(self, group: Group) -> tuple[object, ...]:
        """Equal for groups whose machines can be exchanged one for one."""
        used = [entry for entry in group.entries.tolist() if group.machines[entry]]
        types = [
            (self.stock.entries[entry].node_type, int(group.machines[entry])) for entry in used
        ]
        rows, sample = pick_rows(self.stock, used), self.stock.sample
        links = (
            sample.link[np.ix_(rows, rows)],
            sample.latency[np.ix_(rows, rows)],
            *(ends[rows] for ends in (sample.enter, sample.enter_s, sample.leave, sample.leave_s)),
        )
        return (*types, *(array.tobytes() for array in links))

    def _place(
        self, machines: Ints, place: Place, hosts: Sequence[Sequence[str]]
    ) -> Iterator[Placed]:
        """Yield pipelines until too few machines are left for another."""
        left, free = machines.copy(), [list(own) for own in hosts]
        least: float | None = None
        while True:
            bound = bound_pipelines([place], left)
            # What is too little to be worth a pipeline goes by all machines of the group.
            least = bound.value * _LEFTOVER if least is None else least
            if bound.value <= least:
                return
            filled = fill_best(
                place,
                left,
                bound.cuts,
                tries=max(1, round(_TRIES * self.effort.work)),
                steps=_STEPS,
                enough=bound.value * _ENOUGH,
            )
            self.effort.done.update(pipelines=1)
            if filled is None:
                return
            placed = self._set_up(filled, place, left, free)
            if placed.flows.value <= 0.0:
                return
            yield placed

    def _set_up(self, filled: Filled, place: Place, left: Ints, free: list[list[str]]) -> Placed:
        """Return a pipeline on machines, which are taken from those that are left."""
        ranges: dict[Unit, tuple[int, int]] = {}
        spare: dict[int, list[Unit]] = {}
        starts = _list_starts(filled, place, self.stock)
        # The largest slices first: sizes divide each other, so all of them fit.
        for way in np.argsort(place.pieces, kind="stable").tolist():
            entry = int(place.entry[way])
            for stage, (start, end) in enumerate(starts):
                for _ in range(int(filled.number[stage, way])):
                    chunks = spare.setdefault(entry, [])
                    if not chunks:
                        machine = cluster_of(self.problem).by_name[free[entry].pop(0)]
                        chunks.append(Unit(machine.name, machine.node_type, machine.region))
                    ranges[_cut_off(chunks, int(place.pieces[way]))] = (start, end)
        for entry, own in enumerate(free):
            left[entry] = len(own)
        instance = flow_instance(
            self.problem,
            self.catalog,
            self.service,
            partial=self.effort.partial,
            units=tuple(ranges),
            promised=self.effort.promise,
        )
        both = np.array([ranges[unit] for unit in instance.units], np.int64).reshape(-1, 2)
        placement = Placement(both[:, 0].copy(), both[:, 1].copy())
        placement, flows = self._flow(instance, placement, filled.flow)
        placed = Placed(self.service, instance, placement, flows, promised=self.effort.promise)
        return fit_links(self.problem, self.catalog, [placed])[0]

    def _flow(
        self, instance: FlowInstance, placement: Placement, expected: float
    ) -> tuple[Placement, Flows]:
        """Return the flow of a pipeline, and a placement that is as good or better.

        Within a promise the flow is spread over links, where these carry it.
        """
        if self.effort.promise:
            spread = spread_within(instance, placement)
            if spread is not None and spread.value >= _EXPECTED * expected:
                return placement, spread
            scored = self._score(instance, placement)
            best = scored if spread is None or scored.value > spread.value else spread
            return placement, best
        if self.effort.goal == "max-flow":
            placement = self._anneal(instance, placement)
        return placement, self._score(instance, placement)

    def _anneal(self, instance: FlowInstance, placement: Placement) -> Placement:
        """Return a placement by the search for small clusters, from one in stages."""
        best = search(
            instance,
            work=max(1, round(WORK * _ANNEALED * self.effort.work)),
            seed=self.problem.settings.seed,
            start=[placement],
            bound=coverage_bound(instance),
        )
        self.effort.done.update(evaluations=best.evaluations)
        return best.placement


def _list_starts(filled: Filled, place: Place, stock: Stock) -> list[tuple[int, int]]:
    """Return the layers of every stage: those between the first and the last in order of their regions."""
    region = np.array([entry.region for entry in stock.entries])
    _, at = np.unique(region[place.entry], return_inverse=True)
    nodes = np.maximum(filled.number.sum(axis=1), 1)
    where = (filled.number @ at.astype(np.float64)) / nodes
    stages = len(filled.cut)
    # Links between regions are slow: neighbours should be of one where that is possible.
    away = -1.0 if where[0] > where[-1] else 1.0
    middle = sorted(range(1, stages - 1), key=lambda stage: (away * where[stage], stage))
    starts = [(0, 0)] * stages
    first = 0
    for stage in dict.fromkeys([0, *middle, stages - 1]):
        starts[stage] = (first, first + filled.cut[stage])
        first += filled.cut[stage]
    return starts


def _cut_off(chunks: list[Unit], pieces: int) -> Unit:
    """Return a slice, of so many in a machine, of the last chunk; what is left of it stays."""
    chunk = chunks.pop()
    size = parse_node_type(chunk.machine).gpu_count // pieces
    ids = chunk.gpu_ids or tuple(range(parse_node_type(chunk.machine).gpu_count))
    if size == len(ids):
        return chunk
    chunks.append(replace(chunk, gpu_ids=ids[size:]))
    return replace(chunk, gpu_ids=ids[:size])
