"""One service on hundreds or thousands of machines: site by site, in groups, by counts of alike machines.

1. The cluster becomes a stock (`stock`): alike machines are a number. A site is a region; one that cannot
   hold the model joins the one it has the widest links to.
2. A bound holds for all pipelines within the sites and between them (`pipeline_bound`).
3. A site is dealt into groups of about `_GROUP` machines with equal numbers of every kind. Whole machines
   fill the stages of a pipeline in each of them (`stage_fill`), what is left forms another. For the largest
   flow (`stage_patterns`) small sites are placed together, too, and that is kept where more flows: the more
   machines there are, the less is lost because they are whole.
4. Each group is placed on its own machines, and its flow found as on a small cluster, links and all. Groups
   with equal numbers and links are placed once.

Groups share no link, so their flows add up.
"""

from __future__ import annotations

import time
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
from atoll.solve.place.search.restarts import BestPlacements, SearchBudget, explore
from atoll.solve.place.sites.pipeline_bound import PipelineBound, bound_pipelines
from atoll.solve.place.sites.spread_flow import spread_within
from atoll.solve.place.sites.stage_exchange import Filled
from atoll.solve.place.sites.stage_fill import fill_best
from atoll.solve.place.sites.stage_patterns import fill_alike
from atoll.solve.place.sites.stage_rates import Place, pick_ways, place_of
from atoll.solve.place.sites.stock import Stock, list_sites, mean_link, pick_rows, take_stock

LARGE = 100
"""Machines above which a cluster is placed site by site."""
_GROUP = 100
"""Machines of a group: many enough to share a pipeline's stages evenly, few enough for one instance."""
_ALIKE = 200
"""The same for the largest flow: an integer program fills them, which takes no longer for more."""
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
_LINKS = (1.0, 1.5, 2.0)
"""Times the slowest link for which stages of the largest flow are made: most links are faster than it."""
_APART = 0.98
"""Share of the bound of sites by themselves with which they are not tried so: whole machines cost as much."""
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
    placer = _ServiceGroups(problem, catalog, service, stock, effort)
    found: list[Placed] = []
    for pool in join_small(stock, sites) if placer.alike else [[site] for site in sites]:
        # What is left undone is not placed at all, so the deadline is asked first.
        if found and deadline.is_over():
            break
        found += _place_pool(placer, pool, deadline)
        if effort.log is not None:
            effort.log(deadline.spent, _value(found), bound)
    return SitesPlaced(tuple(found), bound, find_missing_layers(stock))


def _place_pool(placer: _ServiceGroups, pool: Sequence[Ints], deadline: Deadline) -> list[Placed]:
    """Return the placement of some sites together, or of each by itself where more flows so."""
    together = placer.place_all(np.sort(np.concatenate(pool)), deadline)
    if len(pool) == 1 or deadline.is_over():
        return together
    apart = sum(bound_pipelines([place], own).value for place, own in map(placer.prepare, pool))
    if _value(together) >= _APART * apart:
        return together
    alone = [placed for site in pool for placed in placer.place_all(site, deadline)]
    return max(together, alone, key=_value)


def _value(placed: Sequence[Placed]) -> float:
    return sum(own.flows.value for own in placed)


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


def join_small(stock: Stock, sites: Sequence[Ints]) -> list[list[Ints]]:
    """Return sites with those that are small, each with the nearest ones until they are a group together."""
    pools = [[site] for site in sites]
    while len(pools) > 1:
        sizes = [sum(int(stock.machines[site].sum()) for site in pool) for pool in pools]
        short = int(np.argmin(sizes))
        # Large ones stay by themselves: they have machines enough, and faster links.
        small = [at for at, size in enumerate(sizes) if size < _ALIKE and at != short]
        if sizes[short] >= _ALIKE or not small:
            break
        own = pools.pop(short)
        others = [at - (at > short) for at in small]
        near = [mean_link(stock, np.concatenate(own), np.concatenate(pools[at])) for at in others]
        pools[others[int(np.argmax(near))]] += own
    return pools


def deal(stock: Stock, site: Ints, size: int = _GROUP) -> Iterator[Group]:
    """Yield the groups of a site: all with equal numbers of every entry, the last one with what is left."""
    machines = np.zeros(len(stock.entries), np.int64)
    machines[site] = stock.machines[site]
    count = max(1, round(int(machines.sum()) / size))
    each = machines // count
    # Small groups must still hold the model.
    while count > 1 and int((each * stock.max_layers).sum()) < 2 * stock.sample.layers:
        count -= 1
        each = machines // count
    for _ in range(count - 1):
        yield Group(site, each)
    yield Group(site, machines - (count - 1) * each)


@dataclass
class _ServiceGroups:
    """Places groups of one service; equal ones once."""

    problem: Problem
    catalog: Catalog
    service: Service
    stock: Stock
    effort: FlowEffort

    def __post_init__(self) -> None:
        self._score = score_of(self.effort)
        self._known: dict[tuple[object, ...], tuple[dict[str, int], list[Placed]]] = {}

    @property
    def alike(self) -> bool:
        """Whether machines carry the same in all stages: for the largest flow."""
        return self.effort.goal == "max-flow" and not self.effort.promise

    def prepare(self, site: Ints) -> tuple[Place, Ints]:
        """Return the place that a site makes, and its machines by entry."""
        machines = np.zeros(len(self.stock.entries), np.int64)
        machines[site] = self.stock.machines[site]
        return place_of(self.stock, site, self.effort), machines

    def place_all(self, site: Ints, deadline: Deadline) -> list[Placed]:
        """Return the pipelines of a site, group by group; at least of one, however late it is."""
        place, _ = self.prepare(site)
        free = [list(entry.hosts) for entry in self.stock.entries]
        found: list[Placed] = []
        for group in deal(self.stock, site, _ALIKE if self.alike else _GROUP):
            if found and deadline.is_over():
                break
            hosts = [
                [free[entry].pop(0) for _ in range(number)]
                for entry, number in enumerate(group.machines.tolist())
            ]
            found += self.place(group, place, hosts)
        return found

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
        # Before machines are merged: one of each type does not show all links.
        link = self._slowest_link(place)
        if self.alike:
            place, left, free = merge_alike(place, self.stock, left, free)
        least: float | None = None
        while True:
            bound = bound_pipelines([place], left)
            # What is too little to be worth a pipeline goes by all machines of the group.
            least = bound.value * _LEFTOVER if least is None else least
            if bound.value <= least:
                return
            filled = self._fill(place, left, free, bound, link)
            self.effort.done.update(pipelines=1)
            if filled is None:
                return
            placed = self._set_up(filled, place, free)
            left = np.array([len(own) for own in free])
            if placed.flows.value <= 0.0:
                return
            yield placed

    def _fill(
        self,
        place: Place,
        left: Ints,
        free: Sequence[Sequence[str]],
        bound: PipelineBound,
        link: float,
    ) -> Filled | None:
        """Return the stages of whole machines that carry the most, the slowest link being this one."""
        if not self.alike:
            return fill_best(
                place,
                left,
                bound.cuts,
                tries=max(1, round(_TRIES * self.effort.work)),
                steps=_STEPS,
                enough=bound.value * _ENOUGH,
            )
        best, flow = None, 0.0
        for times in _LINKS:
            filled = fill_alike(place, left, bound.value, times * link)
            # Not all of it may flow over the links, but no more than that.
            if filled is None or filled.flow <= flow:
                continue
            instance, placement = self._arrange(filled, place, [list(own) for own in free])
            flows = self._score(instance, placement)
            value = self._fitted(instance, placement, flows).flows.value
            if value > flow:
                best, flow = filled, value
        return best

    def _slowest_link(self, place: Place) -> float:
        """Return the slowest link between whole machines of a place, tokens/s."""
        sample, rows = self.stock.sample, pick_rows(self.stock, np.unique(place.entry))
        rows = rows[[sample.units[row].gpu_ids is None for row in rows.tolist()]]
        link = sample.link[np.ix_(rows, rows)]
        return float(link[link > 0.0].min(initial=np.inf))

    def _set_up(self, filled: Filled, place: Place, free: list[list[str]]) -> Placed:
        """Return a pipeline on machines, which are taken from those that are free."""
        instance, placement = self._arrange(filled, place, free)
        return self._fitted(instance, *self._flow(instance, placement, filled.flow))

    def _fitted(self, instance: FlowInstance, placement: Placement, flows: Flows) -> Placed:
        """Return a placement with as much of its flow as slices of a machine have links for."""
        placed = Placed(self.service, instance, placement, flows, promised=self.effort.promise)
        return fit_links(self.problem, self.catalog, [placed])[0]

    def _arrange(
        self, filled: Filled, place: Place, free: list[list[str]]
    ) -> tuple[FlowInstance, Placement]:
        """Return stages on machines, which are taken from those that are free."""
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
        instance = flow_instance(
            self.problem,
            self.catalog,
            self.service,
            partial=self.effort.partial,
            units=tuple(ranges),
            promised=self.effort.promise,
        )
        both = np.array([ranges[unit] for unit in instance.units], np.int64).reshape(-1, 2)
        return instance, Placement(both[:, 0].copy(), both[:, 1].copy())

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
        """Return a placement by annealing for the largest flow, from one in stages.

        Few machines are placed in other ways, too: stages of whole machines leave more of them over.
        """
        bound, seed = coverage_bound(instance), self.problem.settings.seed
        work = max(1, round(WORK * _ANNEALED * self.effort.work * min(1.0, instance.size / LARGE)))
        if instance.size <= LARGE:
            best = search(instance, work=work, seed=seed, start=[placement], bound=bound)
        else:
            # Floats round: a flow this close to the bound counts as the bound.
            goal, now = bound * (1.0 - 1e-8), time.perf_counter()
            pool = BestPlacements(instance, 1, goal, bound, now, None)
            explore(pool, [placement], SearchBudget(work), seed=seed)
            best = pool.ranked(bound, 0.0)[0]
        self.effort.done.update(evaluations=best.evaluations)
        return best.placement


def merge_alike(
    place: Place, stock: Stock, machines: Ints, hosts: Sequence[Sequence[str]]
) -> tuple[Place, Ints, list[list[str]]]:
    """Return a place whose machines of a type are one entry, with its machines and hosts by entry.

    Hosts are in order of their regions, so that stages that follow each other are near where they can be.
    """
    first: dict[str, int] = {}
    number, names = np.zeros_like(machines), [list[str]() for _ in hosts]
    for entry in np.unique(place.entry).tolist():
        one = first.setdefault(stock.entries[entry].node_type, entry)
        number[one] += machines[entry]
        names[one] += hosts[entry]
    return pick_ways(place, np.isin(place.entry, list(first.values()))), number, names


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
