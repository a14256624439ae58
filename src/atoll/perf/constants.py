"""Fitted constants of every operator class on every GPU, and how far each can be trusted.

The numbers live in `data/constants.yaml`, written by `tools/fit_constants.py` and never by hand.
A set of constants is tagged

    measured      fitted to measurements of single operators on this very GPU
    layer-fitted  fitted to measured whole layers on this very GPU
    proxy         taken over from another GPU, named in `source`

and every report that rests on a prediction shows the tag.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.catalog.frozenmap import FrozenMap
from atoll.catalog.gpus import slowdown
from atoll.catalog.overlay_schema import OperatorEntry
from atoll.core.errors import UnknownNameError
from atoll.core.files import load_yaml
from atoll.core.rng import stream

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np

    from atoll.catalog.dtypes import DType
    from atoll.catalog.gpus import GpuType
    from atoll.catalog.measured_servers import MeasuredServer
    from atoll.engines.profile import KernelRatios, KernelSpeeds


PROXY_ERROR = 0.25
"""Relative standard deviation of times that rest on another GPU's constants: taking them over was found to be
9 to 16 per cent off on matrix products, and up to 47 on power-limited cards."""
SERVER_ERROR = 0.2
"""Relative standard deviation of what all steps of a server share: kernels that were chosen, clocks, what a
version does otherwise. With this, at least 90 % of the measured servers of three engines are inside the
stated 90 %; vLLM's servers alone would ask for 0.24 (`benchmarks.error_bars`)."""
FIRST_TOKEN_ERROR = 0.5
"""The same of times to the first token, beside what steps explain: schedulers, fronts and bursts differ.
TensorRT-LLM and vLLM would do with 0.3, SGLang asks for 0.7 (`benchmarks.error_bars`)."""
HOST_ERROR = 0.5
"""The same of an engine's host time, of what it takes beside steps, and of launches: hosts differ."""
LINK_ERROR = 0.25
"""The same of sums over the GPUs of a node: NVLink is within 8 %, hosts with PCIe differ by several times."""
UNSTATED_ERROR = 0.1
"""The same for constants fitted on the GPU itself by a file that does not say it."""


class Tag(StrEnum):
    """How the constants of a GPU came about, best first."""

    MEASURED = "measured"
    LAYER_FITTED = "layer-fitted"
    PROXY = "proxy"


_RANK = {Tag.MEASURED: 0, Tag.LAYER_FITTED: 1, Tag.PROXY: 2}


class OpClass(StrEnum):
    """Operators that share one set of constants on a GPU."""

    GEMM = "gemm"
    GEMM_FP8 = "gemm_fp8"
    GEMM_FP4 = "gemm_fp4"
    ATTENTION_PREFILL = "attention_prefill"
    ATTENTION_DECODE = "attention_decode"
    EXPERTS = "experts"
    EXPERTS_FP8 = "experts_fp8"
    EXPERTS_FP4 = "experts_fp4"
    EXPERTS_INT4 = "experts_int4"
    ELEMENTWISE = "elementwise"


PRODUCTS = (OpClass.GEMM, OpClass.GEMM_FP8, OpClass.GEMM_FP4)
EXPERT_CLASSES = (
    OpClass.EXPERTS,
    OpClass.EXPERTS_FP8,
    OpClass.EXPERTS_FP4,
    OpClass.EXPERTS_INT4,
)
_FP4 = (OpClass.GEMM_FP4, OpClass.EXPERTS_FP4)


def peak_flops(op: OpClass, gpu: GpuType) -> float:
    """Return the FLOP/s of the cores that run a class, those for 16 bits where there are no narrower ones."""
    narrow = None
    if op in (OpClass.GEMM_FP8, OpClass.EXPERTS_FP8):
        narrow = gpu.fp8_flops
    elif op in _FP4:
        narrow = gpu.fp4_flops
    return narrow or gpu.fp16_flops


def product_class(dtype: str, gpu: GpuType) -> OpClass:
    """Return the class of products with weights of a format.

    FP8 and NVFP4 are native where the GPU has cores for them. Other quantised weights are emulated: read at
    their size and multiplied in 16 bits.
    """
    if dtype == "fp8" and gpu.fp8_flops is not None:
        return OpClass.GEMM_FP8
    return OpClass.GEMM_FP4 if dtype == "nvfp4" and gpu.fp4_flops is not None else OpClass.GEMM


def expert_class(dtype: DType, gpu: GpuType) -> OpClass:
    """Return the class of experts with weights of a format; below 8 bits they have kernels of their own."""
    kind = product_class(dtype.name, gpu)
    if kind is OpClass.GEMM:
        return OpClass.EXPERTS_INT4 if dtype.bits_per_weight < 8 else OpClass.EXPERTS
    return OpClass.EXPERTS_FP8 if kind is OpClass.GEMM_FP8 else OpClass.EXPERTS_FP4


@dataclass(frozen=True, slots=True)
class OpSpeed:
    """Speed that operators of a class reach on a GPU, in the notation of `operators`."""

    peak: float
    bandwidth: float
    e_f: float = 1.0
    e_b: float = 1.0
    t0_s: float = 0.0
    p: float = 1.0

    @property
    def flop_per_s(self) -> float:
        """The rate of arithmetic that is reached."""
        return self.peak * self.e_f

    @property
    def bytes_per_s(self) -> float:
        """The rate of memory that is reached."""
        return self.bandwidth * self.e_b


@dataclass(frozen=True, slots=True)
class OpConstants:
    """Constants of one operator class on one GPU; see `operators` for what each one does.

    `hot_bytes` and `hot_gain` describe the rig that measured them, not the GPU in service: below
    that many bytes its repeated runs found their operands in the L2 cache and ran `hot_gain`
    times faster. Serving walks through many layers, so predictions never use them; comparisons
    with the rig's own figures do.

    `sustained` is the share of `e_f` that is left under load that lasts, where the constants were measured in
    bursts of a single operator: the GPU lowers its clocks to stay within its power limit, and experts are
    chosen unevenly. `sustained_b` is that of `e_b`. Steps of an engine are such load.

    `error` is how far predicted times may be off, as a relative standard deviation: the spread of what was
    measured about the fit, and much more where the constants are another GPU's (`PROXY_ERROR`).
    """

    e_f: float = 1.0
    e_b: float = 1.0
    t0_us: float = 0.0
    p: float = 1.0
    pad: float = 0.0
    pad_k: float = 0.0
    pad_n: float = 0.0
    serial_ns: float = 0.0
    hot_bytes: float = 0.0
    hot_gain: float = 1.0
    kv8: float = 1.0
    kv8_t0: float = 1.0
    sustained: float = 1.0
    sustained_b: float = 1.0
    error: float = PROXY_ERROR
    tag: Tag = Tag.PROXY
    source: str = ""

    @property
    def t0_s(self) -> float:
        """Launch and ramp-up time in seconds."""
        return self.t0_us * 1e-6

    def speed(self, peak: float, bandwidth: float) -> OpSpeed:
        """Return what operators of the class reach where the GPU has so many FLOP/s and bytes/s."""
        return OpSpeed(peak, bandwidth, self.e_f, self.e_b, self.t0_s, self.p)

    def scale_time(self, factor: float) -> OpConstants:
        """Return the constants with which the operator takes `factor` times as long, whatever its size."""
        return self.scale_times(factor, factor)

    def scale_times(self, compute: float, memory: float) -> OpConstants:
        """Return the constants with which arithmetic, and memory and starts, take so many times as long."""
        return replace(
            self,
            e_f=self.e_f / compute,
            e_b=self.e_b / memory,
            t0_us=self.t0_us * memory,
            serial_ns=self.serial_ns * memory,
        )


@dataclass(frozen=True, slots=True)
class GpuConstants:
    """All operator constants of one GPU type.

    `engines` holds, by the name of an engine, classes of which it has kernels of its own that were measured.
    `host` and `links` are times of the host and of sums over GPUs over what engine profiles and interconnects
    say: 1 unless drawn. Drawn ones keep those that they are `drawn_from`, and by how many standard deviations
    a server is off that was measured (`luck`). `operators` are those of an overlay that `ops` has already.
    """

    gpu: str
    ops: Mapping[OpClass, OpConstants]
    engines: Mapping[str, Mapping[OpClass, OpConstants]] = field(default_factory=dict)
    host: float = 1.0
    links: float = 1.0
    luck: float = 0.0
    drawn_from: GpuConstants | None = None
    operators: Mapping[str, OperatorEntry] = field(default_factory=FrozenMap)

    def op(self, op: OpClass) -> OpConstants:
        """Return the constants of one operator class."""
        return self.ops[op]

    def of_engine(self, engine: str) -> GpuConstants:
        """Return the constants with an engine's own kernels, where they were measured."""
        own = self.engines.get(engine)
        if not own:
            return self
        base = self.drawn_from and self.drawn_from.of_engine(engine)
        return replace(self, ops={**self.ops, **own}, drawn_from=base)

    def with_measured(self, own: Mapping[OpClass, OpConstants]) -> GpuConstants:
        """Return the constants with those of classes that were measured anew, whatever engine runs.

        Bursts of single operators say nothing of load that lasts: what is left of their speed then stays.
        """
        ops = {
            op: replace(c, sustained=known.sustained, sustained_b=known.sustained_b)
            for op, c in own.items()
            for known in (self.ops[op],)
        }
        engines = {
            engine: {op: c for op, c in theirs.items() if op not in own}
            for engine, theirs in self.engines.items()
        }
        return replace(self, ops={**self.ops, **ops}, engines=engines)

    def under_load(self) -> GpuConstants:
        """Return the constants as they are in service, with every operator at its sustained share."""
        changed = {
            op: replace(
                c,
                e_f=c.e_f * c.sustained,
                e_b=c.e_b * c.sustained_b,
                sustained=1.0,
                sustained_b=1.0,
            )
            for op, c in self.ops.items()
            if (c.sustained, c.sustained_b) != (1.0, 1.0)
        }
        return replace(self, ops={**self.ops, **changed}) if changed else self

    def as_measured(self, server: MeasuredServer) -> GpuConstants:
        """Return the constants as a server showed them; drawn ones are off by what is left of its error."""
        base, off = self.drawn_from or self, math.exp(_sigma(server.error) * self.luck)
        ops = {
            op: c.scale_times(server.compute * off, server.memory * off)
            for op, c in base.ops.items()
        }
        return GpuConstants(self.gpu, ops, host=off)

    def in_turns(self, shares: int) -> GpuConstants:
        """Return the constants for one of `shares` processes that take turns on the GPU, all of them busy.

        Its peaks are divided already (`GpuType.in_shares`); what kernels take at least is not.
        """
        if shares == 1:
            return self
        by = slowdown(shares)
        slower = {
            op: replace(c, t0_us=c.t0_us * by, serial_ns=c.serial_ns * by)
            for op, c in self.ops.items()
        }
        return replace(self, ops=slower)

    def with_kernels(
        self, kernels: KernelSpeeds, gpu: GpuType, usual: GpuConstants
    ) -> GpuConstants:
        """Return constants of an engine's own kernels on a GPU; passes over activations stay as they are.

        They are off by as much as these are from the `usual` ones.
        """
        compute = min(kernels.compute, kernels.max_flops / gpu.fp16_flops)
        memory = min(kernels.memory, kernels.max_bytes_per_s / gpu.bandwidth_bytes_per_s)

        def reached(share_f: float, share_b: float, p: float) -> OpConstants:
            source = kernels.source
            return OpConstants(e_f=share_f, e_b=share_b, t0_us=kernels.t0_us, p=p, source=source)

        products = reached(compute, memory, kernels.p)
        experts = reached(compute * kernels.experts, memory * kernels.experts, kernels.p)
        attention = reached(kernels.attention_compute, kernels.attention_memory, 1.0)
        own = {
            **dict.fromkeys(PRODUCTS, products),
            **dict.fromkeys(EXPERT_CLASSES, experts),
            **dict.fromkeys((OpClass.ATTENTION_PREFILL, OpClass.ATTENTION_DECODE), attention),
        }
        scaled = {
            op: c.scale_times(
                usual.op(op).e_f / self.op(op).e_f, usual.op(op).e_b / self.op(op).e_b
            )
            if usual is not self
            else c
            for op, c in own.items()
            if op in self.ops
        }
        return replace(self, ops={**self.ops, **scaled})

    def with_ratios(self, ratios: KernelRatios) -> GpuConstants:
        """Return constants of an engine's kernels that compare so with those that were measured."""
        ops = {
            op: replace(c.scale_time(ratios.kernels), t0_us=c.t0_us * ratios.start * ratios.kernels)
            for op, c in self.ops.items()
        }
        decode = ops[OpClass.ATTENTION_DECODE]
        own = replace(decode, e_b=decode.e_b / ratios.decode_reads)
        return replace(self, ops={**ops, OpClass.ATTENTION_DECODE: own})

    def tag(self, used: Iterable[OpClass]) -> Tag:
        """Return the weakest tag among the operator classes used."""
        return max((self.ops[op].tag for op in used), key=_RANK.__getitem__)

    def summary(self, used: Iterable[OpClass]) -> str:
        """Return one line for reports: what each used operator class rests on, the weakest first."""
        grounds: dict[tuple[int, str], list[str]] = {}
        for op in used:
            c = self.ops[op]
            grounds.setdefault((_RANK[c.tag], f"{c.tag.value} ({c.source})"), []).append(op.value)
        ordered = sorted(grounds.items(), reverse=True)
        if len(ordered) == 1:
            return ordered[0][0][1]
        return "; ".join(f"{text}: {', '.join(ops)}" for (_, text), ops in ordered)


class ConstantTable:
    """Constants by GPU name; unknown names fail with what is known.

    Times to the first token are off from what steps say by `luck` standard deviations: 0 unless drawn.
    """

    def __init__(
        self,
        gpus: Iterable[GpuConstants],
        *,
        first_token_error: float = FIRST_TOKEN_ERROR,
        luck: float = 0.0,
    ) -> None:
        self._gpus = {entry.gpu: entry for entry in gpus}
        self._first_token_error, self._luck = first_token_error, luck

    def first_token(self, server: MeasuredServer | None = None) -> float:
        """Return the time to the first token over what steps say, of a server that was measured or not."""
        error = self._first_token_error if server is None else server.first_token_error
        return math.exp(_sigma(error) * self._luck)

    def gpu(self, name: str) -> GpuConstants:
        """Return the constants of a GPU type by its canonical name."""
        constants = self._gpus.get(name)
        if constants is None:
            raise UnknownNameError("GPU with performance constants", name, self._gpus)
        return constants

    def for_gpu(self, gpu: GpuType) -> GpuConstants:
        """Return the constants of a GPU type; what is missing is taken from the nearest relative.

        That is the GPU it was declared to be like; else one of the same architecture, else any, nearest in
        compute per byte. What is taken over is tagged a proxy.
        """
        if gpu.part_of is not None:
            return self.for_gpu(gpu.part_of)
        constants = self._gpus.get(gpu.name)
        possible = [op for op in OpClass if op not in _FP4 or gpu.fp4_flops is not None]
        missing = [op for op in possible if constants is None or op not in constants.ops]
        found = constants or GpuConstants(gpu.name, {})
        if missing:
            lent = {op: _share_compute(self._relative(gpu, op), gpu) for op in missing}
            found = replace(found, ops={**found.ops, **lent})
        if found.operators == gpu.operators:
            return found
        own = {OpClass(op): read_constants(c) for op, c in gpu.operators.items() if op in found.ops}
        return replace(found.with_measured(own), operators=gpu.operators)

    def _relative(self, gpu: GpuType, op: OpClass) -> OpConstants:
        from atoll.catalog.gpus import default_gpus

        def distance(name: str) -> tuple[bool, float, str]:
            other = default_gpus()[name]
            intensity = math.log(gpu.fp16_flops / gpu.bandwidth_bytes_per_s)
            theirs = math.log(other.fp16_flops / other.bandwidth_bytes_per_s)
            return (other.architecture != gpu.architecture, abs(intensity - theirs), name)

        known = [name for name in default_gpus() if name in self._gpus and name != gpu.name]
        known = [name for name in known if op in self._gpus[name].ops]
        if not known:
            raise UnknownNameError("GPU with performance constants", gpu.name, self._gpus)
        # What was itself taken over is not lent on, unless there is nothing else.
        lenders = [name for name in known if self._gpus[name].ops[op].tag is not Tag.PROXY] or known
        nearest = gpu.like if gpu.like in known else min(lenders, key=distance)
        taken = self._gpus[nearest].ops[op]
        error = max(taken.error, PROXY_ERROR)
        return replace(
            taken, tag=Tag.PROXY, source=nearest, hot_bytes=0.0, hot_gain=1.0, error=error
        )

    def names(self) -> tuple[str, ...]:
        """Return the GPU names that have constants, sorted."""
        return tuple(sorted(self._gpus))

    def with_gpus(self, entries: Iterable[GpuConstants]) -> ConstantTable:
        """Return a table with these in place of its own of the same GPUs."""
        return ConstantTable(
            {**self._gpus, **{entry.gpu: entry for entry in entries}}.values(),
            first_token_error=self._first_token_error,
            luck=self._luck,
        )


def _share_compute(taken: OpConstants, gpu: GpuType) -> OpConstants:
    """Constants of a relative for a GPU that is known to reach a smaller share of its peak."""
    share = gpu.compute_share
    if share == 1.0:
        return taken
    return replace(
        taken, e_f=taken.e_f * share, source=f"{taken.source}, compute share x {share:g}"
    )


def sample_constants(
    table: ConstantTable,
    rng: np.random.Generator,
    gpus: Iterable[GpuType] = (),
    *,
    server_error: float = SERVER_ERROR,
    first_token_error: float = FIRST_TOKEN_ERROR,
) -> ConstantTable:
    """Return constants as they may be in truth: times of every operator class on every GPU off by a factor.

    Factors are log-normal with median 1 and the relative standard deviation `OpConstants.error`, and
    independent of each other, times one that all classes of a GPU share (`server_error`). So are those of the
    host, of sums over GPUs and of first tokens. `gpus` are further GPUs to have constants for, taken from
    their relatives as `ConstantTable.for_gpu` does, with a proxy's error. What is drawn for a class of a GPU
    does not depend on which others there are.
    """
    known = {name: table.gpu(name) for name in table.names()}
    known |= {gpu.name: table.for_gpu(gpu) for gpu in gpus}
    sampled = []
    seed = int(rng.integers(2**63))
    for name in sorted(known):
        entry = known[name]
        shared = _draw(server_error, stream(seed, name, "server"))

        def drawn(
            ops: Mapping[OpClass, OpConstants], name: str = name, shared: float = shared
        ) -> dict[OpClass, OpConstants]:
            return {
                op: c.scale_time(shared * _draw(c.error, stream(seed, name, op.value)))
                for op, c in ops.items()
            }

        sampled.append(
            replace(
                entry,
                ops=drawn(entry.ops),
                engines={engine: drawn(own) for engine, own in entry.engines.items()},
                host=_draw(HOST_ERROR, stream(seed, name, "host")),
                links=_draw(LINK_ERROR, stream(seed, name, "links")),
                luck=float(stream(seed, name, "measured").standard_normal()),
                drawn_from=entry,
            )
        )
    luck = float(stream(seed, "first token").standard_normal())
    return ConstantTable(sampled, first_token_error=first_token_error, luck=luck)


def _sigma(error: float) -> float:
    """The standard deviation of the logarithm of a factor with median 1 and this relative one."""
    return math.sqrt(math.log1p(error**2))


def _draw(error: float, rng: np.random.Generator) -> float:
    """A log-normal factor with median 1 and this relative standard deviation."""
    return math.exp(_sigma(error) * float(rng.standard_normal()))


@cache
def default_constants() -> ConstantTable:
    """Return the constants that ship with Atoll."""
    return load_constants(Path(str(files("atoll.perf") / "data" / "constants.yaml")))


def load_constants(path: Path) -> ConstantTable:
    """Read a file of constants, as `tools/fit_constants.py` writes it.

    Missing operator classes are taken from a relative (`ConstantTable.for_gpu`).
    """
    data: Any = load_yaml(path)
    return ConstantTable(_gpu(path, name, entry) for name, entry in data["gpus"].items())


def _gpu(path: Path, name: str, entry: dict[str, Any]) -> GpuConstants:
    def ops(own: dict[str, object]) -> dict[OpClass, OpConstants]:
        return {
            OpClass(op): read_constants(OperatorEntry.parse(c, path=path)) for op, c in own.items()
        }

    engines = entry.pop("engines", {})
    return GpuConstants(name, ops(entry), {engine: ops(own) for engine, own in engines.items()})


def read_constants(entry: OperatorEntry) -> OpConstants:
    """Return the constants that an entry has; what it leaves out is as in `OpConstants`."""
    values = {name: getattr(entry, name) for name in entry.model_fields_set}
    values["tag"] = tag = Tag(entry.tag)
    if entry.error is None:
        values["error"] = PROXY_ERROR if tag is Tag.PROXY else UNSTATED_ERROR
    return OpConstants(**values)
