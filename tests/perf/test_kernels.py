"""Speeds of llama.cpp's kernels against its makers' batched runs and public runs of one request."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.catalog.catalog import Catalog
from atoll.engines.table import profile_engine
from atoll.perf.batch import Batch
from atoll.perf.constants import default_constants
from atoll.perf.memory_model import MemoryModel
from atoll.perf.step import AnalyticStepModel, analytic, step_seconds

CATALOG = Catalog.default()
BATCHES = (1, 2, 4, 8, 16, 32)
# Seconds of 32 steps with 1 to 32 answers after prompts of so many tokens: `benches/` of ggml-org/llama.cpp,
# M2 Ultra and GB10, February 2026. The 7B there is Qwen2.5-Coder, in shape the language model of Qwen2.5-VL.
STEPS = [
    ("M2-Ultra-192", "qwen2.5-vl-7b@q8_0", 512, (0.409, 0.483, 0.585, 1.005, 1.595, 1.676)),
    ("M2-Ultra-192", "qwen2.5-vl-7b@q8_0", 8192, (0.449, 0.559, 0.728, 1.279, 2.198, 3.052)),
    ("M2-Ultra-192", "qwen3-30b-a3b@q8_0", 512, (0.419, 0.575, 0.841, 1.330, 2.572, 2.603)),
    ("M2-Ultra-192", "qwen3-30b-a3b@q8_0", 8192, (0.483, 0.722, 1.120, 1.873, 3.718, 4.854)),
    ("M2-Ultra-192", "gpt-oss-20b", 512, (0.245, 0.382, 0.604, 1.033, 1.570, 1.910)),
    ("M2-Ultra-192", "gpt-oss-120b", 512, (0.361, 0.545, 0.847, 1.455, 2.349, 3.665)),
    ("GB10", "qwen2.5-vl-7b@q8_0", 512, (1.100, 1.185, 1.229, 1.319, 1.543, 1.738)),
    ("GB10", "qwen3-30b-a3b@q8_0", 512, (0.548, 0.910, 1.302, 1.669, 2.212, 2.955)),
    ("GB10", "qwen3-30b-a3b@q8_0", 8192, (0.678, 1.149, 1.785, 2.629, 4.099, 6.696)),
    ("GB10", "gpt-oss-20b", 512, (0.399, 0.583, 0.820, 0.942, 1.173, 1.503)),
]
# Tokens/s of one answer and of a prompt of 1,024 with Llama 3 8B in Q4_K_M and F16: the table of
# XiongjieDai/GPU-Benchmarks-on-LLM-Inference, 2024.
ALONE = [
    ("RTX3090", (111.74, 46.51), (3865.39, 4239.64)),
    ("RTX4090", (127.74, 54.34), (6898.71, 9056.26)),
    ("A6000", (102.22, 40.25), (3621.81, 4315.18)),
    ("A40", (88.95, 33.95), (3240.95, 4043.05)),
    ("A100-80", (138.31, 54.56), (5800.48, 7504.24)),
    ("H100", (144.49, 67.79), (7760.16, 10342.63)),
    ("M2-Ultra-192", (76.28, 36.25), (1023.89, 1202.74)),
    ("M3-Max-128", (50.74, 22.39), (678.04, 751.49)),
]
QUANTISED = ("llama-3.1-8b@q4_k_m", "llama-3.1-8b")


def on(gpu: str, model: str, gpus: int = 1) -> AnalyticStepModel:
    node = CATALOG.node(f"{gpu}:{gpus}")
    return analytic(CATALOG.model(model).llm, node, tp=gpus, engine="llamacpp")


def kernels_s(model: AnalyticStepModel, batch: Batch[float]) -> float:
    """Seconds of a step without the host, as those runs count."""
    return step_seconds(model, batch, 0, model.spec.layers, host=False)


@pytest.mark.parametrize(("gpu", "model", "context", "seconds"), STEPS)
def test_steps_take_about_what_they_took(
    gpu: str, model: str, context: int, seconds: tuple[float, ...]
) -> None:
    found = on(gpu, model)
    ratios = [
        kernels_s(found, Batch(0.0, 0.0, 0.0, float(batch), context + 16.0)) / (taken / 32)
        for batch, taken in zip(BATCHES, seconds, strict=True)
    ]
    # Public figures of other machines: what is promised on them errs on the safe side.
    assert min(ratios) >= 0.8, ratios
    assert max(ratios) <= 2.1, ratios
    assert float(np.mean(ratios)) >= 1.0, ratios


@pytest.mark.parametrize(("gpu", "answers", "prompts"), ALONE)
def test_one_request_takes_about_what_it_took(
    gpu: str, answers: tuple[float, float], prompts: tuple[float, float]
) -> None:
    for model, answer, prompt in zip(QUANTISED, answers, prompts, strict=True):
        found = on(gpu, model)
        token_s = kernels_s(found, Batch(0.0, 0.0, 0.0, 1.0, 512.0))
        prompt_s = kernels_s(found, Batch(1024.0, 1.0, 0.0, 0.0, 0.0)) / 1024.0
        assert 0.95 <= token_s * answer <= 1.6
        assert 0.95 <= prompt_s * prompt <= 3.0


def test_gpus_that_hold_layers_in_a_row_are_no_faster_than_one() -> None:
    """Public runs with 1, 2 and 4 RTX 3090: 111.74, 108.07 and 104.94 tokens/s."""
    one, two, four = (on("RTX3090", "llama-3.1-8b@q4_k_m", gpus) for gpus in (1, 2, 4))
    batch = Batch(0.0, 0.0, 0.0, 1.0, 512.0)
    times = [step_seconds(each, batch, 0, each.spec.layers) for each in (one, two, four)]
    assert times[1] - times[0] == pytest.approx(0.2e-3)
    assert times[2] - times[0] == pytest.approx(0.6e-3)


def test_kernels_are_off_by_as_much_as_the_constants_of_the_gpu() -> None:
    table, gpu = default_constants(), CATALOG.gpu("RTX4090")
    half = {op: c.scale_time(2.0) for op, c in table.for_gpu(gpu).ops.items()}
    slow = table.with_gpus([table.gpu(gpu.name).with_measured(half)])
    spec, node = CATALOG.model("llama-3.1-8b@q8_0").llm, CATALOG.node("RTX4090:1")
    usual, twice = (
        analytic(spec, node, tp=1, engine="llamacpp", constants=each) for each in (table, slow)
    )
    for batch in (Batch(0.0, 0.0, 0.0, 8.0, 1000.0), Batch(512.0, 1.0, 0.0, 0.0, 0.0)):
        assert kernels_s(twice, batch) == pytest.approx(2.0 * kernels_s(usual, batch), rel=1e-6)


def test_slots_have_room_for_the_longest_request() -> None:
    spec, node = CATALOG.model("llama-3.1-8b@q4_k_m").llm, CATALOG.node("M3-Max-36:1")
    memory = MemoryModel.of(spec, node, engine=profile_engine("llamacpp", node.gpu))
    for longest in (2048, 8192, 32768, 1 << 20):
        slots = memory.slots(0, spec.layers, longest)
        each = memory.kv_bytes_per_sequence(0, spec.layers, longest)
        free = memory.free_bytes(0, spec.layers)
        assert slots * each <= free
        assert slots == 32 or (slots + 1) * each > free
    # A step goes through in parts of 512 tokens, however many it takes.
    assert memory.step_tokens == 512
