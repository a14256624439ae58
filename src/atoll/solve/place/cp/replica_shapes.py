"""Replicas of one model on GPUs of one type: how they are split, what they carry, what they cost.

A shape says how one replica runs: on slices of `tp` GPUs of a machine type at a site, each layer split over
the GPUs of its slice, and layers cut into `stages` slices one after the other. OpenFabric's replicas have one
stage: its data and tensor parallel degrees are how many replicas there are and `tp`. A service's replicas
share its arrivals in proportion to what they carry. `plan_of_replicas` cuts the slices and makes the plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from atoll.catalog.catalog import Catalog
from atoll.core.errors import UsageError
from atoll.core.ids import Phase, format_node_type, parse_node_type
from atoll.perf.layers import splits_evenly
from atoll.plan.capacities import longest_context, memory_model
from atoll.plan.cluster_capacities import promised_limits
from atoll.plan.cluster_profiles import (
    activation_bytes,
    cluster_of,
    is_known,
    measured_profile,
    request_tokens,
    service_rates,
)
from atoll.plan.plan import SINK, SOURCE, Flow, Goal, Instance, Node, Plan
from atoll.plan.problem import Problem, Service
from atoll.plan.validate.check import goal_value
from atoll.solve.assembly import assemble, price
from atoll.solve.place.flow_instance import Unit
from atoll.solve.place.machine_cuts import SiteType, cut_for, sizes_of

_PIPELINES = 2
"""Numbers of stages that are tried for replicas at a site."""
_BELOW = 1.0 - 1e-9
"""Load of a replica as a share of its limit: rounding must not put it above."""


@dataclass(frozen=True, order=True)
class ReplicaShape:
    """One way to run a replica, and the requests/s that it carries."""

    site: SiteType
    tp: int
    stages: int = 1
    per_s: float = 0.0

    @property
    def gpus(self) -> int:
        """GPUs of one replica."""
        return self.tp * self.stages

    @property
    def kind(self) -> str:
        """The node type of a slice."""
        return format_node_type(parse_node_type(self.site[1]).gpu, self.tp)

    def describe(self, count: int) -> str:
        """Return replicas in words, as in "3 x GH200:2"."""
        stages = f" in {self.stages} stages" if self.stages > 1 else ""
        return f"{count} x {self.kind}{stages}"


Replicas = tuple[tuple[ReplicaShape, int], ...]
"""How many replicas a service has of each shape."""


def site_stock(problem: Problem) -> dict[SiteType, int]:
    """Return how many GPUs there are of each machine type at each site."""
    stock: dict[SiteType, int] = {}
    for machine in cluster_of(problem).nodes:
        key = (machine.region, machine.node_type)
        stock[key] = stock.get(key, 0) + parse_node_type(machine.node_type).gpu_count
    return dict(sorted(stock.items()))


def shapes_of(
    problem: Problem,
    catalog: Catalog,
    service: Service,
    *,
    max_stages: int = 1,
    promise: bool = True,
) -> list[ReplicaShape]:
    """Return the ways to run a replica of a service that carry anything, by site, size and stages.

    Of those with several stages only the few at each site that carry most per GPU, and more than any with
    one: they answer an idle cluster no sooner. With `promise` a replica carries what keeps the service's
    promises; else at least what the performance model says that it carries at all.
    """
    cluster = cluster_of(problem)
    machines = {(m.region, m.node_type): m for m in cluster.nodes}
    stock = site_stock(problem)
    spec = catalog.model(service.model).llm
    found = []
    for site in sorted(machines):
        for size in sizes_of(problem, machines[site]):
            shape = ReplicaShape(site, size)
            # A layer must split evenly over the GPUs of a slice.
            if not service.allows(shape.kind) or (size > 1 and not splits_evenly(spec, size)):
                continue
            if not is_known(problem, catalog, service, shape.kind):
                continue
            for stages in range(1, min(max_stages, spec.layers) + 1):
                own = ReplicaShape(site, size, stages)
                if own.gpus <= stock[site]:
                    carried = _carries(problem, catalog, service, own, promise=promise)
                    if carried > 0.0:
                        found.append(ReplicaShape(site, size, stages, carried))
    return [shape for shape in found if shape.stages == 1] + _worthwhile(found)


def _worthwhile(shapes: Sequence[ReplicaShape]) -> list[ReplicaShape]:
    """The pipelines that carry most per GPU of each site, where that is more than without stages."""
    kept: list[ReplicaShape] = []
    for site in sorted({shape.site for shape in shapes}):
        own = [shape for shape in shapes if shape.site == site]
        single = max((s.per_s / s.gpus for s in own if s.stages == 1), default=0.0)
        deep = [s for s in own if s.stages > 1 and s.per_s / s.gpus > single]
        # Each shape multiplies the entries of the table, so only the best pipelines of a site are kept.
        kept += sorted(deep, key=lambda s: (-s.per_s / s.gpus, s))[:_PIPELINES]
    return kept


def even_ranges(layers: int, stages: int) -> list[tuple[int, int]]:
    """Return layers in stages of nearly equal length."""
    return list(pairwise(layers * k // stages for k in range(stages + 1)))


def replica_of(
    problem: Problem,
    catalog: Catalog,
    service: Service,
    shape: ReplicaShape,
    units: Sequence[Unit],
    number: int,
) -> Instance:
    """Return a replica on its slices as an instance that carries what its shape does."""
    role = next((role for role in service.roles if role.phase is Phase.BOTH), None)
    if role is None:
        raise UsageError(
            f"{service.name} runs its phases apart",
            hint="set 'phases: together' on a fixed cluster",
        )
    ranges = even_ranges(catalog.model(service.model).llm.layers, shape.stages)
    nodes = tuple(
        Node(
            id=f"n{k}",
            node_type=unit.machine,
            market="owned",
            start=start,
            end=end,
            tp=shape.tp,
            host=unit.host,
            gpu_ids=unit.gpu_ids,
        )
        for k, (unit, (start, end)) in enumerate(zip(units, ranges, strict=True))
    )
    ends = [SOURCE, *(node.id for node in nodes), SINK]
    return Instance(
        id=f"{service.name}-{role.phase}-{number}",
        service=service.name,
        role=str(role),
        region=shape.site[0],
        stages=shape.stages,
        nodes=nodes,
        flows=tuple(Flow(src=a, dst=b, per_s=shape.per_s) for a, b in pairwise(ends)),
        throughput_per_s=shape.per_s,
        usd_per_hour=price(problem, shape.site[0], nodes),
    )


def _carries(
    problem: Problem, catalog: Catalog, service: Service, shape: ReplicaShape, *, promise: bool
) -> float:
    """Requests/s of one replica, 0 where it does not fit into memory or keeps no promise."""
    units = _some_units(problem, shape)
    if len(units) < shape.stages:
        return 0.0
    # First with next to no load: what links take then is the least, and it shows whether anything fits.
    tiny = ReplicaShape(shape.site, shape.tp, shape.stages, 1e-6)
    instance = replica_of(problem, catalog, service, tiny, units, 0)
    if not all(_fits(problem, catalog, service, node) for node in instance.nodes):
        return 0.0
    linked = _link_limit(problem, catalog, service, shape)
    # Messages grow with what flows, and what links take comes off the promise.
    carried = min(linked, *promised_limits(instance, problem, catalog).values())
    again = ReplicaShape(shape.site, shape.tp, shape.stages, carried)
    if carried > 0.0:
        full = replica_of(problem, catalog, service, again, units, 0)
        carried = min(carried, *promised_limits(full, problem, catalog).values())
    # Without a promise the performance model's own rate counts, where that is more.
    if not promise:
        rates = service_rates(problem, catalog, service).get(shape.kind, ())
        held = [node.layers for node in instance.nodes]
        if len(rates) >= max(held):
            max_rate = min(rates[count - 1] for count in held) / request_tokens(service)
            carried = max(carried, min(linked, max_rate))
    return carried * _BELOW


def _fits(problem: Problem, catalog: Catalog, service: Service, node: Node) -> bool:
    """Whether a node holds its layers and a request beside them."""
    profile = measured_profile(problem, catalog, service, node.kind)
    if profile is not None:
        room = profile.kv_tokens[: node.layers]
        fill = cluster_of(problem).kv_fill
        return len(room) == node.layers and room[-1] * fill >= request_tokens(service)
    machine = catalog.node(node.kind)
    memory = memory_model(problem, catalog, service, Phase.BOTH, machine, node.tp)
    return memory.fits(node.start, node.end, longest_context(catalog, service))


def _some_units(problem: Problem, shape: ReplicaShape) -> list[Unit]:
    """Slices for one replica: as many on each machine as it has room for."""
    return list(_slices(problem, shape))[: shape.stages]


def _slices(problem: Problem, shape: ReplicaShape) -> Iterator[Unit]:
    count = parse_node_type(shape.site[1]).gpu_count
    for machine in cluster_of(problem).nodes:
        if (machine.region, machine.node_type) == shape.site:
            for first in range(0, count, shape.tp):
                ids = None if shape.tp == count else tuple(range(first, first + shape.tp))
                yield Unit(machine.name, machine.node_type, machine.region, ids)


def _link_limit(problem: Problem, catalog: Catalog, service: Service, shape: ReplicaShape) -> float:
    """Requests/s that the site's slowest links carry for one replica, which has its slice's share of them."""
    cluster = cluster_of(problem)
    count = parse_node_type(shape.site[1]).gpu_count
    hosts = [m.name for m in cluster.nodes if (m.region, m.node_type) == shape.site]
    tokens, share = request_tokens(service), shape.tp / count
    limit = float("inf")
    for host in hosts:
        for link in (cluster.link(SOURCE, host), cluster.link(host, SINK)):
            speed = 0.0 if link is None else link.bytes_per_s
            limit = min(limit, speed * share / (cluster.token_bytes * tokens))
    # Only a replica that spans machines uses the links between them.
    if shape.stages * shape.tp > count:
        size = activation_bytes(catalog, service)
        for a, b in ((a, b) for a in hosts for b in hosts if a != b):
            link = cluster.link(a, b)
            speed = 0.0 if link is None else link.bytes_per_s
            limit = min(limit, speed * share / (size * tokens))
    return limit


def describe_replicas(replicas: Replicas) -> str:
    """Return replicas in words, as in "3 x GH200:2 + 1 x A100-80:4"."""
    return " + ".join(shape.describe(count) for shape, count in replicas) or "none"


def set_up(
    problem: Problem, catalog: Catalog, chosen: Mapping[str, Replicas]
) -> tuple[Instance, ...]:
    """Return the replicas of services as instances on slices of the cluster's machines."""
    wanted: dict[SiteType, Counter[int]] = {}
    for replicas in chosen.values():
        for shape, count in replicas:
            wanted.setdefault(shape.site, Counter())[shape.tp] += shape.stages * count
    free: dict[tuple[SiteType, int], list[Unit]] = {}
    for unit in cut_for(problem, wanted):
        free.setdefault(((unit.region, unit.machine), unit.gpus), []).append(unit)
    instances = []
    for service in problem.services:
        number = 0
        for shape, count in chosen.get(service.name, ()):
            left = free[shape.site, shape.tp]
            for _ in range(count):
                units = [left.pop(0) for _ in range(shape.stages)]
                instances.append(replica_of(problem, catalog, service, shape, units, number))
                number += 1
    return tuple(instances)


def plan_of_replicas(
    problem: Problem,
    catalog: Catalog,
    chosen: Mapping[str, Replicas],
    *,
    solver: str,
    goal: Goal = "latency",
    reasons: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Plan:
    """Return the plan of services' replicas; its objective is the tokens/s that they carry."""
    instances = set_up(problem, catalog, chosen)

    def build(value: float) -> Plan:
        return assemble(
            problem,
            instances,
            status="feasible",
            solver=solver,
            reasons=reasons,
            goal=goal,
            value=value,
        )

    # Built twice: the objective is read off the plan itself, and then written into it.
    plan = build(goal_value(build(0.0), problem))
    return plan.model_copy(update={"notes": tuple(notes)})
