"""Requests to `/v1/responses`: what they may say, and the chat request that means the same."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from atoll.core.request_parameters import Name, Positive, ResponsesParameters, chat_parameters
from atoll.runtime.gateway.dialects.conversation import (
    ChatMessages,
    Part,
    function_tool,
    image_part,
    named_choice,
    text_part,
)
from atoll.runtime.gateway.dialects.dialect_reading import (
    need,
    read,
    refuse_given,
    unsupported,
    write,
    wrong,
)
from atoll.runtime.gateway.dialects.kept_responses import OwnedResponses
from atoll.runtime.openai import InputAudio

_STATELESS = "nothing is stored here"
_ALL_ITEMS = "send all items of the conversation in `input`"
_REFUSED = {
    "conversation": (_STATELESS, _ALL_ITEMS),
    "prompt": (_STATELESS, "send the prompt itself in `instructions` and `input`"),
    "background": (_STATELESS, "send the request without it and wait, or stream"),
    "context_management": ("conversations are not shortened here", "send fewer items"),
    "moderation": ("there is no moderation here", "leave it out"),
    "top_logprobs": ("log probabilities are not given here", "ask /v1/chat/completions"),
}
_NESTED = {
    "tools": "tools",
    "tool_choice": "tool_choice",
    "response_format": "text.format.schema",
    "chat_template_kwargs": "chat_template_kwargs",
}
_LOGPROBS = "message.output_text.logprobs"

Metadata = Annotated[
    dict[
        Annotated[str, Meta(max_length=64)],
        Annotated[str, Meta(max_length=512)],
    ],
    Meta(max_length=16),
]


class InputPart(Struct):
    """A piece of an item."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: str | None = None
    input_audio: InputAudio | None = None


class InputItem(Struct):
    """An item of a conversation; the fields that its type has."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None


class ResponsesTool(Struct):
    """A tool; only functions are known here."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenTool(Struct):
    """A tool that must be called, or the only ones that may be."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: list[dict[str, Any]] | None = None


class TextFormat(Struct):
    """The form that text must have."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextSettings(Struct):
    """How text is to be."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningSettings(Struct):
    """How much is thought before the answer."""

    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(ResponsesParameters, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/responses, beside its declared parameters."""

    model: Name
    input: str | Annotated[list[InputItem], Meta(min_length=1)]
    instructions: str | None = None
    stream: bool | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    max_output_tokens: Positive | None = None
    reasoning: ReasoningSettings | None = None
    metadata: Metadata | None = None
    include: list[str] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    # Nothing comes of these: they change no answer.
    truncation: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None
    stream_options: dict[str, Any] | None = None
    max_tool_calls: int | None = None
    image: Any = None
    client_metadata: Any = None
    # Refused if they are given.
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None
    context_management: Any = None
    moderation: Any = None
    top_logprobs: int | None = None


_DECODER = msgspec.json.Decoder(ResponsesRequest)
_ITEMS = msgspec.json.Decoder(list[InputItem])


def read_responses(body: bytes, responses: OwnedResponses | None = None) -> ResponsesRequest:
    """Read and check a request; what is wrong, or not to be had here, is an ApiError.

    Items of the response that it goes on from (`previous_response_id`, of `responses`) come before its own.
    """
    request = read(_DECODER, body)
    if request.previous_response_id is not None:
        if responses is None:
            raise unsupported("previous_response_id", _STATELESS, _ALL_ITEMS)
        earlier = _ITEMS.decode(responses.items(request.previous_response_id))
        request.input = [*earlier, *list_items(request)]
    if request.top_logprobs == 0:
        request.top_logprobs = None
    refuse_given(request, _REFUSED)
    if _LOGPROBS in (request.include or ()):
        raise unsupported("include", f"{_LOGPROBS} is not given here", "ask /v1/chat/completions")
    return request


def list_items(request: ResponsesRequest) -> list[InputItem]:
    """Return what a request says as items."""
    if isinstance(request.input, str):
        return [InputItem(role="user", content=request.input)]
    return request.input


def chat_body(request: ResponsesRequest) -> bytes:
    """Return the chat request that means the same; what chat cannot say is an ApiError."""
    body: dict[str, Any] = {"model": request.model, "messages": _messages(request)}
    if request.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    body |= _tools(request) | _format(request.text) | chat_parameters(request, "responses")
    return write(body, _NESTED)


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    messages = ChatMessages()
    if request.instructions:
        messages.system(request.instructions)
    if isinstance(request.input, str):
        messages.user([text_part(request.input)])
    else:
        for number, item in enumerate(request.input):
            _add_item(messages, item, f"input[{number}]")
    found = messages.read()
    if not found:
        raise wrong("input", "there is nothing to answer in it")
    return found


def _add_item(messages: ChatMessages, item: InputItem, place: str) -> None:
    if item.type == "message":
        _add_message(messages, item, place)
    elif item.type == "function_call":
        name, call_id = need(item.name, f"{place}.name"), need(item.call_id, f"{place}.call_id")
        messages.call(call_id, name, item.arguments or "{}")
    elif item.type == "function_call_output":
        call_id = need(item.call_id, f"{place}.call_id")
        if item.output is None:
            raise wrong(f"{place}.output", "a function_call_output needs one")
        messages.result(call_id, _parts(item.output, f"{place}.output"))
    elif item.type != "reasoning":
        # What was thought before is not told to the model again.
        raise unsupported(
            f"{place}.type",
            f"items of type {item.type[:64]!r} are not known here",
            "send message, function_call, function_call_output or reasoning",
        )


def _add_message(messages: ChatMessages, item: InputItem, place: str) -> None:
    if item.role is None:
        raise wrong(f"{place}.role", "a message needs one: user, assistant, system or developer")
    if item.content is None:
        raise wrong(f"{place}.content", "a message needs one")
    parts = _parts(item.content, f"{place}.content")
    if item.role == "user":
        messages.user(parts)
        return
    other = next((part["type"] for part in parts if part["type"] != "text"), None)
    if other is not None:
        raise wrong(f"{place}.content", f"a message of the {item.role} has text alone, no {other}")
    if item.role == "assistant":
        messages.assistant("".join(part["text"] for part in parts))
    else:
        messages.system("\n".join(part["text"] for part in parts))


def _parts(content: str | list[InputPart], place: str) -> list[Part]:
    if isinstance(content, str):
        return [text_part(content)]
    return [_part(part, f"{place}[{number}]") for number, part in enumerate(content)]


def _part(part: InputPart, place: str) -> Part:
    if part.type in ("input_text", "output_text", "text"):
        return text_part(need(part.text, f"{place}.text", empty=True))
    if part.type == "refusal":
        return text_part(need(part.refusal, f"{place}.refusal", empty=True))
    if part.type == "input_image":
        if part.image_url is None:
            raise unsupported(f"{place}.file_id", "files are not kept here", "send `image_url`")
        return image_part(part.image_url, part.detail)
    if part.type == "input_audio" and part.input_audio is not None:
        return {"type": "input_audio", "input_audio": part.input_audio}
    raise unsupported(
        f"{place}.type",
        f"{part.type[:64]!r} is not known here",
        "send input_text or input_image (a picture as a data: URL)",
    )


def _tools(request: ResponsesRequest) -> dict[str, Any]:
    tools: dict[str, dict[str, Any]] = {}
    for number, tool in enumerate(request.tools or ()):
        place = f"tools[{number}]"
        if tool.type != "function":
            raise unsupported(
                f"{place}.type", f"there is no {tool.type[:64]!r} here", "send functions only"
            )
        name = need(tool.name, f"{place}.name")
        tools[name] = function_tool(name, tool.description, tool.parameters, tool.strict)
    choice = request.tool_choice
    mode: str | dict[str, Any] | None = choice if isinstance(choice, str) else None
    if isinstance(choice, ChosenTool):
        names = _chosen_names(choice)
        missing = next((name for name in names if name not in tools), None)
        if missing is not None:
            raise wrong("tool_choice", f"there is no function {missing[:64]!r} in `tools`")
        if choice.type == "function":
            mode = named_choice(names[0])
        else:
            mode = choice.mode
            tools = {name: tool for name, tool in tools.items() if name in names}
    if not tools:
        if mode not in (None, "auto", "none"):
            raise wrong("tool_choice", "there are no `tools` to choose from")
        return {}
    body: dict[str, Any] = {"tools": list(tools.values())}
    if mode is not None:
        body["tool_choice"] = mode
    if request.parallel_tool_calls is not None:
        body["parallel_tool_calls"] = request.parallel_tool_calls
    return body


def _chosen_names(choice: ChosenTool) -> list[str]:
    """Return the functions that a choice of tools names."""
    if choice.type == "function":
        return [need(choice.name, "tool_choice.name")]
    if choice.type != "allowed_tools":
        raise unsupported(
            "tool_choice.type",
            f"there is no {choice.type[:64]!r} here",
            "send auto, required, none, a function or allowed_tools",
        )
    names = [tool.get("name") for tool in choice.tools or ()]
    if not names or any(not isinstance(name, str) for name in names):
        raise wrong("tool_choice.tools", "names of functions are needed here")
    return [name for name in names if isinstance(name, str)]


def _format(text: TextSettings | None) -> dict[str, Any]:
    wanted = None if text is None else text.format
    if wanted is None or wanted.type == "text":
        return {}
    if wanted.type == "json_object":
        return {"response_format": {"type": "json_object"}}
    if wanted.schema is None:
        raise wrong("text.format.schema", "json_schema needs one")
    schema: dict[str, Any] = {"name": wanted.name or "answer", "schema": wanted.schema}
    if wanted.description is not None:
        schema["description"] = wanted.description
    if wanted.strict is not None:
        schema["strict"] = wanted.strict
    return {"response_format": {"type": "json_schema", "json_schema": schema}}
