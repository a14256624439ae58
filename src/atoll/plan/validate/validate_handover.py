"""The rules of `validate` for KV cache that is handed over where prefill and decode run apart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from atoll.catalog.catalog import Catalog
from atoll.core.ids import Phase
from atoll.plan.capacities import hop_bytes_per_unit
from atoll.plan.handover import handover, hop_link, kv_bytes, transfer_s
from atoll.plan.plan import SINK, SOURCE, Instance, Plan
from atoll.plan.problem import Problem, Service
from atoll.plan.validate.violation import Violation, exceeds, violation


def check_handover(plan: Plan, problem: Problem, catalog: Catalog) -> Iterator[Violation]:
    """Yield pairs that cannot hand over in time, and links that carry too much of it.

    Names are taken to be known: plans with others are not asked.
    """
    services = {service.name: service for service in problem.services}
    for instance in plan.instances:
        if instance.phase in (Phase.PREFILL, Phase.DECODE):
            yield from _interfaces(instance, services[instance.service], catalog)
    yield from _pairs(plan, problem, catalog)


def _interfaces(instance: Instance, service: Service, catalog: Catalog) -> Iterator[Violation]:
    """A node's interface carries activations and KV: what prefill sends, what decode receives."""
    spec = catalog.model(service.model).llm
    hop = hop_bytes_per_unit(catalog, service, instance.phase)
    prefill = instance.phase is Phase.PREFILL
    prompt = service.lengths.input_mean
    units_per_request = prompt if prefill else service.lengths.output_mean
    through: defaultdict[str, float] = defaultdict(float)
    handed_on: defaultdict[str, float] = defaultdict(float)
    for flow in instance.flows:
        through[flow.dst] += flow.per_s
        if flow.src != SOURCE and flow.dst != SINK:
            handed_on[flow.src if prefill else flow.dst] += flow.per_s
    for node in instance.nodes:
        kv = kv_bytes(spec, node.start, node.end, prompt) / units_per_request
        used = through[node.id] * kv + handed_on[node.id] * hop
        link = hop_link(catalog, node.node_type, instance.region_of(node), node.gpus)
        if exceeds(used, link.bandwidth_bytes_per_s):
            message = (
                f"{used / 1e9:.3g} GB/s of KV and activations through an interface of "
                f"{link.bandwidth_bytes_per_s / 1e9:.3g} GB/s"
            )
            over = used - link.bandwidth_bytes_per_s
            yield violation("handover", f"{instance.id} {node.id}", message, over)


def _pairs(plan: Plan, problem: Problem, catalog: Catalog) -> Iterator[Violation]:
    """Pairs hand over within what TTFT leaves, in one region or over a link that can."""
    instances = {instance.id: instance for instance in plan.instances}
    services = {service.name: service for service in problem.services}
    used: defaultdict[tuple[str, str], float] = defaultdict(float)
    for route in plan.routes:
        service = services.get(route.service)
        ends = [instances[name] for name in route.instances if name in instances]
        if service is None or len(ends) != 2 or any(end.service != service.name for end in ends):
            continue  # its own rule says so
        first, second = ends
        where = f"{first.id} to {second.id}"
        allowed = handover(problem, catalog, service)
        if allowed is None:
            continue
        pair = (first.region, second.region)
        if not allowed.reaches(*pair):
            message = f"no KV is handed from {pair[0]} to {pair[1]} within {service.name}'s TTFT"
            yield violation("handover", where, message)
            continue
        seconds = transfer_s(catalog, service, first, second)
        if exceeds(seconds, allowed.seconds):
            message = f"takes {seconds * 1e3:.3g} ms, TTFT leaves {allowed.seconds * 1e3:.3g} ms"
            yield violation("handover", where, message, seconds - allowed.seconds)
        if pair[0] != pair[1]:
            served = plan.served_fraction.get(service.name, 1.0)
            requests = route.share * served * service.demand_per_s
            used[pair] += requests * allowed.bytes_per_request
    for pair, rate in sorted(used.items()):
        link = catalog.links.between(*pair)
        if exceeds(rate, link.bandwidth_bytes_per_s):
            limit = link.bandwidth_bytes_per_s
            message = f"{rate / 1e6:.3g} MB/s of KV over a link of {limit / 1e6:.3g} MB/s"
            yield violation("handover", f"{pair[0]} to {pair[1]}", message, rate - limit)
