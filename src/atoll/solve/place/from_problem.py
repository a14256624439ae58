"""From a problem with a cluster to the arrays that flow solvers work on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from atoll.catalog.catalog import Catalog
from atoll.plan.cluster import ANY, Cluster, NodeProfile
from atoll.plan.cluster_capacities import promised_node
from atoll.plan.cluster_profiles import (
    activation_bytes,
    cluster_of,
    max_layers,
    service_profiles,
    service_rates,
)
from atoll.plan.plan import SINK, SOURCE
from atoll.plan.problem import Problem, Service
from atoll.solve.array_types import Floats, Ints
from atoll.solve.place.flow_instance import ClusterPromise, FlowInstance, Placement, Timing, Unit

Curve = tuple[tuple[float, float], ...]


def flow_instance(
    problem: Problem,
    catalog: Catalog,
    service: str | Service,
    *,
    partial: bool = False,
    nodes: Iterable[str] | None = None,
    units: Sequence[Unit] | None = None,
    promised: bool = False,
) -> FlowInstance:
    """Return one service of a problem on the nodes of its cluster, or on those named by `nodes`.

    `units` are the nodes, by default every machine whole. Those that the service may not stand on, or that
    cannot hold one layer, are left out. What a node carries depends on the whole cluster, also where only
    some of it is used. With `promised` a node that was not measured may hold as many layers as it carries
    anything with within the promise, at any tensor-parallel size.
    """
    if isinstance(service, str):
        service = problem.service(service)
    cluster = cluster_of(problem)
    spec = catalog.model(service.model).llm
    profiles = service_profiles(problem, catalog, service)
    rates = service_rates(problem, catalog, service)
    wanted = None if nodes is None else frozenset(nodes)
    used = [
        unit
        for unit in (whole_machines(cluster) if units is None else units)
        if unit.kind in rates and (wanted is None or unit.name in wanted)
    ]
    max_held = {
        kind: min(spec.layers, max_layers(profiles[kind], cluster, service)) for kind in rates
    }
    kinds = [unit.kind for unit in used]
    nodes_of = {
        key: promised_node(problem, catalog, service, *key)
        for key in sorted({(unit.kind, unit.machine) for unit in used})
    }
    if promised:
        for (kind, _), own in nodes_of.items():
            if own.profile is None:
                max_held[kind] = max(max_held[kind], own.max_layers)
    widest = max((max_held[kind] for kind in kinds), default=0)
    held = np.array([max_held[kind] for kind in kinds], np.int64)
    rate = _rows([rates[kind][: max_held[kind]] for kind in kinds], widest)
    wires = _wires(cluster, used)
    per_token, few = activation_bytes(catalog, service), cluster.token_bytes
    return FlowInstance(
        layers=spec.layers,
        names=tuple(unit.name for unit in used),
        node_types=tuple(kinds),
        regions=tuple(unit.region for unit in used),
        kind=_kinds(kinds, *wires),
        max_layers=held,
        rate=rate,
        link=wires[0][:-2, :-2] / per_token,
        enter=wires[0][-2, :-2] / few,
        leave=wires[0][:-2, -1] / few,
        latency=wires[1][:-2, :-2],
        enter_s=wires[1][-2, :-2],
        leave_s=wires[1][:-2, -1],
        partial=partial,
        timing=_read_timing(
            cluster, service, [profiles[kind] for kind in kinds], max_held, kinds, per_token
        ),
        units=tuple(used),
        promise=ClusterPromise(service, tuple(nodes_of[unit.kind, unit.machine] for unit in used)),
    )


def whole_machines(cluster: Cluster) -> tuple[Unit, ...]:
    """Return every machine of a cluster as it is."""
    return tuple(Unit(node.name, node.node_type, node.region) for node in cluster.nodes)


def placement_of(instance: FlowInstance, ranges: Sequence[tuple[int, int]]) -> Placement:
    """Return the placement with layers [start, end) of each node of the instance, (0, 0) for none."""
    if len(ranges) != instance.size:
        raise ValueError(f"{len(ranges)} ranges for {instance.size} nodes")
    both = np.array(ranges, np.int64).reshape(-1, 2)
    return Placement(both[:, 0].copy(), both[:, 1].copy())


def _rows(rows: Sequence[Sequence[float]], widest: int) -> Floats:
    """Values for 1, 2, ... layers as rows with a leading 0, padded with zeros."""
    table = np.zeros((len(rows), widest + 1))
    for i, row in enumerate(rows):
        table[i, 1 : len(row) + 1] = row
    return table


def _wires(cluster: Cluster, units: Sequence[Unit]) -> tuple[Floats, Floats]:
    """Bytes/s and seconds from row to column; the last two are source and sink, 0 is no link.

    Rules are painted over each other from the least specific to the most. A slice has its share of what its
    machine's links carry.
    """
    ends = [*(unit.host for unit in units), SOURCE, SINK]
    places = [*(unit.region for unit in units), None, None]
    where: dict[str, NDArray[np.intp]] = {ANY: np.arange(len(ends))}
    for names in (ends, places):
        for name in sorted({name for name in names if name is not None}):
            where[name] = np.array([i for i, other in enumerate(names) if other == name])
    speed, wait = np.zeros((len(ends), len(ends))), np.zeros((len(ends), len(ends)))
    for src, dst, rule in cluster.weakest_first():
        if src in where and dst in where:
            cells = np.ix_(where[src], where[dst])
            speed[cells], wait[cells] = rule.bytes_per_s, rule.latency_s
    share = np.array([*(unit.share for unit in units), 1.0, 1.0])
    speed *= np.minimum(share[:, None], share[None, :])
    np.fill_diagonal(speed, 0.0)
    np.fill_diagonal(wait, 0.0)
    return speed, wait


def _kinds(node_types: Sequence[str], speed: Floats, wait: Floats) -> Ints:
    """Equal numbers for nodes that can be exchanged: same type, same links to and from everything."""
    kind = np.zeros(len(node_types), np.int64)
    leaders: dict[tuple[object, ...], list[int]] = {}
    count = 0
    for i, node_type in enumerate(node_types):
        ends = (speed[-2, i], wait[-2, i], speed[i, -1], wait[i, -1])
        alike = leaders.setdefault((node_type, *ends), [])
        leader = next((k for k in alike if _are_exchangeable(i, k, speed, wait)), None)
        if leader is None:
            alike.append(i)
            kind[i], count = count, count + 1
        else:
            kind[i] = kind[leader]
    return kind


def _are_exchangeable(i: int, k: int, *matrices: Floats) -> bool:
    """Return whether the links stay the same when nodes i and k change places."""
    for links in matrices:
        others = np.ones(len(links), np.bool_)
        others[[i, k]] = False
        same = (
            links[i, k] == links[k, i]
            and np.array_equal(links[i, others], links[k, others])
            and np.array_equal(links[others, i], links[others, k])
        )
        if not same:
            return False
    return True


def _read_timing(
    cluster: Cluster,
    service: Service,
    profiles: Sequence[NodeProfile],
    max_held: dict[str, int],
    kinds: Sequence[str],
    per_token: float,
) -> Timing:
    widest = max((max_held[kind] for kind in kinds), default=0)
    held = [_room(profile, max_held[kind]) for profile, kind in zip(profiles, kinds, strict=True)]
    prompts, prefill_s = _curves([profile.prefill_s_per_layer for profile in profiles])
    sequences, decode_s = _curves([profile.decode_s_per_layer for profile in profiles])
    return Timing(
        input_mean=service.lengths.input_mean,
        output_mean=service.lengths.output_mean,
        activation_bytes=per_token,
        token_bytes=cluster.token_bytes,
        kv_tokens=_rows(held, widest),
        fill=cluster.kv_fill,
        prefill_tokens=prompts,
        prefill_s=prefill_s,
        decode_sequences=sequences,
        decode_s=decode_s,
        step_s=np.array([profile.step_s for profile in profiles]),
    )


def _room(profile: NodeProfile, max_held: int) -> tuple[float, ...]:
    """Tokens of KV cache beside 1, 2, ... layers; with more than the profile knows of, in proportion."""
    known = profile.kv_tokens[:max_held]
    return (*known, *(known[-1] * len(known) / j for j in range(len(known) + 1, max_held + 1)))


def _curves(curves: Sequence[Curve]) -> tuple[Floats, Floats]:
    """The x and y of every curve as rows, padded by repeating the last point."""
    longest = max((len(curve) for curve in curves), default=0)
    points = np.array([[*curve, *[curve[-1]] * (longest - len(curve))] for curve in curves])
    both = points.reshape(len(curves), longest, 2)
    return both[:, :, 0].copy(), both[:, :, 1].copy()
