"""Machines that a cluster makes when pods ask for them: pools that settings state, and Karpenter's NodePools.

A pool may be empty now, and grow to its limit. What of it stands is counted as machines (`kube_machines`);
here is what is left to be made. cluster-autoscaler says nowhere which GPUs a pool has, so these are
stated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from atoll.catalog.catalog import Catalog
from atoll.core.ids import format_node_type
from atoll.deploy.kubernetes.gpu_labels import (
    INSTANCE_TYPE,
    KARPENTER,
    KARPENTER_COUNT,
    KARPENTER_MIB,
    count_machine_gpus,
    find_gpu,
)
from atoll.deploy.kubernetes.kube_settings import KubernetesSettings
from atoll.plan.plan import Market, OfferKey

Json = Mapping[str, Any]

KARPENTER_POOL = "karpenter.sh/nodepool"
POOLS = (
    "cloud.google.com/gke-nodepool",
    "eks.amazonaws.com/nodegroup",
    "kubernetes.azure.com/agentpool",
    KARPENTER_POOL,
)
"""Labels by which machines say which pool they are of."""
REGION = "topology.kubernetes.io/region"
CAPACITY = "karpenter.sh/capacity-type"
GPU = "nvidia.com/gpu"
UNLIMITED_GPUS = 4096
"""Taken for the limit of a NodePool without one; a fleet's own pool bounds what is used of it."""


def count_unborn(
    nodes: Sequence[Json],
    karpenter: Iterable[Json],
    settings: KubernetesSettings,
    catalog: Catalog,
) -> Counter[OfferKey]:
    """Return how many machines pools can still make, by region, node type and market."""
    found: Counter[OfferKey] = Counter()
    for name, pool in settings.node_pools.items():
        there = sum(_is_of(node, name) for node in nodes)
        key = (pool.region or settings.region, pool.node_type, pool.market or settings.market)
        found[key] += max(0, pool.max - there)
    for made in karpenter:
        # What settings say of a pool goes before what it says itself.
        if made["metadata"]["name"] not in settings.node_pools:
            found.update(_read_karpenter(made, nodes, settings, catalog))
    return +found


def _is_of(node: Json, pool: str) -> bool:
    labels = node["metadata"].get("labels") or {}
    return any(labels.get(key) == pool for key in POOLS)


def _read_karpenter(
    made: Json, nodes: Sequence[Json], settings: KubernetesSettings, catalog: Catalog
) -> Counter[OfferKey]:
    """Return what a NodePool can make; nothing where it does not say which GPUs, and how many of them.

    Kinds of machines share its limit: each is counted as if it were the only one.
    """
    spec = made.get("spec") or {}
    template = (spec.get("template") or {}).get("spec") or {}
    has = {
        rule["key"]: [str(value) for value in rule.get("values") or ()]
        for rule in template.get("requirements") or ()
        if rule.get("operator") == "In"
    }
    limit = int((spec.get("limits") or {}).get(GPU, UNLIMITED_GPUS))
    there = sum(
        int(node.get("status", {}).get("allocatable", {}).get(GPU, 0))
        for node in nodes
        if (node["metadata"].get("labels") or {}).get(KARPENTER_POOL) == made["metadata"]["name"]
    )
    kinds = _list_kinds(has, settings, catalog)
    markets: dict[str, Market] = {"spot": "spot", "on-demand": settings.market}
    capacities = has.get(CAPACITY, ["on-demand"])
    offered = [markets[value] for value in capacities if value in markets]
    return Counter(
        {
            (region, format_node_type(gpu, count), market): max(0, limit - there) // count
            for gpu, count in kinds
            for market in offered
            for region in _list_regions(has, nodes, settings)
        }
    )


def _list_kinds(
    has: Mapping[str, Sequence[str]], settings: KubernetesSettings, catalog: Catalog
) -> list[tuple[str, int]]:
    kinds = []
    for machine in has.get(INSTANCE_TYPE, ()):
        gpu = find_gpu({INSTANCE_TYPE: machine}, catalog, settings.gpu_names)
        count = count_machine_gpus(machine)
        if gpu is not None and count is not None:
            kinds.append((gpu, count))
    if INSTANCE_TYPE not in has:
        (memory, *_) = (*has.get(KARPENTER_MIB, ()), None)
        for name in has.get(KARPENTER, ()):
            labels = {KARPENTER: name, **({KARPENTER_MIB: memory} if memory else {})}
            gpu = find_gpu(labels, catalog, settings.gpu_names)
            counts = [int(each) for each in has.get(KARPENTER_COUNT, ()) if each.isdigit()]
            kinds += [(gpu, count) for count in counts if gpu is not None and count > 0]
    return sorted(set(kinds))


def _list_regions(
    has: Mapping[str, Sequence[str]], nodes: Sequence[Json], settings: KubernetesSettings
) -> list[str]:
    """Return the regions where machines will be: those asked for, else the one where others are."""
    labels = {(node["metadata"].get("labels") or {}).get(REGION) for node in nodes} - {None}
    known = has.get(REGION) or (sorted(filter(None, labels)) if len(labels) == 1 else [])
    return [settings.regions.get(label, label) for label in known] or [settings.region]
