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
from atoll.engines.profile import EngineProfile
from atoll.perf import operators
from atoll.perf.constants import ConstantTable, GpuConstants, OpClass, OpSpeed, default_constants
from atoll.perf.operators import AllReduce

LAUNCH_S = 18e-6
"""Host time of a kernel launched from PyTorch modules: 16 to 20 us beside an H200 where nothing else ran."""
PLAIN_PASSES = 10.0
PLAIN_LAUNCHES = 5.0
"""Activations, in hidden sizes, that kernels between the products of a plain layer read and write for a
position, and how many such kernels there are: two norms, two sums, and the MLP's activation, whose width
comes on top."""
SMALL_PASSES = 4.0
SMALL_LAUNCHES = 2.0
"""Passes and launches that norms of queries and keys add, and those of two scaled branches."""
ROTARY_PASSES = 28.0
ROTARY_LAUNCHES = 6.0
"""Passes and launches of rotary embeddings: 14 hidden sizes, at half the rate since halves lie apart."""
BLOCK_PASSES = 54.0
BLOCK_LAUNCHES = 24.0
"""The same of a denoiser's block: norms that are scaled, shifted and gated one by one, turns in fp32, norms
of queries and keys, streams joined."""
DECODER_S = 0.4e-3
"""Least time of a decoder of pixels."""
EXPONENTIAL_FLOPS = {"ampere": 128.0, "ada": 64.0, "hopper": 256.0, "blackwell": 512.0}
"""Operations of matrix products that a GPU does in the time of one exponential."""
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
        """Sources of the times, the weakest first."""
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
        speed = self._speed(OpClass.ATTENTION_PREFILL)
        # Constants are of heads of 128. A pair costs products by its width, but one exponential.
        ratio = EXPONENTIAL_FLOPS.get(self.node.gpu.architecture.lower().split()[0], 0.0)
        fixed = min(1.0, ratio * speed.e_f / (4.0 * 128.0))
        if head_dim < 128.0:
            speed = replace(speed, e_f=speed.e_f / ((1.0 - fixed) + fixed * 128.0 / head_dim))
        op = operators.prefill_attention(
            share,
            share,
            head_dim,
            speed,
            kv_bytes=operators.ACTIVATION_BYTES,
            serial_ns=self.constants.op(OpClass.ATTENTION_PREFILL).serial_ns,
        )
        reach = min(rows, segment)
        return op.seconds(rows * reach, rows, rows, reach)

    def passes(self, rows: float, elements: float, launches: float = 1.0) -> float:
        """Return seconds of so many kernels that pass over `elements` activations of each row in all."""
        op = operators.elementwise(elements, self._speed(OpClass.ELEMENTWISE))
        return op.row_s * rows + launches * op.t0_s

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
        qk_norm: bool = False,
        scaled: bool = False,
        rotary: bool = False,
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
        small = float(qk_norm) + float(scaled)
        between = PLAIN_PASSES + SMALL_PASSES * small + ROTARY_PASSES * rotary
        launches = PLAIN_LAUNCHES + SMALL_LAUNCHES * small + ROTARY_LAUNCHES * rotary
        total += self.passes(rows, between * hidden + (5.0 if gated else 2.0) * wide, launches)
        return max(total + self.all_reduces(rows, hidden), (5.0 + launches) * LAUNCH_S)

    def convolutions(self, flops: float) -> float:
        """Return seconds of convolutions, all on one GPU or split evenly."""
        return flops / (self._products.flop_per_s * CONV_SHARE * self.tp)
