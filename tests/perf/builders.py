"""Small inputs with round numbers, so that a test can say what it expects by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from atoll.catalog.catalog import Catalog
from atoll.catalog.gpus import GpuType
from atoll.catalog.nodes import AllReduceCost, Interconnect, NodeType
from atoll.catalog.transformer import MoeSpec, TransformerSpec
from atoll.perf.constants import ConstantTable, GpuConstants, OpClass, OpConstants, Tag
from atoll.perf.measurements import SCHEMAS, Points

PEAK = 100e12
BANDWIDTH = 1e12


def spec(**changes: object) -> TransformerSpec:
    """A dense transformer of six layers, small enough to count by hand."""
    values: dict[str, object] = {
        "layers": 6,
        "hidden": 512,
        "heads": 8,
        "kv_heads": 2,
        "head_dim": 64,
        "intermediate": 1024,
        "vocab": 4000,
        "max_context": 8192,
    } | changes
    return TransformerSpec(**values)  # type: ignore[arg-type]


def mixture(**changes: object) -> TransformerSpec:
    """The same with experts in all layers but the first two."""
    moe = MoeSpec(
        experts=16,
        top_k=2,
        intermediate=256,
        shared_intermediate=128,
        dense_layers=frozenset({0, 1}),
    )
    return spec(**({"moe": moe} | changes))


def hybrid(windows: Sequence[int | None] = (128, 128, None, 128, None, None)) -> TransformerSpec:
    """Some layers look back a little, some all the way."""
    return spec(layers=len(windows), windows=tuple(windows))


def model(name: str) -> TransformerSpec:
    """The llm of a catalog model."""
    return Catalog.default().model(name).llm


def node_type(name: str) -> NodeType:
    """A node type of the catalog."""
    return Catalog.default().node(name)


def gpu(**changes: object) -> GpuType:
    """A GPU called TEST: 100 TFLOPS, 1 TB/s, 24 GB, no FP8."""
    base = GpuType(
        name="TEST",
        aliases=(),
        architecture="test",
        compute_capability="0.0",
        fp16_tflops=PEAK / 1e12,
        fp8_tflops=None,
        bf16=True,
        memory_bytes=24 * 10**9,
        bandwidth_bytes_per_s=BANDWIDTH,
        tdp_w=100.0,
        sms=100,
        l2_bytes=40 * 2**20,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def node(
    count: int = 1,
    *,
    alpha_us: float = 5.0,
    bus_bytes_per_s: float = 100e9,
    p: float = 1.0,
    **changes: object,
) -> NodeType:
    """A node of TEST GPUs whose all-reduce costs the same among any number of them."""
    cost = AllReduceCost(alpha_us, bus_bytes_per_s, p)
    joint = Interconnect("nvlink", 4, dict.fromkeys((2, 3, 4, 8, 16), cost))
    return NodeType(gpu(**changes), count, joint)


def constants(ops: Mapping[OpClass, OpConstants] | None = None) -> ConstantTable:
    """Constants of TEST; what is not given adds both limits at full speed, without launch time."""
    ideal = OpConstants(tag=Tag.MEASURED, source="a test")
    return ConstantTable([GpuConstants("TEST", dict.fromkeys(OpClass, ideal) | dict(ops or {}))])


def points(
    kind: str,
    sizes: Mapping[str, Sequence[float] | np.ndarray[tuple[int], np.dtype[np.float64]]],
    labels: Mapping[str, str | Sequence[str]],
    *,
    group: str = "TEST",
) -> Points:
    """Points of one kind of measurement, their times still 1 s each."""
    schema = next(s for s in SCHEMAS if s.kind == kind)
    columns = {name: np.asarray(sizes[name], dtype=np.float64) for name in schema.sizes}
    count = len(columns[schema.sizes[0]])
    texts = {
        name: np.array([value] * count if isinstance(value, str) else list(value), dtype=np.str_)
        for name, value in labels.items()
    }
    return Points(schema, np.array([group] * count), columns, texts, np.ones(count))


def timed(measured: Points, seconds: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Points:
    """The same points with these times."""
    return replace(measured, seconds=np.asarray(seconds, dtype=np.float64))
