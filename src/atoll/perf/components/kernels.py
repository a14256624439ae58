"""Layers that attend both ways, on one GPU of a tensor-parallel group: the rooflines of `perf.operators`.

Encoders and denoisers run all positions of a batch at once, with attention over whole segments (an image, a
tile, a window, 30 seconds of sound) and not only backwards: a segment of l positions has l^2 pairs of queries
and keys. They are launched kernel by kernel, so that a layer takes `eager_s` at least.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from atoll.catalog.dtypes import DType
from atoll.catalog.nodes import NodeType
from atoll.perf import operators
from atoll.perf.constants import ConstantTable, GpuConstants, OpClass, OpSpeed, default_constants
from atoll.perf.engines import EngineProfile
from atoll.perf.operators import AllReduce

EAGER_LAYER_S = 0.4e-3
"""Least time of a layer that is launched from PyTorch, as for the stage engine (`perf.engines`)."""
EAGER_PASSES = 26.0
"""Activations, in hidden sizes, that kernels between the products of such a layer read and write for a
position when nothing is fused: two norms, copies of queries, keys and values, what turns or normalises them,
two scalings and two sums. The MLP's activation comes on top. Counted from a plain vision transformer."""
EAGER_SHARE = 0.5
"""Share of the rate of streaming kernels that such ones reach: on an H200 they moved 1.6 to 1.9 TB/s."""
EAGER_LAUNCHES = 14.0
"""Launches of such kernels in a layer."""
MODULATION_PASSES = 14.0
"""The same for scaling, shifting and gating by vectors, in layers that are told the step of denoising."""
DUAL_LAYER_S = 2.3e-3
"""Least time of a block with two streams launched from PyTorch: blocks of 1,524 and 2,024 positions both took
that long on the host of an H200."""
CONV_SHARE = 0.4
"""Share of the rate of matrix products that convolutions of decoders reach: 0.25 to 0.58 on an H200, 0.39
over a whole decoder of pixels."""
ALIGNED = 8
UNALIGNED_SLOWER = 3.2
"""How much longer products take on Hopper whose sizes are no multiples of `ALIGNED`: 220 against 696 TFLOP/s
on an H200 for a depth of 3420 and 3456. Older GPUs lose less, how much was not measured."""


@dataclass(frozen=True)
class Kernels:
    """Operators of layers split over `tp` GPUs of a node."""

    node: NodeType
    tp: int
    constants: GpuConstants
    engine: EngineProfile
    table: ConstantTable | None = None

    @classmethod
    def of(
        cls, node: NodeType, tp: int, engine: EngineProfile, constants: ConstantTable | None
    ) -> Kernels:
        """Return the operators on the GPUs of a node, at the clocks that an engine's load leaves them."""
        table = constants if constants is not None else default_constants()
        fitted = table.for_gpu(node.gpu)
        found = fitted.under_load() if engine.keeps_busy else fitted
        return cls(node, tp, found, engine, constants)

    def _speed(self, op: OpClass) -> OpSpeed:
        gpu = self.node.gpu
        return self.constants.op(op).speed(gpu.fp16_flops, gpu.bandwidth_bytes_per_s)

    @cached_property
    def _products(self) -> OpSpeed:
        return self._speed(OpClass.GEMM)

    @cached_property
    def provenance(self) -> str:
        """What the times rest on, the weakest ground first."""
        used = (OpClass.GEMM, OpClass.ATTENTION_PREFILL, OpClass.ELEMENTWISE)
        return self.constants.summary(used)

    def product(self, rows: float, n: float, k: float, dtype: DType) -> float:
        """Return seconds of a (rows, k) x (k, n) product on one GPU, its weights in `dtype`."""
        c, speed = self.constants.op(OpClass.GEMM), self._products
        strict = self.node.gpu.architecture.lower().startswith(("hopper", "blackwell"))
        if strict and (k % ALIGNED or n % ALIGNED):
            speed = replace(speed, e_f=speed.e_f / UNALIGNED_SLOWER)
        op = operators.gemm(
            n,
            k,
            speed,
            weight_bytes=dtype.bytes_per_weight,
            pad_k=c.pad_k,
            pad_n=c.pad_n,
        )
        return op.seconds(rows)

    def attention(self, rows: float, segment: float, heads: int, head_dim: float) -> float:
        """Return seconds of attention of `rows` positions, each over the `segment` positions around it."""
        share = math.ceil(heads / self.tp)
        op = operators.prefill_attention(
            share,
            share,
            head_dim,
            self._speed(OpClass.ATTENTION_PREFILL),
            kv_bytes=operators.ACTIVATION_BYTES,
            serial_ns=self.constants.op(OpClass.ATTENTION_PREFILL).serial_ns,
        )
        reach = min(rows, segment)
        return op.seconds(rows * reach, rows, rows, reach)

    def passes(self, rows: float, elements: float, launches: float = 1.0) -> float:
        """Return seconds of so many kernels that pass over `elements` activations of each row in all."""
        op = operators.elementwise(elements, self._speed(OpClass.ELEMENTWISE))
        return op.row_s * rows / EAGER_SHARE + launches * op.t0_s

    def all_reduces(self, rows: float, hidden: int) -> float:
        """Return seconds of the two sums over GPUs of a layer; 0 where it is not split."""
        if self.tp == 1:
            return 0.0
        cost = self.node.interconnect.allreduce_for(self.tp)
        op: AllReduce | None = operators.all_reduce(
            self.tp,
            hidden,
            alpha_us=cost.alpha_us,
            bus_bytes_per_s=cost.bus_bandwidth_bytes_per_s,
            p=cost.p,
        )
        return 0.0 if op is None else 2.0 * op.seconds(rows)

    def layer(
        self,
        rows: float,
        segment: float,
        *,
        hidden: int,
        inner: int,
        heads: int,
        head_dim: float,
        gated: bool,
        dtype: DType,
    ) -> float:
        """Return seconds of one layer: norm, QKV, attention, output, norm, MLP, and sums over GPUs."""
        share = math.ceil(heads / self.tp) * head_dim
        wide = math.ceil(inner / self.tp)
        ups = 2 if gated else 1
        total = self.product(rows, 3.0 * share, hidden, dtype)
        total += self.attention(rows, segment, heads, head_dim)
        total += self.product(rows, hidden, share, dtype)
        total += self.product(rows, ups * wide, hidden, dtype)
        total += self.product(rows, hidden, wide, dtype)
        between = EAGER_PASSES * hidden + (5.0 if gated else 2.0) * wide
        total += self.passes(rows, between, EAGER_LAUNCHES)
        return total + self.all_reduces(rows, hidden)

    def convolutions(self, flops: float) -> float:
        """Return seconds of convolutions, all on one GPU or split evenly."""
        return flops / (self._products.flop_per_s * CONV_SHARE * self.tp)
