"""CPUs and host memory of machines for each of their GPUs, and what of them a node of a plan asks for.

A pod without requests is starved, or refused where a namespace has a quota; one that asks for more than its
GPUs' part of a machine keeps the others from being used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from atoll.catalog.catalog import Catalog
from atoll.deploy.kubernetes.gpu_labels import find_gpu
from atoll.deploy.kubernetes.kube_settings import KubernetesSettings

Json = Mapping[str, Any]

GPU = "nvidia.com/gpu"
_LEFT = 0.8
"""What is asked for of a machine at most; the rest is for what runs on every machine of a cluster."""
_MIB = 1 << 20
_UNITS = {
    "m": 1e-3,
    "": 1.0,
    **{unit: 1e3**power for power, unit in enumerate("kMGTPE", start=1)},
    **{f"{unit}i": 1024.0**power for power, unit in enumerate("KMGTPE", start=1)},
}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)([A-Za-z]*)")


class HostShare(NamedTuple):
    """A machine with `gpus` of a type, and the CPUs and bytes of host memory that it has for each."""

    gpu: str
    gpus: int
    cpus: float
    memory_bytes: float


def read_shares(
    nodes: Iterable[Json], settings: KubernetesSettings, catalog: Catalog
) -> tuple[HostShare, ...]:
    """Return what machines with GPUs have for each of them, the same only once."""
    found = set()
    for node in nodes:
        has = (node.get("status") or {}).get("allocatable") or {}
        gpus = int(has.get(GPU, 0))
        gpu = find_gpu(node["metadata"].get("labels") or {}, catalog, settings.gpu_names)
        if gpus and gpu is not None:
            cpus, memory = (_read_quantity(has.get(key)) for key in ("cpu", "memory"))
            found.add(HostShare(gpu, gpus, cpus / gpus, memory / gpus))
    return tuple(sorted(found))


def ask_host(
    gpu: str,
    count: int,
    shares: Sequence[HostShare],
    settings: KubernetesSettings,
    catalog: Catalog,
) -> dict[str, dict[str, str]]:
    """Return requests and limits for a node: as settings say, else no more than the least machine has.

    Asked for are `cpus_per_gpu`, and as much memory as the GPUs have, which holds any weights on their way
    there; the limit is the GPUs' whole part of a machine.
    """
    given = {"requests": dict(settings.requests), "limits": dict(settings.limits)}
    fitting = [share for share in shares if share.gpu == gpu and share.gpus >= count]
    if not fitting or not count:
        return given
    cpus = min(share.cpus for share in fitting)
    memory = min(share.memory_bytes for share in fitting)
    wanted = {
        "cpu": (min(settings.cpus_per_gpu, _LEFT * cpus) * 1000, cpus * 1000, "m"),
        "memory": (
            min(catalog.gpu(gpu).memory_bytes, _LEFT * memory) / _MIB,
            memory / _MIB,
            "Mi",
        ),
    }
    for resource, (request, limit, unit) in wanted.items():
        if resource in settings.requests or resource in settings.limits:
            continue
        for kind, each in (("requests", request), ("limits", limit)):
            if count * each >= 1 and settings.cpus_per_gpu:
                given[kind][resource] = f"{int(count * each)}{unit}"
    return given


def _read_quantity(text: object) -> float:
    match = _QUANTITY.fullmatch(str(text or ""))
    return 0.0 if match is None else float(match[1]) * _UNITS.get(match[2], 0.0)
