from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from atoll.catalog import Catalog
from atoll.catalog.gpus import GpuType, default_gpus
from atoll.catalog.overlay import apply_overlay
from atoll.core.errors import InputError, UnknownNameError
from atoll.core.rng import stream
from atoll.perf.batch import Batch
from atoll.perf.constants import (
    FIRST_TOKEN_ERROR,
    HOST_ERROR,
    LINK_ERROR,
    PROXY_ERROR,
    SERVER_ERROR,
    UNSTATED_ERROR,
    ConstantTable,
    GpuConstants,
    OpClass,
    OpConstants,
    Tag,
    default_constants,
    load_constants,
    sample_constants,
)
from atoll.perf.step import analytic, step_seconds
from tests.perf.builders import model, node, node_type

SHIPPED = sorted(name for name, gpu in default_gpus().items() if gpu.like is None)
DENSE = (OpClass.GEMM, OpClass.ATTENTION_PREFILL, OpClass.ATTENTION_DECODE)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return path


# What ships.


def test_every_gpu_of_the_catalog_has_every_class() -> None:
    table = default_constants()
    assert list(table.names()) == SHIPPED
    for name in SHIPPED:
        fp4 = {OpClass.GEMM_FP4, OpClass.EXPERTS_FP4}
        none = set() if default_gpus()[name].fp4_tflops is not None else fp4
        assert set(table.gpu(name).ops) == set(OpClass) - none
        assert table.gpu(name).gpu == name


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_numbers_are_physical(name: str) -> None:
    for op, c in default_constants().gpu(name).ops.items():
        # Boost clocks lie above the datasheet's peak, old attention kernels far below it.
        assert 0.04 <= c.e_f <= 1.1, op
        # Above 1 the measured rig found part of the operands in its cache.
        assert 0.1 <= c.e_b <= 1.3, op
        assert 0.0 < c.t0_us <= 200.0, op
        assert 0.5 <= c.p <= 6.0, op
        assert (c.error >= PROXY_ERROR) if c.tag is Tag.PROXY else (0.02 < c.error < 0.3), op
        assert c.t0_s == c.t0_us * 1e-6
        assert c.source, op
        assert (c.hot_bytes == 0.0) or c.tag is Tag.MEASURED, op


@pytest.mark.parametrize("name", ["H100", "H200", "B200", "B300", "GB200", "L40S"])
def test_gpus_with_operator_tables_are_measured(name: str) -> None:
    gpu = default_constants().gpu(name)
    assert (OpClass.GEMM_FP4 in gpu.ops) == (default_gpus()[name].fp4_tflops is not None)
    for op in set(gpu.ops) - {OpClass.ELEMENTWISE}:
        assert gpu.op(op).tag is Tag.MEASURED
        assert "aiconfigurator-core" in gpu.op(op).source
    assert gpu.tag(DENSE) is Tag.MEASURED


def test_an_a100_is_measured_where_the_hardware_can() -> None:
    gpu = default_constants().gpu("A100-80")
    measured = {op for op, c in gpu.ops.items() if c.tag is Tag.MEASURED}
    assert measured == {*DENSE, OpClass.EXPERTS}


@pytest.mark.parametrize("name", ["L4", "T4", "V100-16", "A100-40"])
def test_products_of_these_are_fitted_to_whole_layers(name: str) -> None:
    product = default_constants().gpu(name).op(OpClass.GEMM)
    assert product.tag is Tag.LAYER_FITTED
    assert "Helix" in product.source
    # Whole layers cannot tell pads apart.
    assert (product.pad_k, product.pad_n) == (0.0, 0.0)


@pytest.mark.parametrize("name", ["A10G", "RTX3090", "A6000", "GH200"])
def test_what_nobody_measured_is_a_proxy(name: str) -> None:
    gpu = default_constants().gpu(name)
    assert {c.tag for c in gpu.ops.values()} == {Tag.PROXY}
    assert gpu.tag(DENSE) is Tag.PROXY
    source = gpu.op(OpClass.GEMM).source
    assert source == ("H100" if name == "GH200" else "A40 (Vidur 2024)")


def test_a_proxy_holds_its_originals_numbers() -> None:
    table = default_constants()
    for op, mine in table.gpu("GH200").ops.items():
        original = table.gpu("H100").op(op)
        for name in ("e_f", "e_b", "t0_us", "p", "pad", "pad_k", "pad_n", "serial_ns"):
            assert getattr(mine, name) == getattr(original, name)


def test_the_file_is_read_once() -> None:
    assert default_constants() is default_constants()


# Tags and summaries.


def test_the_weakest_tag_counts() -> None:
    ops = dict.fromkeys(OpClass, OpConstants(tag=Tag.MEASURED, source="here"))
    ops |= {
        OpClass.GEMM: OpConstants(tag=Tag.LAYER_FITTED),
        OpClass.EXPERTS: OpConstants(tag=Tag.PROXY),
    }
    own = GpuConstants("X", ops)
    assert own.tag([OpClass.GEMM_FP8, OpClass.ATTENTION_DECODE]) is Tag.MEASURED
    assert own.tag(DENSE) is Tag.LAYER_FITTED
    # Only what is used counts.
    assert own.tag([*DENSE, OpClass.EXPERTS]) is Tag.PROXY


def test_summary_puts_the_weakest_ground_first() -> None:
    table = default_constants()
    assert table.gpu("H100").summary(DENSE) == "measured (aiconfigurator-core 0.12.0 vLLM tables)"
    assert table.gpu("RTX4090").summary(DENSE) == (
        "proxy (L40S): attention_prefill, attention_decode; "
        "measured (LLMServingSim, vLLM 0.19): gemm"
    )


# GPUs without constants of their own.


def test_a_relative_stands_in_for_an_unknown_gpu() -> None:
    table = default_constants()
    hopper = replace(default_gpus()["H100"], name="H800")
    found = table.for_gpu(hopper)
    assert found.gpu == "H800"
    assert set(found.ops) == set(OpClass) - {OpClass.GEMM_FP4, OpClass.EXPERTS_FP4}
    for op, taken in found.ops.items():
        original = table.gpu("H100").op(op)
        assert (taken.tag, taken.source) == (Tag.PROXY, "H100")
        assert (taken.e_f, taken.e_b, taken.p) == (original.e_f, original.e_b, original.p)
        # How warm the rig's cache was says nothing about another GPU.
        assert (taken.hot_bytes, taken.hot_gain) == (0.0, 1.0)
    # The same architecture first, even where another is nearer in compute per byte.
    ada = replace(default_gpus()["L4"], name="L20", bandwidth_bytes_per_s=864e9)
    assert table.for_gpu(ada).op(OpClass.GEMM).source in ("L4", "L40S", "RTX4090")


def test_a_known_gpu_stands_for_itself() -> None:
    table = default_constants()
    assert table.for_gpu(default_gpus()["L4"]) is table.gpu("L4")


def test_a_relative_fills_in_single_classes() -> None:
    own = measured("A100-80", gemm={"e_f": 0.5, "tag": "measured", "source": "mine"})
    mine = default_constants().for_gpu(replace(own, name="MINE"))
    assert (mine.op(OpClass.GEMM).e_f, mine.op(OpClass.GEMM).tag) == (0.5, Tag.MEASURED)
    assert mine.op(OpClass.EXPERTS).source == "A100-80"
    assert mine.op(OpClass.EXPERTS).tag is Tag.PROXY


def test_no_relative_at_all() -> None:
    with pytest.raises(UnknownNameError, match="X9"):
        ConstantTable([]).for_gpu(replace(default_gpus()["L4"], name="X9"))


def test_unknown_gpu() -> None:
    with pytest.raises(UnknownNameError, match="did you mean H100") as caught:
        default_constants().gpu("H10")
    assert "GPU with performance constants" in str(caught.value)


# Constants of an overlay.


def measured(gpu: str, **operators: object) -> GpuType:
    """A GPU with constants of its own in an overlay."""
    return apply_overlay(Catalog.default(), {"gpus": {gpu: {"operators": operators}}}).gpu(gpu)


def test_an_overlays_constants_take_the_place_of_single_classes() -> None:
    table, gpu = default_constants(), measured("H100", gemm={"e_f": 0.5, "tag": "measured"})
    shipped, found = table.gpu("H100"), table.for_gpu(gpu)
    own, known = found.op(OpClass.GEMM), shipped.op(OpClass.GEMM)
    assert (own.e_f, own.e_b, own.tag, own.error) == (0.5, 1.0, Tag.MEASURED, UNSTATED_ERROR)
    # Bursts of one operator do not say how fast it is under load that lasts.
    assert known.sustained < 1.0
    assert own.sustained == known.sustained
    assert found.op(OpClass.EXPERTS) == shipped.op(OpClass.EXPERTS)
    assert table.gpu("H100") is shipped
    assert table.for_gpu(gpu.in_shares(2)) == found
    # A later overlay has the last word, class by class.
    again = {"gpus": {"H100": {"operators": {"gemm": {"e_f": 0.25}, "experts": {"e_b": 0.5}}}}}
    base = apply_overlay(Catalog.default(), {"gpus": {"H100": {"operators": {"gemm": {}}}}})
    later = table.for_gpu(apply_overlay(base, again).gpu("H100"))
    assert (later.op(OpClass.GEMM).e_f, later.op(OpClass.EXPERTS).e_b) == (0.25, 0.5)
    # What was measured of one GPU is not said of another that is like it.
    like = {"gpus": {"X100": {"like": "H100"}}}
    assert not apply_overlay(apply_overlay(Catalog.default(), again), like).gpu("X100").operators


def test_draws_of_an_overlays_constants_are_drawn_once() -> None:
    gpu = measured("H100", gemm={"e_f": 0.5, "tag": "measured", "error": 0.1})
    drawn = sample_constants(default_constants(), stream(1, "own"), [gpu])
    assert drawn.for_gpu(gpu).op(OpClass.GEMM) == drawn.gpu("H100").op(OpClass.GEMM)
    assert drawn.for_gpu(gpu).op(OpClass.GEMM).e_f != 0.5


def test_steps_are_as_fast_as_an_overlay_says() -> None:
    slow = {"gpus": {"H100": {"operators": {"gemm": {"e_b": 0.2, "tag": "measured"}}}}}
    llm, batch = Catalog.default().model("llama-3.1-8b").llm, Batch.decode(4.0, 500.0)
    times = [
        step_seconds(analytic(llm, catalog.node("H100:1")), batch, 0, llm.layers)
        for catalog in (Catalog.default(), apply_overlay(Catalog.default(), slow))
    ]
    assert times[1] > 3.0 * times[0]


def test_engines_have_kernels_of_their_own_where_they_were_measured() -> None:
    usual = default_constants().gpu("H200")
    theirs, decode = usual.of_engine("trtllm"), OpClass.ATTENTION_DECODE
    assert "TensorRT-LLM" in theirs.op(decode).source
    # Twice as many tokens in the time: it reads a cache of 8 bits in about half the time of one of 16.
    assert usual.op(decode).kv8 / theirs.op(decode).kv8 > 1.3
    assert theirs.op(OpClass.EXPERTS) == usual.op(OpClass.EXPERTS)
    assert usual.of_engine("vllm") is usual


def test_what_was_measured_on_a_machine_counts_whatever_engine_runs() -> None:
    decode = OpClass.ATTENTION_DECODE
    mine = OpConstants(e_b=0.5, tag=Tag.MEASURED, source="mine")
    theirs = default_constants().gpu("H200").with_measured({decode: mine}).of_engine("trtllm")
    assert theirs.op(decode) == mine
    assert "TensorRT-LLM" in theirs.op(OpClass.ATTENTION_PREFILL).source


def test_draws_move_an_engines_own_kernels_as_the_gpus() -> None:
    table, decode = default_constants(), OpClass.ATTENTION_DECODE
    drawn = sample_constants(table, stream(1, "own kernels"), first_token_error=0.0)
    own = drawn.gpu("H200").engines["trtllm"][decode]
    assert own.e_b != table.gpu("H200").engines["trtllm"][decode].e_b
    again = sample_constants(table, stream(1, "own kernels"), first_token_error=0.0)
    assert again.gpu("H200").engines["trtllm"][decode] == own


def test_a_file_names_an_engines_own_kernels(tmp_path: Path) -> None:
    own = "{attention_decode: {e_b: 0.5, tag: measured}}"
    path = written(tmp_path, f"gpus: {{H100: {{engines: {{sglang: {own}}}}}}}")
    found = load_constants(path).gpu("H100").engines["sglang"]
    assert found[OpClass.ATTENTION_DECODE].e_b == 0.5


@pytest.mark.parametrize(
    ("operators", "field"),
    [
        ({"matmul": {"e_f": 1}}, "matmul"),
        ({"gemm": {"speed": 1.0}}, "gemm.speed"),
        ({"gemm": {"e_f": 0.0}}, "gemm.e_f"),
        ({"gemm": {"e_f": 2.5}}, "gemm.e_f"),
        ({"gemm": {"p": 16.5}}, "gemm.p"),
        ({"gemm": {"t0_us": -1.0}}, "gemm.t0_us"),
        ({"gemm": {"t0_us": float("nan")}}, "gemm.t0_us"),
        ({"gemm": {"e_f": True}}, "gemm.e_f"),
        ({"gemm": {"tag": "guessed"}}, "gemm.tag"),
        ({"gemm": 0.5}, "gemm"),
    ],
)
def test_bad_constants_of_an_overlay(operators: dict[str, object], field: str) -> None:
    with pytest.raises(InputError) as caught:
        measured("H100", **operators)
    assert caught.value.field is not None
    assert caught.value.field.startswith(f"gpus.H100.operators.{field}")
    assert "\n" not in str(caught.value)


# Errors.


def test_a_scaled_operator_takes_so_many_times_as_long() -> None:
    llm, machine = model("qwen3-235b-a22b"), node_type("H200:1")
    ops = default_constants().gpu("H200").ops
    slower = ConstantTable([GpuConstants("H200", {op: c.scale_time(1.7) for op, c in ops.items()})])
    for batch in (Batch.decode(32, 2000), Batch.prefill(4000, 3)):
        plain, scaled = (
            step_seconds(analytic(llm, machine, engine="none", constants=t), batch, 0, llm.layers)
            for t in (default_constants(), slower)
        )
        assert scaled == pytest.approx(1.7 * plain, rel=1e-9)


SAMPLED = (("H200", OpClass.GEMM), ("A10G", OpClass.EXPERTS))
UNMEASURED = node(name="OTHER", architecture="Ada").gpu


@cache
def sample_200() -> list[ConstantTable]:
    """Draw constants of GPUs that tests look at and of one that nobody measured."""
    known = [default_constants().gpu(name) for name, _ in SAMPLED]
    few = ConstantTable([replace(gpu, engines={}) for gpu in known])
    rng = np.random.default_rng(5)
    return [sample_constants(few, rng, [UNMEASURED]) for _ in range(200)]


def test_samples_have_the_error_they_are_drawn_with() -> None:
    table, draws = default_constants(), sample_200()
    for gpu, op in SAMPLED:
        truth = table.gpu(gpu).op(op)
        factors = np.array([truth.e_b / draw.gpu(gpu).op(op).e_b for draw in draws])
        assert np.median(factors) == pytest.approx(1.0, abs=0.04)
        # Its own error, and that of all classes together.
        variances = [np.log1p(error**2) for error in (truth.error, SERVER_ERROR)]
        assert np.std(np.log(factors)) == pytest.approx(np.sqrt(sum(variances)), rel=0.12)
    products, attention = (
        [np.log(draw.gpu("H200").op(op).e_b) for draw in draws]
        for op in (OpClass.GEMM, OpClass.ATTENTION_DECODE)
    )
    assert np.corrcoef(products, attention)[0, 1] > 0.7
    for error, drawn in (
        (HOST_ERROR, [draw.gpu("H200").host for draw in draws]),
        (LINK_ERROR, [draw.gpu("H200").links for draw in draws]),
        (FIRST_TOKEN_ERROR, [draw.first_token() for draw in draws]),
    ):
        assert np.std(np.log(drawn)) == pytest.approx(np.sqrt(np.log1p(error**2)), rel=0.12)
    # What is no time stays.
    assert {draw.gpu("H200").op(OpClass.GEMM).p for draw in draws[:9]} == {
        table.gpu("H200").op(OpClass.GEMM).p
    }


def test_samples_depend_on_the_seed_and_on_nothing_else() -> None:
    table = default_constants()
    turned = ConstantTable([table.gpu(name) for name in reversed(table.names())])
    one, other, third = (
        sample_constants(t, np.random.default_rng(seed)).gpu("L4").ops
        for t, seed in ((table, 1), (turned, 1), (table, 2))
    )
    assert one == other
    assert one != third


def test_a_gpu_that_nobody_measured_is_sampled_with_a_proxys_error() -> None:
    draws = [draw.gpu("OTHER").op(OpClass.GEMM).e_f for draw in sample_200()]
    both = np.hypot(PROXY_ERROR, SERVER_ERROR)
    assert np.std(np.log(draws)) == pytest.approx(both, rel=0.15)
