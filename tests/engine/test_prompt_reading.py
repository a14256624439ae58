"""Vectors and log probabilities of prompts, against transformers, on whole and cut layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra 'engine'")

import torch

from atoll.core.request_parameters import OutputFormat, SamplingParams
from atoll.engine.engine_messages import ReadOrder
from atoll.engine.scheduler_core import GenerateRequest
from atoll.engine.token_sampling import Sampler
from tests.engine.cluster import Cluster, NodeSetup
from tests.engine.models import LAYERS, VOCABULARY

WHOLE = [NodeSetup(0, LAYERS)]
CUT = [NodeSetup(0, 1), NodeSetup(1, 3), NodeSetup(3, LAYERS)]
RANKS = [NodeSetup(0, 2), NodeSetup(2, LAYERS, tp=2)]
LAYOUTS = pytest.mark.parametrize("setups", [WHOLE, CUT, RANKS], ids=["whole", "cut", "ranks"])
# Longer than a chunk and a block; one shares a beginning with another.
PROMPTS = (
    [5],
    [9, 8, 7, 6, 5, 4, 3, 9, 8, 7, 6],
    [9, 8, 7, 6, 5, 4, 3, 9, 8, 11, 12, 13, 14, 15, 16],
)


def hidden_states(model: Any, prompt: Sequence[int]) -> Any:
    with torch.no_grad():
        return model.model(torch.tensor([list(prompt)])).last_hidden_state[0].double()


def pooled(model: Any, prompt: Sequence[int], how: str) -> Any:
    states = hidden_states(model, prompt)
    vector = {"last": states[-1], "first": states[0], "mean": states.mean(0)}[how]
    return (vector / vector.norm()).numpy()


def read(number: int, prompt: Sequence[int], order: ReadOrder, **more: Any) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=3, **more)
    return GenerateRequest(tuple(prompt), sampling, id=f"r{number}", read=order)


@LAYOUTS
@pytest.mark.parametrize("how", ["last", "mean", "first"])
def test_vectors_are_those_of_transformers(
    tiny: Callable[[str], Any], setups: list[NodeSetup], how: Any
) -> None:
    model = tiny("llama")
    cluster = Cluster(model.folder, LAYERS, setups)
    # Twice, so that the second time blocks are known.
    for again in range(2):
        for number, prompt in enumerate(PROMPTS):
            cluster.submit(read(10 * again + number, prompt, ReadOrder(pool=how)))
        cluster.run()
    cluster.settle()
    for name, events in cluster.events.items():
        (event,) = events
        assert event.finish_reason == "stop"
        assert event.reading is not None
        expected = pooled(model.model, PROMPTS[int(name[1:]) % 10], how)
        assert event.reading.vector == pytest.approx(expected, abs=2e-5)


@LAYOUTS
def test_log_probabilities_of_a_prompt(tiny: Callable[[str], Any], setups: list[NodeSetup]) -> None:
    model = tiny("llama")
    cluster = Cluster(model.folder, LAYERS, setups)
    for again in range(2):
        for number, prompt in enumerate(PROMPTS):
            cluster.submit(read(10 * again + number, prompt, ReadOrder(scores=2)))
        cluster.run()
    cluster.settle()
    for name, events in cluster.events.items():
        prompt = PROMPTS[int(name[1:]) % 10]
        assert [e.token for e in events] == model.answer(prompt, 3)
        found = events[0].reading
        assert all(event.reading is None for event in events[1:])
        if len(prompt) == 1:
            assert found is None
            continue
        assert found is not None
        with torch.no_grad():
            logits = model.model(torch.tensor([prompt])).logits[0].double()
        logs = torch.log_softmax(logits, -1)
        assert found.logprobs[0] is None
        expected = [float(logs[i, token]) for i, token in enumerate(prompt[1:])]
        assert found.logprobs[1:] == pytest.approx(expected, abs=1e-4)
        assert found.top[0] == ()
        for i, pairs in enumerate(found.top[1:]):
            assert [token for token, _ in pairs] == torch.topk(logs[i], 2).indices.tolist()


def test_a_prompt_goes_on_where_its_node_was_lost(tiny: Callable[[str], Any]) -> None:
    model = tiny("llama")
    setups = [NodeSetup(0, 2), NodeSetup(2, LAYERS), NodeSetup(2, LAYERS)]
    cluster = Cluster(model.folder, LAYERS, setups)
    prompt = list(range(3, 60))
    cluster.submit(read(0, prompt, ReadOrder(pool="mean")))
    cluster.submit(read(1, prompt, ReadOrder(scores=0)))
    for _ in range(12):
        cluster.step()
    cluster.kill("n1")
    cluster.run()
    vector = cluster.events["r0"][-1].reading
    assert vector is not None
    assert vector.vector == pytest.approx(pooled(model.model, prompt, "mean"), abs=2e-5)
    scores = cluster.events["r1"][0].reading
    assert scores is not None
    assert len(scores.logprobs) == len(prompt)


def test_the_longest_prompt_has_a_vector(tiny: Callable[[str], Any]) -> None:
    cluster = Cluster(tiny("llama").folder, LAYERS, WHOLE, max_length=20)
    cluster.submit(read(0, [4] * 20, ReadOrder(pool="last")))
    cluster.run()
    assert cluster.events["r0"][-1].reading is not None


def test_answers_have_their_min_length(tiny: Callable[[str], Any]) -> None:
    model = tiny("llama")
    prompt = PROMPTS[1]
    first = model.answer(prompt, 1)[0]
    cluster = Cluster(model.folder, LAYERS, WHOLE, eos=(first,))
    for number, least in enumerate((0, 1, 2)):
        sampling = SamplingParams(max_tokens=4, min_tokens=least)
        cluster.submit(GenerateRequest(tuple(prompt), sampling, id=f"r{number}"))
    cluster.run()
    assert cluster.tokens("r0") == [first]
    assert cluster.tokens("r1")[0] != first
    assert first not in cluster.tokens("r2")[:2]


def test_temperatures_near_nothing_are_greedy(tiny: Callable[[str], Any]) -> None:
    model = tiny("llama")
    cluster = Cluster(model.folder, LAYERS, WHOLE)
    for number, temperature in enumerate((0.0, 5e-324, 1e-320, 1e-6)):
        sampling = SamplingParams(max_tokens=5, temperature=temperature, logprobs=1)
        cluster.submit(GenerateRequest(tuple(PROMPTS[1]), sampling, id=f"r{number}"))
    cluster.run()
    answers = {tuple(cluster.tokens(name)) for name in cluster.events}
    assert answers == {tuple(model.answer(PROMPTS[1], 5))}


def test_many_biases_are_one_step(tiny: Callable[[str], Any]) -> None:
    model = tiny("llama")
    cluster = Cluster(model.folder, LAYERS, WHOLE)
    bias = tuple((token, -100.0) for token in range(VOCABULARY + 5) if token != 33)
    cluster.submit(
        GenerateRequest(tuple(PROMPTS[1]), SamplingParams(max_tokens=3, logit_bias=bias), id="r0")
    )
    cluster.run()
    assert cluster.tokens("r0") == [33] * 3


class BrokenMatchers:
    """Breaks over every guide, in ways nobody foresaw."""

    def matcher(self, guide: OutputFormat) -> Any:
        raise ZeroDivisionError("boom")


@LAYOUTS
def test_a_request_that_cannot_be_done_ends_alone(
    tiny: Callable[[str], Any], setups: list[NodeSetup]
) -> None:
    model = tiny("llama")
    cluster = Cluster(model.folder, LAYERS, setups, matchers=BrokenMatchers())
    guided = SamplingParams(guide=OutputFormat(kind="regex", text="x"))
    cluster.submit(GenerateRequest(tuple(PROMPTS[1]), guided, id="bad"))
    cluster.submit(GenerateRequest(tuple(PROMPTS[1]), SamplingParams(max_tokens=3), id="good"))
    cluster.run()
    (event,) = cluster.events["bad"]
    assert event.refused
    assert "boom" in (event.error or "")
    assert cluster.tokens("good") == model.answer(PROMPTS[1], 3)
    cluster.settle()


def test_so_does_one_whose_choice_breaks(
    tiny: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama")
    adjust = Sampler._adjust

    def breaks(self: Sampler, scores: torch.Tensor) -> torch.Tensor:
        if self.params.seed == 13 and len(self.tokens) > len(PROMPTS[1]):
            raise IndexError("boom")
        return adjust(self, scores)

    monkeypatch.setattr(Sampler, "_adjust", breaks)
    cluster = Cluster(model.folder, LAYERS, CUT)
    # Those with penalties choose one by one.
    unlucky = SamplingParams(max_tokens=5, temperature=1.0, presence_penalty=0.1, seed=13)
    cluster.submit(GenerateRequest(tuple(PROMPTS[1]), unlucky, id="bad"))
    lucky = unlucky.model_copy(update={"seed": 14})
    cluster.submit(GenerateRequest(tuple(PROMPTS[1]), lucky, id="good"))
    cluster.run()
    assert len(cluster.tokens("bad")) == 1
    assert cluster.events["bad"][-1].refused
    assert len(cluster.tokens("good")) == 5
    cluster.settle()
