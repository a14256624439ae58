"""Vectors in prompts: those of the model's own tokens change nothing, others never share KV."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="needs the extra 'engine'")

import torch

from atoll.core.errors import UsageError
from atoll.core.request_parameters import SamplingParams
from atoll.engine.embeds import PLACEHOLDER, PromptEmbeds, join_pieces
from atoll.engine.engine_errors import FrameError
from atoll.engine.engine_messages import Hop, Open, OpenBody
from atoll.engine.frames import decode, encode
from atoll.engine.node_core import CoreSettings
from atoll.engine.scheduler_core import GenerateRequest
from tests.engine.cluster import Cluster, NodeSetup
from tests.engine.models import LAYERS, Tiny
from tests.engine.split_router import SplitRouter
from tests.engine.test_exact import CUTS, PROMPTS, check
from tests.seeds import examples, slow_except

pytestmark = pytest.mark.engine

TINY_WIDTH = 32


def own_vectors(model: Tiny, prompt: list[int], positions: list[int]) -> PromptEmbeds:
    """Return what the model's embedding layer gives for the tokens at these positions."""
    with torch.inference_mode():
        rows = model.model.get_input_embeddings()(torch.tensor([prompt[i] for i in positions]))
    return PromptEmbeds(np.array(positions), rows.numpy())


def embedded(model: Tiny, prompt: list[int], chance: random.Random, count: int) -> GenerateRequest:
    """Ask for a prompt of which some tokens, often neighbours, are given as vectors."""
    start = chance.randrange(len(prompt))
    run = set(range(start, min(len(prompt), start + chance.randint(1, 9))))
    positions = sorted(run | {i for i in range(len(prompt)) if chance.random() < 0.2})
    shown = [PLACEHOLDER if i in positions else t for i, t in enumerate(prompt)]
    sampling = SamplingParams(max_tokens=count, ignore_eos=True)
    return GenerateRequest(tuple(shown), sampling, embeds=own_vectors(model, prompt, positions))


def ask_embedded(
    cluster: Cluster, model: Tiny, chance: random.Random, requests: int
) -> dict[str, tuple[list[int], int]]:
    asked = {}
    for number in range(requests):
        prompt, count = chance.choice(PROMPTS), chance.randint(1, 12)
        request = embedded(model, prompt, chance, count)
        name = f"r{number}"
        cluster.submit(
            GenerateRequest(request.prompt, request.sampling, name, embeds=request.embeds)
        )
        asked[name] = (prompt, count)
        for _ in range(chance.randrange(20)):
            cluster.step()
    return asked


@examples(4)
@given(
    cuts=CUTS,
    seed=st.integers(0, 10_000),
    chunk=st.integers(1, 16),
    budget=st.integers(1, 32),
    blocks=st.sampled_from((12, 64)),
    caching=st.booleans(),
)
def test_own_vectors_give_the_plain_answer_over_any_layout(
    tiny: Callable[[str], Any],
    cuts: tuple[tuple[int, int], ...],
    seed: int,
    chunk: int,
    budget: int,
    blocks: int,
    caching: bool,
) -> None:
    model = tiny("llama")
    limits = CoreSettings(token_budget=budget, chunk=chunk)
    setups = [
        NodeSetup(a, b, blocks=blocks, prefix_caching=caching, settings=limits) for a, b in cuts
    ]
    cluster = Cluster(model.folder, LAYERS, setups, seed=seed)
    check(cluster, ask_embedded(cluster, model, random.Random(seed), 4), model)


@examples(2)
@given(sides=st.tuples(CUTS, CUTS), seed=st.integers(0, 10_000), chunk=st.integers(2, 16))
def test_prompts_with_vectors_and_answers_on_different_nodes(
    tiny: Callable[[str], Any],
    sides: tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]],
    seed: int,
    chunk: int,
) -> None:
    model = tiny("llama")
    limits = CoreSettings(token_budget=24, chunk=chunk)
    setups = [NodeSetup(a, b, settings=limits) for side in sides for a, b in side]
    names = [f"n{i}" for i in range(len(setups))]
    router = SplitRouter(LAYERS, names[: len(sides[0])], names[len(sides[0]) :])
    cluster = Cluster(model.folder, LAYERS, setups, router=router, seed=seed)
    check(cluster, ask_embedded(cluster, model, random.Random(seed), 3), model)


@examples(2)
@given(seed=st.integers(0, 100_000))
def test_answers_after_vectors_survive_dead_nodes(tiny: Callable[[str], Any], seed: int) -> None:
    model = tiny("llama")
    chance = random.Random(seed)
    setups = [NodeSetup(0, 1), NodeSetup(0, 1), NodeSetup(1, 4), NodeSetup(1, 4)]
    cluster = Cluster(model.folder, LAYERS, setups, seed=seed)
    request = embedded(model, PROMPTS[9], chance, 12)
    cluster.submit(GenerateRequest(request.prompt, request.sampling, "r", embeds=request.embeds))
    cluster.run(until=lambda: len(cluster.events["r"]) >= 1 + seed % 6)
    side = chance.choice((0, 1))
    cluster.kill(
        next(c for c in cluster.nodes.values() if not c.idle and c.stage.start == side).name
    )
    check(cluster, {"r": (PROMPTS[9], 12)}, model)
    assert cluster.events["r"][-1].restarts == 1


@pytest.mark.parametrize("architecture", slow_except(("gemma3",), ("gemma3", "phi3", "qwen3-moe")))
def test_other_architectures_read_vectors(tiny: Callable[[str], Any], architecture: str) -> None:
    model = tiny(architecture)
    cluster = Cluster(model.folder, LAYERS, [NodeSetup(0, 1), NodeSetup(1, 4)], seed=1)
    check(cluster, ask_embedded(cluster, model, random.Random(3), 3), model)


def foreign(seed: int, count: int = 9) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).normal(0, 0.25, (count, TINY_WIDTH)).astype(np.float32)


def expected(model: Tiny, prompt: list[int], embeds: PromptEmbeds, count: int) -> list[int]:
    """The next tokens by transformers, from vectors all the way."""
    with torch.inference_mode():
        rows = model.model.get_input_embeddings()(torch.tensor([prompt])).clone()
        rows[0, torch.tensor(embeds.positions)] = torch.tensor(embeds.rows)
        tokens = model.model.generate(
            inputs_embeds=rows,
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    found: list[int] = tokens[0].tolist()
    return found


def test_prompts_share_kv_exactly_as_far_as_their_vectors_are_the_same(
    tiny: Callable[[str], Any],
) -> None:
    model = tiny("llama")
    cluster = Cluster(model.folder, LAYERS, [NodeSetup(0, 1), NodeSetup(1, 4)])
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    first, second = foreign(1), foreign(2)
    half = np.concatenate([first[:5], second[5:]])
    blocks = []
    answers = set()
    length = 0
    for number, rows in enumerate((first, second, half, first)):
        prompt, embeds = join_pieces([PROMPTS[9][:6], rows, PROMPTS[9][6:]])
        assert embeds is not None
        name = f"r{number}"
        cluster.submit(GenerateRequest(tuple(prompt), sampling, id=name, embeds=embeds))
        cluster.run()
        assert cluster.tokens(name) == expected(model, prompt, embeds, 8)
        length = len(prompt)
        answers.add(tuple(cluster.tokens(name)))
        blocks.append({core.pool.hits for core in cluster.nodes.values()})
    # Blocks of 4: 6 tokens, 9 vectors; what was made stays known. Nothing, one block, two, all.
    whole = (length - 1) // 4
    assert blocks == [{0}, {1}, {1 + 2}, {1 + 2 + whole}]
    assert len(answers) == 3
    cluster.settle()


def test_the_same_prompt_without_vectors_shares_nothing_of_them(tiny: Callable[[str], Any]) -> None:
    model = tiny("llama")
    cluster = Cluster(model.folder, LAYERS, [NodeSetup(0, 4)])
    prompt, embeds = join_pieces([foreign(3, 12), PROMPTS[4]])
    assert embeds is not None
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    cluster.submit(GenerateRequest(tuple(prompt), sampling, id="with", embeds=embeds))
    cluster.run()
    cluster.submit(GenerateRequest(tuple(prompt), sampling, id="without"))
    check(cluster, {"without": (prompt, 6)}, model)
    assert cluster.tokens("with") == expected(model, prompt, embeds, 6)


def test_penalties_leave_vectors_out(tiny: Callable[[str], Any]) -> None:
    model = tiny("llama")
    cluster = Cluster(model.folder, LAYERS, [NodeSetup(0, 4)])
    embeds = own_vectors(model, PROMPTS[0], list(range(len(PROMPTS[0]))))
    sampling = SamplingParams(max_tokens=4, repetition_penalty=1.5, ignore_eos=True)
    prompt = (PLACEHOLDER,) * len(PROMPTS[0])
    cluster.submit(GenerateRequest(prompt, sampling, id="r", embeds=embeds))
    cluster.run()
    assert len(set(cluster.tokens("r"))) == 4


@pytest.mark.parametrize(
    ("rows", "positions", "message"),
    [
        (np.zeros((2, 4)), [1], "1 positions for vectors of shape"),
        (np.zeros(4), [0, 1, 2, 3], "for vectors of shape"),
        (np.zeros((0, 4)), [], "for vectors of shape"),
        (np.zeros((2, 4)), [1, 1], "do not increase"),
        (np.zeros((2, 4)), [-1, 1], "do not increase"),
        (np.array([[np.nan]]), [0], "not finite"),
        (np.array([[np.inf]]), [0], "not finite"),
    ],
)
def test_what_no_model_could_read_is_refused(rows: Any, positions: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PromptEmbeds(np.array(positions), rows)


def test_a_vector_after_the_prompt_is_refused(tiny: Callable[[str], Any]) -> None:
    cluster = Cluster(tiny("llama").folder, LAYERS, [NodeSetup(0, 4)])
    embeds = PromptEmbeds(np.array([2]), np.zeros((1, TINY_WIDTH), np.float32))
    with pytest.raises(UsageError, match="position 2 of a prompt of 2"):
        cluster.submit(GenerateRequest((5, 6), id="r", embeds=embeds))


def test_vectors_of_another_width_harm_only_their_own_request(tiny: Callable[[str], Any]) -> None:
    model = tiny("llama")
    cluster = Cluster(model.folder, LAYERS, [NodeSetup(0, 2), NodeSetup(2, 4)])
    embeds = PromptEmbeds(np.array([1]), np.zeros((1, TINY_WIDTH + 1), np.float32))
    cluster.submit(GenerateRequest((5, 6), id="bad", embeds=embeds))
    cluster.run()
    assert "33 wide, the model 32" in str(cluster.events.pop("bad")[-1].error)
    check(cluster, ask_embedded(cluster, model, random.Random(1), 1), model)


def opening(tokens: list[int], embeds: Any) -> Open:
    hop = Hop(node="n", endpoint="mem://n", start=0, end=4)
    body = OpenBody(
        seq=1, epoch=0, route=(hop,), prompt_length=1, max_length=9, reply_to="mem://scheduler"
    )
    return Open(body, np.array(tokens, np.int64), embeds)


def over_the_wire(message: Open) -> Any:
    return decode([bytes(part) for part in encode(message)])


@examples(15)
@given(
    tokens=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=12),
    width=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_vectors_come_over_the_wire_bit_for_bit(tokens: list[int], width: int, seed: int) -> None:
    marks = sum(token < 0 for token in tokens)
    rows = np.random.default_rng(seed).normal(size=(marks, width)).astype(np.float32)
    back = over_the_wire(opening(tokens, rows if marks else None))
    assert back.tokens.tolist() == tokens
    assert (back.embeds is None) == (marks == 0)
    if marks:
        assert back.embeds.tobytes() == rows.tobytes()


@pytest.mark.parametrize(
    ("tokens", "embeds"),
    [
        ([1, -2], np.zeros((2, 3), np.float32)),
        ([1, 2], np.zeros((0, 3), np.float32)),
        ([1, -2], np.zeros(3, np.float32)),
        ([1, -2], np.zeros((1, 3), np.int64)),
    ],
)
def test_vectors_that_do_not_match_their_marks_are_void(tokens: list[int], embeds: Any) -> None:
    with pytest.raises(FrameError):
        over_the_wire(opening(tokens, embeds))


@pytest.mark.parametrize(
    ("tokens", "embeds", "message"),
    [
        ([-5], None, "vocabulary"),
        ([5, -5], np.zeros((1, TINY_WIDTH), np.float32), "vocabulary"),
        ([-5], np.full((1, TINY_WIDTH), np.nan, np.float32), "not finite"),
    ],
)
def test_a_node_refuses_marks_without_sense(
    tiny: Callable[[str], Any], tokens: list[int], embeds: Any, message: str
) -> None:
    cluster = Cluster(tiny("llama").folder, LAYERS, [NodeSetup(0, 4)])
    core = cluster.nodes["mem://n0"]
    core.handle(opening(tokens, embeds))
    (failed,) = cluster.inbox.receive()
    assert message in failed.message  # type: ignore[union-attr]
    assert core.idle
