"""Requests for tokens, as each kind of backend writes them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.runtime.gateway.token_relay import translate_answer, translate_request
from atoll.runtime.openai import ApiError, DetokenizeRequest, Message, TokenizeRequest

TEXT = TokenizeRequest(model="m", prompt="ab")
TOKENS = DetokenizeRequest(model="m", tokens=[1, 2])


@pytest.mark.parametrize("kind", ["atoll", "vllm", "sglang", "openai"])
def test_max_take_it_as_it_came(kind: Any) -> None:
    assert translate_request(TEXT, kind) is None
    assert translate_request(TOKENS, kind) is None


def test_llamacpp_has_names_of_its_own() -> None:
    asked = TokenizeRequest(
        model="m", prompt="ab", add_special_tokens=False, return_token_strs=True
    )
    assert json.loads(translate_request(asked, "llamacpp") or b"") == {
        "content": "ab",
        "add_special": False,
        "parse_special": True,
        "with_pieces": True,
    }
    assert json.loads(translate_request(TEXT, "llamacpp") or b"")["add_special"] is True
    assert json.loads(translate_request(TOKENS, "llamacpp") or b"") == {"tokens": [1, 2]}
    with pytest.raises(ApiError) as caught:
        translate_request(
            TokenizeRequest(model="m", messages=[Message(role="user", content="x")]), "llamacpp"
        )
    assert (caught.value.status, caught.value.param) == (400, "messages")


@pytest.mark.parametrize(
    ("kind", "answer", "expected"),
    [
        ("llamacpp", {"tokens": [5, 6]}, {"count": 2, "tokens": [5, 6], "token_strs": None}),
        ("llamacpp", {"tokens": []}, {"count": 0, "tokens": [], "token_strs": None}),
        (
            "llamacpp",
            {"tokens": [{"id": 5, "piece": "a"}, {"id": 6, "piece": [195]}]},
            {"count": 2, "tokens": [5, 6], "token_strs": ["a", "\ufffd"]},
        ),
        ("sglang", {"tokens": [5], "count": 1}, {"count": 1, "tokens": [5]}),
        ("openai", {"error": "no"}, None),
    ],
)
def test_tokens_come_back_in_one_shape(kind: Any, answer: Any, expected: Any) -> None:
    found = translate_answer(TEXT, kind, json.dumps(answer).encode())
    if expected is None:
        assert found is None
    else:
        assert found is not None
        data = json.loads(found)
        data.pop("max_model_len", None)
        assert data == expected


@pytest.mark.parametrize(
    ("kind", "answer"),
    [("llamacpp", {"content": "ab"}), ("sglang", {"text": "ab"}), ("vllm", {"prompt": "ab"})],
)
def test_so_does_text(kind: Any, answer: Any) -> None:
    found = translate_answer(TOKENS, kind, json.dumps(answer).encode())
    assert found is not None
    assert json.loads(found) == {"prompt": "ab"}


_ANY = st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["tokens", "count", "content", "piece", "id"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)


@given(_ANY, st.sampled_from(["llamacpp", "sglang", "openai"]), st.sampled_from([TEXT, TOKENS]))
def test_whatever_a_backend_says_nothing_breaks(answer: Any, kind: Any, request_: Any) -> None:
    found = translate_answer(request_, kind, json.dumps(answer).encode())
    assert found is None or isinstance(json.loads(found), dict)
    assert translate_answer(request_, kind, b"\xff{") is None
