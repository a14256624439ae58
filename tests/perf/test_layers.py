from __future__ import annotations

import math
from dataclasses import replace

import pytest

from atoll.catalog.transformer import DTYPES, TransformerSpec
from atoll.perf.batch import Batch
from atoll.perf.constants import OpClass, OpConstants
from atoll.perf.layers import (
    LayerKind,
    Shard,
    default_tp,
    layer_kinds,
    model_ops,
    op_classes_of,
    splits_evenly,
)
from tests.perf.builders import (
    BANDWIDTH,
    PEAK,
    constants,
    gpu,
    hybrid,
    mixture,
    model,
    node,
    spec,
)

BATCHES = {
    "prefill": Batch.prefill(300, 3),
    "chunk": Batch.prefill(200, 2, 500),
    "decode": Batch.decode(17, 450),
    "mixed": Batch(300.0, 3.0, 50.0, 17.0, 450.0),
}
ALPHA_S, BUS = 5e-6, 100e9


def product(m: float, n: float, k: float, weight_bytes: float = 2.0) -> float:
    return 2 * m * n * k / PEAK + (weight_bytes * n * k + 2 * m * (n + k)) / BANDWIDTH


def expected(llm: TransformerSpec, layer: int, tp: int, batch: Batch[float]) -> float:
    """One layer at full speed, both limits added: written from the drawing, not from the code."""
    heads, kv_heads = math.ceil(llm.heads / tp), math.ceil(llm.kv_heads / tp)
    q, kv, h = heads * llm.head_dim, kv_heads * llm.head_dim, llm.hidden
    m = batch.prefill_tokens + batch.decode_sequences
    moving = 2 * m / BANDWIDTH
    total = product(m, q + 2 * kv, h) + product(m, h, q)
    total += 2 * 4 * h * moving
    mixed = llm.is_moe_layer(layer)
    assert llm.moe is not None or not mixed
    width = llm.moe.shared_intermediate if llm.moe and mixed else llm.intermediate
    if width:
        inner = math.ceil(width / tp)
        total += product(m, 2 * inner, h) + product(m, h, inner) + 3 * inner * moving
    if llm.moe and mixed:
        total += product(m, llm.moe.experts, h)
        inner = math.ceil(llm.moe.intermediate / tp)
        k, count = llm.moe.top_k, llm.moe.experts
        active = count * (1 - (1 - k / count) ** m)
        total += 2 * 3 * h * inner * m * k / PEAK
        total += (2 * 3 * h * inner * active + 2 * m * (2 * h + 2 * k * inner)) / BANDWIDTH
    window = llm.windows[layer]
    total += 4 * q * batch.pairs(window) / PEAK
    total += (2 * 2 * q * batch.prefill_tokens + 4 * kv * batch.prefill_keys(window)) / BANDWIDTH
    total += batch.decode_sequences * (4 * kv * batch.decode_keys(window) + 2 * 2 * q) / BANDWIDTH
    if tp > 1:
        total += 2 * (ALPHA_S + 2 * (tp - 1) / tp * 2 * h * m / BUS)
    return total


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "llm",
    [
        spec(),
        mixture(),
        hybrid(),
        spec(heads=6, kv_heads=3, intermediate=1001),
        mixture(kv_heads=8),
    ],
    ids=["dense", "mixture", "hybrid", "uneven", "copied heads"],
)
def test_a_layer_by_hand(llm: TransformerSpec, tp: int, name: str) -> None:
    machine = node(8, alpha_us=ALPHA_S * 1e6, bus_bytes_per_s=BUS)
    ops = model_ops(llm, machine, tp, constants().gpu("TEST"))
    kinds = layer_kinds(llm)
    for layer in range(llm.layers):
        own = ops.layers[ops.kinds.index(kinds[layer])]
        assert own.seconds(BATCHES[name]) == pytest.approx(
            expected(llm, layer, tp, BATCHES[name]), rel=1e-12
        )


@pytest.mark.parametrize("tp", [1, 4])
def test_embedding_and_head_by_hand(tp: int) -> None:
    llm = spec(vocab=4001)
    machine = node(4, alpha_us=ALPHA_S * 1e6, bus_bytes_per_s=BUS)
    ops = model_ops(llm, machine, tp, constants().gpu("TEST"))
    batch = Batch.prefill(300, 3)
    look_up = 300 * 2 * 512 * 2 / BANDWIDTH
    total = ALPHA_S + 2 * 3 / 4 * 2 * 512 * 300 / BUS if tp > 1 else 0.0
    assert ops.embedding_seconds(batch) == pytest.approx(look_up + total)
    # Only the last token of each prompt needs logits; each GPU sends its share of them to one.
    gather = ALPHA_S + 3 / 4 * 2 * 4001 * 3 / BUS if tp > 1 else 0.0
    # Engines pad its rows to a multiple of 64.
    head = product(3, math.ceil(4032 / tp), 512)
    assert ops.head_seconds(batch) == pytest.approx(head + gather)


def test_shares_are_rounded_up() -> None:
    llm = mixture(heads=12, kv_heads=6, intermediate=1001, vocab=4001)
    assert Shard.of(llm, 1) == Shard(1, 12, 6, 1001, 256, 128, 4032)
    assert Shard.of(llm, 5) == Shard(5, 3, 2, 201, 52, 26, 807)
    # Fewer KV heads than GPUs: each GPU has a copy of one.
    assert Shard.of(llm, 8).kv_heads == 1
    assert Shard.of(spec(), 2).expert_intermediate == 0


def test_groups_that_engines_can_split_over() -> None:
    # Eight heads share two KV heads.
    assert [tp for tp in range(1, 17) if splits_evenly(spec(), tp)] == [1, 2, 4, 8]
    assert [tp for tp in range(1, 17) if splits_evenly(spec(heads=12, kv_heads=6), tp)] == [
        1, 2, 3, 6, 12,
    ]  # fmt: skip
    assert default_tp(spec(), node(8)) == 8
    assert default_tp(spec(), node(16)) == 8
    assert default_tp(spec(heads=12, kv_heads=6), node(8)) == 2
    assert default_tp(spec(heads=7, kv_heads=7), node(4)) == 1
    assert default_tp(model("phi-4-14b"), node(8)) == 2


@pytest.mark.parametrize(
    ("llm", "fp8", "used"),
    [
        (spec(), True, "gemm"),
        # The output matrix stays wide.
        (spec().with_weights("fp8"), True, "gemm gemm_fp8"),
        (spec(embedding_dtype=DTYPES["fp8"]).with_weights("fp8"), True, "gemm_fp8"),
        (spec().with_weights("fp8"), False, "gemm"),
        (spec(mlp_dtype=DTYPES["fp8"]), True, "gemm gemm_fp8"),
        (mixture(), True, "gemm experts"),
        (mixture().with_weights("fp8"), True, "gemm gemm_fp8 experts_fp8"),
        (mixture().with_weights("fp8"), False, "gemm experts"),
        (mixture().with_weights("int4"), True, "gemm experts_int4"),
    ],
)
def test_what_the_time_of_a_model_rests_on(llm: TransformerSpec, fp8: bool, used: str) -> None:
    found = op_classes_of(llm, gpu(fp8_tflops=200.0 if fp8 else None))
    assert {op.value for op in found} == {*used.split(), "attention_prefill", "attention_decode"}
    # The same classes that its layers take their constants from, but for passes, and the class of
    # the output matrix.
    seen = {
        key
        for layer in range(llm.layers)
        for batch in (Batch.prefill(1), Batch.decode(1, 1))
        for key in launches(llm, layer, batch, fp8=fp8)
    }
    head = "gemm_fp8" if fp8 and llm.embedding_dtype.name == "fp8" else "gemm"
    assert {op.value for op in found} == seen - {"elementwise"} | {head}


def test_kinds_of_layers() -> None:
    assert layer_kinds(spec()) == (LayerKind(None, False),) * 6
    assert layer_kinds(mixture()) == (LayerKind(None, False),) * 2 + (LayerKind(None, True),) * 4
    ops = model_ops(mixture(), node(), 1, constants().gpu("TEST"))
    assert ops.kinds == (LayerKind(None, False), LayerKind(None, True))
    oss = model_ops(model("gpt-oss-20b"), node(), 1, constants().gpu("TEST"))
    assert oss.kinds == (LayerKind(128, True), LayerKind(None, True))
    assert [layer.window for layer in oss.layers] == [128, None]


# Which constants an operator takes: every class gets a launch time of its own, work takes none.

LAUNCH_US = {op: float(10**i) for i, op in enumerate(OpClass)}


def launches(llm: TransformerSpec, layer: int, batch: Batch[float], *, fp8: bool) -> dict[str, int]:
    table = constants({op: OpConstants(t0_us=LAUNCH_US[op]) for op in OpClass})
    machine = node(fp16_tflops=1e15, bandwidth_bytes_per_s=1e27, fp8_tflops=2e15 if fp8 else None)
    ops = model_ops(llm, machine, 1, table.gpu("TEST"))
    own = ops.layers[ops.kinds.index(layer_kinds(llm)[layer])]
    digits = f"{round(own.seconds(batch) * 1e6):d}"[::-1]
    return {op.value: int(d) for op, d in zip(OpClass, digits, strict=False) if d != "0"}


def test_operators_of_a_dense_layer() -> None:
    passes = {"gemm": 4, "elementwise": 3}
    assert launches(spec(), 0, Batch.decode(1, 1), fp8=True) == passes | {"attention_decode": 1}
    assert launches(spec(), 0, Batch.prefill(1), fp8=True) == passes | {"attention_prefill": 1}
    both = Batch(1.0, 1.0, 0.0, 1.0, 1.0)
    assert launches(spec(), 0, both, fp8=True) == passes | {
        "attention_prefill": 1,
        "attention_decode": 1,
    }


def test_operators_of_a_mixture_layer() -> None:
    # Two for attention, two for the shared expert, one for the router.
    assert launches(mixture(), 2, Batch.decode(1, 1), fp8=True) == {
        "gemm": 5, "elementwise": 3, "attention_decode": 1, "experts": 1,
    }  # fmt: skip
    assert "experts" not in launches(mixture(), 0, Batch.decode(1, 1), fp8=True)
    moe = mixture().moe
    assert moe is not None
    alone = mixture(moe=replace(moe, shared_intermediate=0))
    assert launches(alone, 2, Batch.decode(1, 1), fp8=True) == {
        "gemm": 3, "elementwise": 2, "attention_decode": 1, "experts": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "fp8", "products", "experts"),
    [
        ("bf16", True, "gemm", "experts"),
        ("fp8", True, "gemm_fp8", "experts_fp8"),
        ("fp8", False, "gemm", "experts"),
        ("int8", True, "gemm", "experts"),
        ("int4", True, "gemm", "experts_int4"),
        ("mxfp4", False, "gemm", "experts_int4"),
    ],
)
def test_precision_picks_the_constants(dtype: str, fp8: bool, products: str, experts: str) -> None:
    found = launches(mixture().with_weights(dtype), 2, Batch.decode(1, 1), fp8=fp8)
    assert found[experts] == 1
    # The router stays in 16 bits.
    counts = {"gemm": 1} if products == "gemm_fp8" else {"gemm": 5}
    assert {key: n for key, n in found.items() if key.startswith("gemm")} == counts | (
        {"gemm_fp8": 4} if products == "gemm_fp8" else {}
    )


@pytest.mark.parametrize(
    ("dtype", "products", "experts"),
    [
        ("nvfp4", "gemm_fp4", "experts_fp4"),
        # Formats that its cores do not run as they are.
        ("mxfp4", "gemm", "experts_int4"),
        ("int4", "gemm", "experts_int4"),
    ],
)
def test_four_bits_run_on_four_bit_cores_where_there_are_some(
    dtype: str, products: str, experts: str
) -> None:
    llm = mixture().with_weights(dtype)
    blackwell = gpu(fp8_tflops=200.0, fp4_tflops=400.0)
    found = {op.value for op in op_classes_of(llm, blackwell)}
    assert found == {"gemm", products, experts, "attention_prefill", "attention_decode"}
    # Elsewhere they are read small and multiplied in 16 bits.
    older = {op.value for op in op_classes_of(llm, gpu(fp8_tflops=200.0))}
    assert older == {"gemm", "experts_int4", "attention_prefill", "attention_decode"}


def test_nvfp4_runs_at_the_fp4_peak_and_reads_its_bits() -> None:
    table = constants().gpu("TEST")
    batch = Batch.prefill(4096, 1)
    wide = model_ops(spec(), node(), 1, table).layers[0].seconds(batch)
    llm = spec().with_weights("nvfp4")
    narrow = model_ops(llm, node(fp4_tflops=400.0), 1, table).layers[0].seconds(batch)
    matrices = spec().attention_params + spec().mlp_params(0)
    saved = 2 * 4096 * matrices / PEAK * 0.75 + matrices * (2 - 4.5 / 8) / BANDWIDTH
    assert wide - narrow == pytest.approx(saved)


def test_fp8_runs_at_the_fp8_peak_and_reads_half() -> None:
    llm = spec().with_weights("fp8")
    table = constants().gpu("TEST")
    batch = Batch.prefill(4096, 1)
    wide = model_ops(spec(), node(), 1, table).layers[0].seconds(batch)
    narrow = model_ops(llm, node(fp8_tflops=200.0), 1, table).layers[0].seconds(batch)
    matrices = spec().attention_params + spec().mlp_params(0)
    saved = 2 * 4096 * matrices / PEAK / 2 + matrices / BANDWIDTH
    assert wide - narrow == pytest.approx(saved)
    # Without FP8 cores the weights are read small and multiplied in 16 bits.
    weight_only = model_ops(llm, node(), 1, table).layers[0].seconds(batch)
    assert wide - weight_only == pytest.approx(matrices / BANDWIDTH)


def test_a_narrow_kv_cache_halves_what_decode_reads() -> None:
    table = constants().gpu("TEST")
    batch = Batch.decode(64, 4000)
    wide = model_ops(spec(), node(), 1, table).layers[0].attention_seconds(batch)
    narrow = model_ops(spec(kv_dtype=DTYPES["fp8"]), node(), 1, table).layers[0]
    cache = 64 * 4000 * 2 * 2 * 64 * 2
    assert wide - narrow.attention_seconds(batch) == pytest.approx(cache / 2 / BANDWIDTH)


def test_attention_of_an_empty_part_takes_no_time() -> None:
    slow = OpConstants(t0_us=100.0)
    table = constants({OpClass.ATTENTION_PREFILL: slow, OpClass.ATTENTION_DECODE: slow})
    layer = model_ops(spec(), node(), 1, table.gpu("TEST")).layers[0]
    prefill, decode = Batch.prefill(64), Batch.decode(4, 100)
    both = Batch(64.0, 1.0, 0.0, 4.0, 100.0)
    assert 1e-4 < layer.attention_seconds(prefill) < 2e-4
    assert 1e-4 < layer.attention_seconds(decode) < 2e-4
    assert layer.attention_seconds(both) == pytest.approx(
        layer.attention_seconds(prefill) + layer.attention_seconds(decode)
    )


def test_a_windowed_layer_does_not_slow_down_with_what_it_cannot_see() -> None:
    table = constants({OpClass.ATTENTION_PREFILL: OpConstants(serial_ns=20.0)})
    layer = model_ops(hybrid(), node(), 1, table.gpu("TEST")).layers[0]
    near, far = Batch.prefill(512, 1, 1000), Batch.prefill(512, 1, 100_000)
    assert layer.attention_seconds(far) == pytest.approx(layer.attention_seconds(near))
