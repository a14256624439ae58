"""Energy of steps: closed forms, bounds, and the rows it was measured on."""

from __future__ import annotations

import csv

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.catalog import Catalog
from atoll.core.errors import UsageError
from atoll.perf.batch import Batch
from atoll.perf.constants import Tag
from atoll.perf.energy import (
    dynamic_joules,
    min_dynamic_joules,
    power_model,
    step_joules,
    step_work,
)
from atoll.perf.step import analytic, step_seconds
from benchmarks.report import ROOT

CATALOG = Catalog.default()
LLAMA = CATALOG.model("llama-3.1-8b").llm


def test_work_of_a_decode_step_is_weights_and_cache_once() -> None:
    work = step_work(LLAMA, Batch.decode(4, 1000), 0, LLAMA.layers)
    weights = LLAMA.range_weight_bytes(0, LLAMA.layers) + LLAMA.head_bytes
    assert work.moved_bytes == pytest.approx(weights + 4 * 1000 * LLAMA.kv_bytes_per_token)
    params = sum(map(LLAMA.layer_params, range(LLAMA.layers))) + LLAMA.head_params
    attention = 4 * 1000 * 4 * LLAMA.heads * LLAMA.head_dim * LLAMA.layers
    assert work.flops == pytest.approx(4 * 2 * params + attention)


def test_ranges_add_up_to_the_whole() -> None:
    batch = Batch(64.0, 2.0, 32.0, 8.0, 500.0)
    parts = [step_work(LLAMA, batch, 0, 10), step_work(LLAMA, batch, 10, LLAMA.layers)]
    whole = step_work(LLAMA, batch, 0, LLAMA.layers)
    assert sum(p.moved_bytes for p in parts) == pytest.approx(whole.moved_bytes)
    assert sum(p.flops for p in parts) == pytest.approx(whole.flops)


def test_one_token_reads_its_experts_and_many_read_all() -> None:
    spec = CATALOG.model("qwen3-30b-a3b").llm
    few = step_work(spec, Batch.decode(1, 1), 0, spec.layers).moved_bytes
    many = step_work(spec, Batch.decode(4096, 1), 0, spec.layers).moved_bytes
    moe = spec.moe
    assert moe is not None
    untouched = (moe.experts - moe.top_k) * spec.expert_params * 2.0 * spec.layers
    cache = 4095 * spec.kv_bytes_per_token
    assert many - few == pytest.approx(untouched + cache, rel=1e-6)


def test_a_range_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="not a range"):
        step_work(LLAMA, Batch.decode(1, 1), 5, 5)


@given(st.sampled_from(["H200:1", "L4:2", "A100-80:4"]), st.integers(1, 256), st.integers(0, 8192))
def test_a_step_draws_between_idle_and_the_limit(name: str, sequences: int, context: int) -> None:
    node = CATALOG.node(name)
    model = analytic(LLAMA, node)
    batch = Batch.decode(sequences, context)
    seconds = model.tp * step_seconds(model, batch, 0, LLAMA.layers)
    joules = step_joules(model, batch, 0, LLAMA.layers)
    power = power_model(node.gpu)
    assert power.idle_w * seconds < joules <= node.gpu.tdp_w * seconds * (1 + 1e-12)


def test_only_the_measured_gpu_is_called_measured() -> None:
    assert power_model(CATALOG.gpu("H200")).tag is Tag.MEASURED
    assert power_model(CATALOG.gpu("L40S")).tag is Tag.PROXY


def test_the_rows_it_was_measured_on_are_met() -> None:
    power = power_model(CATALOG.gpu("H200"))
    with (ROOT / "benchmarks" / "results" / "h200_power.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    # The first row is the GPU before anything was loaded.
    for row in rows[1:]:
        watts = power.watts(float(row["bytes_per_s"]), float(row["flop_per_s"]))
        assert watts == pytest.approx(float(row["watts"]), rel=0.04), row


def test_products_that_last_are_slower_and_kernels_alone_are_not() -> None:
    node = CATALOG.node("H200:1")
    batch = Batch.prefill(8192)
    alone = analytic(LLAMA, node, engine="none").parts(batch).layers[0]
    served = analytic(LLAMA, node, engine="vllm").parts(batch).layers[0]
    assert 1.1 < served / alone < 1 / 0.83
    other = CATALOG.node("L40S:1")
    same = [analytic(LLAMA, other, engine=e).parts(batch).layers[0] for e in ("none", "vllm")]
    assert same[0] == same[1]


def test_dynamic_energy_is_what_waiting_leaves_out() -> None:
    model = analytic(LLAMA, CATALOG.node("H200:1"))
    batch = Batch.decode(16, 800)
    seconds = step_seconds(model, batch, 0, LLAMA.layers)
    waiting = power_model(CATALOG.gpu("H200")).idle_w * seconds
    whole = step_joules(model, batch, 0, LLAMA.layers)
    assert dynamic_joules(model, batch, 0, LLAMA.layers) == pytest.approx(whole - waiting)
    assert 0.0 < whole - waiting < whole


@given(
    name=st.sampled_from(("llama-3.1-8b", "gpt-oss-20b", "qwen3-32b")),
    kinds=st.lists(
        st.sampled_from(("L4:1", "L40S:1", "A10G:4", "H200:1")), min_size=1, max_size=3, unique=True
    ),
    prompts=st.floats(0.0, 4.0),
    length=st.floats(1.0, 1500.0),
    decodes=st.floats(1.0, 512.0),
    context=st.floats(1.0, 8000.0),
)
def test_no_step_takes_less_per_token_than_the_least(
    name: str, kinds: list[str], prompts: float, length: float, decodes: float, context: float
) -> None:
    spec = CATALOG.model(name).llm
    models = [analytic(spec, CATALOG.node(kind)) for kind in kinds]
    least = min_dynamic_joules(models, 8192.0)
    batch = Batch(prompts * length, prompts, 0.0, decodes, context)
    for model in models:
        # Split between any two, every part counts its own.
        cut = spec.layers // 2
        taken = sum(dynamic_joules(model, batch, a, b) for a, b in ((0, cut), (cut, spec.layers)))
        assert taken >= least * batch.tokens * (1.0 - 1e-9)
    assert least > 0.0
