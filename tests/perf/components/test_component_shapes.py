"""Talkers as transformers, weights, and times of single layers by hand."""

from __future__ import annotations

import pytest

from atoll.catalog.dtypes import BF16
from atoll.engines.table import profile_engine
from atoll.perf.batch import Batch
from atoll.perf.components.component_shapes import (
    autoregressive_spec,
    component_weight_bytes,
    predictor_spec,
    talker_spec,
)
from atoll.perf.components.executor_steps import executor_steps
from atoll.perf.components.kernels import (
    EXPONENTIAL_FLOPS,
    PLAIN_PASSES,
    UNALIGNED_SLOWER,
    Kernels,
)
from atoll.perf.components.talkers import TalkerStepModel
from atoll.perf.constants import ConstantTable, GpuConstants, OpClass, OpConstants
from atoll.perf.step import step_seconds
from tests.perf import builders as plain
from tests.perf.components.builders import SPEECH, model, node


def test_a_talker_is_a_transformer() -> None:
    spec = talker_spec(model("qwen2.5-omni-7b"), "talker")
    assert (spec.layers, spec.hidden, spec.heads, spec.kv_heads) == (24, 896, 12, 4)
    assert (spec.head_dim, spec.intermediate, spec.vocab) == (128, 18944, 8448)
    # Attention, MLP and two norms in every layer.
    layer = 896 * (2 * 12 + 2 * 4) * 128 + 3 * 896 * 18944 + 2 * 896
    outer = 2 * 8448 * 896 + 896
    assert component_weight_bytes(model("qwen2.5-omni-7b"), "talker") == 2 * (24 * layer + outer)
    assert spec.moe is None


def test_further_codebooks_come_from_a_small_transformer() -> None:
    omni = model("qwen3-omni-30b")
    small = predictor_spec(omni.components["talker"])  # type: ignore[arg-type]
    assert small is not None
    assert (small.layers, small.kv_heads, small.intermediate) == (5, 8, 3072)
    assert talker_spec(omni, "talker").moe is not None
    steps = executor_steps(omni, ["talker"], node("H100:1"), [SPEECH])
    assert steps is not None
    found = steps.steps["text -> audio", "talker"].model
    assert isinstance(found, TalkerStepModel)
    assert found.further == 15
    batch = Batch.decode(4.0, 1000.0)
    bare = step_seconds(found.predictor, Batch.decode(4.0, 7.5), 0, 5, host=False)
    with_it = step_seconds(found, batch, 0, found.spec.layers)
    own = super(TalkerStepModel, found).parts(batch)
    least = 5 * found.engine.launch.layer_s
    assert found.parts(batch).head == pytest.approx(own.head + 15 * max(bare, least))
    assert with_it > 15 * least > 0.0


def test_only_llms_and_talkers_make_tokens() -> None:
    image, omni = model("qwen-image"), model("qwen2.5-omni-7b")
    assert autoregressive_spec(image, "text") is None
    assert autoregressive_spec(omni, "vision") is None
    assert autoregressive_spec(omni, "vocoder") is None
    assert autoregressive_spec(omni, "llm.decode") == omni.llm


def test_weights_where_no_total_is_public() -> None:
    omni = model("qwen2.5-omni-7b")
    audio = omni.components["audio"]
    least = audio.layers_weight_bytes  # type: ignore[union-attr]
    assert least < component_weight_bytes(omni, "audio") < 1.1 * least
    assert component_weight_bytes(omni, "vocoder") == 2 * 450_000_000


def test_a_layer_by_hand() -> None:
    gpu = plain.node_type("A100-80:1").gpu
    perfect = GpuConstants(gpu.name, {op: OpConstants(p=16.0) for op in OpClass})
    kernels = Kernels.of(node("A100-80:1"), 1, profile_engine("none"), ConstantTable([perfect]))
    rows, hidden, inner = 4096.0, 1024, 4096
    took = kernels.layer(
        rows, 256.0, hidden=hidden, inner=inner, heads=16, head_dim=64, gated=False, dtype=BF16
    )
    products = 2.0 * rows * (4 * hidden**2 + 2 * hidden * inner) / gpu.fp16_flops
    # A pair of heads of 64 costs half the products of one of 128, and the same exponential.
    same = EXPONENTIAL_FLOPS["ampere"] / (4.0 * 128.0)
    slower = (1.0 - same) + 2.0 * same
    pairs = slower * 4.0 * hidden * rows * 256.0 / gpu.fp16_flops
    passes = 2.0 * rows * (PLAIN_PASSES * hidden + 2 * inner) / gpu.bandwidth_bytes_per_s
    # Where limits meet the larger one counts, nearly: attention of short segments waits for memory.
    memory = 2.0 * rows * 4 * hidden / gpu.bandwidth_bytes_per_s
    assert took == pytest.approx(products + max(pairs, memory) + passes, rel=0.02)
    whole = kernels.attention(rows, rows, 16, 64.0)
    assert whole == pytest.approx(slower * 4.0 * hidden * rows**2 / gpu.fp16_flops, rel=0.02)


def test_products_of_odd_sizes_are_slow_on_hopper_alone() -> None:
    for name, slower in (("H200:1", UNALIGNED_SLOWER), ("A100-80:1", 1.0)):
        kernels = Kernels.of(node(name), 1, profile_engine("none"), None)
        odd = kernels.product(40_000.0, 1280, 3420, BF16)
        even = kernels.product(40_000.0, 1280, 3424, BF16)
        assert odd / even == pytest.approx(slower, rel=0.1)
