"""The rules of `validate` for instances on the machines of a fixed cluster."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from atoll.catalog.catalog import Catalog
from atoll.core.errors import UsageError
from atoll.plan.capacities import longest_context, memory_model, tokens_per_unit
from atoll.plan.cluster import Cluster
from atoll.plan.cluster_capacities import promised_limits
from atoll.plan.cluster_profiles import (
    activation_bytes,
    measured_profile,
    request_tokens,
    service_rates,
)
from atoll.plan.plan import SINK, SOURCE, Flow, Instance, Node, Plan
from atoll.plan.problem import Problem
from atoll.plan.validate.violation import Violation, exceeds, violation


def check_hosts(instance: Instance, problem: Problem) -> Iterator[Violation]:
    """Yield every node that is not the machine of the cluster it says it is."""
    cluster = problem.cluster
    for node in instance.nodes:
        where = f"{instance.id} {node.id}"
        if cluster is None:
            if node.host is not None:
                yield violation("host", where, f"there is no cluster with a {node.host}")
            continue
        machine = cluster.by_name.get(node.host or "")
        if machine is None:
            named = (
                "no machine is named"
                if node.host is None
                else f"{node.host} is none of its machines"
            )
            yield violation("host", where, f"on a fixed cluster {named}")
        elif (machine.node_type, machine.region) != (node.node_type, instance.region_of(node)):
            message = f"{machine.name} is {machine.node_type} in {machine.region}"
            yield violation("host", where, message)


def check_on_cluster(
    instance: Instance, carried: Mapping[str, float], problem: Problem, catalog: Catalog
) -> Iterator[Violation]:
    """Yield where an instance asks more of the machines and links of a cluster than they can do.

    `carried` is what enters each node, in units of the role per second.
    """
    cluster = problem.cluster
    if cluster is None:
        raise UsageError(f"{problem.name} has no fixed cluster")
    yield from _nodes(instance, carried, problem, cluster, catalog)
    yield from _links(instance, problem, cluster, catalog)


def _nodes(
    instance: Instance,
    carried: Mapping[str, float],
    problem: Problem,
    cluster: Cluster,
    catalog: Catalog,
) -> Iterator[Violation]:
    tokens = tokens_per_unit(problem.service(instance.service), instance.phase)
    limits = node_limits(instance, problem, catalog)
    for node in instance.nodes:
        where = f"{instance.id} {node.id}"
        lacking = list(_memory(instance, node, problem, cluster, catalog))
        yield from lacking
        if lacking:
            continue
        flow, limit = carried[node.id] * tokens, limits[node.id]
        if exceeds(flow, limit):
            message = f"{flow:g} tokens/s on {node.host} with {node.layers} layers, which carries {limit:g}"
            yield violation("node-capacity", where, message, flow - limit)


def node_limits(instance: Instance, problem: Problem, catalog: Catalog) -> dict[str, float]:
    """Return the tokens/s that each node of an instance on a cluster carries, by id."""
    service = problem.service(instance.service)
    rates = service_rates(problem, catalog, service)
    tokens = tokens_per_unit(service, instance.phase)
    promised = promised_limits(instance, problem, catalog)
    limits = {}
    for node in instance.nodes:
        # What it carries at most, or within the promise: estimates that differ where none was measured.
        held = rates.get(node.kind, ())[: node.layers]
        best = float(held[-1]) if len(held) == node.layers else 0.0
        limits[node.id] = max(best, promised[node.id] * tokens)
    return limits


def _memory(
    instance: Instance, node: Node, problem: Problem, cluster: Cluster, catalog: Catalog
) -> Iterator[Violation]:
    """A node holds its layers and a request beside them: as measured, or by the model at its own split."""
    where, kind = f"{instance.id} {node.id}", node.kind
    service = problem.service(instance.service)
    machine = catalog.node(kind)
    try:
        memory = memory_model(problem, catalog, service, instance.phase, machine, node.tp)
    except UsageError as error:
        yield violation("memory", where, error.message)
        return
    profile = measured_profile(problem, catalog, service, kind)
    if profile is None:
        context = longest_context(catalog, service)
        if not memory.fits(node.start, node.end, context):
            need = memory.kv_bytes_per_sequence(node.start, node.end, context)
            short = need - memory.free_bytes(node.start, node.end)
            message = (
                f"layers [{node.start}, {node.end}) on {kind} lack {short / 1e9:.3g} GB per GPU"
            )
            yield violation("memory", where, message, max(0.0, short))
        return
    if node.layers > profile.max_layers:
        message = f"{node.layers} layers on {kind}, which holds {profile.max_layers}"
        yield violation("memory", where, message, node.layers - profile.max_layers)
        return
    room = profile.kv_tokens[node.layers - 1] * cluster.kv_fill
    if exceeds(request_tokens(service), room):
        message = f"KV cache of {room:g} tokens beside {node.layers} layers, less than a request"
        yield violation("memory", where, message, request_tokens(service) - room)


def _links(
    instance: Instance, problem: Problem, cluster: Cluster, catalog: Catalog
) -> Iterator[Violation]:
    for flow, src, dst, used in _moved(instance, problem, cluster, catalog):
        where = f"{instance.id} {flow.src}->{flow.dst}"
        link = cluster.link(src, dst)
        if link is None:
            # Slices of one machine need no network between them.
            if used > 0 and src != dst:
                yield violation("link-capacity", where, f"no link from {src} to {dst}", flow.per_s)
        elif exceeds(used, link.bytes_per_s):
            message = f"{used / 1e6:.3g} MB/s from {src} to {dst}, which carries {link.bytes_per_s / 1e6:.3g}"
            yield violation("link-capacity", where, message, used - link.bytes_per_s)


def check_shared_links(plan: Plan, problem: Problem, catalog: Catalog) -> Iterator[Violation]:
    """Yield links between machines that carry more than they can for all slices of them together."""
    cluster = problem.cluster
    if cluster is None:
        return
    flows: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for instance in plan.instances:
        for _, src, dst, used in _moved(instance, problem, cluster, catalog):
            flows[src, dst].append(used)
    for (src, dst), parts in sorted(flows.items()):
        link = cluster.link(src, dst)
        if link is not None and len(parts) > 1 and exceeds(sum(parts), link.bytes_per_s):
            used, limit = sum(parts), link.bytes_per_s
            message = (
                f"{used / 1e6:.3g} MB/s of {len(parts)} flows, and it carries {limit / 1e6:.3g}"
            )
            yield violation("link-capacity", f"{src}->{dst}", message, used - limit)


def _moved(
    instance: Instance, problem: Problem, cluster: Cluster, catalog: Catalog
) -> Iterator[tuple[Flow, str, str, float]]:
    """Yield every flow with the machines it runs between and its bytes/s."""
    service = problem.service(instance.service)
    tokens = tokens_per_unit(service, instance.phase)
    between = activation_bytes(catalog, service)
    hosts = {node.id: node.host or "" for node in instance.nodes} | {SOURCE: SOURCE, SINK: SINK}
    for flow in instance.flows:
        if flow.src in hosts and flow.dst in hosts:  # else its own rule says so
            outside = flow.src == SOURCE or flow.dst == SINK
            size = cluster.token_bytes if outside else between
            yield flow, hosts[flow.src], hosts[flow.dst], flow.per_s * tokens * size
