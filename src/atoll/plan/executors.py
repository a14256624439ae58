"""Capacity of executors of any-to-any models, counted the same way by every solver and by the validator.

An executor runs some parts of a model on the GPUs of one machine or slice. A second of it is a second of
work, and a request of a class takes so many seconds for each part (`perf.components`). Requests go by paths:
steps, each run by one executor. Until the first text a request spends at most

    the longest of its encoders + handing over what they found + the prompt at the llm

seconds, which must be within its promise; an image takes all parts of its route. Between executors of one
machine nothing is handed over, unless its GPUs are joined in groups: then from group to group; between
machines it goes through the network interface of both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from atoll.catalog.catalog import Catalog
from atoll.catalog.models import ModelSpec
from atoll.catalog.nodes import NodeType
from atoll.core.graph import ComponentKind
from atoll.engines.table import EngineChoice
from atoll.perf.components.class_loads import bytes_between, class_routes, component_of
from atoll.perf.components.executor import ExecutorWork, executor_work
from atoll.perf.components.measured import MeasuredRate, MeasuredRates
from atoll.perf.components.sites import ALONE, Company, Sharer
from atoll.plan.capacities import node_source
from atoll.plan.handover import pair_link
from atoll.plan.plan import Instance
from atoll.plan.problem import Offer, Phases, Problem, Service
from atoll.workload.classes import RequestClass

PREFILL = ".prefill"
DECODE = ".decode"
"""Endings of the names of an llm's phases."""


def work_of(
    problem: Problem,
    catalog: Catalog,
    service: Service,
    parts: Sequence[str],
    kind: str,
    *,
    machine: str | None = None,
    tp: int | None = None,
    shared: Sequence[str] = (),
) -> ExecutorWork | None:
    """Return what an executor of these parts does on a kind of node; None where they do not fit.

    `machine` is the node type that the kind is a slice of. With `tp` None it is the best one's. `shared` are
    the services that it takes requests of, this one among them; it alone if none is named.
    """
    return work_on(
        catalog.model(service.model),
        tuple(parts),
        node_source(catalog, kind, machine=machine).node,
        service.classes,
        tp,
        problem.engine_of(service),
        service.rates,
        company_of(problem, catalog, service, shared),
    )


def company_of(
    problem: Problem, catalog: Catalog, service: Service, shared: Sequence[str]
) -> Company:
    """Return the other services that share an executor with one, weighed by their demand."""
    others = [problem.service(name) for name in shared if name != service.name]
    if not others:
        return ALONE
    total = service.demand_per_s + math.fsum(other.demand_per_s for other in others)

    def weight(one: Service) -> float:
        return one.demand_per_s / total if total > 0.0 else 1.0

    return Company(
        weight(service),
        tuple(
            Sharer(
                catalog.model(other.model),
                other.classes,
                weight(other),
                measured_rates(other.rates),
            )
            for other in others
        ),
    )


def cores_needed(services: Iterable[Service], parts: Iterable[str]) -> float:
    """Return the CPU cores that an executor of these parts needs, of services that share it the most."""
    stated = [dict(service.cores) for service in services]
    components = dict.fromkeys(component_of(part) for part in parts)
    return math.fsum(max(of.get(name, 0.0) for of in stated) for name in components)


def cores_of_slice(offer: Offer, gpus: int) -> float:
    """Return the CPU cores of a slice of so many GPUs, without end where they are not known."""
    return math.inf if offer.cores is None else offer.cores * gpus / offer.gpus


def measured_rates(rates: tuple[MeasuredRate, ...]) -> MeasuredRates | None:
    """Return what a fleet file says was measured, None where it says nothing."""
    return MeasuredRates(rates=rates, source="the fleet file") if rates else None


@lru_cache(maxsize=8192)
def work_on(
    model: ModelSpec,
    parts: tuple[str, ...],
    node: NodeType,
    classes: tuple[RequestClass, ...],
    tp: int | None,
    engine: EngineChoice,
    rates: tuple[MeasuredRate, ...],
    company: Company = ALONE,
) -> ExecutorWork | None:
    """Return what an executor of parts does on a node; None where they do not fit."""
    return executor_work(
        model,
        parts,
        node,
        classes,
        tp=tp,
        engine=engine,
        measured=measured_rates(rates),
        company=company,
    )


def node_work(
    problem: Problem, catalog: Catalog, service: Service, instance: Instance
) -> ExecutorWork | None:
    """Return what an executor of a plan does for one of its services; None where it does not fit."""
    (node,) = instance.nodes
    return work_of(
        problem,
        catalog,
        service,
        instance.parts,
        node.kind,
        machine=node.node_type,
        tp=node.tp,
        shared=instance.services,
    )


def routes_of(
    catalog: Catalog, service: Service, klass: RequestClass
) -> tuple[tuple[str, ...], ...]:
    """Return the sets of parts that a request of a class may be served by, each in the order they run."""
    return phase_ways(catalog.model(service.model), klass, service.phases)


def phase_ways(
    model: ModelSpec, klass: RequestClass, phases: Phases
) -> tuple[tuple[str, ...], ...]:
    """Return the routes of a class with an llm's phases together, apart, or both; without an llm all."""
    routes = class_routes(model, klass)
    apart = tuple(route for route in routes if any(part != component_of(part) for part in route))
    if phases == "auto" or not apart:
        return routes
    return apart if phases == "apart" else tuple(route for route in routes if route not in apart)


def request_bytes(
    catalog: Catalog, service: Service, klass: RequestClass
) -> Mapping[tuple[str, str], float]:
    """Return the bytes of one request between parts that follow each other."""
    return bytes_between(catalog.model(service.model), klass)


def first_text_parts(model: ModelSpec, route: Sequence[str]) -> tuple[tuple[str, ...], str | None]:
    """Return the encoders that come before the first text, side by side, and the part that writes it."""
    llm = next(
        (
            part
            for part in route
            if _kind_of(model, part) is ComponentKind.LLM and not part.endswith(DECODE)
        ),
        None,
    )
    if llm is None:
        return (), None
    feeding = {c.name for c in model.graph.predecessors(component_of(llm))}
    return tuple(part for part in route if part in feeding), llm


def _kind_of(model: ModelSpec, part: str) -> ComponentKind:
    return model.graph.component(component_of(part)).kind


def parts_overlap(parts: Iterable[str]) -> bool:
    """Whether a set of parts has an llm twice: whole, and a phase of it."""
    names = tuple(parts)
    whole = [name for name in names if component_of(name) == name]
    return len(set(names)) < len(names) or any(
        name != component_of(name) and component_of(name) in whole for name in names
    )


def machine_of(executor: Instance) -> tuple[object, ...]:
    """Return what tells its machine from others: offer and slot, or itself where it has a whole one."""
    node = executor.nodes[0]
    if node.gpu_ids is None:
        return (executor.id,)
    return (executor.region, node.node_type, node.market, node.slot)


def group_of(catalog: Catalog, executor: Instance) -> int:
    """Return which group of its machine's GPUs an executor stands in: that of its first GPU."""
    node = executor.nodes[0]
    groups = catalog.links.groups.get(node.node_type)
    return 0 if groups is None or not node.gpu_ids else min(node.gpu_ids) // groups.gpus


def handover_s(catalog: Catalog, sender: Instance, receiver: Instance, size: float) -> float:
    """Return the seconds that bytes take from one executor to another of the same region."""
    if machine_of(sender) == machine_of(receiver):
        if group_of(catalog, sender) == group_of(catalog, receiver):
            return 0.0
        return catalog.links.groups[sender.nodes[0].node_type].link.time_s(size)
    ends = [
        (one.region, node.node_type, None if node.gpu_ids is None else node.gpus)
        for one in (sender, receiver)
        for node in one.nodes[:1]
    ]
    return pair_link(catalog, *ends).time_s(size)
