"""From a placement and its flow to a plan."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from atoll.catalog.catalog import Catalog
from atoll.core.errors import UsageError
from atoll.core.ids import Phase
from atoll.engines.table import find_engine
from atoll.perf.memory_model import position_of
from atoll.plan.cluster_capacities import wire_seconds
from atoll.plan.cluster_profiles import (
    activation_bytes,
    cluster_of,
    is_measured,
    profile_tps,
    request_tokens,
)
from atoll.plan.engine_layout import list_limits
from atoll.plan.plan import SINK, SOURCE, Flow, Goal, Instance, Node, Plan, Status
from atoll.plan.problem import Problem, Service
from atoll.plan.validate.check import goal_value
from atoll.plan.validate.validate_instance import longest_way
from atoll.solve.assembly import assemble, price
from atoll.solve.place.flow_instance import FlowInstance, Flows, Placement
from atoll.solve.place.latency import scale_flows

_TRICKLE = 1e-9
"""Share of the whole below which a flow is rounding."""
_PROVEN = 1e-3
"""Gap up to which a plan is called optimal."""


@dataclass(frozen=True)
class Placed:
    """One service on nodes of the cluster, with the flow over them in tokens/s.

    `promised` says that the flow keeps the promise, so that nodes are split over GPUs as that asks for.
    """

    service: Service
    instance: FlowInstance
    placement: Placement
    flows: Flows
    promised: bool = False


def plan_of(
    problem: Problem,
    catalog: Catalog,
    placed: Sequence[Placed],
    *,
    goal: Goal,
    bound: float | None,
    solver: str,
    reasons: Sequence[str] = (),
) -> Plan:
    """Return the plan of services placed on a cluster; its objective is what their flows carry.

    Nodes without flow are left out; pipelines that share no node are instances of their own. The plan is
    "optimal" where it is within 0.1 % of the bound.
    """
    instances: list[Instance] = []
    numbers: Counter[str] = Counter()
    for entry in placed:
        if entry.flows.value > 0:
            # A service may stand on several parts of a cluster: its instances are numbered through.
            own = instances_of(problem, catalog, entry, first=numbers[entry.service.name])
            numbers[entry.service.name] += len(own)
            instances += (_name_engine(instance, problem, catalog) for instance in own)

    def build(status: Status, value: float, limit: float | None) -> Plan:
        return assemble(
            problem,
            instances,
            status=status,
            solver=solver,
            bound=limit,
            reasons=reasons,
            goal=goal,
            value=value,
        )

    # Built twice: the value is read off the plan, and only then it is known whether that is proven optimal.
    value = goal_value(build("feasible", 0.0, None), problem)
    proven = bound is not None and bound - value <= bound * _PROVEN
    return build("optimal" if proven else "feasible", value, bound)


def _name_engine(instance: Instance, problem: Problem, catalog: Catalog) -> Instance:
    """The instance with the engine that it is placed for, where that runs it; else any layout is free."""
    engine = find_engine(problem.settings.engine)
    spec = catalog.model(problem.service(instance.service).model).llm
    if not engine.launches or is_measured(problem, catalog, instance):
        return instance
    if list_limits(engine, instance, spec, catalog):
        return instance
    return instance.model_copy(update={"engine": engine.name})


def fit_links(problem: Problem, catalog: Catalog, placed: Sequence[Placed]) -> list[Placed]:
    """Return placements with flows scaled down until slices of a machine share its links.

    Where units are whole machines no link is shared, and nothing changes.
    """
    cluster = cluster_of(problem)
    used: defaultdict[tuple[str, str], float] = defaultdict(float)
    for entry in placed:
        for (src, dst), moved in _bytes_moved(catalog, cluster.token_bytes, entry).items():
            used[src, dst] += moved
    over: dict[tuple[str, str], float] = {}
    for (src, dst), moved in used.items():
        link = cluster.link(src, dst)
        if link is not None and moved > link.bytes_per_s:
            over[src, dst] = link.bytes_per_s / moved
    if not over:
        return list(placed)
    fitting = []
    for entry in placed:
        ways = _bytes_moved(catalog, cluster.token_bytes, entry)
        # Scaled as a whole, by its worst link, so that what enters a node still leaves it.
        share = min((over[way] for way in ways if way in over), default=1.0)
        fitting.append(replace(entry, flows=scale_flows(entry.flows, share)))
    return fitting


def _bytes_moved(
    catalog: Catalog, token_bytes: float, placed: Placed
) -> dict[tuple[str, str], float]:
    """Bytes/s between machines that have slices in use, by name."""
    host = [unit.host for unit in placed.instance.units]
    # Whole machines have their links to themselves.
    if all(unit.gpu_ids is None for unit in placed.instance.units):
        return {}
    flows, between = placed.flows, activation_bytes(catalog, placed.service)
    moved: defaultdict[tuple[str, str], float] = defaultdict(float)
    for i in map(int, np.flatnonzero(flows.enter > 0)):
        moved[SOURCE, host[i]] += float(flows.enter[i]) * token_bytes
    for i in map(int, np.flatnonzero(flows.leave > 0)):
        moved[host[i], SINK] += float(flows.leave[i]) * token_bytes
    for i, k in zip(*np.nonzero(flows.edge > 0), strict=True):
        moved[host[int(i)], host[int(k)]] += float(flows.edge[i, k]) * between
    return dict(moved)


def instances_of(
    problem: Problem, catalog: Catalog, placed: Placed, *, first: int = 0
) -> list[Instance]:
    """Return the pipelines of a placed service that share nothing, as instances numbered from `first`."""
    through = placed.flows.enter + placed.flows.edge.sum(axis=0)
    min_flow = placed.flows.value * _TRICKLE
    used = [int(i) for i in np.flatnonzero(through > min_flow)]
    # In the order requests pass them, so that ids rise along the pipelines.
    used.sort(key=lambda i: (placed.placement.start[i], placed.placement.end[i], i))
    groups = _connected(used, placed.flows.edge > min_flow)
    return [
        _instance(problem, catalog, placed, group, number)
        for number, group in enumerate(groups, first)
    ]


def _connected(
    used: Sequence[int], joined: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
) -> list[list[int]]:
    """Nodes in groups that flow joins, in the order of their first ones."""
    group = {i: i for i in used}

    def find(i: int) -> int:
        while group[i] != i:
            i = group[i]
        return i

    for i in used:
        for k in used:
            if joined[i, k]:
                a, b = find(i), find(k)
                # The smaller number becomes the root, so groups do not depend on the order of links.
                group[max(a, b)] = min(a, b)
    groups: dict[int, list[int]] = {}
    for i in used:
        groups.setdefault(find(i), []).append(i)
    return list(groups.values())


def _instance(
    problem: Problem, catalog: Catalog, placed: Placed, used: Sequence[int], number: int
) -> Instance:
    service, flow_instance, flows = placed.service, placed.instance, placed.flows
    role = next((role for role in service.roles if role.phase is Phase.BOTH), None)
    if role is None:
        raise UsageError(
            f"{service.name} runs its phases apart",
            hint="set 'phases: together' on a fixed cluster",
        )
    min_flow = flows.value * _TRICKLE
    name = {i: f"n{k}" for k, i in enumerate(used)}
    per_request = request_tokens(service)
    moved: list[Flow] = []

    def move(src: str, dst: str, tokens: float) -> None:
        if tokens > min_flow:
            moved.append(Flow(src=src, dst=dst, per_s=float(tokens) / per_request))

    for i in used:
        move(SOURCE, name[i], flows.enter[i])
    for i in used:
        for k in used:
            move(name[i], name[k], flows.edge[i, k])
        move(name[i], SINK, flows.leave[i])
    sizes = profile_tps(problem, catalog, service)
    # An instance has one region of its own; nodes elsewhere name theirs.
    home = Counter(flow_instance.regions[i] for i in used).most_common(1)[0][0]
    units = flow_instance.units
    nodes = tuple(
        Node(
            id=name[i],
            node_type=units[i].machine,
            market="owned",
            start=int(placed.placement.start[i]),
            end=int(placed.placement.end[i]),
            tp=sizes[units[i].kind],
            host=units[i].host,
            region=units[i].region if units[i].region != home else None,
            gpu_ids=units[i].gpu_ids,
        )
        for i in used
    )
    made = Instance(
        id=f"{service.name}-{role.phase}-{number}",
        service=service.name,
        role=str(role),
        region=home,
        stages=longest_way(tuple(moved)) or len(nodes),
        nodes=nodes,
        flows=tuple(moved),
        throughput_per_s=sum(flow.per_s for flow in moved if flow.src == SOURCE),
        usd_per_hour=price(problem, home, nodes),
        partial=flow_instance.partial,
    )
    return _split_best(problem, catalog, placed, used, made) if placed.promised else made


def _split_best(
    problem: Problem, catalog: Catalog, placed: Placed, used: Sequence[int], instance: Instance
) -> Instance:
    """Return an instance whose nodes are split over as many GPUs as serves the most within the promise."""
    promise = placed.instance.promise
    if promise is None:
        return instance
    spec = catalog.model(placed.service.model).llm
    wires_s = wire_seconds(instance, problem, catalog)
    nodes = []
    for i, node in zip(used, instance.nodes, strict=True):
        place = position_of(spec, node.start, node.end)
        _, tp = promise.nodes[i].rates(instance.stages, place, wires_s)
        nodes.append(node.model_copy(update={"tp": int(tp[node.layers])}))
    return instance.model_copy(update={"nodes": tuple(nodes)})
