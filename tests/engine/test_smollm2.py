"""SmolLM2 itself: staggered requests over uneven cuts, against transformers, token for token."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra 'engine'")

import torch
from transformers import AutoModelForCausalLM

from atoll.core.errors import AtollError
from atoll.core.request_parameters import OutputFormat, SamplingParams
from atoll.engine.engine_messages import ReadOrder
from atoll.engine.guidance import MatcherFactory
from atoll.engine.model_stage import StageModel
from atoll.engine.node_core import CoreSettings
from atoll.engine.prompts import chat_prompt
from atoll.engine.scheduler_core import GenerateRequest
from atoll.engine.text import TextCodec
from atoll.engine.weights.sources import DEFAULT_MODEL, resolve
from tests.engine.cluster import Cluster, NodeSetup
from tests.engine.split_router import SplitRouter

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LAYERS = 30
QUESTIONS = (
    "What is the capital of France?",
    "Name three colours and say why you like them.",
    "Write one sentence about the sea, with the number 1234 in it.",
)


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return resolve(DEFAULT_MODEL)
    except AtollError as error:
        pytest.skip(f"the model cannot be fetched: {error}")


@pytest.fixture(scope="module")
def codec(folder: Path) -> TextCodec:
    return TextCodec(folder)


@pytest.fixture(scope="module")
def wanted(folder: Path, codec: TextCodec) -> dict[str, list[int]]:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = {}
    for question in QUESTIONS:
        prompt = torch.tensor([codec.chat([{"role": "user", "content": question}])])
        tokens = model.generate(prompt, max_new_tokens=16, do_sample=False)
        answers[question] = tokens[0, prompt.shape[1] :].tolist()
    return answers


def node(start: int, end: int) -> NodeSetup:
    limits = CoreSettings(token_budget=256, chunk=32)
    return NodeSetup(start, end, blocks=48, block_size=16, settings=limits)


def asked(cluster: Cluster, codec: TextCodec) -> dict[str, list[int]]:
    for question in QUESTIONS:
        prompt = codec.chat([{"role": "user", "content": question}])
        sampling = SamplingParams(max_tokens=16)
        cluster.submit(GenerateRequest(tuple(prompt), sampling, id=question))
        for _ in range(20):
            cluster.step()
    cluster.run()
    cluster.settle()
    return {question: cluster.tokens(question) for question in QUESTIONS}


@pytest.mark.parametrize("cuts", [((0, 30),), ((0, 11), (11, 30)), ((0, 7), (0, 7), (7, 30))])
def test_cuts_are_exact(
    folder: Path,
    codec: TextCodec,
    wanted: dict[str, list[int]],
    cuts: tuple[tuple[int, int], ...],
) -> None:
    cluster = Cluster(folder, LAYERS, [node(a, b) for a, b in cuts], eos=codec.eos, max_length=512)
    assert asked(cluster, codec) == wanted
    assert "Paris" in codec.decode(wanted[QUESTIONS[0]])


def test_vectors_of_its_own_tokens_change_nothing_over_uneven_nodes(
    folder: Path, codec: TextCodec, wanted: dict[str, list[int]]
) -> None:
    cluster = Cluster(folder, LAYERS, [node(0, 11), node(11, 30)], eos=codec.eos, max_length=512)
    stage = cluster.nodes["mem://n0"].stage
    assert isinstance(stage, StageModel)
    embed = stage.embed
    assert embed is not None
    for question in QUESTIONS:
        tokens = codec.encode(question, special=False)
        with torch.inference_mode():
            rows = embed(torch.tensor(tokens)).numpy()
        prompt, embeds = chat_prompt(codec, [{"role": "user", "content": [rows]}])
        assert len(prompt) == len(codec.chat([{"role": "user", "content": question}]))
        sampling = SamplingParams(max_tokens=16)
        request = GenerateRequest(tuple(prompt), sampling, id=question, embeds=embeds)
        cluster.submit(request)
    cluster.run()
    cluster.settle()
    assert {question: cluster.tokens(question) for question in QUESTIONS} == wanted


def test_split_is_exact(folder: Path, codec: TextCodec, wanted: dict[str, list[int]]) -> None:
    router = SplitRouter(LAYERS, ["n0"], ["n1", "n2"])
    setups = [node(0, 30), node(0, 11), node(11, 30)]
    cluster = Cluster(folder, LAYERS, setups, router=router, eos=codec.eos, max_length=512)
    assert asked(cluster, codec) == wanted


@pytest.mark.parametrize(
    ("guide", "shape"),
    [
        (OutputFormat(kind="regex", text="[0-9]{4}-[a-z]{2}"), str),
        (
            OutputFormat(
                kind="json_schema",
                text='{"type":"object","properties":{"age":{"type":"integer","maximum":99}},'
                '"required":["age"],"additionalProperties":false}',
            ),
            dict,
        ),
    ],
)
def test_guides_are_followed(
    folder: Path, codec: TextCodec, guide: OutputFormat, shape: Any
) -> None:
    import json
    import re

    matchers = MatcherFactory(folder, codec.vocabulary, codec.eos)
    cluster = Cluster(
        folder, LAYERS, [node(0, 30)], eos=codec.eos, max_length=512, matchers=matchers
    )
    prompt = codec.chat([{"role": "user", "content": "How old is Ann?"}])
    sampling = SamplingParams(max_tokens=40, guide=guide)
    cluster.submit(GenerateRequest(tuple(prompt), sampling, id="r"))
    cluster.run()
    text = codec.decode(cluster.tokens("r"))
    assert cluster.events["r"][-1].finish_reason == "stop"
    if shape is str:
        assert re.fullmatch(guide.text, text)
    else:
        assert set(json.loads(text)) == {"age"}


@pytest.mark.parametrize("cuts", [(0, LAYERS), (0, 7, 20, LAYERS)], ids=["whole", "cut"])
def test_vectors_are_those_of_transformers(
    folder: Path, codec: TextCodec, cuts: tuple[int, ...]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    setups = [
        NodeSetup(start, end, blocks=64, block_size=16) for start, end in itertools.pairwise(cuts)
    ]
    cluster = Cluster(folder, LAYERS, setups, max_length=512)
    orders = (ReadOrder(pool="last"), ReadOrder(pool="mean"))
    for number, question in enumerate(QUESTIONS):
        for order in orders:
            tokens = tuple(codec.encode(question))
            cluster.submit(
                GenerateRequest(
                    tokens, SamplingParams(max_tokens=1), id=f"{number}{order.pool}", read=order
                )
            )
    cluster.run()
    cluster.settle()
    for number, question in enumerate(QUESTIONS):
        with torch.no_grad():
            states = model.model(torch.tensor([codec.encode(question)])).last_hidden_state[0]
        for order in orders:
            reading = cluster.events[f"{number}{order.pool}"][-1].reading
            assert reading is not None
            vector = states[-1] if order.pool == "last" else states.mean(0)
            expected = (vector / vector.norm()).tolist()
            assert reading.vector == pytest.approx(expected, abs=2e-5)
