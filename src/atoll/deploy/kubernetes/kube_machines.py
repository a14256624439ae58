"""Machines of a cluster: which GPUs they have, where they stand, what may be had of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from atoll.catalog.catalog import Catalog
from atoll.core.ids import format_node_type
from atoll.deploy.kubernetes.gpu_labels import describe_gpu, find_gpu
from atoll.deploy.kubernetes.kube_lease import read_time_s
from atoll.deploy.kubernetes.kube_settings import KubernetesSettings
from atoll.deploy.kubernetes.labels import label_value
from atoll.plan.plan import Market, OfferKey
from atoll.plan.problem import Offer, slices_of

GPU = "nvidia.com/gpu"
REGION = "topology.kubernetes.io/region"
HOST = "kubernetes.io/hostname"
SPOT = (
    ("cloud.google.com/gke-spot", "true"),
    ("eks.amazonaws.com/capacityType", "SPOT"),
    ("karpenter.sh/capacity-type", "spot"),
    ("kubernetes.azure.com/scalesetpriority", "spot"),
)
"""How clouds mark machines that may be taken away."""
_TOLERATED = {GPU, *(key for key, _ in SPOT)}

Json = Mapping[str, Any]


def read_offers(
    nodes: Iterable[Json],
    others: Iterable[Json],
    own: Iterable[Json],
    unborn: Mapping[OfferKey, int],
    settings: KubernetesSettings,
    catalog: Catalog,
) -> Sequence[Offer]:
    """Return what can be had of a cluster's machines, in use by the fleet or not.

    A machine that is cordoned, not ready, tainted for others, or whose GPU the catalog does not know is left
    out, but for what the fleet's own pods hold of it: a plan subtracts that. Where pods of others hold some
    of a machine's GPUs, the machine counts as the largest slice that is left of it. `unborn` are machines
    that the cluster makes when they are asked for.
    """
    held: Counter[str] = Counter()
    for pod in others:
        held[pod["spec"].get("nodeName", "")] += count_gpus(pod)
    used: dict[str, list[int]] = defaultdict(list)
    for pod in own:
        used[pod["spec"].get("nodeName", "")].append(count_gpus(pod))
    counts: Counter[OfferKey] = Counter(unborn)
    for node in nodes:
        labels: Mapping[str, str] = node["metadata"].get("labels") or {}
        gpus = int(node.get("status", {}).get("allocatable", {}).get(GPU, 0))
        free = gpus - held[node["metadata"]["name"]]
        name = find_gpu(labels, catalog, settings.gpu_names)
        if name is None:
            continue
        if not _is_usable(node, settings):
            slices = [size for size in used[node["metadata"]["name"]] if size]
        else:
            slices = [max(size for size in slices_of(gpus) if size <= free)] if free > 0 else []
        market: Market = "spot" if is_spot(labels) else settings.market
        label = labels.get(REGION)
        region = settings.region if label is None else settings.regions.get(label, label)
        for size in slices:
            counts[region, format_node_type(name, size), market] += 1
    return tuple(
        Offer(
            region=region,
            node_type=node_type,
            market=market,
            available=n,
            usd_per_hour=_price(node_type, market, settings),
        )
        for (region, node_type, market), n in sorted(counts.items())
    )


def region_labels(region: str, settings: KubernetesSettings) -> tuple[str, ...]:
    """Return the values of the region label that mean a region of plans; the inverse of what offers say."""
    named = sorted(label for label, name in settings.regions.items() if name == region)
    return tuple(named) or (label_value(region),)


def is_spot(labels: Mapping[str, str]) -> bool:
    """Return whether a machine's labels say that it may be taken away."""
    return any(labels.get(key) == value for key, value in SPOT)


def is_cordoned(node: Json) -> bool:
    """Return whether somebody asked that nothing new be put on a machine."""
    return bool(node.get("spec", {}).get("unschedulable", False))


def count_gpus(pod: Json) -> int:
    """Return how many GPUs a pod holds; none once it has ended."""
    if pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
        return 0
    containers = pod["spec"].get("containers", ())
    return sum(int(c.get("resources", {}).get("limits", {}).get(GPU, 0)) for c in containers)


def list_unknown(
    nodes: Iterable[Json], settings: KubernetesSettings, catalog: Catalog
) -> tuple[str, ...]:
    """Return what machines with GPUs that are not offered say of them, sorted."""
    unknown = set()
    for node in nodes:
        labels: Mapping[str, str] = node["metadata"].get("labels") or {}
        gpus = int(node.get("status", {}).get("allocatable", {}).get(GPU, 0))
        if gpus and find_gpu(labels, catalog, settings.gpu_names) is None:
            unknown.add(describe_gpu(labels))
    return tuple(sorted(unknown))


def is_lost(node: Json) -> bool:
    """Return whether a machine's kubelet says that it is not well, or says nothing any more."""
    conditions = node.get("status", {}).get("conditions") or ()
    return not any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def cordoned_s(node: Json) -> float | None:
    """Return since when nothing new is to be put on a machine, where it says so; Unix time.

    Whoever changes an object is noted in it, with the time and the fields.
    """
    found = [
        read_time_s(entry.get("time"))
        for entry in node["metadata"].get("managedFields") or ()
        if "f:unschedulable" in ((entry.get("fieldsV1") or {}).get("f:spec") or {})
    ]
    return max(found, default=None)


def _is_usable(node: Json, settings: KubernetesSettings) -> bool:
    labels = node["metadata"].get("labels") or {}
    if any(labels.get(key) != value for key, value in settings.node_selector.items()):
        return False
    if not all(rule.fits(labels) for rule in settings.node_affinity):
        return False
    if is_cordoned(node) or is_lost(node):
        return False
    taints = node.get("spec", {}).get("taints") or ()
    return all(t["effect"] == "PreferNoSchedule" or _is_tolerated(t, settings) for t in taints)


def _is_tolerated(taint: Json, settings: KubernetesSettings) -> bool:
    if taint["key"] in _TOLERATED:
        return True
    for each in settings.tolerations:
        if each.get("key") not in (None, "", taint["key"]):
            continue
        if each.get("effect") not in (None, "", taint["effect"]):
            continue
        if each.get("operator") == "Exists" or each.get("value", "") == taint.get("value", ""):
            return True
    return False


def _price(node_type: str, market: Market, settings: KubernetesSettings) -> float:
    prices = settings.usd_per_hour
    return prices.get(f"{node_type}/{market}", prices.get(node_type, 0.0))
