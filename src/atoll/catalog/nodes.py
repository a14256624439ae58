"""Node types: one machine with some GPUs of one type and what joins them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal, cast

from atoll.catalog.facts import Confidence, Fact
from atoll.catalog.frozenmap import FrozenMap
from atoll.catalog.gpus import GpuType
from atoll.catalog.resources import Table, data_yaml, section
from atoll.core.errors import InputError
from atoll.core.ids import format_node_type

InterconnectKind = Literal["nvlink", "xgmi", "pcie", "none"]


@dataclass(frozen=True, slots=True)
class AllReduceCost:
    """Cost of an all-reduce among n GPUs: `(alpha^p + (2(n-1)/n * bytes / bus_bandwidth)^p)^(1/p)`.

    p = 1 adds the two; below 1 it covers the sizes where neither latency nor bandwidth rules.
    """

    alpha_us: float
    bus_bandwidth_bytes_per_s: float
    p: float = 1.0

    def time_s(self, size_bytes: float, gpus: int) -> float:
        """Seconds to all-reduce `size_bytes` bytes among `gpus` GPUs."""
        wire = 2.0 * (gpus - 1) / gpus * size_bytes / self.bus_bandwidth_bytes_per_s
        total: float = ((self.alpha_us * 1e-6) ** self.p + wire**self.p) ** (1.0 / self.p)
        return total


@dataclass(frozen=True, slots=True)
class Interconnect:
    """Interconnect between the GPUs of one node; `allreduce` maps a GPU count to its cost.

    `p2p_*` is one GPU sending to another, one direction; None where the node has one GPU.
    """

    kind: InterconnectKind
    generation: int | None
    allreduce: Mapping[int, AllReduceCost] = field(default_factory=FrozenMap)
    name: str = "custom"
    p2p_bandwidth_bytes_per_s: float | None = None
    p2p_latency_s: float | None = None
    facts: Mapping[str, Fact] = field(default_factory=FrozenMap, compare=False, repr=False)

    def __post_init__(self) -> None:
        # A plain dict would make the node type unhashable.
        object.__setattr__(self, "allreduce", FrozenMap(self.allreduce))

    def allreduce_for(self, gpus: int) -> AllReduceCost:
        """The cost among `gpus` GPUs, of the count `measured_count` says."""
        entry = self.allreduce.get(gpus)
        return entry if entry is not None else self.allreduce[self.measured_count(gpus)]

    def measured_count(self, gpus: int) -> int:
        """The count whose cost stands for `gpus` GPUs: itself, the next larger, or the largest.

        A count between the measured ones is thereby taken to be as slow as the larger group.
        """
        if not self.allreduce:
            raise InputError(
                f"no all-reduce among {gpus} GPUs is known",
                field=f"interconnects.{self.name}.allreduce",
                hint="give its alpha_us and bus_bandwidth in an overlay",
            )
        return min((n for n in self.allreduce if n >= gpus), default=max(self.allreduce))


@dataclass(frozen=True, slots=True)
class NodeType:
    """One machine with `count` GPUs of one type, tensor-parallel inside; written "L40S:2"."""

    gpu: GpuType
    count: int
    interconnect: Interconnect
    id: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", format_node_type(self.gpu.name, self.count))

    def with_all_reduce(self, gpus: int, cost: AllReduceCost) -> NodeType:
        """The same node with another all-reduce cost among `gpus` of its GPUs."""
        costs = {**self.interconnect.allreduce, gpus: cost}
        return replace(self, interconnect=replace(self.interconnect, allreduce=costs))

    @property
    def memory_bytes(self) -> int:
        """GPU memory of the whole node in bytes."""
        return self.gpu.memory_bytes * self.count

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Memory bandwidth of all GPUs together in bytes/s."""
        return self.gpu.bandwidth_bytes_per_s * self.count

    @property
    def fp16_tflops(self) -> float:
        """Dense FP16 TFLOPS of all GPUs together."""
        return self.gpu.fp16_tflops * self.count

    @property
    def fp8_tflops(self) -> float | None:
        """Dense FP8 TFLOPS of all GPUs together, None without FP8."""
        return None if self.gpu.fp8_tflops is None else self.gpu.fp8_tflops * self.count

    @property
    def fp4_tflops(self) -> float | None:
        """Dense FP4 TFLOPS of all GPUs together, None without FP4."""
        return None if self.gpu.fp4_tflops is None else self.gpu.fp4_tflops * self.count

    @property
    def tdp_w(self) -> float:
        """Power of all GPUs together in watts."""
        return self.gpu.tdp_w * self.count


@dataclass(frozen=True, slots=True)
class NodeRule:
    """Which counts of a GPU type exist by default, and what joins two and more."""

    counts: tuple[int, ...]
    interconnect: str


@cache
def default_interconnects() -> FrozenMap[str, Interconnect]:
    """The interconnects that ship with Atoll, by name."""
    entries = section(data_yaml("interconnects.yaml"), "interconnects")
    return FrozenMap({name: _interconnect(name, section(entries, name)) for name in entries})


@cache
def default_node_rules() -> FrozenMap[str, NodeRule]:
    """Per GPU type, the node sizes that exist by default."""
    rules = section(data_yaml("nodes.yaml"), "nodes")
    out: dict[str, NodeRule] = {}
    for gpu in rules:
        rule = section(rules, gpu)
        counts = tuple(cast("list[int]", rule["counts"]))
        out[gpu] = NodeRule(counts, str(rule["interconnect"]))
    return FrozenMap(out)


def _interconnect(name: str, entry: Table) -> Interconnect:
    costs: dict[int, AllReduceCost] = {}
    facts: dict[str, Fact] = {}
    table = cast("dict[int, Table]", entry.get("allreduce") or {})
    for count, row in table.items():
        alpha_us, bus_gbs = cast(float, row["alpha_us"]), cast(float, row["bus_gbs"])
        p = float(cast(float, row.get("p", 1.0)))
        costs[count] = AllReduceCost(float(alpha_us), bus_gbs * 1e9, p)
        source, confidence = str(row["source"]), cast(Confidence, row["confidence"])
        facts[f"allreduce.{count}.alpha_us"] = Fact(alpha_us, source, confidence)
        facts[f"allreduce.{count}.bus_bandwidth_bytes_per_s"] = Fact(
            bus_gbs * 1e9, source, confidence
        )
        facts[f"allreduce.{count}.p"] = Fact(p, source, confidence)
    p2p_gbs = cast("float | None", entry.get("p2p_gbs"))
    p2p_us = cast("float | None", entry.get("p2p_us"))
    for key, value in (("p2p_bandwidth_bytes_per_s", p2p_gbs), ("p2p_latency_s", p2p_us)):
        if value is not None:
            scaled = value * (1e9 if key == "p2p_bandwidth_bytes_per_s" else 1e-6)
            facts[key] = Fact(scaled, str(entry["p2p_source"]), "low")
    return Interconnect(
        name=name,
        kind=cast(InterconnectKind, entry["kind"]),
        generation=cast("int | None", entry.get("generation")),
        allreduce=FrozenMap(costs),
        p2p_bandwidth_bytes_per_s=None if p2p_gbs is None else p2p_gbs * 1e9,
        p2p_latency_s=None if p2p_us is None else p2p_us * 1e-6,
        facts=FrozenMap(facts),
    )
