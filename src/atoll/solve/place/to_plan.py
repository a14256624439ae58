"""From a placement and its flow to a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from atoll.catalog.catalog import Catalog
from atoll.core.errors import UsageError
from atoll.plan.cluster_profiles import profile_tps, request_tokens
from atoll.plan.plan import SINK, SOURCE, Flow, Goal, Instance, Node, Plan, Status
from atoll.plan.problem import Problem, Service
from atoll.plan.validate.check import goal_value
from atoll.plan.validate.instance import longest_way
from atoll.solve.assembly import assemble, price
from atoll.solve.place.instance import FlowInstance, Flows, Placement

_TRICKLE = 1e-9
"""Share of the whole below which a flow is rounding."""
_PROVEN = 1e-6


@dataclass(frozen=True)
class Placed:
    """One service on nodes of the cluster, with the flow over them in tokens/s."""

    service: Service
    instance: FlowInstance
    placement: Placement
    flows: Flows


def plan_of(
    problem: Problem,
    catalog: Catalog,
    placed: Sequence[Placed],
    *,
    goal: Goal,
    bound: float | None,
    solver: str,
    seconds: float = 0.0,
    cpu_seconds: float = 0.0,
    reasons: Sequence[str] = (),
) -> Plan:
    """Return the plan of services placed on a cluster; its objective is what their flows carry.

    Nodes without flow are left out. The plan is "optimal" if the bound is reached.
    """
    instances = [instance_of(problem, catalog, entry) for entry in placed if entry.flows.value > 0]

    def build(status: Status, value: float, limit: float | None) -> Plan:
        return assemble(
            problem,
            instances,
            status=status,
            solver=solver,
            bound=limit,
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            reasons=reasons,
            goal=goal,
            value=value,
        )

    value = goal_value(build("feasible", 0.0, None), problem)
    proven = bound is not None and bound <= value * (1 + _PROVEN)
    return build("optimal" if proven else "feasible", value, bound)


def instance_of(problem: Problem, catalog: Catalog, placed: Placed) -> Instance:
    """Return one placed service as an instance, flows in requests/s."""
    service, flow_instance, flows = placed.service, placed.instance, placed.flows
    if service.phases != "together":
        raise UsageError(
            f"{service.name} runs its phases apart",
            hint="set 'phases: together' on a fixed cluster",
        )
    least = flows.value * _TRICKLE
    through = flows.enter + flows.edge.sum(axis=0)
    used = [int(i) for i in np.flatnonzero(through > least)]
    # In the order requests pass them, so that ids rise along the pipelines.
    used.sort(key=lambda i: (placed.placement.start[i], placed.placement.end[i], i))
    name = {i: f"n{k}" for k, i in enumerate(used)}
    per_request = request_tokens(service)
    moved: list[Flow] = []

    def move(src: str, dst: str, tokens: float) -> None:
        if tokens > least:
            moved.append(Flow(src=src, dst=dst, per_s=float(tokens) / per_request))

    for i in used:
        move(SOURCE, name[i], flows.enter[i])
    for i in used:
        for k in used:
            move(name[i], name[k], flows.edge[i, k])
        move(name[i], SINK, flows.leave[i])
    sizes = profile_tps(problem, catalog, service)
    home = Counter(flow_instance.regions[i] for i in used).most_common(1)[0][0]
    nodes = tuple(
        Node(
            id=name[i],
            node_type=flow_instance.node_types[i],
            market="owned",
            start=int(placed.placement.start[i]),
            end=int(placed.placement.end[i]),
            tp=sizes[flow_instance.node_types[i]],
            host=flow_instance.names[i],
            region=flow_instance.regions[i] if flow_instance.regions[i] != home else None,
        )
        for i in used
    )
    (role,) = service.roles
    return Instance(
        id=f"{service.name}-{role.phase}-0",
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
