from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from atoll.catalog.gpus import default_gpus
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
from tests.perf.builders import constants, model, node, node_type

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


def test_a_relative_fills_in_single_classes(tmp_path: Path) -> None:
    path = written(tmp_path, "gpus: {MINE: {gemm: {e_f: 0.5, tag: measured, source: mine}}}")
    table = load_constants(path, base=default_constants())
    assert set(table.gpu("MINE").ops) == {OpClass.GEMM}
    own = table.for_gpu(replace(default_gpus()["A100-80"], name="MINE"))
    assert (own.op(OpClass.GEMM).e_f, own.op(OpClass.GEMM).tag) == (0.5, Tag.MEASURED)
    assert own.op(OpClass.EXPERTS).source == "A100-80"
    assert own.op(OpClass.EXPERTS).tag is Tag.PROXY


def test_no_relative_at_all() -> None:
    with pytest.raises(UnknownNameError, match="X9"):
        ConstantTable([]).for_gpu(replace(default_gpus()["L4"], name="X9"))


def test_unknown_gpu() -> None:
    with pytest.raises(UnknownNameError, match="did you mean H100") as caught:
        default_constants().gpu("H10")
    assert "GPU with performance constants" in str(caught.value)


# Merging.


def test_merged_adds_gpus_and_replaces_single_classes() -> None:
    base = constants()
    own = OpConstants(e_f=0.5, tag=Tag.MEASURED, source="mine")
    other = ConstantTable(
        [GpuConstants("TEST", {OpClass.GEMM: own}), GpuConstants("NEW", {OpClass.GEMM: own})]
    )
    both = base.merge(other)
    assert both.names() == ("NEW", "TEST")
    assert both.gpu("TEST").op(OpClass.GEMM) == own
    assert both.gpu("TEST").op(OpClass.EXPERTS) == base.gpu("TEST").op(OpClass.EXPERTS)
    assert set(both.gpu("NEW").ops) == {OpClass.GEMM}
    # Neither table changes.
    assert base.gpu("TEST").op(OpClass.GEMM).e_f == 1.0
    assert base.names() == ("TEST",)


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
    both = default_constants().merge(ConstantTable([GpuConstants("H200", {decode: mine})]))
    theirs = both.gpu("H200").of_engine("trtllm")
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
    path = written(tmp_path, "gpus: {H100: {engines: [sglang]}}")
    with pytest.raises(InputError, match="not a mapping of engines"):
        load_constants(path)


def test_a_file_on_top_of_the_shipped_constants(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "gpus: {H100: {gemm: {e_f: 0.5, e_b: 0.25, t0_us: 7, p: 2, pad_k: 3, tag: layer-fitted, "
        "source: mine}}}",
    )
    table = load_constants(path, base=default_constants())
    assert table.gpu("H100").op(OpClass.GEMM) == OpConstants(
        e_f=0.5,
        e_b=0.25,
        t0_us=7.0,
        p=2.0,
        pad_k=3.0,
        error=UNSTATED_ERROR,
        tag=Tag.LAYER_FITTED,
        source="mine",
    )
    shipped = default_constants().gpu("H100")
    assert table.gpu("H100").op(OpClass.GEMM_FP8) == shipped.op(OpClass.GEMM_FP8)
    assert table.gpu("L4") == default_constants().gpu("L4")


def test_an_untagged_file_is_trusted_least(tmp_path: Path) -> None:
    path = written(tmp_path, "gpus: {H100: {gemm: {e_f: 0.5}}}")
    found = load_constants(path, base=default_constants()).gpu("H100").op(OpClass.GEMM)
    assert found.tag is Tag.PROXY


# Bad files: one line that names the file and the field.


@pytest.mark.parametrize(
    ("text", "field", "says"),
    [
        ("gpus: {H100: {matmul: {e_f: 1}}}", "gpus.H100.matmul", "unknown operator class"),
        ("gpus: {H100: {gemm: {speed: 1}}}", "gpus.H100.gemm", "unknown constant 'speed'"),
        ("gpus: {H100: {gemm: {e_f: 0}}}", "gpus.H100.gemm.e_f", "0.001 to 2"),
        ("gpus: {H100: {gemm: {e_f: 2.5}}}", "gpus.H100.gemm.e_f", "0.001 to 2"),
        ("gpus: {H100: {gemm: {e_b: -1}}}", "gpus.H100.gemm.e_b", "0.001 to 2"),
        ("gpus: {H100: {gemm: {p: 0}}}", "gpus.H100.gemm.p", "0.1 to 16"),
        ("gpus: {H100: {gemm: {p: 16.5}}}", "gpus.H100.gemm.p", "0.1 to 16"),
        ("gpus: {H100: {gemm: {t0_us: -1}}}", "gpus.H100.gemm.t0_us", "0 to 100000"),
        ("gpus: {H100: {gemm: {t0_us: .inf}}}", "gpus.H100.gemm.t0_us", "0 to 100000"),
        ("gpus: {H100: {gemm: {t0_us: .nan}}}", "gpus.H100.gemm.t0_us", "nan is not"),
        ("gpus: {H100: {gemm: {e_f: fast}}}", "gpus.H100.gemm.e_f", "'fast' is not a number"),
        ("gpus: {H100: {gemm: {e_f: }}}", "gpus.H100.gemm.e_f", "None is not a number"),
        ("gpus: {H100: {gemm: {e_f: [1]}}}", "gpus.H100.gemm.e_f", "[1] is not a number"),
        ("gpus: {H100: {gemm: {tag: guessed}}}", "gpus.H100.gemm.tag", "unknown tag 'guessed'"),
        ("gpus: {H100: {gemm: 0.5}}", "gpus.H100.gemm", "not a mapping of constants"),
        ("gpus: {H100: 0.5}", "gpus.H100", "not a mapping of operator classes"),
        ("gpus: {}\nextra: [", None, "not valid YAML"),
        ("gpus: [H100]", "gpus", "no mapping 'gpus'"),
        ("", "gpus", "no mapping 'gpus'"),
        ("H100: {}", "gpus", "no mapping 'gpus'"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, field: str | None, says: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(InputError) as caught:
        load_constants(path, base=default_constants())
    error = caught.value
    assert error.path == str(path)
    assert error.field == field
    assert says in str(error)
    assert str(path) in str(error)
    assert "\n" not in str(error)


def test_hints_list_what_would_be_right(tmp_path: Path) -> None:
    for text, known in (
        ("gpus: {H100: {matmul: {}}}", [op.value for op in OpClass]),
        ("gpus: {H100: {gemm: {speed: 1}}}", ["e_f", "e_b", "hot_gain"]),
        ("gpus: {H100: {gemm: {tag: guessed}}}", [tag.value for tag in Tag]),
    ):
        with pytest.raises(InputError) as caught:
            load_constants(written(tmp_path, text), base=default_constants())
        assert caught.value.hint is not None
        assert all(name in caught.value.hint for name in known)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.yaml"):
        load_constants(tmp_path / "none.yaml")


@pytest.mark.parametrize("tag", ["[measured]", "{measured: 1}"])
def test_a_tag_that_is_no_text(tmp_path: Path, tag: str) -> None:
    path = written(tmp_path, f"gpus: {{H100: {{gemm: {{tag: {tag}}}}}}}")
    with pytest.raises(InputError) as caught:
        load_constants(path, base=default_constants())
    assert caught.value.field == "gpus.H100.gemm.tag"


def test_a_truth_value_is_no_number(tmp_path: Path) -> None:
    path = written(tmp_path, "gpus: {H100: {gemm: {e_f: true}}}")
    with pytest.raises(InputError):
        load_constants(path, base=default_constants())


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
def sample_500() -> list[ConstantTable]:
    """Draw constants of GPUs that tests look at and of one that nobody measured."""
    few = ConstantTable([default_constants().gpu(name) for name, _ in SAMPLED])
    rng = np.random.default_rng(5)
    return [sample_constants(few, rng, [UNMEASURED]) for _ in range(500)]


def test_samples_have_the_error_they_are_drawn_with() -> None:
    table, draws = default_constants(), sample_500()
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
    draws = [draw.gpu("OTHER").op(OpClass.GEMM).e_f for draw in sample_500()]
    both = np.hypot(PROXY_ERROR, SERVER_ERROR)
    assert np.std(np.log(draws)) == pytest.approx(both, rel=0.15)
