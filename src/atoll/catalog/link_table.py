"""Links: how fast and how late data moves inside a node, inside a region and between regions."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import cast

from atoll.catalog.facts import Fact
from atoll.catalog.frozenmap import FrozenMap
from atoll.catalog.nodes import NodeType
from atoll.catalog.resources import Table, data_yaml, fact_of, section
from atoll.core.errors import InputError
from atoll.core.ids import parse_node_type

GBIT = 1e9 / 8
Pair = tuple[str, str]
# How clouds write their regions: us-east-1, europe-west4.
_CLOUDS = {
    "aws": re.compile(r"(us|eu|ap|sa|ca|me|af|il|mx)(-gov)?-(north|south|central)?(east|west)?-\d"),
    "gcp": re.compile(r"(us|europe|asia|australia|(north|south)america|me|africa)-[a-z]+\d+"),
}


@dataclass(frozen=True, slots=True)
class Link:
    """A one-way connection: `latency_s` seconds to the first byte, then so many bytes a second."""

    bandwidth_bytes_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        if not self.bandwidth_bytes_per_s > 0:
            raise InputError(f"a link of {self.bandwidth_bytes_per_s} bytes/s", field="bandwidth")
        if not self.latency_s >= 0:
            raise InputError(f"a link latency of {self.latency_s} s", field="latency")

    def time_s(self, size_bytes: float) -> float:
        """Seconds to move `size_bytes` bytes."""
        return self.latency_s + size_bytes / self.bandwidth_bytes_per_s

    def share(self, part: int, of: int) -> Link:
        """The link that `part` of `of` equal users have of this one: less bandwidth, the same latency."""
        return self if part == of else Link(self.bandwidth_bytes_per_s * part / of, self.latency_s)


@dataclass(frozen=True, slots=True)
class GpuGroups:
    """Groups of `gpus` GPUs of a machine (NVLink islands, NUMA nodes), and the link from one to another."""

    gpus: int
    link: Link


@dataclass(frozen=True, slots=True)
class LinkTable:
    """Every link the planner may ask for; the most specific entry wins.

    1. `node_pairs`, between two named nodes or node types;
    2. `region_pairs`, between two regions, or inside one where both names are equal;
    3. inside a region, the slower of the two nodes' interfaces (`nic_bytes_per_s`);
    4. `in_region` or `between_regions`.

    Regions go by their own name or with their cloud, as in gcp/us-central1, which then is looked up first.
    Pairs are directed; an entry given for both directions is stored twice. `nics` holds bytes/s by node type,
    `region_nics` those of machines that a cloud or region has with other interfaces, by place and node type.
    `groups` has the node types whose GPUs are joined in groups; inside others all GPUs are alike.
    `share_bytes_per_s` is what a process that has a share of a GPU sends or receives at most: what it hands
    to its neighbour goes over the host.
    """

    in_region: Link
    between_regions: Link
    region_pairs: Mapping[Pair, Link] = field(default_factory=FrozenMap)
    node_pairs: Mapping[Pair, Link] = field(default_factory=FrozenMap)
    nics: Mapping[str, float] = field(default_factory=FrozenMap)
    region_nics: Mapping[Pair, float] = field(default_factory=FrozenMap)
    groups: Mapping[str, GpuGroups] = field(default_factory=FrozenMap)
    facts: Mapping[str, Fact] = field(default_factory=FrozenMap, compare=False, repr=False)
    share_bytes_per_s: float = math.inf
    _found: dict[tuple[str, str, str | None, str | None], Link] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        for name in ("region_pairs", "node_pairs", "nics", "region_nics", "groups", "facts"):
            object.__setattr__(self, name, FrozenMap(getattr(self, name)))

    def between(
        self, region_a: str, region_b: str, node_a: str | None = None, node_b: str | None = None
    ) -> Link:
        """The link from a node in `region_a` to one in `region_b`; nodes by name or type."""
        asked = (region_a, region_b, node_a, node_b)
        if asked not in self._found:
            self._found[asked] = self._find(*asked)
        return self._found[asked]

    def _find(self, region_a: str, region_b: str, node_a: str | None, node_b: str | None) -> Link:
        if node_a is not None and node_b is not None:
            pair = self.node_pairs.get((node_a, node_b))
            if pair is not None:
                return pair
        regions = self.region_pairs.get((region_a, region_b))
        a, b = _without_cloud(region_a), _without_cloud(region_b)
        if regions is None and (a == b) == (region_a == region_b):
            regions = self.region_pairs.get((a, b))
        if regions is not None:
            return regions
        if region_a != region_b:
            return self.between_regions
        if not node_a or not node_b:
            return self.in_region
        slower = min(self.nic_bytes_per_s(region_a, node) for node in (node_a, node_b))
        return replace(self.in_region, bandwidth_bytes_per_s=slower)

    def nic_bytes_per_s(self, region: str, node: str) -> float:
        """Bandwidth of the network interface of a node type in `region`, in bytes/s.

        Without a figure it carries what `in_region` does or, if more, what the best smaller size of its GPU
        does: no size carries less than a smaller one for want of a figure.
        """
        named = parse_node_type(node) if "/" in node else None
        if named is not None and named.shares > 1:
            whole = self.nic_bytes_per_s(region, str(named.whole))
            return min(whole, named.gpu_count * self.share_bytes_per_s)
        here = dict(self.nics)
        for place in (_cloud_of(region), _without_cloud(region)):
            here |= {name: known for (at, name), known in self.region_nics.items() if at == place}
        if node in here:
            return here[node]
        gpu, _, count = node.rpartition(":")
        min_bytes_per_s = self.in_region.bandwidth_bytes_per_s
        if not count.isdecimal():
            return min_bytes_per_s
        for name, known in here.items():
            kind, _, size = name.rpartition(":")
            if kind == gpu and int(size) < int(count):
                min_bytes_per_s = max(min_bytes_per_s, known)
        return min_bytes_per_s

    def inside(self, node: NodeType) -> Link:
        """The link from one GPU to another of the same node."""
        joint = node.interconnect
        if joint.p2p_bandwidth_bytes_per_s is None:
            raise InputError(
                f"no GPU-to-GPU link inside {node.id} is known",
                field=f"interconnects.{joint.name}",
                hint="give the interconnect a p2p_bandwidth in an overlay",
            )
        return Link(joint.p2p_bandwidth_bytes_per_s, joint.p2p_latency_s or 0.0)

    def with_pairs(
        self,
        *,
        regions: Mapping[Pair, Link] | None = None,
        nodes: Mapping[Pair, Link] | None = None,
    ) -> LinkTable:
        """The table with more pairs; a pair given again replaces the old one."""
        return replace(
            self,
            region_pairs={**self.region_pairs, **(regions or {})},
            node_pairs={**self.node_pairs, **(nodes or {})},
        )


def _without_cloud(region: str) -> str:
    """The region's own name, where it is written with its cloud as in aws/us-east-2."""
    return region.rpartition("/")[2]


def _cloud_of(region: str) -> str | None:
    """The cloud of a region, from its name with the cloud or in the cloud's own form; None: nobody's."""
    cloud, slash, _ = region.rpartition("/")
    return (
        cloud if slash else next((c for c, form in _CLOUDS.items() if form.fullmatch(region)), None)
    )


@cache
def default_links() -> LinkTable:
    """The links that ship with Atoll."""
    data = data_yaml("links.yaml")
    sources = section(data, "sources")
    facts: dict[str, Fact] = {}

    def fact(name: str, entry: object, scale: float) -> float:
        raw = fact_of(entry, sources)
        value = cast(float, raw.value) * scale
        facts[name] = Fact(value, raw.source, raw.confidence)
        return value

    def link(name: str) -> Link:
        entry = section(data, name)
        return Link(
            fact(f"{name}.bandwidth_bytes_per_s", entry["bandwidth_gbit"], GBIT),
            fact(f"{name}.latency_s", entry["latency_ms"], 1e-3),
        )

    in_region, between = link("in_region"), link("between_regions")
    pairs: dict[Pair, Link] = {}
    for row in cast("list[Table]", data["latency_ms"]):
        a, b = cast("list[str]", row["between"])
        latency_s = fact(f"{a}..{b}.latency_s", row["latency_ms"], 1e-3)
        pairs[a, b] = pairs[b, a] = Link(between.bandwidth_bytes_per_s, latency_s)
    nics = {
        node: fact(f"nics.{node}", entry, GBIT) for node, entry in section(data, "nics").items()
    }
    region_nics = {
        (region, node): fact(f"nics.{region}.{node}", entry, GBIT)
        for region, entries in section(data, "region_nics").items()
        for node, entry in cast(Table, entries).items()
    }
    return LinkTable(
        in_region,
        between,
        pairs,
        nics=nics,
        region_nics=region_nics,
        share_bytes_per_s=fact("between_shares", data["between_shares_gbit"], GBIT),
        facts=facts,
    )
