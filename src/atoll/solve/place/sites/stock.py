"""Machines of a large cluster that are alike, counted, and a sample of them with all their links.

Two machines of a type in a region are alike where no rule for links names one of them. A cluster of ten
thousand machines is then a few hundred entries, and two machines of each are enough to know all links: a
matrix of all machines would take gigabytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from atoll.catalog.catalog import Catalog
from atoll.core.ids import parse_node_type
from atoll.plan.cluster import ClusterNode
from atoll.plan.cluster_profiles import cluster_of
from atoll.plan.problem import Problem, Service
from atoll.solve.array_types import Ints
from atoll.solve.place.flow_instance import FlowInstance, Unit
from atoll.solve.place.from_problem import flow_instance
from atoll.solve.place.machine_cuts import sizes_of

MAX_ENTRIES = 400
"""Kinds of machines up to which a sample of two of each is small."""


@dataclass(frozen=True)
class StockEntry:
    """Machines that are alike: their region and type, and their names."""

    region: str
    node_type: str
    hosts: tuple[str, ...]

    @property
    def machines(self) -> int:
        """How many there are."""
        return len(self.hosts)


@dataclass(frozen=True)
class Stock:
    """What a cluster has, by entries, and each way to use a machine of one.

    Way o takes machines of entry `entry[o]` in `pieces[o]` equal slices; `row[o]` is one of them in `sample`.
    """

    entries: tuple[StockEntry, ...]
    entry: Ints
    pieces: Ints
    row: Ints
    sample: FlowInstance

    @property
    def machines(self) -> Ints:
        """Machines of each entry."""
        return np.array([entry.machines for entry in self.entries], np.int64)

    @property
    def max_layers(self) -> Ints:
        """The most layers that one machine of each entry holds, in all its slices together."""
        most = np.zeros(len(self.entries), np.int64)
        np.maximum.at(most, self.entry, self.sample.max_layers[self.row] * self.pieces)
        return most


def take_stock(
    problem: Problem, catalog: Catalog, service: Service, *, partial: bool, promised: bool
) -> Stock | None:
    """Return what the cluster has for a service; None where too many machines differ from all others."""
    entries = list_entries(problem)
    if len(entries) > MAX_ENTRIES:
        return None
    by_name = cluster_of(problem).by_name
    units: list[Unit] = []
    ways: list[tuple[int, int, Unit]] = []
    for number, entry in enumerate(entries):
        for size in sizes_of(problem, by_name[entry.hosts[0]]):
            # Two of them, so that links among machines that are alike are seen, too.
            alike = [slices_of(by_name[host], size)[0] for host in entry.hosts[:2]]
            units += alike
            ways.append((number, parse_node_type(entry.node_type).gpu_count // size, alike[0]))
    sample = flow_instance(
        problem, catalog, service, partial=partial, units=units, promised=promised
    )
    # Kinds that cannot hold a layer are not there.
    at = {unit: i for i, unit in enumerate(sample.units)}
    usable = [way for way in ways if way[2] in at]
    return Stock(
        tuple(entries),
        np.array([number for number, _, _ in usable], np.int64),
        np.array([pieces for _, pieces, _ in usable], np.int64),
        np.array([at[unit] for _, _, unit in usable], np.int64),
        sample,
    )


def sample_machines(problem: Problem) -> tuple[Unit, ...]:
    """Return two machines of each entry, whole: all links of a cluster are among them."""
    by_name = cluster_of(problem).by_name
    machines = [by_name[host] for entry in list_entries(problem) for host in entry.hosts[:2]]
    return tuple(Unit(machine.name, machine.node_type, machine.region) for machine in machines)


def list_entries(problem: Problem) -> list[StockEntry]:
    """Return the machines of a cluster by region, type and the rules that name them, sorted."""
    cluster = cluster_of(problem)
    named = {end for link in cluster.links for end in (link.src, link.dst)}
    alike: dict[tuple[str, str, str], list[str]] = {}
    for node in cluster.nodes:
        key = (node.region, node.node_type, node.name if node.name in named else "")
        alike.setdefault(key, []).append(node.name)
    return [StockEntry(key[0], key[1], tuple(alike[key])) for key in sorted(alike)]


def slices_of(machine: ClusterNode, size: int) -> list[Unit]:
    """Return the slices of so many GPUs of a machine; of all of them the machine itself."""
    count = parse_node_type(machine.node_type).gpu_count
    if size == count:
        return [Unit(machine.name, machine.node_type, machine.region)]
    return [
        Unit(machine.name, machine.node_type, machine.region, tuple(range(first, first + size)))
        for first in range(0, count, size)
    ]


def list_sites(stock: Stock) -> list[Ints]:
    """Return the entries of every region; a region that cannot hold the model is with the nearest one."""
    regions = sorted({entry.region for entry in stock.entries})
    sites = [
        np.array([i for i, entry in enumerate(stock.entries) if entry.region == region], np.int64)
        for region in regions
    ]
    holds = stock.machines * stock.max_layers
    # The smallest site joins first, and again until every site holds the model or one is left.
    while len(sites) > 1:
        held = [int(holds[site].sum()) for site in sites]
        short = int(np.argmin(held))
        if held[short] >= stock.sample.layers:
            break
        own = sites.pop(short)
        near = [mean_link(stock, own, site) for site in sites]
        best = int(np.argmax(near))
        sites[best] = np.sort(np.concatenate([sites[best], own]))
    return sites


def mean_link(stock: Stock, site: Ints, other: Ints) -> float:
    """Return the mean link from one site to another, tokens/s.

    The mean and not the widest: a single wide link does not make two sites one.
    """
    rows, columns = (stock.row[np.isin(stock.entry, part)] for part in (site, other))
    if not rows.size or not columns.size:
        return 0.0
    return float(stock.sample.link[np.ix_(rows, columns)].mean())


def pick_rows(stock: Stock, entries: Sequence[int] | Ints) -> Ints:
    """Return the rows of the sample that are machines of some entries, whole or in slices."""
    wanted = {stock.entries[i] for i in entries}
    hosts = {host for entry in wanted for host in entry.hosts[:2]}
    return np.array(
        [i for i, unit in enumerate(stock.sample.units) if unit.host in hosts], np.int64
    )
