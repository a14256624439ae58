"""A plan as plain data that can be drawn: services, instances with their machines, and what flows where.

Ends of flows are `choice:NAME` (a choice between models), `demand:SERVICE` (requests that come in),
`instance:ID`, `machine:HOST` (of a fixed cluster) and `answer:SERVICE` (what leaves the last machine).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import cast

from atoll.api.fleet_plan import FleetPlan
from atoll.catalog.catalog import Catalog
from atoll.core.ids import Phase, parse_node_type
from atoll.engines.table import find_engine
from atoll.plan.engine_layout import standing_of
from atoll.plan.executor_use import pair_flows
from atoll.plan.executors import request_bytes
from atoll.plan.plan import SINK, SOURCE, Instance, Node
from atoll.plan.problem import Service
from atoll.plan.proof import proof_of
from atoll.planner.drawn_plan import (
    Drawn,
    DrawnFlow,
    DrawnGroup,
    DrawnService,
    DrawnStage,
    InstanceDrawing,
)
from atoll.report.promises import describe_groups

HASH_LETTERS = 16
_MIN_PER_S = 1e-12


def draw_plan(plan: FleetPlan) -> Drawn:
    """Return a plan as `docs/reference/http.md` has it under "plan": base units, JSON types only.

    `plan` must know its problem (`FleetPlan.of`). `binds` is None: it takes planning again to say.
    """
    is_cost = plan.goal == "cost"
    catalog = plan.problem.catalog()
    # What is bounded includes what starting instances costs; what they cost while they run is shown.
    bound = max(0.0, plan.bound - plan.init_usd) if is_cost and plan.bound is not None else None
    return {
        "hash": plan.content_hash()[:HASH_LETTERS],
        "fleet": plan.problem_name,
        "solver": plan.solver,
        "status": plan.status,
        "kind": "cluster" if plan.problem.cluster is not None else "rented",
        "usd_per_hour": plan.usd_per_hour,
        "idle_usd_per_hour": plan.idle_usd,
        "start_usd_per_hour": plan.init_usd,
        "bound_usd_per_hour": bound,
        "gap": plan.gap,
        "objective": {
            "goal": plan.goal,
            "unit": "usd_per_hour" if is_cost else "tokens_per_s",
            "value": plan.objective,
            "bound": plan.bound,
        },
        "cut_short": plan.cut_short,
        "proof": proof_of(plan).in_words,
        "nodes": plan.nodes,
        "gpus": plan.gpus,
        "served": min(plan.served_fraction.values(), default=1.0),
        "services": [_draw_service(plan, service) for service in plan.problem.services],
        "choices": [
            {"name": m.name, "shares": dict(m.shares), "error": m.error, "max_error": m.max_error}
            for m in plan.mixes
        ],
        "instances": [_draw_instance(plan, instance, catalog) for instance in plan.instances],
        "flows": list(_draw_flows(plan)),
        "reasons": list(plan.reasons),
        "notes": list(plan.notes),
        "binds": None,
    }


def _draw_service(plan: FleetPlan, service: Service) -> DrawnService:
    usd = sum(one.usd_per_hour * one.part_of(service.name) for one in plan.instances)
    served = plan.served_fraction.get(service.name, 1.0)
    lengths = service.lengths
    mtokens = (
        service.rate_per_s * served * (lengths.input_mean + lengths.output_mean) * 3600.0 / 1e6
    )
    promise = next((one for one in plan.promises if one.service == service.name), None)
    choice = next((mix.name for mix in plan.mixes if service.name in mix.shares), None)
    return {
        "name": service.name,
        "model": service.model,
        "requests_per_s": service.rate_per_s,
        "ttft_s": service.ttft_s,
        "tpot_s": service.tpot_s,
        "target": service.target,
        "kept": None if promise is None else promise.kept,
        "cause": None if promise is None else promise.cause,
        "served": served,
        "usd_per_hour": usd,
        "usd_per_mtoken": usd / mtokens if mtokens > 0.0 else None,
        "input_tokens": lengths.input_mean,
        "output_tokens": lengths.output_mean,
        "choice": choice,
        "classes": [{"name": klass.name, "share": klass.share} for klass in service.classes],
        "groups": []
        if promise is None
        else cast(list[DrawnGroup], describe_groups(promise.groups)),
    }


def _draw_instance(plan: FleetPlan, instance: Instance, catalog: Catalog) -> InstanceDrawing:
    service = plan.problem.service(instance.service)
    markets = sorted({node.market for node in instance.nodes})
    return {
        "id": instance.id,
        "service": instance.service,
        "guests": list(instance.services[1:]),
        "phase": str(instance.phase),
        "parts": list(instance.executor_parts),
        "region": instance.region,
        "market": markets[0] if len(markets) == 1 else "mixed",
        "layout": instance.describe(),
        "usd_per_hour": instance.usd_per_hour,
        "share": _share_of(plan, instance),
        "capacity_per_s": instance.throughput_per_s / _units_per_request(service, instance),
        "kept": instance.kept,
        "engine": instance.engine,
        "standing": _standing_of(instance, catalog),
        "stages": [_draw_stage(instance, node) for node in _in_order(instance)],
    }


def _standing_of(instance: Instance, catalog: Catalog) -> str | None:
    if instance.engine is None:
        return None
    return str(standing_of(find_engine(instance.engine), instance, catalog))


def _draw_stage(instance: Instance, node: Node) -> DrawnStage:
    return {
        "node": node.kind,
        "machine": machine_name(instance, node),
        "host": node.host,
        "region": instance.region_of(node),
        "market": node.market,
        "gpu": parse_node_type(node.node_type).gpu,
        "gpus": node.gpus,
        "of_gpus": node.machine_gpus,
        "layers": None if instance.executor_parts else [node.start, node.end],
        "tp": node.tp,
    }


def machine_name(instance: Instance, node: Node) -> str:
    """Return a name that nodes of a plan share if they are on one machine."""
    if node.host is not None:
        return node.host
    if node.slot is not None and node.gpu_ids is not None:
        return f"{instance.region_of(node)}/{node.node_type}/{node.market}/{node.slot}"
    return f"{instance.id}/{node.id}"


def _in_order(instance: Instance) -> list[Node]:
    return sorted(instance.nodes, key=lambda node: (node.start, node.end, int(node.id[1:])))


def _units_per_request(service: Service, instance: Instance) -> float:
    """Return how much of a role's unit a request is: tokens where phases run apart."""
    tokens = {
        Phase.PREFILL: service.lengths.input_mean,
        Phase.DECODE: service.lengths.output_mean,
    }
    return tokens.get(instance.phase, 1.0) or 1.0


def _share_of(plan: FleetPlan, instance: Instance) -> float | None:
    """Return which share of its service's requests an instance gets."""
    if instance.executor_parts:
        service = plan.problem.service(instance.service)
        asked = sum(
            service.klass(path.klass).share * path.share * step.instances.get(instance.id, 0.0)
            for path in plan.paths
            if path.service == service.name
            for step in path.steps
        )
        return min(1.0, asked)
    if not plan.routes:
        return None
    return plan.weights(instance.service, instance.phase).get(instance.id, 0.0)


def _draw_flows(plan: FleetPlan) -> Iterator[DrawnFlow]:
    rates = {service.name: service.demand_per_s for service in plan.problem.services}
    named = Counter(name for mix in plan.mixes for name in mix.shares)
    for mix in plan.mixes:
        for name, share in mix.shares.items():
            # How much of a service that answers several choices is whose is not known.
            per_s = rates.get(name) if named[name] == 1 else None
            yield _flow(f"choice:{mix.name}", f"demand:{name}", share, per_s)
    on_cluster = plan.problem.cluster is not None
    for route in plan.routes:
        per_s = rates[route.service] * route.share
        ends = [f"instance:{name}" for name in route.instances]
        if on_cluster:
            continue
        yield _flow(f"demand:{route.service}", ends[0], route.share, per_s)
        if len(ends) > 1:
            yield _flow(ends[0], ends[1], route.share, per_s)
    if on_cluster:
        yield from _machine_flows(plan, rates)
    yield from _executor_flows(plan, rates)


def _machine_flows(plan: FleetPlan, rates: dict[str, float]) -> Iterator[DrawnFlow]:
    """Flows between the machines of a cluster; those of instances that share them stay apart.

    An instance may carry more than is asked of it: what is drawn is what comes.
    """
    for instance in plan.plain_instances:
        service = plan.problem.service(instance.service)
        name = {node.id: f"machine:{machine_name(instance, node)}" for node in instance.nodes}
        ends = name | {SOURCE: f"demand:{service.name}", SINK: f"answer:{service.name}"}
        routed = _share_of(plan, instance) or 0.0
        for flow in instance.flows:
            if flow.per_s > _MIN_PER_S and instance.throughput_per_s > 0.0:
                share = min(1.0, flow.per_s / instance.throughput_per_s) * routed
                drawn = _flow(ends[flow.src], ends[flow.dst], share, share * rates[service.name])
                yield {**drawn, "instance": instance.id}


def _executor_flows(plan: FleetPlan, rates: dict[str, float]) -> Iterator[DrawnFlow]:
    if not plan.paths:
        return
    catalog = plan.problem.catalog()
    entering: defaultdict[tuple[str, str], float] = defaultdict(float)
    for path in plan.paths:
        service = plan.problem.service(path.service)
        klass = service.klass(path.klass)
        served = plan.served_fraction.get(service.name, 1.0)
        rate = service.class_rate_per_s(klass) * served * path.share
        step_of = {part: at for at, step in enumerate(path.steps) for part in step.parts}
        fed = {
            step_of[second]
            for first, second in request_bytes(catalog, service, klass)
            if first in step_of and second in step_of and step_of[first] != step_of[second]
        }
        for at, step in enumerate(path.steps):
            if at not in fed:
                for name, weight in step.instances.items():
                    entering[service.name, name] += rate * weight
    for (service_name, name), per_s in sorted(entering.items()):
        share = per_s / rates[service_name] if rates[service_name] else 0.0
        yield _flow(f"demand:{service_name}", f"instance:{name}", min(1.0, share), per_s)
    for pair in pair_flows(plan, plan.problem, catalog):
        rate = rates[pair.service]
        share = pair.requests_per_s / rate if rate else 0.0
        drawn = _flow(
            f"instance:{pair.src}", f"instance:{pair.dst}", min(1.0, share), pair.requests_per_s
        )
        yield {**drawn, "bytes_per_s": pair.bytes_per_s, "network": pair.between_machines}


def _flow(src: str, dst: str, share: float, per_s: float | None) -> DrawnFlow:
    return {"from": src, "to": dst, "share": share, "per_s": per_s}
