"""Plans as graphs in arrays: the units of every instance, and the instances of every service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from atoll.catalog.catalog import Catalog
from atoll.core.errors import InputError
from atoll.core.ids import Phase
from atoll.perf.operators import ACTIVATION_BYTES
from atoll.plan.plan import SINK, SOURCE, Instance, Plan
from atoll.plan.problem import Problem
from atoll.routing.instances import service_tables
from atoll.routing.route_tables import RouteTables
from atoll.sim.instance_history import FleetHistory
from atoll.sim.sim_arrays import EDGE, VERTEX, Floats, Longs, Records
from atoll.sim.sim_links import Sites, gateway_name, interfaces, site_name

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
    nics = interfaces(catalog, instances)
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
        node = np.array([-1, *(u.node for u in units[first:]), -1])
        edge = edge_records(table, item)
        _wire(edge, table, where, node, sites, nics, instance)
        # Tokens go to and from the gateway, activations from node to node.
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
    node: Longs,
    sites: Sites,
    nics: Floats,
    instance: Instance,
) -> None:
    """Give edges the links between their sites; `node` has the node at each vertex, -1 outside."""
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
    edge["into"] = -1
    if sites.paired:
        edge["link"] = tail * len(sites.names) + head
        return
    sender, receiver = node[table.source_of], node[table.target]
    edge["link"] = np.where(sender >= 0, sender, 2 * len(nics) + tail)
    # Between nodes both interfaces count; tokens to and from coordinators are too few bytes to.
    inner = (sender >= 0) & (receiver >= 0)
    edge["into"] = np.where(inner, len(nics) + receiver, -1)
    out, into = nics[sender], nics[receiver]
    # A link that is slower than both interfaces sets the speed; else the sender's does,
    # and the receiver's counts by itself (`into`).
    slower = speed < np.minimum(out, into)
    edge["bytes_per_s"] = np.where(inner & ~slower, out, edge["bytes_per_s"])


def vertex_records(table: RouteTables, item: Longs) -> Records:
    """Return the vertices of a graph; `item` is what stands at each."""
    records = np.zeros(table.vertices, VERTEX)
    records["sweep"], records["item"] = table.sweep, item
    # Units get theirs later; source and sink are never full.
    records["room"] = np.inf
    flow = np.bincount(table.target, weights=table.weight, minlength=table.vertices)
    # Loads are divided by it, also where the plan sends nothing.
    records["speed"] = np.maximum(flow, (float(flow.max(initial=0.0)) or 1.0) * 1e-6)
    return records


def edge_records(table: RouteTables, item: Longs) -> Records:
    """Return the edges of a graph."""
    records = np.zeros(table.edges, EDGE)
    records["target"], records["order"], records["weight"] = table.target, table.order, table.weight
    records["reach"] = item[table.target]
    # All are alike until delays have been seen.
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
    # From the sink on: what a vertex leads to is known before the vertex.
    for v in table.sweep:
        edges = slice(int(table.first[v]), int(table.first[v + 1]))
        hops = deep[table.target[edges]]
        deep[v] = (hops.max() if len(hops) else 0) + (0 < v < table.vertices - 1)
    return int(deep[0])


@dataclass(frozen=True)
class Upper:
    """The instances of every service: routing tables with all of them, and their weights by plan.

    `leaving` has, by plan and service, the edges (number in its table, target) over which instances that the
    plan does not have any more pass on what they still compute: to those who decode in their region.
    `after_loss` says which weights hold once the instances of a plan are lost that it has routes ready for;
    those come after the weights of the plans.
    """

    tables: tuple[RouteTables, ...]
    numbers: tuple[tuple[int, ...], ...]
    vertices: Records
    edges: Records
    weights: tuple[tuple[Floats, ...], ...]
    leaving: tuple[tuple[tuple[tuple[int, int], ...], ...], ...]
    after_loss: Mapping[tuple[int, frozenset[int]], int]


def upper_graph(problem: Problem, history: FleetHistory, sites: Sites) -> Upper:
    """Return the graphs of the instances of every service, over all plans of a run."""
    tables: list[RouteTables] = []
    numbers: list[tuple[int, ...]] = []
    plans = [*enumerate(history.plans), *((one.number, one.plan) for one in history.after_loss)]
    weights: list[list[Floats]] = [[] for _ in plans]
    leaving: list[list[tuple[tuple[int, int], ...]]] = [[] for _ in plans]
    vertices: list[Records] = []
    edges: list[Records] = []
    for service in problem.services:
        serving = {
            standing.number: standing.instance
            for standing in history.standing
            if standing.instance.service == service.name
        }
        named = sorted(serving, key=lambda number: serving[number].phase is Phase.DECODE)
        vertex = {number: 1 + at for at, number in enumerate(named)}
        last = len(named) + 1
        planned = [
            _planned_weights(plan, service.name, history.numbers[k], vertex, last)
            for k, plan in plans
        ]
        own = {v: serving[number] for number, v in vertex.items()}
        for k, shares in enumerate(planned):
            planned[k] = {
                pair: share
                for pair, share in shares.items()
                if pair[0] == 0 or pair[1] == last or _joined(problem, sites, own, pair, share)
            }
        late = [
            _late_pairs({vertex[n] for n in history.numbers[k].values() if n in vertex}, own)
            for k, _ in plans
        ]
        # All plans of a run share one graph: a plan only sets weights.
        pairs = sorted({pair for some in (*planned, *late) for pair in some})
        at = {pair: number for number, pair in enumerate(pairs)}
        for k, shares in enumerate(planned):
            weights[k].append(np.array([shares.get(pair, 0.0) for pair in pairs]))
            leaving[k].append(tuple((at[pair], pair[1]) for pair in late[k]))
        table = RouteTables.of_edges(
            [SOURCE, *(f"#{n}" for n in named), SINK],
            [(0, 0), *(_PARTS[serving[n].phase] for n in named), (2, 2)],
            [(a, b, float(w)) for (a, b), w in zip(pairs, weights[0][-1], strict=True)],
        )
        item = np.array([-1, *named, -1], np.int64)
        tables.append(table)
        numbers.append(tuple(named))
        vertices.append(vertex_records(table, item))
        edges.append(edge_records(table, item))
    return Upper(
        tuple(tables),
        tuple(numbers),
        np.concatenate(vertices),
        np.concatenate(edges),
        tuple(tuple(of_plan) for of_plan in weights),
        tuple(tuple(of_plan) for of_plan in leaving),
        {
            (one.number, one.lost): at
            for at, one in enumerate(history.after_loss, len(history.plans))
        },
    )


_PARTS = {Phase.PREFILL: (0, 1), Phase.DECODE: (1, 2), Phase.BOTH: (0, 2)}


def _planned_weights(
    plan: Plan, service: str, numbers: dict[str, int], vertex: dict[int, int], last: int
) -> dict[tuple[int, int], float]:
    """The weights a plan gives to the pairs of a service's graph; empty where it does not serve it."""
    if not any(route.service == service and route.share > 0 for route in plan.routes):
        return {}
    planned = service_tables(plan, service)
    at = [0, *(vertex[numbers[name]] for name in planned.names[1:-1]), last]
    return {
        (at[a], at[b]): float(w)
        for a, b, w in zip(planned.source_of, planned.target, planned.weight, strict=True)
    }


def _joined(
    problem: Problem,
    sites: Sites,
    own: Mapping[int, Instance],
    pair: tuple[int, int],
    share: float,
) -> bool:
    """Whether links lead from all nodes that compute KV caches to those that decode them."""
    if not sites.paired:
        return True
    here, there = own[pair[0]], own[pair[1]]
    for i, a in enumerate(here.nodes):
        for j, b in enumerate(there.nodes):
            if max(a.start, b.start) >= min(a.end, b.end):
                continue
            ends = [site_name(problem, *end) for end in ((here, i), (there, j))]
            if sites.bytes_per_s[sites.number(ends[0]), sites.number(ends[1])] > 0.0:
                continue
            if share <= 0.0:
                return False
            raise InputError(
                f"KV caches go from {ends[0]} to {ends[1]}, which no link joins",
                field="cluster.links",
                hint="add the link, or plan again",
            )
    return True


def _late_pairs(present: set[int], own: Mapping[int, Instance]) -> list[tuple[int, int]]:
    """From each prefill instance that a plan does not have to the plan's decode instances in its region."""
    return [
        (a, b)
        for a in sorted(own.keys() - present)
        for b in sorted(present)
        if own[a].phase is Phase.PREFILL
        and own[b].phase is Phase.DECODE
        and own[a].region == own[b].region
    ]
