"""Dials of a what-if: services with their demand and promises, GPU types with prices and numbers."""

from __future__ import annotations

from typing import Any

from atoll.core.ids import parse_node_type
from atoll.plan.problem import Problem
from atoll.planner.change import gpu_types, service_names
from atoll.planner.source import WrittenFleet


def describe_dials(source: WrittenFleet, name: str, usd_per_hour: float | None) -> dict[str, Any]:
    """Return the dials of a fleet as they stand; `usd_per_hour` is what its plan costs, if there is one."""
    problem = source.problem
    return {
        "fleet": name,
        "kind": "rented" if problem.cluster is None else "cluster",
        "any_to_any": bool(problem.graph_services),
        "services": [_describe_service(source, each) for each in service_names(source)],
        "gpus": [_describe_gpu(problem, gpu) for gpu in gpu_types(problem)],
        "budget_usd_per_hour": problem.limits.budget_usd_per_hour,
        "usd_per_hour": usd_per_hour,
    }


def _describe_service(source: WrittenFleet, name: str) -> dict[str, Any]:
    if source.data is not None:
        entry = source.file.services[name]
        models = [entry.model or name] if entry.models is None else [m.model for m in entry.models]
        return {
            "name": name,
            "model": " or ".join(models),
            "requests_per_s": entry.rate,
            "ttft_s": entry.ttft,
            "tpot_s": entry.tpot,
            "target": entry.attainment,
        }
    ways = source.problem.variants.get(name, (name,))
    services = [source.problem.service(way) for way in ways]
    return {
        "name": name,
        "model": " or ".join(service.model for service in services),
        "requests_per_s": services[0].rate_per_s,
        "ttft_s": services[0].ttft_s,
        "tpot_s": services[0].tpot_s,
        "target": services[0].target,
    }


def _describe_gpu(problem: Problem, gpu: str) -> dict[str, Any]:
    offers = [offer for offer in problem.offers if parse_node_type(offer.node_type).gpu == gpu]
    return {
        "gpu": gpu,
        "nodes": sum(offer.available for offer in offers),
        "usd_per_gpu_hour": min(offer.usd_per_hour / offer.gpus for offer in offers),
        "regions": sorted({offer.region for offer in offers}),
        "markets": sorted({offer.market for offer in offers}),
    }
