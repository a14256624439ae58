"""Fitting the constants of `constants` to measurements (needs scipy, extra `calibrate`).

Each fit minimises the robust (soft-L1) squared error of log(predicted / measured) over bounded
constants, so that a launch of 5 us and a step of 5 ms count alike and outliers do not rule. A constant that
ends at a bound is not fitted: one that can be done without is left out and the rest fitted again, and the
others are named in `Fit.at_bound`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from atoll.catalog.dtypes import DTYPES, NVFP4
from atoll.catalog.gpus import GpuType
from atoll.core.errors import InputError, MissingDependencyError
from atoll.perf import operators
from atoll.perf.constants import EXPERT_CLASSES, OpClass, OpConstants, Tag, peak_flops
from atoll.perf.measurements import BALANCED, ROUTING, Points
from atoll.perf.operators import Array

MIN_POINTS = 8
"""Fewest points that a fit of one operator class accepts."""

_KV_SIZES = ("batch_size", "seq_len", "num_key_value_heads", "head_dim")
_SMALL_KV = 2.5e5
"""Numbers in each of keys and values below which decode attention takes what its launch takes."""
_LARGE_KV = 2.5e7
"""Numbers above which it takes what reading them takes."""

Predict = Callable[[OpConstants, Points, GpuType], Array]


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Relative error of predictions, in per cent."""

    points: int
    median: float
    p95: float


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted constants of one operator class on one GPU, with their error on both halves."""

    gpu: str
    op: OpClass
    constants: OpConstants
    fitted: Accuracy
    held_out: Accuracy | None
    at_bound: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Free:
    """A constant that a fit may move: name, start, bounds. Moves in log space.

    `without` are the values that leave it out, where that can be done.
    """

    name: str
    start: float
    low: float
    high: float
    without: tuple[tuple[str, float], ...] = ()


def accuracy(predicted: Array, measured: Array) -> Accuracy:
    """Return median and 95th percentile of |predicted / measured - 1|, in per cent."""
    if len(measured) == 0:
        raise InputError("no measurements to compare with")
    error = np.abs(predicted / measured - 1.0) * 100.0
    return Accuracy(len(error), float(np.median(error)), float(np.percentile(error, 95)))


# Predictions under the conditions of the rig, vectorised over points.


def predict_gemm(c: OpConstants, points: Points, gpu: GpuType) -> Array:
    """Return predicted seconds of matrix products; dtypes fp8 and nvfp4 use the peaks of their cores."""
    m, n, k = (points.sizes[name] for name in ("m", "n", "k"))
    dtypes = points.labels["gemm_dtype"]
    fp8, fp4 = _is_fp8(dtypes), dtypes == NVFP4.name
    narrow = np.where(fp8, peak_flops(OpClass.GEMM_FP8, gpu), peak_flops(OpClass.GEMM_FP4, gpu))
    peak = np.where(fp8 | fp4, narrow, gpu.fp16_flops)
    weight = np.where(fp8, 1.0, np.where(fp4, NVFP4.bytes_per_weight, 2.0))
    rows = 2.0 * m * (n + k)
    compute = 2.0 * m * n * (k + c.pad_k) / (peak * c.e_f)
    streamed = weight * (n + c.pad_n) * k + rows
    memory = streamed / (gpu.bandwidth_bytes_per_s * c.e_b) / _hot(c, weight * n * k + rows)
    total: Array = (compute**c.p + memory**c.p) ** (1.0 / c.p) + c.t0_s
    return total


def predict_prefill(c: OpConstants, points: Points, gpu: GpuType, *, narrow: bool = False) -> Array:
    """Return predicted seconds of causal prefill attention without a prefix; `narrow` as below."""
    out = np.empty(len(points))
    speed = c.speed(gpu.fp16_flops, gpu.bandwidth_bytes_per_s)
    if narrow:
        speed = replace(speed, e_f=c.e_f / c.kv8, t0_s=c.t0_s * c.kv8_t0)
    kv_bytes = 1.0 if narrow else 2.0
    for mask, (heads, kv_heads, dim) in _heads(points):
        op = operators.prefill_attention(
            heads, kv_heads, dim, speed, kv_bytes=kv_bytes, serial_ns=c.serial_ns
        )
        b, s = points.sizes["batch_size"][mask], points.sizes["seq_len"][mask]
        # Causal: half of all pairs.
        out[mask] = op.seconds(0.5 * b * s * s, b * s, b * s, s)
    return out


def predict_decode(c: OpConstants, points: Points, gpu: GpuType, *, narrow: bool = False) -> Array:
    """Return predicted seconds of decode attention; `narrow`: with a KV cache of 8 bits."""
    out = np.empty(len(points))
    kv_bytes, t0_s = (c.kv8, c.t0_s * c.kv8_t0) if narrow else (2.0, c.t0_s)
    speed = replace(c.speed(gpu.fp16_flops, gpu.bandwidth_bytes_per_s), t0_s=t0_s)
    for mask, (heads, kv_heads, dim) in _heads(points):
        b, s = points.sizes["batch_size"][mask], points.sizes["seq_len"][mask]
        op = operators.decode_attention(
            heads, kv_heads, dim, speed, kv_bytes=kv_bytes, pad=c.pad, serial_ns=c.serial_ns
        )
        moved = (2.0 if narrow else 4.0) * b * s * kv_heads * dim
        # The cache speeds up the stream of keys, not the launch: scale the batch, keep the rest.
        out[mask] = op.seconds(b / _hot(c, moved), s)
    return out


def predict_experts(c: OpConstants, points: Points, gpu: GpuType) -> Array:
    """Return predicted seconds of the routed experts of one layer."""
    out = np.empty(len(points))
    names = ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size")
    shapes = np.stack([points.sizes[name] for name in names], axis=1)
    dtypes = points.labels["moe_dtype"]
    balanced = points.labels.get(ROUTING, np.full(len(points), "")) == BALANCED
    for dtype in set(dtypes.tolist()):
        weight, peak = expert_dtype(dtype, gpu)
        for shape in np.unique(shapes[dtypes == dtype], axis=0):
            mask = (dtypes == dtype) & (shapes == shape).all(axis=1)
            hidden, inner, top_k, experts, tp = (float(value) for value in shape)
            op = operators.grouped_experts(
                hidden,
                inner / tp,
                experts,
                top_k,
                c.speed(peak, gpu.bandwidth_bytes_per_s),
                weight_bytes=weight,
                pad=c.pad,
                pad_k=c.pad_k,
                pad_n=c.pad_n,
            )
            m = points.sizes["num_tokens"][mask]
            in_turn = np.minimum(experts, m * top_k)
            out[mask] = op.seconds_of(m, np.where(balanced[mask], in_turn, op.active(m)))
    return out


def expert_dtype(name: str, gpu: GpuType) -> tuple[float, float]:
    """Return bytes per weight and peak FLOP/s for a dtype as measurement files name it."""
    if name.startswith("fp8"):
        return 1.0, gpu.fp8_flops or gpu.fp16_flops
    if name == NVFP4.name:
        return NVFP4.bytes_per_weight, peak_flops(OpClass.EXPERTS_FP4, gpu)
    if "mxfp4" in name or "int4" in name:
        return DTYPES["mxfp4"].bytes_per_weight, gpu.fp16_flops
    if name in ("bfloat16", "float16", "bf16", "fp16"):
        return 2.0, gpu.fp16_flops
    raise InputError(
        f"unknown expert dtype {name!r}",
        field="moe_dtype",
        hint="bfloat16, fp8, nvfp4, mxfp4 or int4",
    )


def _heads(points: Points) -> list[tuple[Array, tuple[float, float, float]]]:
    names = ("num_heads", "num_key_value_heads", "head_dim")
    shapes = np.stack([points.sizes[name] for name in names], axis=1)
    return [
        ((shapes == shape).all(axis=1), (float(shape[0]), float(shape[1]), float(shape[2])))
        for shape in np.unique(shapes, axis=0)
    ]


def _hot(c: OpConstants, moved: Array) -> Array | float:
    """How much faster than memory the rig ran because operands stayed in its L2 cache."""
    if c.hot_bytes <= 0.0:
        return 1.0
    hot = 1.0 / (1.0 + (moved / c.hot_bytes) ** 6)
    return 1.0 / (1.0 - hot + hot / c.hot_gain)


# What may move in each fit.


_HOT = (("hot_bytes", 0.0), ("hot_gain", 1.0))


def _pad(name: str, start: float, high: float) -> _Free:
    return _Free(name, start, 0.01, high, ((name, 0.0),))


def _bounds(op: OpClass, gpu: GpuType) -> tuple[Predict, tuple[_Free, ...]]:
    hot = (
        _Free("hot_bytes", 0.5 * gpu.l2_bytes, 1e5, 10.0 * gpu.l2_bytes, _HOT),
        _Free("hot_gain", 1.5, 1.01, 60.0, _HOT),
    )
    share = (_Free("e_f", 0.7, 0.05, 1.3), _Free("e_b", 0.8, 0.1, 1.3))
    shape = (_Free("t0_us", 5.0, 0.3, 200.0), _Free("p", 1.8, 0.3, 8.0))
    serial = _Free("serial_ns", 5.0, 0.05, 500.0, (("serial_ns", 0.0),))
    pads = (_pad("pad_k", 50.0, 2e4), _pad("pad_n", 50.0, 5e4))
    if op is OpClass.GEMM:
        return predict_gemm, share + shape + pads + hot
    if op in (OpClass.GEMM_FP8, OpClass.GEMM_FP4):
        # Narrow kernels are too uneven for the data to tell p: the times of both limits add up.
        return predict_gemm, share + shape[:1] + pads + hot
    if op is OpClass.ATTENTION_PREFILL:
        wide = (_Free("e_f", 0.6, 0.05, 1.3), _Free("e_b", 0.5, 0.05, 2.0))
        return predict_prefill, (*wide, *shape, serial)
    if op is OpClass.ATTENTION_DECODE:
        efficiency = (_Free("e_b", 0.85, 0.1, 1.3), _pad("pad", 20.0, 2000.0))
        return predict_decode, (*efficiency, *shape, serial, *hot)
    if op in EXPERT_CLASSES:
        # Where experts are chosen unevenly, fewer bytes move than are counted. With p free, the three trade
        # against each other and all leave what is physical.
        efficiency = (_Free("e_f", 0.5, 0.02, 1.1), _Free("e_b", 0.7, 0.1, 2.0))
        return predict_experts, efficiency + shape[:1] + (_pad("pad", 4.0, 300.0), *pads)
    raise InputError(f"{op.value} is not fitted to single measurements", field="op")


def op_classes(points: Points) -> list[tuple[OpClass, Points]]:
    """Return the operator classes that a set of points can fit, with the points of each."""
    kind = points.schema.kind
    if kind == "gemm":
        dtypes = points.labels["gemm_dtype"]
        fp8, fp4 = _is_fp8(dtypes), dtypes == NVFP4.name
        pairs = [
            (OpClass.GEMM, points.where(~fp8 & ~fp4)),
            (OpClass.GEMM_FP8, points.where(fp8)),
            (OpClass.GEMM_FP4, points.where(fp4)),
        ]
    elif kind == "attention":
        pairs = [
            (OpClass.ATTENTION_PREFILL, points.of(kind="prefill")),
            (OpClass.ATTENTION_DECODE, points.of(kind="decode")),
        ]
    elif kind == "experts":
        dtypes = points.labels["moe_dtype"]
        fp8, fp4 = _is_fp8(dtypes), dtypes == NVFP4.name
        four = ~fp8 & ~fp4 & (np.char.find(dtypes, "4") >= 0)
        pairs = [
            (OpClass.EXPERTS, points.where(~four & ~fp8 & ~fp4)),
            (OpClass.EXPERTS_FP8, points.where(fp8)),
            (OpClass.EXPERTS_FP4, points.where(fp4)),
            (OpClass.EXPERTS_INT4, points.where(four)),
        ]
    else:
        raise InputError(
            f"measurements of kind {kind!r} are not fitted one operator at a time",
            hint="give matrix products, attention or experts",
        )
    return [(op, part) for op, part in pairs if len(part)]


def _is_fp8(dtypes: NDArray[np.str_]) -> NDArray[np.bool_]:
    """Which labels are FP8: files write fp8, fp8_block or fp8_e4m3, which has a 4 of its own."""
    return np.asarray(np.char.startswith(dtypes, "fp8"), dtype=np.bool_)


def predict(op: OpClass, c: OpConstants, points: Points, gpu: GpuType) -> Array:
    """Return predicted seconds of measured points of one operator class, as the rig ran them."""
    if op is OpClass.ELEMENTWISE:
        raise InputError("element-wise passes are not compared point by point", field="op")
    return _bounds(op, gpu)[0](c, points, gpu)


def fit(op: OpClass, points: Points, gpu: GpuType, *, source: str, hold_out: bool = True) -> Fit:
    """Fit one operator class on one GPU; with `hold_out` about half the points are kept for testing."""
    train, test = (
        points.split() if hold_out else (points, points.where(np.zeros(len(points), bool)))
    )
    if len(train) < MIN_POINTS:
        held = f", with {len(test)} of them held out" if hold_out else ""
        raise InputError(
            f"{len(points)} points of {op.value} for {gpu.name} are too few to fit{held}",
            hint=f"measure at least {MIN_POINTS if not hold_out else 3 * MIN_POINTS} points",
        )
    predictor, free = _bounds(op, gpu)
    start = OpConstants(tag=Tag.MEASURED, source=source)
    constants, at_bound = _fit_inside(
        lambda c: predictor(c, train, gpu), train.seconds, start, free
    )
    # Errors are those of the constants as they are written down.
    rounded = _round_constants(constants)
    unseen = test if len(test) else train
    error = spread(predictor(rounded, unseen, gpu), unseen.seconds)
    return Fit(
        gpu=gpu.name,
        op=op,
        constants=replace(rounded, error=error),
        fitted=accuracy(predictor(rounded, train, gpu), train.seconds),
        held_out=accuracy(predictor(rounded, test, gpu), test.seconds) if len(test) else None,
        at_bound=at_bound,
    )


def fit_narrow(fitted: Fit, points: Points, gpu: GpuType) -> Fit:
    """Fit what a KV cache of 8 bits changes about attention that was fitted with one of 16.

    Decoding is launch at small sizes and reading at large ones: each tells one of the two constants.
    """
    predictors = {
        OpClass.ATTENTION_PREFILL: predict_prefill,
        OpClass.ATTENTION_DECODE: predict_decode,
    }
    predictor = predictors[fitted.op]
    train, test = points.split()
    reading, launch = _Free("kv8", 1.1, 0.3, 5.0), _Free("kv8_t0", 1.1, 0.3, 5.0)
    stages: list[tuple[Points, tuple[_Free, ...]]] = [(train, (reading, launch))]
    if fitted.op is OpClass.ATTENTION_DECODE:
        moved = np.prod([train.sizes[name] for name in _KV_SIZES], axis=0)
        small, large = train.where(moved < _SMALL_KV), train.where(moved > _LARGE_KV)
        stages = [(small, (launch,)), (large, (reading,))]
    constants = fitted.constants
    at_bound: tuple[str, ...] = ()
    for part, free in stages:
        constants, more = _fit_inside(
            lambda c, part=part: predictor(c, part, gpu, narrow=True),  # type: ignore[misc]
            part.seconds,
            constants,
            free,
        )
        at_bound += more
    rounded = _round_constants(constants)
    return replace(
        fitted,
        constants=rounded,
        fitted=accuracy(predictor(rounded, train, gpu, narrow=True), train.seconds),
        held_out=accuracy(predictor(rounded, test, gpu, narrow=True), test.seconds),
        at_bound=at_bound,
    )


def spread(predicted: Array, measured: Array) -> float:
    """Return the standard deviation of log(predicted / measured), estimated so that outliers do not rule.

    Half of a normal distribution lies within 0.6745 standard deviations of its centre; here that is 0, so
    that a bias counts, too.
    """
    deviation = float(np.median(np.abs(np.log(predicted / measured)))) / 0.6745
    return float(f"{deviation:.3g}")


def _fit_inside(
    predicted: Callable[[OpConstants], Array],
    measured: Array,
    start: OpConstants,
    free: Sequence[_Free],
) -> tuple[OpConstants, tuple[str, ...]]:
    """Fit, leave out what ends at a bound and can be left out, and name what is still at one."""
    while True:
        best = minimise(predicted, measured, start, free)
        at_bound = [f for f in free if _is_at_bound(getattr(best, f.name), f)]
        # One that did not move has no influence on what was measured.
        still = [f for f in free if abs(getattr(best, f.name) / f.start - 1.0) < 1e-9]
        spare = next((f for f in (*at_bound, *still) if f.without), None)
        if spare is None:
            return best, tuple(f.name for f in at_bound)
        start = _with(start, dict(spare.without))
        gone = {name for name, _ in spare.without}
        free = [f for f in free if f.name not in gone]


def _is_at_bound(value: float, free: _Free) -> bool:
    return value <= free.low * 1.1 or value >= free.high / 1.02


def minimise(
    predicted: Callable[[OpConstants], Array],
    measured: Array,
    start: OpConstants,
    free: Sequence[_Free],
) -> OpConstants:
    """Return the constants that bring `predicted` closest to `measured` in the robust log sense."""
    try:
        from scipy.optimize import least_squares
    except ImportError as error:
        raise MissingDependencyError("scipy", "calibrate") from error
    low = np.log([f.low for f in free])
    high = np.log([f.high for f in free])
    target = np.log(measured)

    def build(x: Array) -> OpConstants:
        return _with(start, {f.name: float(v) for f, v in zip(free, np.exp(x), strict=True)})

    def residual(x: Array) -> Array:
        # A step may wander where powers overflow; a large finite residual sends it back.
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            value = np.log(predicted(build(x))) - target
        return np.asarray(np.nan_to_num(value, nan=50.0, posinf=50.0, neginf=-50.0))

    best = least_squares(
        residual,
        np.clip(np.log([f.start for f in free]), low + 1e-9, high - 1e-9),
        bounds=(low, high),
        loss="soft_l1",
        f_scale=0.1,
    )
    return build(best.x)


def _with(c: OpConstants, values: Mapping[str, float]) -> OpConstants:
    # mypy cannot know that every name is one of the numeric fields.
    return replace(c, **values)  # type: ignore[arg-type]


def _round_constants(c: OpConstants) -> OpConstants:
    """Constants as the file will hold them, so that errors are reported for what is shipped."""
    numbers = {f.name: getattr(c, f.name) for f in fields(c) if f.name not in ("tag", "source")}
    return _with(c, {name: float(f"{value:.5g}") for name, value in numbers.items()})
