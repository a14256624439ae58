"""Links: what joins nodes, slices of machines, regions and coordinators, and who shares it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from atoll.catalog.catalog import Catalog
from atoll.plan.handover import hop_link
from atoll.plan.plan import SINK, SOURCE, Instance
from atoll.plan.problem import Problem
from atoll.sim.sim_arrays import LINK, SITE, Floats, Longs, Records


@dataclass(frozen=True)
class Sites:
    """Ends of links, by name, with bytes/s and seconds from row to column.

    `paired`: every pair has a link of its own, as in a cluster. Else a node sends and receives over its own
    interface, and all that goes from one region to another shares a link: `shared` numbers these links from
    row to column, -1 inside a region, and `shared_bytes_per_s` is how fast each is.
    """

    names: tuple[str, ...]
    bytes_per_s: Floats
    latency_s: Floats
    paired: bool
    shared: Longs
    shared_names: tuple[str, ...] = ()
    shared_bytes_per_s: tuple[float, ...] = ()

    def number(self, name: str) -> int:
        """Return the number of a site."""
        return self.names.index(name)


def site_name(problem: Problem, instance: Instance, index: int) -> str:
    """Return the site of a node: in a cluster itself, or its GPUs there; else its region and type."""
    node = instance.nodes[index]
    if problem.cluster is not None and node.host is not None:
        if node.gpu_ids is None:
            return node.host
        return f"{node.host}:{','.join(map(str, node.gpu_ids))}"
    return f"{instance.region_of(node)} {node.node_type}"


def gateway_name(problem: Problem, instance: Instance, *, out: bool) -> str:
    """Return the site of the coordinator that an instance is reached from (`out`: answers to)."""
    if problem.cluster is not None:
        return SINK if out else SOURCE
    return f"{instance.region} gateway"


def sites_of(
    problem: Problem, catalog: Catalog, instances: Sequence[Instance], coordinator_s: float | None
) -> Sites:
    """Return the ends of all links that a set of instances may use."""
    if problem.cluster is not None:
        return _cluster_sites(problem, catalog, instances)
    ends: dict[str, tuple[str, str | None]] = {}
    for instance in instances:
        ends[gateway_name(problem, instance, out=True)] = (instance.region, None)
        for index, node in enumerate(instance.nodes):
            place = site_name(problem, instance, index)
            ends[place] = (instance.region_of(node), node.node_type)
    names = tuple(sorted(ends))
    size = len(names)
    speed, wait = np.zeros((size, size)), np.zeros((size, size))
    shared = np.full((size, size), -1, np.int64)
    regions = sorted({region for region, _ in ends.values()})
    joined = [(a, b) for a in regions for b in regions if a != b]
    for i, a in enumerate(names):
        for j, b in enumerate(names):
            (region_a, kind_a), (region_b, kind_b) = ends[a], ends[b]
            link = catalog.links.between(region_a, region_b, kind_a, kind_b)
            speed[i, j], wait[i, j] = link.bandwidth_bytes_per_s, link.latency_s
            if coordinator_s is not None and (kind_a is None) != (kind_b is None):
                wait[i, j] = coordinator_s
            if region_a != region_b:
                shared[i, j] = joined.index((region_a, region_b))
    return Sites(
        names,
        speed,
        wait,
        paired=False,
        shared=shared,
        shared_names=tuple(f"{a} -> {b}" for a, b in joined),
        shared_bytes_per_s=tuple(
            catalog.links.between(a, b).bandwidth_bytes_per_s for a, b in joined
        ),
    )


def _cluster_sites(problem: Problem, catalog: Catalog, instances: Sequence[Instance]) -> Sites:
    """Machines, or slices of them, which have their share of what joins the machine."""
    cluster = problem.cluster
    assert cluster is not None
    used = {
        site_name(problem, instance, index): (node.host, node.share)
        for instance in instances
        for index, node in enumerate(instance.nodes)
        if node.host is not None
    }
    ends = {**dict(sorted(used.items())), SOURCE: (SOURCE, 1.0), SINK: (SINK, 1.0)}
    names = tuple(ends)
    size = len(names)
    speed, wait = np.zeros((size, size)), np.zeros((size, size))
    for i, a in enumerate(names):
        for j, b in enumerate(names):
            if a in (b, SINK) or b == SOURCE or (a == SOURCE and b == SINK):
                continue
            (host_a, share_a), (host_b, share_b) = ends[a], ends[b]
            link = cluster.link(host_a, host_b)
            share = min(share_a, share_b)
            if link is not None:
                speed[i, j], wait[i, j] = link.bytes_per_s * share, link.latency_s
            elif host_a == host_b:
                # Slices of one machine that no rule speaks of: they have its interface.
                own = cluster.node(host_a)
                inner = hop_link(catalog, own.node_type, own.region)
                speed[i, j], wait[i, j] = inner.bandwidth_bytes_per_s * share, inner.latency_s
    pairs = np.arange(size * size, dtype=np.int64).reshape(size, size)
    return Sites(names, speed, wait, paired=True, shared=pairs)


def interfaces(catalog: Catalog, instances: Sequence[Instance]) -> Floats:
    """Return the bytes/s of each node's network interface; a slice has its share of the machine's."""
    return np.array(
        [
            hop_link(
                catalog, node.node_type, instance.region_of(node), node.gpus
            ).bandwidth_bytes_per_s
            for instance in instances
            for node in instance.nodes
        ]
    )


def link_records(sites: Sites, nics: Floats) -> Records:
    """Return all links: of a cluster those of every pair, else what nodes send and what they receive
    through, what coordinators send through, and those between regions.
    """
    if sites.paired:
        records = np.zeros(len(sites.names) ** 2, LINK)
        records["bytes_per_s"] = sites.bytes_per_s.ravel()
        return records
    speeds = [nics, nics, sites.bytes_per_s.max(axis=1), np.array(sites.shared_bytes_per_s)]
    records = np.zeros(sum(map(len, speeds)), LINK)
    records["bytes_per_s"] = np.concatenate(speeds)
    return records


def link_names(sites: Sites, instances: Sequence[Instance]) -> list[str]:
    """Return what the links are called, as `link_records` orders them."""
    if sites.paired:
        return [f"{a} -> {b}" for a in sites.names for b in sites.names]
    nodes = [f"{instance.id}/{node.id}" for instance in instances for node in instance.nodes]
    return [*nodes, *(f"-> {node}" for node in nodes), *sites.names, *sites.shared_names]


def site_records(sites: Sites, nodes: int) -> Records:
    """Return speed, latency and shared link from site to site."""
    records = np.zeros(sites.bytes_per_s.shape, SITE)
    # A pair without a link is never sent over; a speed of 0 would only make noise.
    records["bytes_per_s"] = np.where(sites.bytes_per_s > 0.0, sites.bytes_per_s, 1.0)
    records["latency_s"] = sites.latency_s
    base = 0 if sites.paired else 2 * nodes + len(sites.names)
    records["link"] = np.where(sites.shared >= 0, base + sites.shared, -1)
    return records
