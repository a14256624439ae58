"""Tools on an instance over real nodes, with OpenAI's own client: a model of chance makes valid calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.runtime.serving.test_instance import chunks, post
from tests.served_fleet import Running

pytest.importorskip("openai")
import openai

pytestmark = pytest.mark.engine
Json = dict[str, Any]
CHAT = "/v1/chat/completions"
TOOLS: list[Json] = [
    {
        "type": "function",
        "function": {
            "name": "book",
            "description": "Book seats.",
            "parameters": {
                "type": "object",
                "properties": {
                    "day": {"enum": ["Monday", "Tuesday"]},
                    "seats": {"type": "integer", "minimum": 1, "maximum": 9},
                },
                "required": ["day", "seats"],
            },
        },
    },
    {"type": "function", "function": {"name": "ping", "strict": True}},
]
ASKED: Json = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Two seats?"}],
    "tools": TOOLS,
    "tool_choice": {"type": "function", "function": {"name": "book"}},
    "max_tokens": 200,
}
SAMPLINGS: list[Json] = [{"temperature": 0}, {"temperature": 1, "seed": 5}]


def check_arguments(written: str) -> None:
    arguments = json.loads(written)
    assert arguments.keys() == {"day", "seats"}
    assert arguments["day"] in ("Monday", "Tuesday")
    assert 1 <= arguments["seats"] <= 9


def test_a_conversation_with_calls(running: Running) -> None:
    url = f"{running.instance_url}/v1"
    with openai.OpenAI(base_url=url, api_key="x", max_retries=0) as sdk:
        whole = sdk.chat.completions.create(**ASKED, temperature=0)
        (choice,) = whole.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        assert choice.message.tool_calls is not None
        (call,) = choice.message.tool_calls
        assert call.type == "function"
        assert call.function.name == "book"
        check_arguments(call.function.arguments)
        with sdk.chat.completions.stream(**ASKED, temperature=0) as stream:
            kinds = [event.type for event in stream]
            last = stream.get_final_completion().choices[0]
        assert "tool_calls.function.arguments.done" in kinds
        assert last.finish_reason == "tool_calls"
        assert last.message.tool_calls is not None
        assert last.message.tool_calls[0].id == call.id
        assert last.message.tool_calls[0].function.arguments == call.function.arguments
        result = {"role": "tool", "tool_call_id": call.id, "content": "booked"}
        after = [*ASKED["messages"], choice.message.model_dump(), result]
        more: Json = ASKED | {"messages": after, "tool_choice": "none", "max_tokens": 4}
        told = sdk.chat.completions.create(**more, temperature=0)
        assert told.choices[0].finish_reason in ("length", "stop")
        assert told.choices[0].message.tool_calls is None
        with pytest.raises(openai.BadRequestError) as refused:
            sdk.chat.completions.create(**ASKED | {"tool_choice": "sometimes"})
        assert refused.value.param == "tool_choice"


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_resumed_anywhere_it_makes_the_same_calls(running: Running, sampling: Json) -> None:
    body = ASKED | {"tool_choice": "required", "stream": True, "max_tokens": 80} | sampling
    expected = chunks(post(running.instance_url, body, CHAT)[1])
    ids = [t for c in expected for choice in c["choices"] for t in choice.get("token_ids", ())]
    deltas = [c["choices"][0]["delta"].get("tool_calls", ()) for c in expected]

    def pieces(found: list[Any]) -> Json:
        calls: Json = {}
        for piece in (piece for delta in found for piece in delta):
            name, written, id_ = calls.get(piece["index"], ("", "", ""))
            function = piece["function"]
            calls[piece["index"]] = (
                name + function.get("name", ""),
                written + function["arguments"],
                id_ + piece.get("id", ""),
            )
        return calls

    for cut in (1, 20, len(expected) - 1):
        known = [t for c in expected[:cut] for t in c["choices"][0].get("token_ids", ())]
        shown = [{"name": n, "arguments": a} for n, a, _ in pieces(deltas[:cut]).values()]
        state = {"tokens": len(known), "token_ids": known, "calls": shown}
        again = chunks(post(running.instance_url, body | {"atoll": {"resume": state}}, CHAT)[1])
        more = [c["choices"][0]["delta"].get("tool_calls", ()) for c in again]
        assert pieces(deltas[:cut] + more) == pieces(deltas)
        rest = [t for c in again for choice in c["choices"] for t in choice.get("token_ids", ())]
        assert known + rest == ids


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_form_resumed_anywhere_is_the_same(running: Running, sampling: Json) -> None:
    schema = TOOLS[0]["function"]["parameters"] | {"additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body: Json = {"model": "tiny", "prompt": "A", "response_format": form, "max_tokens": 100}
    expected = json.loads(post(running.instance_url, body | sampling)[1])["choices"][0]
    check_arguments(expected["text"])
    for cut in (1, 9, len(expected["token_ids"]) - 1):
        text, known = expected["text"][:cut], expected["token_ids"][:cut]
        state = {"text": text, "tokens": cut, "token_ids": known}
        again = body | sampling | {"atoll": {"resume": state}}
        status, answer = post(running.instance_url, again)
        assert status == 200, answer
        assert text + json.loads(answer)["choices"][0]["text"] == expected["text"]
