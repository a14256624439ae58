"""Speculative decoding in the performance model: times, memory and capacity, by hand where they can be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from atoll.core.ids import Phase
from atoll.engines.limits import EngineLimits, GuessMethod, Speculation
from atoll.engines.profile import EngineProfile
from atoll.engines.table import profile_engine
from atoll.perf.batch import Batch
from atoll.perf.capacity import CapacityModel, RoleLoad
from atoll.perf.constants import PROXY_ERROR, OpClass, default_constants
from atoll.perf.drafts import draft_of
from atoll.perf.layers import ground_constants
from atoll.perf.memory_model import MemoryModel
from atoll.perf.mixed_capacity import MixedCapacityModel
from atoll.perf.step import Position, analytic, step_seconds
from atoll.workload.lengths import LengthMix
from tests.perf.builders import model, node_type

LLM = model("llama-3.1-8b")
NODE = node_type("H100:1")
MIX = LengthMix.fixed(512, 256)


def engine(
    method: GuessMethod | None = None, right: tuple[float, ...] = (0.7, 0.5, 0.3), **more: Any
) -> EngineProfile:
    """VLLM without host time, guessing tokens or not."""
    found = profile_engine("vllm", NODE.gpu)
    if method is not None:
        named = "org/head" if method in ("eagle", "eagle3", "draft_model") else None
        guess = Speculation(
            method=method, num_speculative_tokens=len(right), acceptance=right, model=named
        )
        limits = EngineLimits(speculative=guess)
        found = profile_engine("vllm", NODE.gpu, limits, more.pop("draft", None))
    return replace(found, **{"request_s": 0.0, **more})


def capacity(profile: EngineProfile, tpot_s: float = 0.02) -> CapacityModel:
    load = RoleLoad("d", LLM, Phase.DECODE, tpot_s, MIX)
    return CapacityModel(load, analytic(LLM, NODE, engine=profile))


def test_a_step_checks_all_guesses_in_one_pass() -> None:
    plain, checked = (analytic(LLM, NODE, engine=engine(method)) for method in (None, "ngram"))
    one = Batch.decode(16.0, 640.0)
    # Products see 4 rows for each sequence; its keys are read once, which takes longest in attention.
    wide = replace(one, rows=4.0)
    layer = plain.ops.layers[0]
    assert checked.ops.layers[0].decode.key_s == layer.decode.key_s
    seconds = layer.elementwise.seconds(64.0) + sum(op.seconds(64.0) for op in layer.dense)
    own = checked.ops.layers[0]
    assert checked.parts(one).layers[0] == pytest.approx(
        seconds + own.decode.seconds(16.0, 640.0), rel=1e-12
    )
    assert checked.parts(one).head == pytest.approx(plain.ops.head_seconds(wide), rel=1e-12)
    assert checked.parts(one).host == checked.engine.host_seconds(16.0)


def test_a_head_runs_once_for_each_guess() -> None:
    guessing, checking = (analytic(LLM, NODE, engine=engine(m)) for m in ("eagle3", "ngram"))
    one = Batch.decode(16.0, 640.0)
    draft = guessing.draft
    assert draft is not None
    first = step_seconds(draft, replace(one, rows=4.0), 0, 1)
    after = step_seconds(draft, one, 0, 1)
    took = guessing.parts(one).head - checking.parts(one).head
    assert took == pytest.approx(first + 2.0 * after, rel=1e-12)
    # A head of some 0.4 billion weights in 16 bits: about 0.3 ms on an H100 if it only read them.
    assert 0.7e-3 < took < 2e-3


def test_heads_are_as_large_as_published_ones() -> None:
    # yuhuili/EAGLE3-LLaMA3.1-Instruct-8B has 0.42 billion weights, its embedding is the model's own.
    head = draft_of(LLM, engine("eagle3"))
    assert head is not None
    assert head.range_weight_bytes(0, 1) + head.head_bytes == pytest.approx(2 * 0.425e9, rel=0.02)
    assert (head.layers, head.moe, head.kv_dtype) == (1, None, LLM.kv_dtype)
    # The head of DeepSeek-V3 is a layer with experts: 11.5 billion weights beside what it shares.
    deep = model("deepseek-v3")
    own = draft_of(deep, engine("mtp"))
    assert own is not None
    assert own.layer_params(0) == pytest.approx(11.5e9, rel=0.03)
    assert draft_of(LLM, engine("ngram")) is None


def test_weights_and_cache_of_a_draft_take_memory() -> None:
    small = model("llama-3.2-1b")
    plain = MemoryModel.of(LLM, NODE, engine=engine())
    guessing = MemoryModel.of(LLM, NODE, engine=engine("draft_model", draft=small))
    assert guessing.draft_bytes == pytest.approx(small.weight_bytes, rel=1e-3)
    kv = small.layers * small.kv_bytes_per_token_layer
    assert guessing.kv_bytes_per_sequence(0, 32, 100.0) == pytest.approx(
        plain.kv_bytes_per_sequence(0, 32, 100.0) + 100.0 * kv
    )
    # A stage without the output matrix has nothing of it.
    assert guessing.kv_bytes_per_sequence(0, 16, 100.0) == plain.kv_bytes_per_sequence(0, 16, 100.0)
    assert guessing.outer_bytes(Position.FIRST) == plain.outer_bytes(Position.FIRST)
    assert guessing.outer_bytes(Position.WHOLE) - plain.outer_bytes(
        Position.WHOLE
    ) == pytest.approx(guessing.draft_bytes)
    room = guessing.sequences_by_layers(768.0, Position.WHOLE)[-1]
    assert room == pytest.approx(
        guessing.free_bytes(0, 32) / guessing.kv_bytes_per_sequence(0, 32, 768.0)
    )


def test_capacity_is_tokens_made_over_the_step() -> None:
    found = capacity(engine("ngram")).detail(32, 1, 0.02, Position.WHOLE)
    assert found.throughput == pytest.approx(2.5 * found.batch / found.step_s, rel=1e-9)
    tight = capacity(engine("ngram")).detail(32, 1, 0.004, Position.WHOLE)
    # The promise is per token: a step may take that for each that it makes.
    assert tight.step_s == pytest.approx(2.5 * 0.004, rel=1e-6)
    assert tight.throughput == pytest.approx(tight.batch / 0.004, rel=1e-6)


def test_guesses_that_are_never_right_cost_and_those_that_are_pay() -> None:
    def rate(profile: EngineProfile) -> float:
        return float(capacity(profile).throughput([1], [0.008], Position.WHOLE)[0, -1])

    wrong, right = rate(engine("eagle3", (0.0,) * 3)), rate(engine("eagle3", (1.0,) * 3))
    assert wrong < rate(engine()) < right
    rates = [rate(engine("eagle3", (a, a**2, a**3))) for a in (0.2, 0.4, 0.6, 0.8)]
    assert rates == sorted(rates)


def test_steps_with_prompts_count_alike() -> None:
    def rate(profile: EngineProfile) -> float:
        step = analytic(LLM, NODE, engine=profile)
        prompts = RoleLoad("p", LLM, Phase.PREFILL, 1.0, MIX, together=True)
        answers = RoleLoad("d", LLM, Phase.DECODE, 0.015, MIX, together=True)
        found = MixedCapacityModel(prompts, answers, step, waits=False)
        return float(found.throughputs([1], [Position.WHOLE])[0, 0, -1])

    assert rate(engine("eagle3", (0.0,))) < rate(engine()) < rate(engine("eagle3", (0.9, 0.8, 0.7)))
    assert np.isfinite(rate(engine("mtp")))


def test_error_bars_are_those_of_a_proxy() -> None:
    plain = ground_constants(default_constants(), [LLM], [NODE.gpu])
    guessed = ground_constants(default_constants(), [LLM], [NODE.gpu], guessed=True)
    before, after = (
        table.for_gpu(NODE.gpu).op(OpClass.ATTENTION_DECODE) for table in (plain, guessed)
    )
    assert after.error >= PROXY_ERROR > before.error
    assert replace(after, error=before.error, tag=before.tag, source=before.source) == before
    assert "one query for several" in analytic(LLM, NODE, engine=engine("ngram")).provenance
