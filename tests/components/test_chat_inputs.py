"""What chatting components are asked: the good is read, the rest is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.components.base import BadInputError
from atoll.components.chat_inputs import AnswerSoFar, ChatInputs, parts_of, read_chat

USER = {"role": "user", "content": "Hello"}


def test_defaults_are_openais() -> None:
    assert read_chat({"messages": [USER]}) == ChatInputs(messages=(USER,))


def test_everything_is_read() -> None:
    asked = read_chat(
        {
            "messages": [USER | {"name": "Ann", "refusal": None}],
            "max_tokens": 5,
            "temperature": 0,
            "top_p": 0.5,
            "seed": -1,
            "stop": "end",
            "presence_penalty": 1,
            "frequency_penalty": None,
            "resume": {"token_ids": [1, 2], "text": "ab"},
        }
    )
    assert (asked.max_tokens, asked.temperature, asked.top_p) == (5, 0.0, 0.5)
    assert (asked.seed, asked.stop, asked.presence_penalty) == (2**63 - 1, ("end",), 1.0)
    assert asked.resume == AnswerSoFar("ab", (1, 2))
    assert asked.messages == (USER,)


def test_parts_keep_their_order_and_texts_alone_become_one() -> None:
    rows = np.ones((2, 3), np.float16)
    texts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    mixed = [texts[0], {"type": "embeds", "embeds": rows}, texts[1]]
    asked = read_chat({"messages": [USER | {"content": texts}, USER | {"content": mixed}]})
    assert asked.messages[0]["content"] == "ab"
    first, vectors, last = parts_of(asked.messages[1])
    assert (first, last) == ("a", "b")
    assert vectors.dtype == np.float32
    assert np.array_equal(vectors, rows)
    assert asked.has_embeds
    assert asked.chars == 4
    asked.check_width(3)
    with pytest.raises(BadInputError, match="3 wide, the model 4") as caught:
        asked.check_width(4)
    assert caught.value.param == "messages[1].content"


@pytest.mark.parametrize(
    ("resume", "found"),
    [
        (None, None),
        ({"text": "", "token_ids": []}, None),
        ({"text": "so far", "token_ids": []}, AnswerSoFar("so far", None)),
        ({"text": "so far"}, AnswerSoFar("so far", None)),
        ({"token_ids": [3]}, AnswerSoFar("", (3,))),
    ],
)
def test_an_answer_so_far_may_be_known_by_text_alone(resume: Any, found: Any) -> None:
    assert read_chat({"messages": [USER], "resume": resume}).resume == found


def embeds(rows: Any) -> list[Any]:
    return [{"role": "user", "content": [{"type": "embeds", "embeds": rows}]}]


PLACE = "messages[0].content[0].embeds"
WRONG: list[tuple[str, Any, str]] = [
    ("messages", None, "messages"),
    ("messages", [], "messages"),
    ("messages", ["hello"], "messages[0]"),
    ("messages", [{"content": "a"}], "messages[0].role"),
    ("messages", [{"role": "user"}], "messages[0].content"),
    ("messages", [USER | {"tool_calls": [1]}], "messages[0].tool_calls"),
    ("messages", [USER | {"content": ["a"]}], "messages[0].content[0]"),
    ("messages", [USER | {"content": [{"type": "image_url"}]}], "messages[0].content[0]"),
    ("messages", embeds([[1.0]]), PLACE),
    ("messages", embeds(np.zeros(3, np.float32)), PLACE),
    ("messages", embeds(np.zeros((0, 3), np.float32)), PLACE),
    ("messages", embeds(np.zeros((1, 3), np.int64)), PLACE),
    ("messages", embeds(np.full((1, 3), np.nan)), PLACE),
    ("messages", embeds(np.full((1, 3), np.inf)), PLACE),
    ("messages", embeds(np.full((1, 3), 1e300)), PLACE),
    ("max_tokens", 0, "max_tokens"),
    ("max_tokens", True, "max_tokens"),
    ("max_tokens", 1.5, "max_tokens"),
    ("temperature", 2.1, "temperature"),
    ("temperature", float("nan"), "temperature"),
    ("temperature", "hot", "temperature"),
    ("top_p", -0.1, "top_p"),
    ("seed", 2**63, "seed"),
    ("stop", 5, "stop"),
    ("stop", ["a"] * 65, "stop"),
    ("stop", [1], "stop"),
    ("resume", "text", "resume"),
    ("resume", {"text": 1}, "resume.text"),
    ("resume", {"token_ids": [-1]}, "resume.token_ids"),
    ("resume", {"token_ids": "abc"}, "resume.token_ids"),
    ("tools", [1], "tools"),
]


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize(("name", "value", "param"), WRONG)
def test_what_is_wrong_is_named(name: str, value: Any, param: str) -> None:
    with pytest.raises(BadInputError) as caught:
        read_chat({"messages": [USER]} | {name: value})
    assert caught.value.param == param
    assert "\n" not in caught.value.message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(("role", "content", "type", "text", "embeds", "token_ids")),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(inputs=st.fixed_dictionaries({"messages": JSON}, optional={"resume": JSON, "stop": JSON}))
def test_nonsense_is_refused_and_never_anything_else(inputs: dict[str, Any]) -> None:
    try:
        asked = read_chat(inputs)
    except BadInputError as error:
        refused = error
    else:
        assert asked.messages
        return
    assert refused.param
