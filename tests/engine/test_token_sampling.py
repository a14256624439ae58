"""Choosing tokens: each knob does what it says, and luck depends on seed and position alone."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="needs the extra 'engine'")

import torch

from atoll.core.request_parameters import SamplingParams
from atoll.core.rng import stream
from atoll.engine.engine_errors import EngineError
from atoll.engine.engine_messages import FINISH_CODES
from atoll.engine.token_sampling import SampledToken, Sampler, choose_batch

pytestmark = pytest.mark.engine

LOGITS = torch.log(torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]))


def draws(count: int = 400, **knobs: Any) -> Counter[int]:
    knobs = {"temperature": 1.0, "max_tokens": 10_000} | knobs
    seen: Counter[int] = Counter()
    for seed in range(count):
        chooser = Sampler(SamplingParams(seed=seed, **knobs), (), [0], 1)
        seen[chooser.choose(LOGITS).token] += 1
    return seen


def test_greedy_takes_the_largest() -> None:
    assert Sampler(SamplingParams(), (), [0], 1).choose(LOGITS).token == 0


def test_temperature_one_follows_the_distribution() -> None:
    seen = draws(2000)
    for token, share in enumerate((0.4, 0.3, 0.15, 0.1, 0.05)):
        assert abs(seen[token] / 2000 - share) < 0.04


def test_a_low_temperature_sharpens() -> None:
    assert draws(temperature=0.1)[0] > 370


@pytest.mark.parametrize(
    ("knob", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.65}, {0, 1}),
        ({"top_p": 0.72}, {0, 1, 2}),
        ({"min_p": 0.3}, {0, 1, 2}),
        ({"top_p": 0.01}, {0}),
        ({"top_k": 3, "min_p": 0.7}, {0, 1}),
    ],
)
def test_cuts_keep_what_they_should(knob: dict[str, Any], kept: set[int]) -> None:
    assert set(draws(**knob)) == kept


def test_luck_depends_on_seed_and_position_alone() -> None:
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=99)
    straight = Sampler(params, (), [0], 1)
    first = [straight.choose(LOGITS).token for _ in range(8)]
    resumed = Sampler(params, (), [0, *first[:3]], 1)
    assert [resumed.choose(LOGITS).token for _ in range(5)] == first[3:]
    assert len(set(first)) > 1


def test_penalties() -> None:
    flat = torch.tensor([2.0, 1.9, -1.0])
    repeat = Sampler(SamplingParams(repetition_penalty=2.0), (), [0], 1)
    assert repeat.choose(flat).token == 1, "the prompt counts for repetition"
    presence = Sampler(SamplingParams(presence_penalty=0.5, max_tokens=9), (), [1], 1)
    assert [presence.choose(flat).token for _ in range(3)] == [0, 1, 0]
    frequency = Sampler(SamplingParams(frequency_penalty=0.3, max_tokens=9), (), [1], 1)
    assert [frequency.choose(flat).token for _ in range(4)] == [0, 1, 0, 1]


def test_bias_moves_the_choice() -> None:
    params = SamplingParams(logit_bias=((4, 100.0), (999, 5.0)))
    assert Sampler(params, (), [0], 1).choose(LOGITS).token == 4


def test_logprobs_are_those_of_the_distribution() -> None:
    choice = Sampler(SamplingParams(logprobs=3), (), [0], 1).choose(LOGITS)
    assert choice.logprob == pytest.approx(math.log(0.4), abs=1e-5)
    assert [token for token, _ in choice.top] == [0, 1, 2]
    assert choice.top[1][1] == pytest.approx(math.log(0.3), abs=1e-5)
    assert math.isnan(Sampler(SamplingParams(), (), [0], 1).choose(LOGITS).logprob)


def test_the_answer_ends_by_length_end_token_or_stop_token() -> None:
    def finish(chooser: Sampler) -> str | None:
        return FINISH_CODES[chooser.choose(LOGITS).finish]

    assert finish(Sampler(SamplingParams(max_tokens=1), (), [0], 1)) == "length"
    assert finish(Sampler(SamplingParams(max_tokens=2), (), [0], 1)) is None
    assert finish(Sampler(SamplingParams(max_tokens=2), (0,), [0], 1)) == "stop"
    assert finish(Sampler(SamplingParams(max_tokens=2, ignore_eos=True), (0,), [0], 1)) is None
    assert finish(Sampler(SamplingParams(max_tokens=2, stop_token_ids=(0,)), (), [0], 1)) == "stop"


@st.composite
def knobs_of_a_sequence(draw: st.DrawFn) -> SamplingParams:
    """Of every two about one is simple, and of those about one is greedy."""
    asked: dict[str, Any] = {
        "temperature": draw(st.sampled_from((0.0, 0.3, 1.0, 1.7))),
        "seed": draw(st.integers(0, 2**62)),
        "top_k": draw(st.sampled_from((0, 1, 3, 29, 10**400))),
        "top_p": draw(st.sampled_from((1.0, 0.9, 0.5, 0.01))),
        "min_p": draw(st.sampled_from((0.0, 0.05, 0.6, 1.0))),
    }
    extra = {
        "logprobs": 2,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "logit_bias": ((3, 2.0),),
        "min_tokens": 2,
    }
    for name in draw(st.sets(st.sampled_from(sorted(extra)), max_size=1)):
        asked[name] = extra[name]
    return SamplingParams(**asked)


@given(
    knobs=st.lists(knobs_of_a_sequence(), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
    sharp=st.sampled_from((0.0, 1.0, 8.0)),
    kind=st.sampled_from((torch.float32, torch.bfloat16)),
)
def test_a_batch_chooses_as_each_would_alone(
    knobs: list[SamplingParams], seed: int, sharp: float, kind: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (sharp * torch.randn(len(knobs), 30, generator=generator)).to(kind)
    known = [[1] * (1 + i) for i in range(len(knobs))]
    together = choose_batch(
        logits, [Sampler(p, (2,), list(t), 1) for p, t in zip(knobs, known, strict=True)]
    )
    alone = [Sampler(p, (2,), list(known[i]), 1).choose(logits[i]) for i, p in enumerate(knobs)]
    assert [_told(c) for c in together] == [_told(c) for c in alone]


def _told(choice: Any) -> tuple[Any, ...]:
    assert isinstance(choice, SampledToken)
    return choice.token, choice.finish, repr(choice.logprob), choice.top


@given(knobs_of_a_sequence(), st.integers(0, 1000), st.sampled_from((1.0, 8.0)))
def test_a_token_is_drawn_as_it_was_before_batches_were(
    knobs: SamplingParams, seed: int, sharp: float
) -> None:
    """One sequence alone, step by step: seeds give the tokens they always gave."""
    logits = sharp * torch.randn(30, generator=torch.Generator().manual_seed(seed))
    p = SamplingParams(
        temperature=knobs.temperature or 0.7,
        seed=knobs.seed,
        top_k=knobs.top_k,
        top_p=knobs.top_p,
        min_p=knobs.min_p,
    )
    shares, order = torch.sort(torch.softmax(logits / p.temperature, -1), descending=True)
    keep = [share > 0.0 for share in shares.tolist()]
    before = (shares.cumsum(0) - shares).tolist()
    for place, share in enumerate(shares):
        keep[place] &= not p.top_k or place < p.top_k
        keep[place] &= p.top_p == 1.0 or before[place] < float(torch.tensor(p.top_p))
        keep[place] &= bool(share >= p.min_p * shares[0])
    keep[0] = True
    kept = [float(share) if stays else 0.0 for share, stays in zip(shares, keep, strict=True)]
    point = stream(p.seed or 0, "token", "3").random() * sum(kept)
    reached, found = 0.0, 0
    for place, share in enumerate(kept):
        reached += share
        if share:
            found = place
        if reached > point:
            break
    assert Sampler(p, (), [1, 1, 1], 1).choose(logits).token == int(order[found])


def test_tokens_of_a_batch_are_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time a result is asked for a GPU is waited for."""
    knobs = [SamplingParams(temperature=float(i % 3), seed=i, top_p=0.9) for i in range(8)]
    asked = []
    whole = torch.Tensor.tolist

    def tolist(tensor: torch.Tensor) -> Any:
        asked.append(tensor.shape)
        return whole(tensor)

    def one_number(tensor: torch.Tensor) -> Any:
        raise AssertionError(f"a single number of {tensor.shape} was asked for")

    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    for name in ("item", "__int__", "__float__", "__bool__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, one_number)
    choose_batch(torch.randn(8, 30), [Sampler(p, (), [1], 1) for p in knobs])
    assert asked == [(8,)]


def test_one_that_cannot_go_on_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, fine = (Sampler(SamplingParams(logprobs=1), (), [1], 1) for _ in range(2))

    def refuse(_: Any) -> Any:
        raise EngineError("nothing may follow")

    monkeypatch.setattr(stuck, "choose", refuse)
    first, second = choose_batch(torch.stack([LOGITS, LOGITS]), [stuck, fine])
    assert isinstance(first, EngineError)
    assert isinstance(second, SampledToken)
    assert second.token == 0
