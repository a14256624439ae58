from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, replace

import numpy as np
import pytest

from atoll.catalog.gpus import GpuType
from atoll.core.errors import InputError, MissingDependencyError
from atoll.perf import operators
from atoll.perf.batch import Batch
from atoll.perf.calibration import (
    MIN_POINTS,
    accuracy,
    expert_dtype,
    fit,
    fit_narrow,
    op_classes,
    predict,
    predict_decode,
    predict_prefill,
)
from atoll.perf.constants import OpClass, OpConstants, Tag
from atoll.perf.measurements import Points
from atoll.perf.operators import Array
from tests.perf.builders import gpu, points, timed

GPU = gpu(fp8_tflops=200.0)


def grid(**axes: list[float]) -> dict[str, Array]:
    """Every combination of the sizes, column-wise."""
    mesh = np.meshgrid(*axes.values(), indexing="ij")
    return {name: column.ravel() for name, column in zip(axes, mesh, strict=True)}


GEMMS = grid(
    m=[1, 4, 16, 64, 256, 1024, 4096, 16384],
    n=[512, 1536, 4096, 12288, 28672],
    k=[512, 2048, 8192, 14336],
)
HEADS = [(32.0, 8.0, 128.0), (64.0, 8.0, 64.0), (16.0, 16.0, 128.0)]


def attention(kind: str) -> Points:
    batch, length = zip(
        *((b, s) for b in (1, 2, 4, 8, 16, 32, 64) for s in (16, 64, 256, 1024, 4096, 16384)),
        strict=True,
    )
    columns: dict[str, list[float]] = {
        name: []
        for name in ("batch_size", "seq_len", "num_heads", "num_key_value_heads", "head_dim")
    }
    for heads, kv_heads, dim in HEADS:
        columns["batch_size"] += map(float, batch)
        columns["seq_len"] += map(float, length)
        columns["num_heads"] += [heads] * len(batch)
        columns["num_key_value_heads"] += [kv_heads] * len(batch)
        columns["head_dim"] += [dim] * len(batch)
    return points("attention", columns, {"kind": kind})


def experts(dtype: str) -> Points:
    own = grid(
        num_tokens=[1, 4, 16, 64, 256, 1024, 4096, 16384],
        hidden_size=[2048, 4096],
        inter_size=[768, 1536],
        topk=[2, 8],
        num_experts=[32, 128],
        moe_tp_size=[1, 2],
    )
    return points("experts", own, {"moe_dtype": dtype})


CASES: Mapping[OpClass, tuple[Points, OpConstants]] = {
    OpClass.GEMM: (
        points("gemm", GEMMS, {"gemm_dtype": "bfloat16"}),
        OpConstants(e_f=0.8, e_b=0.75, t0_us=4.0, p=2.2, pad_k=120, pad_n=200),
    ),
    OpClass.GEMM_FP8: (
        points("gemm", GEMMS, {"gemm_dtype": "fp8"}),
        OpConstants(e_f=0.55, e_b=0.9, t0_us=6.0, pad_k=60, pad_n=4500),
    ),
    OpClass.ATTENTION_PREFILL: (
        attention("prefill"),
        OpConstants(e_f=0.6, e_b=0.4, t0_us=9.0, p=1.3, serial_ns=20.0),
    ),
    OpClass.ATTENTION_DECODE: (
        attention("decode"),
        OpConstants(e_b=0.8, t0_us=15.0, p=0.9, pad=12.0, serial_ns=14.0),
    ),
    OpClass.EXPERTS: (
        experts("bfloat16"),
        OpConstants(e_f=0.5, e_b=0.9, t0_us=40.0, pad=5.0, pad_k=300, pad_n=40),
    ),
    OpClass.EXPERTS_FP8: (
        experts("fp8"),
        OpConstants(e_f=0.4, e_b=0.6, t0_us=30.0, pad=2.0, pad_k=100, pad_n=20),
    ),
    OpClass.EXPERTS_INT4: (
        experts("w4a16_mxfp4"),
        OpConstants(e_f=0.45, e_b=0.95, t0_us=20.0, pad=3.0, pad_k=350, pad_n=250),
    ),
}
# Experts of other formats are fitted in the same way: what differs is how they are predicted, which
# `test_experts_are_predicted_as_the_step_model_does` holds for each.
ALIKE = (OpClass.EXPERTS_FP8, OpClass.EXPERTS_INT4)
# And those of 16 bits have by far the most points.
LARGE = (OpClass.EXPERTS, *ALIKE)
EVERY = pytest.mark.parametrize(
    "op",
    [pytest.param(op, marks=[pytest.mark.slow] if op in LARGE else []) for op in CASES],
    ids=lambda op: op.value,
)


def worst(found: OpConstants, op: OpClass) -> float:
    sizes, truth = CASES[op]
    error = predict(op, found, sizes, GPU) / predict(op, truth, sizes, GPU) - 1.0
    return float(np.max(np.abs(error)))


@EVERY
def test_known_constants_are_recovered(op: OpClass) -> None:
    sizes, truth = CASES[op]
    found = fit(op, timed(sizes, predict(op, truth, sizes, GPU)), GPU, source="a test")
    assert (found.gpu, found.op) == ("TEST", op)
    assert found.constants.tag is Tag.MEASURED
    assert found.constants.source == "a test"
    assert found.fitted.p95 < 1.0
    assert found.held_out is not None
    assert found.held_out.p95 < 1.0
    assert found.fitted.points + found.held_out.points == len(sizes)
    assert worst(found.constants, op) < 0.01
    # What the data determine well comes back itself.
    assert found.constants.t0_us == pytest.approx(truth.t0_us, rel=0.05)


@EVERY
def test_the_error_is_the_spread_about_the_fit(op: OpClass) -> None:
    sizes, truth = CASES[op]
    rng = np.random.default_rng(3)
    noisy = predict(op, truth, sizes, GPU) * np.exp(rng.normal(0.0, 0.1, len(sizes)))
    found = fit(op, timed(sizes, noisy), GPU, source="a test")
    assert found.constants.error == pytest.approx(0.1, abs=0.04)
    assert found.at_bound == ()


def test_what_ends_at_a_bound_and_can_be_left_out_is_left_out() -> None:
    sizes, _ = CASES[OpClass.GEMM]
    truth = OpConstants(e_f=0.8, e_b=0.75, t0_us=4.0, p=2.2)
    found = fit(
        OpClass.GEMM, timed(sizes, predict(OpClass.GEMM, truth, sizes, GPU)), GPU, source=""
    )
    assert found.constants.hot_bytes == 0.0
    assert found.constants.hot_gain == 1.0
    assert found.at_bound == ()
    assert worst_of(found.constants, truth, sizes) < 0.01


def test_what_cannot_be_left_out_is_named() -> None:
    sizes, _ = CASES[OpClass.GEMM]
    # Thrice the datasheet's peak.
    truth = OpConstants(e_f=3.0, e_b=0.75, t0_us=4.0, p=2.2)
    found = fit(
        OpClass.GEMM, timed(sizes, predict(OpClass.GEMM, truth, sizes, GPU)), GPU, source=""
    )
    assert "e_f" in found.at_bound


def worst_of(found: OpConstants, truth: OpConstants, sizes: Points) -> float:
    pair = (predict(OpClass.GEMM, c, sizes, GPU) for c in (found, truth))
    return float(np.max(np.abs(next(pair) / next(pair) - 1.0)))


@pytest.mark.parametrize(
    ("op", "predictor"),
    [
        (OpClass.ATTENTION_PREFILL, predict_prefill),
        (OpClass.ATTENTION_DECODE, predict_decode),
    ],
)
def test_a_cache_of_8_bits_is_fitted_on_top(op: OpClass, predictor: Callable[..., Array]) -> None:
    sizes, known = CASES[op]
    truth = replace(known, kv8=1.5, kv8_t0=1.2)
    first = fit(op, timed(sizes, predict(op, known, sizes, GPU)), GPU, source="a test")
    narrow = timed(sizes, predictor(truth, sizes, GPU, narrow=True))
    found = fit_narrow(first, narrow, GPU)
    assert found.constants.kv8 == pytest.approx(1.5, rel=0.05)
    assert found.constants.kv8_t0 == pytest.approx(1.2, rel=0.05)
    assert replace(found.constants, kv8=1.0, kv8_t0=1.0) == first.constants


@EVERY
def test_noise_and_outliers_do_not_rule(op: OpClass) -> None:
    sizes, truth = CASES[op]
    rng = np.random.default_rng(7)
    exact = predict(op, truth, sizes, GPU)
    noisy = exact * np.exp(rng.normal(0.0, 0.02, len(sizes)))
    noisy[rng.random(len(sizes)) < 0.03] *= 3.0
    found = fit(op, timed(sizes, noisy), GPU, source="a test")
    error = accuracy(predict(op, found.constants, sizes, GPU), exact)
    assert error.median < 1.0
    assert error.p95 < 5.0


@pytest.mark.parametrize("op", [OpClass.GEMM, OpClass.ATTENTION_DECODE])
def test_a_rig_whose_operands_stayed_in_its_cache(op: OpClass) -> None:
    sizes, cold = CASES[op]
    values = {f.name: getattr(cold, f.name) for f in fields(cold)}
    truth = OpConstants(**values | {"hot_bytes": 0.4 * GPU.l2_bytes, "hot_gain": 2.0})
    measured = predict(op, truth, sizes, GPU)
    # Small operands run up to twice as fast, large ones not.
    gain = predict(op, cold, sizes, GPU) / measured
    assert 1.3 < gain.max() <= 2.0
    assert gain.min() == pytest.approx(1.0, abs=1e-3)
    found = fit(op, timed(sizes, measured), GPU, source="a test")
    assert found.held_out is not None
    assert found.held_out.p95 < 1.0
    assert found.constants.hot_gain == pytest.approx(2.0, rel=0.1)


def test_without_holding_out_every_point_is_fitted() -> None:
    sizes, truth = CASES[OpClass.GEMM]
    few = sizes.where(np.arange(len(sizes)) % 10 == 0)
    found = fit(
        OpClass.GEMM,
        timed(few, predict(OpClass.GEMM, truth, few, GPU)),
        GPU,
        source="a test",
        hold_out=False,
    )
    assert found.held_out is None
    assert found.fitted.points == len(few) == 16


def test_constants_are_reported_as_the_file_will_hold_them() -> None:
    sizes, truth = CASES[OpClass.GEMM]
    measured = timed(sizes, predict(OpClass.GEMM, truth, sizes, GPU))
    found = fit(OpClass.GEMM, measured, GPU, source="a test")
    for name in ("e_f", "e_b", "t0_us", "p", "pad_k", "pad_n"):
        value = getattr(found.constants, name)
        assert value == float(f"{value:.5g}")
    train, _ = measured.split()
    again = accuracy(predict(OpClass.GEMM, found.constants, train, GPU), train.seconds)
    assert again == found.fitted


# Predictions are those of the operators.


@pytest.mark.parametrize(
    ("op", "weight_bytes", "peak"),
    [(OpClass.GEMM, 2.0, GPU.fp16_flops), (OpClass.GEMM_FP8, 1.0, GPU.fp8_flops)],
)
def test_products_are_predicted_as_the_step_model_does(
    op: OpClass, weight_bytes: float, peak: float
) -> None:
    sizes, c = CASES[op]
    exact = operators.gemm(
        4096,
        8192,
        c.speed(peak, GPU.bandwidth_bytes_per_s),
        weight_bytes=weight_bytes,
        pad_k=c.pad_k,
        pad_n=c.pad_n,
    )
    own = sizes.where((sizes.sizes["n"] == 4096) & (sizes.sizes["k"] == 8192))
    assert len(own) == 8
    assert predict(op, c, own, GPU) == pytest.approx(exact.seconds(own.sizes["m"]))


@pytest.mark.parametrize(
    ("op", "weight_bytes", "peak"),
    [
        (OpClass.EXPERTS, 2.0, GPU.fp16_flops),
        (OpClass.EXPERTS_FP8, 1.0, GPU.fp8_flops),
        (OpClass.EXPERTS_INT4, 4.25 / 8, GPU.fp16_flops),
    ],
)
@pytest.mark.parametrize("tp", [1, 2])
def test_experts_are_predicted_as_the_step_model_does(
    op: OpClass, weight_bytes: float, peak: float, tp: int
) -> None:
    sizes, c = CASES[op]
    exact = operators.grouped_experts(
        2048,
        1536 / tp,
        128,
        8,
        c.speed(peak, GPU.bandwidth_bytes_per_s),
        weight_bytes=weight_bytes,
        pad=c.pad,
        pad_k=c.pad_k,
        pad_n=c.pad_n,
    )
    shape = {
        "hidden_size": 2048, "inter_size": 1536, "topk": 8, "num_experts": 128, "moe_tp_size": tp,
    }  # fmt: skip
    own = sizes.where(
        np.logical_and.reduce([sizes.sizes[name] == value for name, value in shape.items()])
    )
    assert len(own) == 8
    assert predict(op, c, own, GPU) == pytest.approx(exact.seconds(own.sizes["num_tokens"]))


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_attention_is_predicted_as_the_step_model_does(
    heads: float, kv_heads: float, dim: float
) -> None:
    sizes, c = CASES[OpClass.ATTENTION_PREFILL]
    own = sizes.where((sizes.sizes["num_heads"] == heads) & (sizes.sizes["head_dim"] == dim))
    b, s = own.sizes["batch_size"], own.sizes["seq_len"]
    speed = c.speed(GPU.fp16_flops, GPU.bandwidth_bytes_per_s)
    prefill = operators.prefill_attention(
        heads, kv_heads, dim, speed, kv_bytes=2.0, serial_ns=c.serial_ns
    )
    batch = Batch(b * s, b, 0.0 * b, 0.0 * b, 0.0 * b)
    assert predict(OpClass.ATTENTION_PREFILL, c, own, GPU) == pytest.approx(
        prefill.seconds(batch.pairs(None), batch.tokens, batch.prefill_keys(None), s)
    )
    sizes, c = CASES[OpClass.ATTENTION_DECODE]
    own = sizes.where((sizes.sizes["num_heads"] == heads) & (sizes.sizes["head_dim"] == dim))
    speed = c.speed(GPU.fp16_flops, GPU.bandwidth_bytes_per_s)
    decode = operators.decode_attention(
        heads, kv_heads, dim, speed, kv_bytes=2.0, pad=c.pad, serial_ns=c.serial_ns
    )
    assert predict(OpClass.ATTENTION_DECODE, c, own, GPU) == pytest.approx(decode.seconds(b, s))


def test_the_order_of_points_does_not_matter() -> None:
    for op, (sizes, truth) in CASES.items():
        order = np.random.default_rng(2).permutation(len(sizes))
        exact = predict(op, truth, sizes, GPU)
        turned = Points(
            sizes.schema,
            sizes.group[order],
            {name: column[order] for name, column in sizes.sizes.items()},
            {name: column[order] for name, column in sizes.labels.items()},
            sizes.seconds[order],
        )
        assert predict(op, truth, turned, GPU).tolist() == exact[order].tolist()


def test_which_classes_points_can_fit() -> None:
    both = points(
        "gemm", {"m": [1, 2, 3], "n": [1, 1, 1], "k": [1, 1, 1]},
        {"gemm_dtype": ["bfloat16", "fp8", "fp8"]},
    )  # fmt: skip
    assert [(op, len(part)) for op, part in op_classes(both)] == [
        (OpClass.GEMM, 1),
        (OpClass.GEMM_FP8, 2),
    ]
    assert [op for op, _ in op_classes(attention("decode"))] == [OpClass.ATTENTION_DECODE]
    for dtype, op in (
        ("bfloat16", OpClass.EXPERTS),
        ("fp8", OpClass.EXPERTS_FP8),
        ("fp8_block", OpClass.EXPERTS_FP8),
        ("int4_wo", OpClass.EXPERTS_INT4),
        ("w4a16_mxfp4", OpClass.EXPERTS_INT4),
    ):
        assert [found for found, _ in op_classes(experts(dtype))] == [op]
    layer = points("layer", {"tokens_in_batch": [1.0]}, {"model": "m", "kind": "decode"})
    with pytest.raises(InputError, match="'layer' are not fitted one operator at a time"):
        op_classes(layer)


def test_fp8_with_a_four_in_its_name() -> None:
    assert [op for op, _ in op_classes(experts("fp8_e4m3"))] == [OpClass.EXPERTS_FP8]


def test_products_in_block_scaled_fp8_are_not_bf16() -> None:
    own = points("gemm", GEMMS, {"gemm_dtype": "fp8_block"})
    assert [op for op, _ in op_classes(own)] == [OpClass.GEMM_FP8]
    # And are predicted as such.
    plain = points("gemm", GEMMS, {"gemm_dtype": "fp8"})
    c = OpConstants(e_f=0.5, e_b=0.5)
    same = predict(OpClass.GEMM_FP8, c, plain, GPU).tolist()
    assert predict(OpClass.GEMM_FP8, c, own, GPU).tolist() == same


def test_expert_dtypes() -> None:
    plain: GpuType = gpu()
    assert expert_dtype("bfloat16", GPU) == expert_dtype("fp16", GPU) == (2.0, 100e12)
    assert expert_dtype("fp8_block", GPU) == (1.0, 200e12)
    # Without FP8 cores the weights are read small and multiplied in 16 bits.
    assert expert_dtype("fp8", plain) == (1.0, 100e12)
    assert expert_dtype("w4a16_mxfp4", GPU) == (4.25 / 8, 100e12)
    assert expert_dtype("int4_wo", GPU) == (4.25 / 8, 100e12)
    with pytest.raises(InputError, match="unknown expert dtype 'fp6'"):
        expert_dtype("fp6", GPU)


# Errors in per cent.


def test_accuracy_by_hand() -> None:
    measured = np.ones(101)
    predicted = 1.0 + np.arange(101) / 100 * np.where(np.arange(101) % 2, 1.0, -1.0)
    found = accuracy(predicted, measured)
    assert found.points == 101
    assert (found.median, found.p95) == pytest.approx((50.0, 95.0))
    with pytest.raises(InputError, match="no measurements"):
        accuracy(np.ones(0), np.ones(0))


# What cannot be fitted.


@pytest.mark.parametrize("hold_out", [True, False])
def test_too_few_points(hold_out: bool) -> None:
    sizes, _ = CASES[OpClass.GEMM]
    few = sizes.where(np.arange(len(sizes)) < MIN_POINTS - 1)
    says = rf"{MIN_POINTS - 1} points of gemm for TEST are too few to fit"
    with pytest.raises(InputError, match=says) as caught:
        fit(OpClass.GEMM, few, GPU, source="a test", hold_out=hold_out)
    assert "measure at least" in (caught.value.hint or "")


def test_passes_are_not_fitted() -> None:
    sizes, _ = CASES[OpClass.GEMM]
    with pytest.raises(InputError, match="elementwise"):
        fit(OpClass.ELEMENTWISE, sizes, GPU, source="a test")
    with pytest.raises(InputError, match="element-wise"):
        predict(OpClass.ELEMENTWISE, OpConstants(), sizes, GPU)


def test_without_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    sizes, _ = CASES[OpClass.GEMM]
    with pytest.raises(MissingDependencyError, match=r"atoll\[calibrate\]") as caught:
        fit(OpClass.GEMM, sizes, GPU, source="a test")
    assert caught.value.package == "scipy"
    # Predictions need none.
    predict(OpClass.GEMM, OpConstants(), sizes, GPU)
