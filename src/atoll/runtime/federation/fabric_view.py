"""The fabric as a gateway shows it to people and programs."""

from __future__ import annotations

from typing import Required, TypedDict

from atoll.fabric.registry.records import Hardware, NodeService


class ShownPeer(TypedDict, total=False):
    """A node or hub: what it says of itself (`registry.records.Metadata`), and how it stands here."""

    name: Required[str]
    provider: Required[str]
    role: Required[str]
    region: str
    site: str
    hardware: Hardware
    engine: str
    engine_version: str
    services: list[NodeService]
    weight: float | None
    max_inflight: int | None
    price_usd_per_hour: float | None
    usd_per_mtoken_in: float | None
    usd_per_mtoken_out: float | None
    stability: str
    direct: str | None
    ends_s: float | None
    accept: str | None
    labels: dict[str, str]
    sid: Required[str]
    state: Required[str]
    alive: Required[bool]
    verified: Required[bool]
    for_s: Required[float]
    """Seconds in this state."""
    load: Required[dict[str, float | None] | None]
    used: Required[bool]
    unused_because: Required[str | None]
    direct_used: Required[bool]


class FabricStats(TypedDict, total=False):
    """Figures of the registry; those of what was counted have names of their own beside these."""

    sessions: Required[dict[str, int]]
    alive: Required[int]
    refused: Required[dict[str, int]]
    last_sync_s: float | None
    spread_s: float | None
    hash: str
    sites: int


class FabricView(TypedDict):
    """Nodes and hubs of a fabric, as one of its gateways sees them."""

    sid: str
    name: str
    provider: str
    connected: bool
    nodes: list[ShownPeer]
    hubs: list[ShownPeer]
    stats: FabricStats
    tunnel: dict[str, float]
