"""Requests of dialects: the chat request that means the same, or the field that cannot be meant."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.runtime.gateway.content import check_content
from atoll.runtime.gateway.dialects import DIALECTS
from atoll.runtime.media.media_limits import MediaLimits
from atoll.runtime.openai import CHAT, ApiError, ChatRequest, read_request

Json = dict[str, Any]
PIXEL = "iVBORw0KGgo="
SCHEMA: Json = {"type": "object", "properties": {"what": {"type": "string"}}}
USER: Json = {"role": "user", "content": "hi"}
CALLED: Json = {
    "id": "c1",
    "type": "function",
    "function": {"name": "look", "arguments": '{"what":"sea"}'},
}


def chat_of(path: str, body: object) -> Json:
    """The chat request; it is one that the gateway lets in."""
    sent = DIALECTS[path.encode()].translate(json.dumps(body).encode(), "5eed").body
    parsed = read_request(CHAT, sent)
    assert isinstance(parsed, ChatRequest)
    check_content(parsed, MediaLimits(), 100)
    found: Json = json.loads(sent)
    return found


def responses(**more: object) -> Json:
    return chat_of("/v1/responses", {"model": "m", "input": "hi"} | more)


def messages(**more: object) -> Json:
    return chat_of("/v1/messages", {"model": "m", "max_tokens": 9, "messages": [USER]} | more)


def test_the_min_of_each() -> None:
    assert responses() == {"model": "m", "messages": [USER]}
    assert messages() == {"model": "m", "messages": [USER], "max_tokens": 9}


def test_settings_of_responses() -> None:
    sent = responses(
        stream=True,
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=5,
        reasoning={"effort": "low", "summary": "auto"},
        user="u",
        seed=3,
        stop=["x"],
        metadata={"a": "b"},
        store=True,
        truncation="auto",
        include=["reasoning.encrypted_content"],
        parallel_tool_calls=False,
        previous_response_id=None,
        background=False,
        top_logprobs=0,
        models=["other"],
    )
    assert sent == {
        "model": "m",
        "messages": [USER],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 5,
        "reasoning_effort": "low",
        "user": "u",
        "seed": 3,
        "stop": ["x"],
        "models": ["other"],
    }


def test_settings_of_messages() -> None:
    sent = messages(
        stream=True,
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        stop_sequences=["x"],
        metadata={"user_id": "u"},
        thinking={"type": "enabled", "budget_tokens": 1024},
        service_tier="auto",
        context_management={"edits": []},
        mcp_servers=[],
        output_config={"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}},
        seed=3,
    )
    assert sent == {
        "model": "m",
        "messages": [USER],
        "max_tokens": 9,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "stop": ["x"],
        "user": "u",
        "seed": 3,
        "reasoning_effort": "high",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
        },
    }


def test_items_of_a_conversation() -> None:
    sent = responses(
        instructions="Be brief.",
        input=[
            {"role": "developer", "content": "And kind."},
            {
                "type": "message",
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "What is this?"},
                    {
                        "type": "input_image",
                        "image_url": f"data:image/png;base64,{PIXEL}",
                        "detail": "low",
                    },
                ],
            },
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
            {
                "type": "message",
                "role": "assistant",
                "id": "msg_1",
                "status": "completed",
                "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
            },
            {
                "type": "function_call",
                "id": "fc_1",
                "call_id": "c1",
                "name": "look",
                "arguments": '{"what":"sea"}',
            },
            {"type": "function_call", "call_id": "c2", "name": "go", "arguments": ""},
            {"type": "function_call_output", "call_id": "c1", "output": "blue"},
            {
                "type": "function_call_output",
                "call_id": "c2",
                "output": [
                    {"type": "input_text", "text": "there"},
                    {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}"},
                ],
            },
            {"role": "user", "content": "Thanks"},
            {"role": "system", "content": "Stop soon."},
        ],
    )
    picture = {"url": f"data:image/png;base64,{PIXEL}"}
    assert sent["messages"] == [
        {"role": "system", "content": "Be brief.\n\nAnd kind."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "What is this?"},
                {"type": "image_url", "image_url": picture | {"detail": "low"}},
            ],
        },
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [
                CALLED,
                {"id": "c2", "type": "function", "function": {"name": "go", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "blue"},
        {"role": "tool", "tool_call_id": "c2", "content": "there"},
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": picture},
                {"type": "text", "text": "Thanks"},
            ],
        },
        {"role": "system", "content": "Stop soon."},
    ]


def test_turns_of_a_conversation() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
    sent = messages(
        system=[
            {"type": "text", "text": "Be brief.", **cached},
            {"type": "text", "text": "And kind."},
        ],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "What is this?", **cached}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "c1", "name": "look", "input": {"what": "sea"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c1",
                        "content": [
                            {"type": "text", "text": "blue"},
                            {"type": "image", "source": source},
                        ],
                    },
                    {"type": "text", "text": "And?"},
                    {
                        "type": "document",
                        "title": "T",
                        "source": {"type": "text", "media_type": "text/plain", "data": "D"},
                    },
                ],
            },
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c2", "name": "go", "input": {}}],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c2", "content": "no", "is_error": True},
                    {"type": "tool_result", "tool_use_id": "c3"},
                ],
            },
        ],
    )
    assert sent["messages"] == [
        {"role": "system", "content": "Be brief.\n\nAnd kind."},
        {"role": "user", "content": "What is this?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [CALLED]},
        {"role": "tool", "tool_call_id": "c1", "content": "blue"},
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}},
                {"type": "text", "text": "And?"},
                {"type": "text", "text": "T\nD"},
            ],
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c2", "type": "function", "function": {"name": "go", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "c2", "content": "Error: no"},
        {"role": "tool", "tool_call_id": "c3", "content": ""},
    ]
    assert "continue_final_message" not in sent


def test_what_coding_agents_send_is_taken() -> None:
    """Fields as Claude Code and Codex send them, in the shapes they have there."""
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    sent = messages(
        model="claude-sonnet-4-5",
        max_tokens=32000,
        system=[{"type": "text", "text": "You are an agent.", **cached}],
        messages=[{"role": "user", "content": [{"type": "text", "text": "hi", **cached}]}],
        tools=[
            {
                "name": "Bash",
                "description": "Runs a command",
                "input_schema": SCHEMA,
                "eager_input_streaming": True,
                **cached,
            }
        ],
        metadata={"user_id": "user_1_account__session_2"},
        thinking={"type": "adaptive", "display": "summarized"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "medium"},
        temperature=1,
        stream=True,
    )
    assert [turn["role"] for turn in sent["messages"]] == ["system", "user"]
    assert sent["tools"][0]["function"]["name"] == "Bash"
    sent = responses(
        instructions="You are an agent.",
        input=[
            {
                "type": "message",
                "role": "developer",
                "content": [{"type": "input_text", "text": "x"}],
            },
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        ],
        tools=[TOOL],
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning={"effort": "medium", "summary": "auto", "context": "all_turns"},
        store=False,
        stream=True,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="0199",
        text={"verbosity": "low"},
        client_metadata={"x": "y"},
    )
    assert [turn["role"] for turn in sent["messages"]] == ["system", "user"]


def test_an_answer_that_the_client_began_goes_on() -> None:
    sent = messages(messages=[USER, {"role": "assistant", "content": "The best is ("}])
    assert sent["messages"][-1] == {"role": "assistant", "content": "The best is ("}
    assert (sent["continue_final_message"], sent["add_generation_prompt"]) == (True, False)


TOOL = {
    "type": "function",
    "name": "look",
    "description": "d",
    "parameters": SCHEMA,
    "strict": True,
}
OTHER = {"type": "function", "name": "go", "parameters": None, "strict": None}
FUNCTION = {"name": "look", "description": "d", "parameters": SCHEMA, "strict": True}


@pytest.mark.parametrize(
    ("choice", "names", "sent_choice"),
    [
        (None, ["look", "go"], None),
        ("auto", ["look", "go"], "auto"),
        ("required", ["look", "go"], "required"),
        ("none", ["look", "go"], "none"),
        (
            {"type": "function", "name": "go"},
            ["look", "go"],
            {"type": "function", "function": {"name": "go"}},
        ),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "go"}],
            },
            ["go"],
            "required",
        ),
    ],
)
def test_tools_of_responses(choice: object, names: list[str], sent_choice: object) -> None:
    sent = responses(tools=[TOOL, OTHER], tool_choice=choice, parallel_tool_calls=False)
    assert [tool["function"]["name"] for tool in sent["tools"]] == names
    assert sent["tools"][-1] == {"type": "function", "function": {"name": "go"}}
    if "look" in names:
        assert sent["tools"][0] == {"type": "function", "function": FUNCTION}
    assert sent.get("tool_choice") == sent_choice
    assert sent["parallel_tool_calls"] is False


@pytest.mark.parametrize(
    ("choice", "sent_choice", "parallel"),
    [
        (None, None, None),
        ({"type": "auto"}, "auto", None),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", None),
        (
            {"type": "tool", "name": "look"},
            {"type": "function", "function": {"name": "look"}},
            None,
        ),
    ],
)
def test_tools_of_messages(choice: object, sent_choice: object, parallel: bool | None) -> None:
    tool = {"name": "look", "description": "d", "input_schema": SCHEMA, "strict": True}
    sent = messages(tools=[tool | {"type": "custom", "cache_control": {}}], tool_choice=choice)
    assert sent["tools"] == [{"type": "function", "function": FUNCTION}]
    assert sent.get("tool_choice") == sent_choice
    assert sent.get("parallel_tool_calls") == parallel


def test_a_choice_without_tools_is_none() -> None:
    assert "tool_choice" not in responses(tool_choice="auto", tools=[])
    assert "tool_choice" not in messages(tool_choice={"type": "none"})


@pytest.mark.parametrize(
    ("text", "sent_format"),
    [
        ({"format": {"type": "text"}, "verbosity": "low"}, None),
        ({"format": {"type": "json_object"}}, {"type": "json_object"}),
        (
            {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}},
            {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
            },
        ),
    ],
)
def test_forms_of_text(text: object, sent_format: object) -> None:
    assert responses(text=text).get("response_format") == sent_format


def block(**more: object) -> Json:
    return {"messages": [{"role": "user", "content": [more]}]}


def item(**more: object) -> Json:
    return {"input": [more]}


BAD_RESPONSES: list[tuple[Json, str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"background": True}, "background"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"context_management": [{"type": "compaction"}]}, "context_management"),
    ({"moderation": {"model": "x"}}, "moderation"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"include": ["message.output_text.logprobs"]}, "include"),
    ({"surprise": 1}, "surprise"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice.tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
    ({"temperature": 3}, "temperature"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"metadata": {"k" * 65: "v"}}, "metadata"),
    ({"metadata": {"k": "v" * 513}}, "metadata[...]"),
    ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
    ({"input": []}, "input"),
    (item(type="reasoning"), "input"),
    (item(type="item_reference", id="x"), "input[0].type"),
    (item(role="user"), "input[0].content"),
    (item(content="x"), "input[0].role"),
    (
        item(role="user", content=[{"type": "input_file", "file_id": "f"}]),
        "input[0].content[0].type",
    ),
    (
        item(role="user", content=[{"type": "input_image", "file_id": "f"}]),
        "input[0].content[0].file_id",
    ),
    (item(role="user", content=[{"type": "input_text"}]), "input[0].content[0].text"),
    (
        item(role="assistant", content=[{"type": "input_image", "image_url": "data:,"}]),
        "input[0].content",
    ),
    (item(type="function_call", name="n"), "input[0].call_id"),
    (item(type="function_call_output", call_id="c"), "input[0].output"),
]
BAD_MESSAGES: list[tuple[Json, str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"container": "x"}, "container"),
    ({"thread": {"id": "x"}}, "thread"),
    ({"surprise": 1}, "surprise"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": []}]}, "messages"),
    ({"system": [{"type": "image", "source": {"type": "url", "url": "x"}}]}, "system"),
    ({"tools": [{"name": "web_search", "type": "web_search_20250305"}]}, "tools[0].type"),
    ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"stop_sequences": ["x"] * 65}, "stop_sequences"),
    (block(type="search_result"), "messages[0].content[0].type"),
    (block(type="server_tool_use"), "messages[0].content[0].type"),
    (block(type="image"), "messages[0].content[0].source"),
    (
        block(type="document", source={"type": "base64", "media_type": "application/pdf"}),
        "messages[0].content[0].source",
    ),
    (block(type="tool_result"), "messages[0].content[0].tool_use_id"),
    (
        {"messages": [USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "x"}]}]},
        "messages[1].content[0].name",
    ),
]


@pytest.mark.parametrize(("more", "param"), BAD_RESPONSES, ids=[p for _, p in BAD_RESPONSES])
def test_what_responses_cannot_be_is_named(more: Json, param: str) -> None:
    with pytest.raises(ApiError) as refused:
        responses(**more)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert param.partition("[...]")[0] in refused.value.message


@pytest.mark.parametrize(("more", "param"), BAD_MESSAGES, ids=[p for _, p in BAD_MESSAGES])
def test_what_messages_cannot_be_is_named(more: Json, param: str) -> None:
    with pytest.raises(ApiError) as refused:
        messages(**more)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert param.partition("[...]")[0] in refused.value.message


def test_a_hint_says_how_to_go_without_a_memory() -> None:
    with pytest.raises(ApiError, match="send all items") as refused:
        responses(previous_response_id="resp_1")
    assert refused.value.code == "unsupported_parameter"


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
@given(data=st.data())
def test_whatever_is_sent_is_chat_or_a_400(path: str, data: st.DataObject) -> None:
    """Any value in any field: what is let in is a chat request that the gateway can read."""
    dialect = DIALECTS[path.encode()]
    good: Json = (
        {"model": "m", "input": [USER], "tools": [TOOL]}
        if path == "/v1/responses"
        else {"model": "m", "max_tokens": 1, "messages": [USER], "tools": []}
    )
    name = data.draw(st.sampled_from(sorted(dialect.request.__struct_fields__)))
    good[name] = data.draw(ANY_JSON)
    status = 200
    try:
        translated = dialect.translate(json.dumps(good).encode(), "5eed")
        read_request(CHAT, translated.body)
    except ApiError as error:
        status = error.status
    assert status in (200, 400)


DEEP: dict[str, Json] = {
    "tools": {"tools": [{"name": "n", "input_schema": "DEEP"}]},
    "form": {"output_config": {"format": {"type": "json_schema", "schema": "DEEP"}}},
    "extra": {"chat_template_kwargs": "DEEP"},
    "call": {
        "messages": [
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c", "name": "n", "input": "DEEP"}],
            }
        ]
    },
    "responses tools": {"tools": [TOOL | {"parameters": "DEEP"}]},
    "responses form": {"text": {"format": {"type": "json_schema", "schema": "DEEP"}}},
    "responses extra": {"chat_template_kwargs": "DEEP"},
}


def ask_deep(case: str, levels: int) -> str:
    """Ask with something nested; return what came of it."""
    path, body = "/v1/messages", {"model": "m", "max_tokens": 1, "messages": [USER]}
    if case.startswith("responses"):
        path, body = "/v1/responses", {"model": "m", "input": "hi"}
    nested = '{"a":' * levels + "1" + "}" * levels
    raw = json.dumps(body | DEEP[case]).replace('"DEEP"', nested).encode()
    try:
        translated = DIALECTS[path.encode()].translate(raw, "5eed")
    except ApiError as error:
        return f"{error.status} {error.code}"
    stream = translated.stream()
    assert stream is not None
    assert further(30, lambda: stream.feed(b"data: [DONE]\n\n"))
    return "taken"


def further(frames: int, act: Callable[[], bytes]) -> bytes:
    """Do something so many calls deeper than here."""
    return act() if frames == 0 else further(frames - 1, act)


@pytest.mark.parametrize("case", DEEP)
def test_what_is_nested_too_deeply_is_refused_before_it_is_answered(case: str) -> None:
    assert ask_deep(case, 60) == "taken"
    found = {ask_deep(case, levels) for levels in range(600, 1000, 7)}
    assert found <= {"taken", "400 invalid_json", "400 None"}
    assert len(found) > 1
