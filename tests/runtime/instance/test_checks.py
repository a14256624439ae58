"""What a request asks too much of is refused before a node hears of it."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("zmq", reason="needs the extra 'engine'")
pytest.importorskip("tokenizers", reason="needs the extra 'engine'")

from atoll.runtime import openai
from atoll.runtime.instance import instance_requests as requests
from atoll.runtime.instance.choice_request import ParsedRequest
from atoll.runtime.instance.instance_requests import MAX_STOP_CHARS, is_quick
from atoll.runtime.openai import ApiError
from tests.runtime.instance.codecs import PlainCodec

LONGEST = 100


def read(**more: object) -> ParsedRequest:
    body = json.dumps({"model": "m", "prompt": "Hello"} | more).encode()
    return requests.read("/v1/completions", body, PlainCodec(), LONGEST)


def chat(**more: object) -> ParsedRequest:
    messages = [{"role": "user", "content": "Hi"}]
    body = json.dumps({"model": "m", "messages": messages} | more).encode()
    return requests.read("/v1/chat/completions", body, PlainCodec(), LONGEST)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"stop_token_ids": list(range(1025))}, "stop_token_ids"),
        ({"stop_token_ids": [1] * 10**6}, None),
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop": "x" * (MAX_STOP_CHARS + 1)}, "stop"),
        ({"stop": ["x" * 600] * 64}, "stop"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"repetition_penalty": 1e-320}, None),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_k": "many"}, None),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [10_000]}, "prompt"),
        ({"prompt": [1] * 400_000}, "prompt"),
        ({"n": 100}, "n"),
        ({"n": 2, "atoll": {"resume": {"text": "x"}}}, "atoll.resume"),
        ({"response_format": {"type": "poem"}}, "response_format.type"),
    ],
)
def test_limits(more: dict[str, Any], param: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        read(**more)
    assert caught.value.status == 400
    if param is not None:
        assert caught.value.param == param


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"modalities": ["audio"]}, "modalities"),
        ({"modalities": ["text", "audio"], "audio": {"voice": "alloy"}}, "modalities"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"min_tokens": 9, "max_completion_tokens": 8}, "min_tokens"),
    ],
)
def test_limits_of_chats(more: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**more)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_clients_look_for() -> None:
    """LiteLLM and LangChain know it by its code or by these words, and then shorten or go elsewhere."""
    words = f"this model's maximum context length is {LONGEST} tokens"
    for text in ("x" * LONGEST, "x" * 10 * LONGEST):
        with pytest.raises(ApiError, match=words) as caught:
            read(prompt=text)
        assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
        with pytest.raises(ApiError, match=words):
            chat(messages=[{"role": "user", "content": text}])


def test_what_is_allowed_stays_allowed() -> None:
    most = {str(i): 1.0 for i in range(200)}
    sampling = (
        read(logit_bias=most, stop=["x" * 256] * 64, stop_token_ids=[1] * 1024, min_tokens=3)
        .choices[0]
        .sampling
    )
    assert len(sampling.logit_bias) == 200
    assert sampling.min_tokens == 3
    assert chat(modalities=["text"], logprobs=True, top_logprobs=20).logprobs


@pytest.mark.parametrize("temperature", [0, 1, 1.5, None])
def test_a_top_p_of_nothing_is_greedy(temperature: float | None) -> None:
    assert read(top_p=0, temperature=temperature).choices[0].sampling.is_greedy
    assert chat(top_p=0.0, temperature=temperature).choices[0].sampling.is_greedy


@pytest.mark.parametrize("temperature", [5e-324, 1e-320, 1e-9])
def test_a_temperature_of_next_to_nothing_is_greedy(temperature: float) -> None:
    assert read(temperature=temperature).choices[0].sampling.is_greedy
    assert not read(temperature=0.01).choices[0].sampling.is_greedy


def test_forms_are_never_compiled_between_tokens() -> None:
    assert is_quick(b'{"model": "m", "prompt": "Hello"}')
    assert not is_quick(b'{"response_format": {"type": "json_object"}}')
    assert not is_quick(rb'{"respon\u0073e_format": {"type": "json_object"}}')
    assert not is_quick(b" " * 2**15)


_SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9)
)
_VALUES = (
    _SCALARS
    | st.lists(_SCALARS, max_size=3)
    | st.dictionaries(st.sampled_from(["type", "schema", "resume", "1"]), _SCALARS, max_size=3)
)
_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "best_of",
    "echo",
    "suffix",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "max_tokens",
    "logprobs",
    "logit_bias",
    "repetition_penalty",
    "presence_penalty",
    "response_format",
    "guided_regex",
    "atoll",
    "prompt",
    "seed",
)


@given(st.dictionaries(st.sampled_from(_FIELDS), _VALUES, max_size=4))
def test_whatever_is_sent_is_understood_or_refused(more: dict[str, Any]) -> None:
    try:
        parsed = read(**more)
    except ApiError as error:
        status = error.status
    else:
        status = 200 if parsed.choices else 500
    assert status in (200, 400)


def test_objects_of_a_million_names_are_not_even_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cast("Any", openai._DECODERS), "/v1/completions", None)
    body = b'{"model":"m","prompt":"a","logit_bias":{%b"x":1}}' % (b'"x":1,' * 300_000)
    with pytest.raises(ApiError, match="too many parts"):
        requests.read("/v1/completions", body, PlainCodec(), LONGEST)
