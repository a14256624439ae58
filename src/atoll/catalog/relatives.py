"""Relatives: the GPU types of the catalog that are most like one it does not have."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import cast

from atoll.catalog.gpus import GpuType
from atoll.catalog.name_lookup import fold
from atoll.catalog.resources import data_yaml, section

MAKERS = ("nvidia", "tesla", "geforce", "quadro", "amd", "instinct", "apple")
_SHOWN = 2
_METAL_SHARE = 0.75
"""Share of a Mac's memory that its GPU may have."""
# Architectures by age, for each maker.
_GENERATIONS = (
    (("Pascal",), ("Volta",), ("Turing",), ("Ampere",), ("Ada", "Hopper"), ("Blackwell",)),
    (("CDNA",), ("CDNA2",), ("CDNA3",), ("CDNA4",)),
    (("Apple",),),
)
_STEM = re.compile(r"([a-z]+)[\s_-]?(\d+)")
_SIZE = re.compile(r"[\s_-](\d{1,3})\s?(?:gb?)?$|(?<=\D)(\d{1,3})gb$")


@dataclass(frozen=True, slots=True)
class Relatives:
    """Up to two known GPU types nearest to a part, and its memory in bytes where its name says it."""

    gpus: tuple[GpuType, ...]
    memory_bytes: float | None


def find_relatives(
    name: str, gpus: Mapping[str, GpuType], memory_bytes: float | None = None
) -> Relatives:
    """Return the types nearest to a part that is not known, by generation and memory.

    Both follow from its name; memory that is given counts more. None where the name tells no generation.
    """
    plain = " ".join(word for word in name.lower().split() if word not in MAKERS)
    size = _SIZE.search(plain)
    architecture, sold_gb = _unlisted().get(fold(plain), (None, None))
    if architecture is None and size is not None:
        architecture, _ = _unlisted().get(fold(plain[: size.start()]), (None, None))
    if size is not None:
        sold_gb = float(size[1] or size[2])
    kin = [gpu for gpu in gpus.values() if _stem(gpu.name) == _stem(plain) is not None]
    architecture = architecture or (kin[0].architecture if kin else None)
    memory = memory_bytes
    if memory is None and sold_gb is not None:
        memory = sold_gb * 2**30 * (_METAL_SHARE if architecture == "Apple" else 1.0)
    if architecture is None or memory is None:
        return Relatives(tuple(kin[:_SHOWN]), memory)

    def distance(gpu: GpuType) -> float:
        return _generations_between(architecture, gpu.architecture) + abs(
            math.log2(gpu.memory_bytes / memory)
        )

    near = sorted((gpu for gpu in gpus.values() if distance(gpu) < math.inf), key=distance)
    return Relatives(tuple(near[:_SHOWN]), memory)


@cache
def _unlisted() -> dict[str, tuple[str, float]]:
    """Architecture and memory in GB of known parts that are not in the catalog, by folded name."""
    rows = cast("dict[str, list[object]]", section(data_yaml("gpus.yaml"), "unlisted"))
    return {fold(name): (str(row[0]), float(str(row[1]))) for name, row in rows.items()}


def _stem(name: str) -> str | None:
    """Letters and number that a name begins with: v100 of V100-SXM2, rtx3070 of RTX 3070 Ti."""
    match = _STEM.match(name.lower())
    return None if match is None else match[1] + match[2]


def _generations_between(a: str, b: str) -> float:
    """How many generations lie between two architectures; infinity between makers."""
    for ages in _GENERATIONS:
        found = [i for name in (a, b) for i, names in enumerate(ages) if name in names]
        if len(found) == len((a, b)):
            return abs(found[0] - found[1])
    return math.inf
