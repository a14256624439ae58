"""The context length that engines are started with, and that every node has room for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import InputError
from atoll.core.ids import Phase
from atoll.core.rng import stream
from atoll.engines.limits import EngineLimits
from atoll.engines.table import EngineChoice
from atoll.perf.step import Position
from atoll.plan.capacities import longest_context, memory_model, node_capacity
from atoll.plan.cluster_profiles import tabulate
from atoll.plan.context_length import check_max_model_len, max_model_len
from atoll.plan.files.fleet_file import parse_fleet
from atoll.plan.problem import Lengths
from atoll.workload.builtin import lengths_like
from atoll.workload.lengths import LengthMix, length_mix
from tests.plan.builders import catalog, problem, service

LARGE = 1 << 20
SPEC = catalog().model("llama-3.1-8b").llm
L4 = catalog().node("L4:1")
MIX = LengthMix.fixed(512, 128)


@pytest.mark.parametrize("name", ["azure-conv", "azure-code", "reasoning"])
def test_all_but_one_request_in_a_thousand_fit(name: str) -> None:
    mix = length_mix(name)
    # Other draws than its own.
    prompts, answers = lengths_like(mix).draw(stream(7, "test"), 50_000)
    over = float(np.mean(prompts + answers > max_model_len(mix, LARGE)))
    assert 0.0 < over < 0.002


def test_the_promised_prompt_fits_with_its_answer() -> None:
    mix = replace(LengthMix.fixed(1000, 300), input_tail=60_000.0)
    assert max_model_len(mix, LARGE) == 60_416  # 60,300 in whole blocks of 256
    assert max_model_len(mix, 32_768) == 32_768


def test_short_requests_leave_room_for_a_chat() -> None:
    assert max_model_len(LengthMix.fixed(128, 64), LARGE) == 2048
    assert max_model_len(LengthMix.fixed(128, 64), 1024) == 1024


def test_what_a_fleet_says_counts() -> None:
    assert max_model_len(LengthMix.fixed(128, 64), LARGE, 1000) == 1000
    assert max_model_len(LengthMix.fixed(128, 64), 512, 1000) == 512
    asked = service(lengths=_asked(0.0), engine_limits=EngineLimits(max_model_len=100_001))
    assert longest_context(catalog(), asked) == 100_001
    (launch,) = problem(services=[asked]).launches().values()
    assert launch.max_model_len == 100_001
    profile = tabulate(SPEC, L4, EngineChoice("vllm", asked.engine_limits), MIX, 1)
    shorter = tabulate(SPEC, L4, EngineChoice("vllm"), MIX, 1)
    assert profile is not None
    assert shorter is not None
    assert profile.max_layers < shorter.max_layers  # room is kept for such a request


FLEET = """
services:
  chat: {model: llama-3.1-8b, ttft: 2s, tpot: 80ms, rate: 1/s, lengths: azure-conv, engine: {}}
pool: {owned: {here: {"L40S:1": 2}}}
settings: {engine_limits: {}}
"""


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (200_000, "requests of 200,000 tokens exceed the model's 131,072"),
        (1500, r"requests of up to 4,\d\d\d tokens must fit.*95%.*those over 1,500"),
    ],
)
@pytest.mark.parametrize("place", ["engine", "engine_limits"])
def test_a_fleet_that_cannot_mean_it_is_refused(place: str, tokens: int, said: str) -> None:
    text = FLEET.replace(f"{place}: {{}}", f"{place}: {{max_model_len: {tokens}}}")
    with pytest.raises(InputError, match=said) as caught:
        parse_fleet(text)
    assert f"{place}.max_model_len" in str(caught.value)


def test_a_prompt_with_a_promise_has_to_fit() -> None:
    mix = replace(LengthMix.fixed(1000, 300), input_tail=6000.0)
    check_max_model_len(6300, mix, 0.95, LARGE)
    with pytest.raises(InputError, match="6,300"):
        check_max_model_len(6299, mix, 0.95, LARGE)


@pytest.mark.parametrize("place", ["engine", "engine_limits"])
def test_a_fleet_says_the_longest_request(place: str) -> None:
    text = FLEET.replace(f"{place}: {{}}", f"{place}: {{max_model_len: 5000}}")
    assert parse_fleet(text).launches()["chat"].max_model_len == 5000
    assert parse_fleet(FLEET).launches()["chat"].max_model_len != 5000


@given(st.floats(1, 1e5), st.floats(1, 1e4), st.floats(0, 1e5), st.integers(256, LARGE))
def test_it_is_within_the_model_and_holds_the_mean_request(
    prompt: float, answer: float, tail: float, context: int
) -> None:
    mix = replace(LengthMix.fixed(prompt, answer), input_tail=tail)
    found = max_model_len(mix, context)
    assert found <= context
    assert found >= min(context, prompt + answer, tail + answer)


def _asked(tail: float) -> Lengths:
    return Lengths.of(replace(LengthMix.fixed(512, 128), input_tail=tail))


@pytest.mark.parametrize("phases", ["apart", "together"])
def test_a_node_without_room_for_the_longest_request_carries_nothing(phases: str) -> None:
    for role in service("chat", phases=phases).roles:
        carried = {}
        for tail in (0.0, 60_000.0):
            own = service("chat", phases=phases, lengths=_asked(tail), ttft_s=1e5)
            asked = problem(services=(own,))
            fits = memory_model(asked, catalog(), own, role.phase, catalog().node("L4:1"), 1).fits(
                0, 32, longest_context(catalog(), own)
            )
            carried[fits] = node_capacity(
                asked, catalog(), own, role, "L4:1", 32, 1, Position.WHOLE
            )
        assert carried[True] > 0.0
        assert carried[False] == 0.0


def test_engines_are_told_what_nodes_were_checked_for() -> None:
    asked = problem()
    for each in asked.services:
        told = asked.launches()[each.name].max_model_len
        assert told == longest_context(catalog(), each)


def test_what_vllm_refused_on_an_l4_is_started_shorter() -> None:
    # 40,960 tokens of KV cache are more than an L4 has left beside qwen3-8b: vLLM ended at the start.
    spec, node = catalog().model("qwen3-8b").llm, catalog().node("L4:1")
    asked = problem(services=(service("chat", model="qwen3-8b"),))
    memory = memory_model(asked, catalog(), asked.services[0], Phase.BOTH, node, 1)
    assert not memory.fits(0, spec.layers, spec.max_context)
    assert memory.fits(0, spec.layers, longest_context(catalog(), asked.services[0]))
