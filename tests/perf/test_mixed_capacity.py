"""Nodes that run both phases: what holds for all of them, and one that is worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.catalog.link_table import Link
from atoll.core.ids import Phase
from atoll.engines.limits import MIXED_TOKENS
from atoll.engines.profile import EngineProfile
from atoll.engines.table import profile_engine
from atoll.perf.batch import Batch
from atoll.perf.capacity import CapacityModel, RoleLoad
from atoll.perf.mixed_capacity import MixedCapacityModel
from atoll.perf.step import Position, analytic, step_seconds
from atoll.workload.lengths import BUILT_IN, LengthMix
from tests.perf.builders import mixture, model, node_type

MODELS = {
    "llama-3.1-8b": model("llama-3.1-8b"),
    "gpt-oss-20b": model("gpt-oss-20b"),
    "qwen3-32b@fp8": model("qwen3-32b@fp8"),
    "mixture": mixture(layers=12, hidden=2048, vocab=32000, max_context=32768),
}
NODES = ("T4:1", "L4:1", "L40S:1", "H100:1", "H100:8")
LINKS = (None, Link(10e9 / 8, 0.5e-3), Link(1e7, 0.05))
MIXES = (
    *BUILT_IN.values(),
    LengthMix.fixed(1, 1),
    LengthMix.fixed(512, 128),
    replace(LengthMix.fixed(500, 100), input_tail=4000.0),
)
ENDS = (Position.FIRST, Position.MIDDLE, Position.LAST)


def both(
    spec: str, node: str, mix: LengthMix, ttft_s: float, tpot_s: float, link: Link | None = None
) -> MixedCapacityModel:
    """The capacity of a model on a node, all its GPUs one copy."""
    llm = MODELS[spec]
    prompts = RoleLoad("p", llm, Phase.PREFILL, ttft_s, mix, together=True, waits=True)
    answers = RoleLoad("d", llm, Phase.DECODE, tpot_s, mix, together=True, waits=True)
    return MixedCapacityModel(prompts, answers, analytic(llm, node_type(node)), link=link)


@given(
    st.sampled_from(sorted(MODELS)),
    st.sampled_from(NODES),
    st.sampled_from(MIXES),
    st.sampled_from(LINKS),
    st.floats(0.2, 5.0),
    st.floats(0.02, 0.3),
    st.floats(1.0, 3.0),
    st.floats(1.0, 3.0),
)
def test_never_rises_with_layers_nor_falls_with_a_looser_promise(
    spec: str,
    node: str,
    mix: LengthMix,
    link: Link | None,
    ttft_s: float,
    tpot_s: float,
    later: float,
    slower: float,
) -> None:
    rates = both(spec, node, mix, ttft_s, tpot_s, link).throughputs([2, 3, 4], ENDS)
    assert np.isfinite(rates).all()
    assert (rates >= 0.0).all()
    assert (rates[:, :, 0] == 0.0).all()
    assert (np.diff(rates[:, :, 1:], axis=2) <= 0.0).all()
    loose = both(spec, node, mix, ttft_s * later, tpot_s * slower, link)
    assert (loose.throughputs([2, 3, 4], ENDS) >= rates * (1.0 - 1e-9)).all()


@given(
    st.sampled_from(sorted(MODELS)),
    st.sampled_from(NODES),
    st.sampled_from(MIXES),
    st.floats(0.2, 5.0),
    st.floats(0.02, 0.3),
)
def test_both_phases_never_carry_more_than_each_of_them_could_alone(
    spec: str, node: str, mix: LengthMix, ttft_s: float, tpot_s: float
) -> None:
    llm = MODELS[spec]
    rate = both(spec, node, mix, ttft_s, tpot_s).throughputs([1], [Position.WHOLE])[0, 0, -1]
    for phase, slo_s, tokens in (
        (Phase.PREFILL, ttft_s, mix.input_mean),
        (Phase.DECODE, tpot_s, mix.output_mean),
    ):
        alone = CapacityModel(RoleLoad("x", llm, phase, slo_s, mix), analytic(llm, node_type(node)))
        most = alone.throughput([1], [slo_s], Position.WHOLE)[0, -1] / tokens
        assert rate <= most * 1.05 + 1e-9


def with_engine(engine: EngineProfile, ttft_s: float, mix: LengthMix) -> MixedCapacityModel:
    """Where time to the first token is what limits it."""
    llm = MODELS["llama-3.1-8b"]
    prompts = RoleLoad("p", llm, Phase.PREFILL, ttft_s, mix, together=True, waits=True)
    answers = RoleLoad("d", llm, Phase.DECODE, 10.0, mix, together=True, waits=True)
    steps = analytic(llm, node_type("H100:1"), engine=engine)
    return MixedCapacityModel(prompts, answers, steps, link=LINKS[1])


@pytest.mark.parametrize("tail", [0.0, 4000.0])
def test_what_an_engine_takes_beside_steps_comes_off_the_promise(tail: float) -> None:
    plain, mix = profile_engine("none"), replace(LengthMix.fixed(512, 64), input_tail=tail)
    late, soon = replace(plain, request_s=0.05), plain
    for stages, ends in ((1, (Position.WHOLE,)), (3, ENDS)):
        found = with_engine(late, 0.25, mix).throughputs([stages], ends)
        expected = with_engine(soon, 0.2, mix).throughputs([stages], ends)
        assert found.max() > 0.0
        np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_prompts_wait_for_the_step_that_is_prepared_on_a_single_node() -> None:
    plain, mix = profile_engine("none"), LengthMix.fixed(512, 64)
    ahead = replace(plain, schedules_ahead=True)
    whole = [Position.WHOLE]
    found = float(with_engine(ahead, 0.2, mix).throughputs([1], whole)[0, 0, -1])
    llm, steps = (
        MODELS["llama-3.1-8b"],
        analytic(MODELS["llama-3.1-8b"], node_type("H100:1"), engine=plain),
    )

    def rate_and_step(sequences: float) -> tuple[float, float]:
        share, prompts = min(1.0, sequences / 64), max(1.0, sequences / 64)
        plain_s, mixed_s = (
            step_seconds(
                steps, Batch(512 * p, p, 0.0, sequences, mix.decode_context), 0, llm.layers
            )
            for p in (0.0, prompts)
        )
        step_s = (1.0 - share) * plain_s + share * mixed_s
        return sequences / (64 * step_s), step_s

    # By halving: the sequences at which so many requests/s come, and what a step takes then.
    low, high = 1.0, 200.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if rate_and_step(middle)[0] < found else (low, middle)
    step_s = rate_and_step(low)[1]
    assert step_s > 0.01
    soon = with_engine(plain, 0.2 - step_s, mix).throughputs([1], whole)[0, 0, -1]
    assert found == pytest.approx(soon, rel=0.01)
    # Pipelines prepare none.
    two, same = (with_engine(one, 0.4, mix).throughputs([2], ENDS) for one in (ahead, plain))
    np.testing.assert_array_equal(two, same)


def test_a_step_with_its_share_of_prompts_takes_the_promised_time() -> None:
    """Long answers on a node with room for all: B / (out T) where the mean step T takes all of TPOT."""
    mix, llm = LengthMix.fixed(512, 2048), MODELS["llama-3.1-8b"]
    rate = both("llama-3.1-8b", "H100:1", mix, 60.0, 0.02).throughputs([1], [Position.WHOLE])
    steps = analytic(llm, node_type("H100:1"))
    sequences = float(rate[0, 0, -1]) * 2048 * 0.02

    def seconds(prompts: float) -> float:
        batch = Batch(512 * prompts, prompts, 0.0, sequences, mix.decode_context)
        return step_seconds(steps, batch, 0, llm.layers)

    share = sequences / 2048
    assert 0.0 < share < 1.0
    mean = (1 - share) * seconds(0.0) + share * seconds(1.0)
    # The backlog of prompts at the start adds a little to it.
    assert mean == pytest.approx(0.02, rel=0.03)
    assert mean < 0.02


def test_prompts_that_fill_every_step_are_the_limit_however_loose_the_promises() -> None:
    mix = LengthMix.fixed(2000, 10)
    loose = both("llama-3.1-8b", "H100:1", mix, 1e4, 1e4).throughputs([1], [Position.WHOLE])
    steps = analytic(MODELS["llama-3.1-8b"], node_type("H100:1"))
    fastest = step_seconds(steps, Batch.prefill(MIXED_TOKENS), 0, 32) * 2000 / MIXED_TOKENS
    assert 0.7 / fastest < loose[0, 0, -1] < 1.0 / fastest


def test_the_longest_prompt_must_be_in_time_and_fit() -> None:
    mix = LengthMix.fixed(500, 100)
    for tail in (20_000.0, 120_000.0):
        late = both("llama-3.1-8b", "L4:1", replace(mix, input_tail=tail), 2.0, 0.2)
        free = both("llama-3.1-8b", "L4:1", mix, 2.0, 0.2)
        assert free.throughputs([1], [Position.WHOLE])[0, 0, -1] > 0.0
        assert late.throughputs([1], [Position.WHOLE])[0, 0, -1] == 0.0


def test_who_admits_by_prompts_has_room_for_more_where_answers_are_long() -> None:
    own = profile_engine("vllm", node_type("H100:1").gpu)
    assert own.admits_by_prompts
    for prompt, answer, least, most in ((64, 1500, 1.1, 2.0), (4000, 20, 1.0, 1.1)):
        mix = LengthMix.fixed(prompt, answer)
        eager, booked = (
            with_engine(replace(own, admits_by_prompts=by_prompts), 2.0, mix)
            for by_prompts in (True, False)
        )
        rates = [m.throughputs([1], [Position.WHOLE])[0, 0, -1] for m in (eager, booked)]
        assert least <= rates[0] / rates[1] <= most
