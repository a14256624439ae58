"""/tokenize and /detokenize as vLLM has them."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("zmq", reason="needs the extra 'engine'")
pytest.importorskip("tokenizers", reason="needs the extra 'engine'")

from atoll.runtime import openai
from atoll.runtime.instance import instance_requests as requests
from atoll.runtime.instance.tokenizing import MAX_TOKENS, answer_tokens, read_tokens_request
from atoll.runtime.openai import ApiError
from tests.runtime.instance.codecs import PlainCodec

CODEC = PlainCodec(["<s>", "<user>", "<assistant>"], begin="<s>")


def ask(path: str, **fields: object) -> Any:
    body = json.dumps({"model": "m"} | fields).encode()
    return json.loads(answer_tokens(read_tokens_request(path, body), body, CODEC, 64).body)


def shown(**fields: object) -> str:
    return CODEC.decode(ask("/tokenize", **fields)["tokens"])


def refused(path: str, **fields: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        ask(path, **fields)
    assert caught.value.status == 400
    return caught.value


def test_a_text() -> None:
    assert ask("/tokenize", prompt="ab") == {
        "count": 3,
        "max_model_len": 64,
        "tokens": [200, 97, 98],
        "token_strs": None,
    }
    assert ask("/tokenize", prompt="ab", return_token_strs=True)["token_strs"] == ["<s>", "a", "b"]
    assert shown(prompt="ab", add_special_tokens=False) == "ab"
    assert ask("/tokenize", prompt="", add_special_tokens=False)["count"] == 0


def test_a_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    assert shown(messages=messages) == "<user>Hi|<assistant>"
    assert shown(messages=messages, add_generation_prompt=False) == "<user>Hi|"
    assert shown(messages=messages, add_special_tokens=True) == "<s><user>Hi|<assistant>"
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    assert shown(messages=[{"role": "user", "content": parts}]) == "<user>Hi|<assistant>"
    tool = {"type": "function", "function": {"name": "f"}}
    chat = {"model": "m", "messages": messages, "tools": [tool]}
    body = json.dumps(chat).encode()
    monkeypatch.setattr(requests, "check_form", lambda *_: None)
    (choice,) = requests.read("/v1/chat/completions", body, CODEC, MAX_TOKENS).choices
    assert ask("/tokenize", messages=messages, tools=[tool])["tokens"] == list(choice.prompt)
    begun = [*messages, {"role": "assistant", "content": "Well, "}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert shown(messages=begun, **options) == "<user>Hi|<assistant>Well,"


def test_back_to_text() -> None:
    assert ask("/detokenize", tokens=[200, 97, 98]) == {"prompt": "<s>ab"}
    assert ask("/detokenize", tokens=[]) == {"prompt": ""}


def test_longer_than_the_model_takes_is_counted_still() -> None:
    assert ask("/tokenize", prompt="x" * 1000)["count"] == 1001


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt"),
        ("/tokenize", {"prompt": "x" * (4 * MAX_TOKENS + 1)}, "prompt"),
        ("/tokenize", {"prompt": "x" * (MAX_TOKENS + 1)}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            "/tokenize",
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": "data:"}}],
                    }
                ]
            },
            "messages.content",
        ),
        (
            "/tokenize",
            {
                "messages": [{"role": "user", "content": "x"}],
                "add_generation_prompt": True,
                "continue_final_message": True,
            },
            "continue_final_message",
        ),
        ("/detokenize", {"tokens": [300]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": "ab"}, "tokens"),
    ],
)
def test_nonsense(path: str, fields: dict[str, object], param: str) -> None:
    assert refused(path, **fields).param == param


def test_lists_of_millions_are_not_even_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai, "_DECODERS", {})
    assert refused("/detokenize", tokens=[1] * (2 * MAX_TOKENS)).param == "tokens"
