"""The messages of a conversation with calls in it, as chat templates want them.

OpenAI's clients send arguments as texts, `content: null` beside calls, and ids between calls and results;
templates want objects, texts, and names. For templates that know nothing of tools, calls and results become
texts (`formats.GenericFormat`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from atoll.runtime.instance.tools.call_formats import CallFormat, GenericFormat, MistralFormat
from atoll.runtime.instance.tools.functions import ToolUse, too_deep
from atoll.runtime.openai import ApiError

Json = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_MAX_ID_CHARS = 256


def read_messages(messages: Sequence[Json], *, developer: bool = False) -> list[Json]:
    """Return messages with arguments as objects and a name with every result; wrong ones are an ApiError.

    Without `developer`, messages of a developer are those of the system: what most templates know.
    """
    names: dict[str, str] = {}
    read = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        message = _without_functions(message, where, names)
        role = message.get("role")
        if role not in ROLES:
            raise ApiError(400, f"roles are {', '.join(ROLES)}", param=f"{where}.role")
        if role == "developer" and not developer:
            message = message | {"role": "system"}
        if role == "assistant":
            message = _read_assistant(message, where, names)
        elif role == "tool":
            message = _read_result(message, where, names)
        if message.get("content") is None:
            raise ApiError(400, "a message has a content", param=f"{where}.content")
        read.append(message)
    return read


def _without_functions(message: Json, where: str, names: dict[str, str]) -> Json:
    """Return a message in today's words: calls and results had no ids before there were tools."""
    call = message.get("function_call")
    if message.get("role") == "assistant" and call is not None:
        kept = {key: value for key, value in message.items() if key != "function_call"}
        return kept | {"tool_calls": [{"id": f"call_{len(names)}", "function": call}]}
    if message.get("role") != "function":
        return message
    name = message.get("name")
    last = next((id_ for id_ in reversed(names) if names[id_] == name), None)
    if last is None:
        message_ = "a result has the name of a function that was called before"
        raise ApiError(400, message_, param=f"{where}.name")
    return message | {"role": "tool", "tool_call_id": last}


def has_calls(messages: Sequence[Json]) -> bool:
    """Return whether there are calls or results in a conversation."""
    return any(message["role"] == "tool" or message.get("tool_calls") for message in messages)


def _read_assistant(message: Json, where: str, names: dict[str, str]) -> Json:
    listed = message.get("tool_calls")
    if listed is not None and not isinstance(listed, list):
        raise ApiError(400, "tool_calls is a list", param=f"{where}.tool_calls")
    calls = [
        _read_call(call, f"{where}.tool_calls[{i}]", names) for i, call in enumerate(listed or ())
    ]
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    if message.get("content") is None:
        kept["content"] = ""
    return kept | {"tool_calls": calls} if calls else kept


def _read_call(call: object, where: str, names: dict[str, str]) -> Json:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise ApiError(400, "a call has a function", param=f"{where}.function")
    id_, name = call.get("id"), function.get("name")
    if not isinstance(id_, str) or not 0 < len(id_) <= _MAX_ID_CHARS:
        raise ApiError(400, "a call has an id", param=f"{where}.id")
    if not isinstance(name, str) or not name:
        raise ApiError(400, "a call has a name", param=f"{where}.function.name")
    names[id_] = name
    arguments = _read_arguments(function.get("arguments"), f"{where}.function.arguments")
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def _read_arguments(arguments: object, where: str) -> Json:
    try:
        read = json.loads(arguments or "{}") if isinstance(arguments, str | None) else arguments
    except (ValueError, RecursionError):
        read = None
    if not isinstance(read, dict) or too_deep(read):
        raise ApiError(400, "arguments are a JSON object, as a text", param=where)
    return read


def _read_result(message: Json, where: str, names: dict[str, str]) -> Json:
    id_ = message.get("tool_call_id")
    if not isinstance(id_, str) or id_ not in names:
        raise ApiError(
            400,
            "tool_call_id is the id of a call in a message before",
            param=f"{where}.tool_call_id",
        )
    return message | {"name": names[id_]}


def adapt_messages(messages: Sequence[Json], form: CallFormat, use: ToolUse | None) -> list[Json]:
    """Return messages as the template of a model takes them, calls and results included."""
    if isinstance(form, GenericFormat):
        return _as_texts(messages, form, use)
    if isinstance(form, MistralFormat):
        return [_with_short_ids(message) for message in messages]
    return list(messages)


def _as_texts(messages: Sequence[Json], form: GenericFormat, use: ToolUse | None) -> list[Json]:
    told: list[Json] = []
    for message in messages:
        if message.get("tool_calls"):
            calls = [
                (call["function"]["name"], json.dumps(call["function"]["arguments"]))
                for call in message["tool_calls"]
            ]
            kept = {key: value for key, value in message.items() if key != "tool_calls"}
            told.append(kept | {"content": _join(message["content"], form.write(calls))})
        elif message["role"] == "tool":
            begin, end = "<tool_response>\n", "\n</tool_response>"
            content = _join(_join(begin, message["content"], ""), end, "")
            if told and told[-1].get("_results"):
                # Results of one turn are one message: many templates want turns to alternate.
                told[-1]["content"] = _join(told[-1]["content"], content)
            else:
                told.append({"role": "user", "content": content, "_results": True})
        else:
            told.append(message)
    plain = [{key: part for key, part in m.items() if key != "_results"} for m in told]
    return plain if use is None else describe_tools(plain, form.describe(use))


def describe_tools(messages: Sequence[Json], description: str, role: str = "system") -> list[Json]:
    """Return messages that begin with what the model is told of the tools, in the first of a role."""
    rest = list(messages)
    for number, message in enumerate(rest):
        if message["role"] == role:
            first = message["content"]
            told = _join(first, description) if role == "system" else _join(description, first)
            rest[number] = message | {"content": told}
            return rest
        if role == "system":
            break
    return [{"role": role, "content": description}, *rest]


def _join(first: Any, second: Any, between: str = "\n\n") -> Any:
    """Return two contents as one; each is a text or a list of texts and vectors."""
    if isinstance(first, str) and isinstance(second, str):
        return first + between + second if first and second else first + second
    parts = [first] if isinstance(first, str) else list(first)
    rest = [second] if isinstance(second, str) else list(second)
    return [*parts, between, *rest]


def _with_short_ids(message: Json) -> Json:
    """Return a message with ids of nine letters or digits."""
    if message.get("tool_calls"):
        calls = [call | {"id": _short(call["id"])} for call in message["tool_calls"]]
        return message | {"tool_calls": calls}
    if message["role"] == "tool":
        return message | {"tool_call_id": _short(message["tool_call_id"])}
    return message


def _short(id_: str) -> str:
    if len(id_) == 9 and id_.isascii() and id_.isalnum():
        return id_
    return hashlib.blake2b(id_.encode(), digest_size=8).hexdigest()[:9]
