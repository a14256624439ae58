"""Requests to `/v1/messages`: what they may say, and the chat request that means the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from atoll.core.request_parameters import Fallbacks, Name, chat_parameters, parameters_at
from atoll.runtime.gateway.dialects.conversation import (
    ChatMessages,
    Part,
    function_tool,
    image_part,
    named_choice,
    text_part,
)
from atoll.runtime.gateway.dialects.dialect_reading import (
    is_writable,
    need,
    read,
    refuse_given,
    unsupported,
    write,
    wrong,
)

_HERE = "there is no such thing here"
_REFUSED = {
    "mcp_servers": (_HERE, "call MCP servers from the client, as tools"),
    "container": (_HERE, "leave it out"),
    "compaction": ("conversations are not shortened here", "send fewer messages"),
    "thread": ("nothing is stored here", "send all messages"),
    "fallbacks": (_HERE, "name other models in `models` or x-atoll-fallback"),
}
NESTED = {
    "tools": "tools",
    "response_format": "output_config.format.schema",
    "chat_template_kwargs": "chat_template_kwargs",
}
"""Fields of the chat request that hold what a client may nest, and what it calls them."""
_DROPPED = frozenset({"thinking", "redacted_thinking"})
"""Blocks that only the model they are of could read."""
_ERROR = "Error: "


class BlockSource(Struct):
    """Where a picture or a document is."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class MessageBlock(Struct):
    """A block of a message; the fields that its type has."""

    type: str
    text: str | None = None
    source: BlockSource | None = None
    title: str | None = None
    context: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[MessageBlock] | None = None
    is_error: bool | None = None


class MessageTurn(Struct):
    """A turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[MessageBlock]


class MessagesTool(Struct):
    """A tool; only those of the client are known here."""

    name: Name
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(Struct):
    """Whether tools are called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct):
    """Whether reasoning is shown."""

    type: str
    display: str | None = None

    @property
    def shown(self) -> bool:
        """Whether the client is to see it."""
        return self.type != "disabled" and self.display != "omitted"


class MessagesFormat(Struct):
    """The form that the answer must have."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct):
    """How the answer is to be."""

    effort: str | None = None
    format: MessagesFormat | None = None


class MessagesMetadata(Struct):
    """About the request."""

    user_id: str | None = None


class MessageInput(Struct, kw_only=True):
    """Input of the model: shared by answers and by counts of tokens."""

    model: Name
    messages: Annotated[list[MessageTurn], Meta(min_length=1)]
    system: str | list[MessageBlock] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: MessagesFormat | None = None
    # Nothing comes of these: they change no answer.
    cache_control: Any = None
    context_management: Any = None
    speed: str | None = None
    # Refused if they are given.
    mcp_servers: Any = None


_Input = TypeVar("_Input", bound=MessageInput)

if TYPE_CHECKING:
    MessagesParameters = MessageInput
else:
    MessagesParameters = parameters_at("messages", MessageInput)


class MessagesRequest(MessagesParameters, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages, beside its declared parameters."""

    stream: bool | None = None
    stop_sequences: Annotated[list[str], Meta(max_length=64)] | None = None
    metadata: MessagesMetadata | None = None
    # Nothing comes of these.
    service_tier: str | None = None
    inference_geo: str | None = None
    diagnostics: Any = None
    # Refused if they are given.
    container: Any = None
    compaction: Any = None
    thread: Any = None
    fallbacks: Any = None


class CountTokensRequest(MessageInput, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages/count_tokens."""

    models: Fallbacks = None


_DECODER = msgspec.json.Decoder(MessagesRequest)
_COUNT_DECODER = msgspec.json.Decoder(CountTokensRequest)


def read_messages(body: bytes) -> MessagesRequest:
    """Read and check a request; what is wrong, or not to be had here, is an ApiError."""
    return _refuse(read(_DECODER, body), _REFUSED)


def read_count(body: bytes) -> CountTokensRequest:
    """Read and check a request to count tokens; what is wrong, or not to be had here, is an ApiError."""
    return _refuse(read(_COUNT_DECODER, body), {"mcp_servers": _REFUSED["mcp_servers"]})


def _refuse(request: _Input, refused: dict[str, tuple[str, str]]) -> _Input:
    # An empty list asks for nothing.
    if request.mcp_servers == []:
        request.mcp_servers = None
    refuse_given(request, refused)
    return request


def chat_body(request: MessagesRequest) -> bytes:
    """Return the chat request that means the same; what chat cannot say is an ApiError."""
    body = input_fields(request) | chat_parameters(request, "messages")
    if request.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return write(body, NESTED)


def input_fields(request: MessageInput) -> dict[str, Any]:
    """Return the fields of a chat request that say what the model is told."""
    messages = ChatMessages()
    if request.system is not None:
        text = _system_text(request.system, "system")
        if text:
            messages.system(text)
    for number, turn in enumerate(request.messages):
        _add_turn(messages, turn, f"messages[{number}]")
    body: dict[str, Any] = {"model": request.model}
    if messages.ends_with_assistant:
        # The client began the answer itself.
        body |= {"add_generation_prompt": False, "continue_final_message": True}
    found = messages.read()
    if not found:
        raise wrong("messages", "there is nothing to answer in them")
    return body | {"messages": found} | _tools(request) | _format(request)


def _system_text(content: str | list[MessageBlock], place: str) -> str:
    if isinstance(content, str):
        return content
    parts = _parts(content, place)
    if any(part["type"] != "text" for part in parts):
        raise wrong(place, "instructions are text alone")
    return "\n\n".join(part["text"] for part in parts)


def _add_turn(messages: ChatMessages, turn: MessageTurn, place: str) -> None:
    messages.end_turn()
    place = f"{place}.content"
    if turn.role == "system":
        messages.system(_system_text(turn.content, place))
    elif isinstance(turn.content, str):
        if turn.role == "assistant":
            messages.assistant(turn.content)
        else:
            messages.user([text_part(turn.content)])
    elif turn.role == "assistant":
        _add_assistant(messages, turn.content, place)
    else:
        _add_user(messages, turn.content, place)


def _add_assistant(messages: ChatMessages, blocks: list[MessageBlock], place: str) -> None:
    for number, block in enumerate(blocks):
        here = f"{place}[{number}]"
        if block.type == "text":
            messages.assistant(need(block.text, f"{here}.text", empty=True))
        elif block.type == "tool_use":
            called = block.input or {}
            if not is_writable(called):
                raise wrong(f"{here}.input", "nested too deeply")
            arguments = msgspec.json.encode(called).decode()
            call_id, name = need(block.id, f"{here}.id"), need(block.name, f"{here}.name")
            messages.call(call_id, name, arguments)
        elif block.type not in _DROPPED:
            raise _unknown_block(block, here, "text, tool_use or thinking")


def _add_user(messages: ChatMessages, blocks: list[MessageBlock], place: str) -> None:
    """Add results of tools and what the user says, in order."""
    said: list[Part] = []
    for number, block in enumerate(blocks):
        here = f"{place}[{number}]"
        if block.type != "tool_result":
            said.append(_part(block, here))
            continue
        # What was said before a result comes before it in chat, too.
        messages.user(said)
        said = []
        call_id = need(block.tool_use_id, f"{here}.tool_use_id")
        content = block.content or ""
        parts = (
            [text_part(content)] if isinstance(content, str) else _parts(content, f"{here}.content")
        )
        if block.is_error:
            # Chat has no field for it; the model is told in words.
            parts = [text_part(_ERROR + _text_of(parts)), *_pictures_of(parts)]
        messages.result(call_id, parts)
    messages.user(said)


def _text_of(parts: list[Part]) -> str:
    return "\n".join(part["text"] for part in parts if part["type"] == "text")


def _pictures_of(parts: list[Part]) -> list[Part]:
    return [part for part in parts if part["type"] != "text"]


def _parts(blocks: list[MessageBlock], place: str) -> list[Part]:
    return [_part(block, f"{place}[{number}]") for number, block in enumerate(blocks)]


def _part(block: MessageBlock, place: str) -> Part:
    source = block.source
    if block.type == "text":
        return text_part(need(block.text, f"{place}.text", empty=True))
    if block.type == "image" and source is not None:
        if source.type == "base64":
            media_type = need(source.media_type, f"{place}.source.media_type")
            data = need(source.data, f"{place}.source.data")
            return image_part(f"data:{media_type};base64,{data}")
        if source.type == "url":
            return image_part(need(source.url, f"{place}.source.url"))
    if block.type == "document" and source is not None and source.type == "text":
        data = need(source.data, f"{place}.source.data")
        return text_part("\n".join(part for part in (block.title, block.context, data) if part))
    if block.type in ("image", "document"):
        raise unsupported(
            f"{place}.source",
            f"this kind of source ({'none' if source is None else source.type[:64]}) is not known here",
            "send pictures in base64 and documents as plain text",
        )
    raise _unknown_block(block, place, "text, image, tool_result or a document of plain text")


def _unknown_block(block: MessageBlock, place: str, known: str) -> Exception:
    return unsupported(f"{place}.type", f"{block.type[:64]!r} is not known here", f"send {known}")


def _tools(request: MessageInput) -> dict[str, Any]:
    tools = []
    for number, tool in enumerate(request.tools or ()):
        place = f"tools[{number}]"
        if tool.type not in (None, "custom"):
            raise unsupported(
                f"{place}.type",
                f"there is no {tool.type[:64]!r} here",
                "send tools that the client runs, with an input_schema",
            )
        if tool.input_schema is None:
            raise wrong(f"{place}.input_schema", "this is needed here")
        tools.append(function_tool(tool.name, tool.description, tool.input_schema, tool.strict))
    choice = request.tool_choice
    # Without tools "auto" and "none" mean the same, and are left out.
    if not tools:
        if choice is not None and choice.type in ("any", "tool"):
            raise wrong("tool_choice", "there are no `tools` to choose from")
        return {}
    body: dict[str, Any] = {"tools": tools}
    if choice is None:
        return body
    if choice.type == "tool":
        name = need(choice.name, "tool_choice.name")
        if all(tool["function"]["name"] != name for tool in tools):
            raise wrong("tool_choice.name", f"there is no tool {name[:64]!r} in `tools`")
        body["tool_choice"] = named_choice(name)
    else:
        body["tool_choice"] = "required" if choice.type == "any" else choice.type
    if choice.disable_parallel_tool_use is not None:
        body["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return body


def _format(request: MessageInput) -> dict[str, Any]:
    config = request.output_config
    wanted = request.output_format if config is None or config.format is None else config.format
    if wanted is None:
        return {}
    schema = {"name": "answer", "schema": wanted.schema, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}
