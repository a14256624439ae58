"""Dials of a what-if: services with their demand and promises, GPU types with prices and numbers."""

from __future__ import annotations

from typing import Literal, TypedDict

from atoll.core.ids import parse_node_type
from atoll.plan.problem import Problem
from atoll.planner.change import gpu_types, service_names
from atoll.planner.source import WrittenFleet


class ServiceDial(TypedDict):
    """A service with its demand, promises (seconds) and the share of requests that keep them."""

    name: str
    model: str
    requests_per_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    target: float | None


class GpuDial(TypedDict):
    """A type of GPU: how many nodes have it, where, and from which price on."""

    gpu: str
    nodes: int
    usd_per_gpu_hour: float
    regions: list[str]
    markets: list[str]


class Dials(TypedDict):
    """What a what-if of a fleet can turn."""

    fleet: str
    kind: Literal["rented", "cluster"]
    any_to_any: bool
    services: list[ServiceDial]
    gpus: list[GpuDial]
    budget_usd_per_hour: float | None
    usd_per_hour: float | None


def describe_dials(source: WrittenFleet, name: str, usd_per_hour: float | None) -> Dials:
    """Return the dials of a fleet as they stand; `usd_per_hour` is what its plan costs, if there is one."""
    problem = source.problem
    return Dials(
        fleet=name,
        kind="rented" if problem.cluster is None else "cluster",
        any_to_any=bool(problem.graph_services),
        services=[_describe_service(source, each) for each in service_names(source)],
        gpus=[_describe_gpu(problem, gpu) for gpu in gpu_types(problem)],
        budget_usd_per_hour=problem.limits.budget_usd_per_hour,
        usd_per_hour=usd_per_hour,
    )


def _describe_service(source: WrittenFleet, name: str) -> ServiceDial:
    if source.data is not None:
        entry = source.file.services[name]
        models = [entry.model or name] if entry.models is None else [m.model for m in entry.models]
        return ServiceDial(
            name=name,
            model=" or ".join(models),
            requests_per_s=entry.rate,
            ttft_s=entry.ttft,
            tpot_s=entry.tpot,
            target=entry.attainment,
        )
    ways = source.problem.variants.get(name, (name,))
    services = [source.problem.service(way) for way in ways]
    return ServiceDial(
        name=name,
        model=" or ".join(service.model for service in services),
        requests_per_s=services[0].rate_per_s,
        ttft_s=services[0].ttft_s,
        tpot_s=services[0].tpot_s,
        target=services[0].target,
    )


def _describe_gpu(problem: Problem, gpu: str) -> GpuDial:
    offers = [offer for offer in problem.offers if parse_node_type(offer.node_type).gpu == gpu]
    return GpuDial(
        gpu=gpu,
        nodes=sum(offer.available for offer in offers),
        usd_per_gpu_hour=min(offer.usd_per_hour / offer.gpus for offer in offers),
        regions=sorted({offer.region for offer in offers}),
        markets=sorted({offer.market for offer in offers}),
    )
