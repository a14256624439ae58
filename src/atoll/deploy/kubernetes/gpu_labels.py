"""Labels by which clusters say what GPU a machine has: the GPU operator's, and those of clouds.

A machine is one GPU type or none: shared and partitioned GPUs are no whole ones, and a name that the catalog
does not know is never taken for another.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from atoll.catalog.catalog import Catalog
from atoll.core.errors import UnknownNameError
from atoll.deploy.kubernetes.labels import label_value

PRODUCT = "nvidia.com/gpu.product"
COUNT = "nvidia.com/gpu.count"
GKE = "cloud.google.com/gke-accelerator"
KARPENTER, KARPENTER_MIB = (
    "karpenter.k8s.aws/instance-gpu-name",
    "karpenter.k8s.aws/instance-gpu-memory",
)
KARPENTER_COUNT = "karpenter.k8s.aws/instance-gpu-count"
INSTANCE_TYPE = "node.kubernetes.io/instance-type"
SHARED = (
    ("nvidia.com/gpu.sharing-strategy", ("time-slicing", "mps")),
    ("cloud.google.com/gke-gpu-sharing-strategy", ("time-sharing", "mps")),
)
"""Labels of machines whose GPUs several pods share: each of them is counted several times."""
PARTITIONED = "cloud.google.com/gke-gpu-partition-size"

_GKE_NAMES = {
    "T4": ("nvidia-tesla-t4",),
    "L4": ("nvidia-l4",),
    "V100-16": ("nvidia-tesla-v100",),
    "A100-40": ("nvidia-tesla-a100",),
    "A100-80": ("nvidia-a100-80gb",),
    "H100": ("nvidia-h100-80gb", "nvidia-h100-mega-80gb"),
    "H200": ("nvidia-h200-141gb",),
    "B200": ("nvidia-b200",),
}
_KARPENTER_NAMES = {
    "T4": ("t4", None),
    "L4": ("l4", None),
    "A10G": ("a10g", None),
    "L40S": ("l40s", None),
    "V100-16": ("v100", "16384"),
    "V100-32": ("v100", "32768"),
    "A100-40": ("a100", "40960"),
    "A100-80": ("a100", "81920"),
    "H100": ("h100", None),
    "H200": ("h200", None),
    "B200": ("b200", None),
}
_AWS_SIZES = ("xlarge", "2xlarge", "4xlarge", "8xlarge", "12xlarge", "16xlarge", "24xlarge")
_MACHINES = {
    "T4": (
        *(f"g4dn.{size}" for size in (*_AWS_SIZES[:6], "metal")),
        *(f"Standard_NC{cores}as_T4_v3" for cores in (4, 8, 16, 64)),
    ),
    "A10G": tuple(f"g5.{size}" for size in (*_AWS_SIZES, "48xlarge")),
    "L4": (
        *(f"g6.{size}" for size in (*_AWS_SIZES, "48xlarge")),
        *(f"g2-standard-{cores}" for cores in (4, 8, 12, 16, 24, 32, 48, 96)),
    ),
    "L40S": tuple(f"g6e.{size}" for size in (*_AWS_SIZES, "48xlarge")),
    "V100-16": ("p3.2xlarge", "p3.8xlarge", "p3.16xlarge"),
    "V100-32": ("p3dn.24xlarge", "Standard_ND40rs_v2"),
    "A100-40": (
        *("p4d.24xlarge", "Standard_ND96asr_v4", "a2-megagpu-16g"),
        *(f"a2-highgpu-{gpus}g" for gpus in (1, 2, 4, 8)),
    ),
    "A100-80": (
        *("p4de.24xlarge", "Standard_ND96amsr_A100_v4"),
        *(f"a2-ultragpu-{gpus}g" for gpus in (1, 2, 4, 8)),
    ),
    "H100": (
        *("p5.4xlarge", "p5.48xlarge", "Standard_ND96isr_H100_v5", "a3-megagpu-8g"),
        *(f"a3-highgpu-{gpus}g" for gpus in (1, 2, 4, 8)),
    ),
    "A100-80-PCIe": tuple(f"Standard_NC{cores}ads_A100_v4" for cores in (24, 48, 96)),
    "H100-NVL": ("Standard_NC40ads_H100_v5", "Standard_NC80adis_H100_v5"),
    "H200": ("p5e.48xlarge", "p5en.48xlarge", "Standard_ND96isr_H200_v5", "a3-ultragpu-8g"),
    "B200": ("p6-b200.48xlarge", "a4-highgpu-8g"),
}
"""Machines of AWS, Azure and Google, for clusters whose machines say nothing else of their GPUs."""


_AWS_GPUS = {
    "g4dn.12xlarge": 4,
    "g4dn.metal": 8,
    **{
        f"{family}.{size}": 4 for family in ("g5", "g6", "g6e") for size in ("12xlarge", "24xlarge")
    },
    **{f"{family}.48xlarge": 8 for family in ("g5", "g6", "g6e")},
    "p3.8xlarge": 4,
    "p3.16xlarge": 8,
    "p3dn.24xlarge": 8,
    "p4d.24xlarge": 8,
    "p4de.24xlarge": 8,
    **{f"{family}.48xlarge": 8 for family in ("p5", "p5e", "p5en", "p6-b200")},
}
"""GPUs of machines of AWS that have more than one."""


def count_machine_gpus(machine: str) -> int | None:
    """Return how many GPUs a machine of AWS has by its type, None for those of others."""
    known = any(machine in machines for machines in _MACHINES.values())
    if not known or machine.startswith("Standard_") or "." not in machine:
        return None
    return _AWS_GPUS.get(machine, 1)


_ORDER = (PRODUCT, GKE, KARPENTER, INSTANCE_TYPE)
"""The first of these labels that a machine has says what it is."""


class GpuRule(NamedTuple):
    """Labels that say that a machine has a GPU type: values by key, and keys that it has not."""

    values: Mapping[str, Sequence[str]]
    absent: Sequence[str]


def list_rules(gpu: str, catalog: Catalog, names: Mapping[str, str]) -> tuple[GpuRule, ...]:
    """Return the labels that mean a GPU type, each rule enough by itself; none unless it is NVIDIA's.

    `names` are given by the cluster's owner: the catalog's name for a value of one of the labels.
    """
    kind = catalog.gpu(gpu)
    if re.fullmatch(r"\d+\.\d+", kind.compute_capability) is None:
        return ()
    # The product is the name that the driver gives, with hyphens for spaces; the catalog knows those.
    written = (alias.replace(" ", "-") for alias in (kind.name, *kind.aliases))
    known: dict[str, Sequence[str]] = {
        PRODUCT: [value for value in written if label_value(value) == value],
        GKE: _GKE_NAMES.get(kind.name, ()),
        KARPENTER: _KARPENTER_NAMES.get(kind.name, ("",))[:1],
        INSTANCE_TYPE: _MACHINES.get(kind.name, ()),
    }
    given = [value for value, name in names.items() if catalog.gpu(name).name == kind.name]
    rules = []
    for place, key in enumerate(_ORDER):
        values = sorted({*(value for value in known[key] if value and value not in names), *given})
        if values:
            needed: dict[str, Sequence[str]] = {key: values}
            memory = _KARPENTER_NAMES.get(kind.name, ("", None))[1] if key == KARPENTER else None
            if memory is not None and not given:
                needed[KARPENTER_MIB] = (memory,)
            rules.append(GpuRule(needed, _ORDER[:place]))
    return tuple(rules)


def find_gpu(labels: Mapping[str, str], catalog: Catalog, names: Mapping[str, str]) -> str | None:
    """Return the catalog's name of a machine's GPUs; None where they are shared, or of no known type."""
    if PARTITIONED in labels or any(labels.get(key) in values for key, values in SHARED):
        return None
    key = next((key for key in _ORDER if key in labels), None)
    return None if key is None else _find(key, labels, catalog, names)


def describe_gpu(labels: Mapping[str, str]) -> str:
    """Return what a machine says of its GPUs, for whoever asks why they are not offered."""
    if PARTITIONED in labels or any(labels.get(key) in values for key, values in SHARED):
        return "shared GPUs"
    return next((labels[key] for key in _ORDER if key in labels), "GPUs without a label")


def _find(
    key: str, labels: Mapping[str, str], catalog: Catalog, names: Mapping[str, str]
) -> str | None:
    value = labels[key]
    if value in names:
        return catalog.gpu(names[value]).name
    if key == PRODUCT:
        try:
            return catalog.gpu(value).name
        except UnknownNameError:
            return None
    if key == KARPENTER:
        memory = labels.get(KARPENTER_MIB)
        fitting = (
            gpu
            for gpu, (name, size) in _KARPENTER_NAMES.items()
            if name == value and size in (None, memory)
        )
        return next(fitting, None)
    table = _GKE_NAMES if key == GKE else _MACHINES
    return next((gpu for gpu, values in table.items() if value in values), None)
