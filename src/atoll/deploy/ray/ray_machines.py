"""Machines of a Ray cluster: which GPUs they have, what may be had of them, how a bundle asks for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.catalog.catalog import Catalog
from atoll.core.errors import UnknownNameError
from atoll.core.ids import format_node_type
from atoll.deploy.ray.ray_settings import RaySettings
from atoll.plan.plan import Market
from atoll.plan.problem import Offer, slices_of

GPU = "GPU"
ACCELERATOR = "accelerator_type:"
"""Resource that every machine with accelerators has one of, with their type behind it."""
SHARE = 0.001
"""What a bundle takes of that resource: as many bundles as there may be GPUs fit one machine."""
MARKET_LABEL = "ray.io/market-type"
GROUP_PREFIX = "atoll:"
"""How the placement groups of instances are called."""

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RayMachine:
    """A machine of the cluster that lives: `name` is its host's, `accelerator` Ray's type (None: untyped)."""

    id: str
    name: str
    gpu: str
    gpus: int
    accelerator: str | None
    market: Market


def read_machines(
    nodes: Iterable[Json], settings: RaySettings, catalog: Catalog
) -> tuple[RayMachine, ...]:
    """Return the machines with GPUs that the catalog knows; others are left out."""
    found = []
    for node in nodes:
        resources: Mapping[str, float] = node.get("resources_total") or {}
        gpus = int(resources.get(GPU, 0))
        if node.get("state") != "ALIVE" or gpus < 1:
            continue
        types = [
            name.removeprefix(ACCELERATOR) for name in resources if name.startswith(ACCELERATOR)
        ]
        # A machine may be an A100 and, more exactly, an A100-40G.
        accelerator = max(types, key=len, default=None)
        gpu = _gpu_name(accelerator, settings, catalog)
        if gpu is None:
            continue
        label = str((node.get("labels") or {}).get(MARKET_LABEL, ""))
        market: Market = "spot" if label == "spot" else settings.market
        name = str(node.get("node_name") or node.get("node_ip") or node["node_id"])
        found.append(RayMachine(str(node["node_id"]), name, gpu, gpus, accelerator, market))
    return tuple(found)


def count_held(groups: Iterable[Json], actors: Iterable[Json]) -> Counter[str]:
    """Return how many GPUs others than Atoll hold, by machine: their placement groups, and actors in none."""
    held: Counter[str] = Counter()
    for group in groups:
        if str(group.get("name", "")).startswith(GROUP_PREFIX) or group.get("state") == "REMOVED":
            continue
        for bundle in group.get("bundles") or ():
            held[str(bundle.get("node_id"))] += _round_up(bundle.get("unit_resources"))
    for actor in actors:
        if not actor.get("placement_group_id") and actor.get("state") == "ALIVE":
            held[str(actor.get("node_id"))] += _round_up(actor.get("required_resources"))
    return held


def list_offers(
    machines: Iterable[RayMachine], held: Mapping[str, int], settings: RaySettings
) -> Sequence[Offer]:
    """Return what can be had; a machine of which others hold GPUs is the largest slice that is left."""
    counts: Counter[tuple[str, int, Market]] = Counter()
    for machine in machines:
        free = machine.gpus - held.get(machine.id, 0)
        if free > 0:
            largest = max(size for size in slices_of(machine.gpus) if size <= free)
            counts[machine.gpu, largest, machine.market] += 1
    return tuple(
        Offer(
            region=settings.region,
            node_type=format_node_type(gpu, size),
            market=market,
            available=n,
            usd_per_hour=settings.usd_per_gpu_hour.get(gpu, 0.0) * size,
        )
        for (gpu, size, market), n in sorted(counts.items())
    )


def _gpu_name(accelerator: str | None, settings: RaySettings, catalog: Catalog) -> str | None:
    # Without a type, only the settings can tell.
    name = settings.gpu_names.get(accelerator or GPU, accelerator)
    if name is None:
        return None
    try:
        # Ray writes "A100-80G" and "AMD-Instinct-MI300X-OAM" where drivers have other words.
        return catalog.gpu(name).name
    except UnknownNameError:
        pass
    try:
        return catalog.gpu(f"{name}B" if name.endswith("0G") else name.replace("-", " ")).name
    except UnknownNameError:
        return None


def _round_up(resources: Mapping[str, float] | None) -> int:
    return -int(-float((resources or {}).get(GPU, 0.0)) // 1)
