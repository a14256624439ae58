"""GPUs in proportion to arrival rate times model size: OpenFabric's memP, which it is compared with.

Machines are handed out whole, the fastest first, to the model with the largest product first: each takes
machines while that brings it nearer to its share of all GPUs, the last what is left. So come out table 1's
4 x A100, 16 x A100 and 32 x GH200 + 4 x A100, with machines of four GPUs. On its machines of a type a model
runs the replicas that carry most per GPU; the paper does not say so, and it can only help the rule.
"""

from __future__ import annotations

from collections import Counter

from atoll.catalog.catalog import Catalog
from atoll.core.ids import parse_node_type
from atoll.plan.cluster import ClusterNode
from atoll.plan.cluster_profiles import cluster_of
from atoll.plan.problem import Problem, Service
from atoll.solve.place.cp.build import Replicas
from atoll.solve.place.cp.shapes import ReplicaShape, shapes_of
from atoll.solve.place.slices import SiteType

Handed = dict[str, Counter[SiteType]]
"""Machines of each type at each site, by service."""


def hand_out(problem: Problem, catalog: Catalog) -> Handed:
    """Return how many machines every service gets; one at least, as long as there are any."""
    left = sorted(cluster_of(problem).nodes, key=lambda machine: _slowness(catalog, machine))
    total = sum(_gpus(machine) for machine in left)
    demand = {s.name: _demand(catalog, s) for s in problem.services}
    whole = sum(demand.values()) or 1.0
    handed: Handed = {}
    order = sorted(problem.services, key=lambda s: (-demand[s.name], s.name))
    for place, service in enumerate(order):
        own: Counter[SiteType] = Counter()
        target, held = total * demand[service.name] / whole, 0
        after = len(order) - place - 1
        while left:
            more = held + _gpus(left[0])
            nearer = abs(more - target) < abs(held - target)
            if own and after and (not nearer or len(left) <= after):
                break
            machine = left.pop(0)
            own[machine.region, machine.node_type] += 1
            held = more
        handed[service.name] = own
    return {service.name: handed[service.name] for service in problem.services}


def memory_share(problem: Problem, catalog: Catalog, *, promise: bool) -> dict[str, Replicas]:
    """Return the replicas of every service on the machines that it is handed."""
    handed = hand_out(problem, catalog)
    chosen: dict[str, Replicas] = {}
    for service in problem.services:
        shapes = shapes_of(problem, catalog, service, promise=promise)
        replicas: list[tuple[ReplicaShape, int]] = []
        for site, machines in sorted(handed[service.name].items()):
            fitting = [shape for shape in shapes if shape.site == site]
            if fitting:
                best = max(fitting, key=lambda shape: (shape.per_s / shape.gpus, shape.gpus))
                count = machines * (parse_node_type(site[1]).gpu_count // best.gpus)
                replicas.append((best, count))
        chosen[service.name] = tuple(replicas)
    return chosen


def _demand(catalog: Catalog, service: Service) -> float:
    return service.rate_per_s * catalog.model(service.model).llm.weight_bytes


def _gpus(machine: ClusterNode) -> int:
    return parse_node_type(machine.node_type).gpu_count


def _slowness(catalog: Catalog, machine: ClusterNode) -> tuple[float, float, str, str]:
    gpu = catalog.node(machine.node_type).gpu
    return (-gpu.fp16_tflops, -gpu.bandwidth_bytes_per_s, machine.region, machine.name)
