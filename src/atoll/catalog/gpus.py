"""GPU types: what one GPU of a kind can compute, hold and move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING

from atoll.catalog.facts import Fact
from atoll.catalog.frozenmap import FrozenMap
from atoll.catalog.resources import Table, data_yaml, fact_of, section
from atoll.core.errors import InputError

if TYPE_CHECKING:
    from atoll.catalog.measured_servers import MeasuredServer
    from atoll.catalog.overlay_schema import OperatorEntry

GB = 1_000_000_000
MIB = 1 << 20

# Field in the data file -> (attribute, how many base units one unit of the file is).
_SCALED = {
    "memory_mib": ("memory_bytes", MIB),
    "bandwidth_gbs": ("bandwidth_bytes_per_s", GB),
    "nvlink_gbs": ("nvlink_bytes_per_s", GB),
    "pcie_gbs": ("pcie_bytes_per_s", GB),
    "l2_mib": ("l2_bytes", MIB),
}


SWITCHING_LOSS = 0.08
"""Share of a GPU's time that is lost while several processes take turns on it: at this, the simulator says
what clients of two servers on one H200 saw (`benchmarks.gpu_promise`, case 3b-shared)."""
_SPEEDS = ("fp16_tflops", "fp8_tflops", "fp4_tflops", "bandwidth_bytes_per_s")
"""Rates that the shares of a GPU have together, less what switching between them takes."""
_DIVIDED = ("tdp_w", "nvlink_bytes_per_s", "pcie_bytes_per_s")
"""Rates that the shares of a GPU have together."""


def slowdown(shares: int) -> float:
    """Return how many times as long a GPU takes for a process while `shares` of them take turns on it."""
    return 1.0 if shares == 1 else shares / (1.0 - SWITCHING_LOSS)


@dataclass(frozen=True, slots=True)
class GpuType:
    """One kind of GPU. TFLOPS are dense with FP32 accumulation; links count one direction.

    `fp8_tflops` and `fp4_tflops` are None where the hardware has no tensor cores for the format,
    `nvlink_bytes_per_s` where it has no NVLink. `like` names the GPU type whose performance constants stand
    in, or that an overlay derived this one from; `compute_share` is how much smaller a share of its peak it
    reaches than that one. `note` is for whoever plans with it: engines that run on it, memory that is shared.
    `facts` holds, for every field, where the number comes from. `part_of` is the GPU that this is one of
    `shares` equal shares of: processes take turns on it, each with its part of the memory. `servers` were
    measured on GPUs of the kind, by an overlay; of those of one model the last counts. `operators` are an
    overlay's constants of classes of operators, in place of those that ship.
    """

    name: str
    aliases: tuple[str, ...]
    architecture: str
    compute_capability: str
    fp16_tflops: float
    fp8_tflops: float | None
    bf16: bool
    memory_bytes: int
    bandwidth_bytes_per_s: float
    tdp_w: float
    sms: int
    l2_bytes: int
    facts: Mapping[str, Fact] = field(default_factory=FrozenMap, compare=False, repr=False)
    nvlink_bytes_per_s: float | None = None
    pcie_bytes_per_s: float | None = None
    fp4_tflops: float | None = None
    compute_share: float = 1.0
    like: str | None = field(default=None, compare=False)
    note: str | None = field(default=None, compare=False)
    part_of: GpuType | None = field(default=None, repr=False)
    shares: int = 1
    servers: tuple[MeasuredServer, ...] = ()
    operators: Mapping[str, OperatorEntry] = field(default_factory=FrozenMap)

    @property
    def whole(self) -> GpuType:
        """The GPU that is there: itself, or the one that this is a share of."""
        return self if self.part_of is None else self.part_of

    def in_shares(self, shares: int) -> GpuType:
        """Return one of `shares` equal shares: of memory for good, of all else while all are busy.

        What the GPU can run, and how its kernels come about, is as it is.
        """
        if "MIG" in self.name.upper():
            raise InputError(
                f"{self.name} is a part of a GPU already",
                hint="offer MIG slices as they are, whole",
            )
        by = dict.fromkeys((*_DIVIDED, "memory_bytes"), float(shares))
        by |= dict.fromkeys(_SPEEDS, slowdown(shares))
        divided = {
            name: value / by[name]
            for name in (*_SPEEDS, *_DIVIDED)
            if (value := getattr(self, name)) is not None
        }
        facts = {
            name: Fact(
                fact.value / by[name], f"1/{by[name]:.3g} of: {fact.source}", fact.confidence
            )
            if name in by and isinstance(fact.value, int | float)
            else fact
            for name, fact in self.facts.items()
        }
        return replace(
            self,
            name=f"{self.name}/{shares}",
            aliases=(),
            memory_bytes=self.memory_bytes // shares,
            facts=FrozenMap(facts),
            part_of=self,
            shares=shares,
            servers=(),
            **divided,
        )

    @property
    def fp16_flops(self) -> float:
        """Dense FP16/BF16 rate in flop/s."""
        return self.fp16_tflops * 1e12

    @property
    def fp8_flops(self) -> float | None:
        """Dense FP8 rate in flop/s, None without FP8 tensor cores."""
        return None if self.fp8_tflops is None else self.fp8_tflops * 1e12

    @property
    def fp4_flops(self) -> float | None:
        """Dense FP4 rate in flop/s, None without FP4 tensor cores."""
        return None if self.fp4_tflops is None else self.fp4_tflops * 1e12


@cache
def default_gpus() -> FrozenMap[str, GpuType]:
    """The GPU types that ship with Atoll, by canonical name."""
    data = data_yaml("gpus.yaml")
    sources = section(data, "sources")
    gpus = section(data, "gpus")
    return FrozenMap({name: _gpu(name, section(gpus, name), sources) for name in gpus})


def _gpu(name: str, entry: Table, sources: Table) -> GpuType:
    facts: dict[str, Fact] = {}
    for key, value in entry.items():
        if key in ("aliases", "like", "note"):
            continue
        fact = fact_of(value, sources)
        attribute, scale = _SCALED.get(key, (key, 1))
        if attribute != key:
            assert isinstance(fact.value, int | float)
            fact = Fact(fact.value * scale, fact.source, fact.confidence)
        facts[attribute] = fact
    aliases = entry.get("aliases", [])
    assert isinstance(aliases, list)

    def number(key: str) -> float:
        value = facts[key].value
        assert isinstance(value, int | float), (name, key)
        return float(value)

    def optional(key: str) -> float | None:
        return number(key) if key in facts else None

    return GpuType(
        name=name,
        aliases=tuple(str(alias) for alias in aliases),
        architecture=str(facts["architecture"].value),
        compute_capability=str(facts["compute_capability"].value),
        fp16_tflops=number("fp16_tflops"),
        fp8_tflops=optional("fp8_tflops"),
        fp4_tflops=optional("fp4_tflops"),
        bf16=bool(facts["bf16"].value),
        memory_bytes=int(number("memory_bytes")),
        bandwidth_bytes_per_s=number("bandwidth_bytes_per_s"),
        tdp_w=number("tdp_w"),
        sms=int(number("sms")),
        l2_bytes=int(number("l2_bytes")),
        nvlink_bytes_per_s=optional("nvlink_bytes_per_s"),
        pcie_bytes_per_s=optional("pcie_bytes_per_s"),
        facts=FrozenMap(facts),
        compute_share=number("compute_share") if "compute_share" in facts else 1.0,
        like=_text(entry, "like"),
        note=_text(entry, "note"),
    )


def _text(entry: Table, key: str) -> str | None:
    value = entry.get(key)
    return None if value is None else str(value)
