"""Replicas of exact templates on a cluster: what the same machines would give as a pool.

For every service and site, templates are the best layouts of all small sets of machines and slices
(`solve.templates`), counted within the promise and with the site's slowest links. An integer program says
how many of each to set up:

    max z    z D_s <= sum_t T_t n_t  for every service,    n_t of them use slices,    slices fit the machines

and then, at that z, the most tokens/s. Machines may be cut; slices of sizes that divide each other fit
whenever their GPUs add up. What it finds is exact but for links, which are counted when the flow is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from atoll.catalog.catalog import Catalog
from atoll.core.ids import format_node_type, parse_node_type
from atoll.perf.step import Position
from atoll.plan.cluster_capacities import PromisedNode, Wires, message_seconds, promised_node
from atoll.plan.cluster_profiles import cluster_of, is_known, request_tokens
from atoll.plan.problem import Problem, Service
from atoll.solve.array_types import Floats
from atoll.solve.deadline import Deadline
from atoll.solve.place.flow_instance import FlowInstance, Placement, Unit
from atoll.solve.place.from_problem import flow_instance
from atoll.solve.place.latency import flow_of_groups
from atoll.solve.place.machine_cuts import Cut, SiteType, cut_for, sizes_of
from atoll.solve.place.place_to_plan import Placed, fit_links
from atoll.solve.place.sites.stock import sample_machines
from atoll.solve.templates.generate import (
    Layout,
    RoleTables,
    TemplateLibrary,
    generate,
    multiset_count,
)

MAX_SETS = 60_000
"""Sets of nodes per service and site that templates are made of; with more kinds, sets are smaller."""
MAX_NODES = 6
_NODES_LIMIT = 400
"""Nodes of the search tree of an integer program."""
_GAP = 1e-4
"""How close to the best a program comes, as a share."""
_ROUGH_GAP = 0.02
"""The same where less than the usual work is asked for."""
_KEEP = 1.0 - 1e-6


@dataclass(frozen=True)
class ReplicaTemplate:
    """One column: a service at a site, the kinds it uses, and tokens/s."""

    service: int
    site: str
    library: int
    counts: tuple[int, ...]
    tokens_per_s: float


@dataclass(frozen=True)
class TemplateShelf:
    """The templates of one service at one site."""

    service: int
    site: str
    kinds: tuple[str, ...]
    library: TemplateLibrary


def place_replicas(
    problem: Problem,
    catalog: Catalog,
    deadline: Deadline,
    *,
    partial: bool,
    work: float = 1.0,
    done: Counter[str] | None = None,
) -> tuple[Cut, list[Placed]] | None:
    """Return the cut and every service's replicas that serve the most, None if a service has none.

    `work` multiplies how long integer programs may search; `done` counts them and their nodes.
    """
    shelves = list_shelves(problem, catalog)
    columns = list_columns(shelves)
    # Without a template for every service the smallest share is 0, and there is nothing to allocate.
    if {column.service for column in columns} != set(range(len(problem.services))):
        return None
    solved = _allocate(problem, shelves, columns, deadline, work, done)
    if solved is None:
        return None
    chosen, taken = solved
    cut = cut_for(problem, taken)
    return cut, set_up(problem, catalog, cut, shelves, chosen, taken, partial=partial)


# Templates


def list_columns(shelves: Sequence[TemplateShelf]) -> list[ReplicaTemplate]:
    """Return the templates on all shelves that carry anything."""
    return [
        ReplicaTemplate(shelf.service, shelf.site, at, tuple(map(int, counts)), float(carried))
        for at, shelf in enumerate(shelves)
        for counts, carried in zip(shelf.library.counts, shelf.library.throughput, strict=True)
        if carried > 0
    ]


def list_shelves(problem: Problem, catalog: Catalog) -> list[TemplateShelf]:
    """Return the templates of every service at every site."""
    shelves = []
    for number, service in enumerate(problem.services):
        whole = flow_instance(problem, catalog, service, units=sample_machines(problem))
        for site in cluster_of(problem).regions:
            kinds = _kinds_at(problem, catalog, service, site)
            if not kinds:
                continue
            tables = _tables(problem, catalog, service, site, kinds, whole)
            max_nodes = MAX_NODES
            # The number of sets grows fast with kinds: fewer nodes per template keep it within the limit.
            while max_nodes > 1 and multiset_count(len(kinds), max_nodes) > MAX_SETS:
                max_nodes -= 1
            names = tuple(sorted(kinds))
            shelves.append(TemplateShelf(number, site, names, generate(tables, max_nodes)))
    return shelves


def _kinds_at(
    problem: Problem, catalog: Catalog, service: Service, site: str
) -> dict[str, tuple[str, ...]]:
    """Kinds of nodes at a site that a service may use, and the machines each can be cut from."""
    kinds: dict[str, set[str]] = {}
    for machine in cluster_of(problem).nodes:
        if machine.region != site:
            continue
        for size in sizes_of(problem, machine):
            kind = format_node_type(parse_node_type(machine.node_type).gpu, size)
            if service.allows(kind) and is_known(problem, catalog, service, kind):
                kinds.setdefault(kind, set()).add(machine.node_type)
    return {kind: tuple(sorted(machines)) for kind, machines in sorted(kinds.items())}


def _tables(
    problem: Problem,
    catalog: Catalog,
    service: Service,
    site: str,
    kinds: Mapping[str, Sequence[str]],
    whole: FlowInstance,
) -> RoleTables:
    spec = catalog.model(service.model).llm
    stages = _max_stages(whole, site)
    rates = np.zeros((stages, 3, len(kinds), spec.layers + 1))
    for c, (kind, machines) in enumerate(kinds.items()):
        nodes = [promised_node(problem, catalog, service, kind, machine) for machine in machines]
        for count in range(1, stages + 1):
            wires_s = _site_wires(service, whole, site, count)
            places = (Position.WHOLE,) if count == 1 else _PLACES
            for p, place in enumerate(places):
                rates[count - 1, p, c] = _slowest(nodes, count, place, wires_s)
    tokens = request_tokens(service)
    limit = problem.settings.memory_ratio * spec.weight_bytes
    memory = tuple(float(catalog.node(kind).memory_bytes) for kind in kinds)
    return RoleTables(service.name, tuple(kinds), rates * tokens, memory, limit)


_PLACES = (Position.FIRST, Position.MIDDLE, Position.LAST)


def _slowest(nodes: Sequence[PromisedNode], stages: int, place: Position, wires_s: Wires) -> Floats:
    """Return the throughput of a kind by layers, whichever machine it is cut from."""
    # A slice may be cut from several machines: the slowest decides, so the template holds on all of them.
    rows: Floats = np.min([node.rates(stages, place, wires_s)[0] for node in nodes], axis=0)
    return rows


def _max_stages(whole: FlowInstance, site: str) -> int:
    """One where some machines of a site are not joined, else as many as a template may have."""
    rows = np.array([i for i, region in enumerate(whole.regions) if region == site], np.int64)
    link = whole.link[np.ix_(rows, rows)][~np.eye(len(rows), dtype=bool)]
    # Templates take links to be the site's slowest: where some are missing no pipeline can be trusted.
    return MAX_NODES if link.size == 0 or link.min() > 0 else 1


def _site_wires(service: Service, whole: FlowInstance, site: str, stages: int) -> Wires:
    """Seconds of a prompt and of a token on the slowest links of a site, through so many nodes."""
    rows = np.array([i for i, region in enumerate(whole.regions) if region == site], np.int64)
    total = [0.0, 0.0]
    apart = ~np.eye(len(rows), dtype=bool)
    hops = [
        (whole.enter[rows], whole.enter_s[rows], 1, False),
        (whole.link[np.ix_(rows, rows)][apart], whole.latency[np.ix_(rows, rows)][apart], stages - 1, False),
        (whole.leave[rows], whole.leave_s[rows], 1, True),
    ]  # fmt: skip
    for speed, wait, times, last in hops:
        usable = speed > 0
        if not usable.any():
            continue
        seconds = message_seconds(
            service,
            requests_per_s=0.0,
            stages=stages,
            seconds_per_token=float(1.0 / speed[usable].min()),
            latency_s=float(wait[usable].max()),
            last=last,
        )
        total[0] += times * seconds[0]
        total[1] += times * seconds[1]
    return total[0], total[1]


# How many of each

Chosen = list[tuple[ReplicaTemplate, int]]
Taken = dict[SiteType, Counter[int]]
Row = tuple[dict[int, float], float, float]
"""A constraint: factors by variable, and the least and the most of their sum."""


@dataclass
class ReplicaProgram:
    """The integer program: templates, then slices by (site and type, size), then the share served."""

    problem: Problem
    shelves: Sequence[TemplateShelf]
    columns: Sequence[ReplicaTemplate]
    rows: list[Row] = field(default_factory=list)
    slices: list[tuple[SiteType, int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        machines = {(m.region, m.node_type): m for m in cluster_of(self.problem).nodes}
        self.slices = [
            (key, size, format_node_type(parse_node_type(key[1]).gpu, size))
            for key in sorted(machines)
            for size in sizes_of(self.problem, machines[key])
        ]
        self._hold_slices()
        self._serve()

    @property
    def width(self) -> int:
        """How many variables there are."""
        return len(self.columns) + len(self.slices) + 1

    @property
    def demand(self) -> list[float]:
        """Tokens/s asked of each service."""
        return [s.demand_per_s * request_tokens(s) for s in self.problem.services]

    def _hold_slices(self) -> None:
        """Templates use slices, and slices fit the machines."""
        n = len(self.columns)
        cells: dict[tuple[str, str], dict[int, float]] = {}
        for i, column in enumerate(self.columns):
            for kind, count in zip(self.shelves[column.library].kinds, column.counts, strict=True):
                if count:
                    cells.setdefault((column.site, kind), {})[i] = float(count)
        for k, (key, _, kind) in enumerate(self.slices):
            if (key[0], kind) in cells:
                cells[key[0], kind][n + k] = -1.0
        self.rows += [(cells[cell], -np.inf, 0.0) for cell in sorted(cells)]
        stock = Counter((m.region, m.node_type) for m in cluster_of(self.problem).nodes)
        for own in sorted(stock):
            row = {n + k: float(size) for k, (key, size, _) in enumerate(self.slices) if key == own}
            gpus = parse_node_type(own[1]).gpu_count
            # Sizes divide each other, so slices fit the machines whenever their GPUs add up.
            self.rows.append((row, -np.inf, float(stock[own] * gpus)))

    def _serve(self) -> None:
        """No service gets less than the share."""
        for s, asked in enumerate(self.demand):
            if asked > 0:
                row = {
                    i: column.tokens_per_s / asked
                    for i, column in enumerate(self.columns)
                    if column.service == s
                }
                self.rows.append((row | {self.width - 1: -1.0}, 0.0, np.inf))

    def solve(
        self,
        goal: Floats,
        min_share: float,
        deadline: Deadline,
        work: float,
        done: Counter[str] | None,
    ) -> Floats | None:
        """Return the variables that make the most of `goal`, None if nothing was found."""
        least = np.zeros(self.width)
        least[-1] = min_share
        # All columns are whole numbers but the last, the share that is served.
        whole = np.ones(self.width)
        whole[-1] = 0.0
        return maximise(goal, self.rows, least, whole, deadline, done, work)

    def read(self, found: Floats) -> tuple[Chosen, Taken]:
        """Return how many there are of which template, and which slices they take."""
        n = len(self.columns)
        # An integer program returns whole numbers up to rounding.
        chosen = [(self.columns[i], round(float(found[i]))) for i in range(n) if found[i] > 0.5]
        taken: Taken = {}
        for k, (key, size, _) in enumerate(self.slices):
            count = round(float(found[n + k]))
            if count:
                taken.setdefault(key, Counter())[size] += count
        return chosen, taken


def maximise(
    goal: Floats,
    rows: Sequence[Row],
    least: Floats,
    whole: Floats,
    deadline: Deadline,
    done: Counter[str] | None = None,
    work: float = 1.0,
) -> Floats | None:
    """Return the variables, `least` or more and whole where that is 1, that make the most of a goal."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    entries = [(r, c, x) for r, (row, _, _) in enumerate(rows) for c, x in sorted(row.items())]
    r, c, x = (np.array(part) for part in zip(*entries, strict=True))
    matrix = csr_array((x, (r, c)), shape=(len(rows), len(goal)))
    low, high = [row[1] for row in rows], [row[2] for row in rows]
    solved = milp(
        -goal,
        constraints=LinearConstraint(matrix, low, high),
        integrality=whole,
        bounds=Bounds(least, np.full(len(goal), np.inf)),
        options={
            "node_limit": max(1, round(_NODES_LIMIT * work)),
            "mip_rel_gap": _GAP if work >= 1.0 else _ROUGH_GAP,
            # At least a second, so that a first answer comes also when the time is over.
            "time_limit": max(1.0, deadline.left),
        },
    )
    if solved.status != 0:
        deadline.is_over()  # what ended it is remembered
    if done is not None:
        done.update({"integer programs": 1, "nodes": int(solved.mip_node_count or 0)})
    return None if solved.x is None else np.asarray(solved.x)


def _allocate(
    problem: Problem,
    shelves: Sequence[TemplateShelf],
    columns: Sequence[ReplicaTemplate],
    deadline: Deadline,
    work: float,
    done: Counter[str] | None,
) -> tuple[Chosen, Taken] | None:
    program = ReplicaProgram(problem, shelves, columns)
    demand = program.demand
    share, total = np.zeros(program.width), np.zeros(program.width)
    for i, column in enumerate(columns):
        total[i] = column.tokens_per_s / (demand[column.service] or 1.0)
    # Where a service asks for nothing the smallest share has no meaning: the sum is maximised instead.
    if min(demand) > 0:
        share[-1] = 1.0
    else:
        share = total.copy()
    found = program.solve(share, 0.0, deadline, work, done)
    if found is None:
        return None
    if min(demand) > 0:
        if found[-1] <= 0.0:
            return None
        # Second: of all that serve the same least share, the one that carries the most. `_KEEP` allows for
        # rounding.
        more = program.solve(total, float(found[-1]) * _KEEP, deadline, work, done)
        found = found if more is None else more
    chosen, taken = program.read(found)
    return (chosen, taken) if chosen else None


# On the machines


def set_up(
    problem: Problem,
    catalog: Catalog,
    cut: Cut,
    shelves: Sequence[TemplateShelf],
    chosen: Chosen,
    taken: Taken,
    *,
    partial: bool,
) -> list[Placed]:
    """Return the services with their replicas on slices of the cut."""
    free: dict[tuple[str, str], list[Unit]] = {}
    # Machines that nothing was taken of come last: a replica should not span more of them than it must.
    for unit in sorted(cut, key=lambda unit: ((unit.region, unit.machine) not in taken, unit.host)):
        free.setdefault((unit.region, unit.kind), []).append(unit)
    placed = []
    for number, service in enumerate(problem.services):
        ranges: dict[Unit, tuple[int, int]] = {}
        groups: list[list[Unit]] = []
        for column, count in chosen:
            if column.service != number:
                continue
            layout: Layout = shelves[column.library].library.layout_of(np.array(column.counts))
            for _ in range(count):
                group = []
                for stage in layout.stages:
                    for kind in stage.nodes:
                        unit = free[column.site, kind].pop(0)
                        ranges[unit] = (stage.start, stage.end)
                        group.append(unit)
                groups.append(group)
        # Only what is used: a matrix of the links of thousands of machines would take gigabytes.
        used = tuple(unit for unit in cut if unit in ranges)
        instance = flow_instance(
            problem, catalog, service, partial=partial, units=used, promised=True
        )
        row = {unit: i for i, unit in enumerate(instance.units)}
        start, end = np.zeros(instance.size, np.int64), np.zeros(instance.size, np.int64)
        for unit, (first, past) in ranges.items():
            start[row[unit]], end[row[unit]] = first, past
        placement = Placement(start, end)
        rows = [[row[unit] for unit in group] for group in groups]
        flows = flow_of_groups(instance, placement, rows)
        placed.append(Placed(service, instance, placement, flows, promised=True))
    return fit_links(problem, catalog, placed)
