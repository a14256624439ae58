"""Echoes, suffixes and the best of several answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("zmq", reason="needs the extra 'engine'")
pytest.importorskip("tokenizers", reason="needs the extra 'engine'")

from atoll.engine.engine_messages import ReadOrder
from atoll.runtime.instance import instance_requests as requests
from atoll.runtime.instance.choice_request import ParsedRequest
from atoll.runtime.instance.completion_options import FAMILIES
from atoll.runtime.instance.instance_answers import ChoiceDelta, keep_best
from atoll.runtime.openai import ApiError
from tests.runtime.instance.codecs import PlainCodec

LONGEST = 100


def read(codec: PlainCodec, **more: object) -> ParsedRequest:
    body = json.dumps({"model": "m", "prompt": "ab"} | more).encode()
    return requests.read("/v1/completions", body, codec, LONGEST)


def refused(codec: PlainCodec, **more: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(codec, **more)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize("marks", FAMILIES, ids=lambda marks: marks.prefix)
def test_every_family_is_told_in_its_own_way(marks: Any) -> None:
    names = [name for name in (marks.prefix, marks.suffix, marks.middle) if name]
    codec = PlainCodec([*names, *marks.ends[:1], "<s>"], begin="<s>")
    (choice,) = read(codec, suffix="yz").choices
    expected = f"<s>{marks.prefix}ab{marks.suffix}yz{marks.middle}"
    if marks.suffix_first:
        expected = f"<s>{marks.suffix}yz{marks.prefix}ab"
    assert codec.decode(choice.prompt) == expected
    ends = [codec.token_of(name) for name in marks.ends[:1]]
    assert list(choice.sampling.stop_token_ids) == ends
    # Tokens instead of text, and with an echo.
    (same,) = read(codec, prompt=[97, 98], suffix="yz", echo=True).choices
    assert same.prompt == choice.prompt


def test_a_model_that_cannot_fill_in_is_named() -> None:
    error = refused(PlainCodec(), suffix="yz")
    assert error.param == "suffix"
    assert "'m'" in error.message
    # Half of the marks are none.
    assert refused(PlainCodec(["<fim_prefix>", "<fim_suffix>"]), suffix="y").param == "suffix"
    assert read(PlainCodec(), suffix="").choices


def test_a_suffix_has_a_limit() -> None:
    codec = PlainCodec(["<fim_prefix>", "<fim_suffix>", "<fim_middle>"])
    assert refused(codec, suffix="y" * 10**6).code == "context_length_exceeded"
    assert refused(codec, suffix="y" * LONGEST).code == "context_length_exceeded"


def test_prompts_are_shown_as_they_came() -> None:
    codec = PlainCodec(["<s>"], begin="<s>")
    texts = [choice.echo for choice in read(codec, echo=True, prompt=["ab", "cd"], n=2).choices]
    assert texts == ["ab", "ab", "cd", "cd"]
    assert read(codec, echo=True, prompt=[97, 98]).choices[0].echo == "ab"
    assert read(codec, echo=True, prompt=[[97], [98]]).choices[1].echo == "b"
    assert read(codec).choices[0].echo is None


def test_likelihoods_of_a_prompt_are_read_with_it() -> None:
    codec = PlainCodec()
    (choice,) = read(codec, echo=True, logprobs=3).choices
    assert choice.read == ReadOrder(scores=3)
    assert not choice.is_silent
    parsed = read(codec, echo=True, logprobs=0, max_tokens=0)
    assert parsed.logprobs
    (choice,) = parsed.choices
    assert choice.is_silent
    assert choice.sampling.max_tokens == 1
    assert read(codec, logprobs=3).choices[0].read is None
    assert refused(codec, max_tokens=0).param == "max_tokens"


def test_an_echo_is_not_shown_again() -> None:
    codec = PlainCodec()
    resume = {"text": "abxy", "tokens": 2, "token_ids": [120, 121]}
    (choice,) = read(codec, echo=True, atoll={"resume": resume}).choices
    assert (choice.echo, choice.shown, choice.generated) == (None, "xy", (120, 121))
    (choice,) = read(codec, echo=True, atoll={"resume": {"text": "ab"}}).choices
    assert (choice.echo, choice.shown, choice.generated) == (None, "", ())
    (choice,) = read(codec, echo=True, atoll={"resume": {"text": ""}}).choices
    assert choice.echo == "ab"


def test_best_of() -> None:
    codec = PlainCodec()
    parsed = read(codec, n=2, best_of=5, prompt=["ab", "cd"])
    assert len(parsed.choices) == 10
    assert not parsed.logprobs
    assert parsed.choices[0].sampling.logprobs == 0
    assert len({choice.sampling.seed for choice in read(codec, best_of=3, seed=1).choices}) == 3
    assert refused(codec, n=3, best_of=2).param == "best_of"
    assert refused(codec, best_of=2, stream=True).param == "best_of"
    assert refused(codec, best_of=17).param == "n"
    assert read(codec, n=2, best_of=2, stream=True).best_of == 2


def answer(*logprobs: float) -> list[ChoiceDelta]:
    echo = ChoiceDelta(0, "ab", logprobs=[{"logprob": None}, {"logprob": -50.0}])
    return [echo, *(ChoiceDelta(0, "x", [1], [{"logprob": value}]) for value in logprobs)]


def test_the_best_are_the_likeliest_on_average() -> None:
    short, long, worst = answer(-3.0), answer(-1.0, -1.0, -1.0, -1.0, -1.0), answer(-9.0)
    assert keep_best([short, long, worst], 3, 1) == [long]
    assert keep_best([short, worst, long, short], 2, 1) == [short, long]
    assert keep_best([worst, short], 1, 1) == [worst, short]
