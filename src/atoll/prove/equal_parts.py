"""Equal parts of a plan: a cluster that is several equal clusters side by side is simulated once.

Groups of machines on a large cluster share no link, and many are alike: equal machines with equal layers,
links and flows. Where every kind of group stands g times or a multiple of that, a g-th of the groups with a
g-th of the requests behaves as all of them do, but for requests that would go to a quieter copy: what is
kept is, if anything, less than of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.plan.cluster import Cluster
    from atoll.plan.plan import Instance, Plan
    from atoll.plan.problem import Problem

Key = tuple[object, ...]


@dataclass(frozen=True)
class EqualPart:
    """One of `number` equal parts of a plan, and the problem with its share of the demand."""

    plan: Plan
    problem: Problem
    number: int


def equal_part(plan: Plan, problem: Problem) -> EqualPart:
    """Return one of the equal parts of a plan on a cluster; the whole where there are none."""
    cluster = problem.cluster
    whole = EqualPart(plan, problem, 1)
    if cluster is None or any(len(route.instances) > 1 for route in plan.routes):
        return whole
    shares = {route.instances[0]: route.share for route in plan.routes}
    alike: dict[Key, list[str]] = {}
    for one in plan.instances:
        key = (shares.get(one.id), *_key(one, cluster))
        alike.setdefault(key, []).append(one.id)
    number = math.gcd(*(len(some) for some in alike.values()))
    if number <= 1:
        return whole
    taken = {name for some in alike.values() for name in some[: len(some) // number]}
    instances = tuple(one for one in plan.instances if one.id in taken)
    routes = tuple(
        route.model_copy(update={"share": min(1.0, route.share * number)})
        for route in plan.routes
        if route.instances[0] in taken
    )
    return EqualPart(
        plan.model_copy(update={"instances": instances, "routes": routes}),
        problem.scale_demand(1.0 / number),
        number,
    )


def _key(instance: Instance, cluster: Cluster) -> Key:
    """Equal for instances whose machines can be exchanged one for one, in the order of their nodes."""
    at = {node.id: index for index, node in enumerate(instance.nodes)}
    nodes = tuple(
        (n.node_type, n.start, n.end, n.tp, n.gpu_ids, n.kv_bytes) for n in instance.nodes
    )
    own = (instance.service, instance.role, instance.stages, instance.engine, instance.slots)
    return (*own, nodes, tuple(_flows(instance, cluster, at)))


def _flows(instance: Instance, cluster: Cluster, at: dict[str, int]) -> Iterator[Key]:
    """Yield each flow with its link, its ends by number."""
    hosts = {node.id: node.host or node.id for node in instance.nodes}
    for flow in instance.flows:
        link = cluster.link(hosts.get(flow.src, flow.src), hosts.get(flow.dst, flow.dst))
        wide = None if link is None else (link.bytes_per_s, link.latency_s)
        yield at.get(flow.src, flow.src), at.get(flow.dst, flow.dst), flow.per_s, wide
