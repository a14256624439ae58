"""Plans as graphs in arrays: units and links of every instance, and the instances of every service."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from atoll.catalog.catalog import Catalog
from atoll.core.errors import InputError
from atoll.core.ids import Phase
from atoll.perf.operators import ACTIVATION_BYTES
from atoll.plan.plan import SINK, SOURCE, Instance, Plan
from atoll.plan.problem import Problem
from atoll.routing.instances import service_tables
from atoll.routing.tables import RouteTables
from atoll.sim.arrays import EDGE, VERTEX, Floats, Longs, Records
from atoll.sim.fleet import FleetHistory

TOKEN_BYTES = 4.0
"""Bytes of a token between coordinator and node, where no cluster says it."""


@dataclass(frozen=True)
class SimUnit:
    """One group of `tp` GPUs of a node: the `index`-th of its instance, one of `groups` there.

    `node` numbers the nodes of all instances.
    """

    instance: int
    node: int
    index: int
    groups: int


@dataclass(frozen=True)
class Sites:
    """Ends of links, by name, with bytes/s and seconds from row to column.

    `paired`: every pair has a link of its own; else everything that leaves a node shares its interface.
    """

    names: tuple[str, ...]
    bytes_per_s: Floats
    latency_s: Floats
    paired: bool

    def number(self, name: str) -> int:
        """Return the number of a site."""
        return self.names.index(name)


def site_name(problem: Problem, instance: Instance, index: int) -> str:
    """Return the site of a node: itself in a cluster, else its region and type."""
    node = instance.nodes[index]
    if problem.cluster is not None and node.host is not None:
        return node.host
    return f"{instance.region_of(node)} {node.node_type}"


def gateway_name(problem: Problem, instance: Instance, *, out: bool) -> str:
    """Return the site of the coordinator that an instance is reached from (`out`: answers to)."""
    if problem.cluster is not None:
        return SINK if out else SOURCE
    return f"{instance.region} gateway"


def sites_of(
    problem: Problem, catalog: Catalog, instances: Sequence[Instance], coordinator_s: float | None
) -> Sites:
    """Return the ends of all links that a set of instances may use."""
    if problem.cluster is not None:
        return _cluster_sites(problem, instances)
    ends: dict[str, tuple[str, str | None]] = {}
    for instance in instances:
        ends[gateway_name(problem, instance, out=True)] = (instance.region, None)
        for index, node in enumerate(instance.nodes):
            place = site_name(problem, instance, index)
            ends[place] = (instance.region_of(node), node.node_type)
    names = tuple(sorted(ends))
    size = len(names)
    speed, wait = np.zeros((size, size)), np.zeros((size, size))
    for i, a in enumerate(names):
        for j, b in enumerate(names):
            (region_a, kind_a), (region_b, kind_b) = ends[a], ends[b]
            link = catalog.links.between(region_a, region_b, kind_a, kind_b)
            speed[i, j], wait[i, j] = link.bandwidth_bytes_per_s, link.latency_s
            if coordinator_s is not None and (kind_a is None) != (kind_b is None):
                wait[i, j] = coordinator_s
    return Sites(names, speed, wait, paired=False)


def _cluster_sites(problem: Problem, instances: Sequence[Instance]) -> Sites:
    cluster = problem.cluster
    assert cluster is not None
    used = sorted({node.host for i in instances for node in i.nodes if node.host is not None})
    names = (*used, SOURCE, SINK)
    size = len(names)
    speed, wait = np.zeros((size, size)), np.zeros((size, size))
    for i, a in enumerate(names):
        for j, b in enumerate(names):
            if a in (b, SINK) or b == SOURCE or (a == SOURCE and b == SINK):
                continue
            link = cluster.link(a, b)
            if link is not None:
                speed[i, j], wait[i, j] = link.bytes_per_s, link.latency_s
    return Sites(names, speed, wait, paired=True)


@dataclass(frozen=True)
class Lower:
    """The graphs of all instances: their units in order, routing tables, vertices and edges."""

    units: tuple[SimUnit, ...]
    tables: tuple[RouteTables, ...]
    vertices: Records
    edges: Records
    longest: int


def lower_graph(
    problem: Problem,
    catalog: Catalog,
    instances: Sequence[Instance],
    sites: Sites,
    groups: Sequence[Sequence[int]],
    *,
    spare: bool,
) -> Lower:
    """Return the graphs of instances; `groups[i][k]` is how many units node k of instance i is.

    With `spare`, ways that the layers allow and the plan does not use are there with weight 0.
    """
    units: list[SimUnit] = []
    tables: list[RouteTables] = []
    vertices: list[Records] = []
    edges: list[Records] = []
    node_base = 0
    node_total = sum(len(instance.nodes) for instance in instances)
    for number, instance in enumerate(instances):
        planned = RouteTables.from_instance(instance, spare=spare)
        table, members = _expand(planned, groups[number])
        first = len(units)
        units += [SimUnit(number, node_base + k, k, groups[number][k]) for k, _ in members]
        item = np.array([-1, *range(first, len(units)), -1], np.int64)
        ends = [
            gateway_name(problem, instance, out=False),
            *(site_name(problem, instance, k) for k, _ in members),
            gateway_name(problem, instance, out=True),
        ]
        where = np.array([sites.number(end) for end in ends])
        senders = np.array([node_total + where[0], *(u.node for u in units[first:]), 0])
        edge = edge_records(table, item)
        _wire(edge, table, where, senders, sites, instance)
        outer = (table.source_of == 0) | (table.target == table.vertices - 1)
        token, activation = _sizes(problem, catalog, instance)
        edge["token_bytes"] = np.where(outer, token, activation)
        tables.append(table)
        vertices.append(vertex_records(table, item))
        edges.append(edge)
        node_base += len(instance.nodes)
    longest = max(longest_path(table) for table in tables)
    return Lower(
        tuple(units), tuple(tables), np.concatenate(vertices), np.concatenate(edges), longest
    )


def _wire(
    edge: Records,
    table: RouteTables,
    where: Longs,
    senders: Longs,
    sites: Sites,
    instance: Instance,
) -> None:
    """Give edges the links between their sites."""
    tail, head = where[table.source_of], where[table.target]
    speed = sites.bytes_per_s[tail, head]
    if np.any((speed <= 0.0) & (table.weight > 0.0)):
        raise InputError(
            f"{instance.id} sends over a link that the cluster does not have",
            field="cluster.links",
            hint="add the link, or plan again",
        )
    # What the layers allow but no link joins is no way.
    edge["bytes_per_s"] = np.where(speed > 0.0, speed, 1.0)
    edge["latency_s"] = sites.latency_s[tail, head]
    edge["link"] = tail * len(sites.names) + head if sites.paired else senders[table.source_of]


def vertex_records(table: RouteTables, item: Longs, part: Longs | None = None) -> Records:
    """Return the vertices of a graph; `item` is what stands at each."""
    records = np.zeros(table.vertices, VERTEX)
    records["sweep"], records["item"] = table.sweep, item
    if part is not None:
        records["part"] = part
    records["room"] = np.inf
    flow = np.bincount(table.target, weights=table.weight, minlength=table.vertices)
    records["speed"] = np.maximum(flow, (float(flow.max(initial=0.0)) or 1.0) * 1e-6)
    return records


def edge_records(table: RouteTables, item: Longs) -> Records:
    """Return the edges of a graph."""
    records = np.zeros(table.edges, EDGE)
    records["target"], records["order"], records["weight"] = table.target, table.order, table.weight
    records["reach"] = item[table.target]
    records["delay"] = 1.0
    records["bytes_per_s"] = 1.0
    records["head"] = records["tail"] = -1
    return records


def _sizes(problem: Problem, catalog: Catalog, instance: Instance) -> tuple[float, float]:
    """Bytes of a token to and from the coordinator, and from node to node."""
    service = problem.service(instance.service)
    activation = catalog.model(service.model).llm.hidden * ACTIVATION_BYTES
    token = problem.cluster.token_bytes if problem.cluster is not None else TOKEN_BYTES
    return token, activation + token


def _expand(table: RouteTables, groups: Sequence[int]) -> tuple[RouteTables, list[tuple[int, int]]]:
    """The tables with every node as often as it has groups, which share its flow evenly."""
    members = [(k, g) for k, count in enumerate(groups) for g in range(count)]
    if len(members) == len(groups):
        return table, members
    copies = [[0], *([] for _ in groups), [len(members) + 1]]
    for v, (k, _) in enumerate(members, 1):
        copies[k + 1].append(v)
    names = [SOURCE, *(f"{table.names[k + 1]}.{g}" for k, g in members), SINK]
    held = [(int(table.start[v]), int(table.end[v])) for v in (0, *(k + 1 for k, _ in members), -1)]
    edges = [
        (i, j, float(w) / (len(copies[a]) * len(copies[b])))
        for a, b, w in zip(table.source_of, table.target, table.weight, strict=True)
        for i in copies[a]
        for j in copies[b]
    ]
    return RouteTables.of_edges(names, held, edges), members


def longest_path(table: RouteTables) -> int:
    """Return the most units a request can pass."""
    deep = np.zeros(table.vertices, np.int64)
    for v in table.sweep:
        edges = slice(int(table.first[v]), int(table.first[v + 1]))
        hops = deep[table.target[edges]]
        deep[v] = (hops.max() if len(hops) else 0) + (0 < v < table.vertices - 1)
    return int(deep[0])


@dataclass(frozen=True)
class Upper:
    """The instances of every service: routing tables with all of them, and their weights by plan."""

    tables: tuple[RouteTables, ...]
    numbers: tuple[tuple[int, ...], ...]
    vertices: Records
    edges: Records
    weights: tuple[tuple[Floats, ...], ...]


def upper_graph(problem: Problem, history: FleetHistory) -> Upper:
    """Return the graphs of the instances of every service, over all plans of a run."""
    tables: list[RouteTables] = []
    numbers: list[tuple[int, ...]] = []
    weights: list[list[Floats]] = [[] for _ in history.plans]
    vertices: list[Records] = []
    edges: list[Records] = []
    for service in problem.services:
        serving = [
            standing for standing in history.standing if standing.instance.service == service.name
        ]
        decode = [
            standing.number for standing in serving if standing.instance.phase is Phase.DECODE
        ]
        lists = [
            [standing.number for standing in serving if standing.instance.phase is not Phase.DECODE]
        ]
        if service.phases == "apart":
            lists.append(decode)
        named = [number for some in lists for number in some]
        vertex = {number: 1 + at for at, number in enumerate(named)}
        last = len(named) + 1
        pairs = [(0, vertex[n]) for n in lists[0]]
        if len(lists) > 1:
            pairs += [(vertex[a], vertex[b]) for a in lists[0] for b in lists[1]]
        pairs = sorted([*pairs, *((vertex[n], last) for n in lists[-1])])
        for k, plan in enumerate(history.plans):
            planned = _planned_weights(plan, service.name, history.numbers[k], vertex, last)
            weights[k].append(np.array([planned.get(pair, 0.0) for pair in pairs]))
        held = [(0, 0), *((k, k + 1) for k, some in enumerate(lists) for _ in some)]
        table = RouteTables.of_edges(
            [SOURCE, *(f"#{n}" for n in named), SINK],
            [*held, (len(lists), len(lists))],
            [(a, b, float(w)) for (a, b), w in zip(pairs, weights[0][-1], strict=True)],
        )
        item = np.array([-1, *named, -1], np.int64)
        part = np.array([0, *(int(n in decode) for n in named), 0], np.int64)
        tables.append(table)
        numbers.append(tuple(named))
        vertices.append(vertex_records(table, item, part))
        edges.append(edge_records(table, item))
    return Upper(
        tuple(tables),
        tuple(numbers),
        np.concatenate(vertices),
        np.concatenate(edges),
        tuple(tuple(of_plan) for of_plan in weights),
    )


def _planned_weights(
    plan: Plan, service: str, numbers: dict[str, int], vertex: dict[int, int], last: int
) -> dict[tuple[int, int], float]:
    """The weights a plan gives to the pairs of a service's graph; empty where it does not serve it."""
    if not any(route.service == service for route in plan.routes):
        return {}
    planned = service_tables(plan, service)
    at = [0, *(vertex[numbers[name]] for name in planned.names[1:-1]), last]
    return {
        (at[a], at[b]): float(w)
        for a, b, w in zip(planned.source_of, planned.target, planned.weight, strict=True)
    }
