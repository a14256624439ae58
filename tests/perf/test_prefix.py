"""Beginnings that prompts have in common: less to compute, and one copy to keep."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from atoll.core.ids import Phase
from atoll.engines.limits import EngineLimits
from atoll.engines.profile import EngineProfile
from atoll.engines.table import profile_engine
from atoll.perf.batch import Batch
from atoll.perf.capacity import CapacityModel, RoleLoad
from atoll.perf.mixed_capacity import MixedCapacityModel
from atoll.perf.step import Position, analytic, step_seconds
from atoll.workload.lengths import LengthMix, SharedPrefix
from tests.perf.builders import model, node_type

LLM = model("llama-3.1-8b")
NODE = node_type("H100:1")
PLAIN = LengthMix.fixed(1600, 200)
SHARED = replace(PLAIN, prefix=SharedPrefix(0.5, 1200))


def engine(**limits: object) -> EngineProfile:
    return profile_engine("vllm", NODE.gpu, EngineLimits.model_validate(limits))


def prefill(mix: LengthMix, profile: EngineProfile) -> CapacityModel:
    load = RoleLoad("p", LLM, Phase.PREFILL, 5.0, mix)
    return CapacityModel(load, analytic(LLM, NODE, engine=profile))


def both(mix: LengthMix, profile: EngineProfile, tpot_s: float = 0.03) -> float:
    step = analytic(LLM, NODE, engine=profile)
    prompts, answers = (
        RoleLoad(phase.value, LLM, phase, slo_s, mix, together=True)
        for phase, slo_s in ((Phase.PREFILL, 2.0), (Phase.DECODE, tpot_s))
    )
    found = MixedCapacityModel(prompts, answers, step, waits=False)
    return float(found.throughputs([1], [Position.WHOLE])[0, 0, -1])


def test_what_is_left_to_compute() -> None:
    # Half of all prompts have 1,200 of 1,600 tokens in the cache: 0.5 x 1600 + 0.5 x 400.
    own = SHARED.computed
    assert own.input_mean == pytest.approx(1000.0)
    assert own.input_mean_square == pytest.approx(0.5 * 1600**2 + 0.5 * 400**2)
    assert (own.output_mean, own.prefix) == (200.0, None)
    assert SHARED.found == pytest.approx(600.0)
    # Whole blocks of 16 are found: 75 of them; of 1,210 tokens as many.
    assert replace(PLAIN, prefix=SharedPrefix(0.5, 1210)).resident == 1200.0
    assert PLAIN.computed is PLAIN
    assert (PLAIN.found, PLAIN.resident) == (0.0, 0.0)


def test_prompts_that_are_shorter_than_the_beginning_have_no_more_than_themselves() -> None:
    mix = LengthMix(1000.0, 100.0, 2.5e6, 1e4, prefix=SharedPrefix(1.0, 800))
    luck, variance = np.random.default_rng(0), math.log(2.5)
    drawn = luck.lognormal(math.log(1000.0) - 0.5 * variance, math.sqrt(variance), 400_000)
    rest = np.maximum(0.0, drawn - 800.0)
    assert mix.computed.input_mean == pytest.approx(rest.mean(), rel=0.01)
    assert mix.computed.input_mean_square == pytest.approx((rest**2).mean(), rel=0.05)


def test_prompts_take_the_time_of_what_is_left_of_them() -> None:
    profile = engine()
    found = prefill(SHARED, profile).detail(32, 1, 5.0, Position.WHOLE)
    spread = SHARED.computed.input_mean_square / 1000.0**2
    step = analytic(LLM, NODE, engine=profile)
    own = Batch(1000.0 * found.batch, found.batch, 600.0, 0.0, 0.0, spread)
    assert found.step_s == pytest.approx(step_seconds(step, own, 0, 32), rel=0.02)
    # All tokens of a prompt are done with it.
    assert found.throughput == pytest.approx(1600.0 * found.batch / found.step_s, rel=1e-6)
    alone = prefill(PLAIN, profile).detail(32, 1, 5.0, Position.WHOLE).throughput
    assert 1.3 * alone < found.throughput < 1.7 * alone


def test_the_beginning_is_kept_once() -> None:
    step = analytic(LLM, NODE, engine=engine())
    room = CapacityModel(RoleLoad("d", LLM, Phase.DECODE, 1.0, SHARED), step)._requests(
        Position.WHOLE
    )[-1]
    memory = CapacityModel(RoleLoad("d", LLM, Phase.DECODE, 1.0, PLAIN), step)._memory
    free = memory.free_bytes(0, 32) - memory.kv_bytes_per_sequence(0, 32, 1200.0)
    assert room == pytest.approx(free / memory.kv_bytes_per_sequence(0, 32, 1100.0))


def test_more_in_common_carries_more() -> None:
    rates = [
        both(replace(PLAIN, prefix=SharedPrefix(share, 1200)), engine())
        for share in (0.25, 0.5, 1.0)
    ]
    assert [both(PLAIN, engine()), *rates] == sorted([both(PLAIN, engine()), *rates])
    assert rates[2] > 1.5 * both(PLAIN, engine())


def test_engines_without_prefix_caching_count_none() -> None:
    off = engine(prefix_caching=False)
    assert both(SHARED, off) == both(PLAIN, off)
    shared, plain = (
        prefill(mix, off).throughput([1], [5.0], Position.WHOLE) for mix in (SHARED, PLAIN)
    )
    assert np.array_equal(shared, plain)
