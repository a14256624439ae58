"""The cluster of a fleet file: nodes by name or number per site, links, measured profiles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from atoll.catalog.catalog import Catalog
from atoll.core.errors import InputError, UnknownNameError
from atoll.core.files import load_yaml_file
from atoll.core.ids import parse_node_type, slug
from atoll.plan.cluster import ANY, Cluster, ClusterLink, ClusterNode, NodeProfile
from atoll.plan.files.fleet_schema import FleetDocument, MachinesSpec, ProfilesFile
from atoll.plan.files.offers_file import can_be_cut, machine_type
from atoll.plan.plan import SINK, SOURCE
from atoll.plan.problem import Offer

Profiles = dict[str, dict[str, NodeProfile]]


def cluster_of_file(
    document: FleetDocument, catalog: Catalog
) -> tuple[Cluster | None, tuple[Offer, ...]]:
    """Return the cluster of a fleet file and offers for those nodes that have a price or are not cut."""
    entry = document.content.cluster
    if entry is None:
        return None, ()
    if document.content.pool is not None:
        raise document.error(
            "a fixed cluster beside a pool", "pool", hint="leave out either 'pool' or 'cluster'"
        )
    nodes = tuple(_nodes(document, catalog))
    links = tuple(_links(document, nodes))
    profiles = _profiles(document, catalog, nodes)
    with document.at("cluster"):
        cluster = Cluster.parse(
            {"nodes": nodes, "links": links, "profiles": profiles, "kv_fill": entry.kv_fill}
        )
    return cluster, tuple(_offers(document, catalog))


def _machines(
    document: FleetDocument, catalog: Catalog
) -> Iterator[tuple[tuple[str, ...], str, str, MachinesSpec]]:
    """Yield place in the file, site, node type and entry of every group of machines."""
    entry = document.content.cluster
    for site, machines in entry.nodes.items() if entry is not None else ():
        with document.at("cluster", "nodes", site):
            slug(site)
            if site in (ANY, SOURCE, SINK):
                raise InputError(f"{site!r} is no name for a site", hint="rename it")
        kinds: set[str] = set()
        for name, value in machines.items():
            here = ("cluster", "nodes", site, name)
            with document.at(*here):
                kind = machine_type(catalog, name)
                if kind in kinds:
                    raise InputError(f"{kind} is given twice", hint="put them in one line")
            kinds.add(kind)
            if isinstance(value, int):
                group = MachinesSpec(count=value)
            elif isinstance(value, list):
                group = MachinesSpec(names=value)
            else:
                group = value
            if (group.count is None) == (group.names is None):
                raise document.error(
                    "how many, or which?", *here, hint="give either 'count' or 'names'"
                )
            yield here, site, kind, group


def _nodes(document: FleetDocument, catalog: Catalog) -> Iterator[ClusterNode]:
    for here, site, kind, group in _machines(document, catalog):
        gpu = parse_node_type(kind)
        stem = f"{site}-{gpu.gpu.lower()}" + (f"x{gpu.gpu_count}" if gpu.gpu_count > 1 else "")
        count = group.count or 0
        width = len(str(max(0, count - 1)))
        names = group.names or [f"{stem}-{i:0{width}d}" for i in range(count)]
        with document.at(*here):
            for name in names:
                yield ClusterNode.parse({"name": name, "node_type": kind, "region": site})


def _links(document: FleetDocument, nodes: tuple[ClusterNode, ...]) -> Iterator[ClusterLink]:
    entry = document.content.cluster
    known = {ANY, SOURCE, SINK, *(n.name for n in nodes), *(n.region for n in nodes)}
    for index, link in enumerate(entry.links if entry is not None else ()):
        for place, end in enumerate(link.between):
            with document.at("cluster", "links", index, "between", place):
                if end not in known:
                    raise UnknownNameError("node or site", end, known)
        yield ClusterLink(
            src=link.between[0],
            dst=link.between[1],
            bytes_per_s=link.bandwidth,
            latency_s=link.latency,
            one_way=link.one_way,
        )


def _offers(document: FleetDocument, catalog: Catalog) -> Iterator[Offer]:
    for _, site, kind, group in _machines(document, catalog):
        whole = group.whole or not can_be_cut(catalog, kind)
        if group.usd_per_hour > 0 or whole:
            yield Offer(
                region=site,
                node_type=kind,
                market="owned",
                available=group.count if group.count is not None else len(group.names or ()),
                usd_per_hour=group.usd_per_hour,
                whole=whole,
            )


def _profiles(
    document: FleetDocument, catalog: Catalog, nodes: tuple[ClusterNode, ...]
) -> Profiles:
    """Read the measured profiles: a file beside this one, or what is written here."""
    entry = document.content.cluster
    measured = None if entry is None else entry.profiles
    if measured is None:
        return {}
    if isinstance(measured, str):
        path: Path = document.folder / measured
        with document.at("cluster", "profiles"):
            data = load_yaml_file(path).data
        measured = ProfilesFile.parse({"profiles": data}, path=path).profiles
    names = set(document.content.services)
    models = {catalog.model(e.model or name).name for name, e in document.content.services.items()}
    kinds = {node.node_type for node in nodes}
    by_name: Profiles = {}
    for name, profiles in measured.items():
        with document.at("cluster", "profiles"):
            canonical = name if name in names else catalog.model(name).name
            if canonical not in names | models:
                continue  # a file may hold more models than are served
            by_name[canonical] = {
                kind: profile
                for key, profile in profiles.items()
                if (kind := catalog.node(key).id) in kinds
            }
    return by_name
